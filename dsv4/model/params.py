"""Every weight of the model declared once: official name, shape, how it may be stored, what it belongs to."""

from dataclasses import dataclass
from typing import Literal

from dsv4.config import LayerSpec, ModelConfig

# linear: may be quantised. grouped: likewise, one product per output group, never with a rounded input; the
# reference turns it to BF16 when it is stored in FP8.
# plain: BF16 or F32 on disk, used as float32. table: integers.
Kind = Literal["linear", "grouped", "plain", "table"]


@dataclass(frozen=True)
class Param:
    """`name` is the official one without `.weight`."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    component: str
    expert: int | None = None


def block_params(c: ModelConfig, prefix: str, spec: LayerSpec) -> list[Param]:
    """One trunk layer or draft block."""
    d, n, out = c.hidden_size, c.num_streams, []

    def add(name: str, shape: tuple[int, ...], kind: Kind, component: str, expert: int | None = None) -> None:
        out.append(Param(f"{prefix}.{name}", shape, kind, component, expert))

    add("attn_norm", (d,), "plain", "norm")
    add("ffn_norm", (d,), "plain", "norm")
    for site in ("attn", "ffn"):
        mixes = n * (n + 2)
        add(f"hc_{site}_fn", (mixes, n * d), "plain", "mhc")
        add(f"hc_{site}_base", (mixes,), "plain", "mhc")
        add(f"hc_{site}_scale", (3,), "plain", "mhc")

    add("attn.wq_a", (c.q_rank, d), "linear", "attention")
    add("attn.q_norm", (c.q_rank,), "plain", "norm")
    add("attn.wq_b", (c.num_heads * c.head_dim, c.q_rank), "linear", "attention")
    add("attn.wkv", (c.head_dim, d), "linear", "attention")
    add("attn.kv_norm", (c.head_dim,), "plain", "norm")
    add("attn.wo_a", (c.o_groups * c.o_rank, c.heads_per_group * c.head_dim), "grouped", "attention")
    add("attn.wo_b", (d, c.o_groups * c.o_rank), "linear", "attention")
    add("attn.attn_sink", (c.num_heads,), "plain", "norm")

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
    for w, shape in _expert_shapes(c):
        add(f"ffn.shared_experts.{w}", shape, "linear", "shared experts")
    for expert in range(c.num_experts):
        for w, shape in _expert_shapes(c):
            add(f"ffn.experts.{expert}.{w}", shape, "linear", "routed experts", expert)
    return out


def _expert_shapes(c: ModelConfig) -> tuple[tuple[str, tuple[int, int]], ...]:
    up, down = (c.expert_width, c.hidden_size), (c.hidden_size, c.expert_width)
    return (("w1", up), ("w3", up), ("w2", down))


def _head_mix(c: ModelConfig, prefix: str, component: str) -> list[Param]:
    n = c.num_streams
    return [
        Param(f"{prefix}hc_head_fn", (n, n * c.hidden_size), "plain", component),
        Param(f"{prefix}hc_head_base", (n,), "plain", component),
        Param(f"{prefix}hc_head_scale", (1,), "plain", component),
    ]


def declare(c: ModelConfig, num_mtp_layers: int) -> list[Param]:
    """All weights of a model with that many draft blocks, in the order they are loaded."""
    d = c.hidden_size
    out = [
        Param("embed", (c.vocab_size, d), "linear", "embedding"),
        Param("head", (c.vocab_size, d), "linear", "head"),
        Param("norm", (d,), "plain", "norm"),
        *_head_mix(c, "", "mhc"),
    ]
    for index, spec in enumerate(c.layers):
        out += block_params(c, f"layers.{index}", spec)
    for index in range(num_mtp_layers):
        prefix = f"mtp.{index}"
        block = block_params(c, prefix, LayerSpec("sliding", 0, False))
        out += [Param(p.name, p.shape, p.kind, "mtp", p.expert) for p in block]
        out += [Param(f"{prefix}.{name}", (d, d), "linear", "mtp") for name in ("e_proj", "h_proj")]
        out += [Param(f"{prefix}.{name}", (d,), "plain", "mtp") for name in ("enorm", "hnorm", "norm")]
        out += _head_mix(c, f"{prefix}.", "mtp")
    return out
