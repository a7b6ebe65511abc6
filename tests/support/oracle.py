"""Number formats a second time, in numpy and from their definitions. Shares no code with dsv4.quant."""

import math

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float64)


def _e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if code & 127 == 127:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = np.array([_e4m3(code) for code in range(256)])
E8M0 = np.array([*(math.ldexp(1.0, code - 127) for code in range(255)), math.nan])


def nearest(x: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    """Index of the nearest of the rising `magnitudes` to |x|; a tie goes to the even index."""
    x = np.minimum(np.abs(x.astype(np.float64)), magnitudes[-1])
    upper = np.clip(np.searchsorted(magnitudes, x), 1, len(magnitudes) - 1)
    below, above = x - magnitudes[upper - 1], magnitudes[upper] - x
    take_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    return np.where(take_upper, upper, upper - 1)


def e2m1_encode(x: np.ndarray) -> np.ndarray:
    return (nearest(x, E2M1[:8]) + 8 * np.signbit(x)).astype(np.uint8)


def e4m3_encode(x: np.ndarray) -> np.ndarray:
    return (nearest(x, E4M3[:127]) + 128 * np.signbit(x)).astype(np.uint8)


def p2ceil_exponent(v: float) -> int:
    """e of the smallest 2^e >= v."""
    mantissa, exponent = math.frexp(v)  # v = mantissa * 2^exponent, 0.5 <= mantissa < 1
    return exponent - 1 if mantissa == 0.5 else exponent


def _blocks(x: np.ndarray, size: int) -> list[slice]:
    return [slice(start, min(start + size, len(x))) for start in range(0, len(x), size)]


def fp8_row(x: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """A float32 row -> E4M3 codes and E8M0 codes."""
    codes, scales = np.zeros(len(x), np.uint8), []
    for block in _blocks(x, size):
        amax = max(np.abs(x[block]).max(), np.float32(1e-4))
        exponent = p2ceil_exponent(float(np.float32(amax) * np.float32(1 / 448)))
        codes[block] = e4m3_encode(x[block].astype(np.float64) / 2.0**exponent)
        scales.append(exponent + 127)
    return codes, np.array(scales, np.uint8)


def mxfp4_row(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A float32 row -> E2M1 codes and E8M0 codes, ceil rule."""
    codes, scales = np.zeros(len(x), np.uint8), []
    for block in _blocks(x, 32):
        amax = max(np.abs(x[block]).max(), np.float32(6 * 2.0**-126))
        exponent = p2ceil_exponent(float(np.float32(amax) * np.float32(1 / 6)))
        codes[block] = e2m1_encode(x[block].astype(np.float64) / 2.0**exponent)
        scales.append(exponent + 127)
    return codes, np.array(scales, np.uint8)


def unpack(data: np.ndarray) -> np.ndarray:
    """[..., K/2] bytes -> [..., K] codes: the low nibble is the even column."""
    out = np.empty((*data.shape[:-1], 2 * data.shape[-1]), np.uint8)
    out[..., 0::2], out[..., 1::2] = data & 15, data >> 4
    return out


def _spread(scale: np.ndarray, rows: int, cols: int, shape: tuple[int, int]) -> np.ndarray:
    return np.repeat(np.repeat(scale, rows, axis=0), cols, axis=1)[: shape[0], : shape[1]]


def decode_fp8(data: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """uint8 [N, K] and float scales per 128x128 tile; one float32 rounding."""
    values = E4M3[data].astype(np.float32)
    return values * _spread(scale.astype(np.float32), 128, 128, data.shape)


def decode_mxfp4(data: np.ndarray, scale: np.ndarray) -> np.ndarray:
    values = E2M1[unpack(data)]
    return (values * _spread(E8M0[scale], 1, 32, values.shape)).astype(np.float32)


def decode_nvfp4(data: np.ndarray, scale: np.ndarray, global_scale: np.ndarray, divides: bool) -> np.ndarray:
    """One float32 rounding: code times block scale has at most six bits."""
    values = E2M1[unpack(data)]
    values = (values * _spread(E4M3[scale], 1, 16, values.shape)).astype(np.float32)
    return values / global_scale if divides else values * global_scale
