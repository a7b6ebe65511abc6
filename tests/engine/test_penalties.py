"""Penalties and biases in the engine: an oracle with the model's own logits, pauses, hits, grammars."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.engine import scheduler
from dsv4.errors import RequestError
from dsv4.lab.score import score_ids
from dsv4.ops.sample.cpu import log_probs
from tests.support.stress import penalties

ALL: dict[str, Any] = {
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": {7: 3.0, 11: -100.0, 200: 0.25},
}
EACH = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.6},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.8, "presence_penalty": -0.3},
    {"logit_bias": {id: 2.0 for id in range(0, 300, 3)}},
    ALL,
]


@pytest.fixture(scope="module")
def engine(engine_for: Callable[..., Engine]) -> Engine:
    return engine_for("modelopt", max_batch=4, chunk=64)


def text(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(5, 300) for _ in range(count)]


def by_hand(engine: Engine, prompt: list[int], count: int, how: dict[str, Any]) -> list[int]:
    """The model's own logits of every step, penalised by NumPy."""
    ids = list(prompt)
    f32 = np.float32
    for _ in range(count):
        z = score_ids(engine, ids, len(ids))["prefill_logits"][-1].numpy().copy()
        for id, bias in how.get("logit_bias", {}).items():
            z[id] += f32(bias)
        generated = Counter(ids[len(prompt) :])
        for id in set(ids):
            r = f32(how.get("repetition_penalty", 1))
            z[id] = z[id] / r if z[id] > 0 else z[id] * r
        for id, times in generated.items():
            z[id] -= f32(how.get("frequency_penalty", 0)) * f32(times)
            z[id] -= f32(how.get("presence_penalty", 0))
        ids.append(int(z.argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("how", EACH, ids=lambda how: "+".join(how))
def test_greedy_answers_are_those_made_by_hand(engine: Engine, how: dict[str, Any]) -> None:
    prompt = text(30, 9)
    plain = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    (done,) = engine.generate([prompt], replace(plain, **how))
    assert done.ids == by_hand(engine, prompt, 12, how)
    assert done.ids != engine.generate([prompt], plain)[0].ids


def test_no_token_comes_twice_where_repetition_is_dear(engine: Engine) -> None:
    prompt = text(20, 2)
    how = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, repetition_penalty=100.0)
    plain = replace(how, repetition_penalty=1.0)
    assert len(set(engine.generate([prompt], plain)[0].ids)) < 60
    ids = engine.generate([prompt], how)[0].ids
    assert len(set(ids)) == 60 and not set(ids) & set(prompt)


def test_wishes_for_nothing_change_nothing(engine: Engine) -> None:
    prompt = text(20, 3)
    for temperature in (0.0, 0.9):
        plain = SamplingParams(max_tokens=10, temperature=temperature, seed=1, logprobs=2, ignore_eos=True)
        nothing = replace(plain, logit_bias={5: 0.0}, presence_penalty=0, repetition_penalty=1)
        assert not nothing.is_penalised
        assert engine.generate([prompt], plain)[0].tokens == engine.generate([prompt], nothing)[0].tokens


def test_logprobs_are_the_models_own(engine: Engine) -> None:
    prompt = text(25, 4)
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=3, logit_bias={9: 100.0}, ignore_eos=True)
    (token,) = engine.generate([prompt], params)[0].tokens
    want = log_probs(score_ids(engine, prompt, len(prompt))["prefill_logits"][-1])
    assert token.id == 9 and token.logprob == float(want[9])
    assert [id for id, _ in token.top] == want.argsort(descending=True)[:3].tolist()


def test_alone_paused_shared_and_in_any_order(
    engine_for: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that need 2 pages each have 3; prompts share pages; sampled and greedy; each as on its own."""
    monkeypatch.setattr(scheduler, "HEADROOM", 4)  # so that a few tokens are enough to run out
    alone = engine_for("official", max_batch=1, prefix_snapshots=0)
    shared = engine_for("official", max_batch=3, prefix_snapshots=4, cache_pages=3, chunk=300)
    stem = text(300, 6)
    prompts = [text(243, 7), text(241, 8), text(244, 9), stem[:270], stem[:261]]
    params = [
        SamplingParams(
            max_tokens=25 if n < 3 else 5, temperature=0.8 * (n % 2), seed=n, ignore_eos=True, logprobs=1
        )
        for n in range(5)
    ]
    params = [
        replace(how, **each) for how, each in zip(params, (ALL, EACH[0], {}, ALL, EACH[2]), strict=True)
    ]
    want = [alone.generate([ids], how)[0].tokens for ids, how in zip(prompts, params, strict=True)]
    got = shared.generate([shared.request(prompts[n], params[n]) for n in (3, 0, 1, 2, 4)])
    assert [done.tokens for done in got] == [want[n] for n in (3, 0, 1, 2, 4)]
    assert shared.scheduler.num_pauses > 0
    hit = shared.generate([prompts[4]], params[4])[0]
    assert hit.tokens == want[4] and hit.cached_tokens == 256


def test_a_grammar_wins_over_a_bias() -> None:
    """`a` and `b` are all that is allowed, whatever is wished for; between them the bias decides."""
    engine = Engine.load(None, EngineConfig(max_context=256, max_batch=2))
    assert engine.tokenizer is not None
    (a,), (b,), (z,) = (engine.tokenizer.encode_text(letter) for letter in "abz")
    for wished, other in ((a, b), (b, a)):
        params = SamplingParams(
            max_tokens=3,
            temperature=0,
            grammar='start: ("a" | "b") ("a" | "b") ("a" | "b")',
            logit_bias={z: 100.0, wished: 50.0},
        )
        assert engine.generate(["x"], params)[0].ids == [wished] * 3
        # What has come gives way to what has not.
        params = replace(params, repetition_penalty=10.0, logit_bias={z: 100.0, wished: 80.0, other: 40.0})
        assert engine.generate(["x"], params)[0].ids[:2] == [wished, other]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1, expected a number from -2 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan, expected a number from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, expected a number from 0.01 to 100"),
        ({"repetition_penalty": True}, "repetition_penalty is True, expected"),
        ({"logit_bias": {i: 1.0 for i in range(1025)}}, "logit_bias has 1025 entries, expected .* most 1024"),
        ({"logit_bias": [(1, 2)]}, "logit_bias has .* entries, expected a dict"),
        ({"logit_bias": {5: 100.5}}, "logit_bias has 5: 100.5, expected token ids and numbers from -100"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias has '5': 1.0"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias has -1: 1.0"),
    ],
)
def test_bad_wishes_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        SamplingParams(**wrong)


def test_ids_outside_the_vocabulary_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="logit_bias id 300 is outside the vocabulary of 300"):
        engine.submit(engine.request([1, 2], SamplingParams(logit_bias={3: 1.0, 300: 1.0})))


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [True, False])
def test_on_a_gpu_greedy_answers_are_those_made_by_hand(ahead: bool) -> None:
    """Raw logits come with every step; the oracle penalises them on the host."""
    engine = Engine.load(None, EngineConfig(device="cuda", max_context=512, max_batch=4))
    engine.runner.executor.runs_ahead = ahead
    vocab, chance = engine.model_config.vocab_size, random.Random(9)
    prompts = [[chance.randrange(5, vocab) for _ in range(40)] for _ in range(4)]
    params = [
        SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=vocab, **how)
        for how in EACH[:4]
    ]
    requests = [engine.request(ids, how) for ids, how in zip(prompts, params, strict=True)]
    for request, done in zip(requests, engine.generate(requests), strict=True):
        ids, how = list(request.ids), request.params
        for token in done.tokens:
            # Log-probabilities are logits but for one number a row, which repetition would not bear: that
            # penalty is left to the kernel's own tests.
            z = torch.full((vocab,), -torch.inf)
            listed, values = zip(*token.top, strict=True)
            z[list(listed)] = torch.tensor(values)
            if how.repetition_penalty == 1:
                for id, times in Counter(ids[len(request.ids) :]).items():
                    z[id] -= how.frequency_penalty * times + how.presence_penalty
                best = z.topk(2)
                assert token.id == best.indices[0] or best.values[0] - z[token.id] < 1e-4
            ids.append(token.id)


@pytest.mark.gpu
def test_on_a_gpu_ahead_or_not_alone_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars among them, where llguidance is: a pass that waits for masks is sampled late, with rows that
    have ended. Prompts fill almost a page: those who generate more need another, and some are paused."""
    from dsv4.engine.runner import Runner

    monkeypatch.setattr(scheduler, "HEADROOM", 4)

    forms = [None, None, "start: /(?s:.*)/"] if find_spec("llguidance") else [None]

    config = EngineConfig(device="cuda", max_context=512, max_batch=8, cache_pages=8)
    engine = Engine.load(None, config)
    vocab, chance = engine.model_config.vocab_size, random.Random(10)
    requests: list[tuple[list[int], SamplingParams]] = []
    for n in range(40):
        how = SamplingParams(
            max_tokens=chance.choice([3, 20, 90]),
            temperature=chance.choice([0.0, 0.9]),
            seed=n,
            grammar=chance.choice(forms),
            **penalties(chance, vocab),
        )
        requests.append(([chance.randrange(5, vocab) for _ in range(chance.randint(200, 254))], how))
    runner = engine.runner
    assert isinstance(runner, Runner)
    runner.executor.runs_ahead = False
    want = [engine.generate([ids], how)[0].tokens for ids, how in requests]
    runner.executor.runs_ahead = True
    for _ in range(3):
        got = engine.generate([engine.request(ids, how) for ids, how in requests])
        assert [done.tokens for done in got] == want
    assert engine.scheduler.num_pauses > 0
