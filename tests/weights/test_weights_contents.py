"""Sound files whose tensors make no model: no numbers, missing, left over, misshapen, of a wrong type."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoints import SMALL, Stored, Tensors, read_file, refused, stored_f32, write_file, zeros


def test_small_config_is_what_the_cases_assume() -> None:
    assert [layer.kind for layer in SMALL.layers] == ["sliding", "csa", "hca"]
    assert (SMALL.num_experts, SMALL.vocab_size, SMALL.hidden_size, SMALL.num_mtp_layers) == (3, 60, 128, 1)


CSA = "layers.1.attn.indexer"
EXPERT = "layers.1.ffn.experts.2.w1"


def put(tensors: Tensors, name: str, offset: int, data: bytes) -> None:
    assert name in tensors
    tensors[name].data[offset : offset + len(data)] = data


def value(kind: str, number: float) -> bytes:
    if kind == "bf16":
        return (np.array([number], "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return np.array([number], "<f4").tobytes()


def drop(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def swap(name: str, new: Stored) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: new})


def rename_dtype(name: str, dtype: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name].dtype = dtype

    return change


def reshape(name: str, *shape: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name].shape = list(shape)

    return change


def poke(name: str, offset: int, data: bytes) -> Callable[[Tensors], None]:
    return lambda tensors: put(tensors, name, offset, data)


AGAIN = "download or convert it again"
FIT = "check that config.json belongs to these weights"
Case = tuple[str, Callable[[Tensors], None], tuple[str, ...]]
CONTENTS: dict[str, Case] = {
    # What is no number.
    "E8M0 NaN in an FP8 scale": (
        "official",
        poke("layers.0.attn.wq_a.scale", 0, b"\xff"),
        ("layers.0.attn.wq_a.scale", AGAIN),
    ),
    "E8M0 NaN in the scale of a grouped weight": (
        "official",
        poke("layers.2.attn.wo_a.scale", 0, b"\xff"),
        ("layers.2.attn.wo_a.scale", AGAIN),
    ),
    "E8M0 NaN in an MXFP4 scale": (
        "official",
        poke(f"{EXPERT}.scale", 77, b"\xff"),
        (f"{EXPERT}.scale", AGAIN),
    ),
    "E8M0 NaN in a draft expert": (
        "modelopt",
        poke("mtp.0.ffn.experts.0.w2.scale", 5, b"\xff"),
        ("mtp.0.ffn.experts.0.w2.scale", AGAIN),
    ),
    "E4M3 NaN in an NVFP4 scale": (
        "modelopt",
        poke(f"{EXPERT}.weight_scale", 100, b"\x7f"),
        (f"{EXPERT}.weight_scale", AGAIN),
    ),
    "negative E4M3 NaN in an NVFP4 scale": (
        "modelopt",
        poke(f"{EXPERT}.weight_scale", 100, b"\xff"),
        (f"{EXPERT}.weight_scale", AGAIN),
    ),
    "NaN as the global scale": (
        "modelopt",
        poke(f"{EXPERT}.weight_scale_2", 0, value("f32", np.nan)),
        (f"{EXPERT}.weight_scale_2", AGAIN),
    ),
    "infinity as the global scale": (
        "modelopt",
        poke(f"{EXPERT}.weight_scale_2", 0, value("f32", np.inf)),
        (f"{EXPERT}.weight_scale_2", AGAIN),
    ),
    "zero as the reciprocal global scale": (
        "ct",
        poke(f"{EXPERT}.weight_global_scale", 0, value("f32", 0.0)),
        (f"{EXPERT}.weight_global_scale", AGAIN),
    ),
    "the smallest float as the reciprocal global scale": (
        "ct",
        poke(f"{EXPERT}.weight_global_scale", 0, value("f32", 1e-45)),
        (f"{EXPERT}.weight_global_scale", AGAIN),
    ),
    "NaN as the reciprocal global scale": (
        "ct",
        poke(f"{EXPERT}.weight_global_scale", 0, value("f32", np.nan)),
        (f"{EXPERT}.weight_global_scale", AGAIN),
    ),
    "NaN in a float scale": (
        "fp8",
        poke(f"{EXPERT}.scale", 0, value("f32", np.nan)),
        (f"{EXPERT}.scale", AGAIN),
    ),
    "infinity in a float scale": (
        "fp8",
        poke("layers.0.attn.wkv.scale", 0, value("f32", -np.inf)),
        ("layers.0.attn.wkv.scale", AGAIN),
    ),
    "NaN among FP8 codes": (
        "official",
        poke("layers.0.attn.wq_b.weight", 3 * 128 + 5, b"\x7f"),
        ("layers.0.attn.wq_b.weight", "[3, 5]", AGAIN),
    ),
    "negative NaN among the FP8 codes of a grouped weight": (
        "official",
        poke("layers.0.attn.wo_a.weight", 3 * 128 + 5, b"\xff"),
        ("layers.0.attn.wo_a.weight", "[3, 5]", AGAIN),
    ),
    "NaN in a BF16 linear": (
        "bf16",
        poke("layers.1.attn.wkv.weight", 2 * (7 * 128 + 9), value("bf16", np.nan)),
        ("layers.1.attn.wkv.weight", "[7, 9]", AGAIN),
    ),
    "infinity in the embedding": (
        "bf16",
        poke("embed.weight", 2 * (59 * 128 + 127), value("bf16", np.inf)),
        ("embed.weight", "[59, 127]", AGAIN),
    ),
    "NaN in the head": (
        "bf16",
        poke("head.weight", 0, value("bf16", np.nan)),
        ("head.weight", "[0, 0]", AGAIN),
    ),
    "NaN in a norm": (
        "official",
        poke("norm.weight", 6, value("bf16", np.nan)),
        ("norm.weight", "[3]", AGAIN),
    ),
    "infinity in a sink": (
        "official",
        poke("layers.2.attn.attn_sink", 4, value("f32", np.inf)),
        ("layers.2.attn.attn_sink", "[1]", AGAIN),
    ),
    "an expert that does not exist": (
        "official",
        poke("layers.0.ffn.gate.tid2eid", 16, np.array([3], "<i8").tobytes()),
        ("layers.0.ffn.gate.tid2eid", "names experts 0 to 3, expected 0 to 2", "another model"),
    ),
    "a negative expert": (
        "official",
        poke("layers.0.ffn.gate.tid2eid", 16, np.array([-1], "<i8").tobytes()),
        ("layers.0.ffn.gate.tid2eid", "names experts -1 to 2", "another model"),
    ),
    # What is missing.
    "no embedding": ("official", drop("embed.weight"), ("embed.weight", "give the folder of a DeepSeek-V4")),
    "no index keys": (
        "official",
        drop(f"{CSA}.compressor.wkv.weight"),
        (f"{CSA}.compressor.wkv.weight", "1 tensors are missing", "download"),
    ),
    "no indexer": (
        "official",
        lambda t: [t.pop(n) for n in list(t) if n.startswith(CSA)],
        (f"{CSA}.wq_b.weight", "6 tensors are missing", "download"),
    ),
    "no indexer under HF names": (
        "hf-bf16",
        drop("model.layers.1.self_attn.compressor.indexer.scorer.weights_proj.weight"),
        ("model.layers.1.self_attn.compressor.indexer.scorer.weights_proj.weight", "download"),
    ),
    "no compressor bias": (
        "official",
        drop("layers.2.attn.compressor.ape"),
        ("layers.2.attn.compressor.ape",),
    ),
    "no router bias": ("official", drop("layers.1.ffn.gate.bias"), ("layers.1.ffn.gate.bias", "missing")),
    "no hash table": (
        "official",
        drop("layers.0.ffn.gate.tid2eid"),
        ("layers.0.ffn.gate.tid2eid", "missing"),
    ),
    "no expert weight": ("official", drop(f"{EXPERT}.weight"), (f"{EXPERT}.weight", "missing")),
    "no FP8 scale": (
        "official",
        drop("layers.0.attn.wkv.scale"),
        ("layers.0.attn.wkv.weight is F8_E4M3 without a block scale", "incomplete"),
    ),
    "no MXFP4 scale": (
        "official",
        drop(f"{EXPERT}.scale"),
        (f"{EXPERT}.weight is I8 without a block scale", "incomplete"),
    ),
    "no global scale": (
        "modelopt",
        drop(f"{EXPERT}.weight_scale_2"),
        (f"{EXPERT}.weight", "no .weight_scale_2", "incomplete"),
    ),
    "no reciprocal global scale": (
        "ct",
        drop(f"{EXPERT}.weight_global_scale"),
        (f"{EXPERT}.weight_packed", "weight_global_scale", "incomplete"),
    ),
    "no NVFP4 block scale": (
        "modelopt",
        drop(f"{EXPERT}.weight_scale"),
        (f"{EXPERT}.weight is U8 without a block scale", "incomplete"),
    ),
    # What is too much.
    "a left-over tensor": (
        "official",
        swap("layers.0.attn.wq_c.weight", zeros("BF16", [4])),
        ("1 tensors belong to no parameter", "layers.0.attn.wq_c.weight", "model.safetensors", "removed"),
    ),
    "a layer too many": (
        "official",
        swap("layers.3.attn_norm.weight", zeros("BF16", [128])),
        ("layers.3.attn_norm.weight", "config.json is of another model"),
    ),
    "an indexer in an HCA layer": (
        "official",
        swap("layers.2.attn.indexer.wq_b.weight", zeros("BF16", [4])),
        ("layers.2.attn.indexer.wq_b.weight", "belong to no parameter"),
    ),
    "a bias beside a hash table": (
        "official",
        swap("layers.0.ffn.gate.bias", stored_f32(0, 0, 0)),
        ("layers.0.ffn.gate.bias", "belong to no parameter"),
    ),
    "two block scales": (
        "official",
        swap("layers.0.attn.wkv.weight_scale_inv", zeros("F8_E8M0", [1, 1])),
        ("layers.0.attn.wkv.weight has competing scales", "weight_scale_inv", "convert"),
    ),
    "two global scales": (
        "modelopt",
        swap(f"{EXPERT}.weight_global_scale", stored_f32(1.0)),
        (f"{EXPERT}.weight has competing scales", "weight_global_scale", "convert"),
    ),
    "a global scale beside FP8": (
        "official",
        swap("layers.0.attn.wkv.weight_scale_2", stored_f32(0.5, shape=[])),
        ("layers.0.attn.wkv.weight_scale_2", "expected one scale", "convert"),
    ),
    "packed beside plain": (
        "ct",
        swap(f"{EXPERT}.weight", zeros("BF16", [128, 128])),
        (f"{EXPERT}.weight", "belong to no parameter"),
    ),
    # Wrong shapes and types.
    "a transposed weight": (
        "bf16",
        reshape("layers.0.attn.wq_b.weight", 128, 256),
        ("layers.0.attn.wq_b.weight: shape is [128, 256], expected [256, 128]", FIT),
    ),
    "a flattened weight": (
        "bf16",
        reshape("layers.0.attn.wq_a.weight", 128 * 128),
        ("layers.0.attn.wq_a.weight: shape", FIT),
    ),
    "a weight of three dimensions": (
        "bf16",
        reshape("layers.0.attn.wq_a.weight", 1, 128, 128),
        ("layers.0.attn.wq_a.weight: shape is [1, 128, 128], expected [128, 128]", FIT),
    ),
    "an embedding of three dimensions": (
        "bf16",
        reshape("embed.weight", 2, 30, 128),
        ("embed.weight: shape is [2, 30, 128], expected [60, 128]", FIT),
    ),
    "a norm of two dimensions": (
        "bf16",
        reshape("norm.weight", 1, 128),
        ("norm.weight: shape is [1, 128], expected [128]", FIT),
    ),
    "another vocabulary": (
        "bf16",
        swap("head.weight", zeros("BF16", [61, 128])),
        ("head.weight: shape is [61, 128], expected [60, 128]", FIT),
    ),
    "a swizzled NVFP4 scale": (
        "modelopt",
        reshape(f"{EXPERT}.weight_scale", 1, 2, 32, 4, 4),
        (f"{EXPERT}.weight_scale: shape", "expected [128, 8] for nvfp4 (linear, not swizzled)"),
    ),
    "a flat swizzled NVFP4 scale": (
        "modelopt",
        reshape(f"{EXPERT}.weight_scale", 1024),
        (f"{EXPERT}.weight_scale: shape is [1024]", "not swizzled"),
    ),
    "a padded NVFP4 scale": (
        "modelopt",
        swap(f"{EXPERT}.weight_scale", zeros("F8_E4M3", [128, 12])),
        (f"{EXPERT}.weight_scale: shape is [128, 12], expected [128, 8]", "not swizzled"),
    ),
    "an MXFP4 scale for blocks of 16": (
        "official",
        swap(f"{EXPERT}.scale", zeros("F8_E8M0", [128, 8])),
        (f"{EXPERT}.scale: shape is [128, 8], expected [128, 4]", FIT),
    ),
    "a transposed FP8 scale": (
        "official",
        reshape("layers.0.attn.wq_b.scale", 1, 2),
        ("layers.0.attn.wq_b.scale: shape is [1, 2], expected [2, 1]", FIT),
    ),
    "a global scale per row": (
        "modelopt",
        swap(f"{EXPERT}.weight_scale_2", zeros("F32", [128])),
        (f"{EXPERT}.weight_scale_2: shape is [128], expected a scalar", FIT),
    ),
    "a global scale in BF16": (
        "modelopt",
        swap(f"{EXPERT}.weight_scale_2", zeros("BF16", [])),
        (f"{EXPERT}.weight_scale_2: dtype is BF16, expected F32", FIT),
    ),
    "a norm in F16": (
        "official",
        rename_dtype("norm.weight", "F16"),
        ("norm.weight: dtype is F16, expected BF16 or F32", FIT),
    ),
    "a linear in F16": (
        "bf16",
        rename_dtype("layers.0.attn.wq_a.weight", "F16"),
        ("layers.0.attn.wq_a.weight is F16 without a block scale",),
    ),
    "E5M2 codes": (
        "official",
        rename_dtype("layers.0.attn.wq_a.weight", "F8_E5M2"),
        ("layers.0.attn.wq_a.weight: dtype is F8_E5M2", FIT),
    ),
    "E4M3 scales of FP8": (
        "official",
        rename_dtype("layers.0.attn.wq_a.scale", "F8_E4M3"),
        ("layers.0.attn.wq_a.scale: dtype is F8_E4M3, expected F8_E8M0 or F32 or BF16", FIT),
    ),
    "E8M0 scales with a global scale": (
        "modelopt",
        rename_dtype(f"{EXPERT}.weight_scale", "F8_E8M0"),
        (f"{EXPERT}.weight_scale: dtype is F8_E8M0, expected F8_E4M3", FIT),
    ),
    "a hash table in F64": (
        "official",
        rename_dtype("layers.0.ffn.gate.tid2eid", "F64"),
        ("layers.0.ffn.gate.tid2eid: dtype is F64, expected I64 or I32", FIT),
    ),
    "a quantised embedding": (
        "official",
        lambda t: t.update(
            {
                "embed.weight": zeros("F8_E4M3", [60, 128]),
                "embed.scale": zeros("F8_E8M0", [1, 1]),
            }
        ),
        ("embed.weight: dtype is F8_E4M3, expected BF16 or F32", FIT),
    ),
}


@pytest.mark.parametrize("case", CONTENTS)
def test_contents_that_make_no_model(case: str, originals: dict[str, Path], place: Callable) -> None:
    style, change, words = CONTENTS[case]
    folder = place(style)
    tensors = read_file(originals[style] / "model.safetensors")
    change(tensors)
    write_file(folder / "model.safetensors", tensors)
    refused(folder, *words)


FUSED = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("shape", "dtype", "scale"),
    [
        ([2, 256, 128], "BF16", None),
        ([4, 256, 128], "BF16", None),
        ([3, 128, 128], "BF16", None),
        ([3, 256, 64], "BF16", None),
        ([768, 128], "BF16", None),
        ([3, 256, 64], "I8", [3, 256, 8]),
        ([3, 256, 64], "I8", [768, 4]),
        ([3, 256, 128], "F8_E4M3", [3, 1, 1]),
    ],
)
def test_wrong_fused_experts(
    shape: list[int], dtype: str, scale: list[int] | None, originals: dict[str, Path], place: Callable
) -> None:
    """One expert too few or too many, no up half, wrong scales: rows would be read that are not there."""
    folder = place("hf-bf16")
    tensors = read_file(originals["hf-bf16"] / "model.safetensors")
    for name in list(tensors):
        if ".layers.0.mlp.experts." in name and not name.endswith("down_proj.weight"):
            del tensors[name]
    tensors[FUSED] = zeros(dtype, shape)
    if scale:
        tensors[f"{FUSED}_scale_inv"] = zeros("F8_E8M0", scale)
    write_file(folder / "model.safetensors", tensors)
    refused(folder, FUSED, "shape", FIT)


def test_config_of_another_model(originals: dict[str, Path], place: Callable) -> None:
    folder = place("official")
    (folder / "model.safetensors").write_bytes((originals["official"] / "model.safetensors").read_bytes())
    text = json.loads((folder / "config.json").read_text())
    for change, words in (
        ({"n_routed_experts": 4}, ("layers.0.ffn.gate.weight: shape is [3, 128], expected [4, 128]", FIT)),
        ({"num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4, 0]}, ("missing", "layers.3.attn_norm")),
        ({"num_hidden_layers": 2, "compress_ratios": [0, 4, 0]}, ("belong to no parameter", "layers.2.")),
        ({"vocab_size": 61}, ("embed.weight: shape is [60, 128], expected [61, 128]", FIT)),
        ({"compress_ratios": [0, 128, 128, 0]}, ("layers.1.attn.compressor", FIT)),
    ):
        (folder / "config.json").write_text(json.dumps(text | change))
        refused(folder, *words)
