"""The decode step's hyper-connection kernels give what the reference gives."""

import pytest
import torch
from step_support import DTYPES, blank, check, on_gpu, rand, runs, there
from torch import Tensor

from dsv4.kernels.common.tiles import tile
from dsv4.kernels.decode.matvec import MatVec, Mixing, Product
from dsv4.ops.linear import ref as linear
from dsv4.ops.mhc import ref
from dsv4.ops.norm.ref import rms_norm
from dsv4.quant.codec import encode_weight
from dsv4.quant.formats import Format, QuantTensor

mhc = pytest.importorskip("dsv4.kernels.decode.mhc", reason="Triton is not installed")
pytestmark = runs
N, M = 4, 24
EPS, HC_EPS = 1e-6, 1e-6
ITERS = 20
# Rows, channels, parts of the output: odd sizes, more rows than programs along T, and V4-Flash.
SIZES = [(1, 96, 1), (2, 40, 2), (9, 33, 3), pytest.param(5, 4096, 4, marks=on_gpu)]
# What mix.cu and a product's launch make of it: eight channels at a time.
WHOLE = [(1, 96, 1), (9, 40, 2), (33, 72, 3), (3, 4096, 7), (2, 7168, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed(dtype: torch.dtype) -> None:
    table = rand(7, 1100, dtype=torch.bfloat16)
    ids = torch.tensor([6, 0, 3, 3])
    out = blank(4, N, 1100, dtype=dtype)
    mhc.embed(there(ids), there(table), out)
    want = linear.embed(ids, QuantTensor(Format.BF16, table, (7, 1100)), dtype)
    assert torch.equal(out.cpu(), want.unsqueeze(1).expand(-1, N, -1))


def test_programs() -> None:
    """One a row while all are resident at once; 32 rows of V4-Flash in one wave, of V4-Pro in three."""
    for d, most in ((64, 8), (1024, 8), (4096, 5), (7168, 2)):
        chunks = mhc.num_chunks(d)
        assert [mhc.programs(rows, chunks) for rows in range(1, most + 1)] == list(range(1, most + 1))
        for rows in (6, 8, 9, 16, 32, 33):
            assert mhc.programs(rows, chunks) <= min(rows, mhc.MAX_PROGRAMS)
    assert mhc.programs(32, mhc.num_chunks(4096)) == 5 and mhc.programs(32, mhc.num_chunks(7168)) == 8


def site(d: int, mixes: int) -> tuple[Tensor, Tensor, Tensor]:
    fn = rand(mixes, N * d, seed=1) * d**-0.5
    scale = torch.tensor([0.7, 1.3, 0.9])[: 3 if mixes == M else 1]
    counts = torch.tensor([N, N, N * N])[: len(scale)]
    return fn, rand(mixes, seed=2), scale.repeat_interleave(counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "d", "parts"), SIZES)
def test_open(rows: int, d: int, parts: int, dtype: torch.dtype) -> None:
    streams = rand(rows, N, d, seed=3, dtype=dtype) * 3
    y, gate, comb = rand(rows, parts, d, seed=5), rand(rows, N, seed=6), rand(rows, N, N, seed=7)
    for mixes, given in ((M, y), (M, None), (M, y.to(dtype)), (N, y))[: None if rows < 9 else 1]:
        fn, _, _ = site(d, mixes)
        held, partial = there(streams), blank(rows, mhc.num_chunks(d), mhc.WIDTH)
        mhc.mix_open(
            None if given is None else there(given), there(gate), there(comb), held, there(fn), partial
        )
        want = streams if given is None else ref.post(given.float().sum(1).to(dtype), streams, gate, comb)
        check(held, want, "streams", ulps=3)
        # From the streams the kernel made: a rounding that fell the other way is no error of the rest.
        made = held.cpu().double().flatten(1)
        sums = partial.cpu().double().sum(1)
        check(sums[:, N].float(), made.square().sum(1).float(), "squares", share=1e-6)
        columns = [m + (m >= N) for m in range(mixes)]
        check(sums[:, columns].float(), (made @ fn.double().t()).float(), "mixes", share=1e-6)


def close(
    partial: Tensor, base: Tensor, scale: Tensor, streams: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x, gate and comb; Sinkhorn's rounds beside a small product, which must come out as without."""
    rows, _, d = streams.shape
    x, g, c = blank(rows, d, dtype=streams.dtype), blank(rows, N), blank(rows, N, N)
    mhc.mix_close(partial, there(base), there(scale), streams, there(weight), x, g, c, EPS, HC_EPS)
    w = tile(encode_weight(rand(48, 64, seed=8).cuda(), Format.NVFP4))
    small = rand(rows, 64, seed=9, dtype=streams.dtype).cuda()
    y, alone = blank(rows, 48, dtype=streams.dtype), blank(rows, 48, dtype=streams.dtype)
    MatVec([Product(w, small, y)], rows, mixing=Mixing(c, ITERS, HC_EPS)).launch()
    MatVec([Product(w, small, alone)], rows).launch()
    assert torch.equal(y, alone)
    return x, g, c


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "d", "parts"), WHOLE)
def test_site(rows: int, d: int, parts: int, dtype: torch.dtype) -> None:
    streams, weight = rand(rows, N, d, seed=3, dtype=dtype) * 3, rand(d, seed=4)
    y, gate, comb = rand(rows, parts, d, seed=5), rand(rows, N, seed=6), rand(rows, N, N, seed=7)
    fn, base, scale = site(d, M)
    held, partial = there(streams), blank(rows, mhc.num_chunks(d), mhc.WIDTH)
    mhc.mix_open(there(y), there(gate), there(comb), held, there(fn), partial)
    x, g, c = close(partial, base, scale, held, weight)
    want = ref.pre(held.cpu(), fn.t().contiguous(), base, scale, EPS, HC_EPS, ITERS)
    check(x, rms_norm(want[0], weight, EPS), "x", ulps=3, share=1e-5)
    check(g, want[1], "gate", ulps=8, share=1e-5)
    check(c, want[2], "comb", ulps=8, share=1e-5)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "d", "parts"), WHOLE)
def test_head(rows: int, d: int, parts: int, dtype: torch.dtype) -> None:
    streams, weight = rand(rows, N, d, seed=3, dtype=dtype), rand(d, seed=4)
    fn, base, scale = site(d, N)
    held, partial = there(streams), blank(rows, mhc.num_chunks(d), mhc.WIDTH)
    x = blank(rows, d, dtype=dtype)
    mhc.mix_open(None, None, None, held, there(fn), partial)
    mhc.mix_close(partial, there(base), there(scale), held, there(weight), x, None, None, EPS, HC_EPS)
    want = ref.head(streams, fn.t().contiguous(), base, scale, EPS, HC_EPS)
    check(x, rms_norm(want, weight, EPS), "x", ulps=3, share=1e-5)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activations", ["a8", "a4"])
@pytest.mark.parametrize(("rows", "d", "parts"), WHOLE)
def test_input_of_quantised_products(
    rows: int, d: int, parts: int, activations: str, dtype: torch.dtype
) -> None:
    """x is what it is without; beside it lies x as the reference rounds it, bit for bit."""
    streams, weight = rand(rows, N, d, seed=3, dtype=dtype), 30 * rand(d, seed=4)
    streams[0, 0, 1] = 3e4
    fn, base, scale = site(d, M)
    held, partial = there(streams), blank(rows, mhc.num_chunks(d), mhc.WIDTH)
    mhc.mix_open(None, None, None, held, there(fn), partial)
    want, _, _ = close(partial, base, scale, held, weight)
    x, x_in = blank(rows, d, dtype=dtype), blank(rows, d, dtype=dtype)
    mhc.mix_close(
        partial=partial,
        base=there(base),
        scale=there(scale),
        streams=held,
        weight=there(weight),
        x=x,
        gate=blank(rows, N),
        comb=blank(rows, N, N),
        norm_eps=EPS,
        hc_eps=HC_EPS,
        x_in=x_in,
        activations=activations,
    )
    assert torch.equal(x, want)
    assert torch.equal(x_in.cpu(), linear.round_input(x.cpu(), activations))


@on_gpu
def test_extreme_logits() -> None:
    """Sinkhorn of a matrix far from even, and shares at both ends."""
    streams, weight = rand(2, N, 64, seed=3), rand(64, seed=4)
    fn, base, scale = site(64, M)
    base = base * 30
    held, partial = there(streams), blank(2, mhc.num_chunks(64), mhc.WIDTH)
    mhc.mix_open(None, None, None, held, there(fn), partial)
    _, g, c = close(partial, base, scale, held, weight)
    want = ref.pre(streams, fn.t().contiguous(), base, scale, EPS, HC_EPS, ITERS)
    check(g, want[1], "gate", ulps=64, share=1e-5)
    check(c, want[2], "comb", ulps=64, share=2e-5)


@on_gpu
@pytest.mark.parametrize("rows", [2, 9, 32])
def test_row_alone(rows: int) -> None:
    """A row gives the same bits alone as among others."""
    d, act, one = 4096, torch.bfloat16, rows // 2
    streams, weight = rand(rows, N, d, seed=3, dtype=act), rand(d, seed=4)
    y, gate, comb = rand(rows, 7, d, seed=5, dtype=act), rand(rows, N, seed=6), rand(rows, N, N, seed=7)
    fn, base, scale = site(d, M)
    found = []
    for part in (slice(None), slice(one, one + 1)):
        held = there(streams[part])
        count = len(held)
        partial = blank(count, mhc.num_chunks(d), mhc.WIDTH)
        mhc.mix_open(there(y[part]), there(gate[part]), there(comb[part]), held, there(fn), partial)
        found.append((held, *close(partial, base, scale, held, weight)))
    for all_rows, alone in zip(*found, strict=True):
        assert torch.equal(all_rows[one : one + 1], alone)
