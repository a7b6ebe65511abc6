"""PLACEHOLDER for the exact top-k of index scores, in torch."""

import torch
from torch import Tensor


def select(scores: Tensor, counts: Tensor, out: Tensor) -> None:
    """scores [T, cap] float32, counts [T] int32 -> out [T, topk] int32: chosen entries rising, -1 beyond."""
    topk, cap = out.shape[1], scores.shape[1]
    entry = torch.arange(cap, device=scores.device)
    seen = entry < counts.unsqueeze(1)
    order = scores.masked_fill(~seen, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :topk]
    # Ties of -inf could rank an unseen entry first; those are taken out again here.
    chosen = torch.where(order < counts.unsqueeze(1), order, cap).sort(dim=1).values
    out.fill_(-1)
    out[:, : chosen.shape[1]] = torch.where(chosen < cap, chosen, -1)
