"""Who reads when, in plans alone: short prompts pass long ones, within bounds, and nothing locks up."""

import itertools
import random

import pytest

from dsv4.cache.layout import CacheLayout
from dsv4.cache.prefix import PrefixCache
from dsv4.cache.slots import Slots
from dsv4.config import preset
from dsv4.engine.pace import LEAST, Pace
from dsv4.engine.plan import Plan
from dsv4.engine.request import Request, SamplingParams, Sequence, Token
from dsv4.engine.scheduler import MAX_OVERTAKEN, MAX_PASSED, Scheduler
from dsv4.model.step import SIZES
from dsv4.quant.formats import Format

PAGE = 256


class Queue:
    """A scheduler whose every plan is taken for done."""

    def __init__(
        self,
        slots: int = 4,
        pages: int | None = None,
        chunk: int = 512,
        snapshots: int = 8,
        context: int = 40 * PAGE,
    ) -> None:
        layout = CacheLayout(
            config=preset("tiny"),
            kv_format=Format.KV8,
            key_format=Format.MXFP4,
            rope_itemsize=4,
            max_context=context,
            num_slots=slots,
            num_mtp_layers=0,
            max_snapshots=snapshots,
            max_pages=pages,
        )
        self.slots = Slots(layout)
        self.scheduler = Scheduler(self.slots, PrefixCache(self.slots, snapshots), chunk, same_bits=True)
        self.numbers = itertools.count()
        self.alive: dict[int, Sequence] = {}
        self.admitted: list[int] = []  # numbers, in order
        self.first_step: dict[int, int] = {}  # when a sequence's first token came
        self.num_steps = 0

    def add(self, prompt: int, max_tokens: int = 4) -> Sequence:
        number = next(self.numbers)
        ids = tuple((number * 7919 + at) % 4000 for at in range(prompt))
        request = Request(f"r{number}", ids, SamplingParams(max_tokens=max_tokens))
        s = Sequence(number, request, number, max_tokens, frozenset())
        self.alive[number] = s
        self.scheduler.add(s)
        return s

    def step(self, limit: int | None = None) -> Plan:
        plan = self.scheduler.plan(limit)
        assert plan.spans or not self.alive, "somebody waits and nobody runs"
        budget = self.scheduler.chunk if limit is None or not plan.decode else limit
        assert sum(len(span.ids) for span in plan.prefill) <= budget
        self.num_steps += 1
        new = {s.number for s in self.scheduler.running} - set(self.admitted)
        self.admitted += sorted(new, key=[s.number for s in self.scheduler.running].index)
        ended = []
        for span in plan.spans:
            s = self.alive[span.sequence]
            assert span.ids and span.start == s.num_processed
            if span.end == s.num_known:
                s.tokens.append(Token(1))
                self.first_step.setdefault(s.number, self.num_steps)
                if len(s.tokens) == s.max_tokens:
                    ended.append(s)
        self.scheduler.commit(plan)
        for s in ended:
            self.scheduler.finish(self.alive.pop(s.number))
        return plan


def test_a_short_prompt_passes_a_long_one() -> None:
    queue = Queue(context=1 << 17)
    long = queue.add(100_000)
    queue.step(limit=64)
    short = queue.add(20)
    queue.step(limit=64)
    assert queue.first_step[short.number] == 2, "read in the very next step"
    assert long.num_processed > 512, "and the long one has what was left of that step"
    # One after the other, each as long as a whole step may be: the long one still has its turns.
    read = long.num_processed
    for _ in range(10 * (MAX_PASSED + 1)):
        queue.add(64, max_tokens=1)
        queue.step(limit=64)
    assert long.num_processed - read >= 10 * 32, "turns of 64, or less before a page's end"


def test_whoever_reads_alone_reads_whole_chunks() -> None:
    queue = Queue(chunk=2048)
    queue.add(6000)
    queue.add(9000)
    assert sum(len(span.ids) for span in queue.step(limit=64).prefill) > 1024, "nobody is about to answer"
    queue.add(30, max_tokens=3)
    for _ in range(3):
        assert sum(len(span.ids) for span in queue.step(limit=64).prefill) <= 64
    assert sum(len(span.ids) for span in queue.step(limit=64).prefill) > 1024


@pytest.mark.parametrize("seed", range(12))
def test_no_prompt_is_passed_for_ever(seed: int) -> None:
    """Any arrivals, cancels, limits and page counts: each of the two rules keeps its bound, and all end.

    The oldest that is read goes first in one of MAX_PASSED + 1 steps, so it is read to its end in a number of
    steps that depends on its length alone; and the first that waits is overtaken MAX_OVERTAKEN times at most.
    """
    chance = random.Random(seed)
    least = chance.choice([16, 100, 300])
    queue = Queue(slots=chance.randint(1, 6), pages=chance.choice([None, 40, 60]), chunk=512)
    began: dict[int, tuple[int, int]] = {}  # of a reader, since it is the oldest: step, tokens left
    heads: dict[int, int] = {}  # of those that waited in front: how many were admitted before them
    for _ in range(700):
        if chance.random() < 0.4 and len(queue.alive) < 30:
            queue.add(chance.choice([5, 60, 300, 460, 2000, 9000]), chance.choice([1, 5, 40, 250]))
        if queue.alive and chance.random() < 0.02:
            queue.scheduler.finish(queue.alive.pop(chance.choice(list(queue.alive))))
        if not queue.alive:
            continue
        pauses, before = queue.scheduler.num_pauses, len(queue.admitted)
        head = queue.scheduler.waiting[0] if queue.scheduler.waiting else None
        queue.step(chance.choice([least, least, 2 * least, None]))
        if head is not None and head.num_cached is None:
            heads[head.number] = heads.get(head.number, 0) + len(queue.admitted) - before
            assert heads[head.number] <= MAX_OVERTAKEN, head
        readers = [s for s in queue.scheduler.running if s.num_processed < s.num_prompt]
        if queue.scheduler.num_pauses != pauses:
            began.clear()
        if readers:
            s = min(readers, key=lambda s: s.number)
            step, left = began.setdefault(s.number, (queue.num_steps, s.num_prompt - s.num_processed))
            # A turn ends at a page's end: two of them are worth a whole one.
            turns = 2 * -(-left // min(least, PAGE)) + 2
            assert queue.num_steps - step <= turns * (MAX_PASSED + 1), (s.number, left)
            began = {s.number: began[s.number]}
    while queue.alive:
        queue.step(least)
    assert queue.slots.pool.num_available == queue.slots.pool.num_pages


def test_half_read_prompts_do_not_wait_for_each_others_pages() -> None:
    """Three prompts that fill the cache between them, read in turns, and a fourth that waits for pages."""
    queue = Queue(slots=6, pages=3 * 40)
    long = [queue.add(10_000, max_tokens=100) for _ in range(4)]
    queue.step(limit=300)
    assert [s.slot is not None for s in long] == [True, True, True, False]
    for _ in range(200):
        queue.add(chance := 30 + queue.num_steps % 50, max_tokens=2)
        queue.step(limit=100 + chance)
    while queue.alive:
        queue.step(limit=300)
    assert queue.slots.pool.num_available == queue.slots.pool.num_pages


def test_small_chunks_make_no_more_snapshots() -> None:
    """A long prompt beside others keeps as many places to resume from as alone, its last page among them."""
    found = []
    for limit in (None, 256, 64):
        queue = Queue(chunk=2048, snapshots=64)
        beside = queue.add(10, max_tokens=1000)
        queue.step()
        s = queue.add(9000, max_tokens=1)
        while s.number in queue.alive:
            queue.step(limit)
        prefix = queue.scheduler.prefix
        again = prefix.claim(99, "", s.request.ids, 9001)
        assert again is not None and again.position == 9000 // PAGE * PAGE
        found.append(prefix.num_snapshots)
        queue.scheduler.finish(beside)
    assert found == [5, 5, 5]


def settled(pace: Pace, steps: int = 30, context: float = 0.0) -> int:
    """A GPU's chunk: 20 ms to read the weights, 50 us a token; beside generated tokens of 10 ms."""
    for _ in range(steps):
        pace.note(0, 7, 0.010)
        tokens = pace.limit
        pace.note(tokens, 7, 0.010 + 0.020 + 50e-6 * (1 + context) * tokens)
    return pace.limit


def test_pace_finds_the_largest_chunk_of_the_budget() -> None:
    pace = Pace(0.100, chunk=4096)
    assert pace.limit == LEAST, "nothing is known yet"
    limits = []
    for _ in range(8):
        settled(pace, steps=1)
        limits.append(pace.limit)
    best = int((0.100 - 0.010 - 0.020) / 50e-6)
    assert all(limit <= 1.02 * best for limit in limits), limits
    assert 0.9 * best <= settled(pace) <= 1.02 * best
    # A long context makes a token three times as dear, and then it is over.
    assert settled(pace, context=2.0) <= 1.05 * best / 3
    assert settled(pace) >= 0.9 * best


# What a step of V4-Flash's sizes took, ms by tokens (an H200, 16 November 2026; those between are on a line).
STEPS_MS = {16: 30.0, 64: 44.0, 256: 64.0, 1024: 125.0, 4096: 320.0}


def step_ms(tokens: int) -> float:
    size = next((size for size in SIZES if size >= tokens), tokens)
    for (few, less), (many, more) in itertools.pairwise(STEPS_MS.items()):
        if size <= many:
            return less + (more - less) * (size - few) / (many - few)
    raise AssertionError(size)


def test_pace_of_recorded_steps_never_pads_in_vain() -> None:
    """Beside seven streams, prompts of 4,000 tokens: a chunk that is padded beyond the budget is not tried
    again and again, and one that is not full is never taken where a full one takes as long."""
    chance, pace = random.Random(0), Pace(0.100, chunk=4096, sizes=SIZES)
    steps: list[tuple[int, float]] = []
    for number in range(12):
        left = 4000
        while left:
            pace.note(0, 7, 0.0126)
            tokens = min(left, pace.limit)
            left -= tokens
            ms = (12.6 + step_ms(tokens)) * chance.uniform(0.99, 1.02)
            pace.note(tokens, 7, ms / 1000)
            steps += [(tokens, ms)] if number > 1 else []
    assert max(ms for _, ms in steps) <= 110
    assert sum(tokens for tokens, _ in steps) / sum(ms for _, ms in steps) >= 5.0, "tokens per ms"
    assert {tokens for tokens, _ in steps if tokens not in SIZES} <= {4000 % size for size in SIZES}
    # A long context makes a token dearer, and then it is over.
    limits = [pace.limit]
    for share in [3.0] * 20 + [1.0] * 40:
        pace.note(0, 7, 0.0126)
        pace.note(pace.limit, 7, (12.6 + share * step_ms(pace.limit)) / 1000)
        limits.append(pace.limit)
    assert limits[20] <= 32 and limits[-1] == limits[0], limits
    pace.note(640, 7, 30.0)  # a pause of the machine
    for _ in range(60):
        pace.note(pace.limit, 7, (12.6 + step_ms(pace.limit)) / 1000)
    assert pace.limit == limits[0]


@pytest.mark.parametrize("tokens", [1, 16, 300, 1024, 4096])
@pytest.mark.parametrize("warm", [0, 20])
def test_pace_forgets_what_was_no_pace(tokens: int, warm: int) -> None:
    """A compile, a swapped page, a debugger: at any size, first of all or amid others."""
    pace = Pace(0.100, chunk=4096)
    settled(pace, steps=warm)
    pace.note(tokens, 0, 30.0)
    pace.note(0, 1, 30.0)
    best = int((0.100 - 0.010 - 0.020) / 50e-6)
    assert 0.85 * best <= settled(pace, steps=60) <= 1.05 * best


def test_pace_of_a_slow_machine_still_moves() -> None:
    pace = Pace(0.001, chunk=512)
    for _ in range(5):
        pace.note(16, 1, 3.0)
    assert pace.limit == LEAST
    for _ in range(20):
        pace.note(0, 7, 0.5)
        pace.note(pace.limit, 7, 0.5 + 0.01 * pace.limit)
    assert 45 <= pace.limit <= 52, "as much time for the prompt as for those who generate"
    assert Pace(0.001, chunk=4).limit == 4, "a chunk is never more than was asked for"
