"""Single numbers: every code of E2M1, E4M3 and E8M0, and encoding against a search for the nearest value."""

import math

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.quant import codec

# E4M3, one row per exponent field, one column per mantissa.
E4M3_TABLE = """
0 0.001953125 0.00390625 0.005859375 0.0078125 0.009765625 0.01171875 0.013671875
0.015625 0.017578125 0.01953125 0.021484375 0.0234375 0.025390625 0.02734375 0.029296875
0.03125 0.03515625 0.0390625 0.04296875 0.046875 0.05078125 0.0546875 0.05859375
0.0625 0.0703125 0.078125 0.0859375 0.09375 0.1015625 0.109375 0.1171875
0.125 0.140625 0.15625 0.171875 0.1875 0.203125 0.21875 0.234375
0.25 0.28125 0.3125 0.34375 0.375 0.40625 0.4375 0.46875
0.5 0.5625 0.625 0.6875 0.75 0.8125 0.875 0.9375
1 1.125 1.25 1.375 1.5 1.625 1.75 1.875
2 2.25 2.5 2.75 3 3.25 3.5 3.75
4 4.5 5 5.5 6 6.5 7 7.5
8 9 10 11 12 13 14 15
16 18 20 22 24 26 28 30
32 36 40 44 48 52 56 60
64 72 80 88 96 104 112 120
128 144 160 176 192 208 224 240
256 288 320 352 384 416 448 nan
"""
ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def floats(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def same(got: torch.Tensor, want: np.ndarray, inputs: np.ndarray) -> None:
    """Equal bit patterns, or the first input that differs."""
    wrong = np.flatnonzero(got.numpy() != want)
    assert not len(wrong), (
        f"{len(wrong)} differ; {inputs[wrong[0]]!r}: got {got[wrong[0]]}, want {want[wrong[0]]}"
    )


def around(values: np.ndarray) -> np.ndarray:
    """Each float32 value with its two neighbours, and all their negatives."""
    v = values.astype(np.float32)
    near = np.concatenate([v, np.nextafter(v, np.float32(np.inf)), np.nextafter(v, np.float32(-np.inf))])
    return np.concatenate([near, -near])


def test_e2m1_every_code() -> None:
    want = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert codec.e2m1_decode(ALL_BYTES[:16]).tolist() == want


def test_e4m3_every_code() -> None:
    positive = [float(word) for word in E4M3_TABLE.split()]
    want = np.array(positive + [-v for v in positive], dtype=np.float32)
    np.testing.assert_array_equal(codec.e4m3_decode(ALL_BYTES).numpy(), want)
    np.testing.assert_array_equal(oracle.E4M3, want)


def test_e8m0_every_code() -> None:
    got = codec.e8m0_decode(ALL_BYTES)
    assert got[:255].tolist() == [math.ldexp(1.0, code - 127) for code in range(255)]
    assert math.isnan(got[255])
    assert got[[120, 119, 105, 127, 128, 130]].tolist() == [2**-7, 2**-8, 2**-22, 1, 2, 8]


@pytest.mark.parametrize(
    ("midpoint", "tie", "below", "above"),
    [
        (0.25, 0, 0, 0.5),
        (0.75, 1, 0.5, 1),
        (1.25, 1, 1, 1.5),
        (1.75, 2, 1.5, 2),
        (2.5, 2, 2, 3),
        (3.5, 4, 3, 4),
        (5, 4, 4, 6),
    ],
)
def test_e2m1_thresholds_and_ties(midpoint: float, tie: float, below: float, above: float) -> None:
    at = np.float32(midpoint)
    x = floats(at, np.nextafter(at, np.float32(0)), np.nextafter(at, np.float32(9)))
    assert codec.e2m1_decode(codec.e2m1_encode(x)).tolist() == [tie, below, above]
    assert codec.e2m1_decode(codec.e2m1_encode(-x)).tolist() == [-tie, -below, -above]


EXTREMES = np.array(
    [0.0, -0.0, 1e-45, -1e-45, 1e-40, 2.0**-126, 449, 464, 465, 480, 1e4, -1e4, 3.4e38, np.inf, -np.inf],
    dtype=np.float32,
)


def hostile_inputs(grid: np.ndarray, top: float) -> np.ndarray:
    """A dense line, values and midpoints with neighbours, random magnitudes to subnormals, extremes."""
    dense = np.linspace(-1.3 * top, 1.3 * top, 100_001, dtype=np.float32)
    random = np.random.default_rng(1).uniform(-149, 128, 50_000)
    sign = np.random.default_rng(2).choice([-1, 1], random.shape)
    spread = (sign * np.exp2(random)).astype(np.float32)
    special = around(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]))
    return np.concatenate([dense, spread, special, EXTREMES])


def test_e2m1_encode_finds_the_nearest() -> None:
    x = hostile_inputs(oracle.E2M1[:8], 6)
    same(codec.e2m1_encode(torch.from_numpy(x)), oracle.e2m1_encode(x), x)


def test_e4m3_encode_finds_the_nearest() -> None:
    x = np.concatenate([hostile_inputs(oracle.E4M3[:127], 448), hostile_inputs(oracle.E4M3[:16], 0.03)])
    same(codec.e4m3_encode(torch.from_numpy(x)), oracle.e4m3_encode(x), x)


@settings(max_examples=300, deadline=None)
@given(st.floats(width=32, allow_nan=False))
def test_encode_any_float(x: float) -> None:
    array = np.array([x], dtype=np.float32)
    same(codec.e2m1_encode(torch.from_numpy(array)), oracle.e2m1_encode(array), array)
    same(codec.e4m3_encode(torch.from_numpy(array)), oracle.e4m3_encode(array), array)


def test_every_code_survives_a_round_trip() -> None:
    numbers = [code for code in range(256) if code & 127 != 127]
    codes = ALL_BYTES[numbers]
    assert torch.equal(codec.e4m3_encode(codec.e4m3_decode(codes)), codes)
    assert torch.equal(codec.e2m1_encode(codec.e2m1_decode(ALL_BYTES[:16])), ALL_BYTES[:16])
    assert codec.e4m3_encode(floats(math.nan)).item() & 127 == 127


def test_even_columns_lie_in_the_low_nibble() -> None:
    codes = torch.tensor([[1, 2, 15, 0, 8, 7]], dtype=torch.uint8)
    packed = codec.pack_nibbles(codes)
    assert packed.tolist() == [[0x21, 0x0F, 0x78]]
    assert torch.equal(codec.unpack_nibbles(packed), codes)
    assert torch.equal(codec.unpack_nibbles(ALL_BYTES)[0::2], ALL_BYTES & 15)
    assert torch.equal(codec.unpack_nibbles(ALL_BYTES)[1::2], ALL_BYTES >> 4)


def test_p2ceil_at_every_power_of_two_and_its_neighbours() -> None:
    power = np.exp2(np.arange(-126, 128, dtype=np.float64)).astype(np.float32)
    code = np.arange(1, 255)
    same(codec.p2ceil_code(torch.from_numpy(power)), code, power)
    # Just above: the next power, or the largest one at the end of the scale.
    above = np.nextafter(power, np.float32(np.inf))
    same(codec.p2ceil_code(torch.from_numpy(above)), np.minimum(code + 1, 254), above)
    below = np.nextafter(power[1:], np.float32(0))
    same(codec.p2ceil_code(torch.from_numpy(below)), code[1:], below)


def test_p2ceil_keeps_tight_blocks_tight() -> None:
    """448 * 2^k and 6 * 2^k times the rounded reciprocal are powers of two again."""
    k = torch.arange(-100, 100)
    for top in (448.0, 6.0):
        amax = torch.ldexp(torch.full(k.shape, top), k)
        assert torch.equal(codec.p2ceil_code(amax * floats(1 / top)).long(), k + 127)


def test_p2ceil_of_nan_is_nan_and_of_infinity_the_largest() -> None:
    assert codec.p2ceil_code(floats(math.nan, math.inf)).tolist() == [255, 254]
