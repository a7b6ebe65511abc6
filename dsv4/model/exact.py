"""How this machine multiplies the model's shapes, and which functions run row by row: settled at start."""

from dataclasses import dataclass, replace

import torch

from dsv4.config import ModelConfig
from dsv4.model.params import Param, declare, num_parts
from dsv4.ops import _exact
from dsv4.ops._memory import recall, remember
from dsv4.ops._product import (
    BATCHED,
    Product,
    Shape,
    batch_name,
    columns_name,
    has_free_columns,
    is_one_call,
    settle,
)
from dsv4.ops.attention.cpu import BLOCK, raw_columns
from dsv4.ops.mhc.cpu import sinkhorn

FUNCTIONS = (
    *(_exact.exp, _exact.total, _exact.mean_square, _exact.sigmoid, _exact.silu, _exact.softplus),
    sinkhorn,
)
# Numbers of entries and of raw keys that a start looks at; larger ones are measured when a context reaches
# them.
MOST = 1024
ENTRIES = sorted({_exact.padded(count) for count in range(MOST + 1)})


@dataclass(frozen=True)
class Exact:
    """`products` by shape, `one_by_one`: batches and functions whose rows show when run at once."""

    products: dict[str, Product]
    one_by_one: tuple[str, ...]
    notes: tuple[str, ...]


def settle_exact(
    config: ModelConfig,
    num_mtp_layers: int,
    max_context: int,
    device: torch.device,
    threads: int,
    ranks: int = 1,
    whole_experts: bool = False,
) -> Exact:
    """Measure what is not remembered, with that many threads in use, and remember it."""
    listed, scored = _entries(config, max_context)
    shapes = weight_shapes(config, num_mtp_layers, ranks, whole_experts)
    columns = _columns(config, max_context)
    shapes |= attention_shapes(config, listed, scored, columns)
    if config.dspark and num_mtp_layers:
        most = min(config.window, max_context) + config.dspark.block_size
        for keys in sorted({_exact.padded(count) for count in range(1, min(most, MOST) + 1)}):
            shapes |= {
                (config.head_dim, keys, (1, config.head_dim)),
                (keys, config.head_dim, (config.head_dim, 1)),
            }
    products = settle(shapes, device, threads)
    at_once = {f.__name__: f.__dict__["is_independent"](device, threads) for f in FUNCTIONS}
    for count in listed:
        keys, heads = columns[-1] + count, config.num_heads // ranks
        width = config.head_dim
        for depth, out, is_turned in ((width, keys, True), (keys, width, False)):
            batch = (heads, depth, out, is_turned)
            at_once[batch_name(*batch)] = is_one_call(*batch, device, threads)
    for param in _kinds(config, num_mtp_layers):
        sharing = param.shared_by(ranks, whole_experts)
        parts = num_parts(config) // sharing
        if parts == 1:
            continue
        width, depth = param.local_shape(sharing) if len(param.shape) > 1 else (0, 0)
        if param.shard == "columns":
            for height in BATCHED:
                batch = (height, depth // parts, width, False)
                at_once[batch_name(*batch)] = is_one_call(*batch, device, threads)
        elif param.shard == "rows" and param.kind == "linear" and not param.is_embedding:
            runs = (depth, width, width // parts)
            at_once[columns_name(*runs)] = has_free_columns(*runs, device, threads)
    facts = {name: [p.library, p.heights, p.why] for name, p in products.items()} | at_once
    notes = (recall(device, threads)[1], remember(device, threads, facts))
    return Exact(
        products, tuple(name for name, holds in at_once.items() if not holds), tuple(filter(None, notes))
    )


def weight_shapes(
    config: ModelConfig, num_mtp_layers: int, ranks: int = 1, whole_experts: bool = False
) -> set[Shape]:
    """Every product with a weight, or with one rank's share of it."""
    shapes: set[Shape] = set()
    for param in _kinds(config, num_mtp_layers):
        if param.name.endswith("_fn") or param.kind in ("linear", "grouped"):
            sharing = param.shared_by(ranks, whole_experts)
            width, depth = param.local_shape(sharing)
            parts = num_parts(config) // sharing
            width = width * ranks // config.o_groups if param.kind == "grouped" else width
            shapes.add((depth // parts if param.shard == "columns" else depth, width, (width, 1)))
    return shapes


def _kinds(config: ModelConfig, num_mtp_layers: int) -> list[Param]:
    """One layer of each kind has all shapes; a large model declares tens of thousands of experts."""
    return declare(replace(config, layers=tuple(dict.fromkeys(config.layers))), num_mtp_layers)


def attention_shapes(
    config: ModelConfig, listed: list[int], scored: list[int], columns: list[int]
) -> set[Shape]:
    """Queries times keys, weights times keys, and index queries times index keys."""
    shapes: set[Shape] = {(config.index_dim, count, (1, config.index_dim)) for count in scored}
    width = config.head_dim
    for raw in columns:
        # While the window is not full, there are few entries.
        for count in listed if raw == columns[-1] else listed[:2]:
            keys = raw + count
            shapes |= {(width, keys, (1, width)), (keys, width, (width, 1))}
    return shapes


def _columns(config: ModelConfig, max_context: int) -> list[int]:
    """How many raw keys a block of queries is given, up to a full window or the end of the context."""
    full = raw_columns(min(config.window, max_context))
    return [*range(BLOCK, min(full, MOST) + 1, BLOCK)]


def _entries(config: ModelConfig, max_context: int) -> tuple[list[int], list[int]]:
    """How many entries a query is given beside its window, and how many the indexer scores."""
    ratios = {layer.kind: layer.ratio for layer in config.layers if layer.ratio}
    visible = {kind: _exact.padded(max_context // ratio) for kind, ratio in ratios.items()}
    chosen = min(visible.get("csa", 0), _exact.padded(config.index_topk))
    listed = [count for count in ENTRIES if count <= max(chosen, visible.get("hca", 0))]
    return listed, [count for count in ENTRIES[1:] if config.index_topk < count <= visible.get("csa", 0)]
