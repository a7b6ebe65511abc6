"""Writes safetensors checkpoints tensor by tensor: sizes are declared first, so nothing is held in memory."""

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsv4.errors import CheckpointError
from dsv4.weights.reader import DTYPES, INDEX

SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Declared:
    """A tensor that will be written: its safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][0]


def shards(tensors: list[Declared], limit: int = SHARD_BYTES) -> list[list[Declared]]:
    """Cut the list where a shard would exceed the limit; order is kept."""
    out: list[list[Declared]] = [[]]
    size = 0
    for tensor in tensors:
        if out[-1] and size + tensor.num_bytes > limit:
            out.append([])
            size = 0
        out[-1].append(tensor)
        size += tensor.num_bytes
    return out


def write_checkpoint(
    folder: Path, tensors: list[Declared], data: Iterable[Tensor], limit: int = SHARD_BYTES
) -> Iterator[int]:
    """Write all shards and the index; yields each tensor's bytes. `data` follows the order of `tensors`.

    Files appear under their final names only when complete.
    """
    groups = shards(tensors, limit)
    values = iter(data)
    index: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        single = len(groups) == 1
        name = "model.safetensors" if single else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        index |= {tensor.name: name for tensor in group}
        yield from _write_file(folder / name, group, values)
    if len(groups) > 1:
        total = sum(tensor.num_bytes for tensor in tensors)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        write_text(folder / INDEX, text)


def _write_file(path: Path, group: list[Declared], values: Iterator[Tensor]) -> Iterator[int]:
    header, offset = {}, 0
    for tensor in group:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in group:
                value = next(values)
                expected = (DTYPES[tensor.dtype][1], tensor.shape)
                assert (value.dtype, tuple(value.shape)) == expected, tensor.name
                file.write(value.contiguous().flatten().view(torch.uint8).numpy().data)
                yield tensor.num_bytes
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        # Also when the caller stops half-way: nothing incomplete is left behind.
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """A small file, complete or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from None
