"""How many drafts pay: the worked example, batches against every other choice, measured times."""

import itertools
import random

import pytest

from dsv4.engine.plan import Plan, Span
from dsv4.engine.request import Token
from dsv4.engine.runner import Result
from dsv4.engine.speculation import PROBE, PROBED, Speculation
from dsv4.engine.survival import Acceptance, Times, admit, survival

DRAFT, STEPS = 0.9, {1: 4.29, 2: 6.25, 3: 7.25, 4: 8.25, 5: 9.3, 6: 10.4}


def drafting(lengths: object) -> float:
    return DRAFT


@pytest.mark.parametrize(
    ("rate", "length", "tokens"), [(0.85, 5, 0.3675), (0.6, 2, 0.2405), (0.5, 0, 0.2331)]
)
def test_worked_example(rate: float, length: int, tokens: float) -> None:
    """Milliseconds; at 0.6 one draft alone gives less than none, so all lengths must be looked at."""
    s = survival([rate] * 5)
    assert admit([s], STEPS.__getitem__, drafting) == [length]
    time = STEPS[1 + length] + (DRAFT if length else 0)
    assert (1 + sum(s[:length])) / time == pytest.approx(tokens, abs=5e-5)
    assert (1 + 0.6) / (DRAFT + STEPS[2]) == pytest.approx(0.2238, abs=5e-5)


def test_a_batch_has_the_best_of_all_lengths() -> None:
    chance = random.Random(3)
    for _ in range(40):
        survivals = [survival([chance.uniform(0.2, 0.99) for _ in range(3)]) for _ in range(3)]
        seconds = {n: 4 + 0.9 * n + chance.uniform(0, 2) for n in range(1, 13)}
        found = admit(survivals, seconds.__getitem__, drafting)

        def rate(
            lengths: tuple[int, ...], s: list[list[float]] = survivals, t: dict[int, float] = seconds
        ) -> float:
            drafts = DRAFT if sum(lengths) else 0
            return (3 + sum(sum(each[:k]) for each, k in zip(s, lengths, strict=True))) / (
                t[3 + sum(lengths)] + drafts
            )

        best = max(rate(lengths) for lengths in itertools.product(range(4), repeat=3))
        assert rate(tuple(found)) == pytest.approx(best)


def test_survival_is_clamped() -> None:
    assert survival([2.0, -1.0, float("nan"), float("inf")]) == pytest.approx([0.99, 0.0099, 99e-6, 99e-8])
    assert admit([], STEPS.__getitem__, drafting) == []


def test_acceptance_runs_by_position() -> None:
    """A position that was not tried keeps its value; what the drafter says is corrected by what happened."""
    known = Acceptance(3)
    for _ in range(200):
        known.note(verified=2, accepted=1, confidence=(0.0, 0.0))
    assert known.rates == pytest.approx([1.0, 0.0, 0.7], abs=1e-4)
    assert known.judged((0.0,)) == [0.99]
    assert Acceptance(3, known).rates == known.rates


def test_times_between_and_beyond() -> None:
    times = Times()
    assert not times.is_known
    for rows, seconds in ((1, 9.0), (1, 2.0), (5, 50.0), (5, 4.0), (3, 1.0), (3, 1.0)):
        times.note(rows, seconds)
    # The first of each is not counted; a time below that of fewer rows counts as theirs.
    assert [times(n) for n in (1, 2, 3, 4, 5, 9)] == [2.0, 2.0, 2.0, 2.5, 4.0, 4.0]
    for _ in range(100):
        times.note(5, 100.0)
    assert times(5) > 50
    times.note(5, 1e9)
    assert times(5) < 200


class Machine:
    """Steps of given times over one sequence whose drafts are accepted at a given rate."""

    def __init__(self, rate: float, steps: dict[int, float], has_blocks: bool, seed: int = 0) -> None:
        self.most, self.seconds = 5 if has_blocks else 3, 0.0
        self.speculation = Speculation(self, None, has_blocks)
        self.rate, self.steps, self.chance = rate, steps, random.Random(seed)
        self.proposed, self.lengths, self.proposals = 0, list[int](), list[int]()

    def run(self, count: int) -> None:
        for _ in range(count):
            wish = self.speculation.wishes([7])[7]
            verified = min(wish.verify, self.proposed)
            accepted = next((n for n in range(verified) if self.chance.random() > self.rate), verified)
            self.lengths.append(verified)
            self.proposals.append(wish.propose)
            self.proposed = wish.propose
            sure = (1.0,) * self.proposed if self.speculation.has_blocks else ()
            result = Result(7, Token(1), (Token(1),) * accepted, verified, self.proposed, sure)
            plan = Plan(decode=(Span(7, 0, 0, (1,), num_drafts=wish.verify, proposes=wish.propose),))
            made = DRAFT * (1 if self.speculation.has_blocks else self.proposed) if self.proposed else 0.0
            self.seconds += made
            self.speculation.note(plan, [result], self.steps[1 + verified] + made)


@pytest.mark.parametrize("has_blocks", [True, False])
def test_auto_finds_what_pays(has_blocks: bool) -> None:
    good, bad = (Machine(rate, STEPS, has_blocks) for rate in (0.9, 0.2))
    good.run(600)
    bad.run(600)
    most = 5 if has_blocks else 3
    assert sum(n >= most - 1 for n in good.lengths[200:]) > 300, good.lengths
    assert sum(n == 0 for n in good.lengths[200:]) >= 400 // PROBE  # so that a step without is known
    late = bad.lengths[300:]
    assert max(late) <= PROBED and 2 <= sum(map(bool, late)) <= 300 // PROBE + 1, late
    assert sum(map(bool, bad.proposals[300:])) <= 300 // PROBE + 1


def test_nothing_is_drafted_where_rows_cost_what_tokens_do() -> None:
    busy = Machine(0.95, {n: 4.0 * n for n in range(1, 7)}, has_blocks=True)
    busy.run(400)
    assert sum(map(bool, busy.lengths[100:])) <= 300 // PROBE + 1


def test_what_changed_is_found_out() -> None:
    """A text that becomes easy is drafted for again, after a probe."""
    machine = Machine(0.05, STEPS, has_blocks=False)
    machine.run(300)
    machine.rate = 0.97
    machine.run(3000)
    assert sum(n == 3 for n in machine.lengths[-300:]) > 200
