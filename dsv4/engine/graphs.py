"""Decode steps on a GPU: one graph per number of rows, the next step launched before the host saw this one.

A greedy sequence's next input is known to the GPU before it is known here. So after a step the next one is
launched at once, on the guess that the same sequences go on; a wrong guess is run again, and what it left in
the cache lies beyond every length, where it is overwritten before it is read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.store import Cache
from dsv4.engine.scheduler import Span
from dsv4.model.bundle import Bundle
from dsv4.model.decode import Decoder, graph_rows
from dsv4.model.model import Model


@dataclass
class Launched:
    """A step on its way: which rows it took, and where its results are after `done`."""

    decoder: Decoder
    rows: list[tuple[int, int]]  # slot, position
    logits: Tensor
    greedy: Tensor  # pinned: the best token of each row
    done: torch.cuda.Event
    before: "Launched | None" = None  # the step whose best tokens this one took, on a guess


class Graphs:
    def __init__(self, b: Bundle, model: Model, cache: Cache, max_batch: int, use_graphs: bool) -> None:
        self.cache, self.device = cache, cache.page_table.device
        self.stream = torch.cuda.Stream(self.device)
        sizes = graph_rows(max_batch)
        self.decoders: dict[int, Decoder] = {}
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            for rows in sizes:
                decoder = self.decoders[rows] = Decoder(b, model, cache, rows)
                decoder.warm_up()
                if use_graphs:
                    decoder.capture()
        shape = (2, sizes[-1], b.config.vocab_size)
        self._logits = torch.empty(shape, device=self.device)
        self._ids = torch.empty(2, sizes[-1], dtype=torch.long).pin_memory()
        self._turn = 0
        self._ahead: Launched | None = None

    @torch.inference_mode()
    def run(self, group: tuple[Span, ...]) -> list[tuple[Span, Tensor]]:
        """-> (span, float32 logits [V]) of every span; each is one token of its sequence."""
        largest = max(self.decoders)
        parts = [group[i : i + largest] for i in range(0, len(group), largest)]
        if len(parts) > 1:
            self._ahead = None
        results: list[tuple[Span, Tensor]] = []
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for part in parts:
            step = self._expected(part) or self._launch(part)
            if len(parts) == 1:
                self._ahead = self._guess(part, step)
            torch.cuda.current_stream(self.device).wait_event(step.done)
            logits = step.logits if len(parts) == 1 else step.logits.clone()
            results += [(span, logits[i]) for i, span in enumerate(part)]
        return results

    def join(self) -> None:
        """Whatever comes next on the current stream comes after the steps launched here, guesses included."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    @torch.inference_mode()
    def token(self, slot: int, position: int, id: int) -> Tensor:
        """float32 logits [1, V] after one token of one sequence."""
        self._ahead = None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        decoder = self.decoders[min(self.decoders)]
        with torch.cuda.stream(self.stream):
            decoder.load([(slot, position, id)])
            decoder.step()
        self.join()
        return decoder.buffers.logits[:1].clone()

    def _expected(self, part: tuple[Span, ...]) -> Launched | None:
        """The step that was launched on a guess, if these are the rows and tokens it guessed."""
        step, self._ahead = self._ahead, None
        if step is None or step.rows != [(span.sequence.slot, span.start) for span in part]:
            return None
        assert step.before is not None
        step.before.done.synchronize()
        took, step.before = step.before.greedy.tolist(), None
        return step if took == [span.ids[0] for span in part] else None

    def _launch(self, part: tuple[Span, ...]) -> Launched:
        decoder = self.decoders[min(rows for rows in self.decoders if rows >= len(part))]
        tokens = []
        for span in part:
            assert span.sequence.slot is not None and len(span.ids) == 1
            tokens.append((span.sequence.slot, span.start, span.ids[0]))
        with torch.cuda.stream(self.stream):
            decoder.load(tokens)
            return self._step(decoder, [token[:2] for token in tokens])

    def _step(self, decoder: Decoder, rows: list[tuple[int, int]]) -> Launched:
        self._turn = 1 - self._turn
        logits, ids = self._logits[self._turn, : len(rows)], self._ids[self._turn, : len(rows)]
        decoder.step()
        logits.copy_(decoder.buffers.logits[: len(rows)], non_blocking=True)
        ids.copy_(decoder.buffers.ids[: len(rows)], non_blocking=True)
        done = torch.cuda.Event()
        done.record(self.stream)
        return Launched(decoder, rows, logits, ids, done)

    def _guess(self, part: tuple[Span, ...], step: Launched) -> Launched | None:
        """Launch the next step of the same rows, if every one of them takes its best token and has room."""
        for span, (slot, position) in zip(part, step.rows, strict=True):
            params = span.sequence.request.params
            may_differ = params.temperature > 0 or params.grammar is not None
            if may_differ or position + 1 >= self.cache.capacity(slot):
                return None
        with torch.cuda.stream(self.stream):
            guess = self._step(step.decoder, [(slot, position + 1) for slot, position in step.rows])
        guess.before = step
        return guess
