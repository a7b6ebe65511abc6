"""PLACEHOLDER for the tiled weights: the fields and `unpack` that the prompt's products rely on, in torch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.quant.formats import Format


@dataclass(frozen=True)
class Tiled:
    """`count` weights [N, K]. `factor` [1], in a bank [count, parts], is what `unpack` leaves out."""

    format: Format
    shape: tuple[int, int]
    data: Tensor
    factor: Tensor
    fits_bf16: bool = True
    count: int = 1


def unpack(tiled: Tiled, out: Tensor, start: int = 0) -> None:
    """out [n, K]: rows start .. start+n-1 of a single weight. out [n, N, K]: weights start .. of a bank."""
    values = tiled.data.view(tiled.count, *tiled.shape) if out.dim() == 3 else tiled.data.view(tiled.shape)
    assert out.dtype in (torch.bfloat16, torch.float32)
    out.copy_(values[start : start + out.shape[0]])
