"""Decides for each sequence how many drafts the next step verifies, and how many are made after it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dsv4.engine.plan import Plan
from dsv4.engine.runner import Result
from dsv4.engine.survival import Acceptance, Counts, Times, admit

# Steps after which a sequence that is not drafted for is drafted for once, and one that is goes without.
PROBE = 64
# Drafts of such a probe that are verified: more would cost more than they tell.
PROBED = 2


@dataclass
class _Drafts:
    """What is known of one sequence."""

    acceptance: Acceptance
    waiting: int = 0  # proposals that the executor holds
    confidence: tuple[float, ...] = ()  # of these, as logits; MTP has none
    idle: int = 0  # steps since a draft was made
    is_probed: bool = False


@dataclass(frozen=True)
class Wish:
    verify: int
    propose: int


NO_WISH = Wish(0, 0)


class Drafting(Protocol):
    """What makes drafts (draft.py)."""

    most: int  # of a step
    seconds: float  # spent on them so far


@dataclass
class Ahead:
    """A device that drafts and verifies by itself, in steps launched ahead (rounds.py)."""

    most: int
    seconds: float = 0.0


class Speculation:
    """`forced`: drafts of every step; None: as many as pay, by acceptance and times.

    `has_blocks`: drafts of a step are made all at once (DSpark), else one after another (MTP).
    """

    def __init__(self, drafter: Drafting, forced: int | None, has_blocks: bool) -> None:
        self._drafter, self.most, self.forced, self.has_blocks = drafter, drafter.most, forced, has_blocks
        most = self.most
        self.num_drafted = self.num_accepted = 0
        self.drafted, self.accepted = [0] * most, [0] * most  # by position, of all sequences
        self.steps = self.tokens = 0  # generated tokens, and rows of sequences that gave them
        self.draft_seconds = self.step_seconds = 0.0
        self._all = Acceptance(most)
        self._known: dict[int, _Drafts] = {}
        self._step, self._draft = Times(), Times()
        self._since_plain = 0

    @property
    def counts(self) -> Counts:
        """So far."""
        return Counts(
            drafted=tuple(self.drafted),
            accepted=tuple(self.accepted),
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            steps=self.steps,
            tokens=self.tokens,
            draft_seconds=self.draft_seconds,
            step_seconds=self.step_seconds,
        )

    def wishes(self, decoding: Sequence[int], prompts: Sequence[int] = ()) -> dict[int, Wish]:
        """By sequence: those that generate, and those whose prompt ends in this step."""
        if self.forced is not None:
            return {n: Wish(self.forced, self.forced) for n in (*decoding, *prompts)}
        numbers = [*decoding, *prompts]
        if not numbers:
            return {}
        if not self._step.is_known:
            return {number: Wish(0, 0) for number in numbers}
        known = [self._of(number) for number in numbers]
        planned = admit([d.acceptance.expected() for d in known], self._step, self._draft_seconds)
        found: dict[int, Wish] = {}
        verified = self._verified([self._of(number) for number in decoding])
        for number, drafts, length in zip(numbers, known, planned, strict=True):
            drafts.idle = 0 if length else drafts.idle + 1
            propose = (self.most if self.has_blocks else length) if length else 0
            verify = verified.pop(0) if number in decoding else 0
            if drafts.is_probed:
                verify = max(verify, min(PROBED, drafts.waiting))
            drafts.is_probed = drafts.idle >= PROBE
            if drafts.is_probed:
                drafts.idle, propose = 0, self.most if self.has_blocks else min(PROBED, self.most)
            found[number] = Wish(verify, propose)
        return found

    def _verified(self, decoding: list[_Drafts]) -> list[int]:
        if not any(drafts.waiting for drafts in decoding):
            return [0] * len(decoding)
        self._since_plain += 1
        if self._since_plain >= PROBE:  # what a step without drafts takes is to be known
            self._since_plain = 0
            return [0] * len(decoding)
        survivals = [
            (d.acceptance.judged(d.confidence) if d.confidence else d.acceptance.expected())[: d.waiting]
            for d in decoding
        ]
        return admit(survivals, self._step, self._draft_seconds)

    def _draft_seconds(self, lengths: Sequence[int]) -> float:
        rows = sum(1 for length in lengths if length)
        if not rows or not self._draft.is_known:
            return 0.0
        return self._draft(rows) * (1 if self.has_blocks else max(lengths))

    def _of(self, number: int) -> _Drafts:
        if number not in self._known:
            self._known[number] = _Drafts(Acceptance(self.most, self._all))
        return self._known[number]

    def note(self, plan: Plan, results: Sequence[Result], seconds: float) -> None:
        """Take what a step has given, and how long it took with the drafts that were made after it."""
        self._time(plan, results, seconds)
        decoding = {span.sequence for span in plan.decode}
        for result in results:
            drafts, accepted = self._of(result.sequence), len(result.more)
            self.num_drafted += result.num_drafted
            self.num_accepted += accepted
            if result.sequence in decoding:
                self.steps += 1
                self.tokens += 1 + accepted
                for j in range(min(result.num_drafted, accepted + 1, self.most)):
                    self.drafted[j] += 1
                    self.accepted[j] += j < accepted
                for acceptance in (drafts.acceptance, self._all):
                    acceptance.note(result.num_drafted, accepted, drafts.confidence)
            drafts.waiting, drafts.confidence = result.num_proposed, result.confidence

    def _time(self, plan: Plan, results: Sequence[Result], seconds: float) -> None:
        draft_seconds = self._drafter.seconds - self.draft_seconds
        self.step_seconds += seconds - draft_seconds
        self.draft_seconds += draft_seconds
        proposed = [result.num_proposed for result in results if result.num_proposed]
        if proposed and draft_seconds:
            self._draft.note(len(proposed), draft_seconds / (1 if self.has_blocks else max(proposed)))
        if plan.decode and not plan.prefill:
            rows = len(plan.decode) + sum(result.num_drafted for result in results)
            self._step.note(rows, seconds - draft_seconds)

    def pause(self, number: int) -> None:
        """The sequence gave up its slot: what was drafted for it is gone."""
        if drafts := self._known.get(number):
            drafts.waiting, drafts.confidence = 0, ()

    def forget(self, number: int) -> None:
        self._known.pop(number, None)


def make_speculation(
    drafter: Drafting | None, forced: int | None, ahead: int, has_blocks: bool
) -> Speculation | None:
    """For the host's drafter, or for a device that verifies up to `ahead` drafts by itself; None: neither."""
    if drafter is not None:
        return Speculation(drafter, forced, has_blocks)
    return Speculation(Ahead(ahead), ahead, has_blocks=True) if ahead else None
