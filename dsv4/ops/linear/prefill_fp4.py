"""Prompts: products of NVFP4 rows with NVFP4 weights, codes on both sides; of one weight or chosen experts.

One kernel with two inner loops: tensor cores that multiply FP4 (Blackwell), or decoding to BF16, in which a
code times its block scale is exact. Weights are read from the tiles of the decode step (`Tiled.is_plain`), so
nothing is held twice. Global scales enter after the sum, before anything that is not linear.
"""

from typing import TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.gpu import architectures
from dsv4.gpu.architectures import ARCHITECTURES
from dsv4.gpu.numbers import INTERPRETED, e2m1_decode, e4m3_decode
from dsv4.gpu.tiles import Tiled
from dsv4.ops.linear.prefill_product import CAPS, Sorted, cap_for
from dsv4.ops.rows.quantize import Packed
from dsv4.quant.formats import NV_BLOCK, Format

# Rows of the weight, depth, warps and stages of a tile, by its rows of x. The weight is the tensor core's
# left operand (on sm_100 that takes 128 rows at a time): few rows of x make a narrow tile, not an empty one.
Tile = tuple[int, int, int, int]
TILE: dict[int, dict[int, Tile]] = {
    90: dict.fromkeys(CAPS, (128, 128, 8, 2)),
    100: dict.fromkeys(CAPS, (128, 256, 4, 3)),
    120: dict.fromkeys(CAPS, (128, 128, 4, 3)) | {128: (128, 128, 8, 3)},
}
MAX_ROWS = CAPS[-1]
# Triton versions whose code for tl.dot_scaled was read, and for which GPUs. Codes lie along K, so that the
# fault of 3.8.0 on sm_120 (codes along M or N) does not show; 3.6 stops with an assertion for sm_121.
SCALED = {"3.6": (100, 103, 120)}


def uses_tensor_cores(capability: int, version: str = triton.__version__) -> tuple[bool, str]:
    """Whether FP4 is multiplied as it is, and why or why not."""
    gpu = ARCHITECTURES[capability]
    if not gpu.fp4:
        return False, f"sm_{gpu.name} multiplies no FP4: codes are decoded to BF16"
    if capability not in SCALED.get(".".join(version.split(".")[:2]), ()):
        known = ", ".join(f"{v} for sm_{'/'.join(map(str, gpus))}" for v, gpus in SCALED.items())
        return (
            False,
            f"Triton {version} is not known to multiply FP4 rightly on sm_{gpu.name} (known: {known})",
        )
    return True, f"FP4 tensor cores, {gpu.fp4.split('.')[0]}"


def serves(weight: object, dtype: torch.dtype, activations: str) -> TypeGuard[Tiled]:
    """Whether rows of `dtype` times this weight are a product of this file: both in NVFP4, where tensor cores
    multiply the codes."""
    return (
        activations == "a4"
        and dtype == torch.bfloat16
        and isinstance(weight, Tiled)
        and weight.format is Format.NVFP4
        and weight.shape[1] % NV_BLOCK == 0
        and uses_tensor_cores(architectures.capability(weight.factor.device))[0]
    )


@triton.jit
def _values(codes, scales, ROWS: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    """codes [ROWS, BK/2], scales [ROWS, BK/16], uint8 -> BF16 [ROWS, BK], exact."""
    wide = codes.to(tl.int32)
    pairs = tl.join(e2m1_decode(wide & 15), e2m1_decode(wide >> 4))
    blocks = tl.reshape(pairs, (ROWS, BK // 16, 16)) * e4m3_decode(scales)[:, :, None]
    return tl.reshape(blocks, (ROWS, BK)).to(tl.bfloat16)


@triton.jit
def _weight(data, scale, brick, k, BN: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns k .. k+BK-1 of the 16 rows of each of `brick` [BN/16], the slice with k in it: codes [BN, BK/2]
    and scales [BN, BK/16]. A brick is 64 columns after 64 columns, of 512 bytes each: row g, block t of 16,
    four columns, two columns, row g or g + 8 (tiles.py)."""
    units: tl.constexpr = BN // 16
    loads: tl.constexpr = BK // 64
    first = k % 512 // 64
    at = data + brick.to(tl.int64)[:, None] * 4096 + first * 512 + tl.arange(0, loads * 512)[None, :]
    codes = tl.reshape(tl.load(at), (units, loads, 8, 4, 4, 2, 2))
    codes = tl.reshape(tl.permute(codes, (0, 6, 2, 1, 3, 4, 5)), (BN, BK // 2))
    # Scales: row g, block t of 64 columns, which 64, row g or g + 8.
    lane, place = tl.arange(0, 32), tl.arange(0, 2 * loads)
    at = scale + brick.to(tl.int64)[:, None, None] * 512 + first * 2 + lane[None, :, None] * 16
    scales = tl.reshape(tl.load(at + place[None, None, :]), (units, 8, 4, loads, 2))
    return codes, tl.reshape(tl.permute(scales, (0, 4, 1, 3, 2)), (BN, BK // 16))


@triton.jit(do_not_specialize=["rows", "choices"], do_not_specialize_on_alignment=["tiles", "pairs", "homes"])
def _fp4_kernel(x_codes, x_scales, x_factor, data, scale, factor, homes, y, tiles, counts, pairs,  # type: ignore[no-untyped-def]
                rows, choices, cols, depth, x_row, units, slices, y_row, HALVES: tl.constexpr,
                GATHERS: tl.constexpr, SCATTERS: tl.constexpr, IS_SCALED: tl.constexpr,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """y[p] = x[p] times p's matrix, transposed. GATHERS: x of p's token; SCATTERS: to y of p's pair."""
    tile = tl.program_id(0)
    matrix, start, stop = 0, tile * BM, rows
    if tiles is not None:  # expert, first row, rows; pairs of -1 pad an expert's rows
        if tile >= tl.load(counts):
            return
        matrix, start = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
        stop = start + tl.load(tiles + tile * 4 + 2)
    row = start + tl.arange(0, BM)
    is_row = row < stop
    source = tl.minimum(row, stop - 1)  # rows beyond the end read the last one: their results are not stored
    place = row
    if pairs is not None:
        pair = tl.load(pairs + source)
        is_row = is_row & (pair >= 0)
        if GATHERS:
            source = tl.maximum(pair, 0) // choices
        if SCATTERS:
            place = pair
    # A program has rows of one half of a pair; their units are neighbours in y, not in memory.
    per_half = tl.cdiv(units, BN // 16)
    half, first_unit = tl.program_id(1) // per_half, tl.program_id(1) % per_half * (BN // 16)
    unit = tl.minimum(first_unit + tl.arange(0, BN // 16), units - 1)
    if homes is None:
        unit += matrix * units
    else:
        data += tl.load(homes + matrix)
        scale += tl.load(homes + matrix)
    pair_of, block = tl.arange(0, BK // 2), tl.arange(0, BK // 16)
    x_at = source.to(tl.int64)[:, None] * x_row
    total = tl.zeros((BN, BM), tl.float32)
    for k in range(0, depth, BK):
        has_pair, has_block = (pair_of < (depth - k) // 2)[None, :], (block < (depth - k) // 16)[None, :]
        b = tl.load(x_codes + x_at + k // 2 + pair_of[None, :], mask=has_pair, other=0)
        b_scale = tl.load(x_scales + x_at // 8 + k // 16 + block[None, :], mask=has_block, other=0)
        brick = (unit * slices + k // 512) * HALVES + half
        a, a_scale = _weight(data, scale, brick, k, BN, BK)
        if IS_SCALED:
            left, right = a_scale.to(tl.float8e4nv, bitcast=True), b_scale.to(tl.float8e4nv, bitcast=True)
            total = tl.dot_scaled(a, left, "e2m1", b.T, right, "e2m1", total)
        else:
            total = tl.dot(_values(a, a_scale, BN, BK), tl.trans(_values(b, b_scale, BM, BK)), total)
    total *= tl.load(factor + matrix * HALVES + half) * tl.load(x_factor + source)[None, :]
    col = first_unit * 16 + tl.arange(0, BN)
    at = place.to(tl.int64)[:, None] * y_row + half * cols + col[None, :]
    tl.store(y + at, tl.trans(total).to(y.dtype.element_ty), mask=is_row[:, None] & (col < cols)[None, :])


def product(
    x: Packed,
    weight: Tiled,
    y: Tensor,
    by: Sorted | None = None,
    gathers: bool = False,
    scatters: bool = False,
) -> None:
    """x [T, K] times weight [N, K] -> y [T, halves * N] of any type; scales of x plain.

    With `by`, x and y have its rows, each multiplied by its expert's matrix; or x those of its tokens
    (`gathers`), or y those of its pairs (`scatters`).
    """
    (cols, depth), halves = weight.shape, weight.halves
    assert x.scales.dim() == 2 and x.codes.shape[1] * 2 == depth and depth % NV_BLOCK == 0, x.codes.shape
    assert y.stride(1) == 1 and y.shape[1] == halves * cols and weight.is_plain, (y.shape, weight.is_plain)
    assert (by is not None or weight.count == 1) and (by is None or by.cap in CAPS), weight.count
    if not y.numel():
        return
    capability = architectures.capability(y.device)
    cap = cap_for(y.shape[0]) if by is None else by.cap
    bn, bk, warps, stages = TILE[capability // 10 * 10][cap]
    num_tiles = triton.cdiv(y.shape[0], cap) if by is None else by.tiles.shape[0]
    _fp4_kernel[(num_tiles, halves * triton.cdiv(weight.units, bn // 16))](
        x_codes=x.codes,
        x_scales=x.scales,
        x_factor=x.factor,
        data=weight.data,
        scale=weight.scale,
        factor=weight.factor,
        homes=weight.places,
        y=y,
        tiles=None if by is None else by.tiles,
        counts=None if by is None else by.counts,
        pairs=None if by is None else by.pairs,
        rows=y.shape[0],
        choices=1 if by is None else by.choices,
        cols=cols,
        depth=depth,
        x_row=depth // 2,
        units=weight.units,
        slices=weight.slices,
        y_row=y.stride(0),
        HALVES=halves,
        GATHERS=gathers,
        SCATTERS=scatters,
        IS_SCALED=uses_tensor_cores(capability)[0] and not INTERPRETED,
        BM=cap,
        BN=bn,
        BK=bk,
        num_warps=warps,
        num_stages=stages,
    )
