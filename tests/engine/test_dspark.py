"""DSpark through the engine: a draft depends on the tokens alone, and what comes out on no draft at all.

Faults that other engines have had, and where each shows:
compressor state after partial accepts: test_every_pattern_of_acceptance, golden's walks
positions, rotation, window or taps of the stages: golden's planted mistakes
tensors dropped or decoded in another format, a drafter not found: test_weights_inventory
more drafts than the block: test_drafts.test_refusals
stale windows after hits, reused slots, block entries kept: test_a_draft_depends_on_the_tokens_alone
hits that a drafter prevents: test_hits_are_those_without_a_drafter
NaN among drafts: test_a_draft_that_is_no_number_is_none
biased or uncoupled sampling: test_drafts.test_coupled_drafts_leave_the_distribution_and_are_often_right
grammars over the end of a thought: test_drafts.test_a_grammar_masks_each_row_by_the_drafts_before_it
neighbours' tokens: test_random_arrivals, test_identifiers_are_echoed_as_without_speculation
streams collapsed before MTP: golden's MTP steps
stops and limits within a run: test_drafts.test_a_run_is_cut_where_the_answer_ends, test_stop_strings_cut_runs
slower than none under load: test_survival
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.cache.layout import SPARE
from dsv4.engine.draft import DsparkDrafter, State, block_step
from dsv4.model.step import Step
from dsv4.models import embedded
from tests.engine.test_drafts import LONG, Oracle, drafter_of, text, walk
from tests.support.feeding import cache_of, claim, release
from tests.support.stress import cases, growing, stress, truth

FORMAT = "dspark-official"


@pytest.fixture(scope="module")
def plain(engine_for: Callable[..., Engine]) -> Engine:
    return engine_for(FORMAT, max_context=700, max_batch=1, prefix_snapshots=0, speculate="off")


@pytest.fixture(scope="module")
def drafting(engine_for: Callable[..., Engine]) -> Engine:
    return engine_for(FORMAT, max_context=700, max_batch=4, chunk=96, speculate="5")


def by_hand(engine: Engine, ids: list[int]) -> tuple[int, ...]:
    """The block after these tokens, the last of which is its anchor: of a sequence read at once."""
    slot, p, out, taps = claim(engine, len(ids) + 8), len(ids) - 2, [ids[-1]], list[Tensor]()
    model, cache = engine.model, cache_of(engine)
    step = Step.build([(slot, 0, ids[:-1])], "cpu")
    model.forward(step, cache, taps)
    model.keep_taps(torch.cat(taps, 1), step, cache)
    base, mixed = model.draft_block(block_step(model, [(slot, p + 1, 0)], ids[-1:]), cache)
    for place in range(base.shape[1]):
        out.append(int(model.correct(base[:, place], mixed[:, place], torch.tensor(out[-1:]))[0].argmax()))
    release(engine, slot)
    return tuple(out[1:])


def test_a_draft_depends_on_the_tokens_alone(
    engine_for: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However they came: a prompt whole or in chunks, one by one, as accepted drafts, beside others; in a
    slot that was another's, after a hit in the prefix cache, at a snapshot that a step has passed."""
    whole = engine_for(FORMAT, max_context=700, speculate="5", prefix_snapshots=0)
    chunked = engine_for(FORMAT, max_context=700, speculate="5", chunk=75)
    prompts, stop = [text(290, 3), text(61, 4), text(20, 5)], 16
    answers = [done.ids for done in whole.generate(prompts, LONG)]
    want = [
        {n: by_hand(whole, prompt + answer[:n]) for n in range(1, len(answer) + 1)}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    for engine in (whole, chunked, chunked):
        oracle, drafter = Oracle(engine, 4), drafter_of(engine)
        for prompt, answer in zip(prompts, answers, strict=True):
            oracle.know(prompt, answer)
        for proposed in (lambda span: (), oracle.proposed):
            monkeypatch.setattr(drafter, "proposed", proposed)
            for found, right in zip(walk(engine, prompts, stop), want, strict=True):
                assert len(found) >= stop / 6
                assert found == {n: right[n] for n in found}
    assert chunked.prefix.num_snapshots


@pytest.mark.parametrize("most", [2, SPARE - 1])
def test_every_pattern_of_acceptance(
    plain: Engine, drafting: Engine, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    oracle = Oracle(drafting, most)
    monkeypatch.setattr(drafter_of(drafting), "proposed", oracle.proposed)
    monkeypatch.setattr(drafting.speculation, "forced", most)
    prompts = [text(length, length) for length in (1, 2, 38, 125, 127, 254, 131)]
    want = [plain.generate([prompt], LONG)[0] for prompt in prompts]
    for prompt, answer in zip(prompts, want, strict=True):
        oracle.know(prompt, answer.ids)
    assert [done.tokens for done in drafting.generate(prompts, LONG)] == [done.tokens for done in want]
    assert {(most, lie) for lie in range(most + 1)} <= oracle.lengths


@pytest.mark.parametrize("speculate", ["auto", "3"])
@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_random_arrivals(engine_for: Callable[..., Engine], speculate: str, count: int) -> None:
    """Batches, chunks, prefix hits, pauses, penalties, cancels; each against its run without speculation."""
    options: dict[str, Any] = {"max_context": 1280, "prefix_snapshots": 6, "cache_pages": 6, "chunk": 96}
    alone = engine_for(FORMAT, **options, max_batch=1, speculate="off")
    wanted = [*cases(5, 300, page=256, longest=17, seed=4), *growing(2, 300, page=256)]
    answers = truth(alone, wanted)
    engine = engine_for(FORMAT, **options, max_batch=4, speculate=speculate)
    assert stress(engine, wanted, answers, requests=count) > count / 2
    assert engine.prefix.num_snapshots > 0
    assert engine.counts.num_drafted > (60 if speculate == "3" else 0)


def test_hits_are_those_without_a_drafter(engine_for: Callable[..., Engine]) -> None:
    options: dict[str, Any] = {"max_context": 700, "max_batch": 2}
    few = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    prompts = [text(300, 1), text(300, 1), text(300, 1)[:280] + text(80, 2)]
    cached = []
    for speculate in ("off", "auto", "2"):
        engine = engine_for(FORMAT, **options, speculate=speculate)
        cached.append([engine.generate([ids], few)[0].cached_tokens for ids in prompts])
    assert cached[0] == cached[1] == cached[2] and max(cached[0]) == 256


@pytest.mark.parametrize("poison", [torch.nan, -torch.inf])
def test_a_draft_that_is_no_number_is_none(
    plain: Engine, drafting: Engine, monkeypatch: pytest.MonkeyPatch, poison: float
) -> None:
    """In one slot of the block: those before it count, and nothing else comes out."""
    correct, calls = drafting.model.correct, 0

    def poisoned(base: Tensor, mixed: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        logits, sure = correct(base, mixed, previous)
        calls += 1
        return (logits.fill_(poison) if calls % 3 == 0 else logits), sure * torch.nan

    monkeypatch.setattr(drafting.model, "correct", poisoned)
    for params in (LONG, SamplingParams(max_tokens=30, temperature=0.9, seed=4, ignore_eos=True)):
        prompt = text(70, 9)
        assert drafting.generate([prompt], params)[0].tokens == plain.generate([prompt], params)[0].tokens


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_up_to_the_end_of_the_context(plain: Engine, drafting: Engine, penalty: float) -> None:
    """A block reaches beyond it."""
    params = SamplingParams(temperature=0, ignore_eos=True, frequency_penalty=penalty)
    prompt = text(680, 2)
    assert drafting.generate([prompt], params)[0].tokens == plain.generate([prompt], params)[0].tokens


def test_without_its_drafter_nothing_of_it_is_there(plain: Engine, drafting: Engine) -> None:
    assert (
        plain.model.dspark is None and plain.drafter is None and isinstance(drafting.drafter, DsparkDrafter)
    )
    assert len(cache_of(plain).layers) == 3 and len(cache_of(drafting).layers) == 6
    saved = drafting.slots.layout.snapshot_bytes() - plain.slots.layout.snapshot_bytes()
    assert saved == 3 * (drafting.model_config.window - 1) * plain.slots.layout.entry_bytes


def test_the_drafter_in_use_is_named(engine_for: Callable[..., Engine]) -> None:
    kinds = {FORMAT: "auto, DSpark drafter (3 stages, blocks of 5)", "official": "auto, MTP drafter"}
    for format, said in {**kinds, "hf-bf16": "off"}.items():
        (choice,) = [c for c in engine_for(format).settings.choices if c.name == "speculate"]
        assert choice.value == said


def test_a_sequence_of_unknown_past_starts_cold(drafting: Engine) -> None:
    """Entries that nobody has written for it are not read: what lies there does not matter."""
    drafter, ids = drafter_of(drafting), text(90, 1)
    assert isinstance(drafter, DsparkDrafter)
    model, cache, found = drafting.model, cache_of(drafting), []
    for fill in (0, 99):
        slot, taps = claim(drafting, 100), list[Tensor]()
        step = Step.build([(slot, 0, ids)], "cpu")
        model.forward(step, cache, taps)
        for layer in cache.layers[3:]:
            layer.ring.data[slot * layer.ring_rows : (slot + 1) * layer.ring_rows] = fill
        kept = torch.cat(taps, 1)[80:]
        model.keep_taps(kept, Step.build([(slot, 80, ids[80:])], "cpu"), cache)
        drafter._states[slot] = State(-1, 90, oldest=80)
        found.append(drafter.look(slot, 89, kept[-1], 7, None)["draft_base"])
        del drafter._states[slot]
        release(drafting, slot)
    assert torch.equal(*found)


IDENTIFIERS = "q7x_lambda9, node_31fz, Zeta_key_08, tmp4_alpha, ref_9981b, un_iqv_2, hash_0c4d, row_idx_77"


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_identifiers_are_echoed_as_without_speculation(count: int) -> None:
    """Twelve at once, of several seeds and temperatures: no neighbour's token, none lost at a roll-back."""
    prompt = f"Repeat these eight identifiers: {IDENTIFIERS}. {IDENTIFIERS}. {IDENTIFIERS[:20]}"
    params = [
        SamplingParams(max_tokens=14, temperature=0.0 if n % 3 else 0.7, seed=n % 12, ignore_eos=True)
        for n in range(count)
    ]
    answers = []
    for speculate in ("off", "3"):
        config = EngineConfig(max_context=512, max_batch=12, speculate=speculate)
        engine = Engine.load(embedded(), config)
        different = params if speculate != "off" else params[:12]
        done = engine.generate([engine.request(prompt, each) for each in different])
        answers.append([each.ids for each in done])
    without, drafted = answers
    assert drafted == [without[n % 12] for n in range(count)]
    assert engine.counts.num_accepted > count / 2
