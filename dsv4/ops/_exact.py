"""Arithmetic whose result for one row never depends on the other rows. Used by every reference op.

A BLAS picks its algorithm from the whole shape, and torch's vectorised loops finish their tails with another
implementation of exp; either would make a token depend on its batch-mates. Hence one fixed tile shape for
products, and only functions whose tails were measured equal: exp and log1p, not sigmoid, silu or softplus.
"""

from functools import cache

import torch
from torch import Tensor

TILE = 8


@cache
def number(value: float, device: torch.device) -> Tensor:
    """A float32 scalar. torch makes one of a Python number at each use, which costs as much as the sum."""
    return torch.tensor(value, dtype=torch.float32, device=device)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), free when x has that type already: in float32 all of a step's casts have."""
    return x if x.dtype is dtype else x.to(dtype)


def row_product(x: Tensor, w: Tensor) -> Tensor:
    """x [T, K] float32 times w [K, N] float32 -> [T, N], always as products of shape [8, K] x [K, N]."""
    rows, width = x.shape
    if rows % TILE:
        x = torch.cat((x, _zero_rows(-rows % TILE, width, x.device)))
    if rows <= TILE:
        return torch.mm(x, w)[:rows] if rows else x.new_empty(0, w.shape[1])
    return torch.cat([torch.mm(tile, w) for tile in x.split(TILE)])[:rows]


@cache
def _zero_rows(count: int, width: int, device: torch.device) -> Tensor:
    return torch.zeros(count, width, device=device)


def mean_square(x: Tensor, eps: float) -> Tensor:
    """Mean of the squares over the last dimension, plus eps: x [..., D] float32 -> [..., 1]."""
    total = x.square().sum(-1, keepdim=True)
    return torch.addcmul(number(eps, x.device), total, number(1 / x.shape[-1], x.device))


def sigmoid(x: Tensor) -> Tensor:
    return (number(1, x.device) + torch.exp(-x)).reciprocal()


def silu(x: Tensor) -> Tensor:
    return x / (number(1, x.device) + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    return x.relu() + torch.log1p(torch.exp(-x.abs()))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last 2R channels of x [T, ..., D]; cos, sin [T, R]; -sin inverts."""
    while cos.dim() < x.dim():
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    start = x.shape[-1] - 2 * cos.shape[-1]
    a, b = x[..., start::2].float(), x[..., start + 1 :: 2].float()
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :start], cast(turned, x.dtype)), dim=-1)
