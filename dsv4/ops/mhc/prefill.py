"""Prompts: hyper-connections in Triton, the mixes' product with the norm's sum in one read of the streams, in
parts of some channels; then, token by token, what they become and the weighted sum. Parts are added in one
order.

`mix_in` takes two launches for the published sizes in BF16, from one site into the next (prefill_sm90.cu).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.ops.activation import PLAIN, Activation, Form, Norm
from dsv4.ops.linear.prefill_packed import FP8_CODES
from dsv4.ops.mhc import prefill_sm90 as sites
from dsv4.ops.mhc.cpu import Mixing, Residual
from dsv4.ops.rows.prefill import completed, normed

# Tokens and depth of a product's tile, warps, stages; by the streams' type.
TILE = {torch.bfloat16: (64, 64, 4, 3), torch.float32: (32, 32, 4, 2)}
_MANY = (
    2048  # tokens from which on a tile in BF16 has twice as many (of 8,192: 151 us, not 169): the same bits
)
_PART = 256  # channels of a stream that a program multiplies
_CHANNELS = 1024  # of a program that adds streams up


@triton.jit(do_not_specialize=["count"])
def _mixes_kernel(streams, fn, partial, squares, count, depth, row, stream, mixes: tl.constexpr,  # type: ignore[no-untyped-def]
                  PART: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, M: tl.constexpr):  # fmt: skip
    """Part p of stream n: partial[t, n, p] = its channels times their rows of fn [N*D, M]; squares[t, n, p]:
    their sum of squares."""
    n, p = tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1) * tl.num_programs(2)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    k, m = p * PART + tl.arange(0, BK), tl.arange(0, M)
    x_at = streams + tl.minimum(token, count - 1).to(tl.int64)[:, None] * row + n * stream + k[None, :]
    fn_at = fn + (n * depth + k)[:, None] * mixes + m[None, :]
    total = tl.zeros((BT, M), tl.float32)
    square = tl.zeros((BT, BK), tl.float32)
    for start in range(0, PART, BK):
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
    part = token.to(tl.int64) * parts + n * tl.num_programs(2) + p
    at = part[:, None] * mixes + m[None, :]
    tl.store(partial + at, total, mask=(token < count)[:, None] & (m < mixes)[None, :])
    tl.store(squares + part, tl.sum(square, 1), mask=token < count)


@triton.jit
def _logits(partial, token, inv, scale, base, first, mixes, parts, P: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """[C] logits of the mixes first .. first+C-1: the sum of their parts, norm, scale, base."""
    part, m = tl.arange(0, P), first + tl.arange(0, C)
    at = partial + (token * parts + part)[:, None] * mixes + m[None, :]
    total = tl.sum(tl.load(at, mask=(part < parts)[:, None], other=0.0), 0)
    return total * inv * tl.load(scale + m) + tl.load(base + m)


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return tl.div_rn(tl.zeros_like(x) + 1.0, 1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["parts"])
def _finish_kernel(partial, squares, scale, base, streams, out, gate, comb, depth, row, stream, mixes,  # type: ignore[no-untyped-def]
                   parts, share, norm_eps, eps, iters, N: tl.constexpr, P: tl.constexpr,
                   C: tl.constexpr):  # fmt: skip
    """One token: the weighted sum of its streams and, in a program of its own, the mixes of the output."""
    token = tl.program_id(0).to(tl.int64)
    part, n = tl.arange(0, P), tl.arange(0, N)
    square = tl.sum(tl.load(squares + token * parts + part, mask=part < parts, other=0.0), 0)
    inv = tl.div_rn(1.0, tl.sqrt_rn(norm_eps + square * share))
    if tl.program_id(1) == 0:
        shares = _sigmoid(_logits(partial, token, inv, scale, base, 0, mixes, parts, P, N)) + eps
        for first in range(0, depth, C):
            col = first + tl.arange(0, C)
            x = tl.load(
                streams + token * row + n[:, None] * stream + col[None, :],
                mask=(col < depth)[None, :],
                other=0.0,
            )
            total = tl.sum(shares[:, None] * x.to(tl.float32), 0)
            tl.store(out + token * depth + col, total.to(out.dtype.element_ty), mask=col < depth)
    else:
        shares = _sigmoid(_logits(partial, token, inv, scale, base, N, mixes, parts, P, N))
        tl.store(gate + token * N + n, shares * 2.0)
        z = _logits(partial, token, inv, scale, base, 2 * N, mixes, parts, P, N * N)
        z = tl.reshape(z, (N, N))
        z = tl.exp(z - tl.max(z, 1)[:, None])
        z = tl.div_rn(z, tl.broadcast_to(tl.sum(z, 1)[:, None], (N, N))) + eps
        z = tl.div_rn(z, tl.broadcast_to((tl.sum(z, 0) + eps)[None, :], (N, N)))
        for _ in range(iters - 1):
            z = tl.div_rn(z, tl.broadcast_to((tl.sum(z, 1) + eps)[:, None], (N, N)))
            z = tl.div_rn(z, tl.broadcast_to((tl.sum(z, 0) + eps)[None, :], (N, N)))
        tl.store(comb + token * (N * N) + n[:, None] * N + n[None, :], z)


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
    """Each part's product with its rows of fn [N*D, M] -> [T, parts, M]; its sum of squares [T, parts]."""
    tokens, n, depth = streams.shape
    m = fn.shape[1]
    assert streams.stride(2) == 1 and fn.is_contiguous() and n & (n - 1) == 0
    parts = triton.cdiv(depth, _PART)
    partial = torch.empty(tokens, n * parts, m, device=streams.device)
    squares = torch.empty(tokens, n * parts, device=streams.device)
    if tokens:
        bt, bk, warps, stages = TILE[streams.dtype]
        bt *= 2 if tokens >= _MANY and streams.dtype == torch.bfloat16 else 1
        _mixes_kernel[(triton.cdiv(tokens, bt), n, parts)](
            *(streams, fn, partial, squares, tokens, depth, streams.stride(0), streams.stride(1), m),
            **{"PART": _PART, "BT": bt, "BK": bk, "M": max(16, triton.next_power_of_2(m))},
            **{"num_warps": warps, "num_stages": stages},
        )
    return partial, squares


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
    gate = torch.empty(tokens, n, device=streams.device)
    comb = torch.empty(tokens, n, n, device=streams.device)
    out = torch.empty(tokens, depth, dtype=streams.dtype, device=streams.device)
    if tokens:
        _finish_kernel[(tokens, 1 if is_head else 2)](
            *(partial, squares, scale, base, streams, out, gate, comb, depth),
            *(streams.stride(0), streams.stride(1), fn.shape[1], squares.shape[1], 1 / (n * depth)),
            *(norm_eps, eps, iters),
            **{"N": n, "P": triton.next_power_of_2(squares.shape[1]), "C": _CHANNELS, "num_warps": 4},
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


def mix_in(
    residual: Residual, mixing: Mixing, norm: Norm, keeps_x: bool = False
) -> tuple[Activation, Tensor | None]:
    if not _is_one_launch_each(residual.streams, mixing.fn):
        residual.streams = streams = residual.added(post)
        x, residual.gate, residual.comb = pre(streams, *mixing)
        return normed(x, norm), x if keeps_x else None
    streams, partial = sites.open_site(*residual.take(), mixing.fn)
    made = {form for form in norm.forms if form.mode in sites.MADE and form.source == PLAIN}
    modes = {form.mode for form in made if form.mode is not None}
    codes_8 = Form("a8", is_codes=True)
    if codes_8 in norm.forms and FP8_CODES in modes:
        made.add(codes_8)
    assert norm.eps == mixing.norm_eps, (norm.eps, mixing.norm_eps)
    closed = sites.close_site(
        streams=streams,
        partial=partial,
        base=mixing.base,
        scale=mixing.scale,
        norm=norm.weight,
        norm_eps=norm.eps,
        hc_eps=mixing.eps,
        iters=mixing.iters,
        modes=modes,
        wants_normed=any(form not in made for form in norm.forms),
        wants_codes=codes_8 in made,
        wants_x=keeps_x,
    )
    residual.streams, residual.gate, residual.comb = streams, closed.gate, closed.comb
    values = {} if closed.normed is None else {"a16": closed.normed}
    packed = {form: closed.packed[form.mode] for form in made if form.mode is not None}
    return completed(Activation(streams[:, 0], values, packed, closed.codes), norm.forms), closed.x


def _is_one_launch_each(streams: Tensor | None, fn: Tensor) -> bool:
    return streams is not None and len(streams) > 0 and sites.serves(streams, fn)
