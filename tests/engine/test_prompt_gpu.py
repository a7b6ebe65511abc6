"""Prompts on a GPU: any chunks, as a graph or launch by launch, the same bits; and nobody waits."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.engine.eager import Eager
from dsv4.engine.plan import Sampling, Span
from dsv4.engine.trial import Trial
from tests.support.feeding import claim, release

pytestmark = pytest.mark.gpu
IDS = [random.Random(3).randrange(300) for _ in range(700)]
DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


def load(path: Path | None, **options: object) -> Engine:
    options = {"max_context": 4096, "max_batch": 4, **options}
    return Engine.load(path, EngineConfig(device="cuda", **options))  # type: ignore[arg-type]


def read(engine: Engine, sizes: list[int]) -> Tensor:
    """Logits of all of IDS, read in chunks of these sizes in turn."""
    out, at, turn = [], 0, 0
    with Trial(engine, len(IDS)) as trial:
        while at < len(IDS):
            stop = min(len(IDS), at + sizes[turn % len(sizes)])
            out.append(trial.read(IDS[at:stop])[0])
            at, turn = stop, turn + 1
    return torch.cat(out)


@DTYPES
def test_any_chunks(checkpoint: Callable[..., Path], dtype: str) -> None:
    engine = load(checkpoint("modelopt"), compute_dtype=dtype)
    whole = read(engine, [len(IDS)])
    for sizes in ([7], [64], [300], [1, 16, 129, 3]):
        assert torch.equal(read(engine, sizes), whole), sizes


@torch.inference_mode()
def test_a_graph_or_launch_by_launch(checkpoint: Callable[..., Path]) -> None:
    """Streams and whatever the cache holds of them, over chunks of every size and several sequences."""
    engine = load(checkpoint("official"), compute_dtype="bfloat16")
    graphs = engine.runner.executor
    assert isinstance(graphs, Eager) and getattr(graphs, "prompts", []), "short prompts are recorded"
    r, done = random.Random(5), [0, 0]
    pairs = [(claim(engine, 2000), claim(engine, 2000)) for _ in done]
    for size in (16, 1, 3, 30, 40, 64, 100, 128, 200, 256, 300, 512):
        first = r.randrange(0, size + 1)
        counts = [first, size - first]
        ids = [[r.randrange(300) for _ in range(count)] for count in counts]
        rows = [(n, at, part) for n, (at, part) in enumerate(zip(done, ids, strict=True)) if part]
        recorded = graphs.read([(pairs[n][0], at, part) for n, at, part in rows]).clone()
        launched = Eager.read(graphs, [(pairs[n][1], at, part) for n, at, part in rows])
        assert torch.equal(recorded, launched), size
        done = [at + count for at, count in zip(done, counts, strict=True)]
    release(engine, *(slot for pair in pairs for slot in pair))


def test_prompts_never_wait(checkpoint: Callable[..., Path]) -> None:
    """From the plan's integers to the sampled token on its way: no call asks the device for anything."""
    engine = load(checkpoint("modelopt"))
    graphs = engine.runner.executor
    slot = claim(engine, 3000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        at = 0
        for count in (1, 16, 100, 700, 900):
            ids = tuple(IDS[i % 700] for i in range(count))
            span = Span(sequence=0, slot=slot, start=at, ids=ids, sampling=Sampling())
            made = graphs.prefill((span,))
            at += count
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert graphs.fetch(made)[0].token is not None
    release(engine, slot)


def test_graph_or_not_gives_the_same_answers(checkpoint: Callable[..., Path]) -> None:
    """Through the engine: prompts of many lengths that arrive together, and their log-probabilities."""
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    prompts = [IDS[:count] for count in (1, 5, 16, 17, 60, 130, 400, 520)]
    engines = [load(checkpoint("modelopt"), no_graph=flag) for flag in (False, True)]
    answers = [[(c.tokens, c.prompt) for c in engine.generate(prompts, params)] for engine in engines]
    assert answers[0] == answers[1]


def test_memory_stays(checkpoint: Callable[..., Path]) -> None:
    engine = load(checkpoint("modelopt"))
    greedy = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    held = []
    for _ in range(3):
        for count in (1, 16, 33, 100, 300, 512):
            engine.generate([IDS[:count]], greedy)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[1] == held[2], held
