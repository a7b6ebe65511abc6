"""How large a chunk beside others is, from times that were recorded or made up: no clock, no waiting."""

import itertools
import random
from dataclasses import dataclass

import pytest
from queueing import Queue

from dsv4.engine.pace import LEAST, PROBE, Pace
from dsv4.model.step import SIZES


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


@pytest.mark.parametrize("ceases", [True, False])
def test_pace_of_recorded_steps_never_pads_in_vain(ceases: bool) -> None:
    """Beside seven streams, prompts of 4,000 tokens: a chunk that is padded beyond the budget is not tried
    again and again, and one that is not full is never taken where a full one takes as long."""
    chance, pace = random.Random(0), Pace(0.100, chunk=4096, sizes=SIZES)
    steps: list[tuple[int, float]] = []
    for number in range(12):
        left = 4000
        while left:
            if ceases or not pace.limit:
                pace.note(0, 7, 0.0126)
                steps += [] if ceases else [(0, 12.6)]
            tokens = min(left, pace.limit)
            left -= tokens
            ms = (12.6 + step_ms(tokens)) * chance.uniform(0.99, 1.02)
            pace.note(tokens, 7, ms / 1000)
            steps += [(tokens, ms)] if number > 1 else []
    assert max(ms for _, ms in steps) <= 110
    assert sum(tokens for tokens, _ in steps) / sum(ms for _, ms in steps) >= 5.0, "tokens per ms"
    assert {tokens for tokens, _ in steps if tokens not in (0, *SIZES)} <= {4000 % size for size in SIZES}
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
    assert pace.limit == 2 * LEAST, "twice what it must, since the budget is lost in any case"
    for _ in range(60):
        pace.note(0, 7, 0.5)
        pace.note(pace.limit, 7, 0.5 + 0.01 * pace.limit)
    assert 75 <= pace.limit <= 90, "0.82 s: a step may take twice as long as the 0.66 s that it must"
    assert Pace(0.001, chunk=4).limit == 4, "a chunk is never more than was asked for"


@dataclass(frozen=True)
class Machine:
    """Seconds: of a decode step, and for each of its rows; of a chunk, and for each of its tokens."""

    decode: float
    row: float
    chunk: float
    token: float

    def step(self, tokens: int, rows: int) -> float:
        decode = self.decode + self.row * rows if rows else 0.0
        return decode + (self.chunk + self.token * tokens if tokens else 0.0)


# The embedded model on a core of a busy CPU; one whose decode step alone takes the budget; and a GPU.
BUSY, SLOW = Machine(0.020, 0.008, 0.035, 0.0023), Machine(0.120, 0.0, 0.010, 0.001)
GPU = Machine(0.010, 0.0003, 0.020, 50e-6)


@pytest.mark.parametrize("rows", [2, 3, 7, 16])
@pytest.mark.parametrize("machine", [BUSY, SLOW, GPU])
def test_prompts_that_never_cease_are_not_starved(machine: Machine, rows: int) -> None:
    """No step shows what generated tokens alone take, unless the pace asks for one; few at first."""
    pace, chance = Pace(0.100, chunk=4096), random.Random(rows)
    times: list[tuple[int, float]] = []
    for number in range(400):
        beside, tokens = rows if number > 20 else 1, pace.limit
        seconds = machine.step(tokens, beside) * chance.uniform(1.0, 1.1)
        pace.note(tokens, beside, seconds)
        times += [(tokens, seconds)] if number > 100 else []
    speed = sum(tokens for tokens, _ in times) / sum(seconds for _, seconds in times)
    least, decode = machine.step(LEAST, rows), machine.step(0, rows)
    if least <= 0.100:  # the budget can be met, unless prompts are to get as much time as all others
        assert max(seconds for _, seconds in times) <= 1.1 * 1.1 * max(0.100, 2 * decode)
        fitting = (0.100 - decode - machine.chunk) / machine.token
        assert speed >= 0.8 * min(fitting / 0.100, 4096 / machine.step(4096, rows))
    else:
        # A chunk is taken for a quarter of its step at least.
        must = decode + max(least - decode, least / 4)
        assert max(seconds for _, seconds in times) <= 1.1 * 1.1 * 2 * must, "twice what it must"
        assert speed >= 0.45 / machine.token, "nearly half of what a prompt alone would have"
    zeros = sum(not tokens for tokens, _ in times)
    assert 300 / PROBE - 2 <= zeros <= 300 / PROBE + 2, "seldom without a prompt"


def test_a_pace_that_was_over_its_budget_comes_back() -> None:
    """A machine that others use, and then no more: the least chunk is tried again and again."""
    pace = Pace(0.100, chunk=512)
    for machine, most in ((BUSY, 0.400), (GPU, 0.110), (BUSY, 0.400), (GPU, 0.110)):
        for number in range(200):
            seconds = machine.step(pace.limit, 8)
            pace.note(pace.limit, 8, seconds)
            assert number < 100 or seconds <= most, (machine, number)


@pytest.mark.parametrize("seed", range(2))
def test_many_clients_of_a_slow_machine(seed: int) -> None:
    """64 clients, each with its next request as soon as it has its answer, 16 slots. A third of the prompts
    are of two or three pages. With chunks of 16 tokens for ever, some waited for all of these 200 s."""
    chance, queue, pace = random.Random(seed), Queue(slots=16, pages=64), Pace(0.100, chunk=512)
    now, born, first = 0.0, {}, {}
    while now < 200:
        while len(queue.alive) < 56:
            length = int(1.4 * 2 ** chance.uniform(1, 8)) + 450 * (chance.random() < 1 / 3)
            born[queue.add(length, chance.randint(1, 48)).number] = now
        plan = queue.step(pace.limit)
        tokens = sum(len(span.ids) for span in plan.prefill)
        seconds = BUSY.step(tokens, len(plan.decode)) * chance.uniform(1.0, 1.3)
        pace.note(tokens, len(plan.decode), seconds)
        now += seconds
        first |= {number: now - born[number] for number in queue.first_step.keys() - first.keys()}
    waits = sorted(first.values())
    assert waits[int(0.99 * len(waits))] < 95 and waits[len(waits) // 2] < 45
    assert max(now - born[number] for number in queue.alive.keys() - first.keys()) < 95
    assert len(waits) > 190
