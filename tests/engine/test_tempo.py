"""The choice between rounds of speculation and plain steps, by what they gave."""

import random
from itertools import pairwise

import pytest

from dsv4.engine.tempo import FIRST, PERIOD, Tempo

# Milliseconds on an H200 (bench/rounds.py): a plain step, rounds with 3 and with 5 drafts.
TIMES = {0: 4.0, 3: 8.2, 5: 9.8}


def run(chances: list[float], rounds: int, seed: int = 0) -> tuple[float, list[int]]:
    """Tokens per millisecond where drafts are accepted by these chances, and the drafts of each round."""
    chance, tempo = random.Random(seed), Tempo([(1, 0), (1, 3), (1, 5)])
    tokens, time, chosen = 0, 0.0, [-1]
    for _ in range(rounds):
        drafts = tempo.choose(1)
        has_drafts = chosen[-1] > 0
        accepted = 0
        while has_drafts and accepted < drafts and chance.random() < chances[accepted]:
            accepted += 1
        took = TIMES[drafts] if has_drafts or not drafts else 6.2
        tokens, time = tokens + accepted + 1, time + took
        if drafts == chosen[-1]:
            tempo.note((1, drafts), accepted + 1, took)
        chosen.append(drafts)
    return tokens / time, chosen[1:]


@pytest.mark.parametrize(
    ("chances", "best"), [([0.0] * 5, 0), ([0.3] * 5, 0), ([0.95] * 5, 5), ([0.95] * 3 + [0.0, 0.0], 3)]
)
def test_the_fastest_kind_is_found(chances: list[float], best: int) -> None:
    rate, chosen = run(chances, 4000)
    assert chosen.count(best) > 0.95 * len(chosen)
    expected, survival = 1.0, 1.0
    for at in range(best):
        survival *= chances[at]
        expected += survival
    assert rate > 0.97 * expected / TIMES[best]
    assert set(chosen[: 3 * FIRST]) == {0, 3, 5}, "each is tried at the start"


def test_a_text_that_changes_is_noticed() -> None:
    chance, tempo, late = random.Random(1), Tempo([(1, 0), (1, 5)]), []
    before = -1
    for at in range(6 * PERIOD):
        drafts = tempo.choose(1)
        right = 0.95 if at > 2 * PERIOD else 0.0
        tokens = 1 + (drafts == before and sum(chance.random() < right for _ in range(drafts)))
        if drafts == before:
            tempo.note((1, drafts), tokens, TIMES[drafts])
        before = drafts
        late.append(drafts)
    assert late[PERIOD : 2 * PERIOD].count(0) > 0.9 * PERIOD and late[-PERIOD:].count(5) > 0.9 * PERIOD
    trials = [second for first, second in pairwise(late[:PERIOD]) if first != second]
    assert len(trials) <= 4


def test_one_kind_is_always_chosen() -> None:
    tempo = Tempo([(8, 0)])
    assert {tempo.choose(8) for _ in range(3 * PERIOD)} == {0}
