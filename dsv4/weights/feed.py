"""Reads batches ahead of their use: threads fill a ring of buffers, in the order of the batches."""

import threading
from collections.abc import Iterator, Sequence
from types import TracebackType

import torch
from torch import Tensor

from dsv4.weights.batches import Batch, Piece
from dsv4.weights.lanes import buffers, lane_to
from dsv4.weights.reader import Reader

THREADS, SLOTS = 8, 4
# For threads to finish the read that they are in; one of a disk that stalls ends with the process.
_END_SECONDS = 1.0


def stream(reader: Reader, batches: Sequence[Batch], device: torch.device) -> Iterator[tuple[Batch, Tensor]]:
    """Each batch with its bytes on the device, which last until the next one is asked for."""
    size = max((batch.num_bytes for batch in batches), default=0)
    slots = buffers(min(SLOTS, len(batches)), size, device)
    lane, released = lane_to(device, size), 0
    with Feed(reader, batches, slots) as feed:
        for batch in batches:
            host = feed.wait(batch.index)[: batch.num_bytes]
            yield batch, lane.send(batch.index, host)
            free = lane.used(batch.index)
            while released < free:
                feed.release(released)
                released += 1
        lane.finish()


class Feed:
    """Batch i lies in `slots[i % len(slots)]` from `wait(i)` to `release(i)`. Released in order."""

    def __init__(self, reader: Reader, batches: Sequence[Batch], slots: Sequence[Tensor]) -> None:
        self._reader, self._batches, self._slots = reader, batches, slots
        self._targets = [slot.numpy().data for slot in slots]
        self._changed = threading.Condition()
        self._left = [len(batch.pieces) for batch in batches]
        self._next = (0, 0)  # batch and piece that the next free thread reads
        self._released = 0
        self._error: BaseException | None = None
        self._is_stopping = False
        count = min(THREADS, sum(self._left))
        self._threads = [
            threading.Thread(target=self._work, daemon=True, name=f"dsv4-read-{n}") for n in range(count)
        ]

    def __enter__(self) -> "Feed":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_END_SECONDS)

    def wait(self, index: int) -> Tensor:
        """The bytes of a batch, when they have all been read. Raises what a thread raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._left[index])
            if self._error is not None:
                raise self._error
        return self._slots[index % len(self._slots)]

    def release(self, index: int) -> None:
        """The batch's buffer may be overwritten."""
        with self._changed:
            assert index == self._released, (index, self._released)
            self._released += 1
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            while (job := self._take()) is not None:
                index, piece = job
                target = self._targets[index % len(self._slots)]
                self._reader.scatter(
                    piece.offset,
                    [
                        (entry, target[at : at + size] if at >= 0 else memoryview(bytearray(size)))
                        for at, size, entry in piece.spans
                    ],
                )
                with self._changed:
                    self._left[index] -= 1
                    if not self._left[index]:
                        self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _take(self) -> tuple[int, Piece] | None:
        """The next piece, as soon as its batch's buffer is free; None at the end."""
        with self._changed:
            while not self._is_stopping and self._error is None:
                index, number = self._next
                if index == len(self._batches):
                    return None
                if number == len(self._batches[index].pieces):
                    self._next = (index + 1, 0)
                elif index < self._released + len(self._slots):
                    self._next = (index, number + 1)
                    return index, self._batches[index].pieces[number]
                else:
                    self._changed.wait()
        return None
