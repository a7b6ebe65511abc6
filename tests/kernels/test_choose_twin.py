"""index/decode_select.cu's own source on the CPU, warps and blocks in shuffled orders, against the
reference."""

import ctypes
import re

import pytest
import torch
from torch import Tensor

from dsv4.gpu import architectures, build
from dsv4.ops.index import decode_select as selecting
from dsv4.ops.route.cpu import top_indices
from tests.support.twin import needs_compiler, twin_of, unfinished

pytestmark = needs_compiler
PAGE, RATIO = 24, 4


twin = twin_of("choose", launch=ctypes.c_char_p)


def run(
    twin: ctypes.CDLL, scores: Tensor, counts: list[int], topk: int, seed: int = 0, mixed: bool = True
) -> Tensor:
    """Places of the chosen, by the launches that select_rows makes. With odd seeds as in a step. Scores are
    noise until a launch waits."""
    rows, capacity = scores.shape
    generator = torch.Generator().manual_seed(seed)
    pages = torch.stack(
        [torch.randperm(-(-capacity // PAGE), generator=generator) for _ in range(rows)]
    ).int()
    slots, out = torch.randperm(rows, generator=generator), torch.full((rows, topk), 77, dtype=torch.int32)
    positions = torch.tensor(counts) * RATIO - 1 + torch.tensor([i % RATIO for i in range(rows)])

    def call(source: str, kernel: str, device: torch.device, given: ctypes.Structure, **how: int) -> None:
        warps = int(match[1]) if (match := re.search(r"few_kernel<(\d+)", kernel)) else 0
        assert given.warms == how["overlap"], "work done twice, for nobody"
        with unfinished(twin, scores, out):
            for row in range(rows):
                problem = twin.launch(ctypes.byref(given), row, warps, how["shared"], seed + row)
                assert problem == b"", problem.decode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selecting, "call", call)
        patch.setattr(architectures, "capability", lambda device: 90)
        selecting.select_rows(
            scores=scores,
            positions=positions,
            ratio=RATIO,
            page_table=pages,
            slots=slots,
            page_entries=PAGE,
            out=out,
            overlap=seed % 2 == 1,
            mixed=mixed,
        )
    table = pages[slots].long()
    for row, count in enumerate(counts):
        best = top_indices(scores[row : row + 1, :count], min(topk, count))[0].sort().values
        places = table[row][best // PAGE] * PAGE + best % PAGE
        assert out[row, : len(best)].tolist() == places.tolist(), (row, count)
        assert out[row, len(best) :].eq(-1).all()
    return out


def hostile(kind: str, rows: int, count: int, generator: torch.Generator) -> Tensor:
    scores = torch.randn(rows, count, generator=generator)
    match kind:
        case "equal":
            scores[:] = -0.25
        case "few values":
            scores = scores.round()
        case "close":  # alike in all but the last 21 bits
            scores = 1 + torch.randint(0, 1 << 21, scores.shape, generator=generator) * 2.0**-23
        case "two clumps":  # both far apart and close together: every round of bins is needed
            scores = torch.where(scores > 0.4, 1e30, 1.0) * (1 + torch.arange(count) % 97 * 2.0**-23)
        case "signs":
            scores[:, ::3] = 0.0
            scores[:, 1::3] = -0.0
        case "ends":
            scores[:, ::5] = torch.inf
            scores[:, 1::5] = -torch.inf
            scores[:, 2::5] = torch.nan
            scores[0, 2::5] = -torch.tensor(torch.nan)
    return scores


@pytest.mark.parametrize("kind", ["plain", "equal", "few values", "close", "two clumps", "signs", "ends"])
@pytest.mark.parametrize(("count", "topk"), [(1088, 512), (300, 299), (513, 512), (1280, 1), (4000, 512)])
def test_few(twin: ctypes.CDLL, kind: str, count: int, topk: int) -> None:
    scores = hostile(kind, 3, count, torch.Generator().manual_seed(count))
    for seed in range(2):
        run(twin, scores, [count, count - 1, topk // 2], topk, seed)
        run(twin, scores, [topk, 0, topk + 1], topk, seed)


@pytest.mark.parametrize("kind", ["plain", "two clumps", "ends"])
def test_many(twin: ctypes.CDLL, kind: str) -> None:
    """Rows of more entries than a block takes, beside ones of fewer: each is another launch's."""
    count = 9001
    scores = hostile(kind, 2, count, torch.Generator().manual_seed(3))
    run(twin, scores, [count, 700], 512, seed=1)


def test_few_in_a_cache_for_many(twin: ctypes.CDLL) -> None:
    """One block of the cluster takes a row that is short; a launch for both kinds of rows."""
    scores = hostile("few values", 5, 9001, torch.Generator().manual_seed(4))
    for seed in range(2):
        run(twin, scores, [1040, 8192, 8193, 512, 0], 512, seed, mixed=False)


def test_shared_memory_is_what_the_source_takes() -> None:
    sizes = re.findall(r"sizeof\((\w+)\) == (\d+)", build.source_path("index/decode_select").read_text())
    assert dict(sizes) == {"Few": str(selecting.FEW_SHARED), "Many": str(selecting.MANY_SHARED)}
