"""attention.cu's own source on the CPU, every block of a cluster at once in shuffled orders, against the
reference; on a GPU the kernel itself."""

import ctypes

import pytest
import torch
from step_support import check, rand
from torch import Tensor

from dsv4.kernels.decode import attention
from dsv4.ops.attend import ref
from dsv4.ops.index.ref import visible_rows
from dsv4.quant.codec import encode_kv
from dsv4.quant.formats import Format
from tests.support.twin import build, needs_compiler

pytestmark = needs_compiler
D, ROPE, WINDOW, RING, SLOTS, EPS = 512, 64, 128, 136, 3, 1e-6
BF16 = torch.bfloat16
SHARE = 2.0**-7  # weights rounded relative to another maximum


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = build("attention", tmp_path_factory)
    loaded.attend.restype = ctypes.c_char_p
    return loaded


class Case:
    """Rows at these positions of a layer of one kind: window, listed (CSA) or visible (HCA)."""

    def __init__(
        self, kind: str, positions: list[int], heads: int, ratio: int, page: int, topk: int = 512
    ) -> None:
        self.kind, self.ratio, self.page = kind, ratio, page
        self.positions, count = torch.tensor(positions), len(positions)
        self.slots = torch.arange(count) % SLOTS
        pages = max(1, -(-(max(positions) + 1) // ratio // page))
        generator = torch.Generator().manual_seed(9)
        self.page_table = torch.randperm(SLOTS * pages, generator=generator).view(SLOTS, pages).int()
        self.q = rand(count, heads, D, seed=1, dtype=BF16) * 3
        self.sinks = rand(heads, seed=2) * 3
        self.ring = encode_kv(rand(SLOTS * RING, D, seed=3, dtype=BF16), ROPE, Format.KV8)
        pool = encode_kv(rand(SLOTS * pages * page, D, seed=4, dtype=BF16), ROPE, Format.KV8)
        self.entries = None if kind == "window" else pool
        angles = torch.outer(torch.arange(max(positions) + 1), 0.3 ** torch.arange(ROPE // 2).float())
        self.cos, self.sin = angles.cos(), angles.sin()
        visible = visible_rows(self.page_table, self.slots, self.positions.clamp(min=0), ratio, page)
        self.listed: Tensor | None = None
        if kind == "listed":
            self.listed = torch.full((count, topk), -1, dtype=torch.int32)
            for row, places in enumerate(visible):
                seen = places[places >= 0]
                kept = torch.randperm(len(seen), generator=generator)[:topk].sort().values
                self.listed[row, : len(kept)] = seen[kept].int()
        self.keys = {"window": None, "visible": visible, "listed": self.listed}[kind]

    def arguments(self, out: Tensor) -> dict[str, object]:
        return {
            **{"q": self.q, "ring": self.ring, "ring_rows": RING, "window": WINDOW, "entries": self.entries},
            **{"listed": self.listed, "page_table": self.page_table, "page_entries": self.page},
            **{"ratio": self.ratio if self.entries is not None else 0, "slots": self.slots},
            **{"positions": self.positions, "sinks": self.sinks, "cos": self.cos, "sin": self.sin},
            **{"eps": EPS, "out": out},
        }

    def run(self, twin: ctypes.CDLL, tiles: int = 1, seed: int = 0) -> Tensor:
        out = torch.full_like(self.q, float("nan"))
        given = attention.arguments(**self.arguments(out))  # type: ignore[arg-type]
        problem = twin.attend(tiles, len(self.q), ctypes.byref(given), seed)
        assert problem == b"", problem.decode()
        return out

    def want(self) -> Tensor:
        live = self.positions >= 0
        slots, positions = self.slots[live], self.positions[live]
        fresh = self.ring.take(slots * RING + positions % RING)
        return ref.attend(
            *(self.q[live], fresh, self.ring, slots, positions, positions, WINDOW, RING, self.entries),
            *(None if self.keys is None else self.keys[live].long(), self.sinks),
            *(self.cos[positions], self.sin[positions]),
            eps=EPS,
        )

    def check(self, out: Tensor, what: str) -> None:
        live = self.positions >= 0
        check(out[live], self.want(), what, 4, SHARE)
        assert not out[~live].any(), "a row of padding is zero"


# Keys of one block: none, one, a few (two groups of 16), many (five), several passes.
CASES = {
    "window": Case("window", [0, 5, 127, 128, -1, 300], heads=8, ratio=4, page=64),
    "CSA": Case("listed", [3, 600, 4095, -1], heads=8, ratio=4, page=64),
    "HCA": Case("visible", [127, 4095, 700], heads=16, ratio=128, page=2),
    "HCA, long": Case("visible", [9000], heads=8, ratio=8, page=8),
}


@pytest.mark.parametrize("name", CASES)
def test_attend(twin: ctypes.CDLL, name: str) -> None:
    case = CASES[name]
    out = case.run(twin)
    case.check(out, name)
    assert torch.equal(case.run(twin, seed=1), out), "the order of events shows"
    if case.q.shape[1] == 16:
        assert torch.equal(case.run(twin, tiles=2), out), "so many heads at a time show"
