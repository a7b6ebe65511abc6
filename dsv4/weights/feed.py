"""Reads batches ahead of their use: threads fill a ring of buffers, in the order of the batches. Ranks of one
machine fill one ring together, and each uses all of it."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType

import torch
from torch import Tensor

from dsv4.parallel.reading import Share, pin
from dsv4.weights.batches import Batch, Piece
from dsv4.weights.lanes import buffers, lane_to
from dsv4.weights.reader import Reader

THREADS, SLOTS = 8, 4
# For threads to finish the read that they are in; one of a disk that stalls ends with the process.
_END_SECONDS = 1.0
# While other ranks' bytes do not come, how often rank 0 names those ranks.
LATE_SECONDS = 30.0
# Between two looks at what other ranks have done.
_LOOK_SECONDS = 0.0005
logger = logging.getLogger("dsv4.weights")


def stream(
    reader: Reader, batches: Sequence[Batch], device: torch.device, share: Share | None = None
) -> Iterator[tuple[Batch, Tensor]]:
    """Each batch with its bytes on the device, which last until the next one is asked for."""
    size = max((batch.num_bytes for batch in batches), default=0)
    count = min(SLOTS, len(batches))
    with ExitStack() as stack:
        if share is None:
            slots = buffers(count, size, device)
        else:
            slots = share.open(count, size)
            if device.type == "cuda":
                stack.callback(pin(slots))
        lane, released = lane_to(device, size), 0
        stack.callback(lane.finish)  # before memory that is copied from is given back
        feed = stack.enter_context(Feed(reader, batches, slots, share))
        for batch in batches:
            host = feed.wait(batch.index)[: batch.num_bytes]
            yield batch, lane.send(batch.index, host)
            free = lane.used(batch.index)
            while released < free:
                feed.release(released)
                released += 1


class Feed:
    """Batch i lies in `slots[i % len(slots)]` from `wait(i)` to `release(i)`. Released in order."""

    def __init__(
        self, reader: Reader, batches: Sequence[Batch], slots: Sequence[Tensor], share: Share | None = None
    ) -> None:
        self._reader, self._slots, self._share = reader, slots, share
        self._targets = [slot.numpy().data for slot in slots]
        self._changed = threading.Condition()
        rank, size = (share.rank, share.size) if share else (0, 1)
        self._own = [batch.pieces[(rank - batch.index) % size :: size] for batch in batches]
        self._left = [len(pieces) for pieces in self._own]
        self._next = (0, 0)  # batch and piece that the next free thread reads
        self._read = self._released = 0  # batches, from the first on
        self._error: BaseException | None = None
        self._is_stopping = False
        count = min(max(1, THREADS // size), sum(self._left))
        self._threads = [
            threading.Thread(target=self._work, daemon=True, name=f"dsv4-read-{n}") for n in range(count)
        ]

    def __enter__(self) -> "Feed":
        with self._changed:
            self._tell()  # of batches without a piece of this rank
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
        late = time.monotonic() + LATE_SECONDS
        with self._changed:
            while self._error is None and index >= (self._share.read if self._share else self._read):
                self._pause()
                if self._share:
                    self._share.check()
                    if self._share.rank == 0 and time.monotonic() > late:
                        late += LATE_SECONDS
                        ranks = " and ".join(map(str, self._share.behind(index, len(self._slots))))
                        logger.warning("still waiting for rank %s to read weights that all need", ranks)
            if self._error is not None:
                raise self._error
        return self._slots[index % len(self._slots)]

    def release(self, index: int) -> None:
        """The batch's buffer may be overwritten."""
        with self._changed:
            assert index == self._released, (index, self._released)
            self._released += 1
            self._tell()

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
                    self._tell()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _take(self) -> tuple[int, Piece] | None:
        """This rank's next piece, as soon as its batch's buffer is free; None at the end."""
        with self._changed:
            while not self._is_stopping and self._error is None:
                index, number = self._next
                if index == len(self._own):
                    return None
                released = self._share.released if self._share else self._released
                if number == len(self._own[index]):
                    self._next = (index + 1, 0)
                elif index < released + len(self._slots):
                    self._next = (index, number + 1)
                    return index, self._own[index][number]
                else:
                    self._pause()
        return None

    def _pause(self) -> None:
        self._changed.wait(_LOOK_SECONDS if self._share else None)

    def _tell(self) -> None:
        """To the other threads and ranks; the lock is held."""
        while self._read < len(self._left) and not self._left[self._read]:
            self._read += 1
        if self._share:
            self._share.tell(self._read, self._released)
        self._changed.notify_all()
