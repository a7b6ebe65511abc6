"""Refuses a model whose sizes the GPU kernels cannot take, by the limits that their launchers assert.

Runs once, before weights are read. Imports Triton, through the kernels it asks.
"""

from dsv4.config import ModelConfig
from dsv4.errors import ConfigError
from dsv4.kernels.common.tiles import ROWS as TILE_ROWS
from dsv4.kernels.decode import attend, choose, index, matvec, mhc, sample
from dsv4.model.buffers import ROWS

_K_STEP = 4  # a weight's columns come in fours
_ALIGNED = 8  # values from which a product may read its input: 16 bytes of BF16


def check_sizes(c: ModelConfig, max_context: int = 0, capability: int = 90) -> None:
    """`max_context`: tokens of a sequence that the cache is made for. `capability`: of the GPU, as 90."""
    if found := problems(c, max_context, capability):
        raise ConfigError(f"the GPU kernels cannot run a model of {'; '.join(found)}; use --device cpu")


def problems(c: ModelConfig, max_context: int = 0, capability: int = 90) -> list[str]:
    """Each size that is wrong: its name, its value and what was expected."""
    group, depth = c.heads_per_group * c.head_dim, matvec.MAX_DEPTH
    output, deepest = c.o_groups * c.o_rank, matvec.MAX_SEGMENTS * matvec.MAX_SLICES * matvec.SLICE
    key_least = max(index.MIN_CHANNELS, c.rope_dim)
    entries = max((max_context // layer.ratio for layer in c.layers if layer.kind == "csa"), default=0)
    most_entries = choose.max_entries(capability)
    most_chosen = min(choose.MAX_PAIRS // ROWS[-1], choose.MAX_CHOICES)
    wrong = [
        (c.num_streams != mhc.STREAMS, f"{c.num_streams} streams, expected {mhc.STREAMS}"),
        (
            c.hidden_size % mhc.ITEM > 0 or c.hidden_size > min(mhc.MAX_CHANNELS, depth),
            f"hidden size {c.hidden_size}, expected a multiple of {mhc.ITEM} up to "
            f"{min(mhc.MAX_CHANNELS, depth)}",
        ),
        _wrong_depth("query rank", c.q_rank, _K_STEP),
        _wrong_depth("expert width", c.expert_width, _K_STEP),
        _wrong_depth("heads of an output group with", group, _ALIGNED, " channels together"),
        (c.o_rank % TILE_ROWS > 0, f"output rank {c.o_rank}, expected a multiple of {TILE_ROWS}"),
        (
            c.o_groups > matvec.MAX_SEGMENTS,
            f"{c.o_groups} output groups, expected at most {matvec.MAX_SEGMENTS}",
        ),
        (output > deepest, f"output groups of {output} ranks together, expected at most {deepest}"),
        (
            c.head_dim > attend.MAX_CHANNELS,
            f"heads of {c.head_dim} channels, expected at most {attend.MAX_CHANNELS}",
        ),
        (
            c.nope_dim < 1 or c.nope_dim % attend.ALIGNED > 0,
            f"{c.nope_dim} channels of a head without rotation, expected a multiple of {attend.ALIGNED}",
        ),
        (
            c.num_experts > choose.MAX_EXPERTS,
            f"{c.num_experts} experts, expected at most {choose.MAX_EXPERTS}",
        ),
        (
            c.experts_per_token > most_chosen,
            f"{c.experts_per_token} experts per token, expected at most {most_chosen}",
        ),
        (
            c.index_dim & (c.index_dim - 1) > 0 or not key_least <= c.index_dim <= index.MAX_CHANNELS,
            f"index keys of {c.index_dim} channels, expected a power of two from {key_least} to "
            f"{index.MAX_CHANNELS}",
        ),
        (
            c.index_heads > index.MAX_HEADS,
            f"{c.index_heads} index heads, expected at most {index.MAX_HEADS}",
        ),
        (
            c.index_topk > choose.MAX_TOPK,
            f"{c.index_topk} entries to select, expected at most {choose.MAX_TOPK}",
        ),
        (
            c.vocab_size > sample.MAX_VOCAB,
            f"a vocabulary of {c.vocab_size}, expected at most {sample.MAX_VOCAB}",
        ),
        (
            entries > most_entries,
            f"{entries} compressed entries to select from (max_context {max_context}), expected at most "
            f"{most_entries}",
        ),
    ]
    return [text for is_wrong, text in wrong if is_wrong]


def _wrong_depth(name: str, value: int, step: int, what: str = "") -> tuple[bool, str]:
    """Of an input of a product, whose weight has so many columns."""
    most = matvec.MAX_DEPTH
    is_wrong = value % step > 0 or value > most
    return is_wrong, f"{name} {value}{what}, expected a multiple of {step} up to {most}"
