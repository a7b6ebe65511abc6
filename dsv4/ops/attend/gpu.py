"""Prompt attention in Triton: one program per token and group of heads, keys gathered in blocks, a running
softmax in one fixed order of blocks. A block without keys changes no bit, hence padding of `rows` neither.
Nothing depends on how many entries there can be: a program ends with those that its token sees."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.prefill.rows import e8m0_value
from dsv4.quant.formats import KV_BLOCK, Format, QuantTensor

# Entries are found by the page table here, without a list.
WANTS_LISTS = False
# Heads of a program at most, keys of a block, warps, stages; by compute type.
BLOCK = {torch.bfloat16: (64, 64, 8, 2), torch.float32: (16, 16, 4, 1)}
# Up to so many tokens read stored rows and decode them where they are met. More share decoded copies of the
# raw keys and, up to this size, of the pool: the kernel then copies rows instead of decoding them anew for
# every query. The values are the same.
DIRECT_TOKENS = 512
DECODED_BYTES = 512 << 20


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
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        value = value * e8m0_value(scale.to(tl.int32))[:, :, None]
        is_rest = is_key[:, None, None] & (col >= nope) & (col < width)
        turned = tl.load(rest[:, None, None] + nope // item + col - nope, mask=is_rest, other=0.0)
        key = tl.where(col < nope, value.to(act), turned.to(act))
        return tl.reshape(key, (B, W))
    else:
        col = tl.arange(0, W)
        inside = is_key[:, None] & (col < width)[None, :]
        return tl.load(data[:, None] + col[None, :], mask=inside, other=0.0).to(act)


@triton.jit
def _meet(q, key, is_key, scale, peak, total, out):  # type: ignore[no-untyped-def]
    """One block of keys [B, W] that are the values too: the running softmax of q [H, W] goes on."""
    score = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
    score = tl.where(is_key[None, :], score, -float("inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    shrink = tl.exp(peak - higher)
    weight = tl.exp(score - higher[:, None])
    total = total * shrink + tl.sum(weight, 1)
    out = tl.dot(weight.to(q.dtype), key, out * shrink[:, None], input_precision="ieee")
    return higher, total, out


@triton.jit(
    do_not_specialize=["list_width", "ratio", "page_entries", "pages"],
    do_not_specialize_on_alignment=["slots", "positions", "first"],
)
def _attend_kernel(q, ring, ring_rest, ring_scales, fresh, fresh_rest, fresh_scales, pool, pool_rest,  # type: ignore[no-untyped-def]
                   pool_scales, rows, page_table, slots, positions, first, sinks, cos, sin, out, heads,
                   width, nope, window, ring_size, list_width, ratio, page_entries, pages, raw_row,
                   raw_scale_row, pool_row, pool_scale_row, item, scale, HAS_POOL: tl.constexpr,
                   IS_LISTED: tl.constexpr, RAW_KV8: tl.constexpr, POOL_KV8: tl.constexpr,
                   H: tl.constexpr, B: tl.constexpr, W: tl.constexpr, R: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * H + tl.arange(0, H)
    col = tl.arange(0, W)
    act: tl.constexpr = out.dtype.element_ty
    here = (head < heads)[:, None] & (col < width)[None, :]
    q_at = token * heads * width + head[:, None] * width + col[None, :]
    query = tl.load(q + q_at, mask=here, other=0.0)
    slot, position, start = tl.load(slots + token), tl.load(positions + token), tl.load(first + token)
    raw_bytes, pool_bytes = raw_row, pool_row  # of data: items, or with KV8 bytes
    if RAW_KV8:
        raw_bytes = raw_row * item
    if POOL_KV8:
        pool_bytes = pool_row * item

    # The sink takes part as a key without a value. Its limits keep differences of infinities away.
    sink = tl.load(sinks + head, mask=head < heads, other=0.0)
    peak = tl.minimum(tl.maximum(sink, -1e30), 1e30)
    total = tl.where(sink > -1e30, 1.0, 0.0)
    result = tl.zeros((H, W), tl.float32)
    for block in range(0, window, B):
        key_at = position - window + 1 + block + tl.arange(0, B)
        is_key = (key_at >= 0) & (key_at <= position)
        is_fresh = key_at >= start
        row = tl.where(is_fresh, token - (position - key_at), slot * ring_size + key_at % ring_size)
        row = tl.where(is_key, row, 0)
        data = tl.where(is_fresh, fresh + row * raw_bytes, ring + row * raw_bytes)
        rest = tl.where(is_fresh, fresh_rest + row * raw_row, ring_rest + row * raw_row)
        scales = tl.where(is_fresh, fresh_scales + row * raw_scale_row, ring_scales + row * raw_scale_row)
        key = _decoded(data, rest, scales, is_key, width, nope, item, act, RAW_KV8, B, W)
        peak, total, result = _meet(query, key, is_key, scale, peak, total, result)
    if HAS_POOL:
        end = ((position + 1) // ratio).to(tl.int32)
        if IS_LISTED:  # the place after the last one listed
            end = 0
            for begin in range(0, list_width, 512):
                place = begin + tl.arange(0, 512)
                listed = tl.load(rows + token * list_width + place, mask=place < list_width, other=-1)
                end = tl.maximum(end, tl.max(tl.where(listed >= 0, place + 1, 0), 0))
        for block in range(0, end, B):
            place = block + tl.arange(0, B)
            if IS_LISTED:
                listed = tl.load(rows + token * list_width + place, mask=place < list_width, other=-1)
                is_key = listed >= 0
                row = tl.where(is_key, listed, 0).to(tl.int64)
            else:
                is_key = place < end
                page = tl.load(page_table + slot * pages + place // page_entries, mask=is_key, other=0)
                row = page.to(tl.int64) * page_entries + place % page_entries
            key = _decoded(pool + row * pool_bytes, pool_rest + row * pool_row,
                           pool_scales + row * pool_scale_row, is_key, width, nope, item, act, POOL_KV8,
                           B, W)  # fmt: skip
            peak, total, result = _meet(query, key, is_key, scale, peak, total, result)
    result = tl.div_rn(result, tl.broadcast_to(total[:, None], (H, W)))
    tl.store(out + q_at, result.to(act), mask=here)
    # Rotated back in place, when all threads have written: beside the sums of a whole row of heads the pairs
    # would take registers that are not there.
    tl.debug_barrier()
    half = (width - nope) // 2
    pair = tl.arange(0, R)
    turns = (head < heads)[:, None] & (pair < half)[None, :]
    c = tl.load(cos + token * half + pair, mask=pair < half, other=1.0)[None, :]
    s = tl.load(sin + token * half + pair, mask=pair < half, other=0.0)[None, :]
    at = out + token * heads * width + head[:, None] * width + nope + 2 * pair[None, :]
    a = tl.load(at, mask=turns, other=0.0).to(tl.float32)
    b = tl.load(at + 1, mask=turns, other=0.0).to(tl.float32)
    tl.store(at, (a * c + b * s).to(act), mask=turns)
    tl.store(at + 1, (b * c - a * s).to(act), mask=turns)


@triton.jit(do_not_specialize=["count"])
def _decode_kernel(data, rest, scales, out, width, nope, rest_row, scale_row, item, count,  # type: ignore[no-untyped-def]
                   B: tl.constexpr, W: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    act: tl.constexpr = out.dtype.element_ty
    value = _decoded(data + row * (rest_row * item), rest + row * rest_row, scales + row * scale_row,
                     row < count, width, nope, item, act, True, B, W)  # fmt: skip
    col = tl.arange(0, W)
    inside = (row < count)[:, None] & (col < width)[None, :]
    tl.store(out + row[:, None] * width + col[None, :], value, mask=inside)


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
) -> Tensor:
    """A token at position -1 attends to nothing."""
    tokens, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    q, dtype = q.contiguous(), q.dtype
    most, keys, warps, stages = BLOCK[dtype]
    nope = width - fresh.rope_dim
    is_listed = rows is not None
    assert pool is None or is_listed or (page_table is not None and ratio and page_entries)
    if tokens > DIRECT_TOKENS:
        ring, fresh = decoded(ring, dtype), decoded(fresh, dtype)
        if pool is not None and pool.shape[0] * width * q.element_size() <= DECODED_BYTES:
            pool = decoded(pool, dtype)
    entries = ring if pool is None else pool
    listed = slots if rows is None else rows.contiguous()
    table = slots if page_table is None else page_table
    block_heads = max(16, min(most, triton.next_power_of_2(heads)))
    half = cos.shape[1]
    assert 2 * half == width - nope or fresh.format is not Format.KV8, (cos.shape, width, nope)
    _attend_kernel[(tokens, triton.cdiv(heads, block_heads))](
        *(q, *_pointers(ring, dtype), *_pointers(fresh, dtype), *_pointers(entries, dtype), listed, table),
        *(slots, positions, first, sinks, cos.contiguous(), sin.contiguous(), out, heads, width),
        *(width - 2 * half, window, ring_size, listed.shape[1] if is_listed else 0, ratio or 1),
        *(page_entries or 1, table.shape[1] if page_table is not None else 0),
        *(*_row_sizes(ring, dtype), *_row_sizes(entries, dtype), q.element_size(), width**-0.5),
        **{"HAS_POOL": pool is not None, "IS_LISTED": is_listed},
        **{"RAW_KV8": ring.format is Format.KV8, "POOL_KV8": entries.format is Format.KV8},
        **{"H": block_heads, "B": keys, "W": max(64, triton.next_power_of_2(width))},
        **{"R": triton.next_power_of_2(half), "num_warps": warps, "num_stages": stages},
    )
    return out


def decoded(store: QuantTensor, dtype: torch.dtype) -> QuantTensor:
    """The same rows; KV8 becomes the compute type, which holds them."""
    if store.format is not Format.KV8:
        return store
    count, width = store.shape
    plain = torch.empty(count, width, dtype=dtype, device=store.data.device)
    block = 16
    if count:
        _decode_kernel[(triton.cdiv(count, block),)](
            *(*_pointers(store, dtype), plain, width, width - store.rope_dim),
            *(*_row_sizes(store, dtype), plain.element_size(), count),
            **{"B": block, "W": max(64, triton.next_power_of_2(width)), "num_warps": 4},
        )
    format = Format.BF16 if dtype == torch.bfloat16 else Format.F32
    return QuantTensor(format, plain, (count, width))


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
