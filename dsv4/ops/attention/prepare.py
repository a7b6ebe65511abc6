"""Decode step: between the projections and attention. Norms, RoPE, and all cache writes.

`prepare` replaces ops.rows.rms_norm, ops.attention.entries + store + pool and ops.index.keys of one layer;
`queries` replaces ops.attention.queries and ops.index.queries. A row at position -1 is padding: it
writes no cache.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.gpu.numbers import (
    angles,
    channels,
    e2m1_decode,
    hadamard,
    launch,
    launch_dependents,
    mxfp4_blocks,
    norm,
    power,
    put_kv8,
    put_mxfp4,
    rotate,
    rounded,
    to_act,
    wait_for_prerequisites,
)
from dsv4.gpu.pdl import launcher
from dsv4.gpu.shapes import HOW
from dsv4.ops.attention import meaning
from dsv4.ops.attention.pool import MAX_BLOCK, MOST_NEAR, pool
from dsv4.ops.index import decode as index
from dsv4.ops.rows.quantize import round_row
from dsv4.quant.formats import FP8_TILE, Format, QuantTensor


@dataclass(frozen=True)
class Pooling:
    """One compressor of a layer: this step's rows, what it keeps of earlier ones, and where entries go.

    m = 2 where the previous block takes part (CSA), else 1. `values` and `scores` may be columns of a wider
    matrix; scores come without the position bias `ape`. `out`: KV8 entries, or MXFP4 index keys.
    """

    values: Tensor  # [T, m*d] float32
    scores: Tensor  # [T, m*d] float32
    ape: Tensor  # [ratio, m*d] float32
    tail_values: Tensor  # [slots, tail_rows, m*d] float32
    tail_scores: Tensor  # [slots, tail_rows, m*d] float32, position bias included
    norm: Tensor  # [d] float32
    out: QuantTensor  # [pages * page_entries] rows


@triton.jit
def _entry_row(page_table_ptr, slot, pos, pages, RATIO: tl.constexpr, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    block = pos // RATIO
    page = tl.load(page_table_ptr + slot * pages + block // PAGE, cache_modifier=".cg").to(tl.int64)
    return page * PAGE + block % PAGE


@triton.jit
def _low(x_ptr, weight_ptr, out_ptr, in_ptr, at, eps, D: tl.constexpr, SIZE: tl.constexpr, HOW: tl.constexpr):  # type: ignore[no-untyped-def]
    act: tl.constexpr = out_ptr.dtype.element_ty
    c = tl.arange(0, SIZE)
    weight = channels(weight_ptr, D, SIZE)
    wait_for_prerequisites()
    x = rounded(channels(x_ptr, D, SIZE).to(tl.float32), act)
    x = norm(x, weight, eps, D, act)
    tl.store(out_ptr + at + c, x.to(act), mask=c < D)
    if in_ptr is not None:
        tl.store(in_ptr + at + c, to_act(round_row(x, HOW, SIZE, act), act), mask=c < D)


@triton.jit
def _entry(x, weight, data_ptr, rope_ptr, scale_ptr, row, cos, sin, eps, D: tl.constexpr,  # type: ignore[no-untyped-def]
           SIZE: tl.constexpr, ROPE: tl.constexpr, ROW: tl.constexpr, ROPE_ROW: tl.constexpr,
           SCALES: tl.constexpr, ACT: tl.constexpr):  # fmt: skip
    """x [SIZE] -> a KV8 row: qkv.entries, then qkv.store."""
    x = rotate(norm(rounded(x, ACT), weight, eps, D, ACT), cos, sin, ACT)
    put_kv8(x, data_ptr, rope_ptr, scale_ptr, row, D - ROPE, ROPE, ROW, ROPE_ROW, SCALES, SIZE, ACT)


@triton.jit
def _prepare_kernel(  # type: ignore[no-untyped-def]
        q_ptr, q_step, q_norm_ptr, q_out_ptr, q_in_ptr, kv_ptr, kv_step, kv_norm_ptr, ring_ptr, ring_rope_ptr,
        ring_scale_ptr, cos_ptr, sin_ptr, slots_ptr, positions_ptr, eps, page_table_ptr, pages,
        values_ptr, values_step, scores_ptr, scores_step, ape_ptr, tail_values_ptr, tail_scores_ptr,
        norm_ptr, out_ptr, out_rope_ptr, out_scale_ptr,
        ivalues_ptr, ivalues_step, iscores_ptr, iscores_step, iape_ptr, itail_values_ptr, itail_scores_ptr,
        inorm_ptr, iout_ptr, iout_scale_ptr,
        RQ: tl.constexpr, RQ_SIZE: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, ROPE: tl.constexpr,
        ROW: tl.constexpr, ROPE_ROW: tl.constexpr, SCALES: tl.constexpr, RING: tl.constexpr,
        RATIO: tl.constexpr, OVERLAP: tl.constexpr, PAGE: tl.constexpr, TAIL: tl.constexpr,
        DI: tl.constexpr, ITAIL: tl.constexpr, BLOCK: tl.constexpr, NEAR: tl.constexpr,
        HOW: tl.constexpr):  # fmt: skip
    act: tl.constexpr = q_out_ptr.dtype.element_ty
    launch_dependents()
    role = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    pos = tl.load(positions_ptr + row, cache_modifier=".cg").to(tl.int32)
    slot = tl.load(slots_ptr + row, cache_modifier=".cg")
    if role == 0:
        _low(q_ptr + row * q_step, q_norm_ptr, q_out_ptr, q_in_ptr, row * RQ, eps, RQ, RQ_SIZE, HOW)
    elif pos >= 0:
        if role == 1:
            weight = channels(kv_norm_ptr, D, SIZE)
            cos, sin = angles(cos_ptr, sin_ptr, pos, 1.0, D - ROPE, ROPE // 2, SIZE)
            wait_for_prerequisites()
            x = channels(kv_ptr + row * kv_step, D, SIZE).to(tl.float32)
            _entry(x, weight, ring_ptr, ring_rope_ptr, ring_scale_ptr, slot * RING + pos % RING, cos, sin,
                   eps, D, SIZE, ROPE, ROW, ROPE_ROW, SCALES, act)  # fmt: skip
        elif role == 2:
            if RATIO > 0:
                weight = channels(norm_ptr, D, SIZE)
                # An entry has the position of its block's first row.
                start = tl.maximum(pos + 1 - RATIO, 0)
                cos, sin = angles(cos_ptr, sin_ptr, start, 1.0, D - ROPE, ROPE // 2, SIZE)
                entry = _entry_row(page_table_ptr, slot, pos, pages, RATIO, PAGE)
                x = pool(values_ptr, scores_ptr, values_step, scores_step, ape_ptr, tail_values_ptr,
                          tail_scores_ptr, row, slot, pos, slots_ptr, positions_ptr, RATIO, OVERLAP, TAIL, D,
                          SIZE, BLOCK, NEAR)  # fmt: skip
                if (pos + 1) % RATIO == 0:
                    _entry(x, weight, out_ptr, out_rope_ptr, out_scale_ptr, entry, cos, sin, eps, D, SIZE,
                           ROPE, ROW, ROPE_ROW, SCALES, act)  # fmt: skip
            else:
                wait_for_prerequisites()
        elif DI > 0:
            key_weight = channels(inorm_ptr, DI, DI)
            start = tl.maximum(pos + 1 - RATIO, 0)
            key_cos, key_sin = angles(cos_ptr, sin_ptr, start, 1.0, DI - ROPE, ROPE // 2, DI)
            entry = _entry_row(page_table_ptr, slot, pos, pages, RATIO, PAGE)
            y = pool(ivalues_ptr, iscores_ptr, ivalues_step, iscores_step, iape_ptr, itail_values_ptr,
                      itail_scores_ptr, row, slot, pos, slots_ptr, positions_ptr, RATIO, OVERLAP, ITAIL, DI,
                      DI, BLOCK, NEAR)  # fmt: skip
            if (pos + 1) % RATIO == 0:
                y = rotate(norm(rounded(y, act), key_weight, eps, DI, act), key_cos, key_sin, act)
                put_mxfp4(hadamard(y, act), iout_ptr, iout_scale_ptr, entry, DI)
        else:
            wait_for_prerequisites()
    else:
        wait_for_prerequisites()


def rope_part(rows: QuantTensor, act: torch.dtype) -> Tensor:
    """The rotary channels of KV8 rows, [rows, rope_dim] in the compute type, not copied."""
    nope = rows.shape[1] - rows.rope_dim
    assert rows.format is Format.KV8 and rows.data.shape[1] == nope + rows.rope_dim * act.itemsize
    assert nope % act.itemsize == 0, f"{nope} unrotated channels do not align {act} ones"
    return rows.data[:, nope:].view(act)


def _pooling(p: Pooling | None, prefix: str) -> dict[str, Tensor | int | None]:
    """A compressor's arguments of the kernel, named with `prefix`; None where the layer has none."""
    assert p is None or p.values.stride(1) == p.scores.stride(1) == 1, "rows must be contiguous"
    arguments: dict[str, Tensor | int | None] = {
        "values_ptr": None if p is None else p.values,
        "values_step": None if p is None else p.values.stride(0),
        "scores_ptr": None if p is None else p.scores,
        "scores_step": None if p is None else p.scores.stride(0),
        "ape_ptr": None if p is None else p.ape,
        "tail_values_ptr": None if p is None else p.tail_values,
        "tail_scores_ptr": None if p is None else p.tail_scores,
        "norm_ptr": None if p is None else p.norm,
        "out_ptr": None if p is None else p.out.data,
        "out_scale_ptr": None if p is None else p.out.scale,
    }
    return {prefix + name: value for name, value in arguments.items()}


_POOLED = ("tail_values", "tail_scores", "ape", "norm")


@launcher(
    reads=(
        *("q_low", "kv", "entries.values", "entries.scores", "keys.values", "keys.scores"),
        *("entries.tail_values", "entries.tail_scores", "keys.tail_values", "keys.tail_scores"),
    ),
    reads_early=(
        *("q_norm", "kv_norm", "cos", "sin", "slots", "positions", "page_table"),
        *(f"{pool}.{name}" for pool in ("entries", "keys") for name in _POOLED),
    ),
    writes=(
        *("q_low_out", "q_in", "ring", "entries.tail_values", "entries.tail_scores", "entries.out"),
        *("keys.tail_values", "keys.tail_scores", "keys.out"),
    ),
    means=meaning.prepare,
)
def prepare(
    q_low: Tensor,
    q_norm: Tensor,
    q_low_out: Tensor,
    kv: Tensor,
    kv_norm: Tensor,
    ring: QuantTensor,
    ring_rows: int,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    positions: Tensor,
    eps: float,
    page_table: Tensor | None = None,
    page_entries: int = 0,
    ratio: int = 0,
    entries: Pooling | None = None,
    keys: Pooling | None = None,
    q_in: Tensor | None = None,
    activations: str = "a16",
    overlap: bool = True,
) -> None:
    """q_low [T, Rq] -> normed; kv [T, d] -> the ring; compressor rows -> tails, and closed blocks -> pools.

    q_low and kv may be columns of a wider matrix, also of float32: they are rounded to the compute type,
    that of q_low_out, first. q_in [T, Rq]: q_low_out as quantised products see it, None with a16.
    cos, sin [positions, r/2]; page_table [S, P] int32. `entries` where the layer
    has a ratio, `keys` beside it where the previous block takes part (CSA).
    """
    rows, width = q_low_out.shape
    d, rope, act = kv.shape[1], ring.rope_dim, q_low_out.dtype
    assert q_low.stride(1) == kv.stride(1) == 1 and q_low_out.is_contiguous(), "rows must be contiguous"
    assert (ratio > 0) == (entries is not None) and (entries is not None or keys is None)
    assert ring.scale is not None and cos.shape[1] * 2 == rope, (cos.shape, rope)
    m = 1 if entries is None else entries.values.shape[1] // d
    di = 0 if keys is None else keys.norm.shape[0]
    assert (q_in is None) == (activations == "a16") and (q_in is None or q_in.is_contiguous()), activations
    assert di == 0 or (di >= max(32, rope) and di & (di - 1) == 0), f"index keys of {di} channels"
    if rows:
        launch(
            _prepare_kernel,
            grid=(2 + (entries is not None) + (keys is not None), rows),
            num_warps=8,
            overlap=overlap,
            q_ptr=q_low,
            q_step=q_low.stride(0),
            q_norm_ptr=q_norm,
            q_out_ptr=q_low_out,
            q_in_ptr=q_in,
            kv_ptr=kv,
            kv_step=kv.stride(0),
            kv_norm_ptr=kv_norm,
            ring_ptr=ring.data,
            ring_rope_ptr=rope_part(ring, act),
            ring_scale_ptr=ring.scale,
            cos_ptr=cos,
            sin_ptr=sin,
            slots_ptr=slots,
            positions_ptr=positions,
            eps=eps,
            page_table_ptr=page_table,
            pages=None if page_table is None else page_table.stride(0),
            **_pooling(entries, prefix=""),
            out_rope_ptr=None if entries is None else rope_part(entries.out, act),
            **_pooling(keys, prefix="i"),
            RQ=width,
            RQ_SIZE=max(FP8_TILE, triton.next_power_of_2(width)),
            D=d,
            SIZE=max(64, triton.next_power_of_2(d)),
            ROPE=rope,
            ROW=ring.data.shape[1],
            ROPE_ROW=ring.data.shape[1] // act.itemsize,
            SCALES=ring.scale.shape[1],
            RING=ring_rows,
            RATIO=ratio,
            OVERLAP=m - 1,
            PAGE=page_entries,
            TAIL=0 if entries is None else entries.tail_values.shape[1],
            DI=di,
            ITAIL=0 if keys is None else keys.tail_values.shape[1],
            BLOCK=min(MAX_BLOCK, triton.next_power_of_2(max(1, ratio * m - 1))),
            NEAR=min(MOST_NEAR, rows - 1, ratio * m - 1),
            HOW=HOW[activations],
        )


@triton.jit
def _index_query(iq_ptr, cos_ptr, sin_ptr, pos, DI: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    act: tl.constexpr = iq_ptr.dtype.element_ty
    iq = iq_ptr + tl.arange(0, DI)
    cos, sin = angles(cos_ptr, sin_ptr, pos, 1.0, DI - 2 * HALF, HALF, DI)
    wait_for_prerequisites()
    y = rotate(tl.load(iq).to(tl.float32), cos, sin, act)
    codes, scale = mxfp4_blocks(hadamard(y, act))
    y = tl.reshape(e2m1_decode(codes) * power(scale)[:, None], (DI,))
    tl.store(iq, to_act(y, act))


@triton.jit
def _queries_kernel(q_ptr, iq_ptr, cos_ptr, sin_ptr, positions_ptr, eps, H: tl.constexpr, D: tl.constexpr,  # type: ignore[no-untyped-def]
                    SIZE: tl.constexpr, HI: tl.constexpr, DI: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    launch_dependents()
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    pos = tl.maximum(tl.load(positions_ptr + row, cache_modifier=".cg"), 0)
    if H == 0:
        _index_query(iq_ptr + (row * HI + head) * DI, cos_ptr, sin_ptr, pos, DI, HALF)
    elif head < H:
        act: tl.constexpr = q_ptr.dtype.element_ty
        c = tl.arange(0, SIZE)
        q = q_ptr + (row * H + head) * D
        cos, sin = angles(cos_ptr, sin_ptr, pos, 1.0, D - 2 * HALF, HALF, SIZE)
        wait_for_prerequisites()
        x = norm(channels(q, D, SIZE).to(tl.float32), None, eps, D, act)
        tl.store(q + c, rotate(x, cos, sin, act).to(act), mask=c < D)
    elif HI > 0:
        _index_query(iq_ptr + (row * HI + head - H) * DI, cos_ptr, sin_ptr, pos, DI, HALF)
    else:
        wait_for_prerequisites()


@launcher(
    reads=("q", "iq"),
    reads_early=("cos", "sin", "positions"),
    writes=("q", "iq"),
    means=meaning.queries,
)
def queries(
    q: Tensor | None,
    iq: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    eps: float,
    overlap: bool = True,
) -> None:
    """In place: q [T, H, d] normed and rotated; iq [T, Hi, di] rotated, Hadamard, FP4 values (qat)."""
    rows = positions.shape[0]
    h, d = (0, 0) if q is None else q.shape[1:]
    hi, di = (0, 0) if iq is None else iq.shape[1:]
    assert all(x is None or (x.is_contiguous() and len(x) == rows) for x in (q, iq)) and h + hi > 0
    assert di == 0 or (di >= max(32, 2 * cos.shape[1]) and di & (di - 1) == 0), f"{di} index channels"
    if rows and q is None and iq is not None and index.serves(iq):
        index.rotate_round(iq, cos, sin, positions, overlap)
    elif rows:
        launch(
            _queries_kernel,
            grid=(h + hi, rows),
            num_warps=1,
            overlap=overlap,
            q_ptr=q,
            iq_ptr=iq,
            cos_ptr=cos,
            sin_ptr=sin,
            positions_ptr=positions,
            eps=eps,
            H=h,
            D=d,
            SIZE=triton.next_power_of_2(max(d, 2)),
            HI=hi,
            DI=di,
            HALF=cos.shape[1],
        )
