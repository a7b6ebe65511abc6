"""Decode step and prompts: activations as quantised products see them, rows in FP8 (a8) or NVFP4 (a4).

`round_values` replaces ops.linear.cpu.round_input: it gives the values that the codes stand for, in the
compute type, so that every product takes them. `pack` gives the codes, for tensor cores that multiply FP4.
Either may be fused with what makes the row: RMSNorm (prefill.py), or an expert's clamped SwiGLU.
Everything of a row is found in one program from that row alone: company changes nothing.

BF16 rows are quantize.cu's. Triton takes float32, and widths and places that 16 bytes do not divide.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.gpu.build import call
from dsv4.gpu.numbers import (
    INTERPRETED,
    block_scale,
    channels,
    e4m3_decode,
    e4m3_encode,
    finite,
    launch,
    launch_dependents,
    norm,
    power,
    rounded,
    to_act,
    wait_for_prerequisites,
)
from dsv4.gpu.pdl import launcher
from dsv4.gpu.shapes import HOW
from dsv4.gpu.structs import mirror
from dsv4.ops.rows import meaning
from dsv4.quant.formats import FP8_TILE, NV_BLOCK

MAX_CHANNELS = 65536  # of a row, which one program holds
SCALE_ROWS, SCALE_COLUMNS = 128, 4  # a tile of the 32_4_4 layout
# Of quantize.cu: channels of a thread, warps of a row at most, and of a block with several rows.
CHANNELS, MAX_WARPS, FEW_WARPS = 32, 16, 4
PLAIN, NORM, SWIGLU = 0, 1, 2


@triton.jit
def nvfp4_scales(blocks):  # type: ignore[no-untyped-def]
    """blocks [B, 16] of a row -> E4M3 codes [B] and the row's global scale, as the codec's.

    As integers, the bits of NaN are above those of every number. A row with NaN has global scale 1. Infinity
    counts as the largest float.
    """
    tops = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    tops = tl.where(tops == 0x7F800000, 0x7F7FFFFF, tops)
    top = tl.max(tops, 0)
    share = tl.div_rn(top.to(tl.float32, bitcast=True), 2688.0)
    scale = tl.where((share > 0) & (top < 0x7F800000), share, 1.0)
    wanted = tl.div_rn(tops.to(tl.float32, bitcast=True), 6.0 * scale)
    # A comparison instead of a maximum: NaN stays.
    return e4m3_encode(tl.where(wanted < 0.001953125, 0.001953125, wanted)), scale


@triton.jit
def _quotients(blocks, unit, scale, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """blocks [B, 16] / unit [B, 1], rounded as a division is; `scale` tells how large `unit` is.

    A block's one reciprocal, and Markstein's corrections: exact where nothing under- or overflows, in five
    instructions instead of a division's dozen. They lose the sign of zero, which is the block's.
    """
    wide = tl.broadcast_to(unit, (B, 16))
    if INTERPRETED:  # which knows no fused multiply-add
        return tl.div_rn(blocks, wide)
    if (scale > 2.0**-80) & (scale < 2.0**80):
        inverse = tl.broadcast_to(tl.div_rn(1.0, unit), (B, 16))
        q = blocks * inverse
        q = tl.fma(tl.fma(-q, wide, blocks), inverse, q)
        q = tl.fma(tl.fma(-q, wide, blocks), inverse, q)
    else:
        q = tl.div_rn(blocks, wide)
    return q


@triton.jit
def _steps(q):  # type: ignore[no-untyped-def]
    """|q|, at most 6, rounded to E2M1's steps, ties to even: the sum that rounds, what was added, and the
    bits of the number whose exponent tells the step.

    1.5 * 2^22 times the power of two below |q|, at least 1, has ulps as wide as E2M1's steps there.
    """
    size = tl.minimum(tl.abs(q), 6.0)
    bits = tl.maximum(size, 1.0).to(tl.int32, bitcast=True)
    magic = ((bits & 0x7F800000) + ((22 << 23) | 0x400000)).to(tl.float32, bitcast=True)
    return size + magic, magic, bits


@triton.jit
def _e2m1_value(q, x):  # type: ignore[no-untyped-def]
    """The E2M1 value next to q, with the sign of x."""
    total, magic, _ = _steps(q)
    value = (total - magic).to(tl.int32, bitcast=True)
    return (value | (x.to(tl.int32, bitcast=True) & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1_code(q, x):  # type: ignore[no-untyped-def]
    """Its code (int32): steps above zero, two more for every power of two that they are wider."""
    total, magic, bits = _steps(q)
    code = total.to(tl.int32, bitcast=True) - magic.to(tl.int32, bitcast=True) + ((bits >> 23) * 2 - 254)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _nvfp4_quotients(blocks, scales, scale, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is rounded to E2M1 [B, 16], and what one of each block is worth [B, 1]."""
    # The interpreter decodes the code of NaN as a number.
    unit = tl.where(scales == 0x7F, float("nan"), e4m3_decode(scales) * scale)[:, None]
    return _quotients(blocks, unit, scale, B), unit


@triton.jit
def round_row(x, HOW: tl.constexpr, SIZE: tl.constexpr, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [SIZE], act values, zero beyond the row -> act values after quantisation and back."""
    if HOW == 8:
        blocks = tl.reshape(finite(x), (SIZE // 128, 128))
        scale = block_scale(blocks, 1e-4, 1.0 / 448.0)
        codes = e4m3_encode(blocks * power(254 - scale)[:, None])
        x = tl.reshape(e4m3_decode(codes) * power(scale)[:, None], (SIZE,))
    elif HOW == 4:
        blocks = tl.reshape(x, (SIZE // 16, 16))
        scales, scale = nvfp4_scales(blocks)
        q, unit = _nvfp4_quotients(blocks, scales, scale, SIZE // 16)
        x = rounded(tl.reshape(_e2m1_value(q, blocks) * unit, (SIZE,)), ACT)
    return x


@triton.jit
def swiglu(gate, up, weight, limit, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """ops.experts.cpu: gate and up are rounded before they are clamped. Comparisons keep NaN."""
    gate, up = rounded(gate, ACT), rounded(up, ACT)
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return rounded(weight * (tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up), ACT)


@triton.jit
def _row(x_ptr, row, x_row, weight_ptr, eps, K: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr,  # type: ignore[no-untyped-def]
         SWIGLU: tl.constexpr, ACT: tl.constexpr):  # fmt: skip
    """The row to be quantised, act values [SIZE]. `eps`: of the norm, or the limit of SwiGLU."""
    if NORM:
        weight = channels(weight_ptr, K, SIZE)
    wait_for_prerequisites()
    x = channels(x_ptr + row * x_row, K, SIZE).to(tl.float32)
    if NORM:
        x = norm(x, weight, eps, K, ACT)
    if SWIGLU:
        factor = 1.0 if weight_ptr is None else tl.load(weight_ptr + row)
        x = swiglu(x, channels(x_ptr + row * x_row + K, K, SIZE).to(tl.float32), factor, eps, ACT)
    return x


@triton.jit
def _values_kernel(x_ptr, x_row, weight_ptr, eps, made_ptr, out_ptr, out_row,  # type: ignore[no-untyped-def]
                   K: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr, SWIGLU: tl.constexpr,
                   HOW: tl.constexpr):  # fmt: skip
    act: tl.constexpr = out_ptr.dtype.element_ty
    launch_dependents()
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    x = _row(x_ptr, row, x_row, weight_ptr, eps, K, SIZE, NORM, SWIGLU, act)
    if made_ptr is not None:
        tl.store(made_ptr + row * K + c, to_act(x, act), mask=c < K)
    tl.store(out_ptr + row * out_row + c, to_act(round_row(x, HOW, SIZE, act), act), mask=c < K)


@triton.jit(do_not_specialize=["count"])
def _pack_kernel(x_ptr, x_row, weight_ptr, eps, made_ptr, codes_ptr, scales_ptr, global_ptr, count,  # type: ignore[no-untyped-def]
                 K: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr, SWIGLU: tl.constexpr,
                 IS_TILED: tl.constexpr):  # fmt: skip
    """Rows from `count` on are padding of the last tile of scales: zero."""
    launch_dependents()
    row, block, pair = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE // 16), tl.arange(0, SIZE // 2)
    act: tl.constexpr = x_ptr.dtype.element_ty
    source = tl.minimum(row, count - 1)
    x = _row(x_ptr, source, x_row, weight_ptr, eps, K, SIZE, NORM, SWIGLU, act)
    is_row = row < count
    if made_ptr is not None:
        c = tl.arange(0, SIZE)
        tl.store(made_ptr + row * K + c, to_act(x, act), mask=is_row & (c < K))
    blocks = tl.reshape(x, (SIZE // 16, 16))
    scales, scale = nvfp4_scales(blocks)
    q, _ = _nvfp4_quotients(blocks, scales, scale, SIZE // 16)
    low, high = tl.split(tl.reshape(_e2m1_code(q, blocks), (SIZE // 2, 2)))
    tl.store(
        codes_ptr + row * (K // 2) + pair, (low | (high << 4)).to(tl.uint8), mask=is_row & (pair < K // 2)
    )
    tl.store(global_ptr + row, scale, mask=is_row)
    width: tl.constexpr = (K + 15) // 16
    if IS_TILED:
        padded: tl.constexpr = (width + 3) // 4 * 4
        at = (row // 128 * (padded // 4) + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
        scales = tl.where(is_row & (block < width), scales, 0).to(tl.uint8)
        tl.store(scales_ptr + at, scales, mask=block < padded)
    else:
        tl.store(scales_ptr + row * width + block, scales, mask=is_row & (block < width))


_Rows = mirror("rows/quantize.cu", "Rows")


def _is_cuda(width: int, *tensors: Tensor | None) -> bool:
    """Whether quantize.cu takes these; the last of them is a weight, or None."""
    *rows, weight = tensors
    given = [tensor for tensor in rows if tensor is not None]
    return (
        not triton.knobs.runtime.interpret
        and all(t.dtype == torch.bfloat16 and t.stride(0) % 8 == 0 for t in given)
        and all(t.data_ptr() % 16 == 0 for t in tensors if t is not None)
        and width % 8 == 0
        and width <= 32 * CHANNELS * MAX_WARPS
        and (weight is None or weight.dtype == torch.float32)
    )


def _launch(
    source: int, makes_codes: bool, overlap: bool, x: Tensor, width: int, how: int, **rest: Any
) -> None:
    """Narrow rows share a block. NVFP4 takes a block of it in one thread, FP8 what is read at once."""
    warps = -(-width // (32 * CHANNELS))
    per_block = max(1, FEW_WARPS // warps)
    rows = _Rows(
        x=x,
        x_row=x.stride(0),
        width=width,
        how=how,
        share=1 / width,
        warps=warps,
        per_block=per_block,
        **rest,
    )
    words = 8 if makes_codes or how == HOW["a4"] else 4
    kernel = f"rows_kernel<{words}, {str(makes_codes).lower()}, {source}>"
    blocks, threads = -(-rows.padded // per_block), 32 * warps * per_block
    call("rows/quantize", kernel, x.device, rows, blocks=blocks, threads=threads, overlap=overlap)


def _size(width: int, block: int) -> int:
    assert 0 < width <= MAX_CHANNELS, width
    return max(block, triton.next_power_of_2(width))


def _warps(size: int) -> int:
    """Sixteen values of a thread, up to 32 warps."""
    return min(32, max(1, size // 512))


@launcher(
    reads=("x",),
    reads_early=("norm_weight",),
    writes=("out", "normed"),
    means=meaning.round_values,
)
def round_values(
    x: Tensor,
    out: Tensor,
    activations: str,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    normed: Tensor | None = None,
    overlap: bool = True,
) -> None:
    """x [T, K] -> out [T, K], which may be x. With `norm_weight` [K], of the normalised row, which goes to
    `normed` too if that is given."""
    assert x.shape == out.shape and x.stride(1) == out.stride(1) == 1 and x.dtype == out.dtype
    assert normed is None or (normed.shape == out.shape and normed.is_contiguous())
    _values(x=x, out=out, activations=activations, weight=norm_weight, eps=eps, made=normed, overlap=overlap)


def swiglu_values(x: Tensor, weights: Tensor | None, limit: float, activations: str) -> Tensor:
    """x [P, 2I], gate beside up; weights [P] of routing -> [P, I], rounded as the down product wants it."""
    out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
    assert x.stride(1) == 1
    _values(x=x, out=out, activations=activations, weight=weights, eps=limit, is_swiglu=True)
    return out


def _values(
    *,
    x: Tensor,
    out: Tensor,
    activations: str,
    weight: Tensor | None,
    eps: float,
    made: Tensor | None = None,
    is_swiglu: bool = False,
    overlap: bool = False,
) -> None:
    rows, width = out.shape
    assert weight is None or weight.is_contiguous(), weight.stride()
    source = SWIGLU if is_swiglu else PLAIN if weight is None else NORM
    if rows and _is_cuda(width, x, out, made, weight):
        _launch(
            source,
            makes_codes=False,
            overlap=overlap,
            x=x,
            width=width,
            how=HOW[activations],
            weight=weight,
            made=made,
            out=out,
            out_row=out.stride(0),
            codes=None,
            scales=None,
            factors=None,
            count=rows,
            padded=rows,
            is_tiled=False,
            eps=eps,
        )
    elif rows:
        size = _size(width, FP8_TILE)
        launch(
            _values_kernel,
            grid=(rows,),
            num_warps=_warps(size),
            overlap=overlap,
            x_ptr=x,
            x_row=x.stride(0),
            weight_ptr=weight,
            eps=eps,
            made_ptr=made,
            out_ptr=out,
            out_row=out.stride(0),
            K=width,
            SIZE=size,
            NORM=source == NORM,
            SWIGLU=is_swiglu,
            HOW=HOW[activations],
        )


@dataclass(frozen=True)
class Packed:
    """Rows of NVFP4 as FP4 tensor cores read them: value = code * block scale * global scale."""

    codes: Tensor  # uint8 [T, K/2], even channels in the low half
    scales: Tensor  # uint8, E4M3: [T, ceil(K/16)], or flat in the 32_4_4 layout of tensor memory
    factor: Tensor  # float32 [T], the global scales

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device, is_tiled: bool = False) -> "Packed":
        blocks = -(-width // NV_BLOCK)
        padded = -(-rows // SCALE_ROWS) * SCALE_ROWS * (-(-blocks // SCALE_COLUMNS) * SCALE_COLUMNS)
        return cls(
            codes=torch.empty(rows, width // 2, dtype=torch.uint8, device=device),
            scales=torch.empty((padded,) if is_tiled else (rows, blocks), dtype=torch.uint8, device=device),
            factor=torch.empty(rows, device=device),
        )


def pack(
    x: Tensor,
    is_tiled: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    normed: Tensor | None = None,
) -> Packed:
    """x [T, K], K even, or its norm, which goes to `normed` too if that is given -> codes. `is_tiled`: scales
    in the 32_4_4 layout, padded with zeros."""
    assert normed is None or (normed.shape == x.shape and normed.is_contiguous())
    return _pack(x, x.shape[1], is_tiled, norm_weight, eps, is_swiglu=False, made=normed)


def swiglu_pack(x: Tensor, weights: Tensor | None, limit: float, is_tiled: bool = False) -> Packed:
    """x [P, 2I], gate beside up -> codes of the hidden rows [P, I]."""
    return _pack(x, x.shape[1] // 2, is_tiled, weights, limit, is_swiglu=True)


def _pack(
    x: Tensor,
    width: int,
    is_tiled: bool,
    weight: Tensor | None,
    eps: float,
    is_swiglu: bool,
    made: Tensor | None = None,
) -> Packed:
    rows = x.shape[0]
    assert x.stride(1) == 1 and width % 2 == 0, (x.shape, x.stride())
    assert weight is None or weight.is_contiguous(), weight.stride()
    out = Packed.empty(rows, width, x.device, is_tiled)
    grid = -(-rows // SCALE_ROWS) * SCALE_ROWS if is_tiled else rows
    source = SWIGLU if is_swiglu else PLAIN if weight is None else NORM
    if rows and _is_cuda(width, x, made, weight):
        _launch(
            source,
            makes_codes=True,
            overlap=False,
            x=x,
            width=width,
            how=HOW["a16"],
            weight=weight,
            made=made,
            out=None,
            out_row=0,
            codes=out.codes,
            scales=out.scales,
            factors=out.factor,
            count=rows,
            padded=grid,
            is_tiled=is_tiled,
            eps=eps,
        )
    elif rows:
        size = _size(width, 64)
        launch(
            _pack_kernel,
            grid=(grid,),
            num_warps=_warps(size),
            overlap=False,
            x_ptr=x,
            x_row=x.stride(0),
            weight_ptr=weight,
            eps=eps,
            made_ptr=made,
            codes_ptr=out.codes,
            scales_ptr=out.scales,
            global_ptr=out.factor,
            count=rows,
            K=width,
            SIZE=size,
            NORM=source == NORM,
            SWIGLU=is_swiglu,
            IS_TILED=is_tiled,
        )
    return out
