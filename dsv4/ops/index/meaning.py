"""Decode step: what the index's launches mean (decode.py, decode_select.py): scores and the best entries."""

from typing import Any

import torch
from torch import Tensor

from dsv4.gpu.meaning import Claim, Wanted
from dsv4.quant.codec import decode
from dsv4.quant.formats import QuantTensor
from dsv4.spec import ops

SUM = 2.0**-18  # of a product of exact values in float32: a part of the sum of their magnitudes


def pool_rows(page_table: Tensor, slot: int, count: int, page_entries: int) -> Tensor:
    """The pool rows of a sequence's entries 0 .. count-1."""
    entry = torch.arange(count, device=page_table.device)
    return page_table[slot, entry // page_entries].long() * page_entries + entry % page_entries


def scores(
    iq: Tensor,
    weights: Tensor,
    keys: QuantTensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    out: Tensor,
    ratio: int,
    page_entries: int,
    factor: float,
    **_: Any,
) -> list[Claim]:
    def claim(row: int, slot: int, count: int) -> Claim:
        def want() -> Wanted:
            its_keys = decode(keys.take(pool_rows(page_table, slot, count, page_entries)))
            q, w = iq[row : row + 1].float(), weights[row : row + 1].float() * factor
            value = ops.index_scores(q, its_keys, w)[0]
            return value, ops.index_scores(q.abs(), its_keys.abs(), w.abs())[0] * SUM

        return Claim(f"out[{row}]", out[row, :count], want)

    counts = ((positions + 1) // ratio).tolist()
    return [claim(row, slot, counts[row]) for row, slot in enumerate(slots.tolist()) if counts[row]]


def select_rows(
    scores: Tensor,
    positions: Tensor,
    ratio: int,
    page_table: Tensor,
    slots: Tensor,
    page_entries: int,
    out: Tensor,
    **_: Any,
) -> list[Claim]:
    """The scores are given, so the choice is exact; ties go to the lower entry."""

    def want() -> Wanted:
        rows = torch.full_like(out, -1)
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            count = (position + 1) // ratio
            best = ops.top_k(scores[row, :count], out.shape[1]).sort().values
            rows[row, : len(best)] = pool_rows(page_table, slot, count, page_entries)[best].to(out.dtype)
        return rows, 0.0

    return [Claim("out", out, want, ulps=0)]
