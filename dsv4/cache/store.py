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

    def clear(self, slot: int, position: int) -> None:
        """Empty one entry of the ring."""
        row = self.ring.span(at := slot * self.ring_rows + position % self.ring_rows, at + 1)
        for part in (row.data, row.scale):
            if part is not None:
                part.zero_()


@dataclass(frozen=True)
class Snapshot:
    """Everything but the compressed entries that a sequence needs to go on at `position`, of all layers."""

    position: int
    window: QuantTensor  # layer by layer
    tails: tuple[Tensor, ...]

    @property
    def parts(self) -> list[Tensor]:
        return [part for part in (self.window.data, self.window.scale, *self.tails) if part is not None]

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts)


class Cache:
    """All state of all running sequences. A sequence is a slot: rows in every ring and tail, and pages. One
    slot more, without pages, is where a step leaves a sequence's state at a place it has passed.

    One owner writes here (engine/runner.py), in the order of its plans; the model does so inside a step.
    Rings and tails of all layers lie in a few tensors, so that a snapshot is a few copies.
    """

    def __init__(self, layout: CacheLayout, device: str | torch.device, dtype: torch.dtype) -> None:
        assert dtype.itemsize == layout.rope_itemsize, (dtype, layout.rope_itemsize)
        self.layout = lay = layout
        c = lay.config
        self.page_table = torch.zeros(lay.num_slots, lay.pages_per_sequence, dtype=torch.int32, device=device)
        rows = len(lay.layers) * lay.layer_rows
        self._rings = empty_rows(lay.kv_format, rows, c.head_dim, c.rope_dim, dtype, device)
        # By kind and ratio, of all such layers: values before scores, the index keys' after the entries'.
        self._tails = {
            (spec.kind, spec.ratio): [
                torch.zeros(count, lay.num_states, lay.tail_rows(spec), width, device=device)
                for width in lay.tail_widths(spec)
                for _ in ("values", "scores")
            ]
            for spec, count in lay.kinds
        }
        self.layers = [self._layer(number, device, dtype) for number in range(len(lay.layers))]
        self.snapshots: dict[int, Snapshot] = {}  # by the handles of plans
        # Every layer's entries and keys as uint8 [num_pages, bytes of a page].
        self._pools = [pool.reshape(layout.num_pages, -1).view(torch.uint8) for pool in self._paged()]

    def _layer(self, number: int, device: str | torch.device, dtype: torch.dtype) -> LayerCache:
        lay, c, spec = self.layout, self.layout.config, self.layout.layers[number]
        begin = number * lay.layer_rows
        ring = self._rings.span(begin, begin + lay.num_states * lay.ring_rows)
        if not spec.ratio:
            return LayerCache(spec, ring, lay.ring_rows)
        rows = lay.num_pages * lay.page_entries(spec)
        entries = empty_rows(lay.kv_format, rows, c.head_dim, c.rope_dim, dtype, device)
        kind = (spec.kind, spec.ratio)
        place = sum((before.kind, before.ratio) == kind for before in lay.layers[:number])
        tails = [tail[place] for tail in self._tails[kind]]
        if spec.kind == "hca":
            return LayerCache(spec, ring, lay.ring_rows, lay.page_entries(spec), entries, Tail(*tails))
        return LayerCache(
            spec=spec,
            ring=ring,
            ring_rows=lay.ring_rows,
            page_entries=lay.page_entries(spec),
            entries=entries,
            tail=Tail(*tails[:2]),
            keys=empty_rows(lay.key_format, rows, c.index_dim, 0, dtype, device),
            key_tail=Tail(*tails[2:]),
        )

    def set_pages(self, slot: int, pages: tuple[int, ...]) -> None:
        row = torch.tensor(pages, dtype=torch.int32)
        if self.page_table.is_cuda:
            row = row.pin_memory()  # pageable memory would make the host wait for the step in flight
        self.page_table[slot, : len(pages)].copy_(row, non_blocking=True)

    def _span(self, start: int, stop: int) -> Tensor:
        return torch.arange(max(0, start), stop, device=self.page_table.device)

    def _window_rows(self, slot: int, position: int) -> Tensor:
        """Rows of all layers' rings that hold the window before `position`, layer by layer."""
        lay = self.layout
        at = slot * lay.ring_rows + self._span(position - lay.config.window + 1, position) % lay.ring_rows
        layer = self._span(0, len(lay.layers)) * lay.layer_rows
        return (layer.unsqueeze(1) + at).flatten()

    def save(self, handle: int, slot: int, position: int) -> None:
        """Keep what `slot` needs besides its entries to go on after `position` processed tokens."""
        assert handle not in self.snapshots, f"snapshot {handle} exists"
        window = self._rings.take(self._window_rows(slot, position))
        tails = [
            tail[:, slot].index_select(1, at)[:, :, :width].contiguous()
            for tail, at, width in self._tail_rows(position)
        ]
        self.snapshots[handle] = Snapshot(position, window, tuple(tails))

    def restore(self, slot: int, handle: int) -> None:
        """Make `slot` as it was at the snapshot's position; its pages must hold the entries before it."""
        snapshot = self.snapshots[handle]
        self._rings.put(self._window_rows(slot, snapshot.position), snapshot.window)
        for (tail, at, width), kept in zip(self._tail_rows(snapshot.position), snapshot.tails, strict=True):
            tail[:, slot, :, :width].index_copy_(1, at, kept)

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
        parts, at = [], 0
        for shape, dtype in self._snapshot_shapes(position):
            end = at + math.prod(shape) * dtype.itemsize
            # Cloned: a part may begin where its type cannot.
            parts.append(values[at:end].clone().view(dtype).reshape(shape))
            at = end
        assert at == values.shape[0]
        data, *rest = parts
        scale = None if self._rings.scale is None else rest.pop(0)
        window = replace(self._rings, data=data, scale=scale, shape=(data.shape[0], self._rings.shape[1]))
        self.snapshots[handle] = Snapshot(position, window, tuple(rest))

    def snapshot_bytes(self, position: int) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._snapshot_shapes(position))

    def _snapshot_shapes(self, position: int) -> Shapes:
        """Shape and type of every tensor of a snapshot, in the order of `Snapshot.parts`."""
        rows = len(self.layers) * min(position, self.layout.config.window - 1)
        ring = (part for part in (self._rings.data, self._rings.scale) if part is not None)
        shapes: Shapes = [((rows, part.shape[1]), part.dtype) for part in ring]
        for tail, at, width in self._tail_rows(position):
            shapes.append(((tail.shape[0], at.shape[0], width), torch.float32))
        return shapes

    def _tail_rows(self, position: int) -> list[tuple[Tensor, Tensor, int]]:
        """(a tail of all layers of a kind, its rows, how many of its columns) of what a sequence needs: rows
        of the open block in full; with overlap, the first halves of the last closed block."""
        found = []
        for spec, _ in self.layout.kinds:
            tails, opened = self._tails[spec.kind, spec.ratio], position // spec.ratio * spec.ratio
            spans = [(opened, position, 1)]
            if spec.kind == "csa":
                spans.append((max(0, opened - spec.ratio), opened, 2))
            for start, stop, halves in spans:
                if start < stop:
                    at = self._span(start, stop) % self.layout.tail_rows(spec)
                    found += [(tail, at, tail.shape[3] // halves) for tail in tails]
        return found

    def drop(self, handle: int) -> None:
        """A snapshot that was never made, because a plan was interrupted, is dropped too."""
        self.snapshots.pop(handle, None)
