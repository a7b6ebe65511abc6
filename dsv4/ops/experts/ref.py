"""Clamped SwiGLU experts: the routed ones, chosen per token, and the shared one."""

from itertools import groupby

import torch
from torch import Tensor

from dsv4.ops._exact import cast, row_product, silu, total
from dsv4.ops.linear.ref import Held, dense, round_input

Expert = tuple[Held, Held, Held]  # w1 (gate), w3 (up), w2 (down)
# Rows that an expert gets at least: with fewer, each of its products would pad them anew.
FEW = 4


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
    # Choices token*K + k of all tokens, expert by expert; the first again where an expert has few.
    choices: list[int] = []
    counts = []
    by_expert = sorted(range(len(chosen)), key=chosen.__getitem__)
    for expert, group in groupby(by_expert, key=chosen.__getitem__):
        own = [*group]
        own += own[:1] * (FEW - len(own))
        counts.append((expert, len(own)))
        choices += own
    # Where the choices of a token went, by rising expert: a choice that stands there again has the same row.
    at = dict(zip(choices, range(len(choices)), strict=True))
    places = [at[choice] for choice in sorted(by_expert, key=lambda choice: choice // k)]
    choice, place = torch.tensor(choices, device=x.device), torch.tensor(places, device=x.device)
    y = _ffn(
        *(x.index_select(0, choice // k), [experts[expert] for expert, _ in counts], [n for _, n in counts]),
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
