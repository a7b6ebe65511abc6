"""Manifold-constrained hyper-connections: mix residual streams into one input, and the output back."""

import torch
from torch import Tensor

from dsv4.ops._exact import row_product, sigmoid


def mixes(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """streams [T, N, D], fn [N*D, M] float32 -> [T, M]; the norm's factor is applied after the product."""
    flat = streams.flatten(1).float()
    return row_product(flat, fn) * (flat.square().mean(-1, keepdim=True) + norm_eps).rsqrt()


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """logits [T, N, N] -> nearly doubly stochastic matrices; the last step normalises columns."""
    shifted = torch.exp(logits - logits.amax(-1, keepdim=True))
    comb = shifted / shifted.sum(-1, keepdim=True) + eps
    # sum + eps in one call each: on a CPU this loop is a third of a small model's step
    floor = comb.new_full((1, 1, 1), eps)
    column = comb.new_ones(comb.shape[0], comb.shape[1], 1)
    row = column.mT
    comb = comb / torch.baddbmm(floor, row, comb)
    for _ in range(iters - 1):
        comb = comb / torch.baddbmm(floor, comb, column)
        comb = comb / torch.baddbmm(floor, row, comb)
    return comb


def pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """streams [T, N, D] -> x [T, D], gate [T, N], comb [T, N, N]. fn [N*D, M], base [M], M = 2N+N*N."""
    n = streams.shape[1]
    m = mixes(streams, fn, norm_eps)
    into = sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
    gate = 2 * sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = sinkhorn((m[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(1, (n, n)), iters, eps)
    return _weighted(streams, into), gate, comb


def post(x: Tensor, streams: Tensor, gate: Tensor, comb: Tensor) -> Tensor:
    """x [T, D], streams [T, N, D], gate [T, N], comb [T, N, N] -> [T, N, D]; sums over comb's FIRST index."""
    mixed = (comb.unsqueeze(-1) * streams.float().unsqueeze(2)).sum(1)
    return (gate.unsqueeze(-1) * x.float().unsqueeze(1) + mixed).to(streams.dtype)


def head(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, eps: float) -> Tensor:
    """streams [T, N, D] -> [T, D] before the final norm. fn [N*D, N], base [N], scale [1]."""
    return _weighted(streams, sigmoid(mixes(streams, fn, norm_eps) * scale[0] + base) + eps)


def _weighted(streams: Tensor, weights: Tensor) -> Tensor:
    return (weights.unsqueeze(-1) * streams.float()).sum(1).to(streams.dtype)
