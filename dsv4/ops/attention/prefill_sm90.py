"""Prompts: launches prefill_sm90.cu, attention of whole groups of 64 heads over keys in rows of BF16.
Its result is as queries are, or packed for the product that follows."""

import torch
from torch import Tensor

from dsv4.gpu.build import HOPPER, architecture, call
from dsv4.gpu.structs import mirror
from dsv4.ops.linear.prefill_packed import Packed, padded

# Numbers of prefill_sm90.cu.
HEADS, WIDTH, ROPE, THREADS = 64, 512, 64, 384
SHARED_BYTES = (HEADS * WIDTH + 2 * 64 * WIDTH + HEADS * 64) * 2 + 3072
AS_IT_IS = 3

_Attend = mirror("attention/prefill_sm90.cu", "Attend")


def serves(q: Tensor, rope: int) -> bool:
    """Whether queries [T, H, D] of this shape and type are what the kernel is made for."""
    shape = q.shape[1] % HEADS == 0 and q.shape[2] == WIDTH and rope == ROPE
    return shape and q.dtype == torch.bfloat16 and q.is_cuda and architecture(q.device) == HOPPER


def attend(
    q: Tensor,
    keys: Tensor,
    out: Tensor | Packed,
    slots: Tensor,
    positions: Tensor,
    first: Tensor,
    window: int,
    ring_size: int,
    ring_rows: int,
    has_pool: bool,
    rows: Tensor | None,
    page_table: Tensor | None,
    ratio: int,
    page_entries: int,
    sinks: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float | None,
) -> None:
    """As ops/attention/cpu.py has it; `keys` [rows, D]: those of the ring, of this step, of the pool. Of
    packed rows, a matrix has as many heads as it has slices."""
    tokens, heads, width = q.shape
    to, mode, group_heads = out, None, 1
    if isinstance(out, Packed):
        to, mode, group_heads = out.data, out.mode.number, out.k // width
        assert mode in (0, 1, 2) and (out.rows, out.matrices * out.k) == (tokens, heads * width), out.mode
    assert isinstance(to, Tensor)
    longs, floats = (slots, positions, first), (sinks, cos, sin)
    assert all(tensor.dtype == torch.long and tensor.is_contiguous() for tensor in longs)
    assert all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in floats)
    assert all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in (q, keys, to, cos, sin))
    tables = [table for table in (rows, page_table) if table is not None]
    assert all(table.dtype == torch.int32 and table.is_contiguous() for table in tables)
    assert not has_pool or tables, "entries are found by a list or by a page table"
    params = _Attend(
        q=q,
        keys=keys,
        rows=rows,
        page_table=page_table,
        slots=slots,
        positions=positions,
        first=first,
        sinks=sinks,
        cos=cos,
        sin=sin,
        out=to,
        tokens=tokens,
        heads=heads,
        window=window,
        ring_size=ring_size,
        ring_rows=ring_rows,
        list_width=0 if rows is None else rows.shape[1],
        ratio=ratio or 1,
        page_entries=page_entries or 1,
        pages=0 if page_table is None else page_table.shape[1],
        group_heads=group_heads,
        rows_padded=padded(tokens),
        has_pool=has_pool,
        is_raw=eps is not None,
        scale=width**-0.5,
        eps=eps or 0.0,
    )
    call(
        "attention/prefill_sm90",
        f"attend_kernel<{AS_IT_IS if mode is None else mode}>",
        q.device,
        params,
        blocks=tokens * heads // HEADS,
        threads=THREADS,
        shared=SHARED_BYTES,
    )
