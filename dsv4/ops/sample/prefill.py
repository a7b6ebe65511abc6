"""Prompts: sampling, all rows in one launch, one by one, so without PDL."""

import torch
from torch import Tensor

from dsv4.ops.sample import decode as kernels
from dsv4.ops.sample.cpu import RESULT, log_probs, pack, unpack

__all__ = ["choose", "log_probs", "pack", "unpack"]


def choose(logits: Tensor, settings: Tensor, mask: Tensor | None, penalties: Tensor | None = None) -> Tensor:
    out = torch.empty(logits.shape[0], RESULT, dtype=torch.int32, device=logits.device)
    kernels.sample(logits=logits, settings=settings, mask=mask, out=out, penalties=penalties, overlap=False)
    return out
