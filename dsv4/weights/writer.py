"""Writes safetensors checkpoints tensor by tensor: sizes are declared first, so nothing is held in memory."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4 import disk
from dsv4.quant.formats import FP8_TILE, MX_BLOCK, NV_BLOCK, Format
from dsv4.weights.reader import DTYPES, INDEX, torch_type

if TYPE_CHECKING:
    from torch import Tensor

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


def declare_linear(name: str, shape: tuple[int, int], format: Format) -> list[Declared]:
    """A linear as the official release (BF16, FP8, MXFP4) or ModelOpt (NVFP4) stores it, weight first."""
    rows, cols = shape
    if format.is_plain:
        return [Declared(f"{name}.weight", "BF16" if format is Format.BF16 else "F32", shape)]
    if format is Format.FP8:
        tiles = (-(-rows // FP8_TILE), -(-cols // FP8_TILE))
        return [Declared(f"{name}.weight", "F8_E4M3", shape), Declared(f"{name}.scale", "F8_E8M0", tiles)]
    if format is Format.MXFP4:
        return [
            Declared(f"{name}.weight", "I8", (rows, cols // 2)),
            Declared(f"{name}.scale", "F8_E8M0", (rows, -(-cols // MX_BLOCK))),
        ]
    assert format is Format.NVFP4
    return [
        Declared(f"{name}.weight", "U8", (rows, cols // 2)),
        Declared(f"{name}.weight_scale", "F8_E4M3", (rows, -(-cols // NV_BLOCK))),
        Declared(f"{name}.weight_scale_2", "F32", ()),
        Declared(f"{name}.input_scale", "F32", ()),
    ]


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
    folder: Path, tensors: list[Declared], data: Iterable["Tensor"], limit: int = SHARD_BYTES
) -> Iterator[int]:
    """Write all shards and the index; yields each tensor's bytes. `data` follows the order of `tensors`.

    Files appear under their final names only when complete.
    """
    groups = shards(tensors, limit)
    values = iter(data)
    index: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = shard_name(number, len(groups))
        index |= {tensor.name: name for tensor in group}
        yield from _write_file(folder / name, group, values)
    if len(groups) > 1:
        write_text(folder / INDEX, index_text(index, sum(tensor.num_bytes for tensor in tensors)))


def shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def index_text(index: dict[str, str], total_bytes: int) -> str:
    return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": index}, indent=1)


def header_bytes(group: Iterable[Declared]) -> bytes:
    """Everything of a file that lies before its tensors, which follow in this order without gaps."""
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
    return len(text).to_bytes(8, "little") + text


def _write_file(path: Path, group: list[Declared], values: Iterator["Tensor"]) -> Iterator[int]:
    import torch

    with disk.result(path) as part, part.open("wb") as file:
        file.write(header_bytes(group))
        for tensor in group:
            value = next(values)
            expected = (torch_type(tensor.dtype), tensor.shape)
            assert (value.dtype, tuple(value.shape)) == expected, tensor.name
            file.write(value.contiguous().flatten().view(torch.uint8).numpy().data)
            yield tensor.num_bytes


def write_text(path: Path, text: str) -> None:
    with disk.result(path) as part:
        part.write_text(text, encoding="utf-8")
