"""RMSNorm, queries, entries and the rows the cache keeps; rotation tables and their check values."""

import math

import numpy as np
import oracle
import pytest
import torch
from ops_support import ROUND, check_close, one_more_rounding, rand

from dsv4.config import Yarn
from dsv4.model.rope import Rope
from dsv4.ops._exact import rotate
from dsv4.ops.attention import cpu
from dsv4.ops.rows.cpu import rms_norm
from dsv4.quant.codec import decode
from dsv4.quant.formats import Format
from dsv4.spec.ops import rope_table

YARN = Yarn(16, 65536, 32, 1)
# pair -> frequency of the plain table (theta 10000) and of the YaRN table (theta 160000), 64 channels
FREQUENCIES = {
    0: (1.0, 1.0),
    8: (0.1, 0.05),
    15: (0.0133352149, 0.00363553851),
    16: (0.01, 0.00226562493),
    20: (0.00316227786, 0.000296977785),
    24: (0.001, 1.95312532e-05),
    25: (7.49894185e-4, 5.37231244e-06),
    31: (1.3335215e-4, 5.6805294e-07),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 7), (2, 3, 33), (4, 512)])
def test_rms_norm_against_loops(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (rand(*shape) * 3).to(dtype)
    weight = 1 + 0.1 * rand(shape[-1], seed=1)
    for w in (weight, None):
        got = rms_norm(x, w, 1e-6)
        assert got.dtype == dtype and got.shape == x.shape
        rows = x.flatten(0, -2).double()
        want = torch.zeros_like(rows)
        for r in range(rows.shape[0]):
            mean = sum(v * v for v in rows[r].tolist()) / shape[-1]
            for d in range(shape[-1]):
                want[r, d] = float(rows[r, d]) / math.sqrt(mean + 1e-6) * (1.0 if w is None else float(w[d]))
        # The mean's sum, square root, quotient, product; and the result's own rounding.
        bound = (shape[-1] + 5) * ROUND * want.abs() + one_more_rounding(want, dtype)
        check_close(got.flatten(0, -2), want, bound, f"rms_norm {shape}")


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


def test_frequency_check_values() -> None:
    """The angle at position 1."""
    one = torch.tensor([1])
    (plain,), (yarn,) = (
        torch.asin(rope_table(one, *table)[1].double())
        for table in ((10000.0, 64, None), (160000.0, 64, YARN))
    )
    assert plain.shape == yarn.shape == (32,)
    for pair, (want_plain, want_yarn) in FREQUENCIES.items():
        # The values are given with 9 digits; a few float32 roundings of power and sine are allowed.
        assert float(plain[pair]) == pytest.approx(want_plain, rel=4 * 2**-23), pair
        assert float(yarn[pair]) == pytest.approx(want_yarn, rel=4 * 2**-23), pair


def test_angles_are_float32_products_and_their_cosines_accurate() -> None:
    """At position 10**6 the rounded angle is off by hundredths; the reference has that error too."""
    rope = Rope(10000.0, 64, None, 1_000_001, "cpu")
    positions = torch.tensor([0, 1, 127, 65535, 999_999, 1_000_000])
    cos, sin = rope(positions)
    freqs = (1.0 / 10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)).numpy()
    for row, position in enumerate(positions.tolist()):
        for pair in range(32):
            angle = float(np.float32(position) * freqs[pair])
            assert float(cos[row, pair]) == float(np.float32(math.cos(angle))), (position, pair)
            assert float(sin[row, pair]) == float(np.float32(math.sin(angle))), (position, pair)
    exact = [1_000_000 * 10000.0 ** (-2 * pair / 64) for pair in range(32)]
    assert max(abs(math.cos(exact[i]) - float(cos[-1, i])) for i in range(32)) > 1e-3, (
        "not computed in float64"
    )


def test_queries_norm_each_head_and_rotate() -> None:
    q, angle = rand(3, 5, 12), rand(3, 2, seed=1)
    cos, sin = angle.cos(), angle.sin()
    got = cpu.queries(q, cos, sin, 1e-6)
    wide = q.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    want = rotate(normed.float(), cos, sin)
    check_close(got, want, 40 * ROUND * 12**0.5, "queries")
    pair = 2 * angle.shape[1]
    assert not torch.equal(got[..., -pair:], rms_norm(q, None, 1e-6)[..., -pair:])
    assert torch.equal(got[..., :-pair], rms_norm(q, None, 1e-6)[..., :-pair])


def test_entries_use_the_weight() -> None:
    x, weight, angle = rand(4, 12), rand(12, seed=2), rand(4, 2, seed=1)
    got = cpu.entries(x, weight, angle.cos(), angle.sin(), 1e-6)
    want = rotate(rms_norm(x, weight, 1e-6), angle.cos(), angle.sin())
    assert torch.equal(got, want) and not torch.equal(got[:, :8], rms_norm(x, None, 1e-6)[:, :8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", [Format.KV8, Format.BF16, Format.F32])
def test_store_rounds_unrotated_channels_in_blocks_of_64(format: Format, dtype: torch.dtype) -> None:
    """All cache formats hold the same values with qat; without it, the values given (or their BF16)."""
    nope, rope_dim = 150, 16
    kv = (rand(5, nope + rope_dim) * torch.tensor([1e-6, 1.0, 30.0, 1e4, 0.0]).unsqueeze(1)).to(dtype)
    kv[:, 64:128] *= 1e5  # with the scale of this block, the one before would be subnormal
    want = kv.float().clone()
    for row in range(5):
        codes, scales = oracle.fp8_row(kv[row, :nope].float().numpy(), 64)
        spread = np.repeat(oracle.E8M0[scales], 64)[:nope]
        want[row, :nope] = torch.from_numpy((oracle.E4M3[codes] * spread).astype(np.float32))
    if format is Format.BF16:
        want = want.bfloat16().float()
    assert torch.equal(decode(cpu.store(kv, rope_dim, format, qat=True)), want)
    if format is not Format.KV8:
        plain = kv.bfloat16().float() if format is Format.BF16 else kv.float()
        assert torch.equal(decode(cpu.store(kv, rope_dim, format, qat=False)), plain)


def test_store_check_values() -> None:
    given = [0.013, -0.5, 1, 3.14159, -7.7, 100, 447, -449]
    row = torch.zeros(1, 64 + 2)
    row[0, :8] = torch.tensor(given)
    stored = decode(cpu.store(row, 2, Format.KV8, qat=True))
    assert stored[0, :8].tolist() == [0.01171875, -0.5, 1, 3.25, -7.5, 96, 448, -448]
    assert decode(cpu.store(torch.zeros(0, 66), 2, Format.KV8, qat=True)).shape == (0, 66)
