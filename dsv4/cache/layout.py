"""How many rows and bytes each layer kind keeps. Arithmetic only: no tensor is made here."""

import math
from dataclasses import dataclass

from dsv4.config import LayerSpec, ModelConfig
from dsv4.errors import ConfigError
from dsv4.quant.formats import MX_BLOCK, Format, scale_bytes

# Tokens that may lie beyond the committed length (drafts): rings are this much longer than attention needs.
SPARE = 8
# Proposals of an MTP block that feeds on its own: further ones are hardly ever right.
MTP_STEPS = 3
# A page covers at least this many tokens, and whole blocks of every compression ratio.
MIN_PAGE_TOKENS = 256


def most_drafts(c: ModelConfig) -> int:
    """Tokens that the model's drafter can propose in a step."""
    return MTP_STEPS if c.dspark is None else min(c.dspark.block_size, SPARE - 1)


@dataclass(frozen=True)
class CacheLayout:
    """Sizes of an engine's cache. `rope_itemsize` is that of the compute type: 2 makes the 584-byte entry."""

    config: ModelConfig
    kv_format: Format
    key_format: Format
    rope_itemsize: int
    max_context: int
    num_slots: int
    num_mtp_layers: int
    max_snapshots: int = 0
    max_pages: int | None = None  # None: enough for all slots at once

    def __post_init__(self) -> None:
        if self.num_pages < self.pages_per_sequence:
            raise ConfigError(
                f"cache_pages is {self.num_pages}, but one sequence of max_context {self.max_context} needs "
                f"{self.pages_per_sequence}; raise cache_pages or lower max_context"
            )

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Trunk layers, then the draft blocks, which are sliding."""
        return self.config.layers + (LayerSpec("sliding", 0, False),) * self.num_mtp_layers

    @property
    def kinds(self) -> list[tuple[LayerSpec, int]]:
        """Layers that compress, by kind and ratio: the first of each, and how many there are."""
        alike = [(layer.kind, layer.ratio) for layer in self.layers if layer.ratio]
        first = {(layer.kind, layer.ratio): layer for layer in reversed(self.layers) if layer.ratio}
        return [(first[kind], alike.count(kind)) for kind in sorted(first)]

    @property
    def ring_rows(self) -> int:
        return self.config.window + SPARE

    @property
    def num_states(self) -> int:
        """Rings and tails of a layer: those of slots and, where snapshots are made, one for a state that a
        step has passed."""
        return self.num_slots + bool(self.max_snapshots)

    @property
    def layer_rows(self) -> int:
        """Rows of a layer's rings, padded: whatever a row's bytes are, a layer's begin at 16 of them."""
        return -(-self.num_states * self.ring_rows // 16) * 16

    @property
    def least_before_mark(self) -> int:
        """Tokens that a step must read before a page's end for the state there to be kept."""
        return max(self.config.window - 1, *(spec.ratio for spec, _ in self.kinds), 1)

    @property
    def page_tokens(self) -> int:
        ratios = [layer.ratio for layer in self.layers if layer.ratio]
        return math.lcm(*ratios, MIN_PAGE_TOKENS)

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.max_context // self.page_tokens)

    @property
    def num_pages(self) -> int:
        return self.max_pages or self.num_slots * self.pages_per_sequence

    def page_entries(self, layer: LayerSpec) -> int:
        return self.page_tokens // layer.ratio

    @staticmethod
    def tail_rows(layer: LayerSpec) -> int:
        """Position-addressed rows of (value, score) that a block can still need, drafts included."""
        return layer.ratio * (2 if layer.kind == "csa" else 1) + SPARE

    @property
    def entry_bytes(self) -> int:
        c = self.config
        if self.kv_format is Format.KV8:
            return c.nope_dim + c.rope_dim * self.rope_itemsize + scale_bytes(c.nope_dim)
        return c.head_dim * (2 if self.kv_format is Format.BF16 else 4)

    @property
    def key_bytes(self) -> int:
        d = self.config.index_dim
        if self.key_format is Format.MXFP4:
            return d // 2 + -(-d // MX_BLOCK)
        return d * (2 if self.key_format is Format.BF16 else 4)

    def tail_widths(self, layer: LayerSpec) -> tuple[int, ...]:
        """Columns of the tails of a layer: with overlap both halves, and the indexer's beside the entry's."""
        c = self.config
        return (2 * c.head_dim, 2 * c.index_dim) if layer.kind == "csa" else (c.head_dim,)

    def tail_width(self, layer: LayerSpec) -> int:
        return sum(self.tail_widths(layer))

    def tail_bytes(self) -> int:
        """float32 tails (values and scores) of one sequence, as long as the reference's: without drafts."""
        return sum(
            2 * 4 * (self.tail_rows(layer) - SPARE) * self.tail_width(layer)
            for layer in self.layers
            if layer.ratio
        )

    def sequence_bytes(self, tokens: int) -> int:
        """What one sequence of that length needs: entries, keys, windows and tails of all layers."""
        total = len(self.layers) * self.config.window * self.entry_bytes + self.tail_bytes()
        for layer in self.layers:
            if layer.ratio:
                per_block = self.entry_bytes + (self.key_bytes if layer.kind == "csa" else 0)
                total += tokens // layer.ratio * per_block
        return total

    def read_bytes(self, tokens: int) -> int:
        """What one decoded token reads with that many before it: windows, chosen or all entries, all keys."""
        total = self.config.num_layers * self.config.window * self.entry_bytes
        for layer in self.config.layers:
            if layer.kind == "csa":
                visible = tokens // layer.ratio
                total += min(self.config.index_topk, visible) * self.entry_bytes + visible * self.key_bytes
            elif layer.ratio:
                total += tokens // layer.ratio * self.entry_bytes
        return total

    def pool_bytes(self) -> int:
        """Entries and index keys of all pages: the part that grows with the context."""
        return sum(
            self.num_pages
            * self.page_entries(layer)
            * (self.entry_bytes + (self.key_bytes if layer.kind == "csa" else 0))
            for layer in self.layers
            if layer.ratio
        )

    def state_bytes(self) -> int:
        """Rings, tails and the page table of all slots: hardly grows with the context."""
        total = len(self.layers) * self.layer_rows * self.entry_bytes
        total += self.num_slots * self.pages_per_sequence * 4
        for layer in self.layers:
            if layer.ratio:
                total += self.num_states * self.tail_rows(layer) * 2 * 4 * self.tail_width(layer)
        return total

    def snapshot_bytes(self) -> int:
        """One snapshot at the end of a page, where all blocks are closed: windows, and rows for overlap."""
        total = len(self.layers) * (self.config.window - 1) * self.entry_bytes
        return total + sum(4 * la.ratio * self.tail_width(la) for la in self.layers if la.kind == "csa")

    def store_bytes(self) -> int:
        """What the engine allocates for all slots and pages, and for snapshots as they are made."""
        return self.pool_bytes() + self.state_bytes() + self.max_snapshots * self.snapshot_bytes()
