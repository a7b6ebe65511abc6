"""Steps that are interrupted, refused or fail half way: whoever goes on gets what it would have had alone."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fake_device import VOCAB
from test_runner import Loop, expected, never_seven

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.engine.plan import Sampling, Span


def drain(loop: Loop) -> None:
    while loop.alive:
        loop.step()


def test_interrupt_in_fetch_then_go_on() -> None:
    loop = Loop(slots=3)
    a, b = never_seven(loop, 5, 12, 2)
    for _ in range(3):
        loop.step()
    real = loop.device.fetch

    def fetch(step):
        raise KeyboardInterrupt

    loop.device.fetch = fetch
    with pytest.raises(KeyboardInterrupt):
        loop.step()
    loop.device.fetch = real
    loop.end(b, "cancelled")
    drain(loop)
    assert [t.id for t in a.tokens] == expected(a)


def test_interrupt_in_fetch_of_a_prompt_then_go_on() -> None:
    loop = Loop(slots=3)
    prompt = [random.Random(3).randrange(VOCAB) for _ in range(60)]
    a = loop.add(prompt, 3, 0.0, False)
    loop.step()
    real = loop.device.fetch

    def fetch(step):
        real(step)
        raise KeyboardInterrupt

    loop.device.fetch = fetch
    with pytest.raises(KeyboardInterrupt):
        loop.step()
    loop.device.fetch = real
    drain(loop)
    assert [t.id for t in a.tokens] == expected(a)


def test_a_step_ahead_that_cannot_be_launched_harms_nobody() -> None:
    loop = Loop(slots=3)
    (a,) = never_seven(loop, 5, 12, 1)
    for _ in range(3):
        loop.step()
    from dsv4.engine.runner import UNSEEN

    loop.device.fails = lambda what, spans: what == "decode" and spans[0].ids[0] == UNSEEN
    loop.step()
    loop.device.fails = lambda what, spans: False
    drain(loop)
    assert [t.id for t in a.tokens] == expected(a)


def test_a_resumed_sequence_takes_no_pages_of_prompts_for_generated_tokens() -> None:
    loop = Loop(slots=3, same_bits=False)
    (a,) = never_seven(loop, 9, 60, 1)
    for _ in range(30):
        loop.step()
    known = a.span(0, a.num_known)
    b = loop.add([*known, 1], 1, 0.0, False)  # a second turn: what a has said so far is a prompt now
    while b.number in loop.alive:
        loop.step()
    loop.scheduler._pause(a)
    loop.step()
    assert a.num_processed <= a.num_prompt, (a.num_processed, a.num_prompt)


def _greedy(n=4):
    from dsv4 import SamplingParams

    return SamplingParams(max_tokens=n, temperature=0, logprobs=3, ignore_eos=True)


def test_a_refused_step_loses_no_snapshot(engine_for: Callable[..., Engine]) -> None:
    from dsv4.engine.trial import Trial
    from dsv4.errors import RequestError

    engine = engine_for("official", max_context=1100, max_batch=1)
    chance = random.Random(0)
    ids = [chance.randrange(5, 300) for _ in range(600)]
    first = engine_for("official", max_context=1100, max_batch=1).generate([ids], _greedy())[0]
    engine.generate([ids[:512]], _greedy(1))  # its snapshots wait for the next plan
    with Trial(engine, 100):
        stream = engine.stream(engine.request(ids, _greedy()))
        with pytest.raises(RequestError, match="wait for cache space"):
            engine.step()
        stream.close()
    second = engine.generate([ids], _greedy())[0]
    assert second.tokens == first.tokens


def test_a_refused_step_leaves_the_trial_its_slot(engine_for: Callable[..., Engine]) -> None:
    from dsv4.engine.trial import Trial
    from dsv4.errors import RequestError

    engine = engine_for("official", max_context=1100, max_batch=1)
    with Trial(engine, 100) as trial:
        stream = engine.stream(engine.request([5, 6, 7], _greedy()))
        with pytest.raises(RequestError, match="wait for cache space"):
            engine.step()
        stream.close()
        trial.read([5, 6, 7])


def test_interrupted_prompt_goes_on_as_alone(engine_for: Callable[..., Engine]) -> None:
    engine = engine_for("official", max_context=1100, max_batch=2, chunk=100, prefix_snapshots=0)
    chance = random.Random(0)
    ids = [chance.randrange(5, 300) for _ in range(300)]
    alone = engine.generate([ids], _greedy())[0]
    stream = engine.stream(engine.request(ids, _greedy()))
    engine.step()
    real, executor = engine.runner.executor.fetch, engine.runner.executor

    def fetch(step):
        raise KeyboardInterrupt

    executor.fetch = fetch
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    executor.fetch = real
    assert stream.completion().tokens == alone.tokens


class PanicException(BaseException):
    """As Rust's panics come to Python: no Exception."""


@pytest.mark.parametrize("error", [ValueError("odd"), RuntimeError("Already borrowed"), PanicException("!")])
@pytest.mark.parametrize("call", ["compute_bitmask", "consume_token"])
def test_a_grammar_that_fails_ends_its_own_request(error: BaseException, call: str) -> None:
    """Whatever llguidance raises in the middle of an answer; an interrupt is not the grammar's."""
    engine = Engine.load(None, EngineConfig(max_context=256, max_batch=2))
    free = SamplingParams(max_tokens=4, temperature=0)
    alone = engine.generate(["Once"], free)[0].tokens
    held = engine.request("Once", replace(free, grammar="start: /.*/"))
    streams = [engine.stream(held), engine.stream(engine.request("Once", free))]
    engine.step()
    matcher = streams[0].output.sequence.matcher
    real, raised = matcher._state, [error]

    class State:
        def __getattr__(self, name: str) -> object:
            if name == call:
                raise raised[0]
            return getattr(real, name)

    matcher._state = State()
    delta = next(delta for delta in engine.step() if delta.request_id == held.id)
    assert delta.finish_reason == "error" and "grammar failed" in delta.error
    assert streams[1].completion().tokens == alone and engine.slots.num_free == 2
    raised[0] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        matcher.mask() if call == "compute_bitmask" else matcher.accept(5)


class FakeDecoder:
    def __init__(self, rows):
        from types import SimpleNamespace

        self.buffers = SimpleNamespace(rows=rows, out=torch.zeros(rows, 44, dtype=torch.int32), logits=None)
        self.held, self.fails = None, False

    def load(self, tokens, settings, send, take_latest=False):
        self.held = [(slot, position) for slot, position, _ in tokens]  # f.inputs.copy_
        if self.fails:
            raise torch.OutOfMemoryError("in torch.where of take_latest")

    def step(self, samples=True):
        self.ran, self.held = self.held, [(slot, position + 1) for slot, position in self.held]


def test_holds_after_a_failed_load() -> None:
    from dsv4.engine.graphs import Graphs
    from dsv4.ops.sample import cpu

    g = Graphs.__new__(Graphs)
    g.sampler, g._holds, g.decoders = cpu, {}, {1: FakeDecoder(1)}
    g.swapper = g.recorder = None
    g.send = lambda t: t
    g.land = lambda made, out: setattr(made, "out", out)
    d = g.decoders[1]
    a = Span(0, 0, 5, (9,), Sampling(index=1))
    g.decode((a,))  # holds a at 6
    d.fails = True
    with pytest.raises(torch.OutOfMemoryError):
        g.decode((Span(1, 1, 30, (4,), Sampling(index=1)),))
    d.fails = False
    g.decode((Span(0, 0, 6, (-1,), Sampling(index=2)),))
    assert d.ran == [(0, 6)], d.ran
