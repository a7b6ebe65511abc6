"""Speculation with the draft block (MTP): proposes tokens that the next step verifies. Knows no scheduler.

A proposal counts only if it is the token that the model itself chooses there, with the same noise. So nothing
here can change what comes out; what goes wrong here costs accepted proposals.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.cache.store import Cache
from dsv4.engine.plan import Sampling, Span
from dsv4.model.model import Model
from dsv4.model.step import Mark, Step
from dsv4.ops.sample.cpu import HISTORY


@dataclass(frozen=True)
class Seen:
    """What counts of a span's pass: its tokens, then accepted proposals."""

    span: Span
    ids: tuple[int, ...]
    streams: Tensor  # [T, N, D] of these after the last block
    after: int | None  # the token chosen after the last; None: inside a prompt


@dataclass(frozen=True)
class _State:
    """Where a slot's sequence stands."""

    sequence: int
    end: int  # tokens of it that were seen
    waiting: Tensor | None  # inside a prompt: streams [1, N, D] of the last token, before the next is known
    proposed: tuple[int, ...] = ()  # to follow the token at `end`


@dataclass(frozen=True)
class _Rows:
    """Entries to make: from position `first` on, of these streams, each token followed by one of `ids`."""

    seen: Seen
    first: int
    streams: Tensor
    ids: tuple[int, ...]


class Drafter:
    """The block's entry at a position is made of that token's streams and of the token after it. Steps after
    the first draft feed the block's own streams back; their entries are overwritten when a token is final.
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        penalties: Tensor,
        pack: Callable[[list[Sampling]], Tensor],
        num_drafts: int,
    ) -> None:
        self.model, self.cache, self.penalties, self.pack = model, cache, penalties, pack
        self.num_drafts, self.device = num_drafts, cache.page_table.device
        self._states: dict[int, _State] = {}  # by slot

    def proposed(self, span: Span) -> tuple[int, ...]:
        """What may follow the span's token, as many as it wants verified. None after a pause that ended in a
        snapshot before the last token: the slot may be another one."""
        state = self._states.get(span.slot)
        if state is None or (state.sequence, state.end) != (span.sequence, span.start):
            return ()
        return state.proposed[: span.num_drafts]

    @torch.inference_mode()
    def follow(self, seen: Sequence[Seen], mark: Mark | None) -> None:
        """Make the entries of all tokens whose next one is known, and propose what comes after."""
        made = [rows for one in seen if (rows := self._rows(one, mark)).ids]
        if not made:
            return
        spans = [(rows.seen.span.slot, rows.first, rows.ids) for rows in made]
        step = Step.build(spans, self.device, mark=mark)
        last = torch.tensor([len(rows.ids) for rows in made]).cumsum(0) - 1
        streams = torch.cat([rows.streams for rows in made])
        own, logits = self.model.draft(streams, step.ids, step, self.cache, rows=last)
        self._propose([rows.seen for rows in made], own[last], logits)

    def _rows(self, one: Seen, mark: Mark | None) -> _Rows:
        """Notes where the sequence stands."""
        span, before = one.span, self._states.get(one.span.slot)
        first, streams = span.start, one.streams
        ids = one.ids[1:] if one.after is None else (*one.ids[1:], one.after)
        if before is None or before.sequence != span.sequence or before.end != span.start:
            self._clear(span.slot, span.start - 1)
        elif before.waiting is not None:
            first, streams, ids = first - 1, torch.cat((before.waiting, streams)), (one.ids[0], *ids)
        self._states[span.slot] = _State(
            sequence=span.sequence,
            end=span.start + len(one.ids),
            waiting=one.streams[-1:].clone() if one.after is None else None,  # else it would hold all of them
        )
        # Entries are read as far back as the window, from the end and from the mark on.
        end = first + len(ids)
        if mark is not None and mark.slot == span.slot:
            end = mark.position
        skipped = max(0, end - self.model.config.window - first)
        return _Rows(one, first + skipped, streams[skipped : len(ids)], ids[skipped:])

    def _clear(self, slot: int, position: int) -> None:
        """A sequence that goes on at a snapshot: the entry before it was made of another sequence's next
        token, if at all, and nobody has kept its streams. It is empty."""
        if position < 0:
            return
        layer = self.cache.layers[len(self.model.blocks)]
        row = layer.ring.span(at := slot * layer.ring_rows + position % layer.ring_rows, at + 1)
        for part in (row.data, row.scale):
            if part is not None:
                part.zero_()

    def _propose(self, seen: list[Seen], streams: Tensor, logits: Tensor) -> None:
        """streams [R, N, D] of the block at each sequence's last token, logits [R, V] after the next one."""
        for depth in range(1, self.num_drafts + 1):
            chosen = self._choose(seen, logits, depth)
            # Beyond the context there is no rotation, and no place for a token that penalties count.
            room = self.cache.layout.max_context - depth - 1
            goes_on = [
                row
                for row, (one, id) in enumerate(zip(seen, chosen, strict=True))
                if id >= 0 and one.span.start + len(one.ids) <= room
            ]
            for one, id in zip(seen, chosen, strict=True):
                if id >= 0:
                    state = self._states[one.span.slot]
                    self._states[one.span.slot] = replace(state, proposed=(*state.proposed, id))
            if depth == self.num_drafts or not goes_on:
                return
            rows = torch.tensor(goes_on)
            seen = [seen[row] for row in goes_on]
            spans = [
                (one.span.slot, one.span.start + len(one.ids) + depth - 1, (chosen[row],))
                for one, row in zip(seen, goes_on, strict=True)
            ]
            step = Step.build(spans, self.device)
            streams, logits = self.model.draft(streams[rows], step.ids, step, self.cache)

    def _choose(self, seen: list[Seen], logits: Tensor, depth: int) -> list[int]:
        """As the model's own token of that place will be chosen; -1 for none: inside a prompt, where a
        grammar decides, and where the logits hold no distribution."""
        wanted = [
            (row, one.span, one.span.sampling)
            for row, one in enumerate(seen)
            if one.after is not None and one.span.sampling is not None and not one.span.sampling.masked
        ]
        chosen = [-1] * len(seen)
        if not wanted:
            return chosen
        samplings = []
        for row, span, sampling in wanted:
            one = seen[row]
            accepted = len(one.ids) - len(span.ids)
            samplings.append(replace(sampling, index=sampling.index + accepted + depth, num_top=-1))
            if sampling.penalties >= 0:
                state, at = self._states[span.slot], HISTORY + span.start + len(one.ids)
                known = (one.after, *state.proposed)
                self.penalties[sampling.penalties, at : at + len(known)] = torch.tensor(known)
        out = self.model.ops.sample.choose(
            logits[torch.tensor([row for row, *_ in wanted])], self.pack(samplings), None, self.penalties
        )
        for (row, *_), id in zip(wanted, out[:, 0].tolist(), strict=True):
            chosen[row] = id
        return chosen
