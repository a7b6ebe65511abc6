"""config.json and hf_quant_config.json of a converted checkpoint: what other engines recognise it by."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from dsv4.lab.quantize.plan import Item, official_format
from dsv4.quant.formats import NV_BLOCK, Format

_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_PRODUCER = {"name": "modelopt", "version": "dsv4-nvfp4-experts"}
_NV_LAYER = {"quant_algo": "NVFP4", "group_size": NV_BLOCK}
_NV_NUMBERS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NV_BLOCK}
# A pattern names what is not NVFP4; one that would catch something that is gives way to its finer ones.
_IGNORE: dict[str, tuple[str, ...]] = {
    "*.attn.*": (
        *("*.attn.wq_a", "*.attn.wq_b", "*.attn.wkv", "*.attn.wo_a", "*.attn.wo_b", "*.attn.compressor.*"),
        *("*.attn.indexer.wq_b", "*.attn.indexer.weights_proj", "*.attn.indexer.compressor.*"),
    ),
    "*.ffn.shared_experts.*": (),
    "head": (),
    "mtp.*": (
        *("mtp.*.attn.*", "mtp.*.ffn.shared_experts.*", "mtp.*.ffn.gate", "mtp.*.e_proj", "mtp.*.h_proj"),
        *("mtp.*.main_proj", "mtp.*.markov_head.*"),
    ),
}


def quantization(
    items: Iterable[Item], before: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """-> the config.json's content, given that of the source, and hf_quant_config.json's if there is one."""
    formats: dict[str, Format] = {}
    scale_types, unquantised = set(), []
    for item in items:
        if item.source is None or item.source.param.kind in ("plain", "table"):
            continue
        format = item.format or item.source.format
        assert format is not None
        formats[item.name] = format
        if format is Format.FP8:
            scale_types.add(item.outputs[1].declared.dtype)
        if format.is_plain and official_format(item.source.param) is not Format.BF16:
            unquantised.append(item.name)
    experts = {f for name, f in formats.items() if name.startswith("layers.") and ".ffn.experts." in name}
    nvfp4 = [name for name, format in formats.items() if format is Format.NVFP4]
    # Routed experts of a layer are one entry, other linears one each.
    layers = {
        name.split(".experts.")[0] + ".experts" if ".experts." in name else name: _NV_LAYER for name in nvfp4
    }
    has_fp8 = not {Format.FP8, Format.MXFP4}.isdisjoint(formats.values())

    out = {key: value for key, value in before.items() if key not in ("quantization_config", "expert_dtype")}
    config: dict[str, Any] = {}
    if has_fp8:
        config |= _FP8 | ({"scale_fmt": "ue8m0"} if scale_types <= {"F8_E8M0"} else {})
        if unquantised:
            config["modules_to_not_convert"] = unquantised
    extra = None
    if nvfp4:
        algorithm = "MIXED_PRECISION" if has_fp8 else "NVFP4"
        ignore = _ignore(nvfp4) if has_fp8 else [*_ignore(nvfp4), "embed", "*.ffn.gate"]
        config |= {} if has_fp8 else {"quant_method": "modelopt"}
        config |= {
            "quant_algo": algorithm,
            **({"moe_quant_algo": "NVFP4"} if Format.NVFP4 in experts else {}),
            "group_size": NV_BLOCK,
            "kv_cache_quant_algo": None,
            "quantized_layers": layers,
            "ignore": ignore,
            "config_groups": {
                "group_0": {
                    "weights": _NV_NUMBERS,
                    "input_activations": _NV_NUMBERS,
                    "targets": ["Linear"],
                }
            },
            "producer": _PRODUCER,
        }
        extra = {
            "producer": _PRODUCER,
            "quantization": {
                "quant_algo": algorithm,
                "group_size": NV_BLOCK,
                "quantized_layers": layers,
                "exclude_modules": ignore,
            },
        }
    if not experts.isdisjoint({Format.MXFP4, Format.NVFP4}):
        out["expert_dtype"] = "fp4"
    elif Format.FP8 in experts:
        # Not left out, as some recasts do: vLLM takes a missing key for fp4.
        out["expert_dtype"] = "fp8"
    if config:
        out["quantization_config"] = config
    return out, extra


def _ignore(nvfp4: list[str]) -> list[str]:
    out = []
    for pattern, finer in _IGNORE.items():
        free = [p for p in (pattern, *finer) if not any(fnmatchcase(name, p) for name in nvfp4)]
        out += [pattern] if pattern in free else free
    return out
