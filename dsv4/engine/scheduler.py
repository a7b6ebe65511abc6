"""Who runs in this step: host integers only. Knows slots and pages, not tensors."""

from collections import deque
from dataclasses import dataclass

from dsv4.cache.prefix import PrefixCache
from dsv4.cache.store import Cache
from dsv4.engine.request import Sequence

# Tokens a sequence must have room for beyond what it has to process, so that it does not soon have to pause.
HEADROOM = 64


@dataclass(frozen=True)
class Span:
    """Tokens [start, start + len(ids)) of one sequence, to be processed now."""

    sequence: Sequence
    start: int
    ids: tuple[int, ...]

    @property
    def yields_token(self) -> bool:
        """Whether the last token's logits give the next token (false inside a prompt)."""
        return self.start + len(self.ids) == self.sequence.num_known


@dataclass(frozen=True)
class Plan:
    """Prompt chunks and generated tokens of one step; the two groups run as separate passes."""

    prefill: tuple[Span, ...]
    decode: tuple[Span, ...]

    @property
    def groups(self) -> list[tuple[Span, ...]]:
        return [group for group in (self.prefill, self.decode) if group]


class Scheduler:
    """First come, first served. A sequence takes pages as it grows; when none is left, the youngest pauses.

    A paused sequence gives up its slot and waits in front of all others; what it had processed is processed
    again later, as far as the prefix cache has not kept it.
    """

    def __init__(self, cache: Cache, prefix: PrefixCache, chunk: int) -> None:
        self.cache, self.prefix, self.chunk = cache, prefix, chunk
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_pauses = 0
        self._is_tight = False  # somebody was paused, and nobody has ended since

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def plan(self) -> Plan:
        self._admit()
        self._grow()
        if not self.running:
            self._admit()
        decode = tuple(
            Span(s, s.num_processed, tuple(s.span(s.num_processed, s.num_processed + 1)))
            for s in self.running
            if not s.in_prompt
        )
        prefill, budget = [], self.chunk
        for s in self.running:
            if s.in_prompt and budget:
                start = s.num_processed
                stop = self.prefix.next_stop(start, min(s.num_known, start + budget), s.fork)
                prefill.append(Span(s, start, tuple(s.span(start, stop))))
                budget -= stop - start
        return Plan(tuple(prefill), decode)

    def commit(self, plan: Plan) -> None:
        """The spans of the plan are processed: count them, and keep the pages they have filled."""
        size = self.cache.layout.page_tokens
        for span in (span for group in plan.groups for span in group):
            s, start = span.sequence, span.start
            s.num_processed = start + len(span.ids)
            assert s.slot is not None and s.node is not None
            for end in range((start // size + 1) * size, s.num_processed + 1, size):
                ids = tuple(s.span(end - size, end))
                s.node = self.prefix.keep(s.slot, s.node, ids, end, s.num_processed)

    def _admit(self) -> None:
        while self.waiting and self.cache.num_free_slots and not (self._is_tight and self.running):
            s = self.waiting[0]
            tokens = min(s.num_prompt + s.max_tokens, s.num_known + HEADROOM)
            # A prompt whose tokens are to be scored is processed in full, once.
            reuse = s.request.params.prompt_logprobs is None or bool(s.tokens)
            hit = self.prefix.claim(s.request.owner, s.span(0, s.num_known), tokens, reuse)
            if hit is None:
                return
            s.slot, s.num_processed, s.node, s.fork = hit.slot, hit.position, hit.node, hit.fork
            if s.num_cached is None:
                s.num_cached = hit.position
            self.running.append(self.waiting.popleft())

    def _grow(self) -> None:
        """A page for every sequence that has filled its last one."""
        for s in list(self.running):
            while s.slot is not None and not self.cache.grow(s.slot, s.num_known):
                self._pause(self.running[-1])

    def _pause(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.num_processed = 0
        self.waiting.appendleft(sequence)
        self.num_pauses += 1
        self._is_tight = True

    def _release(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.running.remove(sequence)
        self.cache.release(sequence.slot)
        sequence.slot = sequence.node = None

    def finish(self, sequence: Sequence) -> None:
        """Take the sequence out, wherever it is; its slot and pages are free at once."""
        if sequence.slot is not None:
            self._release(sequence)
            self._is_tight = False
        else:
            self.waiting.remove(sequence)
