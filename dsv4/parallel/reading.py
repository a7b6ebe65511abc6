"""Memory in which the ranks of one machine read files together: each byte once, for all of them.

Every rank reads some pieces of each batch, and all wait until all have. A counter has one writer and only
rises. Between the bytes and the counter lie system calls and locks, so no rank sees one without the other.
"""

import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.errors import DeviceError

_PAGE = 4096


class Memory:
    """Memory without a name: it is gone with the last process that has its descriptor."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("dsv4-weights")
            return
        with tempfile.TemporaryFile() as file:
            self._descriptor = os.dup(file.fileno())

    def fileno(self) -> int:
        return self._descriptor

    def empty(self) -> None:
        """When no rank will look at it again."""
        os.ftruncate(self._descriptor, 0)

    def __del__(self) -> None:
        os.close(self._descriptor)


@dataclass
class Share:
    """One rank's view. `check` raises when the others are lost; it is asked while this rank waits."""

    descriptor: int
    rank: int
    size: int
    check: Callable[[], object] = lambda: None

    def open(self, count: int, num_bytes: int) -> list[Tensor]:
        """The buffers of all ranks; every rank asks for the same."""
        step = -(-num_bytes // _PAGE) * _PAGE
        total = _PAGE + count * step
        if os.fstat(self.descriptor).st_size < total:
            os.ftruncate(self.descriptor, total)
        memory = mmap.mmap(self.descriptor, total)
        counters = torch.frombuffer(memory, dtype=torch.int64, count=2 * self.size)
        self._read, self._released = counters.view(2, self.size).numpy()
        return [
            torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=_PAGE + number * step)
            for number in range(count)
        ]

    def tell(self, read: int, released: int) -> None:
        """Batches of which this rank has read its pieces, and batches that it needs no longer."""
        self._read[self.rank], self._released[self.rank] = read, released

    @property
    def read(self) -> int:
        """Batches that are complete."""
        return int(self._read.min())

    @property
    def released(self) -> int:
        """Batches that nobody needs."""
        return int(self._released.min())

    def behind(self, index: int, num_buffers: int) -> list[int]:
        """The ranks that batch `index` waits for: to give a buffer back, else to read their pieces."""
        counts = self._read if index < self.released + num_buffers else self._released
        return [rank for rank, count in enumerate(counts) if count == counts.min()]


def pin(buffers: list[Tensor]) -> Callable[[], None]:
    """Let GPUs' copy engines read shared memory. -> what undoes it"""
    runtime = torch.cuda.cudart()
    done: list[Tensor] = []

    def undo() -> None:
        for buffer in done:
            runtime.cudaHostUnregister(buffer.data_ptr())

    for buffer in buffers:
        if code := int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)):
            undo()
            raise DeviceError(
                f"{len(buffers) * buffer.numel() / 1e6:.0f} MB of shared memory could not be pinned to read "
                f"weights through (CUDA error {code}); free host memory, or raise the limit of locked memory "
                "(ulimit -l)"
            )
        done.append(buffer)
    return undo
