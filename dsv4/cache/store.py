"""The cache's tensors, and all code that moves rows: page tables, snapshots. Knows slots, not owners."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.layout import CacheLayout
from dsv4.config import LayerSpec
from dsv4.quant.formats import QuantTensor, empty_rows


@dataclass(frozen=True)
class Tail:
    """Compressor rows that a later block may need: [slots, rows, width] float32, at position mod rows."""

    values: Tensor
    scores: Tensor

    @property
    def num_rows(self) -> int:
        return self.values.shape[1]


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps for all sequences."""

    spec: LayerSpec
    ring: QuantTensor  # [slots * ring_rows] raw entries, at slot*ring_rows + position mod ring_rows
    ring_rows: int
    page_entries: int = 0
    entries: QuantTensor | None = None  # [pages * page_entries]
    tail: Tail | None = None
    keys: QuantTensor | None = None  # index keys, beside `entries`
    key_tail: Tail | None = None

    @property
    def tails(self) -> list[Tail]:
        return [tail for tail in (self.tail, self.key_tail) if tail is not None]


@dataclass(frozen=True)
class Snapshot:
    """Everything but the compressed entries that a sequence needs to go on at `position` (per layer)."""

    position: int
    windows: tuple[QuantTensor, ...]
    tails: tuple[tuple[Tensor, ...], ...]

    @property
    def num_bytes(self) -> int:
        tails = sum(t.numel() * t.element_size() for layer in self.tails for t in layer)
        return sum(window.num_bytes for window in self.windows) + tails


class Cache:
    """All state of all running sequences. A sequence is a slot: rows in every ring and tail, and pages.

    One owner writes here (engine/runner.py), in the order of its plans; the model does so inside a step.
    """

    def __init__(self, layout: CacheLayout, device: str | torch.device, dtype: torch.dtype) -> None:
        assert dtype.itemsize == layout.rope_itemsize, (dtype, layout.rope_itemsize)
        self.layout = layout
        self.page_table = torch.zeros(
            layout.num_slots, layout.pages_per_sequence, dtype=torch.int32, device=device
        )
        self.layers = [self._layer(spec, device, dtype) for spec in layout.layers]
        self.snapshots: dict[int, Snapshot] = {}  # by the handles of plans

    def _layer(self, spec: LayerSpec, device: str | torch.device, dtype: torch.dtype) -> LayerCache:
        lay, c = self.layout, self.layout.config

        def tail(width: int) -> Tail:
            shape = (lay.num_slots, lay.tail_rows(spec), width)
            return Tail(torch.zeros(shape, device=device), torch.zeros(shape, device=device))

        slots = lay.num_slots * lay.ring_rows
        ring = empty_rows(lay.kv_format, slots, c.head_dim, c.rope_dim, dtype, device)
        if not spec.ratio:
            return LayerCache(spec, ring, lay.ring_rows)
        rows = lay.num_pages * lay.page_entries(spec)
        entries = empty_rows(lay.kv_format, rows, c.head_dim, c.rope_dim, dtype, device)
        if spec.kind == "hca":
            return LayerCache(spec, ring, lay.ring_rows, lay.page_entries(spec), entries, tail(c.head_dim))
        keys = empty_rows(lay.key_format, rows, c.index_dim, 0, dtype, device)
        return LayerCache(
            *(spec, ring, lay.ring_rows, lay.page_entries(spec), entries),
            *(tail(2 * c.head_dim), keys, tail(2 * c.index_dim)),
        )

    def set_pages(self, slot: int, pages: tuple[int, ...]) -> None:
        row = torch.tensor(pages, dtype=torch.int32)
        if self.page_table.is_cuda:
            row = row.pin_memory()  # pageable memory would make the host wait for the step in flight
        self.page_table[slot, : len(pages)].copy_(row, non_blocking=True)

    def _span(self, start: int, stop: int) -> Tensor:
        return torch.arange(max(0, start), stop, device=self.page_table.device)

    def save(self, handle: int, slot: int, position: int) -> None:
        """Keep what `slot` needs besides its entries to go on after `position` processed tokens."""
        assert handle not in self.snapshots, f"snapshot {handle} exists"
        windows, tails = [], []
        for layer in self.layers:
            span = self._span(position - self.layout.config.window + 1, position)
            windows.append(layer.ring.take(slot * layer.ring_rows + span % layer.ring_rows))
            kept = []
            for tail in layer.tails:
                for rows, halves in self._tail_spans(layer, position):
                    at = rows % tail.num_rows
                    width = tail.values.shape[2] // halves
                    kept += [tail.values[slot, at, :width].clone(), tail.scores[slot, at, :width].clone()]
            tails.append(tuple(kept))
        self.snapshots[handle] = Snapshot(position, tuple(windows), tuple(tails))

    def restore(self, slot: int, handle: int) -> None:
        """Make `slot` as it was at the snapshot's position; its pages must hold the entries before it."""
        snapshot = self.snapshots[handle]
        position = snapshot.position
        for layer, window, kept in zip(self.layers, snapshot.windows, snapshot.tails, strict=True):
            span = self._span(position - self.layout.config.window + 1, position)
            layer.ring.put(slot * layer.ring_rows + span % layer.ring_rows, window)
            parts = iter(kept)
            for tail in layer.tails:
                for rows, halves in self._tail_spans(layer, position):
                    at = rows % tail.num_rows
                    width = tail.values.shape[2] // halves
                    tail.values[slot, at, :width] = next(parts)
                    tail.scores[slot, at, :width] = next(parts)

    def _tail_spans(self, layer: LayerCache, position: int) -> list[tuple[Tensor, int]]:
        """Open-block rows in full and, with overlap, the first halves of the last closed block."""
        ratio = layer.spec.ratio
        opened = position // ratio * ratio
        spans = [(self._span(opened, position), 1)]
        if layer.spec.kind == "csa":
            spans.append((self._span(opened - ratio, opened), 2))
        return spans

    def drop(self, handle: int) -> None:
        """A snapshot that was never made, because a plan was interrupted, is dropped too."""
        self.snapshots.pop(handle, None)
