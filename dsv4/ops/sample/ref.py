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
    """[V] float32 -> a token id. Temperature 0 is greedy; ties go to the lower id. top_k 0 means all.

    Filters apply in this order: temperature, top-k, top-p (the smallest set whose mass reaches top_p), min-p
    (of the best token's probability). u picks from what remains, most likely token first.
    """
    order = logits.sort(descending=True, stable=True)
    if temperature == 0:
        return int(order.indices[0])
    scaled = order.values.double() / temperature
    probs = torch.exp(scaled - scaled[0])
    if top_k:
        probs = probs[:top_k]
    probs = probs / probs.sum()
    mass_before = probs.cumsum(0) - probs
    keep = (mass_before < top_p) & (probs >= min_p * probs[0])
    keep[0] = True
    probs = probs[keep]
    edges = probs.cumsum(0)
    pick = int(torch.searchsorted(edges, u * float(edges[-1]), right=True))
    return int(order.indices[: keep.shape[0]][keep][min(pick, probs.shape[0] - 1)])
