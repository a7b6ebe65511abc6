"""Who runs in this step: host integers only. Knows slots and pages, not tensors."""

from collections import deque
from dataclasses import dataclass

from dsv4.cache.store import Cache
from dsv4.engine.request import Sequence


@dataclass(frozen=True)
class Span:
    """Tokens [start, start + len(ids)) of one sequence, to be processed now."""

    sequence: Sequence
    start: int
    ids: tuple[int, ...]

    @property
    def yields_token(self) -> bool:
        """Whether the last token's logits give the next token (false inside a prompt)."""
        return self.start + len(self.ids) >= self.sequence.num_prompt


@dataclass(frozen=True)
class Plan:
    """Prompt chunks and generated tokens of one step; the two groups run as separate passes."""

    prefill: tuple[Span, ...]
    decode: tuple[Span, ...]

    @property
    def groups(self) -> list[tuple[Span, ...]]:
        return [group for group in (self.prefill, self.decode) if group]


class Scheduler:
    """First come, first served. A sequence is admitted when the cache can hold all it may ever need."""

    def __init__(self, cache: Cache, chunk: int) -> None:
        self.cache, self.chunk = cache, chunk
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def plan(self) -> Plan:
        self._admit()
        decode = tuple(
            Span(s, s.num_processed, tuple(s.span(s.num_processed, s.num_processed + 1)))
            for s in self.running
            if not s.in_prompt
        )
        prefill, budget = [], self.chunk
        for s in self.running:
            if s.in_prompt and budget:
                stop = min(s.num_prompt, s.num_processed + budget)
                prefill.append(Span(s, s.num_processed, tuple(s.span(s.num_processed, stop))))
                budget -= stop - s.num_processed
        return Plan(tuple(prefill), decode)

    def _admit(self) -> None:
        while self.waiting:
            sequence = self.waiting[0]
            slot = self.cache.claim(sequence.num_prompt + sequence.max_tokens)
            if slot is None:
                return
            sequence.slot = slot
            self.running.append(self.waiting.popleft())

    def finish(self, sequence: Sequence) -> None:
        """Take the sequence out, wherever it is; its slot and pages are free at once."""
        if sequence.slot is not None:
            self.running.remove(sequence)
            self.cache.release(sequence.slot)
            sequence.slot = None
        else:
            self.waiting.remove(sequence)
