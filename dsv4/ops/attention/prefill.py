"""Prompts: attention, one program per token and group of heads, keys gathered in blocks, a running softmax in
one fixed order of blocks. A block without keys changes no bit, hence padding of `rows` neither. Nothing
depends on how many entries there can be: a program ends with those that its token sees.

BF16 on Hopper, where heads have the published sizes and keys are decoded beforehand: prefill_sm90.cu. Else
Triton. Queries and raw keys take one launch for norm and rotation, and one for the KV8 form. Pooling has a
block's rows and some channels in one program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.gpu.architectures import tile
from dsv4.gpu.numbers import e4m3_decode, power
from dsv4.gpu.shapes import MAX_POOLED
from dsv4.ops.attention import cpu
from dsv4.ops.attention import prefill_sm90 as hopper
from dsv4.ops.attention.place import place
from dsv4.ops.linear import prefill_product as prompts
from dsv4.ops.linear.prefill_packed import Packed, empty_packed, mode_of
from dsv4.ops.rows import prefill as row_kernels
from dsv4.quant.formats import KV_BLOCK, Format, QuantTensor

# Entries are found by the page table here, without a list.
WANTS_LISTS = False
# Heads of a program at most, keys of a block, warps, stages; by compute type.
BLOCK = {torch.bfloat16: (64, 32, 8, 5), torch.float32: (16, 16, 4, 1)}
# Up to this size, raw keys and those rows of the pool that a query may see are decoded once per call: the
# kernel then copies rows instead of decoding them anew for every query. The values are the same.
DECODED_BYTES = 512 << 20
_PROGRAMS = 528  # that decode a pool: four for each SM of an H200


@triton.jit
def _decoded(data, rest, scales, is_key, width, nope, item, act: tl.constexpr, IS_KV8: tl.constexpr,  # type: ignore[no-untyped-def]
             B: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """Stored rows, each by pointers [B] to its values, to the same as items of type `act` and to its scales,
    as [B, W] of type `act`, zero where there is no key or no channel."""
    if IS_KV8:
        block, within = tl.arange(0, W // 64), tl.arange(0, 64)
        col = (block[:, None] * 64 + within[None, :])[None, :, :]
        is_code = is_key[:, None, None] & (col < nope)
        code = tl.load(data[:, None, None] + col, mask=is_code, other=0)
        has_scale = is_key[:, None] & (block * 64 < nope)[None, :]
        scale = tl.load(scales[:, None] + block[None, :], mask=has_scale, other=127)
        value = e4m3_decode(code) * power(scale.to(tl.int32))[:, :, None]
        is_rest = is_key[:, None, None] & (col >= nope) & (col < width)
        rotary = tl.load(rest[:, None, None] + nope // item + col - nope, mask=is_rest, other=0.0)
        key = tl.where(col < nope, value.to(act), rotary.to(act))
        return tl.reshape(key, (B, W))
    else:
        col = tl.arange(0, W)
        inside = is_key[:, None] & (col < width)[None, :]
        return tl.load(data[:, None] + col[None, :], mask=inside, other=0.0).to(act)


@triton.jit
def _meet(q, key, is_key, scale, peak, total, out):  # type: ignore[no-untyped-def]
    """One block of keys [B, W] that are the values too: the running softmax of q [H, W] goes on, its scores
    times scale [H]."""
    score = tl.dot(q, tl.trans(key), input_precision="ieee") * scale[:, None]
    score = tl.where(is_key[None, :], score, -float("inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    shrink = tl.exp(peak - higher)
    weight = tl.exp(score - higher[:, None])
    total = total * shrink + tl.sum(weight, 1)
    out = tl.dot(weight.to(q.dtype), key, out * shrink[:, None], input_precision="ieee")
    return higher, total, out


@triton.jit(
    do_not_specialize=["list_width", "ratio", "page_entries", "pages", "ring_rows", "tokens"],
    do_not_specialize_on_alignment=["slots", "positions", "first"],
)
def _attend_kernel(q, ring, ring_rest, ring_scales, fresh, fresh_rest, fresh_scales, pool, pool_rest,  # type: ignore[no-untyped-def]
                   pool_scales, rows, page_table, slots, positions, first, sinks, cos, sin, out, tokens,
                   heads, width, nope, window, ring_size, ring_rows, list_width, ratio, page_entries, pages,
                   row_items, row_scales, item, scale, eps, IS_RAW: tl.constexpr, HAS_POOL: tl.constexpr,
                   IS_LISTED: tl.constexpr, IS_JOINED: tl.constexpr, IS_KV8: tl.constexpr, H: tl.constexpr,
                   B: tl.constexpr, W: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """IS_RAW: q is to be normed and rotated. IS_JOINED: `ring` points to the rows of all three, one store
    after the other, as values."""
    token = tl.program_id(0)
    long_token = token.to(tl.int64)
    head = tl.program_id(1) * H + tl.arange(0, H)
    col = tl.arange(0, W)
    act: tl.constexpr = out.dtype.element_ty
    here = (head < heads)[:, None] & (col < width)[None, :]
    q_at = head[:, None] * width + col[None, :]
    # The last channels turn in pairs, with the position before the keys are met, against it at the end.
    half = (width - nope) // 2
    pair = tl.arange(0, R)
    turns = (head < heads)[:, None] & (pair < half)[None, :]
    pair_at = long_token * heads * width + head[:, None] * width + nope + 2 * pair[None, :]
    score_scale = tl.zeros((H,), tl.float32) + scale
    if IS_RAW:
        c = tl.load(cos + token * half + pair, mask=pair < half, other=1.0)[None, :]
        s = tl.load(sin + token * half + pair, mask=pair < half, other=0.0)[None, :]
        # The turned pairs go by way of `out`: among registers they would be exchanged with other threads.
        a = tl.load(q + pair_at, mask=turns, other=0.0).to(tl.float32)
        b = tl.load(q + pair_at + 1, mask=turns, other=0.0).to(tl.float32)
        tl.store(out + pair_at, (a * c - b * s).to(act), mask=turns)
        tl.store(out + pair_at + 1, (a * s + b * c).to(act), mask=turns)
        tl.debug_barrier()
        source = tl.where(col < nope, q, out) + long_token * heads * width
        query = tl.load(source[None, :] + q_at, mask=here, other=0.0)
        wide = tl.where((col < nope)[None, :], query, 0.0).to(tl.float32)
        square = tl.sum(wide * wide, 1) + tl.sum(a * a + b * b, 1)
        # The norm's factor is a head's own: it goes with the scores.
        score_scale *= tl.div_rn(tl.zeros_like(square) + 1.0, tl.sqrt_rn(square * (1.0 / width) + eps))
    else:
        query = tl.load(q + long_token * heads * width + q_at, mask=here, other=0.0)
    slot, position = tl.load(slots + token), tl.load(positions + token).to(tl.int32)
    start = tl.load(first + token).to(tl.int32)
    table = page_table + slot * pages
    list_at = rows + long_token * list_width
    ring_base = slot.to(tl.int32) * ring_size

    # The sink takes part as a key without a value. Its limits keep differences of infinities away.
    sink = tl.load(sinks + head, mask=head < heads, other=0.0)
    peak = tl.minimum(tl.maximum(sink, -1e30), 1e30)
    total = tl.where(sink > -1e30, 1.0, 0.0)
    result = tl.zeros((H, W), tl.float32)
    near = tl.cdiv(window, B)  # blocks of raw keys; those of the pool follow
    end = 0  # of the entries
    if HAS_POOL:
        end = (position + 1) // ratio
        if IS_LISTED:  # the place after the last one listed
            end = 0
            for begin in range(0, list_width, 512):
                place = begin + tl.arange(0, 512)
                listed = tl.load(list_at + place, mask=place < list_width, other=-1).to(tl.int32)
                end = tl.maximum(end, tl.max(tl.where(listed >= 0, place + 1, 0), 0))
    for number in range(tl.maximum(window - 1 - position, 0) // B, near + tl.cdiv(end, B)):
        place = number * B + tl.arange(0, B)
        key_at = position - window + 1 + place
        is_fresh = key_at >= start
        row = tl.where(is_fresh, token - (position - key_at), ring_base + tl.maximum(key_at, 0) % ring_size)
        is_key = (place < window) & (key_at >= 0)
        if IS_JOINED:
            row += tl.where(is_fresh, ring_rows, 0)
        if HAS_POOL:
            entry = place - near * B
            if IS_LISTED:
                inside = (entry >= 0) & (entry < list_width)
                entry_row = tl.load(list_at + entry, mask=inside, other=-1).to(tl.int32)
                is_entry = entry_row >= 0
            else:
                is_entry = (entry >= 0) & (entry < end)
                page = tl.load(table + entry // page_entries, mask=is_entry, other=0)
                entry_row = page * page_entries + entry % page_entries
            if IS_JOINED:
                entry_row += ring_rows + tokens
            is_key = tl.where(number < near, is_key, is_entry)
            row = tl.where(number < near, row, entry_row)
        row = tl.where(is_key, row, 0)
        if IS_JOINED:
            inside = is_key[:, None] & (col < width)[None, :]
            key = tl.load(ring + (row * width)[:, None] + col[None, :], mask=inside, other=0.0)
        else:
            far = row.to(tl.int64)
            row_bytes = row_items
            if IS_KV8:
                row_bytes = row_items * item
            data = tl.where(is_fresh, fresh + far * row_bytes, ring + far * row_bytes)
            rest = tl.where(is_fresh, fresh_rest + far * row_items, ring_rest + far * row_items)
            scales = tl.where(is_fresh, fresh_scales + far * row_scales, ring_scales + far * row_scales)
            if HAS_POOL:
                data = tl.where(number < near, data, pool + far * row_bytes)
                rest = tl.where(number < near, rest, pool_rest + far * row_items)
                scales = tl.where(number < near, scales, pool_scales + far * row_scales)
            key = _decoded(data, rest, scales, is_key, width, nope, item, act, IS_KV8, B, W)
        peak, total, result = _meet(query, key, is_key, score_scale, peak, total, result)
    result *= tl.div_rn(tl.full((H,), 1.0, tl.float32), total)[:, None]
    tl.store(out + long_token * heads * width + q_at, result.to(act), mask=here)
    # Rotated back in place, when all threads have written: beside the sums of a whole row of heads the pairs
    # would take registers that are not there.
    tl.debug_barrier()
    c = tl.load(cos + token * half + pair, mask=pair < half, other=1.0)[None, :]
    s = tl.load(sin + token * half + pair, mask=pair < half, other=0.0)[None, :]
    a = tl.load(out + pair_at, mask=turns, other=0.0).to(tl.float32)
    b = tl.load(out + pair_at + 1, mask=turns, other=0.0).to(tl.float32)
    tl.store(out + pair_at, (a * c + b * s).to(act), mask=turns)
    tl.store(out + pair_at + 1, (b * c - a * s).to(act), mask=turns)


@triton.jit
def _store_rows(data, rest, scales, out, is_row, to, width, nope, item, B: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stored rows, each by pointers, as values in rows `to`."""
    act: tl.constexpr = out.dtype.element_ty
    value = _decoded(data, rest, scales, is_row, width, nope, item, act, True, B, W)
    col = tl.arange(0, W)
    tl.store(out + to[:, None] * width + col[None, :], value, mask=is_row[:, None] & (col < width)[None, :])


@triton.jit(do_not_specialize=["ring_rows", "count"])
def _decode_raw_kernel(ring, ring_rest, ring_scales, fresh, fresh_rest, fresh_scales, out, ring_rows, count,  # type: ignore[no-untyped-def]
                       width, nope, item, row_items, row_scales, B: tl.constexpr,
                       W: tl.constexpr):  # fmt: skip
    """All rows of the ring, then this step's."""
    to = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    is_ring = to < ring_rows
    row = tl.where(is_ring, to, to - ring_rows)
    row_bytes = row_items * item
    _store_rows(tl.where(is_ring, ring + row * row_bytes, fresh + row * row_bytes),
                tl.where(is_ring, ring_rest + row * row_items, fresh_rest + row * row_items),
                tl.where(is_ring, ring_scales + row * row_scales, fresh_scales + row * row_scales),
                out, to < count, to, width, nope, item, B, W)  # fmt: skip


@triton.jit(
    do_not_specialize=["tokens", "at", "ratio", "page_entries", "pages"],
    do_not_specialize_on_alignment=["slots", "positions"],
)
def _decode_seen_kernel(data, rest, scales, out, at, page_table, slots, positions, tokens, ratio,  # type: ignore[no-untyped-def]
                        page_entries, pages, width, nope, item, row_items, row_scales, T: tl.constexpr,
                        B: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """The rows of a pool that the last token of each sequence sees; row r to row at + r."""
    for begin in range(0, tokens, T):
        token = begin + tl.arange(0, T)
        is_last = token < tokens
        slot_of = tl.load(slots + token, mask=is_last, other=-1)
        position = tl.load(positions + token, mask=is_last, other=-1)
        is_more = token + 1 < tokens
        next_slot = tl.load(slots + token + 1, mask=is_more, other=-1)
        next_position = tl.load(positions + token + 1, mask=is_more, other=-1)
        is_last = is_last & (position >= 0) & ((next_slot != slot_of) | (next_position < 0))
        last = tl.min(tl.where(is_last, token, tokens), 0)
        while last < tokens:
            count = ((tl.load(positions + last) + 1) // ratio).to(tl.int32)
            table = page_table + tl.load(slots + last) * pages
            for first in range(tl.program_id(0) * B, count, tl.num_programs(0) * B):
                entry = first + tl.arange(0, B)
                page = tl.load(table + entry // page_entries, mask=entry < count, other=0).to(tl.int64)
                row = page * page_entries + entry % page_entries
                _store_rows(data + row * (row_items * item), rest + row * row_items,
                            scales + row * row_scales, out, entry < count, at + row, width, nope, item,
                            B, W)  # fmt: skip
            last = tl.min(tl.where(is_last & (token > last), token, tokens), 0)


def attend(
    q: Tensor,
    fresh: QuantTensor,
    ring: QuantTensor,
    slots: Tensor,
    positions: Tensor,
    first: Tensor,
    window: int,
    ring_size: int,
    pool: QuantTensor | None,
    rows: Tensor | None,
    sinks: Tensor,
    cos: Tensor,
    sin: Tensor,
    page_table: Tensor | None = None,
    ratio: int = 0,
    page_entries: int = 0,
    eps: float | None = None,
    reader: object = None,
) -> Tensor | Packed:
    """A token at position -1 attends to nothing. prefill_sm90.cu packs its result for a `reader` in tiles."""
    tokens, heads, width = q.shape
    if not tokens:
        return torch.empty_like(q)
    q, dtype = q.contiguous(), q.dtype
    most, keys, warps, stages = tile("prefill attend", BLOCK, dtype, q.device)
    half, is_listed = cos.shape[1], rows is not None
    assert pool is None or is_listed or (page_table is not None and ratio and page_entries)
    entries, joined = ring if pool is None else pool, None
    kept = ring.shape[0] + (0 if pool is None else pool.shape[0])
    if ring.format is Format.KV8 and kept * width * dtype.itemsize <= DECODED_BYTES:
        joined = _joined(ring, fresh, pool, dtype, page_table, slots, positions, ratio, page_entries)
    if joined is not None and hopper.serves(q, 2 * half):
        made: Tensor | Packed
        if prompts.serves(reader, q.dtype) and reader.shape[1] % width == 0:
            k = reader.shape[1]
            mode = mode_of(reader, "a16")
            made = empty_packed(mode, tokens, k, q.device, matrices=heads * width // k)
        else:
            made = torch.empty_like(q)
        hopper.attend(
            q=q,
            keys=joined,
            out=made,
            slots=slots,
            positions=positions,
            first=first,
            window=window,
            ring_size=ring_size,
            ring_rows=ring.shape[0],
            has_pool=pool is not None,
            rows=None if rows is None else rows.int().contiguous(),
            page_table=page_table,
            ratio=ratio,
            page_entries=page_entries,
            sinks=sinks,
            cos=cos.contiguous(),
            sin=sin.contiguous(),
            eps=eps,
        )
        return made
    out = torch.empty_like(q)
    data = [joined] * 9
    if joined is None:
        data = [tensor for store in (ring, fresh, entries) for tensor in _pointers(store, dtype)]
    listed = slots if rows is None else rows.contiguous()
    table = slots if page_table is None else page_table
    block_heads = max(16, min(most, triton.next_power_of_2(heads)))
    _attend_kernel[(tokens, triton.cdiv(heads, block_heads))](
        *(q, *data, listed, table, slots, positions, first, sinks, cos.contiguous(), sin.contiguous(), out),
        *(tokens, heads, width, width - 2 * half, window, ring_size, ring.shape[0]),
        *(listed.shape[1] if is_listed else 0, ratio or 1, page_entries or 1),
        *(table.shape[1] if page_table is not None else 0, *_row_sizes(ring, dtype)),
        *(q.element_size(), width**-0.5, eps or 0.0),
        **{"IS_RAW": eps is not None, "HAS_POOL": pool is not None, "IS_LISTED": is_listed},
        **{"IS_JOINED": joined is not None, "IS_KV8": ring.format is Format.KV8},
        **{"H": block_heads, "B": keys, "W": max(64, triton.next_power_of_2(width))},
        **{"R": triton.next_power_of_2(half), "num_warps": warps, "num_stages": stages},
    )
    return out


def _joined(
    ring: QuantTensor,
    fresh: QuantTensor,
    pool: QuantTensor | None,
    dtype: torch.dtype,
    page_table: Tensor | None,
    slots: Tensor,
    positions: Tensor,
    ratio: int,
    page_entries: int,
) -> Tensor:
    """Rows of KV8 stores one after the other, in the compute type, which holds them: [rows, D]. Of a pool
    with a page table only what the tokens see."""
    width, raw = ring.shape[1], ring.shape[0] + fresh.shape[0]
    count = raw + (0 if pool is None else pool.shape[0])
    out = torch.empty(count, width, dtype=dtype, device=ring.data.device)
    sizes = (width, width - ring.rope_dim, dtype.itemsize, *_row_sizes(ring, dtype))
    block = {"B": 16, "W": max(64, triton.next_power_of_2(width)), "num_warps": 4}
    both = (*_pointers(ring, dtype), *_pointers(fresh, dtype))
    _decode_raw_kernel[(triton.cdiv(raw, 16),)](*both, out, ring.shape[0], raw, *sizes, **block)
    if pool is not None and page_table is None:
        rows = pool.shape[0]
        both = (*_pointers(pool, dtype), *_pointers(pool, dtype))
        _decode_raw_kernel[(triton.cdiv(rows, 16),)](*both, out[raw:], rows, rows, *sizes, **block)
    elif pool is not None and page_table is not None:
        _decode_seen_kernel[(min(_PROGRAMS, triton.cdiv(count, 16)),)](
            *(*_pointers(pool, dtype), out, raw, page_table, slots, positions, positions.shape[0]),
            *(ratio, page_entries, page_table.shape[1], *sizes),
            **{"T": 512, **block},
        )
    return out


def _pointers(store: QuantTensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A store's data, the same as items of the compute type (the rotary part of KV8), and its scales."""
    assert store.format in (Format.KV8, Format.BF16, Format.F32) and store.data.is_contiguous()
    if store.scale is None:
        return store.data, store.data, store.data
    assert (store.shape[1] - store.rope_dim) % dtype.itemsize == 0 and KV_BLOCK == 64
    return store.data, store.data.view(dtype), store.scale


def _row_sizes(store: QuantTensor, dtype: torch.dtype) -> tuple[int, int]:
    """Items of the compute type and scales in one row."""
    if store.scale is None:
        return store.shape[1], 0
    return store.data.shape[1] // dtype.itemsize, store.scale.shape[1]


attend_block = cpu.attend_block  # a few rows of each sequence, which decode steps take otherwise


def queries(q: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return row_kernels.norm_rotate(q, None, cos, sin, eps)


def entries(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return row_kernels.norm_rotate(x, weight, cos, sin, eps)


def store(kv: Tensor, rope_dim: int, format: Format, qat: bool) -> QuantTensor:
    """Other formats than KV8 are for comparisons: the reference's elementwise steps serve them."""
    return row_kernels.kv8(kv, rope_dim) if format is Format.KV8 else cpu.store(kv, rope_dim, format, qat)


def put_rows(store: QuantTensor, rows: Tensor, values: QuantTensor, tokens: Tensor | None = None) -> None:
    """A row of -1 is none: a graph's lists are padded."""
    assert store.format is values.format and store.shape[1] == values.shape[1]
    place(store.data, values.data, store.scale, values.scale, rows, tokens)


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


def put_tail(
    tail_values: Tensor,
    tail_scores: Tensor,
    rows: Tensor,
    values: Tensor,
    scores: Tensor,
    tokens: Tensor | None = None,
) -> None:
    """A row of -1 is none: a graph's lists are padded."""
    place(tail_values, values, tail_scores, scores, rows, tokens)
