"""Weights as the tensor cores read them: row-major [parts, N, K] in the compute type, unpacked into scratch.

A float32 weight enters a BF16 product as a sum of BF16 parts; the parts' products are added up.
"""

from typing import Any

import torch
from torch import Tensor

from dsv4.kernels import tiles

# A weight's row-major values (Tensor [N, K]), or its tiles (tiles.Tiled).
Weight = Any
SCRATCH_BYTES = 512 << 20
# Three parts of 8 bits are a float32. FP8 codes times float32 scales are followed to 16 bits only: an error
# of 2^-17 beside the 2^-9 of the product's own rounding.
PARTS_F32, PARTS_FP8 = 3, 2


def num_parts(weight: Weight, dtype: torch.dtype) -> int:
    """How many matrices of `dtype` the weight becomes."""
    if dtype == torch.float32:
        return 1
    if isinstance(weight, Tensor):
        return PARTS_F32 if weight.dtype == torch.float32 else 1
    if weight.fits_bf16:
        return 1
    return PARTS_FP8 if weight.format == "fp8" else PARTS_F32


def split(wide: Tensor, out: Tensor) -> None:
    """wide [...] float32, which is used up -> out [parts, ...] BF16, whose sum is nearest to it."""
    for part in out:
        part.copy_(wide)
        wide.sub_(part)


def rows(weight: Weight, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """Rows start .. stop-1 of the weight without its factor: [parts, stop - start, K] of `dtype`."""
    parts = num_parts(weight, dtype)
    if isinstance(weight, Tensor):
        part = weight[start:stop]
        if parts == 1:
            return part.to(dtype).unsqueeze(0)
        wide = part.clone()
    else:
        wide = torch.empty(
            stop - start,
            weight.shape[1],
            dtype=dtype if parts == 1 else torch.float32,
            device=weight.data.device,
        )
        tiles.unpack(weight, wide, start)
        if parts == 1:
            return wide.unsqueeze(0)
    out = torch.empty(parts, *wide.shape, dtype=dtype, device=wide.device)
    split(wide, out)
    return out


def bank(weight: Weight, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """Weights start .. stop-1 of a bank without their factors: [parts, stop - start, N, K] of `dtype`."""
    parts = num_parts(weight, dtype)
    shape = (stop - start, *weight.shape)
    wide = torch.empty(shape, dtype=dtype if parts == 1 else torch.float32, device=weight.data.device)
    tiles.unpack(weight, wide, start)
    if parts == 1:
        return wide.unsqueeze(0)
    out = torch.empty(parts, *shape, dtype=dtype, device=wide.device)
    split(wide, out)
    return out


def factor_of(weight: Weight) -> Tensor | None:
    """[1] float32, what a tiled weight's values are multiplied with after the product; None for values."""
    return None if isinstance(weight, Tensor) else weight.factor
