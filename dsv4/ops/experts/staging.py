"""Prompts: experts of host memory are copied ahead to the GPU, layer by layer, beside the step.

A step of many tokens needs them all, and would read each over PCIe once for every tile of rows. A copy engine
brings them to slots that are used in a ring, on a stream of its own, while the GPU works on earlier layers.
The step's own table of places points there. Streams wait for each other by events, the host for nothing.
Results are those of any other placement, bit for bit.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dsv4.gpu.tiles import Bank
from dsv4.ops.experts.placement import Placement

# Prompt steps of more tokens copy ahead. A shorter one leaves many spilled experts unread, and reads the
# others about once where they lie. It is a graph, whose copies could not follow an expert to another slot.
READ_IN_PLACE = 256


@dataclass(frozen=True)
class Copy:
    """`slot`: of the ring. `after`: the last earlier layer of the step that reads from it, -1 for none."""

    layer: int
    expert: int
    slot: int
    after: int


def ring_copies(spilled: Sequence[Sequence[int]], num_slots: int) -> list[Copy]:
    """In the order of the layers. Of a layer that has more, `num_slots` are copied; the others are read where
    they lie."""
    out, at, reader = [], 0, [-1] * num_slots
    for layer, experts in enumerate(spilled):
        first = at
        for expert in experts[:num_slots]:
            slot = at % num_slots
            out.append(Copy(layer, expert, slot, reader[slot]))
            at += 1
        for used in range(first, at):
            reader[used % num_slots] = layer
    return out


class Lanes(Protocol):
    """A stream of copies beside the steps' own. Marks are layers of the step under way."""

    def begin(self) -> None:
        """Copies from here on wait for what the steps' stream has so far."""

    def end(self) -> None:
        """The steps' stream waits for all copies so far."""

    def copy(self, to: Tensor, source: Tensor) -> None: ...

    def arrived(self, layer: int) -> None:
        """All that the layer needs has been asked for."""

    def await_arrival(self, layer: int) -> None:
        """The steps' stream waits."""

    def was_read(self, layer: int) -> None:
        """The steps' stream has all launches of the layer that read the ring."""

    def await_read(self, layer: int) -> None:
        """The copies wait."""


class StreamLanes:
    def __init__(self, num_layers: int, device: torch.device) -> None:
        self._copies, self._device = torch.cuda.Stream(device), device
        self._arrivals = [torch.cuda.Event() for _ in range(num_layers)]
        self._reads = [torch.cuda.Event() for _ in range(num_layers)]

    @property
    def _steps(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def begin(self) -> None:
        self._copies.wait_stream(self._steps)

    def end(self) -> None:
        self._steps.wait_stream(self._copies)

    def copy(self, to: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._copies):
            to.copy_(source, non_blocking=True)

    def arrived(self, layer: int) -> None:
        self._arrivals[layer].record(self._copies)

    def await_arrival(self, layer: int) -> None:
        self._steps.wait_event(self._arrivals[layer])

    def was_read(self, layer: int) -> None:
        self._reads[layer].record(self._steps)

    def await_read(self, layer: int) -> None:
        self._copies.wait_event(self._reads[layer])


class Staging:
    """The spare slots of a placement in GPU memory as a ring for prompts (`Placement.staging`)."""

    def __init__(self, placement: Placement, lanes: Lanes | None = None) -> None:
        p = self.placement = placement
        self._room = [p.slots[slot] for slot in p.staging]
        self._table = p.table.clone()
        self._layer_of = {name: layer for layer, name in enumerate(p.names)}
        self._banks = [p.bank(name, self._table[layer]) for name, layer in self._layer_of.items()]
        self._lanes = StreamLanes(len(p.names), p.slots.device) if lanes is None else lanes
        self._copies: list[Copy] = []
        self._sources: list[Tensor] = []
        self._copied: set[int] = set()  # layers
        self._version = -1  # of the placement that these are of
        self._next = 0  # copy to ask for
        self._last_read = -1

    @contextmanager
    def step(self) -> Iterator["Staging"]:
        """A prompt step, all layers in their order. Whatever becomes of it, nothing is on its way when the
        steps' stream goes on: from then on experts may change places."""
        if self._version != self.placement.version:
            self._plan()
        self._next, self._last_read = 0, -1
        self._lanes.begin()
        try:
            self._ask()
            yield self
        finally:
            self._lanes.end()

    def take(self, name: str) -> Bank:
        """The experts of a layer, when they have arrived."""
        layer = self._layer_of[name]
        assert layer == self._last_read + 1, f"layer {layer} after {self._last_read}"
        if layer in self._copied:
            self._lanes.await_arrival(layer)
        return self._banks[layer]

    def give_back(self, name: str) -> None:
        """What the layer read may be overwritten when its launches so far have ended."""
        self._last_read = self._layer_of[name]
        self._lanes.was_read(self._last_read)
        self._ask()

    def _ask(self) -> None:
        """For all copies whose slots are free, or will be when launches so far have ended."""
        waited = -1
        while self._next < len(self._copies) and self._copies[self._next].after <= self._last_read:
            copy = self._copies[self._next]
            if copy.after > waited:
                self._lanes.await_read(copy.after)
                waited = copy.after
            self._lanes.copy(self._room[copy.slot], self._sources[self._next])
            self._next += 1
            if self._next == len(self._copies) or self._copies[self._next].layer > copy.layer:
                self._lanes.arrived(copy.layer)

    def _plan(self) -> None:
        p = self.placement
        spilled = [
            [expert for expert, slot in enumerate(layer) if not p.slots.is_resident(slot)]
            for layer in p.slot_of
        ]
        self._copies = ring_copies(spilled, len(self._room))
        self._sources = [p.slots[p.slot_of[copy.layer][copy.expert]] for copy in self._copies]
        self._copied = {copy.layer for copy in self._copies}
        self._version = p.version
        self._table.copy_(p.table)
        if self._copies:
            first, experts = p.slots.first.data_ptr(), p.num_experts
            at = [copy.layer * experts + copy.expert for copy in self._copies]
            places = [self._room[copy.slot].data_ptr() - first for copy in self._copies]
            entries = torch.tensor([at, places])
            if self._table.is_cuda:
                entries = entries.pin_memory().to(self._table.device, non_blocking=True)
            self._table.view(-1).index_copy_(0, entries[0], entries[1])
