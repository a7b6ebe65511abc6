"""Loading: every format against a decode written here from the raw bytes; fused, packed, sharded; memory."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
from checkpoints import (
    SMALL,
    Stored,
    Tensors,
    open_with_safetensors,
    read_file,
    write_file,
    write_model,
    zeros,
)

from dsv4.config import preset
from dsv4.lab.styles import STYLES
from dsv4.model.bundle import Weights
from dsv4.model.params import Param, declare
from dsv4.quant.codec import decode
from dsv4.quant.formats import QuantTensor
from dsv4.weights.load import Checkpoint
from dsv4.weights.reader import DTYPES, INDEX, Reader, torch_type
from dsv4.weights.writer import Declared, write_checkpoint

# The published renames, in their order, as regular expressions on a stored name.
RENAMES = [
    (r"^layers\.", "model.layers."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"^embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^norm\.", "model.norm."),
    (r"^hc_head_", "model.hc_head.hc_"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.indexer\.weights_proj\.", ".compressor.indexer.scorer.weights_proj."),
    (r"\.indexer\.wq_b\.", ".compressor.indexer.q_b_proj."),
    (r"(compressor(\.indexer)?)\.norm\.", r"\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    *(
        (rf"\.w{a}\.", f".{b}_proj.")
        for a, b in (("q_a", "q_a"), ("q_b", "q_b"), ("kv", "kv"), ("gate", "gate"))
    ),
    (r"\.wo_(a|b)\.", r".o_\1_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    *((rf"\.w{a}\.", f".{b}_proj.") for a, b in ((1, "gate"), (2, "down"), (3, "up"))),
]


def to_hf(name: str) -> str:
    for pattern, new in RENAMES:
        name = re.sub(pattern, new, name)
    return name


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


def as_float(tensor: torch.Tensor) -> np.ndarray:
    """BF16 or F32 -> float32, BF16 by shifting its bits."""
    if tensor.dtype == torch.bfloat16:
        bits = tensor.contiguous().view(torch.int16).numpy().astype(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32)
    assert tensor.dtype == torch.float32
    return tensor.numpy()


def decoded(stored: dict[str, torch.Tensor], base: str) -> np.ndarray:
    """The values of a linear by the table of companions, from the library's tensors."""
    if packed := (f"{base}.weight_packed" in stored):
        weight, divisor = stored[f"{base}.weight_packed"], stored[f"{base}.weight_global_scale"]
        return oracle.decode_nvfp4(
            as_bytes(weight), as_bytes(stored[f"{base}.weight_scale"]), divisor.numpy(), divides=packed
        )
    weight = stored[f"{base}.weight"]
    if f"{base}.weight_scale_2" in stored:
        factor = stored[f"{base}.weight_scale_2"].numpy()
        scale = as_bytes(stored[f"{base}.weight_scale"])
        return oracle.decode_nvfp4(as_bytes(weight), scale, factor, divides=False)
    if weight.dtype == torch.float8_e4m3fn:
        scale = next(stored[key] for s in ("scale", "weight_scale_inv") if (key := f"{base}.{s}") in stored)
        is_power = scale.dtype == torch.float8_e8m0fnu
        return oracle.decode_fp8(
            as_bytes(weight), oracle.E8M0[as_bytes(scale)] if is_power else as_float(scale)
        )
    if weight.dtype == torch.int8:
        return oracle.decode_mxfp4(as_bytes(weight), as_bytes(stored[f"{base}.scale"]))
    return as_float(weight)


def round_bf16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32).astype(np.uint64)
    bits = bits + 0x7FFF + (bits >> 16 & 1)
    return (bits.astype(np.uint32) & 0xFFFF0000).view(np.float32)


def values_of(weights: Weights, param: Param) -> np.ndarray:
    """Loaded values in the logical shape; a dense linear is held as [K, N]."""
    held = weights.tensors[param.name]
    if isinstance(held, QuantTensor):
        return decode(held).numpy()
    return held.t().numpy() if param.kind in ("linear", "grouped") else held.numpy()


def is_hf(folder: Path) -> bool:
    return "model.embed_tokens.weight" in read_file(folder / "model.safetensors")


def params_of(folder: Path) -> list[Param]:
    """Hugging Face checkpoints carry no draft block."""
    return declare(SMALL, 0 if is_hf(folder) else 1)


# Two float32 roundings of a reciprocal against the one of a division: three half-ulps.
RECIPROCAL_SLACK = 3 * 2.0**-24


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "packed"])
def test_every_format_loads_what_its_bytes_mean(style: str, dense: bool, originals: dict[str, Path]) -> None:
    folder = originals[style]
    stored = open_with_safetensors(folder / "model.safetensors")
    weights, params = Checkpoint.open(folder).load(dense), params_of(folder)
    assert weights.tensors.keys() == {param.name for param in params}
    rename = to_hf if is_hf(folder) else str
    for param in params:
        name, got = rename(f"{param.name}.weight"), values_of(weights, param)
        if param.kind == "table":
            np.testing.assert_array_equal(got, stored[rename(param.name)].numpy())
            continue
        if param.kind == "plain":
            want = as_float(stored[name] if name in stored else stored[rename(param.name)])
            np.testing.assert_array_equal(got, want)
            continue
        base = name.removesuffix(".weight")
        want = decoded(stored, base)
        if param.kind == "grouped" and stored[f"{base}.weight"].dtype == torch.float8_e4m3fn:
            want = round_bf16(want)
        if f"{base}.weight_global_scale" in stored:
            worst = np.abs(got - want) - RECIPROCAL_SLACK * np.abs(want)
            assert worst.max() <= 0, param.name
        else:
            np.testing.assert_array_equal(got, want, err_msg=param.name)


@pytest.mark.parametrize("style", STYLES)
def test_dense_and_packed_hold_equal_values(style: str, originals: dict[str, Path]) -> None:
    checkpoint = Checkpoint.open(originals[style])
    dense, packed = checkpoint.load(dense=True), checkpoint.load(dense=False)
    assert dense.quantised == packed.quantised
    for param in params_of(originals[style]):
        np.testing.assert_array_equal(values_of(dense, param), values_of(packed, param), param.name)


def test_quantised_names_are_those_stored_in_few_bits(originals: dict[str, Path]) -> None:
    for style in ("bf16", "hf-bf16"):
        assert Checkpoint.open(originals[style]).load(dense=False).quantised == frozenset()
    stored = read_file(originals["ct"] / "model.safetensors")
    want = {
        name.removesuffix(".weight_packed").removesuffix(".weight")
        for name, tensor in stored.items()
        if name.endswith((".weight", ".weight_packed")) and tensor.dtype in ("U8", "F8_E4M3")
    }
    assert Checkpoint.open(originals["ct"]).load(dense=False).quantised == want


def test_input_scales_do_not_matter(originals: dict[str, Path], tmp_path: Path) -> None:
    """Calibration constants of activations are never part of a weight."""
    for style in ("modelopt", "ct"):
        folder = tmp_path / style
        folder.mkdir()
        (folder / "config.json").write_bytes((originals[style] / "config.json").read_bytes())
        tensors = read_file(originals[style] / "model.safetensors")
        for name, stored in tensors.items():
            if name.endswith(("input_scale", "input_global_scale")):
                stored.data[:] = np.array([3e7], "<f4").tobytes()
        write_file(folder / "model.safetensors", tensors)
        assert_same_weights(originals[style], folder, dense=True)


def assert_same_weights(one: Path, other: Path, dense: bool) -> None:
    first, second = Checkpoint.open(one), Checkpoint.open(other)
    a, b = first.load(dense), second.load(dense)
    assert (a.tensors.keys(), a.quantised) == (b.tensors.keys(), b.quantised)
    for source in first.inventory.sources:
        np.testing.assert_array_equal(
            values_of(a, source.param), values_of(b, source.param), source.param.name
        )


def fuse(tensors: Tensors, num_layers: int, num_experts: int, scale_suffix: str | None) -> Tensors:
    """Stack the unfused Hugging Face experts of a file into gate_up_proj and down_proj."""
    out = {name: stored for name, stored in tensors.items() if not re.search(r"\.mlp\.experts\.\d", name)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        for fused, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            endings = [("", "weight")] + ([("_scale_inv", scale_suffix)] if scale_suffix else [])
            for ending, suffix in endings:
                pieces = [
                    tensors[f"{prefix}.{expert}.{part}.{suffix}"]
                    for expert in range(num_experts)
                    for part in parts
                ]
                rows = pieces[0].shape[0] * len(parts)
                shape = [num_experts, rows, pieces[0].shape[1]]
                data = bytearray(b"".join(piece.data for piece in pieces))
                out[f"{prefix}.{fused}{ending}"] = Stored(pieces[0].dtype, shape, data)
    return out


@pytest.mark.parametrize(("style", "suffix"), [("bf16", None), ("official", "scale"), ("fp8", "scale")])
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "packed"])
def test_fused_experts_equal_unfused(
    style: str, suffix: str | None, dense: bool, originals: dict[str, Path], tmp_path: Path
) -> None:
    """HF's [E, 2I, D] tensors in BF16, FP4 (I8 codes) and FP8 with float scales, on Hugging Face names."""
    config = replace(SMALL, num_mtp_layers=0)
    unfused, fused = tmp_path / "unfused", tmp_path / "fused"
    tensors = {
        to_hf(name): stored
        for name, stored in read_file(originals[style] / "model.safetensors").items()
        if not name.startswith("mtp.")
    }
    for folder, held in (
        (unfused, tensors),
        (fused, fuse(tensors, config.num_layers, config.num_experts, suffix)),
    ):
        write_model(folder, "hf-bf16", config)
        write_file(folder / "model.safetensors", held)
    assert_same_weights(unfused, fused, dense)
    inventory, total = Checkpoint.open(fused).inventory, Checkpoint.open(unfused).inventory.num_bytes
    assert inventory.num_bytes == total, "a fused tensor's bytes are shared out without rest"
    official = Checkpoint.open(originals[style]).load(dense)
    loaded = Checkpoint.open(fused).load(dense)
    for param in declare(config, 0):
        np.testing.assert_array_equal(values_of(loaded, param), values_of(official, param), param.name)


@pytest.mark.parametrize("style", ["official", "modelopt"])
def test_shards_equal_a_single_file(style: str, originals: dict[str, Path], tmp_path: Path) -> None:
    file = originals[style] / "model.safetensors"
    with Reader(file) as reader:
        declared = [Declared(e.name, e.dtype, e.shape) for e in reader.entries.values()]
        data = [reader.read(tensor.name).reshape(tensor.shape) for tensor in declared]
    written = list(write_checkpoint(tmp_path, declared, data, limit=100_000))
    assert written == [tensor.num_bytes for tensor in declared]
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 5 and (tmp_path / INDEX).exists() and not list(tmp_path.glob("*.part"))
    # The library reads our shards, and finds in them the tensors of the single file.
    library = {name: tensor for shard in shards for name, tensor in open_with_safetensors(shard).items()}
    whole = open_with_safetensors(file)
    assert library.keys() == whole.keys()
    for name, tensor in whole.items():
        assert library[name].dtype == tensor.dtype and library[name].shape == tensor.shape
        assert np.array_equal(as_bytes(library[name].flatten()), as_bytes(tensor.flatten())), name
    (tmp_path / "config.json").write_bytes((originals[style] / "config.json").read_bytes())
    assert_same_weights(originals[style], tmp_path, dense=False)
    # Without the index the shards are found by name.
    (tmp_path / INDEX).unlink()
    assert_same_weights(originals[style], tmp_path, dense=False)


def test_shard_limit_is_kept() -> None:
    from dsv4.weights.writer import shards

    tensors = [Declared(str(i), "U8", (size,)) for i, size in enumerate([40, 40, 40, 200, 10, 90, 1])]
    sizes = [[tensor.num_bytes for tensor in group] for group in shards(tensors, limit=100)]
    assert sizes == [[40, 40], [40], [200], [10, 90], [1]]


def test_stopped_writing_leaves_nothing_half_made(tmp_path: Path) -> None:
    declared = [Declared("a", "U8", (10,)), Declared("b", "U8", (10,))]
    data = [torch.zeros(10, dtype=torch.uint8)] * 2
    steps = write_checkpoint(tmp_path, declared, data)
    assert next(steps) == 10
    steps.close()
    assert list(tmp_path.iterdir()) == []


def test_reader_gives_rows_of_any_rank(tmp_path: Path) -> None:
    values = np.arange(2 * 3 * 4, dtype="<f4")
    tensors = {
        "cube": Stored("F32", [2, 3, 4], bytearray(values.tobytes())),
        "empty": zeros("F32", [0, 4]),
        "vector": Stored("F32", [24], bytearray(values.tobytes())),
        "scalar": Stored("F32", [], bytearray(values[5:6].tobytes())),
        "codes": Stored("I8", [2, 3], bytearray(b"\xff\x00\x80\x7f\x01\x02")),
    }
    write_file(tmp_path / "x.safetensors", tensors)
    with Reader(tmp_path / "x.safetensors") as reader:
        assert torch.equal(reader.read("cube"), torch.arange(24.0).view(6, 4))
        assert torch.equal(reader.read("cube", 1, 4), torch.arange(24.0).view(6, 4)[1:4])
        assert torch.equal(reader.read("vector"), torch.arange(24.0))
        assert reader.read("scalar").shape == () and reader.read("scalar") == 5
        assert reader.read("empty").shape == (0, 4)
        assert reader.read("codes").tolist() == [[255, 0, 128], [127, 1, 2]], "raw bytes, not signed numbers"


def test_every_dtype_has_its_size() -> None:
    for name, (size, _) in DTYPES.items():
        assert torch_type(name).itemsize == size, name


def test_a_file_may_be_opened_instead_of_its_folder(originals: dict[str, Path]) -> None:
    file = originals["official"] / "model.safetensors"
    assert Checkpoint.open(file).inventory == Checkpoint.open(originals["official"]).inventory


def test_progress_reaches_the_total(originals: dict[str, Path]) -> None:
    checkpoint = Checkpoint.open(originals["modelopt"])
    seen: list[tuple[int, int]] = []
    checkpoint.load(dense=False, progress=lambda done, total: seen.append((done, total)))
    total = checkpoint.inventory.num_bytes
    assert seen[-1] == (total, total) and seen == sorted(seen)
    tensors = read_file(originals["modelopt"] / "model.safetensors")
    assert total == sum(len(stored.data) for stored in tensors.values())


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("style", STYLES)
def test_held_bytes_are_what_loading_takes(style: str, dense: bool, originals: dict[str, Path]) -> None:
    checkpoint = Checkpoint.open(originals[style])
    total = 0
    for held in checkpoint.load(dense).tensors.values():
        parts = (held.data, held.scale) if isinstance(held, QuantTensor) else (held,)
        total += sum(part.untyped_storage().nbytes() for part in parts if part is not None)
    assert checkpoint.held_bytes(dense) == total


MEASURE = """
import re, sys
from pathlib import Path
import torch
from dsv4.quant.formats import QuantTensor
from dsv4.weights.load import Checkpoint

def peak():  # not ru_maxrss, which starts at the size of the process that started this one
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)
checkpoint = Checkpoint.open(sys.argv[1])
before = peak()
weights = checkpoint.load(dense=sys.argv[2] == "dense")
held = [h for h in weights.tensors.values()]
print(peak() - before, sum(h.num_bytes if isinstance(h, QuantTensor) else 4 * h.numel() for h in held))
"""


@pytest.fixture(scope="module")
def big_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 MB of BF16, nearly all of it embedding and head."""
    small = replace(preset("tiny"), hidden_size=1024, num_mtp_layers=0, layers=preset("tiny").layers[:1])
    folder = write_model(tmp_path_factory.mktemp("big") / "model", "bf16", small)
    vocab = 100_000
    tensors = read_file(folder / "model.safetensors")
    for name, stored in tensors.items():
        if name in ("embed.weight", "head.weight") or name.endswith("tid2eid"):
            tensors[name] = zeros(stored.dtype, [vocab, *stored.shape[1:]])
    write_file(folder / "model.safetensors", tensors)
    text = (folder / "config.json").read_text().replace('"vocab_size": 512', f'"vocab_size": {vocab}')
    (folder / "config.json").write_text(text)
    assert (folder / "model.safetensors").stat().st_size > 400e6
    return folder


# Beyond the model: one block as stored and as decoded, its finiteness masks, a transposed copy. Each takes at
# most the 64 MiB of a decoded block, so four are a bound; a whole tensor more (200 to 400 MB) breaks it.
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures memory as Linux reports it")
@pytest.mark.parametrize("mode", [pytest.param("dense", marks=pytest.mark.slow), "packed"])
def test_loading_needs_little_memory_beyond_the_model(mode: str, big_model: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", MEASURE, str(big_model), mode]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    growth, held = map(int, done.stdout.split())
    assert held > (600e6 if mode == "dense" else 400e6)
    assert 0.9 * held < growth < held + (256 << 20), f"{growth:,} bytes for {held:,} of tensors"
