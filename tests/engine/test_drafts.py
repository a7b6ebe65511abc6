"""Speculation: whatever is proposed, accepted, cut or taken back, the answer is the one without it."""

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.cache.layout import SPARE
from dsv4.device import Device
from dsv4.engine.draft import Drafter
from dsv4.engine.eager import Eager
from dsv4.engine.follow import Follower
from dsv4.engine.plan import Plan, Span
from dsv4.engine.request import Completion, Token
from dsv4.engine.runner import Masks, Result
from dsv4.engine.settings import _drafts
from dsv4.errors import ConfigError, DeviceError, RequestError
from dsv4.lab.score import score_ids
from dsv4.model.step import Step
from dsv4.models import embedded
from dsv4.ops.sample.cpu import choose, pack
from dsv4.weights.load import Checkpoint
from tests.support.feeding import cache_of, claim, release
from tests.support.stress import cases, growing, stress, truth

VOCAB = 300
LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=2)


def text(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(5, VOCAB) for _ in range(length)]


def drafter_of(engine: Engine) -> Drafter:
    executor = engine.runner.executor
    assert isinstance(executor, Eager) and executor.drafter is not None
    return executor.drafter


class Oracle:
    """Proposes what the model is known to choose, up to a place where it lies."""

    def __init__(self, engine: Engine, seed: int = 0, lies: bool = True) -> None:
        self.engine, self.chance, self.lies = engine, random.Random(seed), lies
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.lengths: set[tuple[int, int]] = set()  # proposals, and the place of the lie

    def know(self, prompt: list[int], answer: list[int]) -> None:
        self.answers[tuple(prompt)] = answer

    def proposed(self, span: Span) -> tuple[int, ...]:
        sequence = self.engine._running[span.sequence].sequence
        answer, at = self.answers[sequence.request.ids], span.start + 1 - sequence.num_prompt
        right = answer[at : at + span.num_drafts]
        lie = self.chance.randint(0, len(right)) if self.lies else len(right)
        self.lengths.add((len(right), lie))
        return tuple(id if n < lie else (id + 1) % VOCAB for n, id in enumerate(right))


@pytest.fixture(scope="module")
def plain(engine_for: Callable[..., Engine]) -> Engine:
    return engine_for("modelopt", max_context=700, max_batch=1, prefix_snapshots=0, speculate="off")


@pytest.fixture(scope="module")
def drafting(engine_for: Callable[..., Engine]) -> Engine:
    return engine_for("modelopt", max_context=700, max_batch=4, chunk=96, speculate="3")


@pytest.mark.parametrize("most", [1, 3, SPARE - 1])
def test_every_pattern_of_acceptance(
    plain: Engine, drafting: Engine, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Runs that end anywhere in blocks of 4 and 128 tokens, windows and pages; several sequences at once."""
    oracle = Oracle(drafting, most)
    monkeypatch.setattr(drafter_of(drafting), "proposed", oracle.proposed)
    monkeypatch.setattr(drafting.speculation, "forced", most)
    drafting.prefix.clear()
    prompts = [text(length, length) for length in (1, 2, 38, 125, 127, 254, 200, 131)]
    want = [plain.generate([prompt], LONG)[0] for prompt in prompts]
    for prompt, answer in zip(prompts, want, strict=True):
        oracle.know(prompt, answer.ids)
    for _ in range(3):
        got = drafting.generate(prompts, LONG)
        assert [done.tokens for done in got] == [done.tokens for done in want]
    assert {(most, lie) for lie in range(most + 1)} <= oracle.lengths


def test_a_run_is_cut_where_the_answer_ends(
    plain: Engine, drafting: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By length and by a stop id, at every place of a run: nothing beyond comes out or is counted."""
    prompt = text(50, 8)
    oracle = Oracle(drafting, lies=False)
    whole = plain.generate([prompt], LONG)[0].ids
    oracle.know(prompt, whole)
    monkeypatch.setattr(drafter_of(drafting), "proposed", oracle.proposed)
    pool = drafting.slots.pool
    for count in range(1, 12):
        for params in (
            SamplingParams(max_tokens=count, temperature=0, ignore_eos=True),
            SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, stop_ids=(whole[count - 1],)),
        ):
            want, got = plain.generate([prompt], params)[0], drafting.generate([prompt], params)[0]
            assert (got.tokens, got.finish_reason) == (want.tokens, want.finish_reason), params
            assert pool.num_available == pool.num_pages


def test_a_page_that_ends_within_a_run_is_kept(
    plain: Engine, drafting: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, oracle = text(253, 12), Oracle(drafting, lies=False)
    answer = plain.generate([prompt], LONG)[0].ids
    oracle.know(prompt, answer)
    with monkeypatch.context() as patch:
        patch.setattr(drafter_of(drafting), "proposed", oracle.proposed)
        drafting.generate([prompt], LONG)
    done = drafting.generate([prompt + answer], LONG)[0]
    assert done.tokens == plain.generate([prompt + answer], LONG)[0].tokens and done.cached_tokens == 256


def test_random_arrivals(engine_for: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches, chunks, prefix hits, pauses, penalties, cancels; each answer against its run alone."""
    options: dict[str, Any] = {"max_context": 1280, "prefix_snapshots": 6, "cache_pages": 6, "chunk": 96}
    alone = engine_for("modelopt", **options, max_batch=1, speculate="off")
    wanted = [*cases(6, VOCAB, page=256, longest=17), *growing(3, VOCAB, page=256)]
    answers = truth(alone, wanted)
    engine = engine_for("modelopt", **options, max_batch=4, speculate="3")
    apply = engine.runner.apply

    def checked(plan: Plan, masks: Masks) -> list[Result]:
        for span in plan.spans:
            assert span.end + span.num_drafts <= engine.slots.capacity(span.slot), "a page for every proposal"
        return apply(plan, masks)

    monkeypatch.setattr(engine.runner, "apply", checked)
    # Proposals that cross the end of a page when none is left.
    monkeypatch.setattr(engine.speculation, "forced", SPARE - 1)
    assert stress(engine, wanted, answers, requests=30) > 20
    assert (
        engine.counts.num_drafted > 100
        and engine.prefix.num_snapshots > 0
        and engine.scheduler.num_pauses > 0
    )


def test_a_pause_that_ends_right_before_the_last_token(
    plain: Engine, engine_for: Callable[..., Engine]
) -> None:
    """Paused where a page ends, with a snapshot there: it goes on as a generated token, in a slot that has
    just been another's."""
    engine = engine_for("modelopt", max_context=512, max_batch=2, cache_pages=3, speculate="3")
    prompts = [text(180, 1), text(170, 2)]
    params = SamplingParams(max_tokens=110, temperature=0, ignore_eos=True)
    got = engine.generate(prompts, params)
    assert engine.scheduler.num_pauses == 1
    assert [done.tokens for done in got] == [plain.generate([ids], params)[0].tokens for ids in prompts]


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0.7, "top_k": 40, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.0, "logprobs": 21, "prompt_logprobs": 1},
    {"temperature": 0.8, "min_p": 0.02, "stop": ("the",)},
]
if find_spec("llguidance"):
    KINDS.append({"temperature": 0.9, "grammar": 'start: /[a-z ]{20}/ "."'})


def answers(drafts: str, **options: Any) -> tuple[list[Any], Engine]:
    engine = Engine.load(embedded(), EngineConfig(max_context=1024, speculate=drafts, **options))
    made = [{"max_tokens": 24, "seed": 5, **kind} for kind in KINDS]
    requests = [
        engine.request(prompt, SamplingParams(**kind))
        for kind in made
        for prompt in ("Once upon a time, there was a rabbit.", "The bird sang")
    ]
    done = engine.generate(requests)
    return [(each.tokens, each.text, each.finish_reason, each.prompt) for each in done], engine


@pytest.fixture(scope="module")
def without() -> list[Any]:
    return answers("off")[0]


@pytest.mark.parametrize("drafts", ["1", "2", "3"])
def test_every_way_to_choose(without: list[Any], drafts: str) -> None:
    """The embedded model's own drafts: enough are right, of sampled requests too."""
    got, engine = answers(drafts)
    assert got == without
    assert engine.counts.num_accepted > 0.25 / int(drafts) * engine.counts.num_drafted > 20


def interrupted(engine: Engine, prompt: str | list[int], params: SamplingParams, count: int) -> Completion:
    """After so many tokens or more, all are read again."""
    stream = engine.stream(engine.request(prompt, params))
    while len(stream.output.sequence.tokens) < count:
        engine.step()
    engine.scheduler.restart()
    engine.runner.forget()
    return stream.completion()


def test_what_is_read_again_is_known(plain: Engine, engine_for: Callable[..., Engine]) -> None:
    """In chunks that end among tokens that came out: no proposal takes the place of what followed them."""
    params = SamplingParams(max_tokens=70, temperature=0, ignore_eos=True, frequency_penalty=0.5)
    engine = engine_for("modelopt", max_context=700, chunk=7, speculate="3", prefix_snapshots=0)
    prompt = text(20, 2)
    assert interrupted(engine, prompt, params, 60).tokens == plain.generate([prompt], params)[0].tokens


@pytest.mark.skipif(not find_spec("llguidance"), reason="no grammars")
@pytest.mark.parametrize(
    "how",
    [
        {"grammar": r"start: /(the |a )[a-z]+ (was|is) (big|old)\.( (The |A )[a-z]+ (was|is) (big|old)\.)*/"},
        {"grammar": r"start: /[a-z ]*/ </think> /[A-Z][a-z ]*\./", "temperature": 0.8, "seed": 3},
        {"min_tokens": 25, "bad_words": ((5, 6), (17,)), "temperature": 0.9, "seed": 2},
    ],
    ids=["grammar", "over the end of a thought", "bounds"],
)
def test_a_grammar_masks_each_row_by_the_drafts_before_it(how: dict[str, Any]) -> None:
    """Also after a pause, in chunks that end right before the last token: no mask of another place."""
    if "grammar" in how:
        pytest.importorskip("llguidance")
    prompt = "Once upon a time, there was a rabbit."
    params = SamplingParams(**{"max_tokens": 30, "temperature": 0, **how})
    options: dict[str, Any] = {"max_context": 512, "prefix_snapshots": 0}
    plain = Engine.load(embedded(), EngineConfig(**options, speculate="off"))
    want = plain.generate([prompt], params)[0]
    for options["chunk"], count in ((2, 12), (64, 0)):
        engine = Engine.load(embedded(), EngineConfig(**options, speculate="3"))
        got = interrupted(engine, prompt, params, count) if count else engine.generate([prompt], params)[0]
        assert (got.tokens, got.finish_reason) == (want.tokens, want.finish_reason)
        assert engine.counts.num_accepted


def test_where_nothing_is_allowed_a_request_ends_as_without_drafts(
    plain: Engine, drafting: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after an accepted draft, and after one that is refused, which ends nothing."""
    prompt, oracle = text(50, 8), Oracle(drafting, lies=False)
    answer = plain.generate([prompt], LONG)[0].ids
    allowed = sorted({*answer[:7]})
    bad = tuple((answer[5], id) for id in allowed)  # after the sixth token no other may come
    params = replace(LONG, allowed_ids=tuple(allowed), bad_words=bad)
    for known in (answer, [*answer[:2], answer[5], *answer[3:]]):
        oracle.know(prompt, known)
        monkeypatch.setattr(drafter_of(drafting), "proposed", oracle.proposed)
        ended = []
        for engine in (plain, drafting):
            with (
                engine.stream(engine.request(prompt, params)) as stream,
                pytest.raises(RequestError) as error,
            ):
                list(stream)
            ended.append((stream.output.sequence.tokens, str(error.value)))
        assert ended[0] == ended[1] and "allow no token here" in ended[0][1]


def test_coupled_drafts_leave_the_distribution_and_are_often_right() -> None:
    """A draft of its own distribution q with the noise of the token, accepted if it is that: frequencies are
    p's, and acceptance is at least (1-TV)/(1+TV); a greedy draft has only p of its favourite."""
    p, q, count = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.45, 0.45, 0.1]), 100_000
    settings = torch.tensor([pack(temperature=1.0, seed=9, index=n) for n in range(count)])
    token, draft = (choose(d.log().expand(count, 3), settings, None)[:, 0].long() for d in (p, q))
    shares = token.bincount(minlength=3) / count
    assert ((shares - p).abs() < 4 * (p * (1 - p) / count).sqrt()).all(), shares
    distance = float((p - q).abs().sum() / 2)
    hits = float((token == draft).float().mean())
    assert (1 - distance) / (1 + distance) - 0.01 < hits <= 1 - distance + 0.01, hits
    assert hits > 0.1 + float((token == int(q.argmax())).float().mean())


ASK = [{"role": "user", "content": "Tell me a story about a dog."}]


def test_stop_strings_cut_runs() -> None:
    """Wherever in a run they end, in a completion and in a conversation: text, tokens and counts."""
    off, on = (Engine.load(embedded(), EngineConfig(max_context=512, speculate=k)) for k in ("off", "3"))
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    whole = off.generate("Once upon a time, there was", params).text
    for at in range(3, 40, 5):
        stop = replace(params, stop=(whole[at : at + 4],))
        want, got = (engine.generate("Once upon a time, there was", stop) for engine in (off, on))
        assert (got.text, got.tokens, got.finish_reason) == (want.text, want.tokens, want.finish_reason)
    said = off.chat(ASK, params, thinking=False).text
    for at in range(2, 20, 4):
        stop = replace(params, stop=(said[at : at + 3],))
        one, other = (engine.chat(ASK, stop, thinking=False) for engine in (off, on))
        assert (other.text, other.tokens, other.completion_tokens) == (
            *(one.text, one.tokens, one.completion_tokens),
        )
        assert one.finish_reason == other.finish_reason == "stop"
    assert on.counts.num_accepted > 20 and not on.num_unfinished


def test_ranks_draft_alike(without: list[Any]) -> None:
    got, engine = answers("2", ranks=2)
    engine.close()
    assert got == without and engine.counts.num_accepted > 20


def test_a_rank_that_chose_otherwise_is_found() -> None:
    """By the last token that was accepted, which the next plan begins with."""
    nothing: Any = None
    follower = Follower(nothing, nothing, "rank 1")
    plan = Plan(decode=(Span(sequence=5, slot=0, start=9, ids=(8,), num_drafts=3),))
    follower._note(plan, [Result(5, Token(1), more=(Token(2), Token(3)), num_drafted=3)])
    follower._compare(Plan(decode=(Span(sequence=5, slot=0, start=12, ids=(3,)),)))
    follower._note(plan, [Result(5, Token(1), more=(Token(2), Token(3)), num_drafted=3)])
    with pytest.raises(DeviceError, match="chose token 3 at position 12, rank 0 chose 4"):
        follower._compare(Plan(decode=(Span(sequence=5, slot=0, start=12, ids=(4,)),)))


def walk(engine: Engine, prompts: list[list[int]], stop: int) -> list[dict[int, tuple[int, ...]]]:
    """Of each prompt, by tokens that have come out, what was proposed to follow them."""
    found: list[dict[int, tuple[int, ...]]] = [{} for _ in prompts]
    with ExitStack() as stack:
        streams = [stack.enter_context(engine.stream(engine.request(ids, LONG))) for ids in prompts]
        sequences = [stream.output.sequence for stream in streams]
        while any(len(sequence.tokens) < stop for sequence in sequences):
            engine.step()
            states = {state.sequence: state for state in drafter_of(engine)._states.values()}
            for known, sequence in zip(found, sequences, strict=True):
                if sequence.tokens:
                    known[len(sequence.tokens)] = states[sequence.number].proposed
    return found


def by_hand(engine: Engine, ids: list[int]) -> tuple[int, ...]:
    """What the draft block gives after these tokens, the last of which the model has not read: over all the
    others at once, then twice over its own streams."""
    slot, p, out = claim(engine, len(ids) + 8), len(ids) - 2, []
    model, cache = engine.model, cache_of(engine)
    step = Step.build([(slot, 0, ids[:-1])], "cpu")
    streams, logits = model.draft(model.forward(step, cache), torch.tensor(ids[1:]), step, cache)
    for depth in range(3):
        out.append(int(logits[-1].argmax()))
        step = Step.build([(slot, p + 1 + depth, out[-1:])], "cpu")
        streams, logits = model.draft(streams[-1:], step.ids, step, cache)
    release(engine, slot)
    return tuple(out)


def test_a_draft_depends_on_the_tokens_alone(
    engine_for: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However they came: in a prompt whole or in chunks, one by one, or as accepted proposals, beside others.
    Entries of tokens that were taken back, and those that a draft made of its own streams, are nobody's."""
    options: dict[str, Any] = {"max_context": 700, "prefix_snapshots": 0, "speculate": "3"}
    whole, chunked = engine_for("official", **options), engine_for("official", **options, chunk=7)
    prompts, stop = [text(150, 3), text(61, 4), text(20, 5)], 30
    answers = [done.ids for done in whole.generate(prompts, LONG)]
    want = [
        {n: by_hand(whole, prompt + answer[:n]) for n in range(1, len(answer) + 1)}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    for engine in (whole, chunked):
        oracle, drafter = Oracle(engine, 4), drafter_of(engine)
        for prompt, answer in zip(prompts, answers, strict=True):
            oracle.know(prompt, answer)
        for proposed in (lambda span: (), oracle.proposed):
            monkeypatch.setattr(drafter, "proposed", proposed)
            for found, right in zip(walk(engine, prompts, stop), want, strict=True):
                assert len(found) >= stop / 4
                assert found == {n: right[n] for n in found}


def test_a_hit_drafts_as_any_other(engine_for: Callable[..., Engine]) -> None:
    """What lay in the slot before is no part of it, nor the token that followed when the snapshot was made,
    though the entry before the hit is lost: it is empty."""
    engine = engine_for("official", max_context=700, max_batch=2, speculate="3")
    prompt, other = text(260, 6), text(299, 7)
    first = walk(engine, [prompt], 12)[0]
    hit = walk(engine, [prompt], 12)[0]
    assert engine.prefix.num_snapshots == 1
    walk(engine, [other, other[::-1]], 12)
    assert walk(engine, [other[:3], prompt], 12)[1] == hit and hit.keys() == first.keys()
    engine.prefix.clear()
    walk(engine, [prompt[:256] + other[:20]], 12)
    assert walk(engine, [prompt], 12)[0] == hit


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.7, "min_p": 0.01},
        {"temperature": 1.0, "top_k": 30, "repetition_penalty": 1.5, "presence_penalty": 1.0},
        {"temperature": 0.0, "frequency_penalty": 2.0, "logit_bias": {9: 4.0, 11: 3.5}},
    ],
    ids=str,
)
def test_drafts_are_chosen_as_tokens_are(
    plain: Engine, drafting: Engine, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    """A draft block that knows the model's own logits is right every time: noise, filters and penalties are
    those that the token will have."""
    tokens: dict[int, dict[int, int]] = {}  # by slot and position

    def note(streams: Tensor, next_ids: Tensor, step: Step, cache: object) -> None:
        for slot, first, ids in step.spans:
            known = tokens.setdefault(slot, {0: 7})
            known |= {first + 1 + n: id for n, id in enumerate(ids)}

    def knowing(streams: Tensor, next_ids: Tensor, step: Step, cache: object) -> tuple[Tensor, Tensor]:
        logits = []
        note(streams, next_ids, step, cache)
        for slot, first, ids in step.spans:
            context = [tokens[slot][n] for n in range(first + len(ids) + 1)]
            logits.append(score_ids(plain, context, len(context))["prefill_logits"][-1])
        return streams, torch.stack(logits)

    monkeypatch.setattr(drafting.model, "keep_streams", note)
    monkeypatch.setattr(drafting.model, "draft", knowing)
    before = drafting.counts.num_drafted, drafting.counts.num_accepted
    params = SamplingParams(max_tokens=14, seed=3, ignore_eos=True, **how)
    prompts = [[7, *text(length, length)] for length in (3, 11)]
    got = drafting.generate(prompts, params)
    assert [done.tokens for done in got] == [plain.generate([ids], params)[0].tokens for ids in prompts]
    drafted, accepted = drafting.counts.num_drafted - before[0], drafting.counts.num_accepted - before[1]
    assert accepted == drafted > 15, (accepted, drafted)


def test_one_row_waits_for_the_next_chunk(drafting: Engine) -> None:
    """Not all rows of its chunk with it."""
    with drafting.stream(drafting.request(text(300, 1), LONG)) as stream:
        drafting.step()
        states = {state.sequence: state for state in drafter_of(drafting)._states.values()}
        waiting = states[stream.output.sequence.number].waiting
    assert waiting is not None and waiting.untyped_storage().nbytes() == waiting.nbytes


def test_a_draft_that_is_no_number_is_none(
    plain: Engine, drafting: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = drafting.model.draft

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        streams, logits = draft(*args, **kwargs)
        return streams * torch.nan, logits * torch.nan

    monkeypatch.setattr(drafting.model, "draft", poisoned)
    before = drafting.counts.num_drafted
    prompt = text(70, 9)
    assert drafting.generate([prompt], LONG)[0].tokens == plain.generate([prompt], LONG)[0].tokens
    assert drafting.counts.num_drafted == before


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_up_to_the_end_of_the_context(plain: Engine, drafting: Engine, penalty: float) -> None:
    """Proposals beyond it have no rotation, and no place among the tokens that penalties count."""
    prompt = text(680, 2)
    params = SamplingParams(temperature=0, ignore_eos=True, frequency_penalty=penalty)
    assert drafting.generate([prompt], params)[0].tokens == plain.generate([prompt], params)[0].tokens


def test_refusals(engine_for: Callable[..., Engine]) -> None:
    for wrong in (-1, 4, True, 1.0, "0", "-1", "on", ""):
        with pytest.raises(ConfigError, match=r"speculate is .*, expected 'off', 'auto' or a number"):
            EngineConfig(speculate=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="speculate is 2, but the model has no drafter"):
        engine_for("hfnvfp4", speculate="2")
    with pytest.raises(ConfigError, match="speculate is 4, but MTP proposes at most 3 tokens"):
        engine_for("official", speculate="4")
    with pytest.raises(
        ConfigError, match="speculate is 6, but DSpark's block has 5 tokens; use auto, off or 1 to 5"
    ):
        engine_for("dspark-official", speculate="6")
    gpu, checkpoint = (
        Device(kind="cuda", torch_name="cuda:0", name="a GPU", memory_bytes=1, why=""),
        Checkpoint.open(embedded()),
    )
    with pytest.raises(ConfigError, match="speculate is 2: a GPU speculates only alone and with its own"):
        _drafts(EngineConfig(speculate="2"), gpu, checkpoint, has_rounds=False)
    for how, drafts in (("off", 0), ("auto", None), ("2", 2)):
        assert _drafts(EngineConfig(speculate=how), gpu, checkpoint, has_rounds=True) == drafts
