"""Prompts on a GPU: any chunks, as a graph or launch by launch, the same bits; and nobody waits."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.engine.eager import Eager
from dsv4.engine.plan import Sampling, Span
from dsv4.engine.trial import Trial
from dsv4.lab.bench.engine import around
from dsv4.lab.bench.subject import synthetic
from dsv4.model.step import Mark
from dsv4.ops.mhc import prefill_sm90 as streams
from tests.conftest import small_config
from tests.support.checkpoints import write_model
from tests.support.feeding import cache_of, claim, release

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


def graph_is_launches(engine: Engine) -> None:
    """Streams and whatever the cache holds of them, over chunks of every size and several sequences."""
    graphs = engine.runner.executor
    assert isinstance(graphs, Eager) and getattr(graphs, "prompts", []), "short prompts are recorded"
    r, done = random.Random(5), [0, 0]
    pairs = [(claim(engine, 2000), claim(engine, 2000)) for _ in done]
    for size in (16, 1, 3, 30, 40, 64, 100, 128, 200, 256, 300, 512, 700):
        first = r.randrange(0, size + 1)
        counts = [first, size - first]
        ids = [[r.randrange(300) for _ in range(count)] for count in counts]
        rows = [(n, at, part) for n, (at, part) in enumerate(zip(done, ids, strict=True)) if part]
        recorded = graphs.read([(pairs[n][0], at, part) for n, at, part in rows]).clone()
        launched = Eager.read(graphs, [(pairs[n][1], at, part) for n, at, part in rows])
        assert torch.equal(recorded, launched), size
        done = [at + count for at, count in zip(done, counts, strict=True)]
    release(engine, *(slot for pair in pairs for slot in pair))


@torch.inference_mode()
def test_a_graph_or_launch_by_launch(checkpoint: Callable[..., Path]) -> None:
    graph_is_launches(load(checkpoint("official"), compute_dtype="bfloat16"))


@torch.inference_mode()
@pytest.mark.parametrize("activations", ["a16", "a8"])
def test_streams_of_published_widths(tmp_path: Path, activations: str) -> None:
    """Those that `mhc/prefill_sm90.cu` takes, and rows of experts gathered from its codes."""
    config = replace(small_config(), hidden_size=512)
    made = write_model(tmp_path / "model", "official", config)
    engine = load(made, compute_dtype="bfloat16", activations=activations)
    some, fn = torch.zeros(1, 4, 512, dtype=torch.bfloat16, device="cuda"), torch.zeros(2048, 24)
    assert streams.serves(some, fn)
    whole = read(engine, [len(IDS)])
    for sizes in ([7], [64], [1, 16, 129, 3]):
        assert torch.equal(read(engine, sizes), whole), sizes
    graph_is_launches(engine)


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


@torch.inference_mode()
def test_a_marked_state_is_the_slot_s_own(checkpoint: Callable[..., Path]) -> None:
    """What a graph, or launches, leave beside the slots at a page's end is what a run to there leaves."""
    engine = load(checkpoint("official"), compute_dtype="bfloat16")
    graphs, cache = engine.runner.executor, cache_of(engine)
    assert isinstance(graphs, Eager) and getattr(graphs, "prompts", [])
    whole, cut = claim(engine, 2000), claim(engine, 2000)
    spare = cache.layout.num_slots
    for number, (start, mark, end) in enumerate([(0, 256, 300), (300, 512, 700), (700, 1792, 1800)]):
        ids = [IDS[i % 700] for i in range(start, end)]
        read = graphs.read if number != 1 else partial(Eager.read, graphs)
        read([(whole, start, ids)], Mark(whole, mark, spare))
        graphs.read([(cut, start, ids[: mark - start])])
        cache.save(2 * number, spare, mark)
        cache.save(2 * number + 1, cut, mark)
        assert torch.equal(cache.read_snapshot(2 * number), cache.read_snapshot(2 * number + 1)), mark
        graphs.read([(cut, mark, ids[mark - start :])])
    release(engine, whole, cut)


@pytest.mark.parametrize(("model", "experts"), [("flash", 16), ("pro", 8)])
def test_published_widths(model: str, experts: int) -> None:
    """Five layers, every kind: chunks of 1, 7, 64, 300, 4,096 and whole, alone and among others, hit and
    miss, in 4 and in 8 bits."""
    chance = random.Random(1)
    ids = [chance.randrange(129000) for _ in range(4290)]
    for layout in ("nvfp4", "official"):
        bundle = synthetic(model, experts, 5, layout).bundle(torch.device("cuda:0"))
        options = {"device": "cuda", "max_batch": 4, "max_context": 4864, "prefix_snapshots": 8}
        engine = around(bundle, EngineConfig(**options))  # type: ignore[arg-type]
        want = _last_logits(engine, ids, [4290])
        for sizes in ([4096, *[1] * 200], [4096, *[7] * 30], [4096, *[64] * 5], [300] * 15):
            assert torch.equal(_last_logits(engine, ids, sizes), want), sizes[:2]
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=3)
        alone = engine.generate([ids], params)[0]
        others = [[chance.randrange(129000) for _ in range(count)] for count in (16, 300, 900)]
        hit, *_ = engine.generate([ids, *others], params)
        assert (hit.tokens, hit.cached_tokens) == (alone.tokens, 4096)
        engine.prefix.clear()
        miss, *_ = engine.generate([ids, *others], params)
        assert (miss.tokens, miss.cached_tokens) == (alone.tokens, 0)


def _last_logits(engine: Engine, ids: list[int], sizes: list[int]) -> Tensor:
    """Of the last 100 tokens, read in chunks of these sizes."""
    out, at = [], 0
    with Trial(engine, len(ids)) as trial:
        for size in sizes:
            part = ids[at : at + size]
            at += size
            if part:
                out.append(trial.read(part)[0][-100:])
    assert at >= len(ids)
    return torch.cat(out)[-100:]


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
