"""The decode step's hyper-connection kernels give what the reference gives."""

import pytest
import torch
from step_support import DTYPES, IS_GPU, blank, check, on_gpu, rand, runs, there
from torch import Tensor

from dsv4.ops.linear import ref as linear
from dsv4.ops.mhc import ref
from dsv4.ops.norm.ref import rms_norm
from dsv4.quant.formats import Format, QuantTensor

mhc = pytest.importorskip("dsv4.kernels.mhc", reason="Triton is not installed")
pytestmark = runs
N, M = 4, 24
EPS, HC_EPS = 1e-6, 1e-6
ITERS = 20 if IS_GPU else 3  # the interpreter takes a while for each
# Rows, channels, parts of the output: odd sizes, more rows than programs along T, and V4-Flash.
SIZES = [(1, 96, 1), (2, 40, 2), (9, 33, 3), pytest.param(5, 4096, 4, marks=on_gpu)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed(dtype: torch.dtype) -> None:
    table = rand(7, 1100, dtype=torch.bfloat16)
    ids = torch.tensor([6, 0, 3, 3])
    out = blank(4, N, 1100, dtype=dtype)
    mhc.embed(there(ids), there(table), out)
    want = linear.embed(ids, QuantTensor(Format.BF16, table, (7, 1100)), dtype)
    assert torch.equal(out.cpu(), want.unsqueeze(1).expand(-1, N, -1))


def site(d: int, mixes: int) -> tuple[Tensor, Tensor, Tensor]:
    fn = rand(mixes, N * d, seed=1) * d**-0.5
    scale = torch.tensor([0.7, 1.3, 0.9])[: 3 if mixes == M else 1]
    counts = torch.tensor([N, N, N * N])[: len(scale)]
    return fn, rand(mixes, seed=2), scale.repeat_interleave(counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "d", "parts"), SIZES)
def test_site(rows: int, d: int, parts: int, dtype: torch.dtype) -> None:
    streams, weight = rand(rows, N, d, seed=3, dtype=dtype) * 3, rand(d, seed=4)
    y, gate, comb = rand(rows, parts, d, seed=5), rand(rows, N, seed=6), rand(rows, N, N, seed=7)
    fn, base, scale = site(d, M)
    new = ref.post(y.sum(1).to(dtype), streams, gate, comb)

    cases = [(y, new), (None, streams), (y.to(dtype), None)]
    for given, want_streams in cases[: None if rows < 9 else 1]:
        held, partial = there(streams), blank(rows, mhc.num_chunks(d), mhc.WIDTH)
        g, c = there(gate), there(comb)
        mhc.mix_open(None if given is None else there(given), g, c, held, there(fn), partial)
        if want_streams is None:
            want_streams = ref.post(given.float().sum(1).to(dtype), streams, gate, comb)
        check(held, want_streams, "streams", ulps=3)
        x, g, c = blank(rows, d, dtype=dtype), blank(rows, N), blank(rows, N, N)
        mhc.mix_close(
            *(partial, there(base), there(scale), held, there(weight), x, g, c, EPS, HC_EPS, ITERS),
        )
        # From the streams the kernel made: a rounding that fell the other way is no error of the rest.
        made = held.cpu()
        want = ref.pre(made, fn.t().contiguous(), base, scale, EPS, HC_EPS, ITERS)
        check(x, rms_norm(want[0], weight, EPS), "x", ulps=3, share=1e-5)
        check(g, want[1], "gate", ulps=8, share=1e-5)
        check(c, want[2], "comb", ulps=8, share=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "d", "parts"), SIZES)
def test_head(rows: int, d: int, parts: int, dtype: torch.dtype) -> None:
    streams, weight = rand(rows, N, d, seed=3, dtype=dtype), rand(d, seed=4)
    fn, base, scale = site(d, N)
    held, partial = there(streams), blank(rows, mhc.num_chunks(d), mhc.WIDTH)
    x = blank(rows, d, dtype=dtype)
    mhc.mix_open(None, None, None, held, there(fn), partial)
    mhc.mix_close(
        *(partial, there(base), there(scale), held, there(weight), x, None, None, EPS, HC_EPS, ITERS)
    )
    want = ref.head(streams, fn.t().contiguous(), base, scale, EPS, HC_EPS)
    check(x, rms_norm(want, weight, EPS), "x", ulps=3, share=1e-5)


def test_extreme_logits() -> None:
    """Sinkhorn of a matrix far from even, and shares at both ends."""
    streams, weight = rand(2, N, 64, seed=3), rand(64, seed=4)
    fn, base, scale = site(64, M)
    base = base * 30
    held, partial = there(streams), blank(2, mhc.num_chunks(64), mhc.WIDTH)
    x, g, c = blank(2, 64), blank(2, N), blank(2, N, N)
    mhc.mix_open(None, None, None, held, there(fn), partial)
    mhc.mix_close(*(partial, there(base), there(scale), held, there(weight), x, g, c, EPS, HC_EPS, 20))
    want = ref.pre(streams, fn.t().contiguous(), base, scale, EPS, HC_EPS, 20)
    check(g, want[1], "gate", ulps=64, share=1e-5)
    check(c, want[2], "comb", ulps=64, share=2e-5)


def test_row_alone() -> None:
    """A row gives the same bits alone as among nine."""
    d, rows = 64, 9
    streams, weight, y = (
        rand(rows, N, d, seed=3, dtype=torch.bfloat16),
        rand(d, seed=4),
        rand(rows, 1, d, seed=5),
    )
    gate, comb = rand(rows, N, seed=6), rand(rows, N, N, seed=7)
    fn, base, scale = site(d, N)
    found = []
    for part in (slice(None), slice(4, 5)):
        held = there(streams[part])
        count = len(held)
        partial, x = blank(count, mhc.num_chunks(d), mhc.WIDTH), blank(count, d, dtype=torch.bfloat16)
        mhc.mix_open(there(y[part]), there(gate[part]), there(comb[part]), held, there(fn), partial)
        mhc.mix_close(
            *(partial, there(base), there(scale), held, there(weight), x, None, None, EPS, HC_EPS, ITERS)
        )
        found.append((held, x))
    for all_rows, alone in zip(*found, strict=True):
        assert torch.equal(all_rows[4:5], alone)
