"""Clamped SwiGLU experts: the routed ones, chosen per token, and the shared one."""

import torch
from torch import Tensor

from dsv4.ops._exact import row_product, silu
from dsv4.ops.linear.ref import Held, dense, round_input

Expert = tuple[Held, Held, Held]  # w1 (gate), w3 (up), w2 (down)


def ffn(x: Tensor, expert: Expert, limit: float, activations: str, weight: Tensor | None = None) -> Tensor:
    """x [T, D] -> [T, D]. `weight` [T], the routing weight, enters before the down projection."""
    w1, w3, w2 = expert
    x_in = round_input(x, activations).float()
    gate = row_product(x_in, dense(w1)).to(x.dtype).float().clamp(max=limit)
    up = row_product(x_in, dense(w3)).to(x.dtype).float().clamp(-limit, limit)
    hidden = silu(gate) * up
    if weight is not None:
        hidden = weight.unsqueeze(1) * hidden
    hidden = round_input(hidden.to(x.dtype), activations).float()
    return row_product(hidden, dense(w2)).to(x.dtype)


def routed(
    x: Tensor, ids: Tensor, weights: Tensor, experts: list[Expert], limit: float, activations: str
) -> Tensor:
    """x [T, D], ids [T, K], weights [T, K] -> float32 [T, D]: the chosen summed by rising expert id."""
    ids, order = ids.sort(dim=1)
    weights = weights.gather(1, order)
    out = torch.zeros(ids.shape[1], *x.shape, dtype=torch.float32, device=x.device)  # [K, T, D]
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        y = ffn(x[token], experts[expert], limit, activations, weights[token, choice])
        out[choice, token] = y.float()
    total = out[0]
    for choice in range(1, ids.shape[1]):
        total = total + out[choice]
    return total
