"""Decode step: attention, split over keys (split-KV): parts, then their sum. Does what
ops.attention.cpu.attend does, for any size.

Chunks are cut by key number: first the window's places, oldest first, then, in a new chunk, the compressed
entries. A program takes one chunk for a few heads of one row. Where the reference rounds weights relative to
the largest score of all keys, this rounds them relative to the chunk's.
"""

import triton
import triton.language as tl
from torch import Tensor

from dsv4.gpu.numbers import (
    angles,
    e4m3_decode,
    launch,
    launch_dependents,
    power,
    product,
    rotate,
    rounded,
    to_act,
    wait_for_prerequisites,
)
from dsv4.gpu.pdl import launcher
from dsv4.gpu.shapes import MAX_HEAD_DIM, NOPE_ALIGNED, chunk_keys
from dsv4.gpu.shapes import attend_chunks as num_chunks
from dsv4.ops.attention import meaning
from dsv4.ops.attention.prepare import rope_part
from dsv4.quant.formats import QuantTensor

HEADS = 16  # of one program: the smallest product of the tensor cores
CHANNELS = 512  # of one program of combine: few programs leave room for the product after it
MERGED = 8  # chunks that combine reads at a time


@triton.jit
def _fetch(data_ptr, rope_ptr, scale_ptr, row, seen, NOPE: tl.constexpr, SIZE: tl.constexpr,  # type: ignore[no-untyped-def]
           ROPE: tl.constexpr, ROPE_SIZE: tl.constexpr, ROW: tl.constexpr, ROPE_ROW: tl.constexpr,
           SCALES: tl.constexpr):  # fmt: skip
    """KV8 rows [KEYS] -> codes [KEYS, SIZE / 64, 64], scales, rotary [KEYS, ROPE_SIZE]; 0 where unseen."""
    block = tl.arange(0, SIZE // 64)
    c = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    at = row[:, None, None] * ROW + c[None, :, :]
    inside = seen[:, None, None] & (c < NOPE)[None, :, :]
    code = tl.load(data_ptr + at, mask=inside, other=0, cache_modifier=".cg")
    started = seen[:, None] & (block * 64 < NOPE)[None, :]
    scale_at = scale_ptr + row[:, None] * SCALES + block[None, :]
    scale = tl.load(scale_at, mask=started, other=0, cache_modifier=".cg")
    r = tl.arange(0, ROPE_SIZE)
    rope_at = rope_ptr + row[:, None] * ROPE_ROW + r[None, :]
    inside = seen[:, None] & (r < ROPE)[None, :]
    rotary = tl.load(rope_at, mask=inside, other=0.0, cache_modifier=".cg")
    return code, scale, rotary


@triton.jit
def _attend_kernel(  # type: ignore[no-untyped-def]
        q_ptr, ring_ptr, ring_rope_ptr, ring_scale_ptr, entries_ptr, entries_rope_ptr, entries_scale_ptr,
        rows_ptr, max_rows, page_table_ptr, pages, slots_ptr, positions_ptr, ends_ptr, part_o_ptr,
        part_ml_ptr, factor,
        H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, ROPE: tl.constexpr,
        ROPE_SIZE: tl.constexpr, ROW: tl.constexpr, ROPE_ROW: tl.constexpr, SCALES: tl.constexpr,
        RING: tl.constexpr, WINDOW: tl.constexpr, RATIO: tl.constexpr, PAGE: tl.constexpr,
        KEYS: tl.constexpr):  # fmt: skip
    act: tl.constexpr = q_ptr.dtype.element_ty
    near: tl.constexpr = (WINDOW + KEYS - 1) // KEYS
    nope: tl.constexpr = D - ROPE
    launch_dependents()
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    pos = tl.load(positions_ptr + row, cache_modifier=".cg").to(tl.int32)
    slot = tl.load(slots_ptr + row, cache_modifier=".cg")
    place = chunk * KEYS + tl.arange(0, KEYS)
    if chunk < near:
        end = pos
        if ends_ptr is not None:
            end = tl.load(ends_ptr + row, cache_modifier=".cg").to(tl.int32)
        j = end - (WINDOW - 1) + place
        seen = (place < WINDOW) & (j >= 0)
        key_row = slot * RING + tl.maximum(j, 0) % RING
        code, scale, rotary = _fetch(ring_ptr, ring_rope_ptr, ring_scale_ptr, key_row, seen, nope, SIZE, ROPE,
                                     ROPE_SIZE, ROW, ROPE_ROW, SCALES)  # fmt: skip
        wait_for_prerequisites()
    elif entries_ptr is None:
        seen = place < 0
        code, scale = tl.zeros([KEYS, SIZE // 64, 64], tl.uint8), tl.zeros([KEYS, SIZE // 64], tl.uint8)
        rotary = tl.zeros([KEYS, ROPE_SIZE], act)
        wait_for_prerequisites()
    else:
        entry = place - near * KEYS
        if rows_ptr is not None:
            wait_for_prerequisites()
            key_row = tl.load(rows_ptr + row * max_rows + entry, mask=entry < max_rows, other=-1).to(tl.int64)
            seen = (key_row >= 0) & (pos >= 0)
        else:
            seen = entry < (pos + 1) // RATIO
            at = page_table_ptr + slot * pages + entry // PAGE
            page = tl.load(at, mask=seen, other=0, cache_modifier=".cg").to(tl.int64)
            key_row = page * PAGE + entry % PAGE
        code, scale, rotary = _fetch(entries_ptr, entries_rope_ptr, entries_scale_ptr, key_row, seen, nope,
                                     SIZE, ROPE, ROPE_SIZE, ROW, ROPE_ROW, SCALES)  # fmt: skip
        if rows_ptr is None:
            wait_for_prerequisites()

    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    head = (row * tl.num_programs(0) + chunk) * H + h
    if tl.max(seen.to(tl.int32), 0) > 0:
        c, r = tl.arange(0, SIZE), tl.arange(0, ROPE_SIZE)
        q = q_ptr + (row * H + h)[:, None] * D
        q_key = tl.load(q + c[None, :], mask=(h < H)[:, None] & (c < nope)[None, :], other=0.0)
        q_rope = tl.load(q + nope + r[None, :], mask=(h < H)[:, None] & (r < ROPE)[None, :], other=0.0)
        # A code times its scale is exact in the compute type. Decoding before the wait took longer.
        key = (e4m3_decode(code) * power(scale.to(tl.int32))[:, :, None]).to(act)
        key = tl.reshape(key, (KEYS, SIZE))
        score = (product(q_key, tl.trans(key)) + product(q_rope, tl.trans(rotary))) * factor
        score = tl.where(seen[None, :], score, -float("inf"))
        peak = tl.max(score, 1)
        weight = tl.exp(score - peak[:, None])
        tl.store(part_ml_ptr + head * 2, peak, mask=h < H)
        tl.store(part_ml_ptr + head * 2 + 1, tl.sum(weight, 1), mask=h < H)
        weight = to_act(weight, act)
        o = part_o_ptr + head[:, None] * D
        tl.store(o + c[None, :], product(weight, key), mask=(h < H)[:, None] & (c < nope)[None, :])
        o += nope
        tl.store(o + r[None, :], product(weight, rotary), mask=(h < H)[:, None] & (r < ROPE)[None, :])
    else:
        tl.store(part_ml_ptr + head * 2, tl.full([HEADS], -float("inf"), tl.float32), mask=h < H)
        tl.store(part_ml_ptr + head * 2 + 1, tl.zeros([HEADS], tl.float32), mask=h < H)


@launcher(
    reads=("q", "rows", "entries"),
    reads_early=("ring", "entries", "page_table", "slots", "positions", "ends"),
    writes=("part_o", "part_ml"),
    means=meaning.attend_parts,
)
def attend(
    q: Tensor,
    ring: QuantTensor,
    ring_rows: int,
    window: int,
    entries: QuantTensor | None,
    rows: Tensor | None,
    page_table: Tensor | None,
    page_entries: int,
    ratio: int,
    slots: Tensor,
    positions: Tensor,
    part_o: Tensor,
    part_ml: Tensor,
    ends: Tensor | None = None,
    overlap: bool = True,
) -> None:
    """q [T, H, d] -> part_o [T, C, H, d], part_ml [T, C, H, 2] (largest score, sum), float32; C: num_chunks.

    Keys of a row: the ring's positions max(0, pos-window+1) .. pos, the token's own included; then, of
    `entries`, the pool rows `rows` [T, S] int32 (-1: none), or, with rows None, all that are visible.
    With `ends` int64 [T] the ring's positions end there, not at pos.
    A chunk without keys leaves -inf and 0 in part_ml and part_o as it was.
    """
    tokens, h, d = q.shape
    chunks, keys, rope = part_o.shape[1], chunk_keys(q.dtype), ring.rope_dim
    assert d <= MAX_HEAD_DIM and (d - rope) % NOPE_ALIGNED == 0, (d, rope)
    assert part_o.shape == (tokens, chunks, h, d) and part_ml.shape == (tokens, chunks, h, 2), part_o.shape
    assert chunks >= num_chunks(q.dtype, window, 0 if rows is None else rows.shape[1]), part_o.shape
    assert q.is_contiguous() and part_o.is_contiguous() and part_ml.is_contiguous()
    assert ring.scale is not None and ring_rows >= window
    assert entries is None or rows is not None or (page_table is not None and ratio and page_entries)
    assert entries is None or entries.data.shape[1] == ring.data.shape[1]
    assert rows is None or rows.is_contiguous()
    assert ends is None or (rows is not None and ends.is_contiguous())
    if tokens:
        launch(
            _attend_kernel,
            grid=(chunks, triton.cdiv(h, HEADS), tokens),
            num_warps=8,
            overlap=overlap,
            q_ptr=q,
            ring_ptr=ring.data,
            ring_rope_ptr=rope_part(ring, q.dtype),
            ring_scale_ptr=ring.scale,
            entries_ptr=None if entries is None else entries.data,
            entries_rope_ptr=None if entries is None else rope_part(entries, q.dtype),
            entries_scale_ptr=None if entries is None else entries.scale,
            rows_ptr=rows,
            max_rows=None if rows is None else rows.shape[1],
            page_table_ptr=page_table,
            pages=None if page_table is None else page_table.stride(0),
            slots_ptr=slots,
            positions_ptr=positions,
            ends_ptr=ends,
            part_o_ptr=part_o,
            part_ml_ptr=part_ml,
            factor=d**-0.5,
            H=h,
            HEADS=HEADS,
            D=d,
            SIZE=max(64, triton.next_power_of_2(d - rope)),
            ROPE=rope,
            ROPE_SIZE=max(16, triton.next_power_of_2(rope)),
            ROW=ring.data.shape[1],
            ROPE_ROW=ring.data.shape[1] // q.dtype.itemsize,
            SCALES=ring.scale.shape[1],
            RING=ring_rows,
            WINDOW=window,
            RATIO=ratio,
            PAGE=page_entries,
            KEYS=keys,
        )


@triton.jit
def _combine_kernel(part_o_ptr, part_ml_ptr, sinks_ptr, cos_ptr, sin_ptr, positions_ptr, out_ptr, chunks,  # type: ignore[no-untyped-def]
                    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, CP: tl.constexpr,
                    BLOCK: tl.constexpr, MERGED: tl.constexpr):  # fmt: skip
    act: tl.constexpr = out_ptr.dtype.element_ty
    launch_dependents()
    first, head = tl.program_id(0) * BLOCK, tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    pos = tl.maximum(tl.load(positions_ptr + row, cache_modifier=".cg"), 0)
    sink = tl.load(sinks_ptr + head)
    cos, sin = angles(cos_ptr, sin_ptr, pos, -1.0, D - 2 * HALF - first, HALF, BLOCK)
    wait_for_prerequisites()
    ml, o = part_ml_ptr + (row * chunks * H + head) * 2, part_o_ptr + (row * chunks * H + head) * D
    i, c = tl.arange(0, CP), first + tl.arange(0, BLOCK)
    peaks = tl.load(ml + i * (2 * H), mask=i < chunks, other=-float("inf"))
    sums = tl.load(ml + i * (2 * H) + 1, mask=i < chunks, other=0.0)
    # A part without keys was not written; its peak alone is -inf, unless the part is NaN.
    used = tl.max(tl.where(peaks != -float("inf"), i + 1, 0), 0)
    peak = tl.max(peaks, 0)
    # A row of padding has no keys at all.
    peak = tl.where(used > 0, peak, 0.0)
    total = tl.sum(tl.exp(peaks - peak) * sums, 0) + tl.exp(sink - peak)
    x = tl.zeros([BLOCK], tl.float32)
    for start in range(0, used, MERGED):
        j = start + tl.arange(0, MERGED)
        its_peak = tl.load(ml + j * (2 * H), mask=j < used, other=-float("inf"))
        weight = tl.exp(its_peak - peak)
        mask = (its_peak != -float("inf"))[:, None] & (c < D)[None, :]
        part = tl.load(o + j[:, None].to(tl.int64) * (H * D) + c[None, :], mask=mask, other=0.0)
        x += tl.sum(weight[:, None] * part, 0)
    x = rounded(tl.div_rn(x, total), act)
    x = rotate(x, cos, sin, act)
    tl.store(out_ptr + (row * H + head) * D + c, x.to(act), mask=c < D)


@launcher(
    reads=("part_o", "part_ml"),
    reads_early=("sinks", "cos", "sin", "positions"),
    writes=("out",),
    means=meaning.combine,
)
def combine(
    part_o: Tensor,
    part_ml: Tensor,
    sinks: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    out: Tensor,
    overlap: bool = True,
) -> None:
    """The parts of `attend`, a sink per head [H] -> out [T, H*d], rotated back by the row's position."""
    tokens, chunks, h, d = part_o.shape
    assert out.numel() == tokens * h * d and out.is_contiguous(), out.shape
    block = min(CHANNELS, triton.next_power_of_2(d))
    if tokens:
        launch(
            _combine_kernel,
            grid=(triton.cdiv(d, block), h, tokens),
            num_warps=4,
            overlap=overlap,
            part_o_ptr=part_o,
            part_ml_ptr=part_ml,
            sinks_ptr=sinks,
            cos_ptr=cos,
            sin_ptr=sin,
            positions_ptr=positions,
            out_ptr=out,
            chunks=chunks,
            H=h,
            D=d,
            HALF=cos.shape[1],
            CP=triton.next_power_of_2(chunks),
            BLOCK=block,
            MERGED=MERGED,
        )
