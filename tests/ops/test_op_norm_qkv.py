"""RMSNorm, queries, entries and the rows the cache keeps, against the specification."""

import math

import pytest
import torch
from ops_support import ROUND, check_close, exactly, one_more_rounding, rand

from dsv4.config import Yarn
from dsv4.model.rope import Rope
from dsv4.ops.attention import cpu
from dsv4.ops.rows.cpu import rms_norm
from dsv4.quant.codec import decode
from dsv4.quant.formats import Format
from dsv4.spec import ops as spec
from dsv4.spec.rounding import Rounding

YARN = Yarn(16, 65536, 32, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 7), (2, 3, 33), (4, 512)])
def test_rms_norm_against_the_specification(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (rand(*shape) * 3).to(dtype)
    weight = 1 + 0.1 * rand(shape[-1], seed=1)
    for w in (weight, None):
        got = rms_norm(x, w, 1e-6)
        assert got.dtype == dtype and got.shape == x.shape
        want = exactly(spec.rms_norm, x, w, 1e-6)
        # The mean's sum, square root, quotient, product; and the result's own rounding.
        bound = (shape[-1] + 5) * ROUND * want.abs() + one_more_rounding(want, dtype)
        check_close(got, want, bound, f"rms_norm {shape}")


def test_rms_norm_of_zeros_extremes_and_views() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 6), torch.ones(6), 1e-6), torch.zeros(2, 6))
    big = torch.full((1, 4), 1e18)
    check_close(rms_norm(big, None, 1e-6), torch.ones(1, 4), 8 * ROUND, "1e18")
    bad = torch.tensor([[1.0, math.nan], [1.0, 2.0]])
    assert (
        torch.isnan(rms_norm(bad, None, 1e-6)[0]).all() and torch.isfinite(rms_norm(bad, None, 1e-6)[1]).all()
    )
    x = rand(12, 9)
    want = rms_norm(x.t().contiguous(), None, 1e-6)
    check_close(
        rms_norm(x.t(), None, 1e-6), want, 34 * ROUND * want.abs(), "the sum of another memory layout"
    )
    whole = rms_norm(x, None, 1e-6)
    assert all(torch.equal(rms_norm(x[t : t + 1], None, 1e-6)[0], whole[t]) for t in range(12))


@pytest.mark.parametrize(("theta", "yarn"), [(10000.0, None), (160000.0, YARN)])
def test_an_engines_table_is_the_specifications(theta: float, yarn: Yarn | None) -> None:
    """Any positions, in any order, out of a table made once."""
    positions = torch.tensor([127, 0, 65535, 1, 999, 65536])
    for got, want in zip(
        Rope(theta, 64, yarn, 65537, "cpu")(positions),
        spec.rope_table(positions, theta, 64, yarn),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_queries_norm_each_head_and_rotate() -> None:
    q, angle = rand(3, 5, 12), rand(3, 2, seed=1)
    cos, sin = angle.cos(), angle.sin()
    got = cpu.queries(q, cos, sin, 1e-6)
    want = exactly(spec.rotate_heads, exactly(spec.rms_norm, q, None, 1e-6), cos, sin)
    check_close(got, want, 40 * ROUND * 12**0.5, "queries")
    pair = 2 * angle.shape[1]
    assert not torch.equal(got[..., -pair:], rms_norm(q, None, 1e-6)[..., -pair:])
    assert torch.equal(got[..., :-pair], rms_norm(q, None, 1e-6)[..., :-pair])


def test_entries_use_the_weight() -> None:
    x, weight, angle = rand(4, 12), rand(12, seed=2), rand(4, 2, seed=1)
    got = cpu.entries(x, weight, angle.cos(), angle.sin(), 1e-6)
    want = exactly(spec.rotate, exactly(spec.rms_norm, x, weight, 1e-6), angle.cos(), angle.sin())
    check_close(got, want, 40 * ROUND * 12**0.5, "entries")
    assert not torch.equal(got[:, :8], rms_norm(x, None, 1e-6)[:, :8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", [Format.KV8, Format.BF16, Format.F32])
def test_store_rounds_unrotated_channels_in_blocks_of_64(format: Format, dtype: torch.dtype) -> None:
    """All cache formats hold the same values with qat; without it, the values given (or their BF16)."""
    nope, rope_dim = 150, 16
    kv = (rand(5, nope + rope_dim) * torch.tensor([1e-6, 1.0, 30.0, 1e4, 0.0]).unsqueeze(1)).to(dtype)
    kv[:, 64:128] *= 1e5  # with the scale of this block, the one before would be subnormal
    want = Rounding().entry(kv, rope_dim).float()
    assert not torch.equal(want, kv.float())
    if format is Format.BF16:
        want = want.bfloat16().float()
    assert torch.equal(decode(cpu.store(kv, rope_dim, format, qat=True)), want)
    if format is not Format.KV8:
        plain = kv.bfloat16().float() if format is Format.BF16 else kv.float()
        assert torch.equal(decode(cpu.store(kv, rope_dim, format, qat=False)), plain)


def test_no_rows_are_stored() -> None:
    assert decode(cpu.store(torch.zeros(0, 66), 2, Format.KV8, qat=True)).shape == (0, 66)


def test_rows_that_are_not_finite() -> None:
    """Infinity is the largest value of its block, NaN its whole block: where the specification has them."""
    kv = rand(3, 150)
    kv[0, 3], kv[1, 70], kv[2, 145] = math.inf, math.nan, -math.inf
    for format in (Format.KV8, Format.F32):
        check_close(decode(cpu.store(kv, 16, format, qat=True)), Rounding().entry(kv, 16), 0.0, f"{format}")
