"""MXFP4 re-expressed as NVFP4 without loss: codes stay, power-of-two scales move into two levels of scale."""

from typing import Any

import numpy as np

# E4M3 holds the powers of two from 2^-9 to 2^8; the largest block of a tensor gets 2^8.
HIGHEST = 8
SPAN = 17
# Powers below 2^-6 are subnormal (steps below the highest: code); above them a step is one exponent, 8 codes.
_SUBNORMAL = {15: 4, 16: 2, 17: 1}
_NORMAL_STEPS = 14


def global_scale(top: int) -> float:
    """The global scale that gives the E8M0 code `top` the block scale 2^8."""
    return 2.0 ** (top - 127 - HIGHEST)


def cast_scales(codes: Any, top: int, num_blocks: int) -> Any:
    """E8M0 codes [N, ceil(K/32)] -> E4M3 codes [N, num_blocks] of blocks of 16, given the largest E8M0 code.

    A block more than 2^17 below `top`, or above it, gets the nearest scale: right only if it is all zero.
    """
    steps = top - np.clip(codes, max(0, top - SPAN), top).astype(np.uint8)
    out = (15 - steps) << 3
    if steps.max(initial=0) > _NORMAL_STEPS:
        for step, code in _SUBNORMAL.items():
            out[steps == step] = code
    # Both halves of a block of 32 have its scale.
    pairs = out.astype(np.uint16) * np.uint16(0x0101)
    return np.ascontiguousarray(pairs.view(np.uint8)[:, :num_blocks])


def zero_blocks(data: Any) -> Any:
    """Packed codes [N, K/2] -> [N, ceil(K/32)] whether all codes of the block are zero, of either sign."""
    pad = -data.shape[1] % 16
    padded = np.pad(data, ((0, 0), (0, pad))) if pad else data
    return ~(padded & 0x77).reshape(len(data), -1, 16).any(axis=2)
