"""Clamped SwiGLU experts: the routed ones, chosen per token, and the shared one."""

from collections import Counter

import torch
from torch import Tensor

from dsv4.ops._exact import cast, row_product, silu, total
from dsv4.ops.linear.ref import Held, dense, round_input

Expert = tuple[Held, Held, Held]  # w1 (gate), w3 (up), w2 (down)


def ffn(x: Tensor, expert: Expert, limit: float, activations: str, weight: Tensor | None = None) -> Tensor:
    """x [T, D] -> [T, D]. `weight` [T], the routing weight, enters before the down projection."""
    return _ffn(x, [expert], [x.shape[0]], limit, activations, weight)


def routed(
    x: Tensor, ids: Tensor, weights: Tensor, experts: list[Expert], limit: float, activations: str
) -> Tensor:
    """x [T, D], ids [T, K], weights [T, K] -> float32 [T, D]: the chosen summed by rising expert id."""
    if not ids.numel():
        return torch.zeros_like(x, dtype=torch.float32)
    chosen, k = ids.flatten().tolist(), ids.shape[1]
    # Choices token*K + k of all tokens, expert by expert; and where those of a token went, by rising expert.
    choices = sorted(range(len(chosen)), key=chosen.__getitem__)
    tokens = [choice // k for choice in choices]
    back = sorted(range(len(chosen)), key=tokens.__getitem__)
    choice, token, place = torch.tensor((choices, tokens, back), device=x.device)
    counts = sorted(Counter(chosen).items())
    y = _ffn(
        *(x.index_select(0, token), [experts[expert] for expert, _ in counts], [n for _, n in counts]),
        *(limit, activations, weights.flatten().index_select(0, choice)),
    )
    return total(y.index_select(0, place).float().view(-1, k, x.shape[1]), 1)


def _ffn(
    x: Tensor, experts: list[Expert], counts: list[int], limit: float, activations: str, weight: Tensor | None
) -> Tensor:
    """The first counts[0] rows of x go through experts[0], and so on."""
    w1, w3, w2 = zip(*experts, strict=True)
    x_in = round_input(x, activations).float()
    gate = cast(_products(x_in, w1, counts), x.dtype).float().clamp(max=limit)
    up = cast(_products(x_in, w3, counts), x.dtype).float().clamp(-limit, limit)
    hidden = silu(gate) * up
    if weight is not None:
        hidden = weight.unsqueeze(1) * hidden
    hidden = round_input(cast(hidden, x.dtype), activations).float()
    return cast(_products(hidden, w2, counts), x.dtype)


def _products(x: Tensor, weights: tuple[Held, ...], counts: list[int]) -> Tensor:
    if len(weights) == 1:
        return row_product(x, dense(weights[0]))
    parts = zip(x.split(counts), weights, strict=True)
    return torch.cat([row_product(part, dense(weight)) for part, weight in parts])
