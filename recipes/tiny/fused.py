"""The functions of `plain.py` as Triton kernels with gradients: what is large is read once.

Sizes of the last dimensions must be powers of two; the trained model's are. Products have the type of their
input, and weights are rounded to it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.spec.ops import compress, mix_head, route_scores, route_weights
from recipes.tiny.fused_attention import attend, index_scores, mass
from recipes.tiny.fused_streams import grid, mix_in, mix_out, mixes, sinkhorn

__all__ = ["attend", "compress", "index_scores", "mass", "mix_head", "mix_in", "mix_out", "mixes", "nats"]
__all__ += ["rms_norm", "rotate", "rotate_heads", "route_scores", "route_weights", "sinkhorn", "swiglu"]
_ROWS = 8  # rows of a program where a row has a few hundred values


# --- norm and rotation -------------------------------------------------------------------------------------


@triton.jit
def _norm_fwd(x_ptr, w_ptr, y_ptr, count, eps, WEIGHT: tl.constexpr, R: tl.constexpr, D: tl.constexpr):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    at = rows[:, None] * D + tl.arange(0, D)[None, :]
    inside = (rows < count)[:, None]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    if WEIGHT:
        x = x * tl.load(w_ptr + tl.arange(0, D))[None, :]
    tl.store(y_ptr + at, x, mask=inside)


@triton.jit
def _norm_bwd(x_ptr, w_ptr, g_ptr, dx_ptr, dw_ptr, count, eps,
              WEIGHT: tl.constexpr, R: tl.constexpr, D: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * R + tl.arange(0, R)
    at = rows[:, None] * D + tl.arange(0, D)[None, :]
    inside = (rows < count)[:, None]
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    inv = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    unit = x * inv
    if WEIGHT:
        tl.store(dw_ptr + tl.program_id(0) * D + tl.arange(0, D), tl.sum(g * unit, 0))
        g = g * tl.load(w_ptr + tl.arange(0, D))[None, :]
    tl.store(dx_ptr + at, inv * (g - unit * (tl.sum(g * unit, 1) / D)[:, None]), mask=inside)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        x = x.contiguous()
        d = x.shape[-1]
        ctx.sizes = (x.numel() // d, eps)
        ctx.setting = {"WEIGHT": weight is not None, "R": max(1, min(_ROWS, 2048 // d)), "D": d}
        y = torch.empty_like(x)
        blocks = grid(ctx.sizes[0], ctx.setting["R"])
        _norm_fwd[blocks](x, x if weight is None else weight, y, *ctx.sizes, **ctx.setting)
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx = torch.empty_like(x)
        blocks = grid(ctx.sizes[0], ctx.setting["R"])
        dw = None if weight is None else torch.empty(blocks[0], x.shape[-1], device=x.device)
        weights = (x, x) if dw is None else (weight, dw)
        _norm_bwd[blocks](x, weights[0], g.contiguous(), dx, weights[1], *ctx.sizes, **ctx.setting)
        return dx, None if dw is None else dw.sum(0), None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return _Norm.apply(x, weight, eps)


@triton.jit
def _rotate(x_ptr, cos_ptr, sin_ptr, y_ptr, count, heads, length, SIGN: tl.constexpr,
            HALF: tl.constexpr, R: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Rotate the last 2 * HALF channels of x [count, D] by the angle of each row's position, times SIGN."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    at = rows[:, None] * D + tl.arange(0, D)[None, :]
    inside = (rows < count)[:, None]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    pairs = tl.arange(0, D // 2)
    first = D // 2 - HALF
    turns = (pairs >= first)[None, :]
    where = ((rows // heads) % length)[:, None] * HALF + (pairs - first)[None, :]
    cos = tl.load(cos_ptr + where, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + where, mask=turns, other=0.0) * SIGN
    a, b = tl.split(tl.reshape(x, (R, D // 2, 2)))
    tl.store(y_ptr + at, tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (R, D)), mask=inside)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _rotated(g, *ctx.saved_tensors, -1.0), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """x [B, L, D] or [B, L, H, D]; cos, sin [L, R]."""
    x, d = x.contiguous(), x.shape[-1]
    y, rows = torch.empty_like(x), max(1, min(_ROWS, 2048 // d))
    sizes = (x.numel() // d, x[0, 0].numel() // d, x.shape[1])
    tables = (cos.contiguous(), sin.contiguous())
    _rotate[grid(sizes[0], rows)](x, *tables, y, *sizes, SIGN=sign, HALF=cos.shape[-1], R=rows, D=d)
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _Rotate.apply(x, cos, sin)


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _Rotate.apply(x, cos, sin)


# --- experts and loss --------------------------------------------------------------------------------------


@triton.jit
def _swiglu_fwd(
    gate_ptr, up_ptr, w_ptr, out_ptr, count, limit, WEIGHT: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr
):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    at = rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (rows < count)[:, None]
    gate = tl.minimum(tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32), limit)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    hidden = gate * tl.sigmoid(gate) * tl.minimum(tl.maximum(up, -limit), limit)
    if WEIGHT:
        hidden *= tl.load(w_ptr + rows, mask=rows < count, other=0.0)[:, None]
    tl.store(out_ptr + at, hidden, mask=inside)


@triton.jit
def _swiglu_bwd(gate_ptr, up_ptr, w_ptr, g_ptr, dgate_ptr, dup_ptr, dw_ptr, count, limit,
                WEIGHT: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * R + tl.arange(0, R)
    at = rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (rows < count)[:, None]
    raw_gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    raw_up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(raw_gate, limit)
    up = tl.minimum(tl.maximum(raw_up, -limit), limit)
    s = tl.sigmoid(gate)
    silu = gate * s
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if WEIGHT:
        tl.store(dw_ptr + rows, tl.sum(g * silu * up, 1), mask=rows < count)
        g = g * tl.load(w_ptr + rows, mask=rows < count, other=0.0)[:, None]
    tl.store(dup_ptr + at, tl.where(tl.abs(raw_up) <= limit, g * silu, 0.0), mask=inside)
    dgate = g * up * (s + silu * (1 - s))
    tl.store(dgate_ptr + at, tl.where(raw_gate <= limit, dgate, 0.0), mask=inside)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float, weight: Tensor | None) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        weight = None if weight is None else weight.contiguous()
        width = gate.shape[-1]
        ctx.sizes = (gate.numel() // width, limit)
        ctx.setting = {"WEIGHT": weight is not None, "R": max(1, 4096 // width), "WIDTH": width}
        out = torch.empty_like(gate)
        blocks = grid(ctx.sizes[0], ctx.setting["R"])
        _swiglu_fwd[blocks](gate, up, gate if weight is None else weight, out, *ctx.sizes, **ctx.setting)
        ctx.save_for_backward(gate, up, weight)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        gate, up, weight = ctx.saved_tensors
        dgate, dup, dw = (None if t is None else torch.empty_like(t) for t in (gate, up, weight))
        weights = (gate, dgate) if weight is None else (weight, dw)
        blocks = grid(ctx.sizes[0], ctx.setting["R"])
        _swiglu_bwd[blocks](
            gate, up, weights[0], g.contiguous(), dgate, dup, weights[1], *ctx.sizes, **ctx.setting
        )
        return dgate, dup, None, dw


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | float = 1.0) -> Tensor:
    """A weight is a tensor [..., 1] of float32, one of each row, or none."""
    return _SwiGLU.apply(gate, up, limit, weight if isinstance(weight, Tensor) else None)


@triton.jit
def _nats_fwd(logits_ptr, target_ptr, out_ptr, lse_ptr, V: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z = tl.load(logits_ptr + row * V + tl.arange(0, V)).to(tl.float32)
    top = tl.max(z, 0)
    lse = top + tl.log(tl.sum(tl.exp(z - top), 0))
    tl.store(lse_ptr + row, lse)
    tl.store(out_ptr + row, lse - tl.load(logits_ptr + row * V + tl.load(target_ptr + row)).to(tl.float32))


@triton.jit
def _nats_bwd(logits_ptr, target_ptr, lse_ptr, g_ptr, out_ptr, V: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, V)
    g = tl.load(g_ptr + row)
    z = tl.load(logits_ptr + row * V + at).to(tl.float32)
    p = tl.exp(z - tl.load(lse_ptr + row))
    tl.store(out_ptr + row * V + at, g * (p - (at == tl.load(target_ptr + row)).to(tl.float32)))


class _Nats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        logits, targets = logits.contiguous(), targets.contiguous()
        out = torch.empty(targets.shape, device=logits.device)
        lse = torch.empty_like(out)
        _nats_fwd[(targets.numel(),)](logits, targets, out, lse, V=logits.shape[-1])
        ctx.save_for_backward(logits, targets, lse)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        logits, targets, lse = ctx.saved_tensors
        out = torch.empty_like(logits)
        _nats_bwd[(targets.numel(),)](logits, targets, lse, g.contiguous(), out, V=logits.shape[-1])
        return out, None


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    return _Nats.apply(logits, targets)
