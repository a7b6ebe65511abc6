"""The operations of a twin on a CPU: those of dsv4.spec.ops, and the two that only training has.

`fused.py` has the same functions for a GPU.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.spec.ops import (
    attend,
    compress,
    index_scores,
    mix_head,
    mix_in,
    mix_out,
    mixes,
    rms_norm,
    rotate,
    rotate_heads,
    route_scores,
    route_weights,
    sinkhorn,
    swiglu,
)

__all__ = ["attend", "compress", "index_scores", "mass", "mix_head", "mix_in", "mix_out", "mixes", "nats"]
__all__ += ["rms_norm", "rotate", "rotate_heads", "route_scores", "route_weights", "sinkhorn", "swiglu"]


@torch.no_grad()
def mass(q: Tensor, keys: Tensor, seen: Tensor, sinks: Tensor, entries: int) -> Tensor:
    """Return how `attend` divides the weight of all heads among the last keys: [..., T, entries]."""
    scores = torch.einsum("...thd,...sd->...ths", q.float(), keys.float()) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen.unsqueeze(-2), -math.inf)
    sink = sinks.float().unsqueeze(-1).expand(*scores.shape[:-1], 1)
    weights = torch.cat((sink, scores), -1).softmax(-1)[..., -entries:].sum(-2)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each target [...] under logits [..., V]."""
    flat = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
    return flat.view(targets.shape)
