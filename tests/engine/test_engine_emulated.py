"""The engine with the GPU's executor on a CPU: prompts by the reference, generated tokens by whole decode
steps as a GPU runs them, launched ahead. Every answer is the CPU engine's."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.cache.store import Cache
from dsv4.config import Dspark, ModelConfig, preset
from dsv4.engine import build, graphs, rounds
from dsv4.engine.request import Completion
from dsv4.engine.settings import Settings, cache_layout
from dsv4.lab.init import make
from dsv4.model.bundle import Bundle
from dsv4.model.model import Model
from dsv4.model.step import Mark, Step
from dsv4.ops import IMPLEMENTATIONS, Ops
from dsv4.quant.codec import decode
from dsv4.weights.load import Checkpoint
from dsv4.weights.tiled import load_tiled
from tests.support.emulated import Launches, emulated
from tests.support.stress import cases as stress_cases
from tests.support.stress import stress, truth
from tests.support.twin import needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="run by test_step_interpreted"),
]
TINY = preset("tiny")
CONFIG = replace(TINY, layers=TINY.layers[1:3], num_mtp_layers=0, index_topk=8)
OPTIONS = EngineConfig(device="cpu", compute_dtype="float32", max_context=512, max_batch=2, threads=1)


class Event:
    """Of a device that has done everything when it is asked."""

    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Executor(graphs.Graphs):
    reader: Model

    def read(self, spans: list[Any], mark: Mark | None = None) -> Tensor:
        return self.reader.read(Step.build(spans, "cpu", mark=mark), self.cache)


class Drafting(Executor, rounds.Rounds):
    pass


@contextmanager
def on_emulated_gpu(path: Path, launches: Launches, options: EngineConfig = OPTIONS) -> Iterator[Engine]:
    def make_executor(bundle: Bundle, s: Settings, config: EngineConfig, _: object) -> tuple[Model, Executor]:
        cache = Cache(cache_layout(bundle.config, s, config, bundle.weights.num_mtp_layers), "cpu", s.dtype)
        ops = Ops.choose("cuda", **dict.fromkeys(IMPLEMENTATIONS, "gpu"))
        own = replace(bundle, weights=load_tiled(Checkpoint.open(path), "cpu"), ops=ops)
        executor = (Drafting if s.drafts else Executor)(
            b=own,
            model=Model(own, s.max_context, "cpu"),
            cache=cache,
            max_batch=config.max_batch,
            chunk=s.chunk,
            use_graphs=False,
            overlap=True,
            num_drafts=s.drafts or 0,
            drafts_always=True,
        )
        executor.model = executor.reader = Model(bundle, s.max_context, "cpu")
        return executor.model, executor

    empty = torch.empty
    with emulated(launches), pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_make_executor", make_executor)
        patch.setattr(graphs, "warm_up", lambda *_: None)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        patch.setattr(torch, "empty", lambda *shape, pin_memory=False, **how: empty(*shape, **how))
        yield Engine.load(path, options)


# So few tokens that drafts of random weights are often right.
DRAFTED = replace(
    CONFIG,
    vocab_size=12,
    num_mtp_layers=1,
    dspark=Dspark(block_size=3, noise_id=7, target_layers=(0, 1), markov_rank=24),
)


# MTP's block, which feeds on its own streams.
FED_BACK = replace(DRAFTED, dspark=None)


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelConfig], Path]:
    folder = tmp_path_factory.mktemp("models")

    def made(config: ModelConfig) -> Path:
        path = folder / ("mtp" if config.dspark is None else "dspark")
        if not path.exists():
            for _ in make(path, config, "official", seed=3):
                pass
        return path

    return made


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "model"
    for _ in make(made, CONFIG, "hfnvfp4", seed=3):
        pass
    return made


def run(engine: Engine, cases: list[tuple[list[int], SamplingParams]]) -> list[Completion]:
    """One after the other is submitted, and they share steps as slots get free."""
    streams = [engine.stream(engine.request(ids, params)) for ids, params in cases]
    while engine.num_unfinished:
        engine.step()
    return [stream.completion() for stream in streams]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(os.environ.get("DSV4_TWINS") or tmp_path_factory.mktemp("twins"))


def check(got: list[Completion], want: list[Completion]) -> None:
    for found, expected in zip(got, want, strict=True):
        assert [token.id for token in found.tokens] == [token.id for token in expected.tokens]
        for token, other in zip(found.tokens, expected.tokens, strict=True):
            assert token.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_answers(path: Path, twins: Path) -> None:
    """Greedy and sampled, with penalties and log-probabilities, more requests than slots."""
    prompt, penalties = (
        [5 + i * 37 % 400 for i in range(126)],
        {"frequency_penalty": 0.8, "presence_penalty": 0.5},
    )
    sampled = {"temperature": 0.9, "ignore_eos": True}
    cases = [
        (prompt, SamplingParams(max_tokens=4, temperature=0.0, logprobs=2, ignore_eos=True)),
        (prompt[:40], SamplingParams(max_tokens=3, seed=1, top_p=0.9, **sampled)),
        (prompt[::-1][:21], SamplingParams(max_tokens=4, seed=2, **penalties, **sampled)),
    ]
    launches, want = Launches(twins), run(Engine.load(path, OPTIONS), cases)
    with on_emulated_gpu(path, launches) as engine:
        assert engine.runner.executor.runs_ahead
        check(run(engine, cases), want)
    assert launches.counts["sample/decode"] > 4


@pytest.mark.parametrize(
    ("config", "batch", "drafts"),
    [
        (DRAFTED, 1, 3),
        pytest.param(DRAFTED, 2, 3, marks=pytest.mark.slow),
        pytest.param(FED_BACK, 2, 3, marks=pytest.mark.slow),
    ],
)
def test_rounds_of_speculation(
    drafted: Callable[[ModelConfig], Path], twins: Path, config: ModelConfig, batch: int, drafts: int
) -> None:
    """Greedy and sampled with penalties and log-probabilities: the tokens without drafts, of which some are
    accepted and some are not."""
    prompt, how = [i * 5 % 12 for i in range(126)], {"ignore_eos": True, "temperature": 0.9}
    cases = [
        (prompt[:7], SamplingParams(max_tokens=6, seed=1, frequency_penalty=0.8, **how)),
        (prompt, SamplingParams(max_tokens=9, temperature=0.0, logprobs=2, ignore_eos=True)),
        (prompt[::-1][:21], SamplingParams(max_tokens=6, seed=2, top_p=0.9, **how)),
    ][: 2 * batch - 1]
    options, path = replace(OPTIONS, max_batch=batch), drafted(config)
    want = run(Engine.load(path, replace(options, speculate="off")), cases)
    with on_emulated_gpu(path, Launches(twins), replace(options, speculate=str(drafts))) as engine:
        check(run(engine, cases), want)
        assert 0 < engine.counts.num_accepted < engine.counts.num_drafted


@pytest.mark.slow
def test_entries_of_mtp(drafted: Callable[[ModelConfig], Path], twins: Path) -> None:
    """A prompt in chunks and rounds after it leave what the CPU's drafter leaves, at all positions
    in the window."""
    path, options = drafted(FED_BACK), replace(OPTIONS, max_batch=1, chunk=40)
    cases = [([i * 5 % 12 for i in range(126)], SamplingParams(max_tokens=7, seed=1, ignore_eos=True))]
    on_cpu = Engine.load(path, replace(options, speculate="1"))
    want = run(on_cpu, cases)
    with on_emulated_gpu(path, Launches(twins), replace(options, speculate="1")) as engine:
        check(run(engine, cases), want)
        assert 0 < engine.counts.num_accepted < engine.counts.num_drafted
    layers, end = [each.runner.executor.cache.layers[-1] for each in (engine, on_cpu)], 126 + 6
    rows = torch.arange(end - FED_BACK.window, end) % layers[0].ring_rows
    got, wanted = (decode(layer.ring.take(rows)) for layer in layers)
    # Codes may be rounded the other way.
    is_far = ((got - wanted).abs() > 1e-3 * wanted.abs().amax(1, keepdim=True)).float().mean(1)
    assert float(is_far.max()) < 0.1, is_far.topk(8)


@pytest.mark.slow
def test_random_arrivals(path: Path, twins: Path) -> None:
    """Requests come, are cancelled, and leave slots and pages to others while a step is launched ahead."""
    cases = stress_cases(6, vocab=CONFIG.vocab_size, page=OPTIONS.max_context // 8, longest=5)
    with on_emulated_gpu(path, Launches(twins)) as engine:
        alone = truth(engine, cases)
        assert stress(engine, cases, alone, requests=14) >= 10
    check(alone, truth(Engine.load(path, OPTIONS), cases))
