"""An engine around weights that are on the GPU already, and how fast its users' tokens come."""

import time
from typing import Any

import torch

from dsv4.config import EngineConfig
from dsv4.device import Device
from dsv4.engine.engine import Engine
from dsv4.engine.memory import DEFAULT_CONTEXT, GPU_CHUNK, gpu_memory, unpacks_weights
from dsv4.engine.request import SamplingParams
from dsv4.engine.settings import Settings, cache_layout
from dsv4.lab.bench.decode import Wanted, release
from dsv4.model.bundle import Bundle
from dsv4.quant.formats import Format
from dsv4.step.buffers import graph_rows

# What users ask for: the names of `dsv4 bench decode`'s last figures.
KINDS = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.7, top_p=0.95, seed=1, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0, logprobs=20, ignore_eos=True),
}
WARM = 8
# A prompt is really read here, once for each kind of request, so it is no longer than this.
MAX_PROMPT = 8192


def settings_of(bundle: Bundle, config: EngineConfig) -> Settings:
    """As `Engine.load` would settle them on this GPU."""
    return Settings(
        device=Device.choose(config.device),
        ops=bundle.ops,
        dtype=bundle.numerics.dtype,
        kv_format=Format.KV8,
        key_format=Format.MXFP4,
        max_context=config.max_context or DEFAULT_CONTEXT,
        chunk=config.chunk or GPU_CHUNK,
        threads=torch.get_num_threads(),
        dense=False,
        drafts=0,
        tiled=True,
        choices=(),
    )


def around(bundle: Bundle, config: EngineConfig) -> Engine:
    """An engine with these weights."""
    return Engine(bundle, settings_of(bundle, config), config)


def speed(engine: Engine, params: SamplingParams, batch: int, context: int, steps: int) -> float:
    """Tokens per second through `Engine.step` of `batch` sequences alike, each with `context` tokens before;
    prompts are not counted."""
    chance = torch.Generator().manual_seed(batch)
    vocab = engine.model_config.vocab_size
    prompts = torch.randint(5, vocab, (batch, context), generator=chance).tolist()
    for ids in prompts:
        engine.submit(engine.request(ids, params))
    while any(not s.tokens for s in (*engine.scheduler.running, *engine.scheduler.waiting)):
        engine.step()
    for _ in range(WARM):
        engine.step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    count = sum(len(engine.step()) for _ in range(steps))
    seconds = time.perf_counter() - begin
    for s in list(engine.scheduler.running):
        engine.cancel(s.request.id)
    return count / seconds


def speeds(bundle: Bundle, wanted: Wanted, step_ms: float) -> dict[str, Any]:
    """Tokens per second of each kind of request through a new engine, and the share of the bare step's, which
    takes `step_ms`. Where no engine fits beside the weights, `left_out` says why."""
    batch, steps = wanted.batch, wanted.steps
    prompt = min(wanted.context, MAX_PROMPT, bundle.config.max_positions - steps - WARM - 1)
    capacity = min(bundle.config.max_positions, -(-(prompt + steps + WARM + 1) // 256) * 256)
    config = EngineConfig(
        device="cuda", max_batch=batch, max_context=capacity, prefix_snapshots=0, chunk=min(prompt, GPU_CHUNK)
    )
    settings = settings_of(bundle, config)
    release()
    need = gpu_memory(
        weights=0,
        layout=cache_layout(bundle.config, settings, config, num_mtp_layers=0),
        dtype=settings.dtype,
        graph_rows=graph_rows(batch),
        chunk=settings.chunk,
        activations=bundle.numerics.activations,
        unpacks=unpacks_weights(settings.dtype.itemsize, torch.cuda.get_device_capability()),
        spills=bundle.weights.placement is not None,
    )
    free, _ = torch.cuda.mem_get_info()
    found: dict[str, Any] = {"context": prompt, "chunk": settings.chunk}
    if need.total > free:
        return {**found, "left_out": f"takes {need.total / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"}
    engine = around(bundle, config)
    for kind, params in KINDS.items():
        rate = speed(engine, params, batch, prompt, steps)
        found[kind] = round(rate, 2)
        found[f"{kind}_share"] = round(rate * step_ms / 1e3 / batch, 4)
    return found
