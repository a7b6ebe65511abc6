"""Every engine option has an effect or is refused."""

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.engine.settings import crowding
from dsv4.errors import ConfigError, DeviceError
from dsv4.lab.score import score_ids
from dsv4.model.model import Model
from dsv4.ops import IMPLEMENTATIONS

VOCAB = 300
IDS = [random.Random(8).randrange(VOCAB) for _ in range(140)]


@pytest.fixture(scope="module")
def logits_of(engine_for: Callable[..., Engine]) -> Callable[..., Tensor]:
    made: dict[str, Tensor] = {}

    def get(format: str, **options: Any) -> Tensor:
        key = f"{format} {options}"
        if key not in made:
            made[key] = score_ids(engine_for(format, max_batch=1, **options), IDS, 130)["prefill_logits"]
        return made[key]

    return get


def likeness(a: Tensor, b: Tensor) -> float:
    """Cosine of the median row: in some rows a near-tie of experts or entries falls the other way."""
    return float(torch.nn.functional.cosine_similarity(a, b, dim=1).median())


@pytest.mark.parametrize("activations", ["a8", "a4"])
def test_activations_round_inputs_of_quantised_linears(
    logits_of: Callable[..., Tensor], activations: str
) -> None:
    assert not torch.equal(logits_of("modelopt", activations=activations), logits_of("modelopt"))
    assert torch.equal(logits_of("bf16", activations=activations), logits_of("bf16"))


def test_qat_off_leaves_the_rounding_out(logits_of: Callable[..., Tensor]) -> None:
    for format in ("modelopt", "bf16"):
        assert not torch.equal(logits_of(format, qat="off"), logits_of(format))


def test_cache_formats(logits_of: Callable[..., Tensor]) -> None:
    """fp8 is lossless after the model's rounding; bf16 rounds the rotated channels, by 2^-9 and no more."""
    want = logits_of("modelopt")
    assert torch.equal(logits_of("modelopt", cache="fp8"), want)
    assert torch.equal(logits_of("modelopt", cache="f32"), want)
    rounded = logits_of("modelopt", cache="bf16")
    assert not torch.equal(rounded, want)
    assert likeness(rounded, want) > 1 - 1e-5
    assert torch.equal(logits_of("modelopt", compute_dtype="bfloat16", cache="bf16"),
                       logits_of("modelopt", compute_dtype="bfloat16", cache="fp8"))  # fmt: skip


def test_weights_packed_or_dense(logits_of: Callable[..., Tensor]) -> None:
    for format in ("modelopt", "official"):
        assert torch.equal(logits_of(format, weights="packed"), logits_of(format, weights="dense"))


def test_engines_of_one_process_keep_their_threads(
    engine_for: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's number is the process's, so the engine that was loaded last would decide for all."""
    seen, forward = list[int](), Model.forward

    def noted(*arguments: Any) -> Tensor:
        seen.append(torch.get_num_threads())
        return forward(*arguments)

    monkeypatch.setattr(Model, "forward", noted)
    before = torch.get_num_threads()
    try:
        engines = [engine_for("modelopt", threads=threads) for threads in (2, 1)]
        for engine in (*engines, *engines):
            engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
            assert {*seen} == {engine.settings.threads}
            seen.clear()
        score_ids(engines[0], IDS, 130)
        assert {*seen} == {2}
    finally:
        torch.set_num_threads(before)


def test_load_that_fails_takes_no_threads_from_the_next(checkpoint: Callable[..., Path]) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(KeyboardInterrupt):
            Engine.load(checkpoint("modelopt"), EngineConfig(max_context=512), interrupt)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("format", ["bf16", "modelopt"])
def test_bfloat16_runs_every_layer_kind(logits_of: Callable[..., Tensor], format: str) -> None:
    half, full = logits_of(format, compute_dtype="bfloat16"), logits_of(format)
    assert half.dtype == torch.float32 and torch.isfinite(half).all() and not torch.equal(half, full)
    # About 40 roundings of 2^-9 in a row: sqrt(40) * 2^-9 relative error, squared and halved, is 1e-4.
    assert likeness(half, full) > 1 - 1e-3


def test_threads_batch_and_context_are_used(engine_for: Callable[..., Engine]) -> None:
    engine = engine_for("modelopt", threads=2, max_batch=3, max_context=300, chunk=7)
    try:
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert engine.slots.num_free == 3 and engine.scheduler.chunk == 7
    assert engine.settings.max_context == 300
    settled = {choice.name: choice.why for choice in engine.settings.choices}
    assert settled.keys() == {"compute_dtype", "cache", "weights", "speculate"} and all(settled.values())


def test_more_threads_than_cores(engine_for: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Said, not refused: it is slow and not wrong."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert crowding(1, 4) == crowding(2, 1) == ()
    (said,) = crowding(2, 2)
    assert said.startswith("threads is 2 on each of 2 ranks, and this process may use 2 cores: ")
    assert said.endswith("; leave threads out, or give at most 1")
    try:
        assert engine_for("modelopt", threads=2).notes == ()
        notes = engine_for("modelopt", threads=3).notes
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    assert notes == crowding(3, 1) and "threads is 3, and this process may use 2 cores" in notes[0]
    assert notes[0].endswith("leave threads out, or give at most 2")


def test_more_threads_than_cores_are_said(checkpoint: Callable[..., Path]) -> None:
    given = len(os.sched_getaffinity(0)) + 1
    command = [
        "generate",
        "--model",
        str(checkpoint()),
        "--ids",
        "1",
        "--max-tokens",
        "1",
        "--threads",
        given,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "dsv4", *map(str, command)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and f"note: threads is {given}, and this process may use" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activations": "a6"}, "activations is 'a6', expected one of a16, a8, a4"),
        ({"compute_dtype": "float16"}, "expected one of auto, float32, bfloat16"),
        ({"qat": True}, "qat is True, expected one of on, off"),
        ({"cache": "int8"}, "expected one of auto, fp8, bf16, f32"),
        ({"weights": "mmap"}, "expected one of auto, dense, packed"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"chunk": 0}, "chunk is 0"),
        ({"chunk": 1.5}, "chunk is 1.5"),
        ({"max_context": 0}, "max_context is 0"),
        ({"threads": -1}, "threads is -1"),
        ({"threads": 10**10}, "threads is 10000000000, expected at most 1024"),
        ({"qat": "off", "cache": "fp8"}, "with qat off use cache auto, bf16 or f32"),
        ({"max_context": 4097}, "max_context 4097 exceeds the model's 4096 positions"),
        ({"max_batch": 10**7}, "lower max_batch, max_context or chunk"),
        ({"ops": (("attend", "cpu"),)}, "unknown ops ['attend']; the ops are linear, experts"),
        ({"ops": (("machine", "cpu"),)}, "unknown ops ['machine']"),
        ({"ops": (("attention", "sm12"),)}, "op attention has no backend 'sm12'; it has cpu"),
        (
            {"ops": (("attention", "cpu"), ("attention", "gpu"))},
            "names an op twice: attention=cpu, attention=gpu",
        ),
    ],
    ids=str,
)
def test_bad_engine_options(checkpoint: Callable[..., Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Engine.load(checkpoint("modelopt"), EngineConfig(**options))


def test_unknown_devices(checkpoint: Callable[..., Path]) -> None:
    for device in ("tpu", "cuda:x", *([] if torch.cuda.is_available() else ["cuda", "cuda:0"])):
        with pytest.raises(DeviceError, match=re.escape(repr(device))):
            Engine.load(checkpoint("modelopt"), EngineConfig(device=device))


@pytest.mark.parametrize("op", sorted(op for op, backends in IMPLEMENTATIONS.items() if "gpu" in backends))
def test_an_op_for_a_gpu_on_a_cpu_is_one_sentence(op: str) -> None:
    said = f"{op}=gpu needs a GPU, and the engine runs on a CPU; use {op}=cpu"
    with pytest.raises(ConfigError, match=said):
        Engine.load(None, EngineConfig(device="cpu", ops=((op, "gpu"),)))
