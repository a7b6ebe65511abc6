"""The engine on a GPU: batches, graphs and steps launched ahead change no bit; memory stays; nobody waits."""

import random
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.ops.sample.cpu import pack
from tests.support.feeding import claim

pytestmark = pytest.mark.gpu


def engine_on_gpu(path: Path | None, **options: object) -> Engine:
    return Engine.load(path, EngineConfig(device="cuda", **{"max_context": 1024, **options}))  # type: ignore[arg-type]


def prompts(count: int, vocab: int, longest: int = 90) -> list[list[int]]:
    r = random.Random(7)
    return [[r.randrange(vocab) for _ in range(r.randrange(1, longest))] for _ in range(count)]


def alone(engine: Engine, requests: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [[t.id for t in engine.generate([ids], params)[0].tokens] for ids in requests]


@pytest.mark.parametrize(
    ("dtype", "activations"),
    [("bfloat16", "a16"), ("bfloat16", "a8"), ("bfloat16", "a4"), ("float32", "a16")],
)
def test_random_arrivals_equal_runs_alone(
    checkpoint: Callable[..., Path], dtype: str, activations: str
) -> None:
    """Over 2,000 tokens at batch 8, requests arriving at random: logprobs and tokens bit for bit."""
    how = {"compute_dtype": dtype, "activations": activations}
    engine = engine_on_gpu(checkpoint("modelopt"), max_batch=8, **how)
    # Short prompts are graphs too, whatever the activations.
    assert bool(engine.runner.executor.prompts) == (dtype == "bfloat16")  # type: ignore[attr-defined]
    requests, r = prompts(24, 300), random.Random(3)
    all_params = [
        SamplingParams(
            max_tokens=r.randrange(60, 120),
            temperature=r.choice([0.0, 0.0, 0.0, 0.8]),
            seed=i,
            ignore_eos=True,
            logprobs=1,
        )
        for i in range(len(requests))
    ]
    single = [engine.generate([ids], p)[0].tokens for ids, p in zip(requests, all_params, strict=True)]
    assert sum(len(tokens) for tokens in single) > 2000
    streams, waiting = [], list(zip(requests, all_params, strict=True))
    while waiting or engine.num_unfinished:
        while waiting and r.random() < 0.3:
            ids, params = waiting.pop(0)
            streams.append(engine.stream(engine.request(ids, params)))
        if engine.num_unfinished:
            engine.step()
    together = [stream.completion().tokens for stream in streams]
    assert together == single


def test_graph_or_not_overlapping_or_not_gives_the_same_tokens(checkpoint: Callable[..., Path]) -> None:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=2)
    requests = prompts(5, 300)
    results = []
    for no_graph, no_overlap in product((False, True), repeat=2):
        how = {"no_graph": no_graph, "no_overlap": no_overlap}
        engine = engine_on_gpu(checkpoint("official"), max_batch=4, **how)
        results.append([c.tokens for c in engine.generate(requests, params)])
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("format", ["modelopt", "official", "bf16", "ct", "hfnvfp4"])
def test_greedy_equals_the_cpu_where_the_margin_is_clear(
    checkpoint: Callable[..., Path], format: str
) -> None:
    """float32 on both: the same tokens until two candidates are nearer than the machines' difference."""
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, logprobs=2)
    for ids in prompts(3, 300):
        on = [
            Engine.load(
                checkpoint(format),
                EngineConfig(device=device, compute_dtype="float32", max_context=1024, max_batch=1),
            ).generate([ids], params)[0]
            for device in ("cpu", "cuda")
        ]
        for cpu, gpu in zip(on[0].tokens, on[1].tokens, strict=True):
            assert cpu.top and gpu.top
            margin = cpu.top[0][1] - cpu.top[1][1]
            if cpu.id != gpu.id:
                assert margin < 0.05, (cpu, gpu)
                break


def test_embedded_model_answers_as_on_the_cpu() -> None:
    """Greedy, in float32: an answer's tokens are those of the CPU."""
    params = SamplingParams(max_tokens=60, temperature=0)
    text = "What is 27 + 58?"
    answers = []
    for device in ("cpu", "cuda"):
        config = EngineConfig(device=device, compute_dtype="float32", max_context=1024, max_batch=1)
        answers.append([t.id for t in Engine.load(None, config).generate([text], params)[0].tokens])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("activations", ["a16", "a4"])
def test_decode_never_waits_and_memory_stays(checkpoint: Callable[..., Path], activations: str) -> None:
    engine = engine_on_gpu(checkpoint("modelopt"), max_batch=4, max_context=2048, activations=activations)
    graphs = engine.runner.executor
    decoder = graphs.decoders[4]  # type: ignore[attr-defined]
    slots = [claim(engine, 1500) for _ in range(4)]
    settings = torch.tensor([pack(temperature=0.7, top_p=0.9, seed=i, num_top=5) for i in range(4)])
    with torch.inference_mode():
        tokens = [(slot, 0, 5 + i) for i, slot in enumerate(slots)]
        decoder.load(tokens, settings, graphs.send)  # type: ignore[attr-defined]
        for _ in range(10):
            decoder.step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(1000):
                decoder.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert decoder.buffers.positions.tolist() == [1010] * 4
