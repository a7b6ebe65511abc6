"""Hyper-connections in Triton: the mixes' product with the norm's sum in one read of the streams, Sinkhorn
for many tokens in one program, then the weighted sums. Each stream's part of a product is added in order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.ops.mhc.ref import sinkhorn

__all__ = ["head", "mixes", "post", "pre", "sinkhorn"]

# Tokens and depth of a product's tile, warps, stages; by the streams' type.
TILE = {torch.bfloat16: (64, 128, 4, 3), torch.float32: (32, 32, 4, 2)}
_TOKENS = 64  # of a program that finishes mixes
_CHANNELS = 1024  # of a program that adds streams up


@triton.jit
def _mixes_kernel(streams, fn, partial, squares, count, depth, mixes, row, stream,  # type: ignore[no-untyped-def]
                  N: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, M: tl.constexpr):  # fmt: skip
    """partial[t, n] = streams[t, n] times its rows of fn [N*D, M]; squares[t, n]: its sum of squares."""
    n = tl.program_id(1)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    k, m = tl.arange(0, BK), tl.arange(0, M)
    x_at = streams + tl.minimum(token, count - 1).to(tl.int64)[:, None] * row + n * stream + k[None, :]
    fn_at = fn + (n * depth + k)[:, None] * mixes + m[None, :]
    total = tl.zeros((BT, M), tl.float32)
    square = tl.zeros((BT, BK), tl.float32)
    for start in range(0, depth, BK):
        inside = k < depth - start
        x = tl.load(x_at + start, mask=inside[None, :], other=0.0)
        w = tl.load(fn_at + start * mixes, mask=inside[:, None] & (m < mixes)[None, :], other=0.0)
        wide = x.to(tl.float32)
        square += wide * wide
        if x.dtype == tl.bfloat16:
            # Three BF16 parts are the float32 weight, and their products with x are exact.
            high = w.to(tl.bfloat16)
            rest = w - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(x, high, total)
            total = tl.dot(x, middle, total)
            total = tl.dot(x, low, total)
        else:
            total = tl.dot(x, w, total, input_precision="ieee")
    at = (token.to(tl.int64) * N + n)[:, None] * mixes + m[None, :]
    tl.store(partial + at, total, mask=(token < count)[:, None] & (m < mixes)[None, :])
    tl.store(squares + token.to(tl.int64) * N + n, tl.sum(square, 1), mask=token < count)


@triton.jit
def _logits(partial, token, inv, scale, base, inside, first, mixes, N: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """[R, C] logits of the mixes first .. first+C-1: the streams' parts in order, norm, scale, base."""
    m = first + tl.arange(0, C)
    total = tl.load(partial + (token * N)[:, None] * mixes + m[None, :], mask=inside, other=0.0)
    for n in tl.static_range(1, N):
        total += tl.load(partial + (token * N + n)[:, None] * mixes + m[None, :], mask=inside, other=0.0)
    return total * inv[:, None] * tl.load(scale + m)[None, :] + tl.load(base + m)[None, :]


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return tl.div_rn(tl.zeros_like(x) + 1.0, 1.0 + tl.exp(-x))


@triton.jit
def _finish_kernel(partial, squares, scale, base, into, gate, comb, count, mixes, share, norm_eps, eps,  # type: ignore[no-untyped-def]
                   iters, IS_HEAD: tl.constexpr, R: tl.constexpr, N: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    n, pair = tl.arange(0, N), tl.arange(0, N * N)
    inside = (token < count)[:, None]
    square = tl.load(squares + token * N, mask=token < count, other=0.0)
    for stream in tl.static_range(1, N):
        square += tl.load(squares + token * N + stream, mask=token < count, other=0.0)
    inv = tl.div_rn(tl.zeros_like(square) + 1.0, tl.sqrt_rn(norm_eps + square * share))
    shares = _sigmoid(_logits(partial, token, inv, scale, base, inside, 0, mixes, N, N))
    tl.store(into + token[:, None] * N + n[None, :], shares + eps, mask=inside)
    if not IS_HEAD:
        shares = _sigmoid(_logits(partial, token, inv, scale, base, inside, N, mixes, N, N))
        tl.store(gate + token[:, None] * N + n[None, :], shares * 2.0, mask=inside)
        z = _logits(partial, token, inv, scale, base, inside, 2 * N, mixes, N, N * N)
        z = tl.reshape(z, (R, N, N))
        z = tl.exp(z - tl.max(z, 2)[:, :, None])
        z = tl.div_rn(z, tl.broadcast_to(tl.sum(z, 2)[:, :, None], (R, N, N))) + eps
        z = tl.div_rn(z, tl.broadcast_to((tl.sum(z, 1) + eps)[:, None, :], (R, N, N)))
        for _ in range(iters - 1):
            z = tl.div_rn(z, tl.broadcast_to((tl.sum(z, 2) + eps)[:, :, None], (R, N, N)))
            z = tl.div_rn(z, tl.broadcast_to((tl.sum(z, 1) + eps)[:, None, :], (R, N, N)))
        at = token[:, None] * (N * N) + pair[None, :]
        tl.store(comb + at, tl.reshape(z, (R, N * N)), mask=inside)


@triton.jit
def _weighted_kernel(streams, into, out, depth, row, stream, N: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * C + tl.arange(0, C)
    inside = col < depth
    total = tl.zeros((C,), tl.float32)
    for n in tl.static_range(N):
        x = tl.load(streams + token * row + n * stream + col, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(into + token * N + n) * x
    tl.store(out + token * depth + col, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _post_kernel(x, streams, gate, comb, out, depth, row, stream, N: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N)
    col = tl.program_id(1) * C + tl.arange(0, C)
    inside = col < depth
    y = tl.load(x + token * depth + col, mask=inside, other=0.0).to(tl.float32)
    mixed = tl.zeros((N, C), tl.float32)
    for m in tl.static_range(N):
        old = tl.load(streams + token * row + m * stream + col, mask=inside, other=0.0).to(tl.float32)
        mixed += tl.load(comb + token * (N * N) + m * N + n)[:, None] * old[None, :]
    new = tl.load(gate + token * N + n)[:, None] * y[None, :] + mixed
    at = (token * N + n)[:, None] * depth + col[None, :]
    tl.store(out + at, new.to(out.dtype.element_ty), mask=inside[None, :])


def _partial(streams: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
    """Each stream's part of the product with fn [N*D, M] -> [T, N, M], and its sum of squares [T, N]."""
    tokens, n, depth = streams.shape
    m = fn.shape[1]
    assert streams.stride(2) == 1 and fn.is_contiguous() and n & (n - 1) == 0
    partial = torch.empty(tokens, n, m, device=streams.device)
    squares = torch.empty(tokens, n, device=streams.device)
    if tokens:
        bt, bk, warps, stages = TILE[streams.dtype]
        _mixes_kernel[(triton.cdiv(tokens, bt), n)](
            *(streams, fn, partial, squares, tokens, depth, m, streams.stride(0), streams.stride(1)),
            **{"N": n, "BT": bt, "BK": bk, "M": max(16, triton.next_power_of_2(m))},
            **{"num_warps": warps, "num_stages": stages},
        )
    return partial, squares


def mixes(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    partial, squares = _partial(streams, fn)
    total, square = partial[:, 0], squares[:, 0]
    for n in range(1, streams.shape[1]):
        total, square = total + partial[:, n], square + squares[:, n]
    mean = square * (1 / streams[0].numel() if streams.numel() else 1.0) + norm_eps
    return total * mean.rsqrt().unsqueeze(1)


def _finish(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float,
    eps: float,
    iters: int,
    is_head: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, n, depth = streams.shape
    partial, squares = _partial(streams, fn)
    into, gate = torch.empty_like(squares), torch.empty_like(squares)
    comb = torch.empty(tokens, n, n, device=streams.device)
    out = torch.empty(tokens, depth, dtype=streams.dtype, device=streams.device)
    if tokens:
        _finish_kernel[(triton.cdiv(tokens, _TOKENS),)](
            *(partial, squares, scale, base, into, gate, comb, tokens, fn.shape[1], 1 / (n * depth)),
            *(norm_eps, eps, iters),
            **{"IS_HEAD": is_head, "R": _TOKENS, "N": n, "num_warps": 2},
        )
        _weighted_kernel[(tokens, triton.cdiv(depth, _CHANNELS))](
            *(streams, into, out, depth, streams.stride(0), streams.stride(1)),
            **{"N": n, "C": _CHANNELS, "num_warps": 4},
        )
    return out, gate, comb


def pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _finish(streams, fn, base, scale, norm_eps, eps, iters, False)


def post(x: Tensor, streams: Tensor, gate: Tensor, comb: Tensor) -> Tensor:
    tokens, n, depth = streams.shape
    out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    if tokens:
        assert streams.stride(2) == 1
        _post_kernel[(tokens, triton.cdiv(depth, _CHANNELS))](
            *(x.contiguous(), streams, gate.contiguous(), comb.contiguous(), out, depth),
            *(streams.stride(0), streams.stride(1)),
            **{"N": n, "C": _CHANNELS, "num_warps": 4},
        )
    return out


def head(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, eps: float) -> Tensor:
    # One scale serves all mixes of a head, as stored or repeated.
    every = scale.expand(fn.shape[1]).contiguous()
    return _finish(streams, fn, base, every, norm_eps, eps, 0, True)[0]
