"""A device made of dicts: does what it is told late and in order, and chooses a token from all it can read.

A token depends on the whole sequence, read as the model reads it: the last WINDOW positions from the slot's
ring, older ones through the page table. So a page, ring or table that was touched by somebody else, or too
early, gives another token than the sequence alone would have had.
"""

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from dsv4.cache.shelf import Landing
from dsv4.engine.plan import Penalise, Sampling, Span
from dsv4.engine.request import Token
from dsv4.engine.runner import UNSEEN, Masks, Result

PAGE, WINDOW, VOCAB = 8, 3, 50


def choice(
    history: Sequence[int],
    sampling: Sampling,
    mask: bytes | None = None,
    penalties: tuple[object, ...] | None = None,
) -> int:
    seed = (sampling.seed, sampling.index) if sampling.temperature else ()
    digest = hashlib.sha256(repr((tuple(history), seed, mask, penalties)).encode()).digest()
    return int.from_bytes(digest[:4], "little") % VOCAB


@dataclass
class Step:
    spans: tuple[Span, ...]
    is_sampled: bool
    histories: list[list[int]] = field(default_factory=list)
    tokens: list[int | None] = field(default_factory=list)


class Flag(threading.Event):
    """A copy that arrives when the device comes to it."""

    def synchronize(self) -> None:
        assert self.wait(60)


class FakeDevice:
    runs_ahead = True

    def __init__(self, slots: int, max_rows: int = 4) -> None:
        self.max_rows = max_rows
        self.log: list[tuple[object, ...]] = []
        self.fails: Callable[[str, tuple[Span, ...]], bool] = lambda what, spans: False
        self._queue: deque[Callable[[], None]] = deque()
        self._table: dict[int, tuple[int, ...]] = {}
        self._pages: dict[int, dict[int, int]] = {}
        # The last ring is for marks: what a step's own tokens leave before them.
        self._marked = slots
        self._ring: dict[int, dict[int, tuple[int, int]]] = {slot: {} for slot in range(slots + 1)}
        self._latest: dict[int, int] = {}
        self.snapshots: dict[int, dict[int, int]] = {}
        self._penalties: dict[int, Penalise] = {}
        self._noted: dict[int, dict[int, int]] = {slot: {} for slot in range(slots)}

    def _later(self, *record: object) -> Callable[[Callable[[], None]], None]:
        self.log.append(record)
        return self._queue.append

    def save(self, handle: int, slot: int, position: int) -> None:
        def run() -> None:
            assert handle not in self.snapshots
            kept = {
                p: self._ring[slot].get(p % (WINDOW + 8), (-1, -1))
                for p in range(max(0, position - WINDOW), position)
            }
            assert all(at == p for p, (at, _) in kept.items()), "the ring has moved on too far"
            self.snapshots[handle] = {p: token for p, (_, token) in kept.items()}

        self._later("save", handle, slot, position)(run)

    def set_pages(self, slot: int, pages: tuple[int, ...]) -> None:
        self._later("pages", slot, pages)(lambda: self._table.__setitem__(slot, pages))

    def restore(self, slot: int, handle: int) -> None:
        def run() -> None:
            for p, token in self.snapshots[handle].items():
                self._ring[slot][p % (WINDOW + 8)] = (p, token)

        self._later("restore", slot, handle)(run)

    def penalise(self, how: Penalise) -> None:
        """What its last owner left behind stays where it is."""

        def run() -> None:
            self._penalties[how.slot] = how
            self._noted[how.slot].update(enumerate(how.ids))

        self._later("penalise", how.slot)(run)

    def drop(self, handle: int) -> None:
        self._later("drop", handle)(lambda: self.snapshots.pop(handle, None))

    def read_pages(self, pages: tuple[int, ...]) -> Landing:
        landing = Landing(torch.zeros(len(pages), PAGE, dtype=torch.uint8), Flag())

        def run() -> None:
            for row, page in enumerate(pages):
                held = self._pages.get(page, {})
                landing.values[row] = torch.tensor([held.get(at, 255) for at in range(PAGE)])
            landing.done.set()

        self._later("read pages", pages)(run)
        return landing

    def write_pages(self, pages: tuple[int, ...], values: torch.Tensor) -> None:
        def run() -> None:
            for page, row in zip(pages, values.tolist(), strict=True):
                self._pages[page] = dict(enumerate(row))

        self._later("write pages", pages)(run)

    def read_snapshot(self, handle: int) -> Landing:
        landing = Landing(torch.zeros(1, WINDOW, dtype=torch.uint8), Flag())

        def run() -> None:
            landing.values[0] = torch.tensor(list(self.snapshots[handle].values()))
            landing.done.set()

        self._later("read snapshot", handle)(run)
        return landing

    def write_snapshot(self, handle: int, position: int, values: torch.Tensor) -> None:
        def run() -> None:
            assert handle not in self.snapshots
            self.snapshots[handle] = dict(enumerate(values.tolist(), position - WINDOW))

        self._later("write snapshot", handle, position)(run)

    def finish(self) -> None:
        """Everything that is still on its way."""
        while self._queue:
            self._queue.popleft()()

    def prefill(self, spans: tuple[Span, ...]) -> Step:
        return self._launch("prefill", spans)

    def decode(self, spans: tuple[Span, ...]) -> Step:
        assert len(spans) <= self.max_rows
        return self._launch("decode", spans)

    def _launch(self, what: str, spans: tuple[Span, ...]) -> Step:
        assert sum(span.mark > 0 for span in spans) <= 1
        if self.fails(what, spans):
            raise RuntimeError(f"{what} failed")
        samples = not any(span.sampling and span.sampling.masked for span in spans)
        step = Step(spans, is_sampled=samples)

        def run() -> None:
            for span in spans:
                ids = [self._latest[span.slot] if id == UNSEEN else id for id in span.ids]
                for p, id in enumerate(ids, span.start):
                    page = self._table[span.slot][p // PAGE]
                    self._pages.setdefault(page, {})[p % PAGE] = id
                    self._ring[span.slot][p % (WINDOW + 8)] = (p, id)
                    if p < span.mark:
                        self._ring[self._marked][p % (WINDOW + 8)] = (p, id)
                if what == "decode" and span.sampling and span.sampling.penalties >= 0:
                    self._noted[span.slot][span.start] = ids[0]
                step.histories.append(self._read(span.slot, span.end))
            if samples:
                self._choose(step, {})

        self._later(what, tuple((s.sequence, s.slot, s.start, s.ids) for s in spans))(run)
        return step

    def _read(self, slot: int, end: int) -> list[int]:
        old = [
            self._pages[self._table[slot][p // PAGE]].get(p % PAGE, -1) for p in range(max(0, end - WINDOW))
        ]
        recent = [self._ring[slot].get(p % (WINDOW + 8), (-1, -1)) for p in range(max(0, end - WINDOW), end)]
        return old + [token if at == p else -1 for p, (at, token) in enumerate(recent, max(0, end - WINDOW))]

    def _choose(self, step: Step, masks: dict[int, bytes | None]) -> None:
        for span, history in zip(step.spans, step.histories, strict=True):
            token = None
            if span.sampling is not None:
                token = choice(history, span.sampling, masks.get(span.sequence), self._penalised(span))
                self._latest[span.slot] = token
            step.tokens.append(token)

    def _penalised(self, span: Span) -> tuple[object, ...] | None:
        assert span.sampling is not None
        if span.sampling.penalties < 0:
            return None
        assert span.sampling.penalties == span.slot
        how, noted = self._penalties[span.slot], self._noted[span.slot]
        assert how.num_prompt + span.sampling.index == span.end
        return (how.presence, *(noted.get(p, -1) for p in range(span.end)))

    def sample(self, step: Step, masks: Masks) -> None:
        assert not step.is_sampled
        step.is_sampled = True
        bits = {s.sequence: masks(s.sequence) for s in step.spans if s.sampling and s.sampling.masked}
        self._later("sample", tuple(s.sequence for s in step.spans))(lambda: self._choose(step, bits))

    def fetch(self, step: Step) -> list[Result]:
        assert step.is_sampled
        while not step.tokens:
            self._queue.popleft()()
        self.log.append(("fetch", tuple(s.sequence for s in step.spans)))
        return [
            Result(span.sequence, None if token is None else Token(token))
            for span, token in zip(step.spans, step.tokens, strict=True)
        ]

    def check(self) -> None:
        """Never lost."""
