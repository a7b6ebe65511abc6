"""Rows of a few hundred or thousand channels: norm, rotation, Hadamard transform, FP8 and FP4 rounding, and
the forms in which the cache keeps them. Each row is reduced in one program, in one order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.quant.formats import KV_BLOCK, MX_BLOCK, Format, QuantTensor, scale_bytes


@triton.jit
def e4m3_bits(x):  # type: ignore[no-untyped-def]
    """float32 -> E4M3 codes as int32: nearest even, clamped to +-448, NaN stays. By arithmetic: Triton's
    interpreter casts subnormals and carries otherwise than the hardware."""
    x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    bits = x.to(tl.int32, bitcast=True)
    size = tl.abs(x)
    whole = size.to(tl.int32, bitcast=True)
    normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes count steps of 2^-9; adding 2^23 rounds to whole steps.
    small = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x != x, 0x7F, code)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def p2ceil(v):  # type: ignore[no-untyped-def]
    """E8M0 code, int32, of the smallest power of two >= v, for normal v > 0."""
    bits = tl.minimum(v, 1.7014118346046923e38).to(tl.int32, bitcast=True)
    return tl.minimum((bits + 0x7FFFFF) >> 23, 255)


@triton.jit
def e8m0_value(code):  # type: ignore[no-untyped-def]
    """int32 codes -> float32 2^(code-127); 255 is NaN, 0 the subnormal 2^-127."""
    bits = tl.where(code == 255, 0x7FC00000, tl.where(code == 0, 0x400000, code << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def finite(x):  # type: ignore[no-untyped-def]
    largest = 3.4028234663852886e38
    return tl.where(x > largest, largest, tl.where(x < -largest, -largest, x))


@triton.jit
def block_scale(x, floor, share):  # type: ignore[no-untyped-def]
    """x [..., B], finite or NaN -> E8M0 codes [...] of p2ceil(amax * share); a block with NaN gets 255."""
    top = tl.max(tl.abs(x), -1)
    is_nan = tl.max((x != x).to(tl.int32), -1)
    return tl.where(is_nan > 0, 255, p2ceil(tl.maximum(top, floor) * share))


@triton.jit
def e2m1_bits(x):  # type: ignore[no-untyped-def]
    """float32 -> E2M1 codes as int32: nearest, ties to even, saturating at 6. NaN gives 7, as the codec's."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    code = tl.where(x != x, 7, code)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_value(code):  # type: ignore[no-untyped-def]
    """E2M1 codes, int32 -> float32."""
    size = code & 7
    # 0, 0.5, then 1, 1.5, 2, 3, 4, 6: an exponent of two bits and a mantissa of one.
    bits = ((size >> 1) + 126 << 23) | ((size & 1) << 22)
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, bits.to(tl.float32, bitcast=True))
    return tl.where(code >= 8, -value, value)


@triton.jit
def turn(x, cos, sin, at, start, stop, rows_ok, R: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rotate pairs of channels start .. stop-1 of x [R, W] float32; row r by cos[at[r]], sin[at[r]]."""
    half = (stop - start) // 2
    pair = tl.arange(0, W // 2) - start // 2
    turns = rows_ok[:, None] & ((pair >= 0) & (pair < half))[None, :]
    where = at[:, None] * half + pair[None, :]
    c = tl.load(cos + where, mask=turns, other=1.0)
    s = tl.load(sin + where, mask=turns, other=0.0)
    a, b = tl.split(tl.reshape(x, (R, W // 2, 2)))
    first = tl.where(turns, a * c - b * s, a)
    second = tl.where(turns, a * s + b * c, b)
    return tl.reshape(tl.join(first, second), (R, W))


@triton.jit(do_not_specialize=["count"])
def _rows_kernel(x, weight, cos, sin, y, codes, scales, count, width, heads, rope, eps, share,  # type: ignore[no-untyped-def]
                 x_row, NORM: tl.constexpr, WEIGHT: tl.constexpr, ROTATE: tl.constexpr,
                 HADAMARD: tl.constexpr, FP4: tl.constexpr, PACK: tl.constexpr, root,
                 R: tl.constexpr, W: tl.constexpr):  # fmt: skip
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
        v = v.to(act).to(tl.float32)
    if ROTATE:
        v = turn(v, cos, sin, row // heads, width - rope, width, rows_ok, R, W).to(act).to(tl.float32)
    if HADAMARD:
        # Each step transforms the lowest bit of the channel's number and moves it to the top.
        size: tl.constexpr = W
        for _ in tl.static_range(size.bit_length() - 1):
            a, b = tl.split(tl.reshape(v, (R, W // 2, 2)))
            v = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (R, W))
        v = (v * root).to(act).to(tl.float32)
    if FP4:
        blocks = finite(tl.reshape(v, (R, W // 32, 32)))
        scale = block_scale(blocks, 7.052966104933725e-38, 0.16666666666666666)
        unit = tl.broadcast_to(e8m0_value(scale)[:, :, None], (R, W // 32, 32))
        code = e2m1_bits(tl.div_rn(blocks, unit))
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
        v = tl.reshape(e2m1_value(code) * unit, (R, W))
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
    scale = block_scale(v, 1e-4, 0.002232142857142857)
    code = e4m3_bits(tl.div_rn(v, tl.broadcast_to(e8m0_value(scale)[:, None], (BLOCKS, 64))))
    tl.store(data + row * (rope_row * item) + col, code.to(tl.uint8), mask=col < nope)
    scale = tl.where(block * 64 < nope, scale, 0)
    tl.store(scales + row * scale_row + block, scale.to(tl.uint8), mask=block < scale_row)
    col = tl.arange(0, W)
    rest = (col >= nope) & (col < width)
    value = tl.load(x + row * width + col, mask=rest, other=0.0)
    tl.store(rope_data + row * rope_row + nope // item + col - nope, value, mask=rest)


def _launch(x: Tensor, y: Tensor | None, packed: QuantTensor | None, heads: int, **how: object) -> None:
    """x [rows, D] with dense channels; `how` names the stages and their tensors."""
    count, width = x.shape
    if not count:
        return
    w = triton.next_power_of_2(max(width, 32))
    # A constant of the width alone: the programs of one row and of thousands are alike.
    block_rows = max(1, min(16, 4096 // w))
    cos, sin, weight = how.get("cos"), how.get("sin"), how.get("weight")
    _rows_kernel[(triton.cdiv(count, block_rows),)](
        *(x, x if weight is None else weight, x if cos is None else cos, x if sin is None else sin),
        *(x if y is None else y, x if packed is None else packed.data, x if packed is None else packed.scale),
        *(count, width, heads, 0 if cos is None else 2 * cos.shape[-1]),  # type: ignore[attr-defined]
        *(how.get("eps", 0.0), 1 / width, x.stride(0)),
        **{"NORM": "eps" in how, "WEIGHT": weight is not None, "ROTATE": cos is not None},
        **{"HADAMARD": bool(how.get("fp4")), "FP4": bool(how.get("fp4")), "PACK": packed is not None},
        **{"root": width**-0.5, "R": block_rows, "W": w, "num_warps": 4},
    )


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """ops.norm.rms_norm: x [..., D]."""
    flat = x.reshape(-1, x.shape[-1])
    y = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    _launch(flat, y, None, 1, eps=eps, weight=weight)
    return y.view(x.shape)


def norm_rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Norm, then rotation of the last channels of x [T, ..., D] by cos, sin [T, R]."""
    flat = x.reshape(-1, x.shape[-1])
    y = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    turns = {"cos": cos.contiguous(), "sin": sin.contiguous()}
    _launch(flat, y, None, _heads(x), eps=eps, weight=weight, **turns)
    return y.view(x.shape)


def rotate_round(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotation, Hadamard transform and FP4 rounding of x [T, H, d]; d a power of two, at least 32."""
    flat = x.reshape(-1, x.shape[-1])
    y = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    _launch(flat, y, None, _heads(x), cos=cos.contiguous(), sin=sin.contiguous(), fp4=True)
    return y.view(x.shape)


def index_keys(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> QuantTensor:
    """Norm, rotation, Hadamard transform of x [C, d], stored as MXFP4; d a power of two, at least 32."""
    count, width = x.shape
    data = torch.empty(count, width // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(count, -(-width // MX_BLOCK), dtype=torch.uint8, device=x.device)
    packed = QuantTensor(Format.MXFP4, data, (count, width), scale)
    turns = {"cos": cos.contiguous(), "sin": sin.contiguous()}
    _launch(x.contiguous(), None, packed, 1, eps=eps, weight=weight, fp4=True, **turns)
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
            *(x, data, data.view(x.dtype), scale, width, nope, data.shape[1] // item, scale.shape[1], item),
            **{"BLOCKS": blocks, "W": triton.next_power_of_2(width), "num_warps": 4},
        )
    return QuantTensor(Format.KV8, data, (count, width), scale, rope_dim=rope_dim)


def _heads(x: Tensor) -> int:
    """Rows per token of x [T, ..., D]."""
    heads = 1
    for size in x.shape[1:-1]:
        heads *= size
    return heads
