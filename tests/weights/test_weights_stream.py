"""The loader that reads ahead: the bits of the straightforward one, whatever the timing; and how it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMALL, read_file, write_file, write_model
from torch import Tensor

from dsv4.config import preset
from dsv4.engine.spill import Split, make_placement
from dsv4.errors import CheckpointError, DeviceError
from dsv4.lab.init import STYLES
from dsv4.lab.styles import stored_config, stored_tensors, style_of
from dsv4.model.params import each_declared
from dsv4.weights import batches, feed, lanes, load, tiled
from dsv4.weights.detect import take_inventory
from dsv4.weights.load import Checkpoint
from dsv4.weights.reader import Entry, Reader
from dsv4.weights.tiled import expert_form, load_tiled
from tests.support import plainly
from tests.support.held import digests, readers


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, made = tmp_path_factory.mktemp("stream"), {}

    def model(style: str) -> Path:
        if style not in made:
            made[style] = write_model(root / style, style)
        return made[style]

    return model


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches, linears in several runs of rows, several pieces each, two of them in the ring."""
    for module, name, value in (
        *((load, "CPU_BATCH_BYTES", 20_000), (tiled, "BATCH_BYTES", 60_000), (feed, "SLOTS", 2)),
        *((batches, "PIECE_BYTES", 4096), (batches, "_MOST_BUFFERS", 5)),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize("style", STYLES)
def test_same_bits_as_the_straightforward_load(style: str, models: Callable, small_batches: None) -> None:
    checkpoint = Checkpoint.open(models(style))
    for dense in (True, False):
        assert digests(checkpoint.load(dense)) == digests(plainly.load(checkpoint, dense))
    assert digests(load_tiled(checkpoint, "cpu")) == digests(plainly.load_tiled(checkpoint, "cpu"))


def test_same_bits_in_any_order_of_the_file(tmp_path: Path) -> None:
    """Experts in the order of their names as texts, as published files have them: 0, 1, 10, 11, 2, ..."""
    folder = write_model(tmp_path / "m", "official", replace(SMALL, num_experts=12))
    tensors = read_file(folder / "model.safetensors")
    write_file(folder / "model.safetensors", dict(sorted(tensors.items())))
    checkpoint = Checkpoint.open(folder)
    assert digests(load_tiled(checkpoint, "cpu")) == digests(plainly.load_tiled(checkpoint, "cpu"))
    assert digests(checkpoint.load(False)) == digests(plainly.load(checkpoint, False))


@pytest.mark.parametrize("style", ["modelopt", "bf16"])
def test_same_bits_with_one_batch_for_all(style: str, models: Callable) -> None:
    checkpoint = Checkpoint.open(models(style))
    assert len(batches.plan(checkpoint.inventory.sources, tiled.BATCH_BYTES, True)) == 1
    assert digests(load_tiled(checkpoint, "cpu")) == digests(plainly.load_tiled(checkpoint, "cpu"))


@pytest.mark.parametrize("whole_experts", [False, True])
def test_same_bits_of_a_share(whole_experts: bool, tmp_path: Path, small_batches: None) -> None:
    from tests.parallel.test_shards import WIDE, replace

    checkpoint = Checkpoint.open(write_model(tmp_path / "m", "modelopt", replace(WIDE, num_experts=4)))
    for rank in range(2):
        own = checkpoint.shard(rank, 2, whole_experts)
        assert digests(own.load(False)) == digests(plainly.load(own, False))
        assert digests(load_tiled(own, "cpu")) == digests(plainly.load_tiled(own, "cpu"))


def test_same_bits_of_a_recoded_head(models: Callable, small_batches: None) -> None:
    for style in ("bf16", "modelopt"):
        checkpoint = Checkpoint.open(models(style)).with_head("nvfp4", 1)
        for dense in (True, False):
            assert digests(checkpoint.load(dense)) == digests(plainly.load(checkpoint, dense))
        assert digests(load_tiled(checkpoint, "cpu")) == digests(plainly.load_tiled(checkpoint, "cpu"))


@pytest.mark.parametrize("style", ["modelopt", "official", "bf16"])
def test_same_bits_in_slots(style: str, models: Callable, small_batches: None) -> None:
    """Experts in GPU and in host memory, in no order."""
    checkpoint = Checkpoint.open(models(style))
    form, names = expert_form(checkpoint)
    found = []
    for loader in (load_tiled, plainly.load_tiled):
        split = Split(form, tuple(names), SMALL.num_experts, 4)
        placement = make_placement(split, None, "cpu")
        found.append(digests(loader(checkpoint, "cpu", placement=placement), placement))
    assert found[0] == found[1]


@pytest.mark.parametrize("style", ["official", "modelopt", "bf16"])
def test_each_byte_is_read_once(style: str, models: Callable, small_batches: None) -> None:
    for load_it in (lambda c: c.load(False), lambda c: load_tiled(c, "cpu")):
        checkpoint = Checkpoint.open(models(style))
        load_it(checkpoint)
        calibration = sum(s.calibration_bytes for s in checkpoint.inventory.sources)
        need = checkpoint.inventory.num_bytes
        assert need - calibration <= checkpoint.reader.num_read <= need + calibration


@pytest.mark.parametrize("at", [0, 3, 17])
def test_an_error_in_a_thread_ends_the_load(
    at: int, models: Callable, small_batches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, count, scatter = Checkpoint.open(models("official")), iter(range(10**6)), Reader.scatter

    def fail(self: Reader, offset: int, targets: Any) -> None:
        if next(count) == at:
            raise CheckpointError("the disk is on fire")
        scatter(self, offset, targets)

    monkeypatch.setattr(Reader, "scatter", fail)
    with pytest.raises(CheckpointError, match="the disk is on fire"):
        load_tiled(checkpoint, "cpu")
    assert not readers()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_of_the_caller_ends_the_threads(error: type, models: Callable, small_batches: None) -> None:
    def stop(done: int, total: int) -> None:
        raise error

    for load_it in (lambda c: c.load(True, progress=stop), lambda c: load_tiled(c, "cpu", stop)):
        with pytest.raises(error):
            load_it(Checkpoint.open(models("official")))
        assert not readers()


def test_a_file_that_ends_early_is_named_with_its_tensor(
    models: Callable, small_batches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it were truncated after it was opened."""
    checkpoint = Checkpoint.open(models("official"))
    source = checkpoint.inventory.sources[-1]
    end, preadv = source.weight.start, os.preadv

    def cut(file: int, buffers: list[memoryview], offset: int) -> int:
        if offset >= end:
            return 0
        rest = [buffers[0][: end - offset]] if offset + len(buffers[0]) > end else buffers[:1]
        return preadv(file, rest, offset)

    monkeypatch.setattr(os, "preadv", cut)
    with pytest.raises(CheckpointError, match=r"model\.safetensors ended while reading '"):
        load_tiled(checkpoint, "cpu")
    assert not readers()


DAMAGE = {
    "NaN scale": ("official", "layers.1.ffn.experts.2.w1.scale", 5, b"\xff", "holds a scale"),
    "NaN scale of FP8": ("official", "layers.0.attn.wq_b.scale", 0, b"\xff", "holds a scale"),
    "NaN scale of NVFP4": ("modelopt", "layers.1.ffn.experts.2.w2.weight_scale", 9, b"\x7f", "holds a scale"),
    "infinite scale": ("modelopt", "layers.0.ffn.experts.1.w3.weight_scale_2", 0, b"\0\0\x80\x7f", "a scale"),
    "scale of zero": ("ct", "layers.0.ffn.experts.1.w3.weight_global_scale", 0, bytes(4), "a scale"),
    "NaN code": ("official", "layers.2.attn.wq_a.weight", 300, b"\x7f", "NaN or infinity, first at [2, 44]"),
    "infinite value": ("bf16", "layers.1.ffn.experts.0.w3.weight", 514, b"\x80\x7f", "first at [2, 1]"),
    "NaN in a norm": ("official", "layers.1.attn_norm.weight", 2, b"\xff\x7f", "NaN or infinity"),
    "NaN in the head": ("official", "head.weight", 2, b"\xff\xff", "NaN or infinity, first at [0, 1]"),
    "wrong expert": ("official", "layers.0.ffn.gate.tid2eid", 0, b"\x63", "names experts 0 to 99"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_with_tensor_and_file(case: str, tmp_path: Path, small_batches: None) -> None:
    """Both ways of loading say the same: a GPU's flags are followed by a look at the place."""
    style, name, offset, data, words = DAMAGE[case]
    folder = write_model(tmp_path / "m", style)
    tensors = read_file(folder / "model.safetensors")
    tensors[name].data[offset : offset + len(data)] = data
    write_file(folder / "model.safetensors", tensors)
    said = []
    for load_it in (lambda c: c.load(False), lambda c: load_tiled(c, "cpu")):
        with pytest.raises(CheckpointError) as caught:
            load_it(Checkpoint.open(folder))
        said.append(str(caught.value))
        assert all(word in said[-1] for word in (name, words)), said
        assert "model.safetensors" in said[-1] or case == "wrong expert", said
        assert not readers()
    assert said[0] == said[1]


def test_float32_that_no_bf16_holds_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "bf16")
    tensors = read_file(folder / "model.safetensors")
    stored = tensors["layers.0.ffn.shared_experts.w2.weight"]
    values = torch.frombuffer(stored.data, dtype=torch.bfloat16).float()
    values[7] += 1e-5
    stored.dtype, stored.data = "F32", bytearray(values.numpy().tobytes())
    write_file(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match="is float32 and its values do not fit"):
        load_tiled(Checkpoint.open(folder), "cpu")


def test_a_file_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "official")
    checkpoint, file = Checkpoint.open(folder), folder / "model.safetensors"
    raw = bytearray(file.read_bytes())

    def overwrite(done: int, total: int) -> None:
        file.write_bytes(raw)
        os.utime(file, ns=(1, 1))

    with pytest.raises(CheckpointError, match="was changed while it was read"):
        load_tiled(checkpoint, "cpu", overwrite)
    other = write_model(tmp_path / "other", "official", seed=4) / "model.safetensors"
    checkpoint = Checkpoint.open(folder)
    other.replace(file)
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        checkpoint.load(True)


STALLED = """
import os, sys, time
preadv, count, (model, seconds, text) = os.preadv, iter(range(10**6)), sys.argv[1:]
def stall(*arguments):
    if next(count) == 0:
        print("stalled", flush=True)
        time.sleep(float(seconds))
    return preadv(*arguments)
os.preadv = stall
from dsv4.__main__ import main
sys.argv = ["dsv4", "score", model, "--text", text]
main()
"""


@pytest.mark.parametrize("seconds", [2, 60])
def test_a_disk_that_stalls(seconds: float, tmp_path: Path) -> None:
    """A short while is waited for; Ctrl-C ends it at once, however long."""
    from dsv4.models import embedded

    (tmp_path / "text").write_text("Once upon a time")
    command = [sys.executable, "-c", STALLED, str(embedded()), str(seconds), str(tmp_path / "text")]
    process = subprocess.Popen(
        command,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,  # a job's may be ignored
    )
    assert process.stdout is not None and process.stdout.readline() == "stalled\n"
    start = time.monotonic()
    if seconds > 10:
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == (130 if seconds > 10 else 0), err
    assert time.monotonic() - start < 20 and "Traceback" not in err


def test_memory_that_cannot_be_had_is_one_sentence(models: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*shape: Any, **how: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(lanes.torch, "empty", refuse)
    with pytest.raises(DeviceError, match=r"12 MB of host memory could not be pinned .* \(.*\).*\(ulimit -l"):
        lanes.buffers(4, 3_000_000, torch.device("cuda"))


def test_a_plan_of_published_sizes_is_made_quickly() -> None:
    """Some microseconds per tensor of the time that a load may take."""
    style, file = style_of("official"), Path("model.safetensors")
    config = stored_config(preset("flash"), style)
    tensors = [t for param in each_declared(config, 1) for t in stored_tensors(param, style)]
    entries = {t.name: Entry(t.name, t.dtype, t.shape, file, 0, t.num_bytes) for t in tensors}
    inventory = take_inventory(entries, config)
    start = time.process_time()
    made = batches.plan(inventory.sources, tiled.BATCH_BYTES, together=True)
    seconds = time.process_time() - start
    tensors = sum(1 + (s.scale is not None) for s in inventory.sources)
    assert sum(len(part.sources) for batch in made for part in batch.parts) >= len(inventory.sources) > 30_000
    assert seconds / tensors < 100e-6, "a wide margin: a busy machine takes ten times as long"
    assert all(piece.num_bytes <= batches.PIECE_BYTES for batch in made for piece in batch.pieces)
