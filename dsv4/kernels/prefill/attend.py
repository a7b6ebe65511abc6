"""Prompts: launches attend.cu, attention of whole groups of 64 heads over keys in rows of BF16, on Hopper."""

import ctypes

import torch
from torch import Tensor

from dsv4.kernels.common.build import HOPPER, architecture, call

# Numbers of attend.cu.
HEADS, WIDTH, ROPE, THREADS = 64, 512, 64, 384
SHARED_BYTES = (HEADS * WIDTH + 2 * 64 * WIDTH + HEADS * 64) * 2 + 2048


class _Attend(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "keys", "rows", "page_table")),
        *((name, ctypes.c_void_p) for name in ("slots", "positions", "first", "sinks", "cos", "sin", "out")),
        *((name, ctypes.c_int) for name in ("tokens", "heads", "window", "ring_size", "ring_rows")),
        *((name, ctypes.c_int) for name in ("list_width", "ratio", "page_entries", "pages")),
        *((name, ctypes.c_int) for name in ("has_pool", "is_raw")),
        *((name, ctypes.c_float) for name in ("scale", "eps")),
    )


def serves(q: Tensor, rope: int) -> bool:
    """Whether queries [T, H, D] of this shape and type are what the kernel is made for."""
    shape = q.shape[1] % HEADS == 0 and q.shape[2] == WIDTH and rope == ROPE
    return shape and q.dtype == torch.bfloat16 and q.is_cuda and architecture(q.device) == HOPPER


def attend(
    q: Tensor,
    keys: Tensor,
    out: Tensor,
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
    """As ops/attend/ref.py has it; `keys` [rows, D]: those of the ring, of this step, of the pool."""
    tokens, heads, width = q.shape
    longs, floats = (slots, positions, first), (sinks, cos, sin)
    assert all(tensor.dtype == torch.long and tensor.is_contiguous() for tensor in longs)
    assert all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in floats)
    assert all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in (q, keys, out, cos, sin))
    tables = [table for table in (rows, page_table) if table is not None]
    assert all(table.dtype == torch.int32 and table.is_contiguous() for table in tables)
    assert not has_pool or tables, "entries are found by a list or by a page table"
    params = _Attend(
        q=q.data_ptr(),
        keys=keys.data_ptr(),
        rows=None if rows is None else rows.data_ptr(),
        page_table=None if page_table is None else page_table.data_ptr(),
        slots=slots.data_ptr(),
        positions=positions.data_ptr(),
        first=first.data_ptr(),
        sinks=sinks.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        out=out.data_ptr(),
        tokens=tokens,
        heads=heads,
        window=window,
        ring_size=ring_size,
        ring_rows=ring_rows,
        list_width=0 if rows is None else rows.shape[1],
        ratio=ratio or 1,
        page_entries=page_entries or 1,
        pages=0 if page_table is None else page_table.shape[1],
        has_pool=has_pool,
        is_raw=eps is not None,
        scale=width**-0.5,
        eps=eps or 0.0,
    )
    call(
        "attend",
        "attend_kernel",
        q.device,
        params,
        blocks=tokens * heads // HEADS,
        threads=THREADS,
        shared=SHARED_BYTES,
    )
