"""The one owner of the device: carries out plans, in order, and keeps the steps that were launched ahead.

A generated token is known to the device before it is known here. So when a plan is under way, the step after
it is launched at once, for every row that may go on. A row's result is kept if the next plan has that row as
expected, whatever becomes of the others; what a row that ends has left behind lies beyond every length. All
of it goes to one stream, so a slot's next owner finds a step launched ahead for the last one complete.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from dsv4.cache.shelf import Landing, Shelf
from dsv4.engine.plan import Copy, Penalise, Plan, Span
from dsv4.engine.request import Token
from dsv4.errors import Dsv4Error
from dsv4.model.step import Tap

# The id in a span whose token the device chose itself and the host has not seen.
UNSEEN = -1


class Masks(Protocol):
    """The bits of the tokens that a sequence's grammar allows after `ahead`, tokens that may come next; None:
    it refuses these or allows nothing after them, or the sequence is gone."""

    def __call__(self, sequence: int, ahead: tuple[int, ...] = (), /) -> bytes | None: ...


@dataclass(frozen=True)
class Result:
    """What a span gave. `token` is None inside a prompt, and where the logits hold no distribution."""

    sequence: int
    token: Token | None = None
    more: tuple[Token | None, ...] = ()  # after it, by proposals that were accepted; None as above
    num_drafted: int = 0  # proposals that were verified
    num_proposed: int = 0  # that wait to be verified next
    confidence: tuple[float, ...] = ()  # of these: how sure the drafter is of each, as a logit
    prompt: tuple[Token, ...] = ()  # those of the span's `score`
    logits: Tensor | None = None  # [1, V], if asked for
    error: str = ""


class Launched(Protocol):
    """A pass on its way; `is_sampled` is False while it waits for the masks of grammars."""

    @property
    def spans(self) -> tuple[Span, ...]: ...

    @property
    def is_sampled(self) -> bool: ...


L = TypeVar("L", bound=Launched)


class Executor(Protocol[L]):
    """The device's primitives, each issued to one stream in the order of the calls."""

    max_rows: int  # of a decode pass
    runs_ahead: bool
    same_bits: bool  # whether a token gives the same bits in `prefill` and in `decode`
    expert_hits: int  # choices of decode steps whose expert lay in GPU memory, as far as they are counted
    expert_misses: int

    def save(self, handle: int, slot: int, position: int) -> None: ...
    def set_pages(self, slot: int, pages: tuple[int, ...]) -> None: ...
    def restore(self, slot: int, handle: int) -> None: ...
    def penalise(self, how: Penalise) -> None: ...
    def drop(self, handle: int) -> None: ...
    def read_pages(self, pages: tuple[int, ...]) -> Landing: ...
    def write_pages(self, pages: tuple[int, ...], values: Tensor) -> None: ...
    def read_snapshot(self, handle: int) -> Landing: ...
    def write_snapshot(self, handle: int, position: int, values: Tensor) -> None: ...
    def prefill(self, spans: tuple[Span, ...]) -> L: ...
    def decode(self, spans: tuple[Span, ...]) -> L: ...
    def sample(self, launched: L, masks: Masks) -> None: ...
    def fetch(self, launched: L) -> list[Result]: ...
    def study(
        self, span: Span, tap: Tap | None, next_ids: list[int] | None
    ) -> tuple[Tensor, Tensor | None]: ...
    def verify(self, span: Span, proposed: tuple[int, ...], accepted: int) -> Tensor: ...
    def look(
        self, slot: int, position: int, anchor: int, forced: tuple[int, ...] | None
    ) -> dict[str, Tensor]: ...
    def check(self) -> None: ...


class Runner(Generic[L]):
    def __init__(self, executor: Executor[L], shelf: Shelf | None = None) -> None:
        self.executor, self.shelf = executor, shelf
        self._owner: dict[int, int] = {}  # slot -> sequence
        self._ahead: list[L] = []
        # sequence -> (start, id) of its row launched ahead: the next plan's, if it goes on as expected
        self._expected: dict[int, tuple[int, int]] = {}

    def apply(self, plan: Plan, masks: Masks) -> list[Result]:
        """Carry out the plan, launch the next step ahead, wait for the plan's results."""
        # A slot that was freed takes its row launched ahead with it: the same sequence may come back to other
        # pages, and the row's entries went to those it had.
        freed = {self._owner.get(slot) for slot in plan.free}
        expected = {number: at for number, at in self._expected.items() if number not in freed}
        ahead, self._expected, self._ahead = self._ahead, {}, []
        order = {span.sequence: place for place, span in enumerate(plan.spans)}
        failed: list[Result] = []
        launched: list[L] = []
        rest = tuple(s for s in plan.decode if expected.get(s.sequence) != (s.start, s.ids[0]))
        kept = {span.sequence for span in plan.decode} - {span.sequence for span in rest}
        taken = [step for step in ahead if any(span.sequence in kept for span in step.spans)]
        # Before anything moves: rows that have ended are sampled with the others, by what is in their slots.
        taken = [step for step in taken if self._sample(step, masks, failed)]
        failed = [result for result in failed if result.sequence in kept]
        self._move(plan)
        if plan.prefill:
            launched += self._launch(self.executor.prefill, plan.prefill, masks, failed)
        for part in self._parts(rest):
            launched += self._launch(self.executor.decode, part, masks, failed)
        lost = {result.sequence for result in failed}
        self._launch_ahead([span for span in plan.spans if span.sequence not in lost])
        results = [r for step in taken for r in self._fetch(step) if r.sequence in kept]
        results += [r for step in launched for r in self._fetch(step)]
        # A step launched ahead goes on after all that came out, which only the device knew.
        took = {r.sequence: (len(r.more), (r.token, *r.more)[-1]) for r in results if r.token is not None}
        self._expected = {}
        for span in (span for step in self._ahead for span in step.spans if span.sequence in took):
            more, last = took[span.sequence]
            self._expected[span.sequence] = (span.start + more, -1 if last is None else last.id)
        return sorted(failed + results, key=lambda result: order[result.sequence])

    def study(
        self, plan: Plan, tap: Tap | None = None, next_ids: list[int] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The plan's one span as a prompt: logits of all its rows and, with `next_ids`, of its drafts."""
        self._move(plan)
        self._ahead, self._expected = [], {}
        (span,) = plan.prefill
        return self.executor.study(span, tap, next_ids)

    def verify(self, plan: Plan, proposed: tuple[int, ...], accepted: int) -> Tensor:
        """The plan's one span and proposals, of which so many are accepted: logits of the rows that count."""
        self._move(plan)
        self._ahead, self._expected = [], {}
        (span,) = plan.decode
        return self.executor.verify(span, proposed, accepted)

    def look(
        self, slot: int, position: int, anchor: int, forced: tuple[int, ...] | None
    ) -> dict[str, Tensor]:
        """What is drafted at a position of the last span that was studied or verified."""
        return self.executor.look(slot, position, anchor, forced)

    def _move(self, plan: Plan) -> None:
        """Everything but the spans."""
        device = self.executor
        for save in plan.saves:
            device.save(save.handle, save.slot, save.position)
        for copy in plan.copies_out:
            self._copy_out(copy)
        for slot in plan.free:
            self._owner.pop(slot, None)
        for claim in plan.claims:
            assert self._owner.get(claim.slot, claim.sequence) == claim.sequence, claim
            self._owner[claim.slot] = claim.sequence
            device.set_pages(claim.slot, claim.pages)
        for copy in plan.copies_in:
            self._copy_in(copy)
        for restore in plan.restores:
            device.restore(restore.slot, restore.handle)
        for how in plan.penalties:
            device.penalise(how)
        for handle in plan.drops:
            device.drop(handle)
        for span in plan.spans:
            assert self._owner[span.slot] == span.sequence, (span.slot, span.sequence, self._owner)

    def _copy_out(self, copy: Copy) -> None:
        assert self.shelf is not None
        device = self.executor
        landing = device.read_pages(copy.pages) if copy.pages else device.read_snapshot(copy.snapshot)
        self.shelf.put(copy.number, landing)

    def _copy_in(self, copy: Copy) -> None:
        assert self.shelf is not None
        values = self.shelf.take(copy.number)
        if copy.pages:
            self.executor.write_pages(copy.pages, values)
        else:
            self.executor.write_snapshot(copy.snapshot, copy.position, values)

    def _launch(
        self,
        launch: Callable[[tuple[Span, ...]], L],
        spans: tuple[Span, ...],
        masks: Masks | None,
        failed: list[Result],
    ) -> list[L]:
        """A pass that cannot be launched (no memory, say) ends its own sequences, not the others.

        Without `masks` it stays as it is while it waits for them.
        """
        launched: list[L] = []
        failed += self._attempt(spans, lambda: launched.append(launch(spans)))
        return [step for step in launched if masks is None or self._sample(step, masks, failed)]

    def _sample(self, step: L, masks: Masks, failed: list[Result]) -> bool:
        """Whether the pass has chosen its tokens, after this if not before."""
        if not step.is_sampled:
            failed += self._attempt(step.spans, lambda: self.executor.sample(step, masks))
        return step.is_sampled

    def _attempt(self, spans: tuple[Span, ...], call: Callable[[], object]) -> list[Result]:
        """What is lost if the call fails; a device that is lost with it is raised."""
        try:
            call()
            return []
        except (RuntimeError, MemoryError, Dsv4Error) as error:
            why = str(error).strip().split("\n")[0]
        # Only now: the error held what the call had allocated.
        self.executor.check()
        return [Result(span.sequence, error=f"the step failed: {why}") for span in spans]

    def _launch_ahead(self, spans: list[Span]) -> None:
        self._ahead = []
        if not self.executor.runs_ahead:
            return
        following = tuple(
            Span(
                sequence=span.sequence,
                slot=span.slot,
                start=span.end,
                ids=(UNSEEN,),
                sampling=replace(span.sampling, index=span.sampling.index + 1),
                wants_logits=span.wants_logits,
                num_drafts=span.num_drafts,
                room=span.room,
            )
            for span in spans
            if span.ahead and span.sampling is not None
        )
        for part in self._parts(following):
            # One that fails is run in its turn. One without its masks keeps logits in buffers that another
            # pass would take.
            launched = self._launch(self.executor.decode, part, None, [])
            self._ahead += launched
            if not launched or not launched[-1].is_sampled:
                break

    def _parts(self, spans: tuple[Span, ...]) -> list[tuple[Span, ...]]:
        size = self.executor.max_rows
        return [spans[first : first + size] for first in range(0, len(spans), size)]

    def _fetch(self, step: L) -> list[Result]:
        results: list[Result] = []
        failed = self._attempt(step.spans, lambda: results.extend(self.executor.fetch(step)))
        return failed or results

    def forget(self) -> None:
        """All slots are free and nothing is on its way: after an interrupted plan (Scheduler.restart)."""
        self._owner, self._expected, self._ahead = {}, {}, []


class Member(Runner[L]):
    """One rank of several: a pass that fails here has not failed on the others, so it ends them all."""

    def _attempt(self, spans: tuple[Span, ...], call: Callable[[], object]) -> list[Result]:
        call()
        return []


def no_masks(sequence: int, ahead: tuple[int, ...] = ()) -> bytes | None:
    """For plans without grammars."""
    raise AssertionError(f"sequence {sequence} has no grammar")
