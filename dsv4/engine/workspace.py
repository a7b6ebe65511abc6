"""What one step of the reference takes and gives back: stage by stage, the tensors that are alive at once.

Counted from the ops' `cpu.py`; tests/lab/test_workspace.py holds it against what steps really take.
"""

import math
from dataclasses import dataclass, replace

from dsv4.cache.layout import CacheLayout
from dsv4.config import ModelConfig
from dsv4.model.params import declare, num_parts
from dsv4.ops._exact import padded
from dsv4.ops.attention.cpu import BLOCK, MASKS, raw_columns
from dsv4.ops.experts.cpu import FEW
from dsv4.quant.formats import FP8_TILE

# Bytes of a weight's value that is decoded: itself, and again in the order that products read.
DECODED = 8
# Bytes of a logit: as the product left it in pieces and whole, or while a token is drawn and its alternatives
# are listed (ops/sample/cpu.py: double and int64 for the most part).
SAMPLED = 117
# Rows of a prompt's logits that are made at a time: a long one's would take a gigabyte.
SCORED_ROWS = 64
# For what has no line here: a few numbers a token, and what products are padded with.
MARGIN = 1.02


@dataclass(frozen=True)
class Workspace:
    """`tokens` of one pass, `rows` of which give logits; `ranks` share heads, experts and vocabulary.
    `decoded`: values of the largest weight that is decoded at every use, 0 where none is."""

    layout: CacheLayout
    tokens: int
    rows: int
    decoded: int
    ranks: int = 1
    drafts: int = 0

    @classmethod
    def of(
        cls, layout: CacheLayout, chunk: int, decoded: int, ranks: int = 1, drafts: int = 0
    ) -> "Workspace":
        """Of an engine whose prompts are read in chunks, and whose sequences have so many drafts."""
        least = layout.num_slots * (1 + drafts)
        tokens = max(least, min(chunk, layout.num_slots * layout.max_context))
        rows = max(least, min(tokens, SCORED_ROWS))
        return cls(layout, tokens, rows, decoded, ranks, drafts)

    @property
    def num_bytes(self) -> int:
        stages = (self.mixing, self.pooling, self.selection, self.attention, self.projection, self.experts)
        return int(MARGIN * max(self.tokens * self.alive + max(stages), self.logits)) + self.masks

    @property
    def c(self) -> ModelConfig:
        return self.layout.config

    @property
    def size(self) -> int:
        """Bytes of a value in the compute type."""
        return self.layout.rope_itemsize

    @property
    def heads(self) -> int:
        """Values of a token's queries."""
        return self.c.num_heads * self.c.head_dim // self.ranks

    @property
    def parts(self) -> int:
        """Of every sum over experts and output groups: added up at the end."""
        return num_parts(self.c) // self.ranks

    @property
    def run(self) -> int:
        """Queries that attention and the indexer take at a time."""
        return min(self.tokens, BLOCK)

    @property
    def visible(self) -> dict[str, int]:
        """Entries that a query sees, by kind of layer; of a CSA layer before they are selected."""
        ratios = {layer.kind: layer.ratio for layer in self.c.layers if layer.ratio}
        return {kind: self.layout.max_context // ratio for kind, ratio in ratios.items()}

    @property
    def raw(self) -> int:
        """Keys of the window that a run of queries sees."""
        return raw_columns(min(self.c.window, self.layout.max_context))

    @property
    def selects(self) -> bool:
        return self.visible.get("csa", 0) > self.c.index_topk

    @property
    def listed(self) -> dict[str, int]:
        """Entries that a query attends to."""
        return {k: min(n, self.c.index_topk) if k == "csa" else n for k, n in self.visible.items()}

    @property
    def masks(self) -> int:
        """Where queries of a run do not look: kept for other layers and sequences."""
        columns = self.raw + padded(max(self.listed.values(), default=0))
        return 4 * MASKS * self.run * columns

    @property
    def alive(self) -> int:
        """Of a token, all the time: streams, a block's input, rotations, lists of entries."""
        c, listed = self.c, self.listed
        lists = 8 * listed.get("hca", 0) + (24 if self.selects else 8) * listed.get("csa", 0)
        streams = c.num_streams * c.hidden_size * (2 if self.drafts else 1)  # those that a draft is made from
        return self.size * (streams + c.hidden_size) + 12 * c.rope_dim + 16 * c.num_streams**2 + lists + 256

    @property
    def queries(self) -> int:
        """Of a token, until attention has ended: beside its queries."""
        return self.size * (self.heads + self.c.q_rank + self.c.head_dim) + self.layout.entry_bytes

    @property
    def mixing(self) -> int:
        """Every stream goes into every other one."""
        c = self.c
        wide = 4 * c.num_streams * c.hidden_size * max(c.num_streams + 1, 3)
        return self.tokens * (wide + self.size * c.hidden_size)

    @property
    def pooling(self) -> int:
        """Rows of the blocks that close: of this step, of the tail, one or the other; values and scores."""
        most = 0
        for layer in self.c.layers:
            if layer.ratio:
                both = 2 if layer.kind == "csa" else 1  # blocks that overlap, and twice the channels
                row = 4 * both * self.c.head_dim
                closing = self.tokens // layer.ratio + self.layout.num_slots
                blocks = min(self.tokens, closing) * layer.ratio * both
                most = max(most, 2 * row * self.tokens + (4 * row + 64) * blocks)
        return self.tokens * self.queries + most

    @property
    def selection(self) -> int:
        """The indexer's queries, rounded; then the scores of a run of them, by head."""
        c, keys = self.c, padded(self.visible.get("csa", 0))
        if not self.selects:
            return 0
        wide = c.index_heads * c.index_dim
        of_key = max(8 * c.index_dim, 4 * c.index_dim + 12 * self.run * c.index_heads + 8 * self.run)
        scored = self.tokens * (self.size * wide + 12 * c.index_heads) + keys * (of_key + 16)
        return self.tokens * self.queries + max(32 * self.tokens * wide, scored)

    @property
    def attention(self) -> int:
        """Queries before and after norm and rotation, and the results; of a run its keys, decoded and laid
        out, those of the run before it, and the scores."""
        c, size, run = self.c, self.size, self.run
        rotated = (4 if size == 4 else 10) * c.rope_dim * (self.heads // c.head_dim)
        whole = max(8, 3 * size) * self.heads + rotated
        most, kept, raw, row = 0, 2 * size * self.heads, self.raw, 4 * c.head_dim
        for kind, count in {"sliding": 0, **self.listed}.items():
            # Whoever selects has entries of its own; else a run shares what its last query sees.
            own = run if kind == "csa" and self.selects else 1
            keys, columns = raw + own * count, raw + padded(count)
            taken, values, tile = self.layout.entry_bytes * keys, row * keys, row * own * columns
            apart = row * (raw + (own + 1) * padded(count)) if own > 1 else 0
            scores = 12 * run * columns * (self.heads // c.head_dim) + 8 * run * self.heads
            left = tile + values + taken  # by the last run, until all are rotated back
            of_run = left + max(2 * values + taken, tile + apart, scores)
            most = max(most, self.tokens * kept + of_run, self.tokens * whole + left)
        return self.tokens * self.queries + most

    @property
    def projection(self) -> int:
        """Attention's results, through output groups, to parts of a sum: each by itself, then together."""
        c = self.c
        groups = self.size * c.o_groups * c.o_rank // self.ranks
        weight = DECODED * _largest_of_a_layer(c) // self.ranks if self.decoded else 0
        return self.tokens * (self.queries + groups + 8 * self.parts * c.hidden_size) + weight

    @property
    def experts(self) -> int:
        """What the chosen experts give, in parts: expert by expert, together, and in the tokens' order."""
        c, choices = self.c, self.tokens * self.c.experts_per_token
        made, width = 4 * self.parts * c.hidden_size, c.expert_width // self.ranks
        rows = choices + (FEW - 1) * min(choices, c.num_experts)
        inside = (4 if self.size == 4 else 4 + self.size) * c.hidden_size
        together = rows * (2 * made + inside + 12 * width)
        added = 2 * choices * made + 2 * self.tokens * made
        weight = DECODED * _tiled(c.hidden_size, width) if self.decoded else 0
        return self.tokens * made + max(together + weight, added, rows * (inside + 24 * width) + weight)

    @property
    def logits(self) -> int:
        c = self.c
        streams = self.tokens * self.size * c.num_streams * c.hidden_size
        return streams + self.rows * SAMPLED * c.vocab_size // self.ranks + DECODED * self.decoded


def _largest_of_a_layer(c: ModelConfig) -> int:
    """Values of the largest weight of any layer; the head is none of them."""
    layers = {layer.kind: layer for layer in c.layers}
    declared = declare(replace(c, num_experts=1, layers=tuple(layers.values())), 0)
    products = [p for p in declared if p.kind in ("linear", "grouped") and p.name.startswith("layers.")]
    return max(_tiled(*p.shape) for p in products)


def _tiled(rows: int, columns: int) -> int:
    """Values of a weight in whole tiles, as FP8 is decoded."""
    return math.prod(-(-n // FP8_TILE) * FP8_TILE for n in (rows, columns))
