"""The device's primitives as plain calls of the model: every machine without decode kernels, and prompts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4.cache.shelf import Landing
from dsv4.cache.store import Cache
from dsv4.engine.draft import Seen, block_step, make_drafter
from dsv4.engine.logprobs import read_token, sorted_token
from dsv4.engine.memory import SCORED_ROWS
from dsv4.engine.plan import Penalise, Sampling, Span
from dsv4.engine.request import Token
from dsv4.engine.runner import Masks, Result
from dsv4.errors import LostError
from dsv4.model.model import Model
from dsv4.model.step import Mark, Step, Tap
from dsv4.model.step import Span as Tokens
from dsv4.ops.sample.cpu import HISTORY, MAX_TOP, pack_penalties

if TYPE_CHECKING:
    from dsv4.step.run import Decoder


@dataclass
class Pass:
    """Spans that ran together, and what they gave: a row of `out` for each token that may come out."""

    spans: tuple[Span, ...]
    logits: Tensor | None  # [R, V] of the rows that sample, where somebody still needs them
    proposed: tuple[tuple[int, ...], ...] = ()  # by span: ids that are verified with its own; left out: none
    read: Tensor | None = None  # [T, ...] what the drafter reads of all tokens, until it has
    scored: dict[int, list[Tensor]] = field(default_factory=dict)  # by sequence: result rows of its prompt
    sorted: dict[int, list[Token]] = field(default_factory=dict)  # the same with many alternatives
    cuts: dict[int, int] = field(default_factory=dict)  # by sequence: rows that a grammar leaves to count
    out: Tensor | None = None  # int32 [R, RESULT]
    # On a GPU (graphs.py): whose buffers hold the logits, and when `out` is there.
    decoder: "Decoder | None" = None
    done: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        self.proposed = self.proposed or ((),) * len(self.spans)

    @property
    def sampled(self) -> list[Span]:
        return [span for span in self.spans if span.sampling is not None]

    def rows(self) -> Iterator[tuple[Span, Sampling]]:
        """Of `out`: the choice after a span, and after each of its proposals."""
        for span, ids in zip(self.spans, self.proposed, strict=True):
            if span.sampling is not None:
                yield span, span.sampling
                index = span.sampling.index
                yield from ((span, replace(span.sampling, index=index + n)) for n in range(1, len(ids) + 1))

    @property
    def is_sampled(self) -> bool:
        return self.out is not None or not self.sampled


def pack_rows(
    sampler: ModuleType, samplings: list[Sampling], forced: tuple[int, ...] | None = None
) -> Tensor:
    """The settings of the op `sample`, a row each, on the host."""
    rows = [
        sampler.pack(
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            min_p=s.min_p,
            seed=s.seed,
            index=s.index,
            num_top=min(s.num_top, MAX_TOP),
            forced=forced[i] if forced else -1,
            has_mask=s.masked,
            penalties=s.penalties,
        )
        for i, s in enumerate(samplings)
    ]
    return torch.tensor(rows, dtype=torch.long)


class Eager:
    max_rows, runs_ahead, same_bits = 1 << 20, False, True
    expert_hits = expert_misses = 0  # nothing is counted
    prompt_sizes: tuple[int, ...] = ()  # of steps that shorter prompts are padded to
    ahead_drafts = 0  # most that a step launched ahead verifies
    threads: int | None = None  # that the engine was settled for; None: those in use

    def __init__(self, model: Model, cache: Cache, device: str, drafts: bool = False) -> None:
        self.model, self.cache, self.device = model, cache, device
        self.is_cuda = torch.device(device).type == "cuda"
        self.sampler = model.ops.sample
        self.save, self.drop = cache.save, cache.drop
        self.set_pages = cache.set_pages
        shape = cache.layout.num_slots, HISTORY + cache.layout.max_context
        self.penalties = torch.zeros(shape, dtype=torch.int32, device=device)
        # Nothing here refers back: an engine is freed when its last user lets go, and its ranks' threads end.
        pack = partial(pack_rows, self.sampler)
        self.drafter = make_drafter(model, cache, self.penalties, pack) if drafts else None

    def restore(self, slot: int, handle: int) -> None:
        self.cache.restore(slot, handle)
        if self.drafter is not None:
            self.drafter.restored(slot)

    def penalise(self, how: Penalise) -> None:
        row = pack_penalties(
            presence=how.presence,
            frequency=how.frequency,
            repetition=how.repetition,
            bias=list(zip(how.bias_ids, how.biases, strict=True)),
            num_prompt=how.num_prompt,
            ids=how.ids,
        )
        self.penalties[how.slot, : len(row)].copy_(self.send(torch.tensor(row, dtype=torch.int32)))

    def read_pages(self, pages: tuple[int, ...]) -> Landing:
        return self._landing(self.cache.read_pages(self.send(torch.tensor(pages))))

    def write_pages(self, pages: tuple[int, ...], values: Tensor) -> None:
        self.cache.write_pages(self.send(torch.tensor(pages)), values.to(self.device, non_blocking=True))

    def read_snapshot(self, handle: int) -> Landing:
        return self._landing(self.cache.read_snapshot(handle).unsqueeze(0))

    def write_snapshot(self, handle: int, position: int, values: Tensor) -> None:
        self.cache.write_snapshot(handle, position, values.to(self.device, non_blocking=True))

    def _landing(self, values: Tensor) -> Landing:
        if not self.is_cuda:
            return Landing(values)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Landing(host, done)

    def _take_threads(self) -> None:
        """torch has one number for the process: another engine may have set its own since."""
        if self.threads is not None and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)

    def prefill(self, spans: tuple[Span, ...]) -> Pass:
        return self._run(spans, ((),) * len(spans))

    @torch.inference_mode()
    def _run(self, spans: tuple[Span, ...], proposed: tuple[tuple[int, ...], ...]) -> Pass:
        self._take_threads()
        tokens: list[Tokens] = [
            (span.slot, span.start, span.ids + ids) for span, ids in zip(spans, proposed, strict=True)
        ]
        made, row, last = Pass(spans, None, proposed), 0, list[int]()
        streams, made.read = self._read_to_draft(tokens, self._mark(spans))
        for span, (*_, ids) in zip(spans, tokens, strict=True):
            self._score(made, streams[row : row + len(span.ids)], span)
            if span.sampling is not None:
                last += range(row + len(span.ids) - 1, row + len(ids))
            row += len(ids)
        if last:
            made.logits = self.model.logits(streams.index_select(0, self.send(torch.tensor(last))))
        if not any(span.sampling.masked for span in made.sampled if span.sampling):
            self.choose(made, None)
            self._draft(made)
        return made

    def _draft(self, made: Pass) -> None:
        if self.drafter is None or made.read is None:
            return
        seen, row = [], 0
        for span, ids, tokens in zip(made.spans, made.proposed, self._chosen(made), strict=True):
            # Accepted is what a token came out after.
            count = len(span.ids) + max(0, len(tokens) - 1)
            after = tokens[-1] if tokens else None
            read = made.read[row : row + count]
            seen.append(Seen(span, (*span.ids, *ids)[:count], read, None if after is None else after.id))
            row += len(span.ids) + len(ids)
        made.read = None
        self.drafter.follow(seen, self._mark(made.spans))

    def _mark(self, spans: tuple[Span, ...]) -> Mark | None:
        marks = [Mark(s.slot, s.mark, self.cache.layout.num_slots) for s in spans if s.mark]
        assert len(marks) <= 1, f"{len(marks)} marks in a step"
        return marks[0] if marks else None

    def read(self, spans: list[Tokens], mark: Mark | None = None) -> Tensor:
        """streams [T, N, D] of these tokens after the last block."""
        return self.model.forward(Step.build(spans, self.device, mark=mark), self.cache)

    def _read_to_draft(self, spans: list[Tokens], mark: Mark | None) -> tuple[Tensor, Tensor | None]:
        """The streams, and what is kept of them for the drafter."""
        if self.drafter is None:
            return self.read(spans, mark), None
        return self._forward(Step.build(spans, self.device, mark=mark))

    def _forward(self, step: Step) -> tuple[Tensor, Tensor]:
        """The streams, and what the drafter reads of them: MTP all, DSpark the taps [T, targets * D]."""
        taps: list[Tensor] | None = [] if self.drafter and self.model.dspark else None
        streams = self.model.forward(step, self.cache, taps)
        return streams, streams if taps is None else torch.cat(taps, 1)

    def decode(self, spans: tuple[Span, ...]) -> Pass:
        drafter = self.drafter
        proposed = tuple(drafter.proposed(span) if drafter and span.num_drafts else () for span in spans)
        for span, ids in zip(spans, proposed, strict=True):
            if span.sampling is not None and span.sampling.penalties >= 0:
                at = HISTORY + span.start
                self.penalties[span.slot, at : at + 1 + len(ids)] = torch.tensor((*span.ids, *ids))
        return self._run(spans, proposed)

    def _score(self, made: Pass, streams: Tensor, span: Span) -> None:
        """The prompt's tokens of `span.score`, each from the row before it."""
        for first in range(0, len(span.score), SCORED_ROWS):
            ids = span.score[first : first + SCORED_ROWS]
            at = span.score_from + first
            rows = streams[at : at + len(ids)]
            if span.score_top > MAX_TOP:
                tokens = [
                    sorted_token(self.sampler, row, id, span.score_top)
                    for row, id in zip(self.model.logits(rows), ids, strict=True)
                ]
                made.sorted.setdefault(span.sequence, []).extend(tokens)
                continue
            settings = self.send(self.packed([Sampling(num_top=span.score_top)] * len(ids), ids))
            out = self.sampler.choose(self.model.logits(rows), settings, None)
            made.scored.setdefault(span.sequence, []).append(out)

    def packed(self, samplings: list[Sampling], forced: tuple[int, ...] | None = None) -> Tensor:
        return pack_rows(self.sampler, samplings, forced)

    def send(self, values: Tensor) -> Tensor:
        """To the device, without waiting for what it does."""
        return values.pin_memory().to(self.device, non_blocking=True) if self.is_cuda else values

    @torch.inference_mode()
    def choose(self, made: Pass, mask: Tensor | None) -> None:
        if made.logits is None:
            return
        samplings = [sampling for _, sampling in made.rows()]
        penalties = self.penalties if any(s.penalties >= 0 for s in samplings) else None
        settings = self.send(self.packed(samplings))
        self.land(made, self.sampler.choose(made.logits, settings, mask, penalties))

    def land(self, made: Pass, out: Tensor) -> None:
        """Result rows int32 [R, RESULT], on their way to the host."""
        made.out = out

    def sample(self, launched: Pass, masks: Masks) -> None:
        """The rest of a pass that waited for the masks of its grammars."""
        self._take_threads()
        self.choose(launched, self.mask(launched, masks))
        self._draft(launched)

    def mask(self, launched: Pass, masks: Masks) -> Tensor:
        """int32 [R, W] bits of the tokens that may come next; all, where there is no grammar."""
        width = -(-self.model.config.vocab_size // 32)
        rows = [*launched.rows()]
        out = torch.full((len(rows), width), -1, dtype=torch.int32)
        ahead = [
            ids[:n]
            for span, ids in zip(launched.spans, launched.proposed, strict=True)
            for n in range(1 + len(ids))
            if span.sampling is not None
        ]
        for row, (span, sampling), before in zip(out, rows, ahead, strict=True):
            bits = masks(span.sequence, before) if sampling.masked else None
            if sampling.masked and before and not bits:
                launched.cuts.setdefault(span.sequence, len(before))
            if bits:
                row.view(torch.uint8)[: len(bits)] = torch.frombuffer(bytearray(bits), dtype=torch.uint8)
        return self.send(out)

    def fetch(self, launched: Pass) -> list[Result]:
        results, row = [], 0
        chosen = self._chosen(launched)
        for span, ids, tokens in zip(launched.spans, launched.proposed, chosen, strict=True):
            logits = None
            if launched.logits is not None and span.sampling is not None and span.wants_logits:
                logits = launched.logits[row : row + 1]
            row += 0 if span.sampling is None else 1 + len(ids)
            waiting = self.drafter.waiting(span.slot, span.sequence) if self.drafter else None
            results.append(
                Result(
                    sequence=span.sequence,
                    token=tokens[0] if tokens else None,
                    more=tokens[1:],
                    num_drafted=len(ids),
                    num_proposed=len(waiting.proposed) if waiting else 0,
                    confidence=waiting.confidence if waiting else (),
                    prompt=self._scored(launched, span),
                    logits=logits,
                )
            )
        return results

    def _chosen(self, made: Pass) -> list[tuple[Token | None, ...]]:
        """By span: the token after it, then one more for each proposal that is the token before."""
        rows, found = enumerate([] if made.out is None else made.out.tolist()), []
        for span, ids in zip(made.spans, made.proposed, strict=True):
            tokens: list[Token | None] = []
            if span.sampling is not None:
                its = list(islice(rows, 1 + len(ids)))[: made.cuts.get(span.sequence)]
                for (row, out), id in zip(its, (*ids, None), strict=False):
                    tokens.append(token := self._token(made, row, out, span.sampling.num_top))
                    if token is None or token.id != id:
                        break
            found.append(tuple(tokens))
        return found

    def _token(self, made: Pass, row: int, out: list[int], num_top: int) -> Token | None:
        token = read_token(out, min(num_top, MAX_TOP))
        if made.logits is None or token is None or num_top <= MAX_TOP:
            return token
        return sorted_token(self.sampler, made.logits[row], token.id, num_top)

    @staticmethod
    def _scored(launched: Pass, span: Span) -> tuple[Token, ...]:
        found = list(launched.sorted.get(span.sequence, []))
        rows = [row for part in launched.scored.get(span.sequence, []) for row in part.tolist()]
        for row, id in zip(rows, span.score, strict=False):
            found.append(read_token(row, span.score_top) or Token(id, math.nan))
        return tuple(found)

    @torch.inference_mode()
    def study(self, span: Span, tap: Tap | None, next_ids: list[int] | None) -> tuple[Tensor, Tensor | None]:
        self._take_threads()
        step = Step.build([(span.slot, span.start, span.ids)], self.device, tap)
        streams, read = self._forward(step)
        logits, drafts = self.model.logits(streams), None
        if next_ids is not None and self.model.mtp:
            following = torch.tensor(next_ids, device=self.device)
            drafts = self.model.draft(streams, following, step, self.cache)[1]
        self._enter(span, span.ids, read)
        if next_ids is not None and self.model.dspark:
            block = block_step(self.model, [(span.slot, span.end, 0)], next_ids[-1:])
            drafts = self.model.draft_block(replace(block, tap=tap), self.cache)[0][0]
        return logits, drafts

    @torch.inference_mode()
    def verify(self, span: Span, proposed: tuple[int, ...], accepted: int) -> Tensor:
        """Run the token of a span and proposals as a decode step does, and accept so many of them whatever
        the model would choose -> logits [1 + accepted, V]."""
        self._take_threads()
        ids = (*span.ids, *proposed)
        streams, read = self._forward(Step.build([(span.slot, span.start, ids)], self.device))
        self._enter(span, ids[: 1 + accepted], read)
        return self.model.logits(streams[: 1 + accepted])

    def _enter(self, span: Span, ids: tuple[int, ...], read: Tensor) -> None:
        self._looked = span.start, read[: len(ids)]
        if self.drafter is not None:
            self.drafter.enter([Seen(span, ids, read[: len(ids)], None)], None)

    @torch.inference_mode()
    def look(
        self, slot: int, position: int, anchor: int, forced: tuple[int, ...] | None
    ) -> dict[str, Tensor]:
        """What the drafter makes at a position of the last `study` or `verify`, whose next token is `anchor`:
        the tensors of `dsv4 score --draft-logits`."""
        assert self.drafter is not None
        start, read = self._looked
        return self.drafter.look(slot, position, read[position - start], anchor, forced)

    def check(self) -> None:
        """Raise if the device is lost: after a failed call, whether the next one can succeed."""
        if not self.is_cuda:
            return
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            why = str(error).strip().split("\n")[0]
            raise LostError(f"the GPU stopped working ({why})") from error
        torch.cuda.empty_cache()
