"""Prompts: pooling in Triton, a block's rows and some channels in one program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.common.shapes import MAX_POOLED
from dsv4.kernels.prefill.place import place
from dsv4.ops.compress.ref import rows_at

__all__ = ["pool", "put", "rows_at"]


@triton.jit(do_not_specialize_on_alignment=["closing", "slots", "positions", "first"])
def _pool_kernel(values, scores, tail_values, tail_scores, closing, slots, positions, first, out,  # type: ignore[no-untyped-def]
                 width, columns, tail_rows, span, ratio, HAS_OVERLAP: tl.constexpr,
                 R: tl.constexpr, C: tl.constexpr):  # fmt: skip
    token = tl.load(closing + tl.program_id(0))
    if token < 0:  # a graph's list is padded
        return
    col = tl.program_id(1) * C + tl.arange(0, C)
    row = tl.arange(0, R)
    slot, position, start = tl.load(slots + token), tl.load(positions + token), tl.load(first + token)
    wanted = position - (span - 1) + row  # oldest first
    inside = ((row < span) & (wanted >= 0))[:, None] & (col < width)[None, :]
    is_here = (wanted >= start)[:, None]
    source = col[None, :] + tl.zeros((R, 1), tl.int32)
    if HAS_OVERLAP:
        source += tl.where(row >= ratio, width, 0)[:, None]
    here = (token - (position - wanted))[:, None] * columns + source
    there = (slot * tail_rows + tl.maximum(wanted, 0) % tail_rows)[:, None] * columns + source
    s = tl.where(is_here, tl.load(scores + here, mask=inside & is_here, other=0.0),
                 tl.load(tail_scores + there, mask=inside & (is_here == 0), other=0.0))  # fmt: skip
    v = tl.where(is_here, tl.load(values + here, mask=inside & is_here, other=0.0),
                 tl.load(tail_values + there, mask=inside & (is_here == 0), other=0.0))  # fmt: skip
    s = tl.where(inside, s, -float("inf"))
    peak = tl.max(s, 0)
    # Columns beyond the end have no row at all.
    weight = tl.exp(s - tl.where(col < width, peak, 0.0)[None, :])
    pooled = tl.div_rn(tl.sum(weight * v, 0), tl.sum(weight, 0))
    tl.store(out + tl.program_id(0).to(tl.int64) * width + col, pooled, mask=col < width)


def pool(
    values: Tensor,
    scores: Tensor,
    tail_values: Tensor,
    tail_scores: Tensor,
    closing: Tensor,
    slots: Tensor,
    positions: Tensor,
    first: Tensor,
    ratio: int,
    overlap: bool,
) -> Tensor:
    columns = values.shape[1]
    width, span = (columns // 2, 2 * ratio) if overlap else (columns, ratio)
    out = torch.empty(closing.shape[0], width, device=values.device)
    if closing.numel():
        assert values.is_contiguous() and scores.is_contiguous()
        assert tail_values.is_contiguous() and tail_scores.is_contiguous()
        assert span <= MAX_POOLED, span
        r = triton.next_power_of_2(span)
        c = min(128, MAX_POOLED // r)
        _pool_kernel[(closing.shape[0], triton.cdiv(width, c))](
            *(values, scores, tail_values, tail_scores, closing, slots, positions, first, out),
            *(width, columns, tail_values.shape[1], span, ratio),
            **{"HAS_OVERLAP": overlap, "R": r, "C": c, "num_warps": 4},
        )
    return out


def put(
    tail_values: Tensor,
    tail_scores: Tensor,
    rows: Tensor,
    values: Tensor,
    scores: Tensor,
    tokens: Tensor | None = None,
) -> None:
    """A row of -1 is none: a graph's lists are padded."""
    place(tail_values, values, tail_scores, scores, rows, tokens)
