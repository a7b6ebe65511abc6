"""What was loaded, hashed; and the threads that loading left behind."""

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.model.bundle import Weights
from dsv4.ops.experts.placement import Placement


def digests(weights: Weights, placement: Placement | None = None) -> dict[str, str]:
    """Of every tensor of every weight; of experts in slots, where they lie."""
    found = {name: _digest(held) for name, held in weights.tensors.items()}
    for name in placement.names if placement else ():
        bank = weights.tensors[name]
        found[name] = repr([(t.format, t.shape, t.fits_bf16, t.fits_fp8) for t in (bank.w13, bank.w2)])
        for expert in range(placement.num_experts):  # type: ignore[union-attr]
            found[f"{name}.{expert}"] = _digest(placement.expert(name, expert))  # type: ignore[union-attr]
    return found


def _digest(held: Any) -> str:
    digest = hashlib.sha256()
    for part in _parts(held):
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
            digest.update(part.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(part).encode())
    return digest.hexdigest()


def _parts(held: Any) -> Iterator[Any]:
    if is_dataclass(held):
        for field in fields(held):
            yield from _parts(getattr(held, field.name))
    else:
        yield held


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("dsv4-read")]
