"""Attention and the indexer's scores: products by torch, softmax and sums over heads as Triton kernels."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 8  # index heads that a program holds at once


@triton.jit
def _row(scores_ptr, seen_ptr, sink, row, query, count, scale, S: tl.constexpr):
    """The softmax of one head's scores over the keys that are seen and the sink: [S], and the sink's part."""
    s = tl.arange(0, S)
    seen = tl.load(seen_ptr + query * count + s, mask=s < count, other=0) != 0
    z = tl.load(scores_ptr + row * count + s, mask=seen, other=0.0).to(tl.float32) * scale
    z = tl.where(seen, z, -float("inf"))
    top = tl.maximum(tl.max(z, 0), sink)
    p = tl.exp(z - top)
    rest = tl.exp(sink - top)
    total = tl.sum(p, 0) + rest
    return p / total, rest / total


@triton.jit
def _weights_fwd(scores_ptr, seen_ptr, sink_ptr, out_ptr, sink_out, heads, count, scale, S: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    sink = tl.load(sink_ptr + row % heads)
    p, rest = _row(scores_ptr, seen_ptr, sink, row, row // heads, count, scale, S)
    s = tl.arange(0, S)
    tl.store(out_ptr + row * count + s, p, mask=s < count)
    tl.store(sink_out + row, rest)


@triton.jit
def _weights_bwd(p_ptr, g_ptr, rest_ptr, d_ptr, dsink_ptr, count, scale, S: tl.constexpr):
    """From the weights p and their gradients g: scale * p * (g - sum(g * p)); of the sink -p * sum(g p)."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, S)
    p = tl.load(p_ptr + row * count + s, mask=s < count, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + row * count + s, mask=s < count, other=0.0).to(tl.float32)
    dot = tl.sum(p * g, 0)
    tl.store(d_ptr + row * count + s, p * (g - dot) * scale, mask=s < count)
    tl.store(dsink_ptr + row, -tl.load(rest_ptr + row) * dot)


@triton.jit
def _mass(scores_ptr, seen_ptr, sink_ptr, out_ptr, count, first, scale, H: tl.constexpr, S: tl.constexpr):
    """One program per query: its heads' weights of the keys from `first` on, summed, over their total."""
    query = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, S)
    total = tl.zeros([S], dtype=tl.float32)
    for head in range(H):
        sink = tl.load(sink_ptr + head)
        p, _ = _row(scores_ptr, seen_ptr, sink, query * H + head, query, count, scale, S)
        total += p
    total = tl.where(s >= first, total, 0.0)
    total = total / tl.maximum(tl.sum(total, 0), 1e-20)
    tl.store(out_ptr + query * (count - first) + s - first, total, mask=(s >= first) & (s < count))


def _setting(count: int) -> dict[str, int]:
    size = max(16, triton.next_power_of_2(count))
    return {"S": size, "num_warps": 8 if size > 1024 else 4}


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, seen: Tensor, sinks: Tensor, scale: float) -> Tensor:
        """scores [..., T, H, S], seen [..., T, S], sinks [H] -> weights, which sum to 1 with the sink's."""
        scores, heads, count = scores.contiguous(), *scores.shape[-2:]
        weights, rest = torch.empty_like(scores), torch.empty(scores.shape[:-1], device=scores.device)
        mask = seen.contiguous().view(torch.uint8)
        _weights_fwd[(rest.numel(),)](
            scores, mask, sinks, weights, rest, heads, count, scale, **_setting(count)
        )
        ctx.save_for_backward(weights, rest)
        ctx.scale = scale
        return weights

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        weights, rest = ctx.saved_tensors
        d, dsink, count = torch.empty_like(weights), torch.empty_like(rest), weights.shape[-1]
        _weights_bwd[(rest.numel(),)](
            weights, g.contiguous(), rest, d, dsink, count, ctx.scale, **_setting(count)
        )
        return d, None, dsink.flatten(0, -2).sum(0), None


def _products(q: Tensor, keys: Tensor) -> Tensor:
    """q [..., T, H, d] and keys [..., S, d] -> [..., T, H, S], in q's type."""
    return (q.flatten(-3, -2) @ keys.mT).unflatten(-2, q.shape[-3:-1])


def attend(q: Tensor, keys: Tensor, seen: Tensor, sinks: Tensor) -> Tensor:
    weights = _Weights.apply(_products(q, keys), seen, sinks, q.shape[-1] ** -0.5)
    return (weights.flatten(-3, -2) @ keys).view(q.shape)


@torch.no_grad()
def mass(q: Tensor, keys: Tensor, seen: Tensor, sinks: Tensor, entries: int) -> Tensor:
    scores, mask = _products(q, keys).contiguous(), seen.contiguous().view(torch.uint8)
    heads, count = scores.shape[-2:]
    out = torch.empty(*seen.shape[:-1], entries, device=q.device)
    _mass[(seen.numel() // count,)](
        scores, mask, sinks, out, count, count - entries, q.shape[-1] ** -0.5, H=heads, **_setting(count)
    )
    return out


@triton.jit
def _index_fwd(raw_ptr, w_ptr, out_ptr, count, H: tl.constexpr, S: tl.constexpr, HS: tl.constexpr):
    """Sum a query's heads, HS at a time: of 64 over 1,024 entries all do not fit in registers."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, S)
    inside = (c < count)[None, :]
    total = tl.zeros([S], dtype=tl.float32)
    for start in range(0, H, HS):
        h = start + tl.arange(0, HS)
        raw = tl.load(raw_ptr + (row * H + h)[:, None] * count + c[None, :], mask=inside, other=0.0)
        w = tl.load(w_ptr + row * H + h).to(tl.float32)
        total += tl.sum(tl.maximum(raw.to(tl.float32), 0.0) * w[:, None], 0)
    tl.store(out_ptr + row * count + c, total, mask=c < count)


@triton.jit
def _index_bwd(
    raw_ptr, w_ptr, g_ptr, draw_ptr, dw_ptr, count, H: tl.constexpr, S: tl.constexpr, HS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, S)
    inside = (c < count)[None, :]
    g = tl.load(g_ptr + row * count + c, mask=c < count, other=0.0)
    for start in range(0, H, HS):
        h = start + tl.arange(0, HS)
        at = (row * H + h)[:, None] * count + c[None, :]
        raw = tl.load(raw_ptr + at, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + row * H + h).to(tl.float32)
        tl.store(draw_ptr + at, tl.where(raw > 0, w[:, None] * g[None, :], 0.0), mask=inside)
        tl.store(dw_ptr + row * H + h, tl.sum(tl.maximum(raw, 0.0) * g[None, :], 1))


class _Index(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, raw: Tensor, weights: Tensor) -> Tensor:
        raw, weights = raw.contiguous(), weights.contiguous()
        heads, count = raw.shape[-2:]
        out = torch.empty(*raw.shape[:-2], count, device=raw.device)
        setting = {"H": heads, "HS": min(heads, HEADS), **_setting(count)}
        _index_fwd[(out.numel() // count,)](raw, weights, out, count, **setting)
        ctx.save_for_backward(raw, weights)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        raw, weights = ctx.saved_tensors
        draw, dw = torch.empty_like(raw), torch.empty_like(weights)
        heads, count = raw.shape[-2:]
        grid = (raw.numel() // (heads * count),)
        setting = {"H": heads, "HS": min(heads, HEADS), **_setting(count)}
        _index_bwd[grid](raw, weights, g.contiguous(), draw, dw, count, **setting)
        return draw, dw


def index_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    return _Index.apply(_products(q, keys), weights)
