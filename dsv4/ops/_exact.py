"""Arithmetic whose result for one row never depends on the other rows. Used by every reference op.

A BLAS picks its algorithm from the whole shape, and torch's vectorised loops finish their tails with another
implementation of exp; either would make a token depend on its batch-mates. Hence one fixed tile shape for
products, and only functions whose tails were measured equal: exp and log1p, not sigmoid, silu or softplus.
"""

import torch
from torch import Tensor

TILE = 8


def row_product(x: Tensor, w: Tensor) -> Tensor:
    """x [T, K] float32 times w [K, N] float32 -> [T, N], always as products of shape [8, K] x [K, N]."""
    rows = x.shape[0]
    pad = -rows % TILE
    if pad:
        x = torch.cat((x, x.new_zeros(pad, x.shape[1])))
    if rows <= TILE:
        return torch.mm(x, w)[:rows] if rows else x.new_empty(0, w.shape[1])
    return torch.cat([torch.mm(tile, w) for tile in x.split(TILE)])[:rows]


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last 2R channels of x [T, ..., D]; cos, sin [T, R]; -sin inverts."""
    width = 2 * cos.shape[-1]
    while cos.dim() < x.dim():
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    keep, turn = x[..., : x.shape[-1] - width], x[..., x.shape[-1] - width :].float()
    a, b = turn[..., 0::2], turn[..., 1::2]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((keep, turned.to(x.dtype)), dim=-1)
