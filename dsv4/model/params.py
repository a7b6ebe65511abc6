"""Every weight of the model declared once: official name, shape, storage, component, how ranks share it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dsv4.config import LayerSpec, ModelConfig
from dsv4.errors import ConfigError

# linear: may be quantised. grouped: likewise, one product per output group, never with a rounded input; the
# reference turns it to BF16 when it is stored in FP8.
# plain: BF16 or F32 on disk, used as float32. table: integers.
Kind = Literal["linear", "grouped", "plain", "table"]
# How tensor-parallel ranks share a weight [N, K]: each has all of it, an equal run of its rows (heads,
# groups, expert width, vocabulary), or an equal run of its columns (ranks add up their products).
Shard = Literal["whole", "rows", "columns"]
# Sums over shared columns are made of this many equal parts, added in a balanced tree: one rank adds in the
# order of eight. A model whose sizes do not divide by it has fewer parts, and at most so many ranks.
PARTS = 8


@dataclass(frozen=True)
class Param:
    """`name` is the official one without `.weight`."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    component: str
    expert: int | None = None
    shard: Shard = "whole"

    @property
    def is_embedding(self) -> bool:
        """Whether its rows are looked up by token id, and nothing is multiplied with it."""
        return self.name == "embed" or self.name.endswith(".markov_w1")

    @property
    def stays_in_rows(self) -> bool:
        """Whether a GPU keeps its rows as they are stored: tiles would pad the few columns of markov_w2."""
        return self.is_embedding or self.name.endswith(".markov_w2")

    def shared_by(self, size: int, whole_experts: bool) -> int:
        """Of so many ranks, those that have a part of this weight each."""
        return 1 if self.shard == "whole" or (whole_experts and self.expert is not None) else size

    def span(self, rank: int, size: int) -> tuple[int, int]:
        """First and last + 1 of the rows, or columns, that belong to a rank."""
        assert self.shard != "whole"
        share = self.shape[0 if self.shard == "rows" else 1] // size
        return rank * share, (rank + 1) * share

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Of one rank's share."""
        if self.shard == "whole":
            return self.shape
        if self.shard == "rows":
            return (self.shape[0] // size, *self.shape[1:])
        return (self.shape[0], self.shape[1] // size)


def num_parts(c: ModelConfig) -> int:
    """Parts of the sums that ranks share: the most ranks that the model splits over."""
    return next(parts for parts in (8, 4, 2, 1) if not _undivided(c, parts))


def _undivided(c: ModelConfig, size: int) -> list[str]:
    sizes = (("o_groups", c.o_groups), ("expert_width", c.expert_width), ("vocab_size", c.vocab_size))
    return [f"{name} {value}" for name, value in sizes if value % size]


def own_experts(c: ModelConfig, rank: int, size: int) -> range:
    """Of each layer, where ranks have whole experts."""
    share = c.num_experts // size
    return range(rank * share, (rank + 1) * share)


def check_ranks(c: ModelConfig, size: int, whole_experts: bool = False) -> None:
    """Refuse a number of ranks that the model's sizes do not split over."""
    if whole_experts and c.num_experts % size:
        raise ConfigError(
            f"{c.num_experts} experts do not split over {size} ranks, which would have "
            f"{c.num_experts / size:g} each; leave expert_parallel out, or use a divisor of {c.num_experts}"
        )
    most = num_parts(c)
    allowed = " or ".join(str(ranks) for ranks in (1, 2, 4, 8) if ranks <= most)
    if size not in (1, 2, 4, PARTS):
        raise ConfigError(f"{size} ranks cannot share this model; use {allowed}")
    if wrong := _undivided(c, size):
        raise ConfigError(f"{', '.join(wrong)} do not split over {size} ranks; use {allowed}")


def block_params(c: ModelConfig, prefix: str, spec: LayerSpec, num_experts: int | None = None) -> list[Param]:
    """One trunk layer or draft block. `num_experts`: declare the first ones only."""
    d, n, out = c.hidden_size, c.num_streams, []

    def add(
        name: str,
        shape: tuple[int, ...],
        kind: Kind,
        component: str,
        expert: int | None = None,
        shard: Shard = "whole",
    ) -> None:
        out.append(Param(f"{prefix}.{name}", shape, kind, component, expert, shard))

    add("attn_norm", (d,), "plain", "norm")
    add("ffn_norm", (d,), "plain", "norm")
    for site in ("attn", "ffn"):
        mixes = n * (n + 2)
        add(f"hc_{site}_fn", (mixes, n * d), "plain", "mhc")
        add(f"hc_{site}_base", (mixes,), "plain", "mhc")
        add(f"hc_{site}_scale", (3,), "plain", "mhc")

    add("attn.wq_a", (c.q_rank, d), "linear", "attention")
    add("attn.q_norm", (c.q_rank,), "plain", "norm")
    add("attn.wq_b", (c.num_heads * c.head_dim, c.q_rank), "linear", "attention", shard="rows")
    add("attn.wkv", (c.head_dim, d), "linear", "attention")
    add("attn.kv_norm", (c.head_dim,), "plain", "norm")
    group = (c.o_groups * c.o_rank, c.heads_per_group * c.head_dim)
    add("attn.wo_a", group, "grouped", "attention", shard="rows")
    add("attn.wo_b", (d, c.o_groups * c.o_rank), "linear", "attention", shard="columns")
    add("attn.attn_sink", (c.num_heads,), "plain", "norm", shard="rows")

    halves = 2 if spec.kind == "csa" else 1
    if spec.ratio:
        width = halves * c.head_dim
        add("attn.compressor.wkv", (width, d), "linear", "compressor")
        add("attn.compressor.wgate", (width, d), "linear", "compressor")
        add("attn.compressor.ape", (spec.ratio, width), "plain", "compressor")
        add("attn.compressor.norm", (c.head_dim,), "plain", "compressor")
    if spec.kind == "csa":
        width = halves * c.index_dim
        add("attn.indexer.wq_b", (c.index_heads * c.index_dim, c.q_rank), "linear", "indexer")
        add("attn.indexer.weights_proj", (c.index_heads, d), "linear", "indexer")
        add("attn.indexer.compressor.wkv", (width, d), "linear", "indexer")
        add("attn.indexer.compressor.wgate", (width, d), "linear", "indexer")
        add("attn.indexer.compressor.ape", (spec.ratio, width), "plain", "indexer")
        add("attn.indexer.compressor.norm", (c.index_dim,), "plain", "indexer")

    add("ffn.gate", (c.num_experts, d), "linear", "gate")
    if spec.hash_routed:
        add("ffn.gate.tid2eid", (c.vocab_size, c.experts_per_token), "table", "hash table")
    else:
        add("ffn.gate.bias", (c.num_experts,), "plain", "gate")
    for w, shape, shard in _expert_shapes(c):
        add(f"ffn.shared_experts.{w}", shape, "linear", "shared experts", shard=shard)
    for expert in range(c.num_experts if num_experts is None else num_experts):
        for w, shape, shard in _expert_shapes(c):
            add(f"ffn.experts.{expert}.{w}", shape, "linear", "routed experts", expert, shard)
    return out


def _expert_shapes(c: ModelConfig) -> tuple[tuple[str, tuple[int, int], Shard], ...]:
    up, down = (c.expert_width, c.hidden_size), (c.hidden_size, c.expert_width)
    return (("w1", up, "rows"), ("w3", up, "rows"), ("w2", down, "columns"))


def _head_mix(c: ModelConfig, prefix: str, component: str) -> list[Param]:
    n = c.num_streams
    return [
        Param(f"{prefix}hc_head_fn", (n, n * c.hidden_size), "plain", component),
        Param(f"{prefix}hc_head_base", (n,), "plain", component),
        Param(f"{prefix}hc_head_scale", (1,), "plain", component),
    ]


def declare(c: ModelConfig, num_mtp_layers: int) -> list[Param]:
    """All weights of a model with that many draft blocks (or DSpark stages), in the order they are loaded."""
    return [*each_declared(c, num_mtp_layers)]


def each_declared(c: ModelConfig, num_mtp_layers: int) -> Iterator[Param]:
    """The same, a block at a time: of a config that may ask for more than any memory holds."""
    yield from _ends(c)
    for index, spec in enumerate(c.layers):
        yield from block_params(c, f"layers.{index}", spec)
    for index in range(num_mtp_layers):
        yield from _draft_block(c, f"mtp.{index}")
    yield from _draft_ends(c, num_mtp_layers)


def each_kind(c: ModelConfig, num_mtp_layers: int) -> Iterator[tuple[Param, int]]:
    """Each kind of weight once, and how many there are: layers of one spec are alike, and so are draft blocks
    and a block's experts."""
    yield from ((param, 1) for param in _ends(c))
    blocks = [
        (block_params(c, f"layers.{c.layers.index(spec)}", spec, num_experts=1), count)
        for spec, count in Counter(c.layers).items()
    ]
    if num_mtp_layers:
        blocks.append((_draft_block(c, "mtp.0", num_experts=1), num_mtp_layers))
        yield from ((param, 1) for param in _draft_ends(c, num_mtp_layers))
    for params, count in blocks:
        for param in params:
            yield param, count * (1 if param.expert is None else c.num_experts)


def _ends(c: ModelConfig) -> list[Param]:
    shape = (c.vocab_size, c.hidden_size)
    return [
        Param("embed", shape, "linear", "embedding", shard="rows"),
        Param("head", shape, "linear", "head", shard="rows"),
        Param("norm", (c.hidden_size,), "plain", "norm"),
        *_head_mix(c, "", "mhc"),
    ]


def _draft_block(c: ModelConfig, prefix: str, num_experts: int | None = None) -> list[Param]:
    """Declare an MTP block, or what each of DSpark's stages has."""
    d = c.hidden_size
    block = block_params(c, prefix, LayerSpec("sliding", 0, False), num_experts)
    alike = [replace(param, component="mtp") for param in block]
    if c.dspark is not None:
        return alike
    return [
        *alike,
        *(Param(f"{prefix}.{name}", (d, d), "linear", "mtp") for name in ("e_proj", "h_proj")),
        *(Param(f"{prefix}.{name}", (d,), "plain", "mtp") for name in ("enorm", "hnorm", "norm")),
        *_head_mix(c, f"{prefix}.", "mtp"),
    ]


def _draft_ends(c: ModelConfig, num_stages: int) -> Iterator[Param]:
    """Declare what only DSpark's first stage and its last one have."""
    if c.dspark is None or not num_stages:
        return
    d, rank = c.hidden_size, c.dspark.markov_rank
    yield Param("mtp.0.main_proj", (d, len(c.dspark.target_layers) * d), "linear", "mtp")
    yield Param("mtp.0.main_norm", (d,), "plain", "mtp")
    last = f"mtp.{num_stages - 1}."
    yield Param(f"{last}norm", (d,), "plain", "mtp")
    yield from _head_mix(c, last, "mtp")
    yield Param(f"{last}markov_head.markov_w1", (c.vocab_size, rank), "linear", "mtp")
    yield Param(f"{last}markov_head.markov_w2", (c.vocab_size, rank), "linear", "mtp", shard="rows")
    yield Param(f"{last}confidence_head.proj", (1, d + rank), "plain", "mtp")
