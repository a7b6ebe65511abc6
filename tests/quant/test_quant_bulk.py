"""The streaming encoders give the codec's bits, and the exact cast is exact, on hostile values too."""

import math

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor

from dsv4.quant.bulk import Buffers, Tally, decode_slice, encode_slice, largest, nvfp4_global_scale, tally
from dsv4.quant.cast import SPAN, cast_scales, global_scale, zero_blocks
from dsv4.quant.codec import decode, encode_weight
from dsv4.quant.formats import Format, QuantTensor

TARGETS = (Format.BF16, Format.FP8, Format.MXFP4, Format.NVFP4)
SOURCES = (Format.F32, *TARGETS)


def values(kind: str, rows: int, cols: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 10007 + cols)
    x = torch.randn(rows, cols, generator=generator)
    if kind == "wide":  # rows of very different size, and blocks far below their neighbours
        x *= torch.exp(3 * torch.randn(rows, 1, generator=generator))
        x[:, ::48] *= 1e-6
    if kind == "holes":  # zeros of both signs, whole blocks of them, a whole row
        x[:, : cols // 2] = 0.0
        x[:, cols // 2 :: 3] = -0.0
        x[0] = 0.0
    if kind == "ties":  # multiples of a quarter: every midpoint between neighbours occurs
        x = torch.randint(-26, 27, (rows, cols), generator=generator) / 4.0
        x[:, 0] = 6.0
    if kind == "huge":
        x *= 1e30
    if kind == "small":
        x *= 1e-30
    return x


@pytest.mark.parametrize("kind", ["plain", "wide", "holes", "ties", "huge", "small", "zero"])
@pytest.mark.parametrize("shape", [(128, 256), (70, 336), (1, 48)])
def test_bits_of_the_codec(kind: str, shape: tuple[int, int]) -> None:
    x = torch.zeros(shape) if kind == "zero" else values(kind, *shape)
    rows, cols = shape
    buffers = Buffers()
    for stored in SOURCES:
        source = encode_weight(x, stored)
        want = decode(source)
        assert torch.equal(decode_slice(source, 0, cols, buffers)[:, :cols], want), stored
        for target in TARGETS:
            got = decode_slice(source, 0, cols, buffers)
            encoded = encode_slice(got, target, buffers, nvfp4_global_scale(largest(got)))
            expected = encode_weight(want, target)
            assert torch.equal(encoded.data[:, : expected.data.shape[1]], expected.data), (stored, target)
            if expected.scale is not None:
                assert encoded.scale is not None
                assert torch.equal(encoded.scale[:, : expected.scale.shape[1]], expected.scale)
            decoded = decode(expected)
            assert torch.equal(encoded.magnitudes[:, :cols], decoded.abs())
            check_tally(want, decoded, tally(got, encoded, rows * cols, buffers))


def length(x: np.ndarray) -> float:
    # Not numpy.linalg.norm: its threads wait for one another when several tests run.
    return float(np.sqrt((x * x).sum()))


def check_tally(x: Tensor, y: Tensor, found: Tally) -> None:
    a, b = x.double().numpy(), y.double().numpy()
    assert found.inexact == int((a != b).sum()) and found.values == a.size
    assert found.relative_error == pytest.approx(length(a - b) / (length(a) or 1.0), rel=1e-4, abs=1e-12)
    if length(a) and length(b):
        cosine = float((a * b).sum() / length(a) / length(b))
        # Sums in float32 are good to 1e-6, and so is the difference of the lengths, against 1e-4 of itself.
        assert 1 - found.cosine == pytest.approx(1 - cosine, rel=1e-2, abs=1e-10)


def test_columns_in_slices() -> None:
    """A matrix wider than a slice: each slice takes its own scales."""
    x = values("wide", 128, 5000)
    buffers = Buffers()
    for stored in SOURCES:
        source = encode_weight(x, stored)
        parts = [decode_slice(source, at, min(5000, at + 2048), buffers).clone() for at in (0, 2048, 4096)]
        assert torch.equal(torch.cat(parts, 1)[:, :5000], decode(source)), stored


def test_nan_codes_of_fp8_stay_nan() -> None:
    data = torch.arange(256, dtype=torch.uint8).repeat(2, 1)
    q = QuantTensor(Format.FP8, data, (2, 256), torch.full((1, 2), 127, dtype=torch.uint8))
    got = decode_slice(q, 0, 256, Buffers())
    assert torch.equal(got.isnan(), (data & 127) == 127)
    assert torch.equal(got.nan_to_num(7.0), decode(q).nan_to_num(7.0))
    assert math.isnan(largest(got))


@pytest.mark.parametrize(
    ("format", "rule", "searched"), [(Format.NVFP4, 0.0951, 0.082), (Format.MXFP4, 0.115, 0.112)]
)
def test_least_squares_search(format: Format, rule: float, searched: float) -> None:
    """Gaussian values: the rule's error is spec 03's, the search is below, and no block gets worse."""
    x = torch.randn(128, 2048, generator=torch.Generator().manual_seed(5))
    buffers, g = Buffers(), nvfp4_global_scale(largest(x))
    block = 16 if format is Format.NVFP4 else 32
    found = []
    for search in (False, True):
        encoded = encode_slice(x, format, buffers, g, search)
        errors = (encoded.magnitudes - x.abs()).square().view(-1, block).double().sum(1)
        found.append((errors, tally(x, encoded, x.numel(), buffers).relative_error))
    assert found[0][1] == pytest.approx(rule, rel=0.01) and found[1][1] == pytest.approx(searched, rel=0.01)
    assert bool((found[1][0] <= found[0][0] * (1 + 1e-6)).all())


def test_global_scale_is_never_zero() -> None:
    assert nvfp4_global_scale(0.0) == 1.0
    assert nvfp4_global_scale(2688.0) == 1.0
    assert nvfp4_global_scale(1e-44) == 2.0**-126
    x = torch.full((1, 128), 1e-44)
    encoded = encode_slice(x, Format.NVFP4, Buffers(), nvfp4_global_scale(1e-44))
    assert bool(torch.isfinite(encoded.magnitudes).all())


def test_cast_scales() -> None:
    """2^8 for the largest, down to 2^-9; beyond that the nearest, for blocks of zeros."""
    codes = np.array([[140, 139, 126, 125, 124, 123, 122, 0, 141, 255]], np.uint8)
    powers = np.array([8, 7, -6, -7, -8, -9, -9, -9, 8, 8])
    want = np.repeat(2.0**powers, 2)
    assert np.array_equal(oracle.E4M3[cast_scales(codes, 140, 20)][0], want)
    assert np.array_equal(oracle.E4M3[cast_scales(codes, 140, 19)][0], want[:-1])
    low = np.arange(6, dtype=np.uint8).reshape(1, -1)
    assert np.array_equal(oracle.E4M3[cast_scales(low, 5, 12)][0], np.repeat(2.0 ** (np.arange(6) + 3), 2))


@pytest.mark.parametrize("top", [17, 60, 127, 200, 254])
@pytest.mark.parametrize("cols", [64, 96, 48])
def test_cast_is_exact_over_its_whole_span(top: int, cols: int) -> None:
    """All 18 exponents, up to the ends of float32's range; a width that ends in half an MXFP4 block."""
    random = np.random.default_rng(top)
    data = random.integers(0, 256, (36, cols // 2), dtype=np.uint8)
    scale = np.empty((36, -(-cols // 32)), np.uint8)
    scale[:] = top - np.arange(36)[:, None] % (SPAN + 1)
    blocks = cast_scales(scale, top, -(-cols // 16))
    assert blocks.shape == (36, cols // 16)
    g = np.float32(global_scale(top))
    assert g > 0 and float(g) == global_scale(top)
    with np.errstate(over="ignore"):
        want = oracle.decode_mxfp4(data, scale)
        got = oracle.decode_nvfp4(data, blocks, g, divides=False)
    finite = np.isfinite(want)
    assert np.array_equal(got[finite], want[finite])
    if top < 253:
        assert finite.all()


def test_zero_blocks() -> None:
    data = np.zeros((2, 24), np.uint8)
    data[0, 3] = 0x88  # two negative zeros
    data[1, 20] = 0x10
    assert zero_blocks(data).tolist() == [[True, True], [True, False]]
