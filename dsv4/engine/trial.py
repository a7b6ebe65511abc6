"""One sequence run by hand on an idle engine, through the runner: for scores, comparisons and tests."""

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from torch import Tensor

from dsv4.engine.engine import Engine
from dsv4.engine.plan import Sampling, Span
from dsv4.engine.runner import no_masks
from dsv4.errors import RequestError
from dsv4.model.step import Tap


class Trial:
    """Holds a slot for `tokens` tokens until it is closed."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        self.engine, self.number, self.position = engine, engine.next_number(), 0
        slot = engine.slots.claim(self.number, tokens)
        if slot is None:
            raise RequestError("the cache is full; score and compare on an idle engine")
        self.slot = slot

    def read(
        self, ids: Sequence[int], next_ids: Sequence[int] | None = None, tap: Tap | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The next ids as one chunk of a prompt -> logits [T, V] and, with the token after each, drafts': of
        MTP [T, V], of DSpark [B, V] after the last."""
        plan = replace(self.engine.scheduler.changes(), prefill=(self._span(ids, None),))
        following = None if next_ids is None else list(next_ids)
        logits, drafts = self.engine.runner.study(plan, tap, following)
        self.position += len(ids)
        return logits, drafts

    def token(self, id: int) -> Tensor:
        """The next id as a generated one -> logits [1, V]."""
        plan = replace(self.engine.scheduler.changes(), decode=(self._span([id], Sampling()),))
        (result,) = self.engine.runner.apply(plan, no_masks)
        if result.error:
            raise RequestError(result.error)
        assert result.logits is not None
        self.position += 1
        return result.logits

    def verify(self, ids: Sequence[int], wrong: Sequence[int]) -> Tensor:
        """The next id as a generated one, the others as drafts that are accepted, `wrong` as drafts that are
        not -> logits [T, V]."""
        plan = replace(self.engine.scheduler.changes(), decode=(self._span(ids[:1], Sampling()),))
        logits = self.engine.runner.verify(plan, (*ids[1:], *wrong), len(ids) - 1)
        self.position += len(ids)
        return logits

    def look(self, position: int, anchor: int, forced: Sequence[int] | None) -> dict[str, Tensor]:
        """What the drafter makes at a position that was just processed, `anchor` being the token after it."""
        given = None if forced is None else tuple(forced)
        return self.engine.runner.look(self.slot, position, anchor, given)

    def _span(self, ids: Sequence[int], sampling: Sampling | None) -> Span:
        return Span(
            sequence=self.number,
            slot=self.slot,
            start=self.position,
            ids=tuple(ids),
            sampling=sampling,
            wants_logits=True,
        )

    def close(self) -> None:
        self.engine.slots.release(self.slot)

    def __enter__(self) -> "Trial":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
