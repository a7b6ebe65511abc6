"""A scheduler in plans alone: every plan is taken for done."""

import itertools

from dsv4.cache.layout import CacheLayout
from dsv4.cache.prefix import PrefixCache
from dsv4.cache.slots import Slots
from dsv4.config import preset
from dsv4.engine.plan import Plan
from dsv4.engine.request import Request, SamplingParams, Sequence, Token
from dsv4.engine.scheduler import Scheduler
from dsv4.quant.formats import Format

PAGE = 256


class Queue:
    """A scheduler whose every plan is taken for done."""

    def __init__(
        self,
        slots: int = 4,
        pages: int | None = None,
        chunk: int = 512,
        snapshots: int = 8,
        context: int = 40 * PAGE,
    ) -> None:
        layout = CacheLayout(
            config=preset("tiny"),
            kv_format=Format.KV8,
            key_format=Format.MXFP4,
            rope_itemsize=4,
            max_context=context,
            num_slots=slots,
            num_mtp_layers=0,
            max_snapshots=snapshots,
            max_pages=pages,
        )
        self.slots = Slots(layout)
        self.scheduler = Scheduler(self.slots, PrefixCache(self.slots, snapshots), chunk, same_bits=True)
        self.numbers = itertools.count()
        self.alive: dict[int, Sequence] = {}
        self.admitted: list[int] = []  # numbers, in order
        self.first_step: dict[int, int] = {}  # when a sequence's first token came
        self.num_steps = 0

    def add(self, prompt: int, max_tokens: int = 4) -> Sequence:
        number = next(self.numbers)
        ids = tuple((number * 7919 + at) % 4000 for at in range(prompt))
        request = Request(f"r{number}", ids, SamplingParams(max_tokens=max_tokens))
        s = Sequence(number, request, number, max_tokens, frozenset())
        self.alive[number] = s
        self.scheduler.add(s)
        return s

    def step(self, limit: int | None = None) -> Plan:
        plan = self.scheduler.plan(limit)
        assert plan.spans or not self.alive, "somebody waits and nobody runs"
        budget = self.scheduler.chunk if limit is None or not plan.decode else limit
        assert sum(len(span.ids) for span in plan.prefill) <= budget
        self.num_steps += 1
        new = {s.number for s in self.scheduler.running} - set(self.admitted)
        self.admitted += sorted(new, key=[s.number for s in self.scheduler.running].index)
        ended = []
        for span in plan.spans:
            s = self.alive[span.sequence]
            assert span.ids and span.start == s.num_processed
            if span.end == s.num_known:
                s.tokens.append(Token(1))
                self.first_step.setdefault(s.number, self.num_steps)
                if len(s.tokens) == s.max_tokens:
                    ended.append(s)
        self.scheduler.commit(plan)
        for s in ended:
            self.scheduler.finish(self.alive.pop(s.number))
        return plan
