"""Published latencies of an all-reduce among several GPUs."""

from bisect import bisect_right
from dataclasses import dataclass

# All-reduces of a few kilobytes, in one kernel, by number of GPUs: (bytes, microseconds).
# NVLink: eight H100; github.com/sgl-project/sglang pull 2904, its author's measurement, January 2025.
_NVLINK: dict[int, tuple[tuple[int, float], ...]] = {
    2: ((512, 3.7), (4096, 3.9), (32768, 4.5), (262144, 7.9), (1048576, 19.9)),
    4: ((512, 4.8), (4096, 3.7), (32768, 4.8), (262144, 13.9), (1048576, 31.1)),
    8: ((512, 5.9), (4096, 5.7), (32768, 7.8), (262144, 16.7), (1048576, 33.8)),
}
# PCIe: a one-shot push among four V100 behind one switch, inside a CUDA graph;
# github.com/haohervchb/sglang-V100 pull 2, September 2026.
_PCIE: dict[int, tuple[tuple[int, float], ...]] = {
    4: ((4096, 4.0), (8192, 5.0), (16384, 7.2), (32768, 11.8), (131072, 44.5), (393216, 120.3)),
}


@dataclass(frozen=True)
class Link:
    """`rows` were published, some for other GPUs; `factor` takes them to this one."""

    name: str
    rows: dict[int, tuple[tuple[int, float], ...]]
    source: str
    factor: float = 1.0

    def all_reduce_us(self, gpus: int, num_bytes: int) -> float:
        """A vector of so many bytes on each GPU, added up on all of them."""
        if gpus == 1:
            return 0.0
        known = max((n for n in self.rows if n <= gpus), default=min(self.rows))
        # Each GPU sends its vector to all others: what another count sends takes as long.
        points = self.rows[known]
        return self.factor * _between(points, num_bytes * (gpus - 1) / (known - 1))


_HOPPER = Link("NVLink", _NVLINK, "published, 8 x H100: sglang pull 2904")
# NCCL, 8 bytes: 3.0 us among eight B200, 2.3 us among eight H200 (NVIDIA/nccl issue 1940).
_BLACKWELL = Link("NVLink", _NVLINK, "H100's (sglang pull 2904) times 3.0 / 2.3 (nccl issue 1940)", 3.0 / 2.3)
_CARDS = Link("PCIe", _PCIE, "published, 4 x V100 on one PCIe switch: sglang-V100 pull 2")
LINKS = {
    **{"H100": _HOPPER, "H200": _HOPPER, "B200": _BLACKWELL, "B300": _BLACKWELL},
    **{"RTX PRO 6000": _CARDS, "RTX 5090": _CARDS},
}


def _between(points: tuple[tuple[int, float], ...], num_bytes: float) -> float:
    """On a straight line between two points; before the first the first, beyond the last in proportion."""
    at = bisect_right([size for size, _ in points], num_bytes)
    if at == 0:
        return points[0][1]
    low, less = points[at - 1]
    if at == len(points):
        return less * num_bytes / low
    high, more = points[at]
    return less + (more - less) * (num_bytes - low) / (high - low)
