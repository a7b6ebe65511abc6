"""The device's primitives on a GPU with a drafter: generated tokens in rounds of speculation.

The device chooses, accepts and drafts by itself (step/round.py), so a round is launched ahead although nobody
here knows how many tokens the last one gave. What the host sees one round later is what came out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.engine.eager import Pass
from dsv4.engine.graphs import Graphs
from dsv4.engine.plan import Sampling, Span
from dsv4.engine.runner import UNSEEN, Masks, Result
from dsv4.engine.tempo import Chances, Tempo
from dsv4.gpu.tiles import rough_copy
from dsv4.model.bundle import Bundle
from dsv4.model.step import Mark, Step
from dsv4.model.step import Span as Tokens
from dsv4.ops.draft.round import SEAT, SETTINGS, SLOT, state_of
from dsv4.ops.sample.cpu import MAX_TOP
from dsv4.step.buffers import round_sizes
from dsv4.step.round import PARTS, Round

# Time of a round by how many drafts each sequence verifies, relative to none: one H200, Flash's geometry,
# NVFP4, 4k, 20 November 2026: `python -m bench.rows --graphs 8` for 1 to 8 rows of 8, and DSpark's draft with
# 0.64 ms (`python -m bench.rounds`).
COSTS = (1.0, 1.16, 1.28, 1.41, 1.52, 1.63, 1.75, 1.87)
MOVED = 0.1  # a change of MTP's chances, as logits, that the device is told


@dataclass
class Under(Pass):
    """A round on its way, and where what was accepted lands."""

    round: Round | None = None
    taken: Tensor | None = None  # int32 [seats, 2] on the host
    began: torch.cuda.Event | None = None  # where its time says how fast rounds of its size are


class Rounds(Graphs):
    def _make_steps(self, b: Bundle, max_batch: int, overlap: bool, counts: Tensor | None) -> None:
        device = self.cache.page_table.device
        self.state = state_of(self.cache.layout.num_slots, self.ahead_drafts, device)
        # DSpark says how sure it is. Of MTP's drafts the host counts how many are right, for all sequences.
        self.acceptance = None if self.model.dspark else Chances(self.ahead_drafts)
        self.chances: Tensor | None = None
        if self.acceptance is not None:
            self._sent = self.acceptance.logits()
            self.chances = torch.tensor(self._sent, device=device)
        sizes, head = round_sizes(max_batch, self.ahead_drafts), rough_copy(b.tiled("head"))
        self.max_rows = max(seats for seats, _ in sizes)
        self.tempo, self._last = Tempo(sizes), (0, 0)
        self.rounds: dict[tuple[int, int], Round] = {}
        self._seated: dict[tuple[int, int], list[list[int]]] = {}  # what a round's seats hold
        for seats, drafts in sizes:
            costs = torch.tensor(COSTS[: drafts + 1], device=device)
            self.rounds[seats, drafts] = Round(
                b=b,
                model=self.model,
                cache=self.cache,
                seats=seats,
                drafts=drafts,
                state=self.state,
                costs=torch.ones_like(costs) if self.drafts_always else costs,
                penalties=self._penalties_of(b),
                counts=counts,
                overlap=overlap,
                head=head,
                chances=self.chances,
            )

    def _steps(self) -> Iterable[Round]:
        return self.rounds.values()

    @torch.inference_mode()
    def decode(self, spans: tuple[Span, ...]) -> Pass:
        """A round: a generated token of each sequence and what follows it by accepted drafts."""
        samplings = [s.sampling for s in spans if s.sampling is not None]
        assert len(samplings) == len(spans), "every generated token is followed by a choice"
        is_masked = any(sampling.masked for sampling in samplings)
        size = self._choose_size(len(spans), is_masked)
        round, follows = self.rounds[size], size == self._last and all(s.ids[0] == UNSEEN for s in spans)
        self._last = size
        self._place(spans, samplings)
        self._seat(size, spans, samplings)
        if self.swapper is not None:
            self.swapper.between()
        made = Under(spans, None, decoder=round.decoder, round=round)
        if follows and not is_masked and not self.drafts_always:
            made.began = torch.cuda.Event(enable_timing=True)
            made.began.record()
        round.step(PARTS[:1] if is_masked else PARTS)
        if self.recorder is not None:
            self.recorder.step()
        if any(s.wants_logits for s in spans) or any(c.num_top > MAX_TOP for c in samplings):
            made.logits = round.decoder.buffers.logits.clone()
        if not is_masked:
            self.land(made, round.decoder.buffers.out)
        return made

    def _choose_size(self, count: int, is_masked: bool) -> tuple[int, int]:
        """The fewest seats that hold so many. Where a grammar decides, nobody drafts."""
        seats = min(seats for seats, _ in self.rounds if seats >= count)
        if is_masked:
            return seats, 0
        if self.drafts_always:
            return max(size for size in self.rounds if size[0] == seats)
        return seats, self.tempo.choose(seats)

    def _place(self, spans: tuple[Span, ...], samplings: list[Sampling]) -> None:
        """What the host knows of sequences that the device does not: nobody drafted for them."""
        known = [
            (span.slot, span.ids[0], span.start, sampling.index)
            for span, sampling in zip(spans, samplings, strict=True)
            if span.ids[0] != UNSEEN
        ]
        if known:
            slots, *rest = torch.tensor([(*row, 0) for row in known]).t()
            self._put_state(slots, torch.stack(rest, 1))

    def _put_state(self, slots: Tensor, values: Tensor) -> None:
        """values int64 [n, 4]: token, position, index, number of drafts."""
        self.state[:, :4].index_copy_(0, self.send(slots), self.send(values.contiguous()))

    def _seat(self, size: tuple[int, int], spans: tuple[Span, ...], samplings: list[Sampling]) -> None:
        settings = self.packed([replace(sampling, index=0) for sampling in samplings]).tolist()
        seats = []
        for span, sampling, how in zip(spans, samplings, settings, strict=True):
            is_single = span.wants_logits or sampling.num_top > MAX_TOP
            seats.append([span.slot, span.room, 0 if is_single else self.ahead_drafts, *how])
        if self._seated.get(size) == seats:
            return
        staged = torch.zeros(size[0], SEAT, dtype=torch.long)
        staged[:, SLOT] = -1
        staged[: len(seats)] = torch.tensor(seats)
        assert staged.shape[1] - SETTINGS == len(settings[0])
        self.rounds[size].seats.copy_(self.send(staged), non_blocking=True)
        self._seated[size] = seats

    @torch.inference_mode()
    def sample(self, launched: Pass, masks: Masks) -> None:
        if not isinstance(launched, Under) or launched.round is None:
            return super().sample(launched, masks)
        round, f = launched.round, launched.round.decoder.buffers
        f.mask[: len(launched.spans) * (round.num_drafts + 1) : round.num_drafts + 1] = self.mask(
            launched, masks
        )
        round.step(PARTS[1:])
        self.land(launched, f.out)

    def land(self, made: Pass, out: Tensor) -> None:
        if isinstance(made, Under) and made.round is not None:
            made.taken = torch.empty(made.round.taken.shape, dtype=torch.int32, pin_memory=True)
            made.taken.copy_(made.round.taken, non_blocking=True)
            self._land(made, out, is_timed=made.began is not None)
            return
        super().land(made, out)
        ends = [(span.slot, span.end, span.sampling.index + 1) for span in made.sampled if span.sampling]
        slots, positions, indices = self.send(torch.tensor(ends).t().contiguous())
        values = torch.stack((out[:, 0].long(), positions, indices, torch.zeros_like(positions)), 1)
        self.state[:, :4].index_copy_(0, slots, values)

    def _read_to_draft(self, spans: list[Tokens], mark: Mark | None) -> tuple[Tensor, Tensor | None]:
        """DSpark's context is made inside the step."""
        streams = self.read(spans, mark)
        return streams, None if self.model.dspark else streams

    def _draft(self, made: Pass) -> None:
        """Make MTP's entries of prompts, as far back as they are read from the end and from a mark on. The
        token after the last one may be the device's own choice."""
        if made.read is None:
            return
        mark, row = self._mark(made.spans), 0
        spans, rows = list[Tokens](), list[int]()
        for span in made.spans:
            end = mark.position if mark is not None and mark.slot == span.slot else span.end
            first = max(span.start, end - self.model.config.window)
            spans.append((span.slot, first, (*span.ids, span.after)[first - span.start + 1 :]))
            rows += range(row + first - span.start, row + len(span.ids))
            row += len(span.ids)
        step = Step.build(spans, self.device, mark=mark)
        following = torch.where(step.ids < 0, self.latest[step.slots], step.ids).clamp(min=0)
        streams = made.read.index_select(0, self.send(torch.tensor(rows)))
        self.model.keep_streams(streams, following, step, self.cache)
        made.read = None

    def restore(self, slot: int, handle: int) -> None:
        """MTP's last entry was made of the next token of another sequence, and nobody has kept its streams:
        it is empty."""
        super().restore(slot, handle)
        position = self.cache.snapshots[handle].position
        if self.model.mtp and position:
            self.cache.layers[len(self.model.blocks)].clear(slot, position - 1)

    def _note(self, launched: Under) -> None:
        """Learn from what came out how often drafts are right, and how fast rounds are."""
        assert launched.round is not None and launched.taken is not None and launched.done is not None
        size = launched.round.num_seats, launched.round.num_drafts
        if launched.began is not None:
            milliseconds = launched.began.elapsed_time(launched.done)
            self.tempo.note(size, int(launched.taken[:, 0].sum()), milliseconds)
        if self.acceptance is None or self.chances is None or not size[1]:
            return
        for taken, verified in launched.taken.tolist():
            if verified >= 0:
                self.acceptance.note(verified, taken - 1)
        logits = self.acceptance.logits()
        if max(abs(new - old) for new, old in zip(logits, self._sent, strict=True)) > MOVED:
            self._sent = logits
            self.chances.copy_(self.send(torch.tensor(logits)), non_blocking=True)

    def fetch(self, launched: Pass) -> list[Result]:
        if isinstance(launched, Under) and launched.done is not None:
            launched.done.synchronize()
            if launched.round is not None:
                self._note(launched)
                self._compact(launched)
        return super().fetch(launched)

    @staticmethod
    def _compact(made: Under) -> None:
        """Rows of the seats in use, as spans with what was verified after their token."""
        assert made.round is not None and made.taken is not None and made.out is not None
        each, rows = made.round.num_drafts + 1, list[int]()
        proposed = []
        for seat, (taken, verified) in enumerate(made.taken.tolist()[: len(made.spans)]):
            first = seat * each
            if verified < 0:  # its sequence has ended, and nobody looks: it gave no token
                made.out[first, 0], taken, verified = -1, 1, 0
            rows += range(first, first + verified + 1)
            accepted = made.out[first : first + taken - 1, 0].tolist()
            proposed.append((*accepted, *[-1] * (verified - len(accepted))))
        made.proposed, made.out = tuple(proposed), made.out[rows]
        if made.logits is not None:
            made.logits = made.logits[rows]
        made.round = None
