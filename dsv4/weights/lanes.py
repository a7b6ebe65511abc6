"""Brings buffers to the device that processes them, beside that device's work."""

from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from dsv4.errors import DeviceError

# Buffers on the device: one is filled while the other is read.
_BUFFERS = 2


class Lane(Protocol):
    """`send(i)`, launches that read what it returned, `used(i)`; then the next i."""

    def send(self, index: int, host: Tensor) -> Tensor:
        """The same bytes on the device, for launches from here on."""
        ...

    def used(self, index: int) -> int:
        """All launches that read the batch have been asked for. -> batches whose host bytes are free now."""
        ...

    def finish(self) -> None:
        """Until all copies have ended."""
        ...


class Direct:
    """On a CPU bytes are processed where they were read."""

    def send(self, index: int, host: Tensor) -> Tensor:
        return host

    def used(self, index: int) -> int:
        return index + 1

    def finish(self) -> None:
        pass


class CudaLane:
    """Copies on a stream of their own. The host waits for the copy before the last one, so that one is always
    under way."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device, self._copies = device, torch.cuda.Stream(device)
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(_BUFFERS)]
        for buffer in self._buffers:
            buffer.record_stream(self._copies)
        self._copies.wait_stream(torch.cuda.current_stream(device))
        self._used = [torch.cuda.Event() for _ in range(_BUFFERS)]
        self._sent: deque[torch.cuda.Event] = deque()
        self._free = 0

    def send(self, index: int, host: Tensor) -> Tensor:
        number, sent = index % _BUFFERS, torch.cuda.Event()
        buffer = self._buffers[number][: host.numel()]
        self._copies.wait_event(self._used[number])  # one that was never recorded has ended
        with torch.cuda.stream(self._copies):
            buffer.copy_(host, non_blocking=True)
        sent.record(self._copies)
        self._sent.append(sent)
        torch.cuda.current_stream(self._device).wait_event(sent)
        return buffer

    def used(self, index: int) -> int:
        self._used[index % _BUFFERS].record(torch.cuda.current_stream(self._device))
        return self._wait(until=1)

    def finish(self) -> None:
        self._wait(until=0)

    def _wait(self, until: int) -> int:
        while len(self._sent) > until:
            self._sent.popleft().synchronize()
            self._free += 1
        return self._free


def lane_to(device: torch.device, num_bytes: int) -> Lane:
    return CudaLane(device, num_bytes) if device.type == "cuda" else Direct()


def buffers(count: int, num_bytes: int, device: torch.device) -> list[Tensor]:
    """Host memory that the device's copy engine can read."""
    is_pinned = device.type == "cuda"
    what, todo = (
        ("pinned", ", or raise the limit of locked memory (ulimit -l)") if is_pinned else ("taken", "")
    )
    try:
        return [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(count)]
    except RuntimeError as error:
        raise DeviceError(
            f"{count * num_bytes / 1e6:.0f} MB of host memory could not be {what} to read weights "
            f"through ({str(error).splitlines()[0]}); free host memory{todo}"
        ) from None
