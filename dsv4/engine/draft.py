"""Speculation: proposes tokens that the next step verifies. Knows no scheduler.

A proposal counts only if it is the token that the model itself chooses there, with the same noise. So nothing
here can change what comes out; what goes wrong here costs accepted proposals.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.cache.layout import MTP_STEPS, most_drafts
from dsv4.cache.store import Cache
from dsv4.engine.plan import Sampling, Span
from dsv4.model.dspark import block_ids
from dsv4.model.model import Model
from dsv4.model.step import Mark, Step
from dsv4.ops.sample.cpu import HISTORY


@dataclass(frozen=True)
class Seen:
    """What counts of a span's pass: its tokens, then accepted proposals."""

    span: Span
    ids: tuple[int, ...]
    read: Tensor  # [T, ...] of these: what the drafter reads of the trunk
    after: int | None  # the token chosen after the last; None: inside a prompt

    @property
    def end(self) -> int:
        return self.span.start + len(self.ids)


@dataclass(frozen=True)
class State:
    """Where a slot's sequence stands."""

    sequence: int
    end: int  # tokens of it that were seen
    waiting: Tensor | None = None  # MTP's, inside a prompt: streams [1, N, D] before the next token is known
    oldest: int = 0  # the first position that has an entry
    proposed: tuple[int, ...] = ()  # to follow the token at `end`
    confidence: tuple[float, ...] = ()  # of these, as logits; MTP has none


class Drafter(ABC):
    """What MTP and DSpark share: where each sequence stands, and drafts chosen one after another."""

    most: int  # drafts of a step

    def __init__(
        self,
        model: Model,
        cache: Cache,
        penalties: Tensor,
        pack: Callable[[list[Sampling]], Tensor],
    ) -> None:
        self.model, self.cache, self.penalties, self.pack = model, cache, penalties, pack
        self.device = cache.page_table.device
        self.seconds = 0.0  # spent on drafts so far; on entries, which are made in any case, not counted
        self._states: dict[int, State] = {}  # by slot
        self._restored: set[int] = set()  # slots that have a snapshot's entries, and no state yet

    def restored(self, slot: int) -> None:
        """Take note that the slot's entries are those of a snapshot."""
        self._states.pop(slot, None)
        self._restored.add(slot)

    def proposed(self, span: Span) -> tuple[int, ...]:
        """What may follow the span's token, as many as it wants verified. None after a pause that ended in a
        snapshot before the last token: the slot may be another one."""
        state = self.waiting(span.slot, span.sequence)
        return state.proposed[: span.num_drafts] if state and state.end == span.start else ()

    def waiting(self, slot: int, sequence: int) -> State | None:
        """Where the sequence stands, and what is proposed for it."""
        state = self._states.get(slot)
        return state if state and state.sequence == sequence else None

    @torch.inference_mode()
    def follow(self, seen: Sequence[Seen], mark: Mark | None) -> None:
        """Make the entries of all tokens that can have them, and propose what comes after."""
        if seen:
            self.enter(seen, mark)
        if drafted := [one for one in seen if self._is_drafted(one)]:
            began = time.perf_counter()
            self._propose(drafted, self._first(drafted))
            self.seconds += time.perf_counter() - began

    @abstractmethod
    def enter(self, seen: Sequence[Seen], mark: Mark | None) -> None:
        """Make entries, and note where the sequences stand."""

    @abstractmethod
    def look(
        self, slot: int, position: int, read: Tensor, anchor: int, forced: tuple[int, ...] | None
    ) -> dict[str, Tensor]:
        """Give what is drafted at a position in full, without a trace: `read` of its row; `forced` tokens
        are taken for drafts."""

    @abstractmethod
    def _first(self, seen: list[Seen]) -> Tensor:
        """Logits [R, V] of the first drafts."""

    @abstractmethod
    def _next(self, seen: list[Seen], rows: list[int], ids: list[int], depth: int) -> Tensor:
        """Logits [R, V] after `depth` drafts, the last of which are `ids`; `rows`: who is left, of before."""

    def _stand(self, one: Seen, state: State) -> State | None:
        """Note where the sequence stands; -> its state before, None if another's or none."""
        slot, before = one.span.slot, self._states.get(one.span.slot)
        if before is not None and (before.sequence, before.end) != (one.span.sequence, one.span.start):
            before = None
        was_restored = slot in self._restored
        self._restored.discard(slot)
        oldest = before.oldest if before else 0 if was_restored else one.span.start
        self._states[slot] = replace(state, oldest=oldest)
        return before

    def _skipped(self, first: int, end: int, slot: int, mark: Mark | None) -> int:
        """How many tokens from `first` on need no entry: they are read as far back as the window, from the
        end and from the mark on."""
        if mark is not None and mark.slot == slot:
            end = mark.position
        return max(0, end - self.model.config.window - first)

    def _propose(self, seen: list[Seen], logits: Tensor) -> None:
        depth = 1
        while True:
            chosen = self._choose(seen, logits, depth)
            for one, id in zip(seen, chosen, strict=True):
                if id >= 0:
                    state = self._states[one.span.slot]
                    self._states[one.span.slot] = replace(state, proposed=(*state.proposed, id))
            # Beyond the context there is no place for a token that penalties count.
            room = self.cache.layout.max_context - depth - 1
            rows = [
                row
                for row, (one, id) in enumerate(zip(seen, chosen, strict=True))
                if id >= 0 and one.end <= room and depth < min(one.span.proposes, self.most)
            ]
            if not rows:
                return
            seen = [seen[row] for row in rows]
            logits = self._next(seen, rows, [chosen[row] for row in rows], depth)
            depth += 1

    @staticmethod
    def _is_drafted(one: Seen) -> bool:
        """Not inside a prompt."""
        return one.after is not None and one.span.sampling is not None and one.span.proposes > 0

    def _choose(self, seen: list[Seen], logits: Tensor, depth: int) -> list[int]:
        """As the model's own token of that place will be chosen, but for a grammar's mask; -1 for none, where
        the logits hold no distribution."""
        samplings = []
        for one in seen:
            sampling = one.span.sampling
            assert sampling is not None
            accepted = len(one.ids) - len(one.span.ids)
            index = sampling.index + accepted + depth
            samplings.append(replace(sampling, index=index, num_top=-1, masked=False))
            if sampling.penalties >= 0:
                state, at = self._states[one.span.slot], HISTORY + one.end
                known = (one.after, *state.proposed)
                self.penalties[sampling.penalties, at : at + len(known)] = torch.tensor(known)
        out = self.model.ops.sample.choose(logits, self.pack(samplings), None, self.penalties)
        chosen: list[int] = out[:, 0].tolist()
        return chosen


@dataclass(frozen=True)
class _Rows:
    """Entries to make: from position `first` on, of these streams, each token followed by one of `ids`."""

    seen: Seen
    first: int
    streams: Tensor
    ids: tuple[int, ...]


class MtpDrafter(Drafter):
    """The block's entry at a position is made of that token's streams and of the token after it. Steps after
    the first draft feed the block's own streams back; their entries are overwritten when a token is final.
    """

    most = MTP_STEPS

    def enter(self, seen: Sequence[Seen], mark: Mark | None) -> None:
        made = [rows for one in seen if (rows := self._rows(one, mark)).ids]
        if made:
            spans = [(rows.seen.span.slot, rows.first, rows.ids) for rows in made]
            step = Step.build(spans, self.device, mark=mark)
            self.model.keep_streams(torch.cat([rows.streams for rows in made]), step.ids, step, self.cache)

    def _first(self, seen: list[Seen]) -> Tensor:
        self._own = torch.cat([one.read[-1:] for one in seen])
        return self._drafted(seen, [one.after for one in seen if one.after is not None], 0)

    def _rows(self, one: Seen, mark: Mark | None) -> _Rows:
        span, first, streams = one.span, one.span.start, one.read
        ids = one.ids[1:] if one.after is None else (*one.ids[1:], one.after)
        waiting = one.read[-1:].clone() if one.after is None else None  # else it would hold all of them
        before = self._stand(one, State(span.sequence, one.end, waiting))
        if before is None:
            self._clear(span.slot, span.start - 1)
        elif before.waiting is not None:
            first, streams, ids = first - 1, torch.cat((before.waiting, streams)), (one.ids[0], *ids)
        skipped = self._skipped(first, first + len(ids), span.slot, mark)
        return _Rows(one, first + skipped, streams[skipped : len(ids)], ids[skipped:])

    def _clear(self, slot: int, position: int) -> None:
        """A sequence that goes on at a snapshot: the entry before it was made of another sequence's next
        token, if at all, and nobody has kept its streams. It is empty."""
        if position >= 0:
            self.cache.layers[len(self.model.blocks)].clear(slot, position)

    def _next(self, seen: list[Seen], rows: list[int], ids: list[int], depth: int) -> Tensor:
        self._own = self._own[torch.tensor(rows)]
        return self._drafted(seen, ids, depth)

    def _drafted(self, seen: list[Seen], ids: list[int], depth: int) -> Tensor:
        """Over the streams [R, N, D] of the last token, or of the block at the last draft."""
        spans = [(one.span.slot, one.end + depth - 1, (id,)) for one, id in zip(seen, ids, strict=True)]
        step = Step.build(spans, self.device)
        self._own, logits = self.model.draft(self._own, step.ids, step, self.cache)
        return logits

    def look(
        self, slot: int, position: int, read: Tensor, anchor: int, forced: tuple[int, ...] | None
    ) -> dict[str, Tensor]:
        ids, layer = (anchor, *(forced or ())), self.cache.layers[len(self.model.blocks)]
        rows = slot * layer.ring_rows + torch.arange(position, position + len(ids)) % layer.ring_rows
        rows = rows.to(self.device)
        before, own, logits = layer.ring.take(rows), read.unsqueeze(0), []
        for depth, id in enumerate(ids):
            step = Step.build([(slot, position + depth, (id,))], self.device)
            own, row = self.model.draft(own, step.ids, step, self.cache)
            logits.append(row)
        layer.ring.put(rows, before)
        return {"mtp_step_logits": torch.cat(logits)}


class DsparkDrafter(Drafter):
    """A stage's entry at a position is made of that token's taps alone. A block is drafted from the entries
    of all tokens before it and leaves none: those of accepted drafts are made of their own taps.
    """

    def __init__(
        self, model: Model, cache: Cache, penalties: Tensor, pack: Callable[[list[Sampling]], Tensor]
    ) -> None:
        super().__init__(model, cache, penalties, pack)
        self.most = most_drafts(model.config)

    def enter(self, seen: Sequence[Seen], mark: Mark | None) -> None:
        spans, taps = [], []
        for one in seen:
            self._stand(one, State(one.span.sequence, one.end))
            first, slot = one.span.start, one.span.slot
            skipped = self._skipped(first, one.end, slot, mark)
            spans.append((slot, first + skipped, one.ids[skipped:]))
            taps.append(one.read[skipped:])
        step = Step.build(spans, self.device, mark=mark)
        self.model.keep_taps(torch.cat(taps), step, self.cache)

    def _first(self, seen: list[Seen]) -> Tensor:
        anchors = [one.after for one in seen if one.after is not None]
        places = [(one.span.slot, one.end, self._states[one.span.slot].oldest) for one in seen]
        step = block_step(self.model, places, anchors)
        self._base, self._mixed = self.model.draft_block(step, self.cache)
        return self._corrected(seen, anchors, 0)

    def _next(self, seen: list[Seen], rows: list[int], ids: list[int], depth: int) -> Tensor:
        kept = torch.tensor(rows)
        self._base, self._mixed = self._base[kept], self._mixed[kept]
        return self._corrected(seen, ids, depth)

    def _corrected(self, seen: list[Seen], previous: list[int], slot: int) -> Tensor:
        """Logits of a slot of the block by the tokens before it; notes how sure the drafter is."""
        before = torch.tensor(previous, device=self.device)
        logits, confidence = self.model.correct(self._base[:, slot], self._mixed[:, slot], before)
        for one, sure in zip(seen, confidence.tolist(), strict=True):
            state = self._states[one.span.slot]
            self._states[one.span.slot] = replace(state, confidence=(*state.confidence, sure))
        return logits

    def look(
        self, slot: int, position: int, read: Tensor, anchor: int, forced: tuple[int, ...] | None
    ) -> dict[str, Tensor]:
        known = self._states.get(slot)
        step = block_step(self.model, [(slot, position + 1, known.oldest if known else 0)], [anchor])
        base, mixed = self.model.draft_block(step, self.cache)
        logits, drafts, sure = self._along(base, mixed, anchor, None)
        found = {
            **{"main_hidden": read, "draft_base": base[0], "draft_ids": drafts},
            **{"draft_logits": logits, "confidence": sure},
        }
        if forced is not None:
            found["forced_logits"], _, found["forced_confidence"] = self._along(base, mixed, anchor, forced)
        return found

    def _along(
        self, base: Tensor, mixed: Tensor, anchor: int, forced: tuple[int, ...] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B, V], drafts and confidences [B] of a block, along its greedy drafts or given ones."""
        rows, drafts, sure, before = [], [], [], anchor
        for slot in range(base.shape[1]):
            previous = torch.tensor([before], device=self.device)
            logits, confidence = self.model.correct(base[:, slot], mixed[:, slot], previous)
            chosen = self.model.ops.sample.choose(logits, self.pack([Sampling()]), None, None)[:, 0]
            before = int(chosen) if forced is None else forced[slot]
            rows.append(logits)
            drafts.append(chosen.long())
            sure.append(confidence)
        return torch.cat(rows), torch.cat(drafts), torch.cat(sure)


def block_step(model: Model, places: list[tuple[int, int, int]], anchors: list[int]) -> Step:
    """The step of a block of drafts for each (slot, position of the anchor, first position with an entry)."""
    dspark, device = model.config.dspark, model.embedding.data.device
    assert dspark is not None
    spans = [
        (slot, start, block_ids(dspark, anchor))
        for (slot, start, _), anchor in zip(places, anchors, strict=True)
    ]
    oldest = torch.tensor([oldest for *_, oldest in places]).repeat_interleave(dspark.block_size)
    return replace(Step.build(spans, device), oldest=oldest.to(device))


def make_drafter(
    model: Model, cache: Cache, penalties: Tensor, pack: Callable[[list[Sampling]], Tensor]
) -> Drafter | None:
    """The model's own drafter, if it has one."""
    if model.dspark:
        return DsparkDrafter(model, cache, penalties, pack)
    return MtpDrafter(model, cache, penalties, pack) if model.mtp else None
