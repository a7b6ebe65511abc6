"""The cache's tensors, and all code that moves rows between sequences: claim, fork, snapshot, restore."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.layout import SPARE, CacheLayout
from dsv4.cache.pages import PagePool
from dsv4.config import LayerSpec
from dsv4.errors import RequestError
from dsv4.quant.formats import QuantTensor, empty_rows


@dataclass(frozen=True)
class Tail:
    """Compressor rows that a later block may need: [slots, rows, width] float32, at position mod rows."""

    values: Tensor
    scores: Tensor

    @property
    def num_rows(self) -> int:
        return self.values.shape[1]

    def put(self, tokens: Tensor | None, rows: Tensor, values: Tensor, scores: Tensor) -> None:
        """Write these tokens (None: all) at `rows`, each slot * num_rows + position mod num_rows."""
        for store, fresh in ((self.values, values), (self.scores, scores)):
            store.flatten(0, 1).index_copy_(0, rows, fresh if tokens is None else fresh[tokens])


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
    """All state of all running sequences. A sequence is a slot: rows in every ring and tail, and pages."""

    def __init__(self, layout: CacheLayout, device: str | torch.device, dtype: torch.dtype) -> None:
        assert dtype.itemsize == layout.rope_itemsize, (dtype, layout.rope_itemsize)
        self.layout = layout
        self.pool = PagePool(layout.num_pages)
        self.page_table = torch.zeros(
            layout.num_slots, layout.pages_per_sequence, dtype=torch.int32, device=device
        )
        self.layers = [self._layer(spec, device, dtype) for spec in layout.layers]
        self._pages: list[list[int] | None] = [None] * layout.num_slots

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

    @property
    def num_free_slots(self) -> int:
        return sum(pages is None for pages in self._pages)

    def capacity(self, slot: int) -> int:
        """Tokens that the slot's pages can hold."""
        return len(self._pages[slot] or ()) * self.layout.page_tokens

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.layout.page_tokens)

    def claim(self, tokens: int, shared: Sequence[int] = ()) -> int | None:
        """A slot with pages for that many tokens, or None while the cache is full.

        The `shared` pages, which somebody holds, come first; who shares entries also restores a snapshot.
        """
        self._check_fits(tokens)
        if None not in self._pages:
            return None
        # Held before room is made, which could otherwise give up the very pages that are to be shared.
        first = list(shared)
        self.pool.share(first)
        need = self.pages_for(tokens) - len(first)
        if not self.pool.make_room(need):
            self.pool.release(first)
            return None
        slot = self._pages.index(None)
        self._set_pages(slot, first + self.pool.take(need))
        return slot

    def grow(self, slot: int, tokens: int) -> bool:
        """Give `slot` pages for that many tokens in all; False while the cache is full."""
        self._check_fits(tokens)
        pages = self._pages[slot]
        assert pages is not None, f"slot {slot} is not in use"
        need = self.pages_for(tokens) - len(pages)
        if need <= 0:
            return True
        if not self.pool.make_room(need):
            return False
        self._set_pages(slot, pages + self.pool.take(need))
        return True

    def page_at(self, slot: int, position: int) -> int:
        """The page that holds the entries of this position."""
        pages = self._pages[slot]
        assert pages is not None, f"slot {slot} is not in use"
        return pages[position // self.layout.page_tokens]

    def _check_fits(self, tokens: int) -> None:
        if self.pages_for(tokens) > self.layout.pages_per_sequence:
            raise RequestError(
                f"{tokens} tokens do not fit a cache made for {self.layout.max_context} per sequence; "
                "shorten the request or raise max_context"
            )

    def _set_pages(self, slot: int, pages: list[int]) -> None:
        self._pages[slot] = pages
        self.page_table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def release(self, slot: int) -> None:
        pages = self._pages[slot]
        assert pages is not None, f"slot {slot} is not in use"
        self._pages[slot] = None
        self.pool.release(pages)

    def fork(self, source: int, position: int, tokens: int) -> int | None:
        """A new slot that shares the entries of `source` before `position`, or None while the cache is full.

        Whole pages are shared by reference, a started one is copied. Rings and tails are not copied:
        restore a snapshot taken at `position` into the new slot.
        """
        self._check_fits(tokens)
        donor = self._pages[source]
        assert donor is not None, f"slot {source} is not in use"
        assert position <= tokens and self.pages_for(position) <= len(donor), (position, tokens, len(donor))
        whole, rest = divmod(position, self.layout.page_tokens)
        own = self.pages_for(tokens) - whole
        if None not in self._pages or not self.pool.make_room(own):
            return None
        slot = self._pages.index(None)
        self.pool.share(donor[:whole])
        self._set_pages(slot, donor[:whole] + self.pool.take(own))
        if rest:
            self._copy_page(donor[whole], self._pages[slot][whole])  # type: ignore[index]
        return slot

    def _copy_page(self, source: int, target: int) -> None:
        for layer in self.layers:
            for store in (layer.entries, layer.keys):
                if store is not None:
                    rows = torch.arange(layer.page_entries, device=store.data.device)
                    store.put(
                        target * layer.page_entries + rows, store.take(source * layer.page_entries + rows)
                    )

    def _span(self, start: int, stop: int) -> Tensor:
        return torch.arange(max(0, start), stop, device=self.page_table.device)

    def snapshot(self, slot: int, position: int) -> Snapshot:
        """What `slot` needs besides its entries to go on after `position` processed tokens."""
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
        return Snapshot(position, tuple(windows), tuple(tails))

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Make `slot` as it was at the snapshot's position; its pages must hold the entries before it."""
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

    @staticmethod
    def check_rollback(length: int, new_length: int) -> None:
        """Going back is free while short: every row is found by position, and entries turn invisible."""
        if not length - SPARE <= new_length <= length:
            raise RequestError(
                f"rollback from {length} to {new_length} tokens; at most {SPARE} can be taken back, "
                "restore a snapshot instead"
            )
