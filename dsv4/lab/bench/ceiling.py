"""What the GPU could do at best, measured now: bytes read per second, and BF16 arithmetic."""

from collections.abc import Callable
from functools import partial

import torch

from dsv4.device import OLDEST, too_old
from dsv4.errors import DeviceError
from dsv4.gpu import ceiling

READ_BYTES = 8 << 30
HOST_BYTES = 1 << 28
MATMUL_SIZE = 8192
ROUNDS = 10


def gpu() -> torch.device:
    """The GPU that is measured, or one sentence why there is none."""
    if not torch.cuda.is_available():
        raise DeviceError(
            f"dsv4 bench measures GPU kernels and torch {torch.__version__} sees no CUDA GPU; "
            "run it on a machine with one"
        )
    found = torch.cuda.get_device_capability()
    if found < OLDEST:
        raise DeviceError(f"{torch.cuda.get_device_name()} {too_old(found)}")
    return torch.device("cuda", torch.cuda.current_device())


def timed(work: Callable[[], None], rounds: int, warm: int = 3) -> list[float]:
    """Milliseconds of each of several rounds on the GPU, by its own clock."""
    for _ in range(warm):
        work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return [events[i].elapsed_time(events[i + 1]) for i in range(rounds)]


def measure_read(device: torch.device) -> float:
    """Bytes per second of the fastest of several passes over 8 GiB, or over half of what is free if less."""
    rate = _read_rate(device)
    _forget(device)
    return rate


def _read_rate(device: torch.device) -> float:
    free, _ = torch.cuda.mem_get_info(device)
    num_bytes = min(READ_BYTES, free // 2) // 16 * 16
    data = torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(1)
    want = 0x01010101 * (num_bytes // 4) % (1 << 32)
    best = float("inf")
    for flight in ceiling.FLIGHTS:
        total = torch.zeros(1, dtype=torch.int32, device=device)
        ceiling.read(data, total, flight)
        if (found := int(total) % (1 << 32)) != want:
            raise DeviceError(
                f"{num_bytes} bytes of 1 added up to {found}, expected {want}; is the GPU sound?"
            )
        best = min(best, *timed(partial(ceiling.read, data, total, flight), ROUNDS))
    return num_bytes / best * 1e3


def measure_host_read(device: torch.device) -> float:
    """Bytes per second that a kernel reads of pinned host memory, the fastest of several passes."""
    data = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True).fill_(1)
    total = torch.zeros(1, dtype=torch.int32, device=device)
    times = timed(partial(ceiling.read, data, total, ceiling.FLIGHTS[0]), ROUNDS, warm=1)
    return HOST_BYTES / min(times) * 1e3


def _forget(device: torch.device) -> None:
    """What was measured with is not what the model takes."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def measure_matmul(device: torch.device) -> float:
    """Operations per second of the median BF16 product of two random matrices of 8192 x 8192."""
    rate = _matmul_rate(device)
    _forget(device)
    return rate


def _matmul_rate(device: torch.device) -> float:
    n = MATMUL_SIZE
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def work() -> None:
        torch.mm(a, b.t(), out=out)

    times = sorted(timed(work, ROUNDS))
    return 2 * n**3 / times[len(times) // 2] * 1e3
