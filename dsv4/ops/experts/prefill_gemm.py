"""Prompts: products of tokens with the experts they chose, many experts in one launch: gate and up fused with
SwiGLU, down, and the sum over a token's choices. The rows of an expert are neighbours; a tile never mixes
experts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.ops.linear.prefill_gemm import end_chain

# Rows, columns and depth of a tile, warps, stages; by compute type. Gate and up have one such tile each.
UP_TILE = {torch.bfloat16: (128, 128, 64, 8, 3), torch.float32: (32, 32, 32, 4, 2)}
DOWN_TILE = {torch.bfloat16: (128, 256, 64, 8, 3), torch.float32: (32, 64, 32, 4, 2)}


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["tiles"])
def _up_kernel(x, w, factor, y, tokens, weights, tiles, limit, width, depth,  # type: ignore[no-untyped-def]
               x_row, w_part, w_expert, first, HAS_WEIGHT: tl.constexpr, PARTS: tl.constexpr,
               IS_EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """y[p] = weight[p] * silu(min(gate, limit)) * clamp(up), of token tokens[p]; gate, up rounded first."""
    # Row tiles of one expert run side by side, its column tiles one after the other: they share weights.
    tile = tl.program_id(0)
    expert = tl.load(tiles + tile * 3)
    start, stop = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    row = start + tl.arange(0, BM)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    is_row = row < stop
    token = tl.load(tokens + tl.minimum(row, stop - 1))
    x_at = x + token.to(tl.int64)[:, None] * x_row + k[None, :]
    w_at = w + (expert - first).to(tl.int64) * w_expert
    w_at += tl.minimum(col, width - 1).to(tl.int64)[:, None] * depth + k[None, :]
    up_half = width.to(tl.int64) * depth
    steps = tl.cdiv(depth, BK)
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    gate_chains = tl.zeros((BM, BN), tl.float32)
    up_chains = tl.zeros((BM, BN), tl.float32)
    for step in range(PARTS * steps):
        part = step // steps
        at = (step - part * steps) * BK
        w_step = w_at + part * w_part + at
        if IS_EVEN:
            a = tl.load(x_at + at)
            b = tl.load(w_step)
            c = tl.load(w_step + up_half)
        else:
            inside = (k < depth - at)[None, :]
            a = tl.load(x_at + at, mask=inside, other=0.0)
            b = tl.load(w_step, mask=inside, other=0.0)
            c = tl.load(w_step + up_half, mask=inside, other=0.0)
        gate = tl.dot(a, tl.trans(b), gate, input_precision="ieee")
        up = tl.dot(a, tl.trans(c), up, input_precision="ieee")
        if x.dtype.element_ty == tl.float32:
            gate_chains, gate = end_chain(gate_chains, gate, step)
            up_chains, up = end_chain(up_chains, up, step)
    if x.dtype.element_ty == tl.float32:
        gate += gate_chains
        up += up_chains
    gate = (gate * tl.load(factor + expert * 2)).to(y.dtype.element_ty).to(tl.float32)
    up = (up * tl.load(factor + expert * 2 + 1)).to(y.dtype.element_ty).to(tl.float32)
    # Comparisons instead of minimum and maximum: NaN stays NaN.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    hidden = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    if HAS_WEIGHT:
        hidden = tl.load(weights + tl.minimum(row, stop - 1))[:, None] * hidden
    out = y + row.to(tl.int64)[:, None] * width + col[None, :]
    tl.store(out, hidden.to(y.dtype.element_ty), mask=is_row[:, None] & (col < width)[None, :])


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["tiles"])
def _down_kernel(x, w, factor, y, places, tiles, width, depth, w_part, w_expert,  # type: ignore[no-untyped-def]
                 first, HAS_PLACE: tl.constexpr, PARTS: tl.constexpr, IS_EVEN: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Row p of x [P, I] times its expert's w [D, I] goes to row places[p] of y [P, D]."""
    tile = tl.program_id(0)
    expert = tl.load(tiles + tile * 3)
    start, stop = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    row = start + tl.arange(0, BM)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = x + tl.minimum(row, stop - 1).to(tl.int64)[:, None] * depth + k[None, :]
    w_at = w + (expert - first).to(tl.int64) * w_expert
    w_at += tl.minimum(col, width - 1).to(tl.int64)[:, None] * depth + k[None, :]
    steps = tl.cdiv(depth, BK)
    total = tl.zeros((BM, BN), tl.float32)
    chains = tl.zeros((BM, BN), tl.float32)
    for step in range(PARTS * steps):
        part = step // steps
        at = (step - part * steps) * BK
        if IS_EVEN:
            a = tl.load(x_at + at)
            b = tl.load(w_at + part * w_part + at)
        else:
            inside = (k < depth - at)[None, :]
            a = tl.load(x_at + at, mask=inside, other=0.0)
            b = tl.load(w_at + part * w_part + at, mask=inside, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        if x.dtype.element_ty == tl.float32:
            chains, total = end_chain(chains, total, step)
    if x.dtype.element_ty == tl.float32:
        total += chains
    total *= tl.load(factor + expert)
    place = row
    if HAS_PLACE:
        place = tl.load(places + tl.minimum(row, stop - 1))
    out = y + place.to(tl.int64)[:, None] * width + col[None, :]
    tl.store(out, total.to(y.dtype.element_ty), mask=(row < stop)[:, None] & (col < width)[None, :])


@triton.jit(do_not_specialize=["first", "own"])
def _sum_kernel(y, ids, shared, out, width, first, own, HAS_IDS: tl.constexpr, HAS_SHARED: tl.constexpr,  # type: ignore[no-untyped-def]
                K: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out[t] = y[t*K] + y[t*K + 1] + ... + shared[t], in this order, which is the decode step's."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    for choice in tl.static_range(K):
        counts = inside
        if HAS_IDS:  # what other ranks' experts give is not there
            expert = tl.load(ids + token * K + choice)
            counts = inside & (expert >= first) & (expert < first + own)
        given = tl.load(y + (token * K + choice) * width + col, mask=counts, other=0.0).to(tl.float32)
        if choice == 0:
            total = given
        else:
            total += given
    if HAS_SHARED:
        total += tl.load(shared + token * width + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + col, total.to(out.dtype.element_ty), mask=inside)


def row_tile(dtype: torch.dtype) -> int:
    """Rows of a tile, for whoever cuts the experts' rows into tiles; both products cut alike."""
    assert UP_TILE[dtype][0] == DOWN_TILE[dtype][0]
    return UP_TILE[dtype][0]


def gate_up(
    x: Tensor,
    w: Tensor,
    factor: Tensor,
    hidden: Tensor,
    tokens: Tensor,
    weights: Tensor | None,
    tiles: Tensor,
    limit: float,
    first: int,
) -> None:
    """x [T, D], w [parts, G, 2I, D] of experts first .. first+G-1 -> hidden [P, I], rows of `tiles` only.

    Row p belongs to token tokens[p] with routing weight weights[p]; tiles [n, 3] int32 are expert, first row
    and the row after the expert's last; factor [E, 2]: of gate and up.
    """
    bm, bn, bk, warps, stages = UP_TILE[x.dtype]
    depth, width = x.shape[1], hidden.shape[1]
    assert x.dtype == w.dtype == hidden.dtype and x.stride(1) == 1 and w[0].is_contiguous()
    assert w.shape[2:] == (2 * width, depth) and hidden.is_contiguous() and tokens.dtype == torch.int32
    _up_kernel[(tiles.shape[0], triton.cdiv(width, bn))](
        *(x, w, factor, hidden, tokens, tokens if weights is None else weights, tiles, limit, width, depth),
        *(x.stride(0), w.stride(0), w.stride(1), first),
        **{"HAS_WEIGHT": weights is not None, "PARTS": w.shape[0], "IS_EVEN": depth % bk == 0},
        **{"BM": bm, "BN": bn, "BK": bk, "num_warps": warps, "num_stages": stages},
    )


def down(
    hidden: Tensor, w: Tensor, factor: Tensor, y: Tensor, places: Tensor | None, tiles: Tensor, first: int
) -> None:
    """hidden [P, I], w [parts, G, D, I], factor [E] -> y [P, D]: row p goes to places[p] (None: p)."""
    bm, bn, bk, warps, stages = DOWN_TILE[hidden.dtype]
    depth, width = hidden.shape[1], y.shape[1]
    assert hidden.dtype == w.dtype == y.dtype and hidden.is_contiguous() and y.is_contiguous()
    assert w.shape[2:] == (width, depth) and w[0].is_contiguous()
    _down_kernel[(tiles.shape[0], triton.cdiv(width, bn))](
        *(hidden, w, factor, y, tiles if places is None else places, tiles, width, depth),
        *(w.stride(0), w.stride(1), first),
        **{"HAS_PLACE": places is not None, "PARTS": w.shape[0], "IS_EVEN": depth % bk == 0},
        **{"BM": bm, "BN": bn, "BK": bk, "num_warps": warps, "num_stages": stages},
    )


def sum_choices(
    y: Tensor,
    out: Tensor,
    shared: Tensor | None = None,
    ids: Tensor | None = None,
    own: range = range(0),
) -> None:
    """y [T, K, D], shared [T, D] -> out [T, D]: summed in float32, rounded once. With ids [T, K]: of y what
    the experts of `own` gave."""
    assert y.is_contiguous() and out.is_contiguous() and (shared is None or shared.is_contiguous())
    assert ids is None or (ids.shape == y.shape[:2] and ids.is_contiguous() and len(own)), (y.shape, own)
    block = min(1024, triton.next_power_of_2(y.shape[2]))
    grid = (y.shape[0], triton.cdiv(y.shape[2], block))
    _sum_kernel[grid](
        y,
        y if ids is None else ids,
        y if shared is None else shared,
        out,
        y.shape[2],
        own.start,
        len(own),
        HAS_IDS=ids is not None,
        HAS_SHARED=shared is not None,
        K=y.shape[1],
        BLOCK=block,
        num_warps=4,
    )
