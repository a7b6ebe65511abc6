"""Index scores of a decode step are the reference's, through shared pages and up to the last visible key."""

import pytest
import torch
from step_support import DTYPES, blank, check, moved, on_gpu, rand, runs, there

from dsv4.ops.index import ref
from dsv4.quant.codec import decode, encode_kv, mxfp4_round
from dsv4.quant.formats import Format

kernels = pytest.importorskip("dsv4.kernels.decode.index", reason="Triton is not installed")
pytestmark = runs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "di", "ratio", "page", "pages", "programs"),
    [
        (3, 32, 4, 6, 60, 1),
        (8, 64, 2, 64, 6, 264),
        pytest.param(64, 128, 4, 64, 1200, 264, marks=on_gpu),
    ],
)
def test_scores(
    heads: int,
    di: int,
    ratio: int,
    page: int,
    pages: int,
    programs: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cap = page * pages
    positions = torch.tensor([cap * ratio - 1, 0, -1, ratio - 1, ratio * 128 + 1, cap * ratio - 2])
    slots = torch.tensor([2, 1, 0, 3, 2, 3])
    rows, spread = len(positions), torch.logspace(-6, 3, 3 * cap).unsqueeze(1)
    keys = encode_kv(rand(3 * cap, di, seed=1) * spread[torch.randperm(3 * cap)], 0, Format.MXFP4)
    page_table = torch.randint(0, 3 * pages, (4, pages), generator=torch.Generator().manual_seed(2)).int()
    page_table[3] = page_table[2]  # a fork
    iq = mxfp4_round(rand(rows, heads, di, seed=3)).to(dtype)
    weights, factor = rand(rows, heads, seed=4, dtype=dtype), di**-0.5 * heads**-0.5
    outs = []
    # Programs of many keys, and of few; index.cu, where it serves, in two forms. Few programs walk over keys.
    for multiprocessors, single, most in (
        *((0, 0, programs), (1 << 30, 0, programs)),
        *((0, rows, programs), (0, rows, 1 << 30)),
    ):
        monkeypatch.setattr(kernels, "MULTIPROCESSORS", multiprocessors)
        monkeypatch.setattr(kernels, "MAX_ROWS", single)
        monkeypatch.setattr(kernels, "MAX_PROGRAMS", most)
        outs.append(out := blank(rows, cap))
        kernels.scores(
            *(there(iq), there(weights), moved(keys), there(page_table), there(slots), there(positions)),
            *(out, ratio, page, factor),
        )
    for other in outs[1:]:
        assert torch.equal(outs[0].view(torch.int32), other.view(torch.int32)), "a row alone has other scores"
    for t in range(rows):
        count = (int(positions[t]) + 1) // ratio
        table = decode(keys.take(ref.pool_rows(page_table, int(slots[t]), count, page)))
        dots = (iq[t].double() @ table.double().t()).relu()
        wide = weights[t].float() * factor
        want = (dots * wide.double().unsqueeze(1)).sum(0)
        # Float32 sums of di products and of the heads.
        size = (iq[t].double().abs() @ table.double().t().abs() * wide.double().abs().unsqueeze(1)).sum(0)
        got = out[t, :count].cpu().double()
        assert bool(((got - want).abs() <= (di + heads) * 2.0**-24 * size).all()), t
        assert bool(out[t, count:].isnan().all()), f"row {t}: written beyond {count}"
    check(out[1:2, :0], torch.empty(1, 0), "nothing visible at position 0")
