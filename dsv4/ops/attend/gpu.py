"""Prompt attention in Triton: one program per token and group of heads, keys gathered in blocks, a running
softmax in one fixed order of blocks. A block without keys changes no bit, hence padding of `rows` neither."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.common.architectures import tile
from dsv4.kernels.common.numbers import e4m3_decode, power
from dsv4.kernels.prefill.rows import rotate_part
from dsv4.quant.formats import KV_BLOCK, Format, QuantTensor, join

# Heads of a program at most, keys of a block, warps, stages; by compute type.
BLOCK = {torch.bfloat16: (64, 64, 8, 2), torch.float32: (16, 16, 4, 1)}
# Decoded pools up to this size are made once per call: the kernel then copies rows instead of decoding them
# anew for every query. The values are the same.
DECODED_BYTES = 512 << 20


@triton.jit
def _decoded(data, rest, scales, row, is_key, width, nope, rest_row, scale_row, item,  # type: ignore[no-untyped-def]
             act: tl.constexpr, IS_KV8: tl.constexpr, B: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """Rows `row` [B] of a store as [B, W] of type `act`, zero where there is no key or no channel."""
    if IS_KV8:
        block, within = tl.arange(0, W // 64), tl.arange(0, 64)
        col = (block[:, None] * 64 + within[None, :])[None, :, :]
        is_code = is_key[:, None, None] & (col < nope)
        code = tl.load(data + row[:, None, None] * (rest_row * item) + col, mask=is_code, other=0)
        has_scale = is_key[:, None] & (block * 64 < nope)[None, :]
        scale = tl.load(scales + row[:, None] * scale_row + block[None, :], mask=has_scale, other=127)
        value = e4m3_decode(code) * power(scale.to(tl.int32))[:, :, None]
        is_rest = is_key[:, None, None] & (col >= nope) & (col < width)
        rotary = tl.load(
            rest + row[:, None, None] * rest_row + nope // item + col - nope, mask=is_rest, other=0.0
        )
        key = tl.where(col < nope, value.to(act), rotary.to(act))
        return tl.reshape(key, (B, W))
    else:
        col = tl.arange(0, W)
        inside = is_key[:, None] & (col < width)[None, :]
        return tl.load(data + row[:, None] * width + col[None, :], mask=inside, other=0.0).to(act)


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
    do_not_specialize=["list_width", "ring_rows"],
    do_not_specialize_on_alignment=["slots", "positions", "first", "ends"],
)
def _attend_kernel(q, raw, raw_rest, raw_scales, pool, pool_rest, pool_scales, rows, ends,  # type: ignore[no-untyped-def]
                   slots, positions, first, sinks, out, heads, width, nope, window, ring_size,
                   ring_rows, list_width, raw_row, raw_scale_row, pool_row, pool_scale_row, item, scale,
                   HAS_POOL: tl.constexpr, RAW_KV8: tl.constexpr, POOL_KV8: tl.constexpr,
                   H: tl.constexpr, B: tl.constexpr, W: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * H + tl.arange(0, H)
    col = tl.arange(0, W)
    act: tl.constexpr = out.dtype.element_ty
    here = (head < heads)[:, None] & (col < width)[None, :]
    q_at = token * heads * width + head[:, None] * width + col[None, :]
    query = tl.load(q + q_at, mask=here, other=0.0)
    slot, position, start = tl.load(slots + token), tl.load(positions + token), tl.load(first + token)

    # The sink takes part as a key without a value. Its limits keep differences of infinities away.
    sink = tl.load(sinks + head, mask=head < heads, other=0.0)
    peak = tl.minimum(tl.maximum(sink, -1e30), 1e30)
    total = tl.where(sink > -1e30, 1.0, 0.0)
    result = tl.zeros((H, W), tl.float32)
    for block in range(0, window, B):
        key_at = position - window + 1 + block + tl.arange(0, B)
        is_key = (key_at >= 0) & (key_at <= position)
        of_ring = slot * ring_size + tl.maximum(key_at, 0) % ring_size
        row = tl.where(key_at >= start, ring_rows + token - (position - key_at), of_ring)
        row = tl.where(is_key, row, 0)
        key = _decoded(raw, raw_rest, raw_scales, row, is_key, width, nope, raw_row, raw_scale_row, item,
                       act, RAW_KV8, B, W)  # fmt: skip
        peak, total, result = _meet(query, key, is_key, scale, peak, total, result)
    if HAS_POOL:
        for block in range(0, tl.load(ends + token), B):
            place = block + tl.arange(0, B)
            listed = tl.load(rows + token * list_width + place, mask=place < list_width, other=-1).to(
                tl.int64
            )
            is_key = listed >= 0
            row = tl.where(is_key, listed, 0)
            key = _decoded(pool, pool_rest, pool_scales, row, is_key, width, nope, pool_row, pool_scale_row,
                           item, act, POOL_KV8, B, W)  # fmt: skip
            peak, total, result = _meet(query, key, is_key, scale, peak, total, result)
    result = tl.div_rn(result, tl.broadcast_to(total[:, None], (H, W)))
    tl.store(out + q_at, result.to(act), mask=here)


@triton.jit(do_not_specialize=["count"])
def _rotate_kernel(x, cos, sin, count, width, heads, rope, R: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rotate the last `rope` channels of x [T, H, D] in place. On its own: beside the sums of a whole row of
    heads it would take registers that are not there."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    col = tl.arange(0, W)
    act: tl.constexpr = x.dtype.element_ty
    at = x + row[:, None] * width + width - rope + col[None, :]
    inside = (row < count)[:, None] & (col < rope)[None, :]
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    value = rotate_part(value, cos, sin, tl.minimum(row, count - 1) // heads, 0, rope, act)
    tl.store(at, value.to(act), mask=inside)


@triton.jit(do_not_specialize=["width"])
def _ends_kernel(rows, ends, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """ends[t]: the place after the last row listed for token t."""
    token = tl.program_id(0).to(tl.int64)
    end = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        listed = tl.load(rows + token * width + place, mask=place < width, other=-1)
        end = tl.where(listed >= 0, place + 1, end)
    tl.store(ends + token, tl.max(end, 0))


@triton.jit(do_not_specialize=["count"])
def _decode_kernel(data, rest, scales, out, width, nope, rest_row, scale_row, item, count,  # type: ignore[no-untyped-def]
                   B: tl.constexpr, W: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    act: tl.constexpr = out.dtype.element_ty
    value = _decoded(data, rest, scales, row, row < count, width, nope, rest_row, scale_row, item,
                     act, True, B, W)  # fmt: skip
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
) -> Tensor:
    tokens, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    q, dtype = q.contiguous(), q.dtype
    most, keys, warps, stages = tile("prefill attend", BLOCK, dtype, q.device)
    raw = decoded([ring, fresh], dtype)
    has_pool = pool is not None and rows is not None and rows.shape[1] > 0
    entries, listed, ends = raw, slots, slots
    if has_pool:
        assert pool is not None and rows is not None
        small = pool.shape[0] * width * q.element_size() <= DECODED_BYTES
        entries, listed = decoded([pool], dtype) if small else pool, rows.contiguous()
        ends = torch.empty(tokens, dtype=torch.int32, device=q.device)
        _ends_kernel[(tokens,)](listed, ends, listed.shape[1], BLOCK=512, num_warps=4)
    block_heads = max(16, min(most, triton.next_power_of_2(heads)))
    _attend_kernel[(tokens, triton.cdiv(heads, block_heads))](
        *(q, *_pointers(raw, dtype), *_pointers(entries, dtype), listed, ends, slots, positions, first),
        *(sinks, out, heads, width, width - fresh.rope_dim),
        *(window, ring_size, ring.shape[0], listed.shape[1] if has_pool else 0),
        *(*_row_sizes(raw, dtype), *_row_sizes(entries, dtype), q.element_size(), width**-0.5),
        **{
            "HAS_POOL": has_pool,
            "RAW_KV8": raw.format is Format.KV8,
            "POOL_KV8": entries.format is Format.KV8,
        },
        **{"H": block_heads, "B": keys, "W": max(64, triton.next_power_of_2(width))},
        **{"num_warps": warps, "num_stages": stages},
    )
    rope, count = 2 * cos.shape[1], tokens * heads
    _rotate_kernel[(triton.cdiv(count, 32),)](
        *(out, cos.contiguous(), -sin, count, width, heads, rope),
        **{"R": 32, "W": triton.next_power_of_2(rope), "num_warps": 4},
    )
    return out


def decoded(stores: list[QuantTensor], dtype: torch.dtype) -> QuantTensor:
    """Rows of stores kept alike, one after the other; KV8 becomes the compute type, which holds them."""
    if stores[0].format is not Format.KV8:
        return join(stores) if len(stores) > 1 else stores[0]
    total, width = sum(store.shape[0] for store in stores), stores[0].shape[1]
    plain = torch.empty(total, width, dtype=dtype, device=stores[0].data.device)
    block, w, start = 16, max(64, triton.next_power_of_2(width)), 0
    for store in stores:
        count = store.shape[0]
        if count:
            _decode_kernel[(triton.cdiv(count, block),)](
                *(*_pointers(store, dtype), plain[start:], width, width - store.rope_dim),
                *(*_row_sizes(store, dtype), plain.element_size(), count),
                **{"B": block, "W": w, "num_warps": 4},
            )
        start += count
    format = Format.BF16 if dtype == torch.bfloat16 else Format.F32
    return QuantTensor(format, plain, (total, width))


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
