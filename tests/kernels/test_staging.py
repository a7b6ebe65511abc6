"""Experts copied ahead for prompts: whatever the order in which streams come to it, a layer reads its own."""

import ctypes
import random
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4.engine import swap
from dsv4.engine.swap import Swapper
from dsv4.gpu.shapes import Form
from dsv4.ops.experts.placement import Placement, Slots, place
from dsv4.ops.experts.staging import Staging, ring_copies
from dsv4.quant.formats import Format

FORM, LAYERS, EXPERTS = Form(Format.NVFP4, 32, 64), 5, 8
NAMES = [f"layers.{layer}.ffn.experts" for layer in range(LAYERS)]


class Streams:
    """Three streams on which things happen in order, and between which only marks do."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.passed, self.count = chance, set[int](), 0
        self.queues: dict[str, deque[tuple[str, object]]] = {n: deque() for n in ("steps", "copies", "swaps")}

    def do(self, stream: str, work: Callable[[], None]) -> None:
        self.queues[stream].append(("do", work))

    def mark(self, stream: str) -> int:
        self.count += 1
        self.queues[stream].append(("mark", self.count))
        return self.count

    def wait(self, stream: str, mark: int) -> None:
        self.queues[stream].append(("wait", mark))

    def run(self, most: int) -> None:
        """Some of what may happen next, in any order."""
        for _ in range(most):
            ready = [q for q in self.queues.values() if q and (q[0][0] != "wait" or q[0][1] in self.passed)]
            if not ready:
                assert not any(self.queues.values()), "streams wait for each other"
                return
            kind, what = self.chance.choice(ready).popleft()
            if kind == "do":
                assert callable(what)
                what()
            elif kind == "mark":
                assert isinstance(what, int)
                self.passed.add(what)

    def copy(self, stream: str, to: Tensor, source: Tensor) -> None:
        """In three pieces."""
        cut = sorted(self.chance.sample(range(1, FORM.num_bytes), 2))
        for a, b in zip([0, *cut], [*cut, FORM.num_bytes], strict=True):
            self.do(stream, lambda a=a, b=b: to[:, a:b].copy_(source[:, a:b]))  # type: ignore[misc]


class FakeLanes:
    def __init__(self, streams: Streams) -> None:
        self.streams, self.arrivals, self.reads = streams, dict[int, int](), dict[int, int]()

    def begin(self) -> None:
        self.streams.wait("copies", self.streams.mark("steps"))

    def end(self) -> None:
        self.streams.wait("steps", self.streams.mark("copies"))

    def copy(self, to: Tensor, source: Tensor) -> None:
        self.streams.copy("copies", to, source)

    def arrived(self, layer: int) -> None:
        self.arrivals[layer] = self.streams.mark("copies")

    def await_arrival(self, layer: int) -> None:
        self.streams.wait("steps", self.arrivals[layer])

    def was_read(self, layer: int) -> None:
        self.reads[layer] = self.streams.mark("steps")

    def await_read(self, layer: int) -> None:
        self.streams.wait("copies", self.reads[layer])


class FakeCopier:
    """Of the swapper: as StreamCopier."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.done = streams, 0

    def begin(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self.streams.wait("swaps", self.streams.mark("steps"))
        for to, source in pairs:
            self.streams.copy("swaps", to, source)
        self.done = self.streams.mark("swaps")

    def is_done(self) -> bool:
        return self.done in self.streams.passed


def filled(resident: list[int], staged: int) -> Placement:
    """Every expert's slot holds its own number."""
    slot_of, here, there = place([[e < n for e in range(EXPERTS)] for n in resident], (1 + staged, 1))
    slots = Slots(FORM, here, there, "cpu")
    placement = Placement(FORM, NAMES, slot_of, slots)
    for layer in range(LAYERS):
        for e in range(EXPERTS):
            slots[slot_of[layer][e]].fill_(layer * EXPERTS + e + 1)
    return placement


def read(streams: Streams, placement: Placement, layer: int, places: Tensor) -> None:
    """A launch that takes a while and finds every expert whole at its beginning and at its end."""
    first, at = placement.slots.first.data_ptr(), places.tolist()

    def check() -> None:
        for e in range(EXPERTS):
            found = ctypes.string_at(first + at[e], FORM.num_bytes)
            assert found == bytes([layer * EXPERTS + e + 1]) * FORM.num_bytes, (layer, e)

    streams.do("steps", check)
    streams.do("steps", check)


def prompt(streams: Streams, staging: Staging, stop: int = LAYERS) -> None:
    """A step; an error before layer `stop`."""
    with staging.step():
        for layer, name in enumerate(NAMES):
            if layer == stop:
                raise MemoryError
            bank = staging.take(name)
            assert bank.w13.places is not None and torch.equal(bank.w13.places, bank.w2.places)  # type: ignore[arg-type]
            read(streams, staging.placement, layer, bank.w13.places)
            streams.run(streams.chance.randrange(30))
            staging.give_back(name)


RESIDENT = {"even": [5] * 5, "odd": [8, 3, 0, 7, 2], "none": [0] * 5, "all": [8] * 5}


@pytest.mark.parametrize("slots", [1, 2, 6, 16, 40])
@pytest.mark.parametrize("resident", RESIDENT)
def test_a_slot_is_written_when_its_reader_is_done(resident: str, slots: int) -> None:
    """Host order: a copy is asked for after the launches that it waits for, and before its own layer's."""
    spilled = [list(range(n, EXPERTS)) for n in RESIDENT[resident]]
    copies = ring_copies(spilled, slots)
    for layer in range(LAYERS):
        mine = [copy for copy in copies if copy.layer == layer]
        assert [copy.expert for copy in mine] == spilled[layer][:slots]
        assert len({copy.slot for copy in mine}) == len(mine) and all(copy.after < layer for copy in mine)
    for at, copy in enumerate(copies):
        earlier = [other.layer for other in copies[:at] if other.slot == copy.slot]
        assert copy.after == max(earlier, default=-1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slots", [1, 5, 12])
@pytest.mark.parametrize("resident", RESIDENT)
def test_prompts_find_every_expert(
    resident: str, slots: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, steps that read in place, experts that change places all the time, and steps that fail."""
    for name, value in {"HALF_LIFE": 100, "WORTH": 0.0, "MARGIN": -1.0}.items():
        monkeypatch.setattr(swap, name, value)
    chance = random.Random(seed)
    torch.manual_seed(seed)
    streams, placement = Streams(chance), filled(RESIDENT[resident], slots)
    staging = Staging(placement, FakeLanes(streams))
    swapper = Swapper(placement, 1.0, FakeCopier(streams), clock=lambda: 0.0)
    swapper._pause = 0.0
    for step in range(80):
        if step % 5 == 0:
            swapper.note(torch.rand(LAYERS, EXPERTS) * 1000)
        swapper.between()
        if chance.random() < 0.5:
            for layer in range(LAYERS):
                read(streams, placement, layer, placement.table[layer])
        elif chance.random() < 0.8:
            prompt(streams, staging)
        else:
            with pytest.raises(MemoryError):
                prompt(streams, staging, stop=chance.randrange(LAYERS))
        streams.run(chance.randrange(60))
    streams.run(1 << 30)
    if resident in ("even", "odd"):
        assert swapper.num_swaps > 10


class Hasty(FakeLanes):
    """Does not wait where `skips` says so."""

    skips = ""

    def begin(self) -> None:
        if self.skips != "begin":
            super().begin()

    def end(self) -> None:
        if self.skips != "end":
            super().end()

    def await_arrival(self, layer: int) -> None:
        if self.skips != "arrival":
            super().await_arrival(layer)

    def await_read(self, layer: int) -> None:
        if self.skips != "read":
            super().await_read(layer)


@pytest.mark.parametrize("skips", ["begin", "arrival", "read"])
def test_streams_that_do_not_wait_are_noticed(skips: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the waits is needed: the test above fails without it."""
    monkeypatch.setattr(Hasty, "skips", skips)
    streams, placement = Streams(random.Random(0)), filled([5] * 5, 5)
    staging = Staging(placement, Hasty(streams))
    with pytest.raises(AssertionError):
        for _ in range(80):
            prompt(streams, staging)
            streams.run(streams.chance.randrange(60))
        streams.run(1 << 30)


def test_a_failed_step_leaves_no_copy_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait at its end, a swap could overwrite what a copy still reads."""

    def under_way(lanes: type[FakeLanes]) -> bool:
        streams, placement = Streams(random.Random(0)), filled([5] * 5, 5)
        with pytest.raises(MemoryError):
            prompt(streams, Staging(placement, lanes(streams)), stop=1)
        streams.run(1 << 30) if lanes is FakeLanes else None
        streams.do("steps", lambda: None)
        mark = streams.mark("steps")
        while mark not in streams.passed:
            queue = streams.queues["steps"] if lanes is Hasty else None
            if queue is None or queue[0][0] == "wait":
                streams.run(1)
            else:
                kind, what = queue.popleft()
                streams.passed |= {what} if kind == "mark" else set()  # type: ignore[arg-type]
        return bool(streams.queues["copies"])

    monkeypatch.setattr(Hasty, "skips", "end")
    assert under_way(Hasty) and not under_way(FakeLanes)
