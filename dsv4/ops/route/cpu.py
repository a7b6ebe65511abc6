"""Which experts a token goes to and with what weight. Scores stay float32: rounding them flips choices."""

import torch
from torch import Tensor

from dsv4.ops._exact import number, softplus, total
from dsv4.ops.linear.cpu import Held, linear
from dsv4.spec.ops import top_k

top_indices = top_k  # each backend has one


def scores(x: Tensor, gate: Held) -> Tensor:
    """x [T, D] -> sqrt(softplus(x gateᵀ)), float32 [T, E]."""
    return softplus(linear(x, gate, out_dtype=torch.float32)).sqrt()


def by_score(x: Tensor, gate: Held, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """-> ids [T, K], weights [T, K] float32. The bias chooses; the unbiased score weights."""
    s = scores(x, gate)
    ids = top_indices(s + bias, k)
    return ids, _weights(s, ids, scale)


def by_hash(x: Tensor, gate: Held, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`chosen` [T, K] comes from the token-id table; the gate still gives the weights."""
    return chosen, _weights(scores(x, gate), chosen, scale)


def _weights(s: Tensor, ids: Tensor, scale: float) -> Tensor:
    picked = s.gather(1, ids)
    return picked / total(picked, 1).unsqueeze(1) * number(scale, s.device)
