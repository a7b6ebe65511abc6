"""A twin's parameters as a few files to train on from, small enough to send: 8 bits where NVFP4 has 4.

Momenta are not kept: they are rebuilt in the first per cent of a run, while the rate warms up.
"""

from pathlib import Path

import torch
from torch import Tensor

from recipes.tiny.twin import Twin, large_names

FILE_BYTES = 15 << 20
BLOCK = 16  # values that share a scale; NVFP4 has as many


def save_state(twin: Twin, folder: Path) -> list[int]:
    """Write state-0.pt, state-1.pt, ... of at most FILE_BYTES values each -> their bytes."""
    large = large_names(twin)
    files: list[dict[str, tuple[Tensor, ...]]] = [{}]
    room = FILE_BYTES
    for name, p in twin.tensors.items():
        parts = tuple(part.cpu() for part in _packed(p.detach(), name in large))
        size = sum(part.numel() * part.element_size() for part in parts)
        if size > room:
            files.append({})
            room = FILE_BYTES
        files[-1][name] = parts
        room -= size
    for number, values in enumerate(files):
        torch.save(values, folder / "state.tmp")
        (folder / "state.tmp").replace(folder / f"state-{number}.pt")
    return [path.stat().st_size for path in sorted(folder.glob("state-*.pt"))]


def load_state(twin: Twin, folder: Path) -> None:
    """Put what `save_state` wrote into the twin's parameters."""
    paths = sorted(folder.glob("state-*.pt"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no state-*.pt; give the folder of an earlier run")
    values: dict[str, Tensor] = {}
    for path in paths:
        for name, parts in torch.load(path, map_location="cpu", weights_only=True).items():
            values[name] = _unpacked(parts).reshape(twin.tensors[name].shape)
    twin.restore(values)


def _packed(value: Tensor, is_large: bool) -> tuple[Tensor, ...]:
    if not value.is_floating_point():
        return (value.to(torch.int16),)
    if value.dim() == 1:
        return (value.float(),)
    if not is_large:
        return (value.bfloat16(),)
    blocks = value.float().reshape(-1, BLOCK)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).clamp(min=1e-7).half()
    return (blocks / scale.float()).round().clamp(-127, 127).to(torch.int8), scale


def _unpacked(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else parts[0].float() * parts[1].float()
