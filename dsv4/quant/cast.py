"""MXFP4 re-expressed as NVFP4 without loss: codes stay, power-of-two scales move into two levels of scale."""

from typing import Any

import numpy as np

# Powers of two that E4M3 can hold: 2^-9 to 2^8.
LOWEST, HIGHEST = -9, 8
SPAN = HIGHEST - LOWEST


def global_scale(top: int) -> float:
    """The global scale that gives the E8M0 code `top` the block scale 2^8."""
    return 2.0 ** (top - 127 - HIGHEST)


def e4m3_of_power(power: int) -> int:
    """The E4M3 code of 2^power, clamped to what it can hold."""
    power = min(max(power, LOWEST), HIGHEST)
    return (power + 7) << 3 if power >= -6 else 1 << (power + 9)


def scale_table(top: int) -> Any:
    """E8M0 code -> the E4M3 codes of its two blocks of 16 (uint16), given the largest E8M0 code in use.

    A block more than 2^17 below `top` gets the lowest scale: right only if its values are zeros.
    """
    pairs = [e4m3_of_power(code - top + HIGHEST) * 0x0101 for code in range(256)]
    return np.array(pairs, dtype=np.uint16)


def cast_scales(table: Any, codes: Any, num_blocks: int) -> Any:
    """E8M0 codes [N, ceil(K/32)] -> E4M3 codes [N, num_blocks] of blocks of 16."""
    return np.ascontiguousarray(np.take(table, codes).view(np.uint8)[:, :num_blocks])


def zero_blocks(data: Any) -> Any:
    """Packed codes [N, K/2] -> [N, ceil(K/32)] whether all codes of the block are zero, of either sign."""
    pad = -data.shape[1] % 16
    padded = np.pad(data, ((0, 0), (0, pad))) if pad else data
    return ~(padded & 0x77).reshape(len(data), -1, 16).any(axis=2)
