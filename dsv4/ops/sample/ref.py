"""From logits to a token: temperature, top-k, top-p, min-p, one uniform number per token. Row by row."""

import torch
from torch import Tensor


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on the request's seed and the token's index alone (splitmix64)."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = ((z ^ (z >> shift)) * factor) & mask
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


def log_probs(logits: Tensor) -> Tensor:
    """[V] float32 -> log-softmax [V], of the model's own distribution."""
    shifted = logits - logits.max()
    return shifted - torch.exp(shifted).sum().log()


def sample(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, u: float) -> int:
    """[V] float32, the largest finite -> a token id. Temperature 0 is greedy; ties go to the lower id.

    Filters apply in this order: temperature, top-k (0: all), top-p (the smallest set whose mass reaches
    top_p), min-p (of the best token's probability). u picks from what remains, most likely token first.
    """
    if temperature == 0:
        return int(logits.argmax())
    order = logits.sort(descending=True, stable=True)
    # The difference first: no temperature, however small, can then overflow.
    values = order.values.double()
    probs = torch.exp((values - values[0]) / temperature)
    if top_k:
        probs = probs[:top_k]
    probs = probs / probs.sum()
    keep = probs >= min_p * probs[0]
    if top_p < 1:
        # Only here: summing up to 1 is inexact, and must not cut off the least likely tokens unasked.
        keep[1:] &= probs.cumsum(0)[:-1] < top_p
    edges = (probs * keep).cumsum(0)
    # u < 1, so the edge above it exists and belongs to a token of positive probability.
    return int(order.indices[torch.searchsorted(edges, u * float(edges[-1]), right=True)])
