"""Ablation of the op `index`: a query attends to every visible entry, whatever the scores. Not a backend."""

from torch import Tensor

from dsv4.ops.index.cpu import hadamard, keys, pool_rows, queries, visible_rows
from dsv4.quant.formats import QuantTensor

__all__ = ["hadamard", "keys", "pool_rows", "queries", "select", "visible_rows"]


def select(
    q: Tensor,
    weights: Tensor,
    pool: QuantTensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    ratio: int,
    page_entries: int,
    topk: int,
    longest: int | None = None,
) -> Tensor:
    """[T, S] pool rows of all visible entries in order, -1 beyond; `topk` and the scores are not used."""
    return visible_rows(page_table, slots, positions, ratio, page_entries)
