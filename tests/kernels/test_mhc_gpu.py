"""The decode step's hyper-connection kernels give what the reference gives."""

import pytest
import torch
from step_support import DTYPES, blank, check, rand, there
from torch import Tensor

from dsv4.gpu.tiles import tile
from dsv4.ops.linear import cpu as linear
from dsv4.ops.linear.decode import MatVec, Mixing, Product
from dsv4.ops.mhc import cpu
from dsv4.ops.mhc import decode as mhc
from dsv4.ops.rows.cpu import rms_norm
from dsv4.quant.codec import encode_weight
from dsv4.quant.formats import Format

pytestmark = pytest.mark.gpu
N, M = 4, 24
EPS, HC_EPS = 1e-6, 1e-6
ITERS = 20
# Rows, channels, parts of the output: odd sizes, V4-Flash, more rows than blocks of a chunk.
SIZES = [(1, 96, 1), (2, 40, 2), (9, 33, 3), (5, 4096, 9), (32, 7168, 7)]
# What mhc/decode_mix.cu and a product's launch make of it: eight channels at a time.
WHOLE = [(1, 96, 1), (9, 40, 2), (33, 72, 3), (3, 4096, 7), (2, 7168, 1)]


def site(d: int, mixes: int) -> tuple[Tensor, Tensor, Tensor]:
    fn = rand(mixes, N * d, seed=1) * d**-0.5
    scale = torch.tensor([0.7, 1.3, 0.9])[: 3 if mixes == M else 1]
    counts = torch.tensor([N, N, N * N])[: len(scale)]
    return fn, rand(mixes, seed=2), scale.repeat_interleave(counts)


def check_products(partial: Tensor, streams: Tensor, fn: Tensor) -> None:
    """From the streams the kernel made: a rounding that fell the other way is no error of the rest."""
    made = streams.cpu().double().flatten(1)
    sums = partial.cpu().double().sum(1)
    check(sums[:, N].float(), made.square().sum(1).float(), "squares", share=1e-6)
    columns = [m + (m >= N) for m in range(len(fn))]
    check(sums[:, columns].float(), (made @ fn.double().t()).float(), "mixes", share=1e-6)


def opened(streams: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
    """The streams, which nothing changed, and their products with fn."""
    rows, _, d = streams.shape
    held, partial = there(streams), blank(rows, mhc.num_chunks(d), mhc.WIDTH)
    comb = torch.eye(N).expand(rows, N, N).contiguous()
    mhc.mix_open(
        there(torch.zeros(rows, 1, d)), there(torch.zeros(rows, N)), there(comb), held, there(fn), partial
    )
    assert torch.equal(held.cpu(), streams)
    return held, partial


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", DTYPES)
@pytest.mark.parametrize(("rows", "d"), [(4, 1100), (1, 4096), (9, 40)])
def test_embed(rows: int, d: int, wide: torch.dtype, dtype: torch.dtype) -> None:
    """Whatever lay in the streams; an id of -1 is the first token's."""
    table = rand(7, d, dtype=wide)
    ids = torch.tensor([6, 0, 3, 3, -1, 2, 1, 5, 4])[-rows:]
    out, partial = blank(rows, N, d, dtype=dtype), blank(rows, mhc.num_chunks(d), mhc.WIDTH)
    fn, _, _ = site(d, M)
    mhc.embed_open(there(ids), there(table), out, there(fn), partial)
    assert torch.equal(out.cpu(), table[ids.clamp(min=0)].to(dtype).unsqueeze(1).expand(-1, N, -1))
    check_products(partial, out, fn)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "d", "parts"), SIZES)
def test_open(rows: int, d: int, parts: int, dtype: torch.dtype) -> None:
    streams = rand(rows, N, d, seed=3, dtype=dtype) * 3
    y, gate, comb = rand(rows, parts, d, seed=5), rand(rows, N, seed=6), rand(rows, N, N, seed=7)
    for mixes, given in ((M, y), (M, y.to(dtype)), (N, y)):
        fn, _, _ = site(d, mixes)
        held, partial = there(streams), blank(rows, mhc.num_chunks(d), mhc.WIDTH)
        mhc.mix_open(there(given), there(gate), there(comb), held, there(fn), partial)
        want = cpu.post(given.float().sum(1).to(dtype), streams, gate, comb)
        check(held, want, "streams", ulps=3)
        check_products(partial, held, fn)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "d", "parts"), WHOLE)
def test_site(rows: int, d: int, parts: int, dtype: torch.dtype) -> None:
    streams, weight = rand(rows, N, d, seed=3, dtype=dtype) * 3, rand(d, seed=4)
    y, gate, comb = rand(rows, parts, d, seed=5), rand(rows, N, seed=6), rand(rows, N, N, seed=7)
    fn, base, scale = site(d, M)
    held, partial = there(streams), blank(rows, mhc.num_chunks(d), mhc.WIDTH)
    mhc.mix_open(there(y), there(gate), there(comb), held, there(fn), partial)
    x, g, c = close(partial, base, scale, held, weight)
    want = cpu.pre(held.cpu(), fn.t().contiguous(), base, scale, EPS, HC_EPS, ITERS)
    check(x, rms_norm(want[0], weight, EPS), "x", ulps=3, share=1e-5)
    check(g, want[1], "gate", ulps=8, share=1e-5)
    check(c, want[2], "comb", ulps=8, share=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "d", "parts"), WHOLE)
def test_head(rows: int, d: int, parts: int, dtype: torch.dtype) -> None:
    streams, weight = rand(rows, N, d, seed=3, dtype=dtype), rand(d, seed=4)
    fn, base, scale = site(d, N)
    held, partial = opened(streams, fn)
    x = blank(rows, d, dtype=dtype)
    mhc.mix_close(partial, there(base), there(scale), held, there(weight), x, None, None, EPS, HC_EPS)
    want = cpu.head(streams, fn.t().contiguous(), base, scale, EPS, HC_EPS)
    check(x, rms_norm(want, weight, EPS), "x", ulps=3, share=1e-5)


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
    held, partial = opened(streams, fn)
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


def test_extreme_logits() -> None:
    """Sinkhorn of a matrix far from even, and shares at both ends."""
    streams, weight = rand(2, N, 64, seed=3), rand(64, seed=4)
    fn, base, scale = site(64, M)
    base = base * 30
    held, partial = opened(streams, fn)
    _, g, c = close(partial, base, scale, held, weight)
    want = cpu.pre(streams, fn.t().contiguous(), base, scale, EPS, HC_EPS, ITERS)
    check(g, want[1], "gate", ulps=64, share=1e-5)
    check(c, want[2], "comb", ulps=64, share=2e-5)


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
