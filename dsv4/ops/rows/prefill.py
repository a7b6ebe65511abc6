"""Prompts: rows of a few hundred or thousand channels. Norm, RoPE, Hadamard transform, FP8 and FP4 rounding,
and the forms in which the cache keeps them. Each row is reduced in one program, in one order."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.gpu.numbers import (
    block_scale,
    e2m1_decode,
    e4m3_encode,
    finite,
    hadamard,
    mxfp4_blocks,
    power,
    rotate,
    rounded,
)
from dsv4.ops.activation import PLAIN, Activation, Form, Norm, activation
from dsv4.ops.linear import prefill_product as product
from dsv4.ops.linear.prefill_packed import Packed
from dsv4.ops.rows import quantize
from dsv4.quant.formats import KV_BLOCK, MX_BLOCK, Format, QuantTensor, scale_bytes


@triton.jit
def rotate_part(x, cos_ptr, sin_ptr, at, start, stop, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rotate channels start .. stop-1 of x [R, W], act values; row r by cos[at[r]], sin[at[r]].

    What lies outside is not touched, be it infinite: a product by one and zero would.
    """
    W: tl.constexpr = x.shape[1]
    half = (stop - start) // 2
    pair = tl.arange(0, W // 2) - start // 2
    rotates = ((pair >= 0) & (pair < half))[None, :]
    where = at[:, None] * half + pair[None, :]
    cos = tl.load(cos_ptr + where, mask=rotates, other=1.0)
    sin = tl.load(sin_ptr + where, mask=rotates, other=0.0)
    col = tl.arange(0, W)
    return tl.where(((col >= start) & (col < stop))[None, :], rotate(x, cos, sin, ACT), x)


@triton.jit(do_not_specialize=["count"])
def _rows_kernel(x, weight, cos, sin, y, codes, scales, count, width, heads, rope, eps, share,  # type: ignore[no-untyped-def]
                 x_row, NORM: tl.constexpr, WEIGHT: tl.constexpr, ROTATE: tl.constexpr,
                 FP4: tl.constexpr, PACK: tl.constexpr, R: tl.constexpr, W: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    col = tl.arange(0, W)
    rows_ok = row < count
    inside = rows_ok[:, None] & (col < width)[None, :]
    act = x.dtype.element_ty
    v = tl.load(x + row[:, None] * x_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        mean = eps + tl.sum(v * v, 1) * share
        v = tl.div_rn(v, tl.broadcast_to(tl.sqrt_rn(mean)[:, None], (R, W)))
        if WEIGHT:
            v = tl.load(weight + col, mask=col < width, other=0.0)[None, :] * v
        v = rounded(v, act)
    if ROTATE:
        # Rows beyond the last take its angles; nothing of theirs is stored.
        at = tl.minimum(row, count - 1) // heads
        v = rotate_part(v, cos, sin, at, width - rope, width, act)
    if FP4:
        code, scale = mxfp4_blocks(hadamard(v, act))
        if PACK:
            low, high = tl.split(tl.reshape(code, (R, W // 2, 2)))
            byte, pair = low | (high << 4), tl.arange(0, W // 2)
            at = row[:, None] * (width // 2) + pair[None, :]
            tl.store(codes + at, byte.to(tl.uint8), mask=rows_ok[:, None] & (pair < width // 2)[None, :])
            block, blocks_of_row = tl.arange(0, W // 32), tl.cdiv(width, 32)
            at = row[:, None] * blocks_of_row + block[None, :]
            tl.store(
                scales + at, scale.to(tl.uint8), mask=rows_ok[:, None] & (block < blocks_of_row)[None, :]
            )
        v = tl.reshape(e2m1_decode(code) * power(scale)[:, :, None], (R, W))
    if not PACK:
        tl.store(y + row[:, None] * width + col[None, :], v.to(act), mask=inside)


@triton.jit
def _kv8_kernel(x, data, rope_data, scales, width, nope, rope_row, scale_row, item,  # type: ignore[no-untyped-def]
                BLOCKS: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """One row: E4M3 codes with a scale per 64 channels, then the rotary channels as they are."""
    row = tl.program_id(0).to(tl.int64)
    block, within = tl.arange(0, BLOCKS), tl.arange(0, 64)
    col = block[:, None] * 64 + within[None, :]
    v = finite(tl.load(x + row * width + col, mask=col < nope, other=0.0).to(tl.float32))
    scale = block_scale(v, 1e-4, 1.0 / 448.0)
    code = e4m3_encode(v * power(254 - scale)[:, None])
    tl.store(data + row * (rope_row * item) + col, code, mask=col < nope)
    scale = tl.where(block * 64 < nope, scale, 0)
    tl.store(scales + row * scale_row + block, scale.to(tl.uint8), mask=block < scale_row)
    col = tl.arange(0, W)
    rest = (col >= nope) & (col < width)
    value = tl.load(x + row * width + col, mask=rest, other=0.0)
    tl.store(rope_data + row * rope_row + nope // item + col - nope, value, mask=rest)


def _launch(
    x: Tensor,
    y: Tensor | None = None,
    packed: QuantTensor | None = None,
    heads: int = 1,
    eps: float | None = None,
    weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    fp4: bool = False,
) -> None:
    """x [rows, D] with dense channels -> y, or `packed`. With eps: norm; with cos and sin: RoPE; with `fp4`:
    Hadamard transform and rounding. `heads`: rows that share a row of cos and sin."""
    count, width = x.shape
    if not count:
        return
    w = triton.next_power_of_2(max(width, 32))
    # A constant of the width alone: the programs of one row and of thousands are alike.
    block_rows = max(1, min(16, 4096 // w))
    _rows_kernel[(triton.cdiv(count, block_rows),)](
        x=x,
        weight=x if weight is None else weight,
        cos=x if cos is None else cos.contiguous(),
        sin=x if sin is None else sin.contiguous(),
        y=x if y is None else y,
        codes=x if packed is None else packed.data,
        scales=x if packed is None else packed.scale,
        count=count,
        width=width,
        heads=heads,
        rope=0 if cos is None else 2 * cos.shape[-1],
        eps=0.0 if eps is None else eps,
        share=1 / width,
        x_row=x.stride(0),
        NORM=eps is not None,
        WEIGHT=weight is not None,
        ROTATE=cos is not None,
        FP4=fp4,
        PACK=packed is not None,
        R=block_rows,
        W=w,
        num_warps=4,
    )


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., D]."""
    flat = x.reshape(-1, x.shape[-1])
    y = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    _launch(flat, y, eps=eps, weight=weight)
    return y.view(x.shape)


def normed(x: Tensor, norm: Norm) -> Activation:
    """Norm and the rounding for the first reader are one launch, and one rounding serves all."""
    first = norm.forms[0].source
    if not len(x) or first == PLAIN:
        return completed(activation(rms_norm(x, norm.weight, norm.eps)), norm.forms)
    is_kept = any(form.source != first for form in norm.forms)
    kept = torch.empty_like(x, memory_format=torch.contiguous_format) if is_kept else None
    values = {} if kept is None else {"a16": kept}
    if first.is_codes:
        codes = quantize.pack(x, norm_weight=norm.weight, eps=norm.eps, normed=kept)
        return completed(Activation(x, values, codes_4=codes), norm.forms)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    quantize.round_values(x, out, first.activations, norm.weight, norm.eps, kept, overlap=False)
    return completed(Activation(x, values | {first.activations: out}), norm.forms)


def completed(x: Activation, forms: Sequence[Form]) -> Activation:
    """The same with all packed forms, in that order."""
    for form in forms if len(x.like) else ():
        if form.mode is not None and form not in x.packed:
            source = form.source.activations
            x = replace(x, values={**x.values, source: as_values(x, source)})
            x = replace(x, packed={**x.packed, form: as_packed(x, form)})
    return x


def as_values(x: Activation, activations: str) -> Tensor:
    """The rows rounded, as they are or here."""
    if activations in x.values:
        return x.values[activations]
    out = torch.empty(x.plain.shape, dtype=x.plain.dtype, device=x.plain.device)
    quantize.round_values(x.plain, out, activations, overlap=False)
    return out


def as_packed(x: Activation, form: Form, by: product.Sorted | None = None) -> Packed:
    """The rows packed for a mode, as they are or here; of `by` those that it lists."""
    if by is None and form in x.packed:
        return x.packed[form]
    assert form.mode is not None
    source = form.source.activations
    rows = as_values(x, source).contiguous()
    # FP8 codes are made while rows are packed.
    activations = "a16" if source == form.activations else form.activations
    return product.pack_as(rows if by is not None else rows.unsqueeze(1), form.mode, activations, by)


def as_codes(x: Activation) -> quantize.Packed:
    """The rows in NVFP4, as they are or here."""
    return quantize.pack(x.plain) if x.codes_4 is None else x.codes_4


def norm_rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Norm, then RoPE on the last channels of x [T, ..., D] by cos, sin [T, R]."""
    flat = x.reshape(-1, x.shape[-1])
    y = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    _launch(flat, y, heads=_heads(x), eps=eps, weight=weight, cos=cos, sin=sin)
    return y.view(x.shape)


def rotate_round(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE, Hadamard transform and FP4 rounding of x [T, H, d]; d a power of two, at least 32."""
    flat = x.reshape(-1, x.shape[-1])
    y = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    _launch(flat, y, heads=_heads(x), cos=cos, sin=sin, fp4=True)
    return y.view(x.shape)


def index_keys(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> QuantTensor:
    """Norm, RoPE, Hadamard transform of x [C, d], stored as MXFP4; d a power of two, at least 32."""
    count, width = x.shape
    data = torch.empty(count, width // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(count, -(-width // MX_BLOCK), dtype=torch.uint8, device=x.device)
    packed = QuantTensor(Format.MXFP4, data, (count, width), scale)
    _launch(x.contiguous(), packed=packed, eps=eps, weight=weight, cos=cos, sin=sin, fp4=True)
    return packed


def kv8(x: Tensor, rope_dim: int) -> QuantTensor:
    """codec.encode_kv of rows x [T, D] in the KV8 format. The FP8 part's bytes must fill whole items of x."""
    count, width = x.shape
    nope, item = width - rope_dim, x.element_size()
    assert nope % item == 0, (nope, item)
    x = x.contiguous()
    data = torch.empty(count, nope + rope_dim * item, dtype=torch.uint8, device=x.device)
    scale = torch.empty(count, scale_bytes(nope), dtype=torch.uint8, device=x.device)
    if count:
        blocks = triton.next_power_of_2(scale.shape[1])
        assert blocks * KV_BLOCK >= nope
        _kv8_kernel[(count,)](
            x=x,
            data=data,
            rope_data=data.view(x.dtype),
            scales=scale,
            width=width,
            nope=nope,
            rope_row=data.shape[1] // item,
            scale_row=scale.shape[1],
            item=item,
            BLOCKS=blocks,
            W=triton.next_power_of_2(width),
            num_warps=4,
        )
    return QuantTensor(Format.KV8, data, (count, width), scale, rope_dim=rope_dim)


def _heads(x: Tensor) -> int:
    """Rows per token of x [T, ..., D]."""
    heads = 1
    for size in x.shape[1:-1]:
        heads *= size
    return heads
