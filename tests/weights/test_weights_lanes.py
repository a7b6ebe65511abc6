"""The seam between reader threads, the ring and a GPU's streams: copies and launches that happen late and in
their own order, on streams of threads."""

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import write_model
from torch import Tensor

from dsv4.weights import batches, lanes
from dsv4.weights.feed import Feed
from dsv4.weights.lanes import CudaLane
from dsv4.weights.load import Checkpoint
from dsv4.weights.reader import Reader

LIMIT, SLOTS = 30_000, 3


class Stream:
    """Does what it is given in order, each some time later."""

    def __init__(self, seed: int) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._random = random.Random(seed)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], object]) -> None:
        self._queue.put(task)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            time.sleep(self._random.choice([0, 0, 0.001, 0.004]))
            task()

    def wait_event(self, event: "Event") -> None:
        if event.flag is not None:
            self.put(event.flag.wait)

    def wait_stream(self, other: "Stream") -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def end(self) -> None:
        self._queue.put(None)
        self._thread.join()


class Event:
    flag: threading.Event | None = None

    def record(self, stream: Stream) -> None:
        self.flag = threading.Event()
        stream.put(self.flag.set)

    def synchronize(self) -> None:
        assert self.flag is not None and self.flag.wait(60)


class Buffer:
    """Memory of the device: a copy into it is the current stream's."""

    def __init__(self, held: Tensor, gpu: "Gpu") -> None:
        self.held, self._gpu = held, gpu

    def __getitem__(self, part: slice) -> "Buffer":
        return Buffer(self.held[part], self._gpu)

    def record_stream(self, stream: Stream) -> None:
        pass

    def copy_(self, host: Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self._gpu.current.put(lambda: self.held.copy_(host))


class Gpu:
    """In the place of torch.cuda."""

    def __init__(self, seed: int) -> None:
        self._seed, self.computing = seed, Stream(seed)
        self.current, self.streams = self.computing, [self.computing]
        self.Event = Event

    def Stream(self, device: torch.device) -> Stream:
        self.streams.append(Stream(self._seed + len(self.streams)))
        return self.streams[-1]

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def end(self) -> None:
        for stream in self.streams:
            stream.end()


@pytest.fixture
def model(tmp_path: Path) -> Checkpoint:
    return Checkpoint.open(write_model(tmp_path / "model", "modelopt"))


def run(checkpoint: Checkpoint, seed: int, kind: type[CudaLane], patch: pytest.MonkeyPatch) -> list[bytes]:
    """What launches saw of each batch."""
    plan = batches.plan(checkpoint.inventory.sources, LIMIT, together=True)
    size = max(batch.num_bytes for batch in plan)
    gpu, order, scatter = Gpu(seed), random.Random(seed), Reader.scatter
    made = lambda *shape, **_: Buffer(torch.zeros(shape, dtype=torch.uint8), gpu)  # noqa: E731
    patch.setattr(lanes, "torch", SimpleNamespace(cuda=gpu, empty=made, uint8=torch.uint8))

    def slowly(self: Reader, *arguments: Any) -> None:
        time.sleep(order.choice([0, 0, 0, 0.003]))
        scatter(self, *arguments)

    patch.setattr(Reader, "scatter", slowly)
    seen: list[bytes] = []
    with checkpoint.reader as reader:
        lane, released = kind(torch.device("cuda"), size), 0
        slots = [torch.zeros(size, dtype=torch.uint8) for _ in range(SLOTS)]
        with Feed(reader, plan, slots) as feed:
            for batch in plan:
                host = feed.wait(batch.index)[: batch.num_bytes]
                held: Any = lane.send(batch.index, host)
                gpu.computing.put(lambda held=held: seen.append(held.held.numpy().tobytes()))
                free = lane.used(batch.index)
                while released < free:
                    feed.release(released)
                    released += 1
            lane.finish()
    gpu.end()
    return [row[: batch.num_bytes] for row, batch in zip(seen, plan, strict=True)]


def expected(checkpoint: Checkpoint) -> list[bytes]:
    plan, found = batches.plan(checkpoint.inventory.sources, LIMIT, together=True), []
    with checkpoint.reader as reader:
        for batch in plan:
            target = bytearray(batch.num_bytes)
            for piece in batch.pieces:
                offset = piece.offset
                for at, size, entry in piece.spans:
                    if at >= 0:
                        reader.fill(entry, offset, memoryview(target)[at : at + size])
                    offset += size
            found.append(bytes(target))
    return found


def differences(got: list[bytes], want: list[bytes], checkpoint: Checkpoint) -> int:
    """Batches of which a stored byte differs; what lies between tensors may hold anything."""
    plan, wrong = batches.plan(checkpoint.inventory.sources, LIMIT, together=True), 0
    for batch, a, b in zip(plan, got, want, strict=True):
        spans = [(at, size) for piece in batch.pieces for at, size, _ in piece.spans if at >= 0]
        wrong += any(a[at : at + size] != b[at : at + size] for at, size in spans)
    return wrong


@pytest.mark.parametrize("seed", range(8))
def test_launches_see_their_batch(seed: int, model: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    want = expected(model)
    assert len(want) > 3 * SLOTS
    assert differences(run(model, seed, CudaLane, monkeypatch), want, model) == 0


class FreesTooEarly(CudaLane):
    """The host's bytes, before their copy has ended."""

    def used(self, index: int) -> int:
        super().used(index)
        return index + 1


class OverwritesTooEarly(CudaLane):
    """The device's, before launches have read them."""

    def send(self, index: int, host: Tensor) -> Tensor:
        self._used = [Event(), Event()]
        return super().send(index, host)


class LaunchesTooEarly(CudaLane):
    """Launches that do not wait for the copy."""

    def send(self, index: int, host: Tensor) -> Tensor:
        gpu: Any = lanes.torch.cuda
        before, gpu.current = gpu.current, Stream(0)
        try:
            return super().send(index, host)
        finally:
            gpu.current = before


@pytest.mark.parametrize("kind", [FreesTooEarly, OverwritesTooEarly, LaunchesTooEarly])
def test_what_forgets_to_wait_is_caught(
    kind: type[CudaLane], model: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail."""
    want = expected(model)
    wrong = 0
    for seed in range(20):
        with monkeypatch.context() as patch:
            wrong = wrong or differences(run(model, seed, kind, patch), want, model)
    assert wrong
