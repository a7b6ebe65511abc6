"""Plans and their runner on a device of dicts that runs late: order, steps ahead, slots reused in flight."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_device import PAGE, VOCAB, WINDOW, FakeDevice, choice
from loop import Loop, expected

from dsv4.cache.folder import PrefixFolder
from dsv4.cache.shelf import Shelf
from dsv4.engine.plan import Claim, Copy, Plan, Restore, Sampling, Save, Span
from dsv4.engine.request import Sequence
from dsv4.engine.runner import Runner, no_masks


def test_a_prompt_is_read_in_one_run_and_kept_at_its_last_page() -> None:
    """The state there is left beside the slots, and saved before the next step could leave another."""
    loop, stem = Loop(slots=3), [random.Random(9).randrange(VOCAB) for _ in range(19)]
    for _ in range(3):
        loop.add(stem, 3, 0.0, grammar=False)
        loop.add([*stem[:17], 3, 4], 3, 0.0, grammar=False)
        while loop.alive:
            loop.step()
    runs = [(span.start, span.end, span.mark) for plan in loop.plans for span in plan.prefill]
    # Of two in a step one has a mark; the other ends at the page's end, and goes on with what is left.
    assert runs[0] == (0, 19, 16) and (16, 19, 0) in runs[-2:]
    assert next(save.slot for plan in loop.plans for save in plan.saves) == 3
    assert all(s.num_cached == 16 for s in loop.done[2:])
    assert all([token.id for token in s.tokens] == expected(s) for s in loop.done)


def test_a_mark_needs_a_window_before_it() -> None:
    """A run that begins too near the page's end stops there instead."""
    loop = Loop(slots=1)
    loop.add([random.Random(8).randrange(VOCAB) for _ in range(19)], 1, 0.0, grammar=False)
    for limit in (14, None):
        loop.scheduler.chunk = limit or 20
        loop.step()
    assert [(span.start, span.end, span.mark) for plan in loop.plans for span in plan.prefill] == [
        (0, 14, 8),
        (14, 16, 0),
    ]


STEMS = [[random.Random(n).randrange(VOCAB) for _ in range(64)] for n in range(3)]


@pytest.mark.parametrize("seed", range(40))
def test_every_sequence_is_as_if_alone(seed: int) -> None:
    """Arrivals, cancels, pauses, evictions, shared prefixes, grammars, penalties and failures while steps run
    ahead."""
    chance = random.Random(seed)
    slots, pages, snapshots = chance.randint(1, 9), chance.choice([None, 26, 40]), chance.randint(0, 6)
    loop = Loop(slots=slots, pages=pages, snapshots=snapshots, same_bits=bool(seed % 2))
    live(loop, chance)
    assert len(loop.prefix._snapshots) <= snapshots


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 40))]
)
def test_every_sequence_is_as_if_alone_with_files(seed: int, tmp_path: Path) -> None:
    """The same, and several lives on one folder: pages come from files while others are copied and reused."""
    chance = random.Random(seed)
    copied = 0
    for _ in range(4):
        loop = Loop(
            slots=chance.randint(1, 6),
            pages=chance.choice([None, 26, 40]),
            snapshots=chance.randint(1, 6),
            same_bits=bool(seed % 2),
            folder=tmp_path,
            folder_bytes=chance.choice([1 << 20, 3000]),
        )
        live(loop, chance)
        assert loop.prefix.shelf is not None
        loop.device.finish()
        loop.prefix.shelf.flush()
        assert not [line for line in loop.said if "miss" in line or "written" in line], loop.said
        copied += sum(len(copy.pages) for plan in loop.plans for copy in plan.copies_in)
    assert copied > 0, "something came from files"


def live(loop: Loop, chance: random.Random) -> None:
    slots = loop.slots.num_free
    loop.device.fails = lambda what, spans: what == "prefill" and chance.random() < 0.03
    submitted, cancelled = [], set()
    for _ in range(120):
        if chance.random() < 0.3 and len(submitted) < 40:
            stem = chance.choice(STEMS)[: chance.choice([1, 7, 8, 9, 16, 30, 48])]
            ids = stem + [chance.randrange(VOCAB) for _ in range(chance.choice([0, 1, 5]))]
            temperature = chance.choice([0.0, 0.7])
            grammar, presence = chance.random() < 0.2, chance.choice([0.0, 0.5, 1.5])
            submitted.append(loop.add(ids, chance.choice([1, 2, 9, 100]), temperature, grammar, presence))
        if loop.alive and chance.random() < 0.05:
            s = chance.choice(list(loop.alive.values()))
            cancelled.add(s.number)
            loop.end(s, "cancelled")
        if loop.alive:
            loop.step(chance.choice([None, 1, 3, 8, 19]))
    while loop.alive:
        loop.step()
    for s in submitted:
        assert [token.id for token in s.tokens] == expected(s), (s.number, s.finish_reason)
        assert s.finish_reason in ("stop", "error") or s.number in cancelled
    assert loop.slots.pool.num_available == loop.slots.pool.num_pages and loop.slots.num_free == slots


def test_a_plan_is_carried_out_in_its_order(tmp_path: Path) -> None:
    device = FakeDevice(4)
    runner = Runner(device)  # type: ignore[arg-type]
    runner.apply(Plan(claims=(Claim(2, 5, (1,)),), prefill=(Span(5, 2, 0, (1, 2, 3)),)), no_masks)
    device.log.clear()
    shelf = runner.shelf = Shelf(
        PrefixFolder(tmp_path, 32 * "0", 1 << 20, print), PAGE, PAGE, lambda position: WINDOW, False
    )
    for number, kind in enumerate(("page", "snapshot")):
        assert shelf.expect(kind, [bytes(32)], [1]) == number  # type: ignore[arg-type]
    assert shelf.offer(torch.zeros(2, PAGE, dtype=torch.uint8)) == 2
    assert shelf.offer(torch.zeros(WINDOW, dtype=torch.uint8)) == 3
    plan = Plan(
        saves=(Save(9, 2, 3),),
        copies_out=(Copy(0, pages=(1,)), Copy(1, snapshot=9, position=3)),
        free=(2,),
        claims=(Claim(2, 6, (1, 3)), Claim(0, 7, (2,))),
        copies_in=(Copy(2, pages=(4, 5)), Copy(3, snapshot=8, position=8)),
        restores=(Restore(0, 9),),
        drops=(9,),
        prefill=(Span(7, 0, 3, (4,), Sampling(), ahead=True),),
        decode=(Span(6, 2, 0, (3,), Sampling()),),
    )
    runner.apply(plan, no_masks)
    assert [entry[0] for entry in device.log] == [
        *("save", "read pages", "read snapshot", "pages", "pages", "write pages", "write snapshot"),
        *("restore", "drop", "prefill", "decode", "decode", "fetch", "fetch"),
    ]
    assert device.log[11] == ("decode", ((7, 0, 4, (-1,)),)), "the next step of 7 is launched before a fetch"


def rows(loop: Loop) -> list[tuple[tuple[int, int], ...]]:
    """(sequence, start) of every decode pass launched since the log was cleared."""
    passes = [entry[1] for entry in loop.device.log if entry[0] == "decode"]
    loop.device.log.clear()
    return [tuple((row[0], row[2]) for row in one) for one in passes]  # type: ignore[attr-defined]


def never_seven(loop: Loop, length: int, max_tokens: int, count: int) -> list[Sequence]:
    """Sequences that do not stop by chance."""
    out, seed = [], 0
    while len(out) < count:
        ids = [random.Random(seed).randrange(VOCAB) for _ in range(length)]
        seed += 1
        tokens: list[int] = []
        for index in range(max_tokens):
            tokens.append(choice(ids + tokens, Sampling(index=index)))
        if 7 not in tokens:
            out.append(loop.add(ids, max_tokens, 0.0, False))
    return out


def test_a_row_launched_ahead_is_kept_whatever_becomes_of_the_others() -> None:
    loop = Loop(slots=4)
    a, b = never_seven(loop, 5, 12, 2)
    for _ in range(3):
        loop.step()
    rows(loop)
    loop.end(b, "cancelled")
    loop.step()
    assert rows(loop) == [((a.number, 8),)], "a's token was launched already; only the one after it is new"
    (c,) = never_seven(loop, 3, 4, 1)
    loop.step()  # c's prompt; the next step takes both
    assert rows(loop) == [((c.number, 3), (a.number, 9))]
    loop.step()
    assert rows(loop) == [((a.number, 10), (c.number, 4))]
    while loop.alive:
        loop.step()
    assert [t.id for t in a.tokens] == expected(a) and [t.id for t in c.tokens] == expected(c)


def test_a_sequence_that_comes_back_to_its_slot_runs_again() -> None:
    """ABA: paused with a step in flight and admitted again, at the same position with the same token."""
    device = FakeDevice(1)
    runner = Runner(device)  # type: ignore[arg-type]
    prompt = (1, 2, 3)
    first = Plan(claims=(Claim(0, 4, (0,)),), prefill=(Span(4, 0, 0, prompt, Sampling(), ahead=True),))
    (result,) = runner.apply(first, no_masks)
    assert result.token is not None
    again = Span(4, 0, 3, (result.token.id,), Sampling(index=1))
    device.log.clear()
    runner.apply(Plan(free=(0,), claims=(Claim(0, 4, (1,)),), decode=(again,)), no_masks)
    assert ("decode", ((4, 0, 3, again.ids),)) in device.log, "its entries went to a page that it has no more"
    # The same slot, position and token of another sequence.
    other = FakeDevice(1)
    runner = Runner(other)  # type: ignore[arg-type]
    (result,) = runner.apply(first, no_masks)
    other.log.clear()
    assert result.token is not None
    taken = Plan(free=(0,), claims=(Claim(0, 5, (0,)),), decode=(replace(again, sequence=5),))
    runner.apply(taken, no_masks)
    assert ("decode", ((5, 0, 3, (result.token.id,)),)) in other.log, "a row launched ahead has one owner"


def test_a_span_on_a_slot_of_somebody_else_is_our_bug() -> None:
    runner = Runner(FakeDevice(1))  # type: ignore[arg-type]
    runner.apply(Plan(claims=(Claim(0, 1, (0,)),)), no_masks)
    with pytest.raises(AssertionError):
        runner.apply(Plan(prefill=(Span(2, 0, 0, (1,)),)), no_masks)
    with pytest.raises(AssertionError):
        runner.apply(Plan(claims=(Claim(0, 2, (0,)),)), no_masks)


def test_a_failed_pass_ends_its_own_sequences() -> None:
    loop = Loop(slots=3)
    (a,) = never_seven(loop, 5, 12, 1)
    loop.step()
    loop.device.fails = lambda what, spans: what == "prefill"
    b = loop.add([1, 2, 3], 4, 0.0, False)
    loop.step()
    assert b.finish_reason == "error" and len(a.tokens) == 2
    loop.device.fails = lambda what, spans: False
    while loop.alive:
        loop.step()
    assert [t.id for t in a.tokens] == expected(a) and loop.slots.num_free == 3


def test_masks_are_asked_for_while_the_device_works() -> None:
    """A grammar's row is launched ahead without its choice; the mask is asked for when the token is known."""
    loop = Loop(slots=2)
    s = loop.add([4, 5], 3, 0.0, True)
    loop.step()
    loop.device.log.clear()
    loop.step()
    kinds = [entry[0] for entry in loop.device.log]
    assert kinds == ["sample", "decode", "fetch"]
    while loop.alive:
        loop.step()
    assert [t.id for t in s.tokens] == expected(s)


def test_rows_beyond_one_pass_run_in_parts() -> None:
    loop = Loop(slots=9)
    sequences = never_seven(loop, 2, 5, 9)
    for _ in range(3):
        loop.step()
    assert [len(part) for part in rows(loop)[-3:]] == [4, 4, 1]
    while loop.alive:
        loop.step()
    assert [[t.id for t in s.tokens] for s in sequences] == [expected(s) for s in sequences]


def test_what_a_claim_restores_is_not_evicted_by_the_next_claim(tmp_path: Path) -> None:
    """One plan saves a snapshot, restores it for a prompt, and evicts it for another, which is in files."""
    old, new = STEMS[0], STEMS[1]
    for _ in range(2):  # the second finds `new` in files
        loop = Loop(slots=4, snapshots=1, folder=tmp_path)
        first = never_seven(loop, 1, 1, 1)[0]
        loop.step()
        assert loop.prefix.shelf is not None and first.finish_reason == "stop"
        if list(tmp_path.rglob("*.snapshot")):
            break
        loop.add(new[:17], 1, 0.0, False)
        while loop.alive:
            loop.step()
        loop.runner.apply(loop.scheduler.changes(), no_masks)
        loop.device.finish()
        loop.prefix.shelf.flush()
    loop.add(old[:8], 1, 0.0, False)
    loop.step()  # its page's snapshot is to be saved in the next plan
    a, b = loop.add(old[:9], 2, 0.0, False), loop.add(new[:17], 2, 0.0, False)
    for _, found in list(loop.arrivals._reading.items()):
        assert found.result() is None or found.result().depth == 2
    while loop.alive:
        loop.step()
    assert (a.num_cached, b.num_cached) == (8, 16)
    assert [t.id for t in a.tokens] == expected(a) and [t.id for t in b.tokens] == expected(b)
