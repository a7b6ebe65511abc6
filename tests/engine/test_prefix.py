"""The prefix cache: a hit gives what a miss gives, bit for bit, whatever was kept, evicted or paused."""

import gc
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4 import Engine, SamplingParams
from dsv4.engine import scheduler
from dsv4.engine.request import Completion, Request
from dsv4.errors import ConfigError
from dsv4.lab.score import score_ids
from tests.support.feeding import cache_of

PAGE, VOCAB = 256, 300
GREEDY = SamplingParams(max_tokens=4, temperature=0, logprobs=5)


@pytest.fixture(scope="module")
def alone(engine_for: Callable[..., Engine]) -> Engine:
    """Keeps nothing, and has room for all."""
    return engine_for("official", max_context=1100, max_batch=1, weights="dense", prefix_snapshots=0)


@pytest.fixture(scope="module")
def shared(engine_for: Callable[..., Engine]) -> Engine:
    """Few snapshots and few pages: what is kept is soon evicted, and who runs is soon paused."""
    options = {"max_context": 1100, "max_batch": 3, "prefix_snapshots": 4, "cache_pages": 7, "chunk": 300}
    return engine_for("official", **options, max_stall_ms=60_000)  # who pauses must not depend on a clock


@pytest.fixture(scope="module")
def roomy(engine_for: Callable[..., Engine]) -> Engine:
    return engine_for("official", max_context=1100, max_batch=3)


def text(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCAB) for _ in range(length)]


def values(done: Completion) -> tuple[object, ...]:
    """Tokens with their log-probabilities: float32 of the logits, equal only if these are."""
    return done.tokens, done.finish_reason


class Truth:
    """What each prompt gives without any cache, computed once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.known: dict[tuple[tuple[int, ...], int], tuple[object, ...]] = {}

    def of(self, ids: tuple[int, ...], max_tokens: int) -> tuple[object, ...]:
        if (ids, max_tokens) not in self.known:
            params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=5)
            self.known[ids, max_tokens] = values(self.engine.generate([list(ids)], params)[0])
        return self.known[ids, max_tokens]


@pytest.fixture(scope="module")
def truth(alone: Engine) -> Truth:
    return Truth(alone)


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[Completion]:
    done = engine.generate(prompts, params)
    pool = engine.slots.pool
    assert pool.num_available == pool.num_pages and engine.prefix.num_snapshots <= 64
    return done


def test_hit_equals_miss_and_is_counted(roomy: Engine, truth: Truth) -> None:
    roomy.prefix.clear()
    base = text(700, 1)
    cases = [
        (base, 0),
        (base, 512),  # the same prompt
        (base[:513], 512),
        (base[:512], 0),  # its last token must be processed, and nothing was saved after the first page yet
        (base[:512], 256),
        (base[:600] + text(100, 2), 512),
        (base[:448] + text(252, 3), 256),  # three quarters of the second page
        (base[:255] + text(300, 4), 0),
        (text(1, 5) + base[1:], 0),  # everything but the first token
        (base[256:], 0),  # the same tokens elsewhere
    ]
    for ids, cached in cases:
        (done,) = run(roomy, [ids])
        assert values(done) == truth.of(tuple(ids), 4)
        assert done.cached_tokens == cached, len(ids)


def test_generated_pages_are_found_by_the_next_turn(roomy: Engine, truth: Truth) -> None:
    roomy.prefix.clear()
    first = text(250, 6)
    (done,) = run(roomy, [first], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    ids = first + done.ids + text(10, 7)
    (after,) = run(roomy, [ids])
    assert after.cached_tokens == 256 and values(after) == truth.of(tuple(ids), 4)


def test_a_snapshot_is_made_where_prompts_part(
    engine_for: Callable[..., Engine], roomy: Engine, truth: Truth
) -> None:
    """With long chunks few boundaries are saved; a second prompt saves where it leaves the first."""
    engine = engine_for("official", max_context=1100, max_batch=1, chunk=2048)
    base = text(1000, 8)
    prompts = [base, base[:300] + text(500, 9), base[:300] + text(500, 10)]
    done = [run(engine, [ids])[0] for ids in prompts]
    assert [d.cached_tokens for d in done] == [0, 0, 256]
    assert [values(d) for d in done] == [truth.of(tuple(ids), 4) for ids in prompts]


def test_one_run_keeps_the_state_it_has_passed(engine_for: Callable[..., Engine], truth: Truth) -> None:
    """A prompt is read whole, and later ones go on at its last page's end, 232 tokens before its own."""
    engine = engine_for("official", max_context=1100, max_batch=3, chunk=2048)
    base, runs = text(1000, 50), []
    prefill = engine.runner.executor.prefill
    engine.runner.executor.prefill = lambda spans: runs.append(spans) or prefill(spans)  # type: ignore[method-assign]
    run(engine, [base])
    assert [len(span.ids) for spans in runs[:1] for span in spans] == [1000]
    prompts = [base, base[:800] + text(100, 51), base[:769]]
    done = run(engine, prompts)
    assert [d.cached_tokens for d in done] == [768, 768, 768]
    assert [values(d) for d in done] == [truth.of(tuple(ids), 4) for ids in prompts]


def test_owners_share_nothing(roomy: Engine, truth: Truth) -> None:
    roomy.prefix.clear()
    ids = tuple(text(600, 11))
    found = []
    for turn, owner in enumerate(("ann", "bob", "ann", "", "bob")):
        (done,) = roomy.generate([Request(f"owner-{turn}", ids, GREEDY, owner)])
        found.append(done.cached_tokens)
        assert values(done) == truth.of(ids, 4)
    assert found == [0, 0, 512, 0, 512]


def test_owners_with_nothing_kept_are_forgotten(roomy: Engine) -> None:
    """Strangers who come once leave nothing behind, short prompts and evicted ones alike."""
    roomy.prefix.clear()
    gc.disable()  # nothing here needs it
    try:
        for number in range(30):
            ids = tuple(text(600 if number % 5 == 0 else 3, number))
            roomy.generate([Request(f"stranger-{number}", ids, GREEDY, f"owner {number}")])
        kept = {f"owner {number}" for number in range(0, 30, 5)}
        assert set(roomy.prefix._roots) <= kept and f"owner {25}" in roomy.prefix._roots
        roomy.prefix.clear()
        assert not roomy.prefix._roots
    finally:
        gc.enable()


def test_other_models_and_settings_share_nothing(engine_for: Callable[..., Engine]) -> None:
    """What is kept belongs to one engine, which has one model and one set of settings."""
    ids, engines = text(400, 12), [engine_for("official"), engine_for("official", cache="f32")]
    engines[0].generate([ids], GREEDY)
    assert engines[1].generate([ids], GREEDY)[0].cached_tokens == 0
    assert engines[0].generate([ids], GREEDY)[0].cached_tokens == 256


def test_nothing_is_kept_when_asked(alone: Engine) -> None:
    assert [alone.generate([text(600, 1)], GREEDY)[0].cached_tokens for _ in range(2)] == [0, 0]
    assert alone.slots.pool.num_free == alone.slots.pool.num_pages


def test_paused_sequences_give_the_same_tokens(
    shared: Engine, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three that need 3 pages each share 7: somebody must wait for somebody."""
    monkeypatch.setattr(scheduler, "HEADROOM", 4)  # so that a few tokens are enough to run out
    pauses = shared.scheduler.num_pauses
    prompts = [text(495, 20), text(500, 21), text(506, 22), text(507, 23)]
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=5, ignore_eos=True)
    done = run(shared, prompts, params)
    assert shared.scheduler.num_pauses > pauses
    want = [truth.engine.generate([ids], params)[0].tokens for ids in prompts]
    assert [d.tokens for d in done] == want
    assert all(d.cached_tokens == 0 for d in done), "pages found again after a pause are not the client's hit"


def test_a_pool_too_small_for_one_is_refused(engine_for: Callable[..., Engine]) -> None:
    with pytest.raises(ConfigError, match="cache_pages is 1, but one sequence of max_context 512 needs 2"):
        engine_for("official", cache_pages=1)


STEMS = [text(1000, seed) for seed in (30, 31)]
CUTS = st.sampled_from([1, 192, 255, 256, 257, 448, 511, 512, 513, 780])
# A stem, how much of it, a branch, and its length.
PROMPTS = st.tuples(st.integers(0, 1), CUTS, st.integers(0, 2), st.sampled_from([0, 1, 70, 256]))
BATCHES = st.lists(st.tuples(PROMPTS, st.sampled_from([1, 3])), min_size=1, max_size=4)


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    batches=st.lists(BATCHES, max_size=3),
    cancelled=st.lists(st.integers(0, 10), max_size=3),
    forgets=st.booleans(),
)
def test_random_prefixes_forks_and_evictions(
    shared: Engine,
    truth: Truth,
    batches: list[list[tuple[tuple[int, int, int, int], int]]],
    cancelled: list[int],
    forgets: bool,
) -> None:
    """Prompts that share any part of a page with others, run together, some cancelled halfway."""
    if forgets:
        shared.prefix.clear()
    for number, batch in enumerate(batches):
        streams, wanted = [], []
        for (stem, cut, branch, more), max_tokens in batch:
            ids = STEMS[stem][:cut] + text(more, 40 + branch)
            params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=5)
            streams.append(shared.stream(shared.request(ids, params)))
            wanted.append((tuple(ids), max_tokens))
        for steps in cancelled if number % 2 else ():
            for _ in range(steps):
                shared.step()
            if len(streams) > 1:
                streams.pop().close()
                wanted.pop()
        for stream, (want_ids, max_tokens) in zip(streams, wanted, strict=True):
            assert values(stream.completion()) == truth.of(want_ids, max_tokens)
        pool = shared.slots.pool
        assert pool.num_available == pool.num_pages
        assert shared.prefix.num_snapshots <= 4


def test_snapshots_take_what_is_planned(roomy: Engine) -> None:
    roomy.generate([text(300, 1)], GREEDY)
    snapshot = cache_of(roomy).snapshots[next(iter(roomy.prefix._snapshots.values()))]
    assert snapshot.num_bytes == roomy.slots.layout.snapshot_bytes()
    assert torch.is_tensor(snapshot.window.data)


def test_prompt_tokens_are_scored_whatever_is_cached(roomy: Engine, shared: Engine) -> None:
    """Every token of the prompt has the log-probability of a plain run, also where its prefix was kept."""
    ids = text(600, 1)
    logits = score_ids(roomy, ids, 600)["prefill_logits"]
    want = torch.log_softmax(logits, 1)[range(599), ids[1:]]
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=3)
    for engine in (roomy, shared):
        engine.generate([ids], GREEDY)
        done, short = engine.generate([ids, ids[:5]], params)
        assert [token.id for token in done.prompt] == ids[1:] and done.cached_tokens == 0
        got = torch.tensor([token.logprob for token in done.prompt])
        assert (got - want).abs().max() < 2e-6
        assert all(
            token.top[0][0] == int(row.argmax()) for token, row in zip(done.prompt, logits, strict=False)
        )
        assert short.prompt == done.prompt[:4]
    assert roomy.generate([ids], GREEDY)[0].prompt == ()
