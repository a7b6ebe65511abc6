"""What Engine.step does, on a device of dicts that runs late."""

import itertools
from pathlib import Path

from fake_device import PAGE, WINDOW, FakeDevice, choice

from dsv4.cache.folder import PrefixFolder
from dsv4.cache.layout import CacheLayout
from dsv4.cache.prefix import PrefixCache
from dsv4.cache.shelf import Shelf
from dsv4.cache.slots import Slots
from dsv4.config import preset
from dsv4.engine.keep import Arrivals
from dsv4.engine.plan import Plan, Sampling
from dsv4.engine.request import Request, SamplingParams, Sequence
from dsv4.engine.runner import Runner
from dsv4.engine.scheduler import Scheduler
from dsv4.quant.formats import Format


class SmallPages(CacheLayout):
    """Pages of a few tokens: a test then fills and shares many."""

    page_tokens = PAGE  # type: ignore[assignment]
    least_before_mark = WINDOW  # type: ignore[assignment]


class Loop:
    """What Engine.step does, with numbers for text."""

    def __init__(
        self,
        slots: int = 3,
        context: int = 200,
        pages: int | None = None,
        snapshots: int = 6,
        same_bits: bool = False,
        folder: Path | None = None,
        folder_bytes: int = 1 << 20,
    ) -> None:
        layout = SmallPages(preset("tiny"), Format.KV8, Format.MXFP4, 4, context, slots, 0, snapshots, pages)
        self.device = FakeDevice(slots)
        self.said: list[str] = []
        shelf = None
        if folder is not None:
            files = PrefixFolder(folder, f"{int(same_bits):032x}", folder_bytes, self.said.append)
            shelf = Shelf(files, PAGE, PAGE, lambda position: WINDOW, pin_memory=False)
        self.runner = Runner(self.device, shelf)  # type: ignore[arg-type]
        self.slots = Slots(layout)
        self.prefix = PrefixCache(self.slots, snapshots, shelf)
        self.scheduler = Scheduler(self.slots, self.prefix, chunk=20, same_bits=same_bits)
        self.arrivals = Arrivals(self.scheduler, self.prefix)
        self.numbers = itertools.count()
        self.alive: dict[int, Sequence] = {}
        self.done: list[Sequence] = []
        self.plans: list[Plan] = []

    def add(
        self, ids: list[int], max_tokens: int, temperature: float, grammar: bool, presence: float = 0.0
    ) -> Sequence:
        number = next(self.numbers)
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=number, presence_penalty=presence
        )
        s = Sequence(number, Request(f"r{number}", tuple(ids), params), number, max_tokens, frozenset())
        s.matcher = object() if grammar else None
        self.alive[number] = s
        self.arrivals.add(s)
        return s

    def mask(self, number: int) -> bytes | None:
        s = self.alive.get(number)
        return None if s is None else bytes([len(s.tokens), number % 7])

    def step(self, limit: int | None = None) -> None:
        self.arrivals.take()
        plan = self.scheduler.plan(limit)
        assert Plan.from_bytes(plan.to_bytes()) == plan
        self.plans.append(plan)
        samples = {s.sequence for s in plan.spans if s.end == self.alive[s.sequence].num_known}
        ended = []
        try:
            results = self.runner.apply(plan, self.mask)
        except BaseException:
            self.scheduler.restart()
            self.runner.forget()
            raise
        for result in results:
            if result.error:
                self.end(self.alive[result.sequence], "error")
            elif result.sequence in samples:
                s = self.alive[result.sequence]
                assert result.token is not None
                s.tokens.append(result.token)
                if len(s.tokens) >= s.max_tokens or result.token.id == 7:  # a stop nobody foresees
                    ended.append(s)
        self.scheduler.commit(plan)
        for s in ended:
            self.end(s, "stop")

    def end(self, s: Sequence, why: str) -> None:
        s.finish_reason = why  # type: ignore[assignment]
        self.arrivals.finish(s)
        self.done.append(self.alive.pop(s.number))


def expected(s: Sequence) -> list[int]:
    """The sequence alone, without a cache."""
    ids, out = list(s.request.ids), []
    for index in range(len(s.tokens)):
        mask = bytes([index, s.number % 7]) if s.matcher else None
        sampling = Sampling(temperature=s.request.params.temperature, seed=s.seed, index=index)
        presence = s.request.params.presence_penalty
        out.append(choice(ids + out, sampling, mask, (presence, *ids, *out) if presence else None))
    return out
