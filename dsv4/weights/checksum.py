"""A checksum of loaded weights, made where they lie: what is computed with, to the last bit, and quickly."""

import hashlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.model.bundle import Weights

# Words summed at a time: what a CPU's cache holds; on a GPU, enough to be few launches.
_WORDS = {"cpu": 1 << 16, "cuda": 1 << 24}


def checksum(weights: Weights) -> str:
    """A change of one word always shows; any other is missed once in 2**64. No defence against forgery."""
    digest = hashlib.blake2b(digest_size=16)
    factors: dict[torch.device, Tensor] = {}
    for name in sorted(weights.tensors):
        for part in _parts(weights.tensors[name]):
            digest.update(f"\n{name} {part if isinstance(part, str) else part.dtype} ".encode())
            if isinstance(part, Tensor):
                digest.update(f"{tuple(part.shape)} {_sums(part, factors)}".encode())
    return digest.hexdigest()


def _parts(held: Any) -> Iterator[Tensor | str]:
    """The tensors of a weight in whatever form, and all else that it is described by."""
    if isinstance(held, Tensor):
        yield held
    elif is_dataclass(held):
        for field in fields(held):
            yield field.name
            yield from _parts(getattr(held, field.name))
    else:
        yield repr(held)


def _sums(tensor: Tensor, factors: dict[torch.device, Tensor]) -> list[int]:
    """Of every run of words: each word times an odd factor of its place, modulo 2**64."""
    if tensor.device not in factors:
        mixed = torch.arange(_WORDS[tensor.device.type], device=tensor.device) * -7046029254386353131
        factors[tensor.device] = (mixed ^ (mixed >> 29)) * -4658895280553007687 | 1
    factor = factors[tensor.device]
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    sums = []
    for part in data.split(8 * factor.shape[0]):
        if part.shape[0] % 8 or part.storage_offset() % 8:
            part = torch.nn.functional.pad(part, (0, -part.shape[0] % 8))
        words = part.view(torch.int64)
        sums.append((words * factor[: words.shape[0]]).sum())
    return torch.stack(sums).tolist() if sums else []
