"""How many drafts to verify: from how likely each is to survive, and from how long steps take. Pure.

What is chosen here costs or saves time; tokens are the same whatever it is.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEAST, MOST = 0.01, 0.99
# Weight of one observation in a running mean, of acceptances and of times.
_WEIGHT, _TIME_WEIGHT = 1 / 16, 1 / 8
# What one measurement may count, as a multiple of the mean: a pause of the machine is no pace.
_TRUST = 2.0


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-max(-60.0, min(60.0, x))))


def survival(rates: Sequence[float]) -> list[float]:
    """Chance that draft j is accepted and all before it: from the chance of each, given those before it."""
    found, s = [], 1.0
    for rate in rates:
        s *= min(MOST, max(LEAST, rate)) if math.isfinite(rate) else LEAST
        found.append(s)
    return found


def admit(
    survivals: Sequence[Sequence[float]],
    step: Callable[[int], float],
    draft: Callable[[Sequence[int]], float],
) -> list[int]:
    """Choose how many drafts of each sequence a step should verify, to give most tokens per second.

    `survivals` falls along each sequence. `step(n)`: seconds of a step of n rows; `draft(lengths)`: of
    drafting that many tokens for each sequence. All totals are tried, since times are jagged.
    """
    count = len(survivals)
    lengths = [0] * count
    best, rate = list(lengths), count / step(count) if count else 0.0
    order = sorted((-s, j, q) for q, each in enumerate(survivals) for j, s in enumerate(each))
    gained = float(count)
    for rows, (lost, _, q) in enumerate(order, count + 1):
        lengths[q] += 1
        gained -= lost
        if (now := gained / (draft(lengths) + step(rows))) > rate:
            best, rate = list(lengths), now
    return best


class Acceptance:
    """Running share of drafts that were accepted at each position, of those whose predecessors were; and of
    what the drafter had said of them, to correct what it says next."""

    def __init__(self, most: int, like: "Acceptance | None" = None) -> None:
        self.rates: list[float] = list(like.rates) if like else [0.7] * most
        self._said: list[float] = list(like._said) if like else [0.7] * most

    def note(self, verified: int, accepted: int, confidence: Sequence[float] = ()) -> None:
        """So many drafts were verified and accepted; `confidence`: the drafter's logits of them."""
        for j in range(min(verified, accepted + 1, len(self.rates))):
            self.rates[j] += _WEIGHT * ((j < accepted) - self.rates[j])
            if j < len(confidence):
                self._said[j] += _WEIGHT * (sigmoid(confidence[j]) - self._said[j])

    def expected(self) -> list[float]:
        """Survival of drafts not yet made."""
        return survival(self.rates)

    def judged(self, confidence: Sequence[float]) -> list[float]:
        """Survival of drafts that the drafter itself judges."""
        known = zip(confidence, self.rates, self._said, strict=False)
        return survival([sigmoid(sure) * rate / max(LEAST, said) for sure, rate, said in known])


class Times:
    """Measured seconds by a number of rows. Between two that were measured, a line; beyond the largest, its
    own: what looks too good is tried, and then known. The first measurement of each is not counted."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._rows: list[int] = []
        self._seen: set[int] = set()

    def note(self, rows: int, seconds: float) -> None:
        if rows not in self._seen:
            self._seen.add(rows)
            return
        mean = self._means.get(rows)
        if mean is None:
            self._means[rows] = seconds
            self._rows = sorted(self._means)
        else:
            self._means[rows] = mean + _TIME_WEIGHT * (min(seconds, _TRUST * mean) - mean)

    @property
    def is_known(self) -> bool:
        return bool(self._rows)

    def __call__(self, rows: int) -> float:
        """Seconds of so many rows, never falling."""
        known = self._rows
        place = bisect_left(known, rows)
        below = max((self._means[r] for r in known[:place]), default=0.0)
        if place == len(known):
            return below
        at = self._means[known[place]]
        if known[place] == rows or not place:
            return max(below, at)
        low = known[place - 1]
        return max(below, self._means[low] + (at - self._means[low]) * (rows - low) / (known[place] - low))


@dataclass(frozen=True)
class Counts:
    """What was drafted and what came of it; by position, drafts count whose predecessors were accepted."""

    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    num_drafted: int = 0  # tokens that were proposed and verified
    num_accepted: int = 0  # and were right
    steps: int = 0  # rows of sequences that generated
    tokens: int = 0  # and what they gave
    draft_seconds: float = 0.0
    step_seconds: float = 0.0  # of all steps, without drafts

    def since(self, before: "Counts") -> "Counts":
        def less(ours: tuple[int, ...], theirs: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(a - b for a, b in zip(ours, theirs or (0,) * len(ours), strict=True))

        numbers = ("num_drafted", "num_accepted", "steps", "tokens", "draft_seconds", "step_seconds")
        return Counts(
            less(self.drafted, before.drafted),
            less(self.accepted, before.accepted),
            **{name: getattr(self, name) - getattr(before, name) for name in numbers},
        )

    @property
    def rates(self) -> list[float]:
        """Share accepted, position by position as far as any was tried."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True) if d]

    def __bool__(self) -> bool:
        return self.num_drafted > 0

    def __str__(self) -> str:
        """`12 of 20 drafts accepted (70 %, 45 % by position), 1.8 tokens per step`; empty without drafts."""
        if not self.num_drafted or not self.steps:
            return ""
        rates = ", ".join(f"{100 * rate:.0f} %" for rate in self.rates)
        gain = f"{self.tokens / self.steps:.1f} tokens per step"
        return f"{self.num_accepted} of {self.num_drafted} drafts accepted ({rates} by position), {gain}"
