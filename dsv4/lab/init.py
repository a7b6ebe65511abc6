"""Makes a random checkpoint in any published format, for tests and benchmarks. Same seed, same files."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.errors import ConfigError
from dsv4.lab.byte_tokenizer import MIN_VOCABULARY, byte_tokenizer_json
from dsv4.lab.files import size
from dsv4.model.params import Param, declare
from dsv4.quant.codec import encode_weight
from dsv4.quant.formats import Format
from dsv4.weights.names import has_weight_suffix, hf_name
from dsv4.weights.writer import Declared, declare_linear, write_checkpoint, write_text

_FP8_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}


@dataclass(frozen=True)
class Style:
    """One published format: how names look, and which storage each kind of linear takes."""

    attention: Format
    shared: Format
    routed: Format
    mtp_routed: Format = Format.MXFP4
    is_hf: bool = False  # Hugging Face names, no draft block
    is_mtp_plain: bool = False  # the draft block in BF16
    has_float_scales: bool = False  # FP8 scales in float32, not powers of two
    is_compressed: bool = False  # compressed-tensors: packed names, reciprocal global scales
    quantization: dict[str, Any] = field(default_factory=dict)


_NVFP4_CONFIG = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
STYLES = {
    "bf16": Style(Format.BF16, Format.BF16, Format.BF16, is_mtp_plain=True),
    "hf-bf16": Style(Format.BF16, Format.BF16, Format.BF16, is_hf=True),
    "official": Style(Format.FP8, Format.FP8, Format.MXFP4, quantization=_FP8_CONFIG),
    "modelopt": Style(
        *(Format.FP8, Format.FP8, Format.NVFP4),
        quantization={**_FP8_CONFIG, **_NVFP4_CONFIG, "quant_method": "fp8", "moe_quant_algo": "NVFP4"},
    ),
    "ct": Style(
        *(Format.FP8, Format.NVFP4, Format.NVFP4),
        is_mtp_plain=True,
        has_float_scales=True,
        is_compressed=True,
        quantization={"quant_method": "compressed-tensors", "format": "mixed-precision"},
    ),
    "hfnvfp4": Style(Format.NVFP4, Format.NVFP4, Format.NVFP4, is_hf=True, quantization=_NVFP4_CONFIG),
    "fp8": Style(
        *(Format.FP8, Format.FP8, Format.FP8, Format.FP8), has_float_scales=True, quantization=_FP8_CONFIG
    ),
}


def make(
    folder: Path, config: ModelConfig, format: str, seed: int, device: str = "cpu"
) -> Iterator[tuple[int, int]]:
    """Write config.json and the weights; yields (bytes done, bytes in all).

    Drawn and encoded on `device`: a GPU is faster, and draws other values.
    """
    if not 0 <= seed < 1 << 43:
        raise ConfigError(f"seed is {seed}, expected 0 to 2**43 - 1")
    config, params, tensors = contents(config, format)
    style = STYLES[format]
    total, done = sum(tensor.num_bytes for tensor in tensors), 0
    _claim(folder, total)
    values = (value.cpu() for value in _values(params, style, config, seed, device))
    for count in write_checkpoint(folder, tensors, values):
        done += count
        yield done, total
    if config.vocab_size >= MIN_VOCABULARY:
        write_text(folder / "tokenizer.json", byte_tokenizer_json(config.vocab_size))
    write_text(folder / "config.json", json.dumps(config.to_dict(), indent=1) + "\n")


def contents(config: ModelConfig, format: str) -> tuple[ModelConfig, list[Param], list[Declared]]:
    """What a checkpoint in that format holds: its config, its parameters, and its tensors in their order."""
    if format not in STYLES:
        raise ConfigError(f"unknown format {format!r}; use one of {', '.join(STYLES)}")
    style = STYLES[format]
    num_mtp = config.num_mtp_layers if not style.is_hf else 0
    config = replace(config, num_mtp_layers=num_mtp, quantization=style.quantization)
    params = declare(config, num_mtp)
    return config, params, [tensor for param in params for tensor in _declared(param, style)]


def _claim(folder: Path, total: int) -> None:
    """Make the folder, or refuse: it must be new or empty, and its disk must hold what will be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; give a new folder")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror or error}; give a new folder") from None
    if total > free:
        raise ConfigError(f"{folder} needs {size(total)}, but {size(free)} of disk are free")


def _format(param: Param, style: Style) -> Format:
    is_mtp = param.component == "mtp"
    if is_mtp and style.is_mtp_plain:
        return Format.BF16
    last = param.name.rsplit(".", 1)[-1]
    if ".ffn.experts." in param.name:
        return style.mtp_routed if is_mtp else style.routed
    if ".shared_experts." in param.name:
        return style.shared
    if param.component == "indexer" and last == "wq_b":
        return style.attention if style.attention is Format.FP8 else Format.BF16
    if param.component == "attention" or (is_mtp and last != "gate"):
        return style.attention
    return Format.BF16


def _declared(param: Param, style: Style) -> list[Declared]:
    name = (hf_name(param.name) if style.is_hf else None) or param.name
    stored = f"{name}.weight" if has_weight_suffix(param.name) else name
    if param.kind == "table":
        return [Declared(stored, "I64", param.shape)]
    if param.kind == "plain":
        is_norm = has_weight_suffix(param.name)
        return [Declared(stored, "BF16" if is_norm else "F32", param.shape)]
    rows, cols = param.shape
    format = _format(param, style)
    declared = declare_linear(name, (rows, cols), format)
    if format is Format.FP8:
        suffix = "weight_scale_inv" if style.is_compressed or style.is_hf else "scale"
        kind = "F32" if style.has_float_scales else "F8_E8M0"
        return [declared[0], Declared(f"{name}.{suffix}", kind, declared[1].shape)]
    if format is Format.NVFP4 and style.is_compressed:
        return [
            replace(declared[0], name=f"{name}.weight_packed"),
            declared[1],
            Declared(f"{name}.weight_global_scale", "F32", (1,)),
            Declared(f"{name}.input_global_scale", "F32", (1,)),
        ]
    return declared


def _values(
    params: list[Param], style: Style, config: ModelConfig, seed: int, device: str
) -> Iterator[Tensor]:
    for index, param in enumerate(params):
        # A generator per tensor: the values do not depend on which other tensors are written.
        generator = torch.Generator(device).manual_seed((seed << 20) + index)
        if param.kind == "table":
            yield (
                torch.rand(config.vocab_size, config.num_experts, generator=generator, device=device)
                .argsort(1)[:, : config.experts_per_token]
                .contiguous()
            )
        elif param.kind == "plain":
            value = _plain(param, generator)
            yield value.to(torch.bfloat16) if has_weight_suffix(param.name) else value
        else:
            std = 1.0 if param.name == "embed" else param.shape[1] ** -0.5
            weight = torch.randn(param.shape, generator=generator, device=device) * std
            yield from _stored(weight, _format(param, style), style)


def _plain(param: Param, generator: torch.Generator) -> Tensor:
    noise = torch.randn(param.shape, generator=generator, device=generator.device)
    last = param.name.rsplit(".", 1)[-1]
    if last.endswith("_fn"):
        return noise * param.shape[1] ** -0.5
    if last.startswith("hc_"):
        return 0.5 * noise + (1.0 if last.endswith("scale") else 0.0)
    return noise * 0.1 + (1.0 if has_weight_suffix(param.name) else 0.0)


def _stored(weight: Tensor, format: Format, style: Style) -> Iterator[Tensor]:
    q = encode_weight(weight, format)
    yield q.data
    if format is Format.FP8 and style.has_float_scales:
        # Scales that are not powers of two, so that readers which assume they are get caught.
        assert q.scale is not None
        yield torch.exp2(q.scale.float() - 127) * 0.9
    elif q.scale is not None:
        yield q.scale
    if format is Format.NVFP4:
        ct = style.is_compressed
        yield torch.full((1,), 1 / q.global_scale) if ct else torch.tensor(q.global_scale)
        yield torch.full((1,), 2000.0) if ct else torch.tensor(1.0)
