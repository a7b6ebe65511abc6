"""An engine around weights that are on the GPU already, and how fast its users' tokens come."""

import time
from dataclasses import dataclass

import torch

from dsv4.config import EngineConfig
from dsv4.device import Device
from dsv4.engine.engine import Engine
from dsv4.engine.request import SamplingParams
from dsv4.engine.settings import DEFAULT_CONTEXT, GPU_CHUNK, Settings
from dsv4.model.bundle import Bundle
from dsv4.quant.formats import Format

# What users ask for: the names of `dsv4 bench decode`'s last figures.
KINDS = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.7, top_p=0.95, seed=1, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0, logprobs=20, ignore_eos=True),
}
WARM = 8


def around(bundle: Bundle, config: EngineConfig) -> Engine:
    """An engine with these weights, as `Engine.load` would settle it on this GPU."""
    settings = Settings(
        device=Device.choose(config.device),
        ops=bundle.ops,
        dtype=bundle.numerics.dtype,
        kv_format=Format.KV8,
        key_format=Format.MXFP4,
        max_context=config.max_context or DEFAULT_CONTEXT,
        chunk=config.chunk or GPU_CHUNK,
        threads=torch.get_num_threads(),
        dense=False,
        tiled=True,
        choices=(),
    )
    return Engine(bundle, settings, config)


@dataclass(frozen=True)
class Speed:
    """Of one kind of request, through `Engine.step`, everybody in the batch alike."""

    kind: str
    batch: int
    tokens_per_second: float


def speed(engine: Engine, kind: str, batch: int, context: int, steps: int) -> Speed:
    """Generated tokens per second of `batch` sequences with `context` tokens before, prompts not counted."""
    params, chance = KINDS[kind], torch.Generator().manual_seed(batch)
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
    return Speed(kind, batch, count / seconds)
