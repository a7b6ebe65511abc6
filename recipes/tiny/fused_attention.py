"""Softmax over window, compressed entries and sink, and the indexer's scores, as Triton kernels.

One program per token with all its heads. Which keys a token may see is worked out from indices, not read.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from recipes.tiny.plain import Documents


@triton.jit
def _near_seen(of_ptr, row, at, W: tl.constexpr):
    """[2W]: of the block before and the own block, the tokens in the window and of this token's document."""
    block = at // W
    key = (block - 1) * W + tl.arange(0, 2 * W)
    of = tl.load(of_ptr + row)
    same = tl.load(of_ptr + row - at + key, mask=key >= 0, other=-1) == of
    return same & (key >= 0) & (key <= at) & (key > at - W)


@triton.jit
def _far_seen(of_ptr, blocks_ptr, batch, row, at, count, RATIO: tl.constexpr, C: tl.constexpr):
    """[C]: closed blocks of this token's document."""
    c = tl.arange(0, C)
    same = tl.load(blocks_ptr + batch * count + c, mask=c < count, other=-1) == tl.load(of_ptr + row)
    return same & (c < count) & ((c + 1) * RATIO <= at + 1)


@triton.jit
def _attend_fwd(near_ptr, far_ptr, chosen_ptr, of_ptr, blocks_ptr, sink_ptr, near_out, far_out, sink_out,
                mass_out, length, count, scale, H: tl.constexpr, W: tl.constexpr,
                C: tl.constexpr, RATIO: tl.constexpr, FAR: tl.constexpr, CHOSEN: tl.constexpr,
                MASS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, at = row // length, row % length
    h, w, c = tl.arange(0, H), tl.arange(0, 2 * W), tl.arange(0, C)
    near_at = (row * H + h)[:, None] * (2 * W) + w[None, :]
    seen = _near_seen(of_ptr, row, at, W)[None, :]
    near = tl.where(seen, tl.load(near_ptr + near_at).to(tl.float32) * scale, -float("inf"))
    sink = tl.load(sink_ptr + h).to(tl.float32)
    top = tl.maximum(tl.max(near, 1), sink)
    if FAR:
        far_at = (row * H + h)[:, None] * count + c[None, :]
        far_seen = _far_seen(of_ptr, blocks_ptr, batch, row, at, count, RATIO, C)
        if CHOSEN:
            far_seen = far_seen & (tl.load(chosen_ptr + row * count + c, mask=c < count, other=0) != 0)
        far = tl.load(far_ptr + far_at, mask=far_seen[None, :], other=0.0).to(tl.float32) * scale
        far = tl.where(far_seen[None, :], far, -float("inf"))
        top = tl.maximum(top, tl.max(far, 1))
    near = tl.exp(near - top[:, None])
    total = tl.sum(near, 1) + tl.exp(sink - top)
    if FAR:
        far = tl.exp(far - top[:, None])
        total += tl.sum(far, 1)
        far = far / total[:, None]
        if MASS:
            mass = tl.sum(far, 0)
            mass = mass / tl.maximum(tl.sum(mass, 0), 1e-20)
            tl.store(mass_out + row * count + c, mass, mask=c < count)
        else:
            tl.store(far_out + far_at, far, mask=(c < count)[None, :])
    if not MASS:
        tl.store(near_out + near_at, near / total[:, None])
        tl.store(sink_out + row * H + h, tl.exp(sink - top) / total)


@triton.jit
def _attend_bwd(near_ptr, far_ptr, near_g, far_g, near_out, far_out, sink_ptr, sink_out, count, scale,
                H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, FAR: tl.constexpr):  # fmt: skip
    """From the weights p and their gradients g: scale * p * (g - sum(g * p)); of the sink -p * sum(g p)."""
    row = tl.program_id(0).to(tl.int64)
    h, w, c = tl.arange(0, H), tl.arange(0, 2 * W), tl.arange(0, C)
    near_at = (row * H + h)[:, None] * (2 * W) + w[None, :]
    p = tl.load(near_ptr + near_at).to(tl.float32)
    g = tl.load(near_g + near_at).to(tl.float32)
    dot = tl.sum(p * g, 1)
    if FAR:
        far_at = (row * H + h)[:, None] * count + c[None, :]
        inside = (c < count)[None, :]
        far_p = tl.load(far_ptr + far_at, mask=inside, other=0.0).to(tl.float32)
        far_dp = tl.load(far_g + far_at, mask=inside, other=0.0).to(tl.float32)
        dot += tl.sum(far_p * far_dp, 1)
        tl.store(far_out + far_at, far_p * (far_dp - dot[:, None]) * scale, mask=inside)
    tl.store(near_out + near_at, p * (g - dot[:, None]) * scale)
    tl.store(sink_out + row * H + h, -tl.load(sink_ptr + row * H + h) * dot)


def _far_size(far: Tensor | None) -> int:
    return 16 if far is None else max(16, triton.next_power_of_2(far.shape[-1]))


def _launch(near: Tensor, far: Tensor | None, chosen: Tensor | None, of: Tensor, blocks: Tensor,
            sinks: Tensor, near_out: Tensor, far_out: Tensor, sink_out: Tensor, mass_out: Tensor,
            ratio: int, scale: float, mass: bool) -> None:  # fmt: skip
    b, n, w, heads, _ = near.shape
    setting = {"H": heads, "W": w, "C": _far_size(far), "RATIO": max(ratio, 1), "FAR": far is not None}
    setting |= {"CHOSEN": chosen is not None, "MASS": mass, "num_warps": 8 if setting["C"] > 512 else 4}
    _attend_fwd[(b * n * w,)](
        near, near if far is None else far, of if chosen is None else chosen, of, blocks, sinks,
        near_out, far_out, sink_out, mass_out, n * w, 0 if far is None else far.shape[-1], scale, **setting,
    )  # fmt: skip


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, near: Tensor, far: Tensor | None, chosen: Tensor | None, of: Tensor,
                blocks: Tensor, sinks: Tensor, ratio: int, scale: float) -> Any:  # fmt: skip
        near = near.contiguous()
        far = None if far is None else far.contiguous()
        near_p = torch.empty_like(near)
        far_p = None if far is None else torch.empty_like(far)
        spare = near_p if far_p is None else far_p
        sink_p = torch.empty(near.shape[:4], device=near.device)
        _launch(near, far, chosen, of, blocks, sinks, near_p, spare, sink_p, near_p, ratio, scale, False)
        ctx.save_for_backward(near_p, far_p, sink_p)
        ctx.scale = scale
        return near_p, far_p

    @staticmethod
    def backward(ctx: Any, near_g: Tensor, far_g: Tensor | None) -> Any:
        near_p, far_p, sink_p = ctx.saved_tensors
        b, n, w, heads, _ = near_p.shape
        near_d = torch.empty_like(near_p)
        far_d = None if far_p is None else torch.empty_like(far_p)
        sink_d = torch.empty(b * n * w, heads, device=near_p.device)
        size, count = _far_size(far_p), 0 if far_p is None else far_p.shape[-1]
        far = [near_p if t is None else t.contiguous() for t in (far_p, far_g, far_d)]
        _attend_bwd[(b * n * w,)](
            near_p, far[0], near_g.contiguous(), far[1], near_d, far[2], sink_p, sink_d, count, ctx.scale,
            H=heads, W=w, C=size, FAR=far_p is not None, num_warps=8 if size > 512 else 4,
        )  # fmt: skip
        return near_d, far_d, None, None, None, sink_d.sum(0), None, None


def attend_weights(near: Tensor, far: Tensor | None, chosen: Tensor | None, documents: Documents, ratio: int,
                   sinks: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    of = documents.of_token
    blocks = documents.of_blocks(ratio) if ratio else of
    return _Attend.apply(near, far, chosen, of, blocks, sinks, ratio, scale)


@torch.no_grad()
def attend_mass(
    near: Tensor, far: Tensor, documents: Documents, ratio: int, sinks: Tensor, scale: float
) -> Tensor:
    near, far = near.contiguous(), far.contiguous()
    mass = torch.empty(far.shape[0], far.shape[1], far.shape[3], device=far.device)
    blocks = documents.of_blocks(ratio)
    _launch(near, far, None, documents.of_token, blocks, sinks, near, far, near, mass, ratio, scale, True)
    return mass


@triton.jit
def _index_fwd(raw_ptr, w_ptr, of_ptr, blocks_ptr, out_ptr, length, count,
               H: tl.constexpr, C: tl.constexpr, RATIO: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h, c = tl.arange(0, H), tl.arange(0, C)
    at = (row * H + h)[:, None] * count + c[None, :]
    raw = tl.load(raw_ptr + at, mask=(c < count)[None, :], other=0.0).to(tl.float32)
    w = tl.load(w_ptr + row * H + h).to(tl.float32)
    scores = tl.sum(tl.maximum(raw, 0.0) * w[:, None], 0)
    seen = _far_seen(of_ptr, blocks_ptr, row // length, row, row % length, count, RATIO, C)
    tl.store(out_ptr + row * count + c, tl.where(seen, scores, -1e30), mask=c < count)


@triton.jit
def _index_bwd(raw_ptr, w_ptr, of_ptr, blocks_ptr, g_ptr, draw_ptr, dw_ptr, length, count,
               H: tl.constexpr, C: tl.constexpr, RATIO: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h, c = tl.arange(0, H), tl.arange(0, C)
    at = (row * H + h)[:, None] * count + c[None, :]
    inside = (c < count)[None, :]
    raw = tl.load(raw_ptr + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + row * H + h).to(tl.float32)
    seen = _far_seen(of_ptr, blocks_ptr, row // length, row, row % length, count, RATIO, C)
    g = tl.load(g_ptr + row * count + c, mask=seen, other=0.0)
    tl.store(draw_ptr + at, tl.where(raw > 0, w[:, None] * g[None, :], 0.0), mask=inside)
    tl.store(dw_ptr + row * H + h, tl.sum(tl.maximum(raw, 0.0) * g[None, :], 1))


class _Index(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, raw: Tensor, weights: Tensor, of: Tensor, blocks: Tensor, ratio: int) -> Tensor:
        raw, weights = raw.contiguous(), weights.contiguous()
        b, length, heads, count = raw.shape
        out = torch.empty(b, length, count, device=raw.device)
        ctx.setting = {"H": heads, "C": _far_size(raw), "RATIO": ratio}
        _index_fwd[(b * length,)](raw, weights, of, blocks, out, length, count, **ctx.setting)
        ctx.save_for_backward(raw, weights, of, blocks)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        raw, weights, of, blocks = ctx.saved_tensors
        b, length, _, count = raw.shape
        draw, dw = torch.empty_like(raw), torch.empty_like(weights)
        grid = (b * length,)
        _index_bwd[grid](raw, weights, of, blocks, g.contiguous(), draw, dw, length, count, **ctx.setting)
        return draw, dw, None, None, None


def index_scores(raw: Tensor, weights: Tensor, documents: Documents, ratio: int) -> Tensor:
    return _Index.apply(raw, weights, documents.of_token, documents.of_blocks(ratio), ratio)
