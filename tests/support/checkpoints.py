"""Checkpoint files for tests: made small, taken apart, damaged and put together again."""

import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch

from dsv4.config import LayerSpec, ModelConfig, preset
from dsv4.errors import CheckpointError, ConfigError
from dsv4.lab.init import make
from dsv4.weights.load import Checkpoint

# Every layer kind, hash routing and a draft block in under a megabyte. Widths of 128: one FP8 tile.
SMALL = replace(
    preset("tiny"),
    **{"hidden_size": 128, "vocab_size": 60, "num_heads": 2, "o_groups": 2, "num_experts": 3},
    **{"index_heads": 2, "num_streams": 2},
    layers=(LayerSpec("sliding", 0, True), LayerSpec("csa", 4, False), LayerSpec("hca", 128, False)),
)


@dataclass
class Stored:
    """One tensor as it lies in a file."""

    dtype: str
    shape: list[int]
    data: bytearray


Tensors = dict[str, Stored]


def write_model(folder: Path, style: str, config: ModelConfig = SMALL, seed: int = 3) -> Path:
    for _ in make(folder, config, style, seed):
        pass
    return folder


def read_file(path: Path) -> Tensors:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    out = {}
    for name, info in header.items():
        start, stop = info["data_offsets"]
        data = bytearray(raw[8 + length + start : 8 + length + stop])
        out[name] = Stored(info["dtype"], info["shape"], data)
    return out


def header_of(tensors: Tensors) -> dict[str, dict[str, Any]]:
    header, offset = {}, 0
    for name, stored in tensors.items():
        stop = offset + len(stored.data)
        header[name] = {"dtype": stored.dtype, "shape": stored.shape, "data_offsets": [offset, stop]}
        offset = stop
    return header


def write_file(path: Path, tensors: Tensors, header: Any = None) -> None:
    """Put a file together; `header` replaces the right one and may be any JSON value or raw bytes."""
    header = header_of(tensors) if header is None else header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    parts = [len(text).to_bytes(8, "little"), text, *(stored.data for stored in tensors.values())]
    path.write_bytes(b"".join(parts))


def stored_f32(*values: float, shape: list[int] | None = None) -> Stored:
    data = np.array(values, dtype="<f4").tobytes()
    return Stored("F32", [len(values)] if shape is None else shape, bytearray(data))


def zeros(dtype: str, shape: list[int]) -> Stored:
    size = {"F32": 4, "I64": 8, "BF16": 2, "F16": 2}.get(dtype, 1)
    return Stored(dtype, shape, bytearray(size * math.prod(shape)))


def open_with_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The file through the library's own reader."""
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def load_both(folder: Path) -> None:
    """Everything a load does, in both ways of holding weights."""
    checkpoint = Checkpoint.open(folder)
    checkpoint.load(dense=True)
    checkpoint.load(dense=False)


def refused(folder: Path, *words: str) -> None:
    """Both ways of loading end within a second in an error that holds the words."""
    for dense in (True, False):
        start = time.perf_counter()
        with pytest.raises((CheckpointError, ConfigError)) as caught:
            Checkpoint.open(folder).load(dense)
        assert time.perf_counter() - start < 1.0
        message = str(caught.value)
        for word in words:
            assert word in message, f"{word!r} is not in: {message}"
        assert len(message) < 1000
