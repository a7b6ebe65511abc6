"""How this machine multiplies the model's shapes, and which functions run row by row: settled at start."""

from dataclasses import dataclass

import torch

from dsv4.config import ModelConfig
from dsv4.model.params import declare
from dsv4.ops import _exact
from dsv4.ops._memory import recall, remember
from dsv4.ops._product import Product, settle
from dsv4.ops.mhc.ref import sinkhorn

FUNCTIONS = (
    *(_exact.exp, _exact.total, _exact.mean_square, _exact.sigmoid, _exact.silu, _exact.softplus),
    sinkhorn,
)


@dataclass(frozen=True)
class Exact:
    """`products` by shape, `row_by_row`: functions whose rows depend on each other here."""

    products: dict[str, Product]
    row_by_row: tuple[str, ...]
    notes: tuple[str, ...]


def settle_exact(config: ModelConfig, num_mtp_layers: int, device: torch.device, threads: int) -> Exact:
    """Measure what is not remembered, with that many threads in use, and remember it."""
    products = settle(product_shapes(config, num_mtp_layers), device, threads)
    holds = {f.__name__: f.__dict__["is_independent"](device, threads) for f in FUNCTIONS}
    facts = {name: [p.library, p.heights, p.why] for name, p in products.items()}
    notes = (recall(device, threads)[1], remember(device, threads, facts | holds))
    return Exact(
        products, tuple(name for name, held in holds.items() if not held), tuple(filter(None, notes))
    )


def product_shapes(config: ModelConfig, num_mtp_layers: int) -> set[tuple[int, int]]:
    """[K, N] of every product with a weight."""
    shapes = set()
    for param in declare(config, num_mtp_layers):
        if param.name.endswith("_fn") or param.kind in ("linear", "grouped"):
            width, depth = param.shape
            shapes.add((depth, width // config.o_groups if param.kind == "grouped" else width))
    return shapes
