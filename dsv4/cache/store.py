"""The cache's tensors, and all code that moves rows: page tables, snapshots. Knows slots, not owners."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.cache.layout import CacheLayout
from dsv4.config import LayerSpec
from dsv4.quant.formats import QuantTensor, empty_rows

Shapes = list[tuple[tuple[int, ...], torch.dtype]]


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
    def parts(self) -> list[Tensor]:
        """All its tensors, layer by layer: the window, its scales if it has some, the tails."""
        out: list[Tensor | None] = []
        for window, tails in zip(self.windows, self.tails, strict=True):
            out += [window.data, window.scale, *tails]
        return [part for part in out if part is not None]

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts)


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
        # Every layer's entries and keys as uint8 [num_pages, bytes of a page].
        self._pools = [pool.reshape(layout.num_pages, -1).view(torch.uint8) for pool in self._paged()]

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
                for start, stop, halves in self._tail_spans(layer, position):
                    at = self._span(start, stop) % tail.num_rows
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
                for start, stop, halves in self._tail_spans(layer, position):
                    at = self._span(start, stop) % tail.num_rows
                    width = tail.values.shape[2] // halves
                    tail.values[slot, at, :width] = next(parts)
                    tail.scores[slot, at, :width] = next(parts)

    def _paged(self) -> list[Tensor]:
        stores = [store for layer in self.layers for store in (layer.entries, layer.keys) if store]
        return [part for store in stores for part in (store.data, store.scale) if part is not None]

    @property
    def page_bytes(self) -> int:
        return sum(pool.shape[1] for pool in self._pools)

    def read_pages(self, pages: Tensor) -> Tensor:
        """The contents of these pages in all layers: uint8 [N, page_bytes]."""
        return torch.cat([pool.index_select(0, pages) for pool in self._pools], dim=1)

    def write_pages(self, pages: Tensor, values: Tensor) -> None:
        widths = [pool.shape[1] for pool in self._pools]
        for pool, part in zip(self._pools, values.split(widths, dim=1), strict=True):
            pool.index_copy_(0, pages, part)

    def read_snapshot(self, handle: int) -> Tensor:
        """A snapshot as uint8 [snapshot_bytes(position)]."""
        return torch.cat([part.reshape(-1).view(torch.uint8) for part in self.snapshots[handle].parts])

    def write_snapshot(self, handle: int, position: int, values: Tensor) -> None:
        """Make the snapshot that `read_snapshot` gave."""
        assert handle not in self.snapshots, f"snapshot {handle} exists"
        windows, tails, at = [], [], 0
        for layer, shapes in zip(self.layers, self._snapshot_shapes(position), strict=True):
            parts = []
            for shape, dtype in shapes:
                end = at + math.prod(shape) * dtype.itemsize
                # Cloned: a part may begin where its type cannot.
                parts.append(values[at:end].clone().view(dtype).reshape(shape))
                at = end
            data, *rest = parts
            scale = None if layer.ring.scale is None else rest.pop(0)
            shape = (data.shape[0], layer.ring.shape[1])
            windows.append(replace(layer.ring, data=data, scale=scale, shape=shape))
            tails.append(tuple(rest))
        assert at == values.shape[0]
        self.snapshots[handle] = Snapshot(position, tuple(windows), tuple(tails))

    def snapshot_bytes(self, position: int) -> int:
        shapes = self._snapshot_shapes(position)
        return sum(math.prod(shape) * dtype.itemsize for layer in shapes for shape, dtype in layer)

    def _snapshot_shapes(self, position: int) -> list[Shapes]:
        """Shape and type of every tensor of a snapshot, layer by layer, in the order of `Snapshot.parts`."""
        rows = min(position, self.layout.config.window - 1)
        out = []
        for layer in self.layers:
            ring = (part for part in (layer.ring.data, layer.ring.scale) if part is not None)
            shapes: Shapes = [((rows, part.shape[1]), part.dtype) for part in ring]
            for tail in layer.tails:
                for start, stop, halves in self._tail_spans(layer, position):
                    shape = (stop - start, tail.values.shape[2] // halves)
                    shapes += [(shape, torch.float32)] * 2
            out.append(shapes)
        return out

    def _tail_spans(self, layer: LayerCache, position: int) -> list[tuple[int, int, int]]:
        """(start, stop, 1): open-block rows in full; with overlap, the first halves (2) of the last closed
        block."""
        ratio = layer.spec.ratio
        opened = position // ratio * ratio
        spans = [(opened, position, 1)]
        if layer.spec.kind == "csa":
            spans.append((max(0, opened - ratio), opened, 2))
        return spans

    def drop(self, handle: int) -> None:
        """A snapshot that was never made, because a plan was interrupted, is dropped too."""
        self.snapshots.pop(handle, None)
