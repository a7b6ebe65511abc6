"""Refuses a model whose sizes the GPU kernels cannot take, by the limits that their launchers assert.

Runs once, before weights are read; `dsv4 plan` asks the same. Without torch.
"""

from dsv4.config import ModelConfig
from dsv4.errors import ConfigError
from dsv4.gpu.architectures import ARCHITECTURES
from dsv4.gpu.shapes import (
    MAX_HEAD_DIM,
    MAX_INDEX_DIM,
    MAX_INDEX_HEADS,
    MAX_POOLED,
    MIN_INDEX_DIM,
    MIX_CHUNK,
    NOPE_ALIGNED,
    mix_chunks,
)
from dsv4.gpu.shapes import ROWS as TILE_ROWS

# Limits of the launchers, whose modules import torch; tests/engine/test_gpu_sizes.py holds them equal.
MAX_ROWS = 32  # of a decode step's graph
MAX_DEPTH, MAX_SEGMENTS, DEEPEST = 8192, 16, 65536  # columns of a product that is one sum; sums; of all
MAX_EXPERTS, MAX_CHOICES, MAX_PAIRS, MAX_TOPK = 512, 32, 1024, 8192
STREAMS, ITEM, MAX_CHANNELS, SHARED_BLOCKS = 4, 8, 8192, 4
MAX_VOCAB = 1 << 18
CLUSTER, CLUSTER_SHARED = 8, 5464  # blocks that select the entries of a row; bytes each has for itself
_K_STEP = 4  # a weight's columns come in fours
_ALIGNED = 8  # values from which a product may read its input: 16 bytes of BF16
H200_MULTIPROCESSORS = 132


def check_sizes(
    c: ModelConfig,
    max_context: int = 0,
    capability: int = 90,
    multiprocessors: int = H200_MULTIPROCESSORS,
    ranks: int = 1,
) -> None:
    """As `problems`, which it raises."""
    if found := problems(
        c, max_context=max_context, capability=capability, multiprocessors=multiprocessors, ranks=ranks
    ):
        raise ConfigError(f"the GPU kernels cannot run a model of {'; '.join(found)}; use --device cpu")


def problems(
    c: ModelConfig,
    max_context: int = 0,
    capability: int = 90,
    multiprocessors: int = H200_MULTIPROCESSORS,
    ranks: int = 1,
) -> list[str]:
    """Each size that is wrong: its name, its value and what was expected.

    `max_context`: tokens of a sequence that the cache is made for. `capability` and `multiprocessors`: of the
    GPU, the first as 90. `ranks`: that share the model.
    """
    group, output = c.heads_per_group * c.head_dim, c.o_groups * c.o_rank
    key_least = max(MIN_INDEX_DIM, c.rope_dim)
    ratio = min((layer.ratio for layer in c.layers if layer.kind == "csa"), default=0)
    entries = max_context // ratio if ratio else 0
    most_entries = CLUSTER * (ARCHITECTURES[capability].block_shared - CLUSTER_SHARED) // 4
    most_chosen = min(MAX_PAIRS // MAX_ROWS, MAX_CHOICES, c.num_experts)
    pooled = max((layer.ratio * (1 + (layer.kind == "csa")) for layer in c.layers), default=0)
    share, resident = c.expert_width // ranks, multiprocessors * SHARED_BLOCKS
    wrong = [
        (c.num_streams != STREAMS, f"{c.num_streams} streams, expected {STREAMS}"),
        (
            c.hidden_size % ITEM > 0 or c.hidden_size > MAX_CHANNELS,
            f"hidden size {c.hidden_size}, expected a multiple of {ITEM} up to {MAX_CHANNELS}",
        ),
        _wrong_depth("query rank", c.q_rank, _K_STEP),
        _wrong_depth("expert width", c.expert_width, _K_STEP),
        (
            ranks > 1 and share % _K_STEP > 0,
            f"expert width {c.expert_width} over {ranks} ranks, {share} each, expected a multiple of "
            f"{_K_STEP}",
        ),
        (
            ranks > 1 and mix_chunks(c.hidden_size) > resident,
            f"hidden size {c.hidden_size} over {ranks} ranks, expected at most {resident * MIX_CHUNK} with "
            f"{multiprocessors} multiprocessors",
        ),
        _wrong_depth("heads of an output group with", group, _ALIGNED, " channels together"),
        (c.o_rank % TILE_ROWS > 0, f"output rank {c.o_rank}, expected a multiple of {TILE_ROWS}"),
        (
            c.o_groups > MAX_SEGMENTS,
            f"{c.o_groups} output groups, expected at most {MAX_SEGMENTS}",
        ),
        (output > DEEPEST, f"output groups of {output} ranks together, expected at most {DEEPEST}"),
        (
            c.head_dim > MAX_HEAD_DIM,
            f"heads of {c.head_dim} channels, expected at most {MAX_HEAD_DIM}",
        ),
        (
            c.nope_dim < 1 or c.nope_dim % NOPE_ALIGNED > 0,
            f"{c.nope_dim} channels of a head without rotation, expected a multiple of {NOPE_ALIGNED}",
        ),
        (
            c.num_experts > MAX_EXPERTS,
            f"{c.num_experts} experts, expected at most {MAX_EXPERTS}",
        ),
        (
            c.experts_per_token > most_chosen,
            f"{c.experts_per_token} experts per token, expected at most {most_chosen}",
        ),
        (
            c.index_dim & (c.index_dim - 1) > 0 or not key_least <= c.index_dim <= MAX_INDEX_DIM,
            f"index keys of {c.index_dim} channels, expected a power of two from {key_least} to "
            f"{MAX_INDEX_DIM}",
        ),
        (
            c.index_heads > MAX_INDEX_HEADS,
            f"{c.index_heads} index heads, expected at most {MAX_INDEX_HEADS}",
        ),
        (
            c.index_topk > MAX_TOPK,
            f"{c.index_topk} entries to select, expected at most {MAX_TOPK}",
        ),
        (
            c.vocab_size > MAX_VOCAB,
            f"a vocabulary of {c.vocab_size}, expected at most {MAX_VOCAB}",
        ),
        (
            pooled > MAX_POOLED,
            f"entries made of {pooled} tokens, expected at most {MAX_POOLED}",
        ),
        (
            entries > most_entries,
            f"{entries} compressed entries to select from (max_context {max_context}), expected at most "
            f"{most_entries} (max_context {ratio * most_entries})",
        ),
    ]
    return [text for is_wrong, text in wrong if is_wrong]


def _wrong_depth(name: str, value: int, step: int, what: str = "") -> tuple[bool, str]:
    """Of an input of a product, whose weight has so many columns."""
    most = MAX_DEPTH
    is_wrong = value % step > 0 or value > most
    return is_wrong, f"{name} {value}{what}, expected a multiple of {step} up to {most}"
