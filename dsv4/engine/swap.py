"""Between decode steps: hot experts in host memory change places with cold ones in GPU memory.

A copy engine brings the hot one to a spare slot of the GPU and the cold one to a spare slot of the host, on a
stream of its own, while steps go on reading both where they were. When both have arrived, the table is
switched between two steps. What they left is spare, and is not written before the steps that could read it
have ended. Nothing here waits.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dsv4.ops.experts.placement import Placement

# An expert in host memory is worth a place when it was chosen this much more often than the one that has it.
WORTH, MARGIN = 1.5, 8.0
HALF_LIFE = 65536  # choices of a layer after which half of its heat is left
MAX_PAIRS = 256  # that one look at the heat gives
PCIE = 50e9  # bytes per second, one way


class Copier(Protocol):
    """Copies beside the steps. `begin` waits, on its own stream, for what the steps' stream has so far."""

    def begin(self, pairs: list[tuple[Tensor, Tensor]]) -> None: ...

    def is_done(self) -> bool: ...


class StreamCopier:
    def __init__(self, device: torch.device) -> None:
        self._stream, self._done = torch.cuda.Stream(device), torch.cuda.Event()

    def begin(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            self._done.record()

    def is_done(self) -> bool:
        return self._done.query()


@dataclass(frozen=True)
class Pair:
    layer: int
    hot: int  # in host memory
    cold_layer: int
    cold: int  # in GPU memory


class Swapper:
    """`share`: of PCIe's bandwidth, at most. Call `between` before each step, on the steps' stream."""

    def __init__(
        self,
        placement: Placement,
        share: float,
        copier: Copier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        slots = placement.slots
        self.placement, self.num_swaps = placement, 0
        self._here = next(slot for slot in placement.spare if slots.is_resident(slot))
        self._there = next(slot for slot in placement.spare if not slots.is_resident(slot))
        self._copier = StreamCopier(slots.device) if copier is None else copier
        self._clock, self._pause = clock, placement.form.num_bytes / (share * PCIE)
        self._next_start = 0.0
        self._wanted: list[Pair] = []
        self._moving: Pair | None = None
        self._heat = torch.zeros(placement.table.shape)

    def note(self, new: Tensor) -> None:
        """new [layers, experts]: choices since the last time. Decides who should change places."""
        self._heat = self._heat * 0.5 ** (float(new[0].sum()) / HALF_LIFE) + new
        is_here = self.placement.is_resident()
        may_come, may_go = ~is_here, is_here
        if self._moving is not None:
            may_come[self._moving.layer, self._moving.hot] = False
            may_go[self._moving.cold_layer, self._moving.cold] = False
        flat, experts = self._heat.flatten(), self._heat.shape[1]
        count = min(MAX_PAIRS, flat.numel())
        hot = flat.where(may_come.flatten(), torch.tensor(-torch.inf)).topk(count)
        cold = flat.where(may_go.flatten(), torch.tensor(torch.inf)).topk(count, largest=False)
        self._wanted = []
        for above, h, below, c in zip(*(x.tolist() for x in (*hot, *cold)), strict=True):
            if math.isinf(above) or math.isinf(below) or above <= below * WORTH + MARGIN:
                break
            self._wanted.append(Pair(*divmod(h, experts), *divmod(c, experts)))

    def between(self) -> None:
        if self._moving is not None and self._copier.is_done():
            self._switch(self._moving)
            self._moving = None
        if self._moving is None and self._wanted and self._clock() >= self._next_start:
            self._begin(self._wanted.pop(0))

    def _begin(self, pair: Pair) -> None:
        p, now = self.placement, self._clock()
        hot, cold = p.slot_of[pair.layer][pair.hot], p.slot_of[pair.cold_layer][pair.cold]
        assert p.slots.is_resident(cold) and not p.slots.is_resident(hot), pair
        self._copier.begin([(p.slots[self._here], p.slots[hot]), (p.slots[self._there], p.slots[cold])])
        self._moving, self._next_start = pair, now + self._pause

    def _switch(self, pair: Pair) -> None:
        p = self.placement
        hot, cold = p.slot_of[pair.layer][pair.hot], p.slot_of[pair.cold_layer][pair.cold]
        p.move([(pair.layer, pair.hot, self._here), (pair.cold_layer, pair.cold, self._there)])
        self._here, self._there = cold, hot
        self.num_swaps += 1
