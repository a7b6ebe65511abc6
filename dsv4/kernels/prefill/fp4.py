"""Prompts: products of NVFP4 rows with NVFP4 weights, codes on both sides; of one weight or chosen experts.

One kernel with two inner loops: tensor cores that multiply FP4 (Blackwell), or decoding to BF16, in which a
code times its block scale is exact. Global scales enter after the sum, before anything that is not linear.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.common import architectures
from dsv4.kernels.common.architectures import ARCHITECTURES
from dsv4.kernels.common.numbers import e2m1_decode, e4m3_decode
from dsv4.kernels.common.quantize import Packed
from dsv4.kernels.common.tiles import Tiled
from dsv4.kernels.prefill.unpack import unpack_codes
from dsv4.quant.formats import NV_BLOCK, Format

# Rows, columns and depth of a tile, warps, stages; tensor memory (sm_100) takes 128 rows at a time.
TILE = {
    90: (64, 128, 128, 8, 2),
    100: (128, 128, 256, 4, 3),
    120: (64, 128, 128, 4, 3),
}
# Triton versions whose code for tl.dot_scaled was read, and for which GPUs. Codes lie along K, so that the
# fault of 3.8.0 on sm_120 (codes along M or N) does not show; 3.6 stops with an assertion for sm_121.
SCALED = {"3.6": (100, 103, 120)}


@dataclass(frozen=True)
class Codes:
    """Matrices [N, K] of NVFP4, row-major, or pairs of them (gate and up) one above the other."""

    codes: Tensor  # uint8 [count, halves * N, K/2]
    scales: Tensor  # uint8 [count, halves * N, K/16]
    factor: Tensor  # float32 [count, halves]


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


@triton.jit
def _values(codes, scales, ROWS: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    """codes [ROWS, BK/2], scales [ROWS, BK/16], uint8 -> BF16 [ROWS, BK], exact."""
    wide = codes.to(tl.int32)
    pairs = tl.join(e2m1_decode(wide & 15), e2m1_decode(wide >> 4))
    blocks = tl.reshape(pairs, (ROWS, BK // 16, 16)) * e4m3_decode(scales)[:, :, None]
    return tl.reshape(blocks, (ROWS, BK)).to(tl.bfloat16)


@triton.jit(do_not_specialize=["rows", "first"], do_not_specialize_on_alignment=["tiles", "tokens", "places"])
def _fp4_kernel(x_codes, x_scales, x_factor, w_codes, w_scales, w_factor, y, tiles, tokens, places,  # type: ignore[no-untyped-def]
                rows, first, cols, depth, y_row, HALVES: tl.constexpr, IS_SCALED: tl.constexpr,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """y[places[p]] = x[tokens[p]] times p's matrix, transposed."""
    tile = tl.program_id(0)
    matrix, start, stop = first, tile * BM, rows
    if tiles is not None:  # matrix, first row, the row after its last
        matrix = tl.load(tiles + tile * 3)
        start, stop = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    row = start + tl.arange(0, BM)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    pair, block = tl.arange(0, BK // 2), tl.arange(0, BK // 16)
    # Rows and columns beyond the end read the last one: their results are not stored.
    token = tl.minimum(row, stop - 1)
    place = row
    if tokens is not None:
        token = tl.load(tokens + token)
    if places is not None:
        place = tl.load(places + tl.minimum(row, stop - 1))
    x_at = token.to(tl.int64) * depth
    w_at = ((matrix - first).to(tl.int64) * cols + tl.minimum(col, cols - 1)) * depth
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, depth, BK):
        has_pair, has_block = (pair < (depth - k) // 2)[None, :], (block < (depth - k) // 16)[None, :]
        a = tl.load(x_codes + (x_at[:, None] + k) // 2 + pair[None, :], mask=has_pair, other=0)
        b = tl.load(w_codes + (w_at[:, None] + k) // 2 + pair[None, :], mask=has_pair, other=0)
        a_scale = tl.load(x_scales + (x_at[:, None] + k) // 16 + block[None, :], mask=has_block, other=0)
        b_scale = tl.load(w_scales + (w_at[:, None] + k) // 16 + block[None, :], mask=has_block, other=0)
        if IS_SCALED:
            left, right = a_scale.to(tl.float8e4nv, bitcast=True), b_scale.to(tl.float8e4nv, bitcast=True)
            total = tl.dot_scaled(a, left, "e2m1", b.T, right, "e2m1", total)
        else:
            total = tl.dot(_values(a, a_scale, BM, BK), tl.trans(_values(b, b_scale, BN, BK)), total)
    half = tl.minimum(col, cols - 1) // (cols // HALVES)
    factor = tl.load(w_factor + matrix * HALVES + half)
    total *= tl.load(x_factor + token)[:, None] * factor[None, :]
    at = place.to(tl.int64)[:, None] * y_row + col[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=(row < stop)[:, None] & (col < cols)[None, :])


def row_tile(device: torch.device) -> int:
    """Rows of a tile, for whoever cuts the experts' rows into tiles."""
    return TILE[architectures.capability(device) // 10 * 10][0]


def serves(weights: Iterable[object], device: torch.device) -> bool:
    """Whether products of NVFP4 rows with these go this way: where tensor cores multiply the codes."""
    if device.type != "cuda" or not uses_tensor_cores(architectures.capability(device))[0]:
        return False
    return all(
        isinstance(w, Tiled) and w.format is Format.NVFP4 and not w.shape[1] % NV_BLOCK for w in weights
    )


def codes_of(weight: Tiled) -> Codes:
    """A weight's tiles as rows of codes, in scratch."""
    lead, k = (weight.count, weight.halves * weight.shape[0]), weight.shape[1]
    codes = torch.empty(*lead, k // 2, dtype=torch.uint8, device=weight.data.device)
    scales = torch.empty(*lead, k // NV_BLOCK, dtype=torch.uint8, device=weight.data.device)
    unpack_codes(weight, codes, scales)
    return Codes(codes, scales, weight.factor)


def product(
    x: Packed,
    w: Codes,
    y: Tensor,
    tiles: Tensor | None = None,
    tokens: Tensor | None = None,
    places: Tensor | None = None,
    first: int = 0,
) -> None:
    """x [T, K] times w [N, K] -> y [T, N] of any type; scales of x plain.

    With `tiles` [n, 3] int32 (matrix, first row, the row after its last), w has matrices first, first+1, ...
    and w.factor those of all. Row p reads x[tokens[p]] and writes y[places[p]] (None: p).
    """
    cols, depth = w.codes.shape[1], 2 * w.codes.shape[2]
    assert x.scales.dim() == 2 and x.codes.shape[1] * 2 == depth and depth % NV_BLOCK == 0, x.codes.shape
    assert y.stride(1) == 1 and y.shape[1] == cols and (tiles is not None or len(w.codes) == 1), y.shape
    if not y.numel():
        return
    capability = architectures.capability(y.device)
    bm, bn, bk, warps, stages = TILE[capability // 10 * 10]
    _fp4_kernel[(triton.cdiv(y.shape[0], bm) if tiles is None else len(tiles), triton.cdiv(cols, bn))](
        x_codes=x.codes,
        x_scales=x.scales,
        x_factor=x.factor,
        w_codes=w.codes,
        w_scales=w.scales,
        w_factor=w.factor,
        y=y,
        tiles=tiles,
        tokens=tokens,
        places=places,
        rows=y.shape[0],
        first=first,
        cols=cols,
        depth=depth,
        y_row=y.stride(0),
        HALVES=w.factor.shape[1],
        IS_SCALED=uses_tensor_cores(capability)[0],
        BM=bm,
        BN=bn,
        BK=bk,
        num_warps=warps,
        num_stages=stages,
    )
