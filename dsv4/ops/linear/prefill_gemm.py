"""Prompts: y = x Wᵀ in tiles of one fixed shape. A row has the same bits in whatever company it is computed.

Hence also, here and in the other kernels of prompts: a number that follows the batch is not specialised on,
nor the alignment of a pointer that does. One and the same machine code then serves every batch, and all of it
is compiled before the first (model/warm.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows, columns and depth of a tile, warps, stages; by compute type. Float32 is for sharp tests, not speed.
TILE = {torch.bfloat16: (128, 256, 64, 8, 3), torch.float32: (64, 64, 32, 4, 2)}
# Row tiles whose column tiles are walked together, so that both stay in L2.
GROUP_M = 8


@triton.jit
def end_chain(chains, total, step, CHAIN: tl.constexpr = 8):  # type: ignore[no-untyped-def]
    """A float32 product after a step: CHAIN tiles are one chain of additions, then its sum joins the others'.

    The rounding of one chain over all of K grows as its root: 1.5e-6 of a sum at 7,168 columns, five times
    that of chains of 256 or of a CPU's blocks (docs/kernels.md).
    """
    if step % CHAIN == CHAIN - 1:
        chains += total
        total = tl.zeros_like(total)
    return chains, total


@triton.jit(do_not_specialize=["rows", "tiles_m"])
def _gemm_kernel(x, w, y, factor, rows, cols, depth, tiles_m, tiles_n,  # type: ignore[no-untyped-def]
                 x_row, x_group, w_part, w_group, y_row, y_group,
                 PARTS: tl.constexpr, HAS_FACTOR: tl.constexpr, IS_EVEN: tl.constexpr, BM: tl.constexpr,
                 BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    tile, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tile // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = tile % (GROUP * tiles_n)
    row = (first + within % height) * BM + tl.arange(0, BM)
    col = within // height * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Rows and columns beyond the end read the last one: their results are not stored.
    x_at = x + group * x_group + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * x_row + k[None, :]
    w_at = w + group * w_group + tl.minimum(col, cols - 1).to(tl.int64)[:, None] * depth + k[None, :]
    steps = tl.cdiv(depth, BK)
    total = tl.zeros((BM, BN), tl.float32)
    chains = tl.zeros((BM, BN), tl.float32)
    for step in range(PARTS * steps):
        part = step // steps
        start = (step - part * steps) * BK
        if IS_EVEN:
            a = tl.load(x_at + start)
            b = tl.load(w_at + part * w_part + start)
        else:
            a = tl.load(x_at + start, mask=(k < depth - start)[None, :], other=0.0)
            b = tl.load(w_at + part * w_part + start, mask=(k < depth - start)[None, :], other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        if x.dtype.element_ty == tl.float32:
            chains, total = end_chain(chains, total, step)
    if x.dtype.element_ty == tl.float32:
        total += chains
    if HAS_FACTOR:
        total *= tl.load(factor + group)
    at = group * y_group + row.to(tl.int64)[:, None] * y_row + col[None, :]
    tl.store(y + at, total, mask=(row < rows)[:, None] & (col < cols)[None, :])


def gemm(x: Tensor, w: Tensor, y: Tensor, factor: Tensor | None) -> None:
    """x [T, G, K] times w [parts, G, N, K] -> y [T, G, N], of any type, times factor [G] (None: 1).

    The last dimensions are dense; w's are all but the first. x and w have the compute type.
    """
    num_rows, groups, depth = x.shape
    parts, _, cols, _ = w.shape
    assert x.dtype == w.dtype and x.stride(2) == 1 and y.stride(2) == 1 and w[0].is_contiguous()
    assert y.shape == (num_rows, groups, cols) and w.shape == (parts, groups, cols, depth), (x.shape, w.shape)
    if not y.numel():
        return
    bm, bn, bk, warps, stages = TILE[x.dtype]
    tiles_m, tiles_n = triton.cdiv(num_rows, bm), triton.cdiv(cols, bn)
    _gemm_kernel[(tiles_m * tiles_n, groups)](
        *(x, w, y, y if factor is None else factor, num_rows, cols, depth, tiles_m, tiles_n),
        *(x.stride(0), x.stride(1), w.stride(0), w.stride(1), y.stride(0), y.stride(1)),
        **{"PARTS": parts, "HAS_FACTOR": factor is not None, "IS_EVEN": depth % bk == 0},
        **{"BM": bm, "BN": bn, "BK": bk, "GROUP": GROUP_M, "num_warps": warps, "num_stages": stages},
    )
