"""The whole examination, in order; nothing a checkpoint can hold stops it half-way."""

from collections.abc import Iterator
from pathlib import Path

import torch

from dsv4.config import EngineConfig, ModelConfig
from dsv4.engine import proof
from dsv4.engine.engine import Engine
from dsv4.engine.memory import DEFAULT_CONTEXT
from dsv4.errors import CheckpointError, Dsv4Error
from dsv4.lab.doctor.exact import examine_exact
from dsv4.lab.doctor.findings import Finding, passed
from dsv4.lab.doctor.machine import examine_machine
from dsv4.lab.doctor.ops import examine_ops
from dsv4.lab.doctor.selftest import examine_behaviour, examine_engine
from dsv4.lab.doctor.tokenizer import examine_tokenizer
from dsv4.lab.doctor.weights import Progress, examine_weights, looks_trained
from dsv4.lab.inspect import storage_name
from dsv4.models import embedded
from dsv4.weights.load import Checkpoint

# Stored bytes up to which the model itself is loaded and run, unless asked to: seconds, not minutes.
SMALL_MODEL = 500_000_000
RUN_CONTEXT = 512


def examine(model: Path | None, full: bool = False, progress: Progress | None = None) -> Iterator[Finding]:
    """Findings as they are made. A model folder that does not exist is the caller's mistake and raises."""
    if model is not None and not model.exists():
        raise CheckpointError(f"{model} does not exist; give a model folder or a .safetensors file")
    folder = model if model is None or model.is_dir() else model.parent
    yield from examine_machine(folder)
    yield from examine_exact(ModelConfig.load(embedded()), 1, DEFAULT_CONTEXT)
    found = examine_ops()
    yield from found
    if torch.cuda.is_available() and passed(found):
        # An engine asks for that on a GPU that was never measured.
        proof.remember(proof.describe(torch.device("cuda")), [f"{f.name}: {f.text}" for f in found])
    yield examine_engine("cpu")
    if torch.cuda.is_available():
        yield examine_engine("cuda")
    if model is not None:
        yield from examine_model(model, full, progress)


def examine_model(model: Path, full: bool = False, progress: Progress | None = None) -> Iterator[Finding]:
    """A checkpoint from its headers to its predictions; ends early when the rest would mean nothing."""
    try:
        checkpoint = Checkpoint.open(model)
    except Dsv4Error as error:
        remedy = "download the checkpoint again, or convert it again, with the config.json that belongs to it"
        yield Finding("checkpoint", "tensors", "fail", str(error), remedy)
        return
    yield from _headers(checkpoint)
    folder = model if model.is_dir() else model.parent
    tokenizer = examine_tokenizer(folder, checkpoint.config)
    yield tokenizer
    yield from examine_exact(checkpoint.config, checkpoint.inventory.num_mtp_layers, RUN_CONTEXT)
    try:
        found = examine_weights(checkpoint, full, progress)
        yield from found
        is_trained = looks_trained(checkpoint)
    except Dsv4Error as error:
        yield Finding("checkpoint", "values", "fail", str(error), "download the checkpoint again")
        return
    if any(finding.level == "fail" and finding.name in ("values", "hash tables") for finding in found):
        return
    stored = checkpoint.inventory.num_bytes
    if stored > SMALL_MODEL and not full:
        text = f"not run: {stored / 1e9:.0f} GB take longer than a minute; --full runs it"
        yield Finding("model", "run", "note", text)
        return
    try:
        context = min(RUN_CONTEXT, checkpoint.config.max_positions)
        engine = Engine.load(model, EngineConfig(max_batch=1, max_context=context))
    except Dsv4Error as error:
        if tokenizer.level != "fail":
            yield Finding("model", "run", "fail", f"it does not load: {error}", "follow the message")
        return
    yield from examine_behaviour(engine, is_trained)


def _headers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What opening has checked already, and where the config's hints and the tensors part."""
    inventory, config = checkpoint.inventory, checkpoint.config
    count = len(inventory.sources)
    text = f"{count:,} parameters complete, {inventory.num_bytes / 1e9:.2f} GB, {inventory.family} names"
    yield Finding("checkpoint", "tensors", "ok", text)
    for note in inventory.notes:
        yield Finding("checkpoint", "tensors", "note", note)
    experts = {storage_name(s) for s in inventory.sources if s.param.component == "routed experts"}
    hint = config.quantization.get("moe_quant_algo") or config.quantization.get("quant_algo")
    if hint == "NVFP4" and experts != {"nvfp4"}:
        text = f"config.json announces NVFP4 experts, the tensors are {', '.join(sorted(experts))}"
        yield Finding("checkpoint", "config", "note", f"{text}; the tensors decide")
    else:
        yield Finding(
            "checkpoint", "config", "ok", f"{config.num_layers} layers, experts {', '.join(sorted(experts))}"
        )
