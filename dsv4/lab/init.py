"""Makes a random checkpoint in any published format, for tests and benchmarks. The same seed gives the same file."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.errors import ConfigError
from dsv4.lab.byte_tokenizer import MIN_VOCABULARY, byte_tokenizer_json
from dsv4.model.params import Param, declare
from dsv4.quant.codec import encode_weight
from dsv4.quant.formats import FP8_TILE, MX_BLOCK, NV_BLOCK, Format
from dsv4.weights.names import has_weight_suffix, hf_name
from dsv4.weights.writer import Declared, write_checkpoint, write_text

_FP8_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}


@dataclass(frozen=True)
class Style:
    """One published format: names, and which storage each kind of linear takes."""

    title: str
    is_hf: bool
    has_mtp: bool
    attention: Format
    shared: Format
    routed: Format
    mtp: Format | None  # None: as in the trunk, routed experts MXFP4
    float_scales: bool
    is_compressed: bool
    quantization: dict[str, Any]


STYLES = {
    "bf16": Style("official names, BF16", False, True, *[Format.BF16] * 3, Format.BF16, False, False, {}),
    "official": Style(
        "FP8 and MXFP4, as released",
        *(False, True, Format.FP8, Format.FP8, Format.MXFP4, None, False, False, _FP8_CONFIG),
    ),
    "modelopt": Style(
        "NVFP4 experts (NVIDIA ModelOpt)",
        *(False, True, Format.FP8, Format.FP8, Format.NVFP4, None, False, False),
        {**_FP8_CONFIG, "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16},
    ),
    "ct": Style(
        "compressed-tensors NVFP4 and FP8",
        *(False, True, Format.FP8, Format.NVFP4, Format.NVFP4, Format.BF16, True, True),
        {"quant_method": "compressed-tensors", "format": "mixed-precision"},
    ),
    "hfnvfp4": Style(
        "HF names, every large linear NVFP4",
        *(True, False, Format.NVFP4, Format.NVFP4, Format.NVFP4, None, False, False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    ),
    "fp8": Style(
        "FP8 only, float scales (Base)",
        *(False, True, Format.FP8, Format.FP8, Format.FP8, Format.FP8, True, False, _FP8_CONFIG),
    ),
    "hf-bf16": Style("HF names, BF16", True, False, *[Format.BF16] * 3, None, False, False, {}),
}


def make(folder: Path, config: ModelConfig, format: str, seed: int) -> Iterator[tuple[int, int]]:
    """Write config.json and the weights; yields (bytes done, bytes in all)."""
    if format not in STYLES:
        raise ConfigError(f"unknown format {format!r}; use one of {', '.join(STYLES)}")
    style = STYLES[format]
    num_mtp = config.num_mtp_layers if style.has_mtp else 0
    config = replace(config, num_mtp_layers=num_mtp, quantization=style.quantization)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    params = declare(config, num_mtp)
    tensors = [tensor for param in params for tensor in _declared(param, style)]
    total, done = sum(tensor.num_bytes for tensor in tensors), 0
    for count in write_checkpoint(folder, tensors, _values(params, style, config, seed)):
        done += count
        yield done, total
    if config.vocab_size >= MIN_VOCABULARY:
        write_text(folder / "tokenizer.json", byte_tokenizer_json(config.vocab_size))
    write_text(folder / "config.json", json.dumps(config.to_dict(), indent=1) + "\n")


def _format(param: Param, style: Style) -> Format:
    if param.name.startswith("mtp."):
        if style.mtp is Format.BF16:
            return Format.BF16
        trunk = {".experts.": style.mtp or Format.MXFP4, ".shared": style.shared}
        matches = [format for part, format in trunk.items() if part in param.name]
        if matches:
            return matches[0]
        return style.attention if param.name.endswith(("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "_proj")) else Format.BF16
    if param.component == "indexer" and param.name.endswith("wq_b"):
        return style.attention if style.attention is Format.FP8 else Format.BF16
    by_component = {
        "attention": style.attention,
        "shared experts": style.shared,
        "routed experts": style.routed,
    }
    return by_component.get(param.component, Format.BF16)


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
    if format is Format.BF16:
        return [Declared(stored, "BF16", param.shape)]
    if format is Format.FP8:
        scale = (-(-rows // FP8_TILE), -(-cols // FP8_TILE))
        suffix = "weight_scale_inv" if style.is_compressed or style.is_hf else "scale"
        kind = "F32" if style.float_scales else "F8_E8M0"
        return [Declared(stored, "F8_E4M3", param.shape), Declared(f"{name}.{suffix}", kind, scale)]
    if format is Format.MXFP4:
        return [
            Declared(stored, "I8", (rows, cols // 2)),
            Declared(f"{name}.scale", "F8_E8M0", (rows, -(-cols // MX_BLOCK))),
        ]
    block = Declared(f"{name}.weight_scale", "F8_E4M3", (rows, -(-cols // NV_BLOCK)))
    if style.is_compressed:
        return [
            Declared(f"{name}.weight_packed", "U8", (rows, cols // 2)),
            block,
            Declared(f"{name}.weight_global_scale", "F32", (1,)),
            Declared(f"{name}.input_global_scale", "F32", (1,)),
        ]
    return [
        Declared(stored, "U8", (rows, cols // 2)),
        block,
        Declared(f"{name}.weight_scale_2", "F32", ()),
        Declared(f"{name}.input_scale", "F32", ()),
    ]


def _values(params: list[Param], style: Style, config: ModelConfig, seed: int) -> Iterator[Tensor]:
    for index, param in enumerate(params):
        # A generator per tensor: the values do not depend on which other tensors are written.
        generator = torch.Generator().manual_seed((seed << 20) + index)
        if param.kind == "table":
            yield torch.rand(config.vocab_size, config.num_experts, generator=generator).argsort(1)[
                :, : config.experts_per_token
            ].contiguous()
        elif param.kind == "plain":
            value = _plain(param, generator)
            yield value.to(torch.bfloat16) if has_weight_suffix(param.name) else value
        else:
            std = 1.0 if param.name == "embed" else param.shape[1] ** -0.5
            weight = torch.randn(param.shape, generator=generator) * std
            yield from _stored(weight, _format(param, style), style)


def _plain(param: Param, generator: torch.Generator) -> Tensor:
    noise = torch.randn(param.shape, generator=generator)
    last = param.name.rsplit(".", 1)[-1]
    if last.endswith("_fn"):
        return noise * param.shape[1] ** -0.5
    if last.startswith("hc_"):
        return 0.5 * noise + (1.0 if last.endswith("scale") else 0.0)
    return noise * 0.1 + (1.0 if has_weight_suffix(param.name) else 0.0)


def _stored(weight: Tensor, format: Format, style: Style) -> Iterator[Tensor]:
    q = encode_weight(weight, format)
    yield q.data
    if format is Format.FP8 and style.float_scales:
        # Scales that are not powers of two, so that readers which assume they are get caught.
        assert q.scale is not None
        yield torch.exp2(q.scale.float() - 127) * 0.9
    elif q.scale is not None:
        yield q.scale
    if format is Format.NVFP4:
        ct = style.is_compressed
        yield torch.full((1,), 1 / q.global_scale) if ct else torch.tensor(q.global_scale)
        yield torch.full((1,), 2000.0) if ct else torch.tensor(1.0)
