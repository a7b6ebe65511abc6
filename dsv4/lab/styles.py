"""The published formats: how names look, and which storage each kind of linear takes. Without torch."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from dsv4.config import ModelConfig
from dsv4.errors import ConfigError
from dsv4.model.params import Param, declare
from dsv4.quant.formats import Format
from dsv4.weights.detect import Source
from dsv4.weights.names import has_weight_suffix, hf_name
from dsv4.weights.sizes import tiled_format
from dsv4.weights.writer import Declared, declare_linear

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


def style_of(format: str) -> Style:
    if format not in STYLES:
        raise ConfigError(f"unknown format {format!r}; use one of {', '.join(STYLES)}")
    return STYLES[format]


def stored_config(config: ModelConfig, style: Style) -> ModelConfig:
    """The config that a checkpoint in that format has."""
    num_mtp = config.num_mtp_layers if not style.is_hf else 0
    return replace(config, num_mtp_layers=num_mtp, quantization=style.quantization)


def contents(config: ModelConfig, format: str) -> tuple[ModelConfig, list[Param], list[Declared]]:
    """What a checkpoint in that format holds: its config, its parameters, and its tensors in their order."""
    style = style_of(format)
    config = stored_config(config, style)
    params = declare(config, config.num_mtp_layers)
    return config, params, [tensor for param in params for tensor in stored_tensors(param, style)]


def format_in(param: Param, style: Style) -> Format:
    is_mtp = param.component == "mtp"
    if (is_mtp and style.is_mtp_plain) or ".markov_head." in param.name:
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


def stored_tensors(param: Param, style: Style) -> list[Declared]:
    name = (hf_name(param.name) if style.is_hf else None) or param.name
    stored = f"{name}.weight" if has_weight_suffix(param.name) else name
    if param.kind == "table":
        return [Declared(stored, "I64", param.shape)]
    if param.kind == "plain":
        is_norm = has_weight_suffix(param.name)
        return [Declared(stored, "BF16" if is_norm else "F32", param.shape)]
    rows, cols = param.shape
    format = format_in(param, style)
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


# The format of each component. modelopt: as ModelOpt publishes (c1). official: as DeepSeek publishes. nvfp4:
# every large linear in 4 bits.
LAYOUTS = {
    "official": {"routed experts": Format.MXFP4, "other": Format.FP8},
    "modelopt": {"routed experts": Format.NVFP4, "other": Format.FP8},
    "nvfp4": {"routed experts": Format.NVFP4, "other": Format.NVFP4},
}
_BF16 = ("embedding", "head", "gate", "compressor")


def format_of(param: Param, layout: str) -> Format:
    small = param.component in _BF16 or ".compressor." in param.name or "weights_proj" in param.name
    if small or param.stays_in_rows or param.name.endswith(".gate"):
        return Format.BF16
    # Every published layout leaves draft blocks as DeepSeek publishes them.
    kinds = LAYOUTS["official" if param.component == "mtp" else layout]
    return kinds["routed experts" if param.expert is not None else "other"]


def layout_of(sources: Iterable[tuple[Source, int]]) -> str:
    """The layout that a checkpoint is stored in, by its trunk's linears, each with how many are like it; for
    want of a name, their formats."""
    stored = Counter[tuple[str, Format]]()
    for source, count in sources:
        p = source.param
        if p.kind in ("linear", "grouped") and p.component not in (*_BF16, "mtp") and p.name != "embed":
            kind = "routed experts" if p.expert is not None else "other"
            stored[kind, tiled_format(source)] += source.num_bytes * count
    most = {kind: format for (kind, format), _ in sorted(stored.items(), key=lambda item: item[1])}
    named = next((name for name, formats in LAYOUTS.items() if formats == most), None)
    return named or ", ".join(f"{kind} {most[kind].value}" for kind in sorted(most, reverse=True))
