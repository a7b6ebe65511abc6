"""Prompts: weights as tensor cores read them, row-major [parts, N, K] in the compute type, in scratch.

A float32 weight enters a BF16 product as a sum of BF16 parts; the parts' products are added up.
"""

from typing import Any

import torch
from torch import Tensor

from dsv4.ops.linear import prefill_unpack as unpack
from dsv4.quant.formats import Format, QuantTensor

# A weight's row-major values [N, K], as a Tensor or a plain QuantTensor; or its tiles (tiles.Tiled).
Weight = Any
SCRATCH_BYTES = 512 << 20
# Three parts of 8 bits are a float32. FP8 codes times float32 scales are followed to 16 bits only: an error
# of 2^-17 beside the 2^-9 of the product's own rounding.
PARTS_F32, PARTS_FP8 = 3, 2


def values_of(weight: Weight) -> Tensor | None:
    """The row-major values, where the weight is held so."""
    if isinstance(weight, QuantTensor):
        assert weight.format.is_plain, weight.format
        return weight.data
    return weight if isinstance(weight, Tensor) else None


def num_parts(weight: Weight, dtype: torch.dtype) -> int:
    """How many matrices of `dtype` the weight becomes."""
    if dtype == torch.float32:
        return 1
    values = values_of(weight)
    if values is not None:
        return PARTS_F32 if values.dtype == torch.float32 else 1
    if weight.fits_bf16:
        return 1
    return PARTS_FP8 if weight.format is Format.FP8 else PARTS_F32


def _parts(wide: Tensor, dtype: torch.dtype, parts: int) -> Tensor:
    """wide [...], of which float32 values in more than one part are used up -> [parts, ...] of `dtype`."""
    if parts == 1:
        return wide.to(dtype).unsqueeze(0)
    out = torch.empty(parts, *wide.shape, dtype=dtype, device=wide.device)
    for part in out:
        part.copy_(wide)
        wide.sub_(part)
    return out


def _unpacked(weight: Weight, shape: tuple[int, ...], dtype: torch.dtype, parts: int) -> Tensor:
    wide = dtype if parts == 1 else torch.float32
    out = torch.empty(shape, dtype=wide, device=weight.factor.device)
    unpack.unpack(weight, out)
    return _parts(out, dtype, parts)


def rows(weight: Weight, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """Rows start .. stop-1 of the weight without its factor: [parts, stop - start, K] of `dtype`."""
    parts, values = num_parts(weight, dtype), values_of(weight)
    if values is not None:
        part = values[start:stop]
        return _parts(part if parts == 1 else part.clone(), dtype, parts)
    whole = start == 0 and stop == weight.shape[0]
    part = weight if whole else weight.rows(start, stop)
    return _unpacked(part, (stop - start, weight.shape[1]), dtype, parts)


def bank(weight: Weight, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """Matrices start .. stop-1 of a bank without their factors: [parts, stop - start, halves*N, K]."""
    shape = (stop - start, weight.halves * weight.shape[0], weight.shape[1])
    return _unpacked(weight.span(start, stop), shape, dtype, num_parts(weight, dtype))


def factor_of(weight: Weight) -> Tensor | None:
    """[1] float32, what a tiled weight's values are multiplied with after the product; None for values."""
    return None if values_of(weight) is not None else weight.factor.flatten()
