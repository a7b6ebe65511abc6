"""Index scores of a decode step are the reference's, through shared pages and up to the last visible key."""

import pytest
import torch
from step_support import DTYPES, blank, check, moved, on_gpu, rand, runs, there

from dsv4.ops.index import cpu
from dsv4.quant.codec import decode, encode_kv, mxfp4_round
from dsv4.quant.formats import Format

kernels = pytest.importorskip("dsv4.ops.index.decode", reason="Triton is not installed")
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
    # Programs of many keys, and of few; index/decode.cu, where it serves, in two forms. Few walk over keys.
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
        table = decode(keys.take(cpu.pool_rows(page_table, int(slots[t]), count, page)))
        dots = (iq[t].double() @ table.double().t()).relu()
        wide = weights[t].float() * factor
        want = (dots * wide.double().unsqueeze(1)).sum(0)
        # Float32 sums of di products and of the heads.
        size = (iq[t].double().abs() @ table.double().t().abs() * wide.double().abs().unsqueeze(1)).sum(0)
        got = out[t, :count].cpu().double()
        assert bool(((got - want).abs() <= (di + heads) * 2.0**-24 * size).all()), t
        assert bool(out[t, count:].isnan().all()), f"row {t}: written beyond {count}"
    check(out[1:2, :0], torch.empty(1, 0), "nothing visible at position 0")


@on_gpu
def test_hostile_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every scale, queries of any size, zeros of both signs, infinity, NaN, zero times infinity: whoever has
    a row, alone or in a batch, gives it the same scores to the bit."""
    heads, di, ratio, page, pages = 64, 128, 4, 64, 20
    cap, generator = page * pages, torch.Generator().manual_seed(1)
    keys = encode_kv(rand(cap, di, seed=1), 0, Format.MXFP4)
    assert keys.scale is not None
    keys.data.copy_(torch.randint(0, 256, keys.data.shape, generator=generator))
    keys.scale.copy_(torch.randint(0, 192, keys.scale.shape, generator=generator))
    keys.scale[:256] = torch.arange(256).unsqueeze(1)
    iq, weights = rand(8, heads, di, seed=2), rand(8, heads, seed=3)
    iq *= 2.0 ** torch.tensor([0, -130, -60, 60, 100, 0, 0, 0]).view(8, 1, 1)
    iq[5, ::2], iq[6, 7, 3], iq[7, 9, 5] = -0.0, torch.inf, torch.nan
    weights[0, 5], weights[1], weights[5, :20], weights[5, 20:40] = (
        torch.inf,
        weights[1] * 2.0**-125,
        0.0,
        -0.0,
    )
    weights[6, :30] = 0.0
    given = (
        *(there(mxfp4_round(iq).bfloat16()), there(weights.bfloat16()), moved(keys)),
        there(torch.randperm(pages, generator=generator).int().unsqueeze(0)),
        *(there(torch.zeros(8, dtype=torch.long)), there(torch.full((8,), cap * ratio - 1))),
    )
    outs = []
    for multiprocessors, single, most in ((0, 0, 264), (1 << 30, 0, 264), (0, 8, 264), (0, 8, 5)):
        monkeypatch.setattr(kernels, "MULTIPROCESSORS", multiprocessors)
        monkeypatch.setattr(kernels, "MAX_ROWS", single)
        monkeypatch.setattr(kernels, "MAX_PROGRAMS", most)
        out = torch.full((8, cap), 77.0, device=given[0].device)
        kernels.scores(*given, out, ratio, page, di**-0.5 * heads**-0.5)
        outs.append(out.where(~out.isnan(), torch.nan).view(torch.int32))
    for row in range(8):
        assert bool(outs[0][row].view(torch.float32).isnan().any()), f"row {row}: no NaN"
        for i, other in enumerate(outs[1:], 1):
            differ = int((outs[0][row] != other[row]).sum())
            assert not differ, f"row {row}: {differ} of {cap} scores are other ones in form {i}"
