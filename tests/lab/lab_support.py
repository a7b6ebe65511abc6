"""Checkpoints with a planted fault, or with the structure that training leaves."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import SMALL, Stored, Tensors, read_file, write_file, write_model

from dsv4.config import ModelConfig
from dsv4.quant.codec import decode, encode_weight
from dsv4.quant.formats import Format, QuantTensor

ROOT = Path(__file__).parents[2]


def altered(source: Path, target: Path, change: Callable[[Tensors], None]) -> Path:
    """A copy of a single-file model folder with other tensors."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, target)
    tensors = read_file(source / "model.safetensors")
    change(tensors)
    write_file(target / "model.safetensors", tensors)
    return target


def swap_nibbles(tensors: Tensors, only: str = "") -> None:
    for name, stored in tensors.items():
        if stored.dtype in ("U8", "I8") and only in name:
            codes = np.frombuffer(stored.data, np.uint8)
            stored.data[:] = (codes >> 4 | codes << 4).astype(np.uint8).tobytes()


def with_structure(folder: Path, config: ModelConfig = SMALL) -> Path:
    """A random ModelOpt checkpoint whose expert channels differ in strength, as those of a trained one do."""
    write_model(folder, "modelopt", config)
    tensors = read_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for layer in range(config.num_layers):
        for expert in range(config.num_experts):
            strength = torch.exp(0.4 * torch.randn(config.expert_width, generator=generator))
            base = f"layers.{layer}.ffn.experts.{expert}."
            for w in ("w1", "w3"):
                _scale(tensors, base + w, strength.unsqueeze(1))
            _scale(tensors, base + "w2", strength.unsqueeze(0))
    write_file(folder / "model.safetensors", tensors)
    return folder


def _scale(tensors: Tensors, name: str, factor: torch.Tensor) -> None:
    data, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
    factor_2 = float(np.frombuffer(tensors[f"{name}.weight_scale_2"].data, "<f4")[0])
    shape = (data.shape[0], 2 * data.shape[1])
    old = QuantTensor(Format.NVFP4, _bytes(data), shape, _bytes(scale), factor_2)
    new = encode_weight(decode(old) * factor, Format.NVFP4)
    assert new.scale is not None
    data.data[:], scale.data[:] = new.data.numpy().tobytes(), new.scale.numpy().tobytes()
    tensors[f"{name}.weight_scale_2"].data[:] = np.array(new.global_scale, "<f4").tobytes()


def _bytes(stored: Stored) -> torch.Tensor:
    return torch.frombuffer(stored.data, dtype=torch.uint8).clone().view(stored.shape)


def trained_model() -> Path:
    """The trained model that comes with the package or was put into build/; the test is skipped without."""
    for folder in (ROOT / "dsv4" / "models" / "tiny", ROOT / "build" / "tiny"):
        if (folder / "config.json").exists():
            return folder
    pytest.skip("no trained model in dsv4/models/tiny or build/tiny")
