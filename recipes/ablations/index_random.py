"""Ablation of the op `index`: as many entries as it would choose, but chosen by lot. Not a backend.

What a model loses with it against the op's own is what its indexer has learnt.
"""

import zlib

import torch
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
    """[T, S] pool rows of `topk` visible entries in order, -1 beyond; every choice is equally likely.

    The lot is seeded by the query's own bits: repeatable, another one in every layer and position, and the
    same whoever else is in the batch.
    """
    visible = visible_rows(page_table, slots, positions, ratio, page_entries)
    rows = visible[:, :topk].clone()
    for t, count in enumerate(((positions + 1) // ratio).tolist()):
        if count > topk:
            bits = q[t].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            lot = torch.Generator().manual_seed(zlib.crc32(bits))
            chosen = torch.randperm(count, generator=lot)[:topk].sort().values
            rows[t] = visible[t, chosen.to(visible.device)]
    return rows
