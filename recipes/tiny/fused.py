"""The functions of `plain.py` as Triton kernels with gradients: what is large is read once.

Sizes of the last dimensions must be powers of two; the trained model's are.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from recipes.tiny.fused_attention import attend_mass, attend_weights, index_scores

__all__ = ["attend_mass", "attend_weights", "index_scores", "mix_in", "mix_out", "nats", "norm_rotate", "rms"]
__all__ += ["rotate", "sinkhorn", "swiglu"]
_ROWS = 8  # rows of a program where a row has a few hundred values


def _grid(rows: int, block: int) -> tuple[int]:
    return (triton.cdiv(rows, block),)


# --- norm and rotation -------------------------------------------------------------------------------------


@triton.jit
def _turn(x, cos_ptr, sin_ptr, rows, heads, length,
          SIGN: tl.constexpr, R: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """Rotate the last 2 * HALF channels of x [R, D] by the angle of each row's position."""
    pairs = tl.arange(0, D // 2)
    at = (rows // heads) % length
    first = D // 2 - HALF
    turns = (pairs >= first)[None, :]
    where = at[:, None] * HALF + (pairs - first)[None, :]
    cos = tl.load(cos_ptr + where, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + where, mask=turns, other=0.0) * SIGN
    a, b = tl.split(tl.reshape(x, (R, D // 2, 2)))
    return tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (R, D))


@triton.jit
def _norm_fwd(x_ptr, w_ptr, cos_ptr, sin_ptr, y_ptr, count, heads, length, eps, SIGN: tl.constexpr,
              NORM: tl.constexpr, WEIGHT: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr,
              D: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * R + tl.arange(0, R)
    at = rows[:, None] * D + tl.arange(0, D)[None, :]
    inside = (rows < count)[:, None]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    if WEIGHT:
        x = x * tl.load(w_ptr + tl.arange(0, D))[None, :]
    if HALF > 0:
        x = _turn(x, cos_ptr, sin_ptr, rows, heads, length, SIGN, R, D, HALF)
    tl.store(y_ptr + at, x, mask=inside)


@triton.jit
def _norm_bwd(x_ptr, w_ptr, cos_ptr, sin_ptr, g_ptr, dx_ptr, dw_ptr, count, heads, length, eps,
              SIGN: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr, HALF: tl.constexpr,
              R: tl.constexpr, D: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * R + tl.arange(0, R)
    at = rows[:, None] * D + tl.arange(0, D)[None, :]
    inside = (rows < count)[:, None]
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HALF > 0:
        g = _turn(g, cos_ptr, sin_ptr, rows, heads, length, -SIGN, R, D, HALF)
    if NORM:
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        inv = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        unit = x * inv
        if WEIGHT:
            tl.store(dw_ptr + tl.program_id(0) * D + tl.arange(0, D), tl.sum(g * unit, 0))
            g = g * tl.load(w_ptr + tl.arange(0, D))[None, :]
        g = inv * (g - unit * (tl.sum(g * unit, 1) / D)[:, None])
    tl.store(dx_ptr + at, g, mask=inside)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None,
                eps: float, is_normed: bool, sign: float) -> Tensor:  # fmt: skip
        x = x.contiguous()
        d = x.shape[-1]
        count = x.numel() // d
        length = x.shape[1]
        heads = x[0, 0].numel() // d
        y = torch.empty_like(x)
        half = 0 if cos is None else cos.shape[-1]
        setting = {"SIGN": sign, "NORM": is_normed, "WEIGHT": weight is not None, "HALF": half, "D": d}
        ctx.setting = setting | {"R": max(1, min(_ROWS, 2048 // d))}
        ctx.sizes = (count, heads, length, eps)
        grid = _grid(count, ctx.setting["R"])
        spare = x if cos is None else cos
        _norm_fwd[grid](
            x, x if weight is None else weight, spare, x if sin is None else sin, y, *ctx.sizes, **ctx.setting
        )
        ctx.save_for_backward(x, weight, cos, sin)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight, cos, sin = ctx.saved_tensors
        g = g.contiguous()
        dx = torch.empty_like(x)
        grid = _grid(ctx.sizes[0], ctx.setting["R"])
        dw = None if weight is None else torch.empty(grid[0], x.shape[-1], device=x.device)
        absent = [x if t is None else t for t in (weight, cos, sin)]
        _norm_bwd[grid](x, *absent, g, dx, x if dw is None else dw, *ctx.sizes, **ctx.setting)
        return dx, None if dw is None else dw.sum(0), None, None, None, None, None


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return _Norm.apply(x, weight, None, None, eps, True, 1.0)


def norm_rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return _Norm.apply(x, weight, cos.contiguous(), sin.contiguous(), eps, True, 1.0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _Norm.apply(x, None, cos.contiguous(), sin.contiguous(), 0.0, False, 1.0)


# --- hyper-connections -------------------------------------------------------------------------------------


@triton.jit
def _mix_in_fwd(h_ptr, raw_ptr, scale_ptr, base_ptr, x_ptr, gate_ptr, logits_ptr, inv_ptr, count,
                norm_eps, hc_eps, R: tl.constexpr, N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * R + tl.arange(0, R)
    n, n2 = tl.arange(0, N), tl.arange(0, N * N)
    inside = (rows < count)[:, None]
    at = rows[:, None, None] * (N * D) + n[None, :, None] * D + tl.arange(0, D)[None, None, :]
    h = tl.load(h_ptr + at, mask=inside[:, :, None], other=0.0).to(tl.float32)
    inv = tl.rsqrt(tl.sum(tl.sum(h * h, 2), 1) / (N * D) + norm_eps)
    tl.store(inv_ptr + rows, inv, mask=rows < count)
    raw = raw_ptr + rows[:, None] * (2 * N + N * N)
    m = tl.load(raw + n[None, :], mask=inside, other=0.0).to(tl.float32) * inv[:, None]
    into = tl.sigmoid(m * tl.load(scale_ptr) + tl.load(base_ptr + n)[None, :]) + hc_eps
    x = tl.sum(into[:, :, None] * h, 1)
    tl.store(x_ptr + rows[:, None] * D + tl.arange(0, D)[None, :], x, mask=inside)
    m = tl.load(raw + N + n[None, :], mask=inside, other=0.0).to(tl.float32) * inv[:, None]
    gate = 2 * tl.sigmoid(m * tl.load(scale_ptr + 1) + tl.load(base_ptr + N + n)[None, :])
    tl.store(gate_ptr + rows[:, None] * N + n[None, :], gate, mask=inside)
    m = tl.load(raw + 2 * N + n2[None, :], mask=inside, other=0.0).to(tl.float32) * inv[:, None]
    logits = m * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * N + n2)[None, :]
    tl.store(logits_ptr + rows[:, None] * (N * N) + n2[None, :], logits, mask=inside)


@triton.jit
def _mix_in_bwd(h_ptr, raw_ptr, scale_ptr, base_ptr, inv_ptr, dx_ptr, dgate_ptr, dlogits_ptr, dh_ptr,
                draw_ptr, dparam_ptr, count, hc_eps,
                R: tl.constexpr, N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    rows = program * R + tl.arange(0, R)
    n, n2 = tl.arange(0, N), tl.arange(0, N * N)
    inside = (rows < count)[:, None]
    at = rows[:, None, None] * (N * D) + n[None, :, None] * D + tl.arange(0, D)[None, None, :]
    h = tl.load(h_ptr + at, mask=inside[:, :, None], other=0.0).to(tl.float32)
    inv = tl.load(inv_ptr + rows, mask=rows < count, other=0.0)
    raw = raw_ptr + rows[:, None] * (2 * N + N * N)
    draw = draw_ptr + rows[:, None] * (2 * N + N * N)
    # Per program: gradients of base [2N + N*N], then of scale, spread over the same lanes.
    dbase = dparam_ptr + program * 2 * (2 * N + N * N)
    dscale = dbase + 2 * N + N * N
    dx = tl.load(dx_ptr + rows[:, None] * D + tl.arange(0, D)[None, :], mask=inside, other=0.0).to(tl.float32)
    r = tl.load(raw + n[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr)
    s = tl.sigmoid(r * inv[:, None] * scale + tl.load(base_ptr + n)[None, :])
    dh = (s + hc_eps)[:, :, None] * dx[:, None, :]
    dz = tl.where(inside, tl.sum(h * dx[:, None, :], 2) * s * (1 - s), 0.0)
    tl.store(dbase + n, tl.sum(dz, 0))
    tl.store(dscale + n, tl.sum(dz * r * inv[:, None], 0))
    dm = dz * scale
    tl.store(draw + n[None, :], dm * inv[:, None], mask=inside)
    dinv = tl.sum(dm * r, 1)
    r = tl.load(raw + N + n[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + 1)
    s = tl.sigmoid(r * inv[:, None] * scale + tl.load(base_ptr + N + n)[None, :])
    dz = tl.load(dgate_ptr + rows[:, None] * N + n[None, :], mask=inside, other=0.0) * 2 * s * (1 - s)
    tl.store(dbase + N + n, tl.sum(dz, 0))
    tl.store(dscale + N + n, tl.sum(dz * r * inv[:, None], 0))
    dm = dz * scale
    tl.store(draw + N + n[None, :], dm * inv[:, None], mask=inside)
    dinv += tl.sum(dm * r, 1)
    r2 = tl.load(raw + 2 * N + n2[None, :], mask=inside, other=0.0).to(tl.float32)
    dz2 = tl.load(dlogits_ptr + rows[:, None] * (N * N) + n2[None, :], mask=inside, other=0.0)
    tl.store(dbase + 2 * N + n2, tl.sum(dz2, 0))
    tl.store(dscale + 2 * N + n2, tl.sum(dz2 * r2 * inv[:, None], 0))
    dm2 = dz2 * tl.load(scale_ptr + 2)
    tl.store(draw + 2 * N + n2[None, :], dm2 * inv[:, None], mask=inside)
    dinv += tl.sum(dm2 * r2, 1)
    dh -= (dinv * inv * inv * inv / (N * D))[:, None, None] * h
    tl.store(dh_ptr + at, dh, mask=inside[:, :, None])


class _MixIn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, raw: Tensor, scale: Tensor, base: Tensor, norm_eps: float, hc_eps: float
    ) -> Any:
        h, raw = h.contiguous(), raw.contiguous()
        b, length, n, d = h.shape
        count = b * length
        x = torch.empty(b, length, d, dtype=h.dtype, device=h.device)
        gate, logits = (torch.empty(b, length, *s, device=h.device) for s in ((n,), (n, n)))
        inv = torch.empty(count, device=h.device)
        _mix_in_fwd[_grid(count, 4)](
            h, raw, scale, base, x, gate, logits, inv, count, norm_eps, hc_eps, R=4, N=n, D=d
        )
        ctx.save_for_backward(h, raw, scale, base, inv)
        ctx.hc_eps = hc_eps
        return x, gate, logits

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dgate: Tensor, dlogits: Tensor) -> Any:
        h, raw, scale, base, inv = ctx.saved_tensors
        _, _, n, d = h.shape
        count, width = inv.numel(), raw.shape[-1]
        grid = _grid(count, 4)
        dh, draw = torch.empty_like(h), torch.empty_like(raw)
        dparam = torch.empty(grid[0], 2, width, device=h.device)
        grads = [t.contiguous() for t in (dx, dgate, dlogits)]
        _mix_in_bwd[grid](
            h, raw, scale, base, inv, *grads, dh, draw, dparam, count, ctx.hc_eps, R=4, N=n, D=d
        )
        dbase, dscale = dparam.sum(0)
        dscale = torch.stack([part.sum() for part in dscale.split([n, n, n * n])])
        return dh, draw, dscale, dbase, None, None


def mix_in(
    h: Tensor, raw: Tensor, scale: Tensor, base: Tensor, norm_eps: float, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _MixIn.apply(h, raw, scale, base, norm_eps, hc_eps)


@triton.jit
def _sinkhorn_fwd(z_ptr, y_ptr, sums_ptr, count, eps, ITERS: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    n = tl.arange(0, N)
    at = rows[:, None, None] * (N * N) + n[None, :, None] * N + n[None, None, :]
    inside = (rows < count)[:, None, None]
    z = tl.load(z_ptr + at, mask=inside, other=0.0)
    z = tl.exp(z - tl.max(z, 2)[:, :, None])
    y = z / tl.sum(z, 2)[:, :, None] + eps
    sums = sums_ptr + rows[:, None] * ((2 * ITERS - 1) * N) + n[None, :]
    column = tl.sum(y, 1) + eps
    y = y / column[:, None, :]
    tl.store(sums, column, mask=(rows < count)[:, None])
    for i in range(1, ITERS):
        row = tl.sum(y, 2) + eps
        y = y / row[:, :, None]
        tl.store(sums + (2 * i - 1) * N, row, mask=(rows < count)[:, None])
        column = tl.sum(y, 1) + eps
        y = y / column[:, None, :]
        tl.store(sums + 2 * i * N, column, mask=(rows < count)[:, None])
    tl.store(y_ptr + at, y, mask=inside)


@triton.jit
def _sinkhorn_bwd(
    y_ptr, sums_ptr, g_ptr, dz_ptr, count, eps, ITERS: tl.constexpr, R: tl.constexpr, N: tl.constexpr
):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    n = tl.arange(0, N)
    at = rows[:, None, None] * (N * N) + n[None, :, None] * N + n[None, None, :]
    inside = (rows < count)[:, None, None]
    y = tl.load(y_ptr + at, mask=inside, other=0.0)
    g = tl.load(g_ptr + at, mask=inside, other=0.0)
    sums = sums_ptr + rows[:, None] * ((2 * ITERS - 1) * N) + n[None, :]
    # y = x / s: dx = (g - sum(g * y)) / s, and x = y * s is the step before.
    for back in range(1, ITERS):
        i = ITERS - back
        column = tl.load(sums + 2 * i * N, mask=(rows < count)[:, None], other=1.0)
        g = (g - tl.sum(g * y, 1)[:, None, :]) / column[:, None, :]
        y = y * column[:, None, :]
        row = tl.load(sums + (2 * i - 1) * N, mask=(rows < count)[:, None], other=1.0)
        g = (g - tl.sum(g * y, 2)[:, :, None]) / row[:, :, None]
        y = y * row[:, :, None]
    column = tl.load(sums, mask=(rows < count)[:, None], other=1.0)
    g = (g - tl.sum(g * y, 1)[:, None, :]) / column[:, None, :]
    p = y * column[:, None, :] - eps
    tl.store(dz_ptr + at, p * (g - tl.sum(g * p, 2)[:, :, None]), mask=inside)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, eps: float, iters: int) -> Tensor:
        logits = logits.contiguous()
        n = logits.shape[-1]
        count = logits.numel() // (n * n)
        y, sums = torch.empty_like(logits), torch.empty(count, 2 * iters - 1, n, device=logits.device)
        _sinkhorn_fwd[_grid(count, 64)](logits, y, sums, count, eps, ITERS=iters, R=64, N=n)
        ctx.save_for_backward(y, sums)
        ctx.setting = (count, eps, iters, n)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        y, sums = ctx.saved_tensors
        count, eps, iters, n = ctx.setting
        dz = torch.empty_like(y)
        _sinkhorn_bwd[_grid(count, 64)](y, sums, g.contiguous(), dz, count, eps, ITERS=iters, R=64, N=n)
        return dz, None, None


def sinkhorn(logits: Tensor, eps: float, iters: int) -> Tensor:
    return _Sinkhorn.apply(logits, eps, iters)


@triton.jit
def _mix_out_fwd(
    y_ptr, h_ptr, gate_ptr, comb_ptr, out_ptr, count, R: tl.constexpr, N: tl.constexpr, D: tl.constexpr
):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    n, d = tl.arange(0, N), tl.arange(0, D)
    inside = (rows < count)[:, None]
    y = tl.load(y_ptr + rows[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + rows[:, None] * N + n[None, :], mask=inside, other=0.0)
    out = gate[:, :, None] * y[:, None, :]
    for i in tl.static_range(N):
        h = tl.load(h_ptr + rows[:, None] * (N * D) + i * D + d[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        comb = tl.load(comb_ptr + rows[:, None] * (N * N) + i * N + n[None, :], mask=inside, other=0.0)
        out += comb[:, :, None] * h[:, None, :]
    at = rows[:, None, None] * (N * D) + n[None, :, None] * D + d[None, None, :]
    tl.store(out_ptr + at, out, mask=inside[:, :, None])


@triton.jit
def _mix_out_bwd(y_ptr, h_ptr, gate_ptr, comb_ptr, g_ptr, dy_ptr, dh_ptr, dgate_ptr, dcomb_ptr, count,
                 R: tl.constexpr, N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * R + tl.arange(0, R)
    n, d = tl.arange(0, N), tl.arange(0, D)
    inside = (rows < count)[:, None]
    at = rows[:, None, None] * (N * D) + n[None, :, None] * D + d[None, None, :]
    g = tl.load(g_ptr + at, mask=inside[:, :, None], other=0.0).to(tl.float32)
    y = tl.load(y_ptr + rows[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + rows[:, None] * N + n[None, :], mask=inside, other=0.0)
    tl.store(dy_ptr + rows[:, None] * D + d[None, :], tl.sum(gate[:, :, None] * g, 1), mask=inside)
    tl.store(dgate_ptr + rows[:, None] * N + n[None, :], tl.sum(y[:, None, :] * g, 2), mask=inside)
    for i in tl.static_range(N):
        at_i = rows[:, None] * (N * D) + i * D + d[None, :]
        h = tl.load(h_ptr + at_i, mask=inside, other=0.0).to(tl.float32)
        comb = tl.load(comb_ptr + rows[:, None] * (N * N) + i * N + n[None, :], mask=inside, other=0.0)
        tl.store(dh_ptr + at_i, tl.sum(comb[:, :, None] * g, 1), mask=inside)
        dcomb = tl.sum(h[:, None, :] * g, 2)
        tl.store(dcomb_ptr + rows[:, None] * (N * N) + i * N + n[None, :], dcomb, mask=inside)


class _MixOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, h: Tensor, gate: Tensor, comb: Tensor) -> Tensor:
        y, h, gate, comb = (t.contiguous() for t in (y, h, gate, comb))
        b, length, n, d = h.shape
        out = torch.empty_like(h)
        _mix_out_fwd[_grid(b * length, 4)](y, h, gate, comb, out, b * length, R=4, N=n, D=d)
        ctx.save_for_backward(y, h, gate, comb)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        saved = ctx.saved_tensors
        b, length, n, d = saved[1].shape
        grads = [torch.empty_like(t) for t in saved]
        _mix_out_bwd[_grid(b * length, 4)](*saved, g.contiguous(), *grads, b * length, R=4, N=n, D=d)
        return tuple(grads)


def mix_out(y: Tensor, h: Tensor, gate: Tensor, comb: Tensor) -> Tensor:
    return _MixOut.apply(y, h, gate, comb)


# --- experts and loss --------------------------------------------------------------------------------------


@triton.jit
def _swiglu_fwd(
    gate_ptr, up_ptr, w_ptr, out_ptr, count, limit, R: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr
):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    e = tl.arange(0, E)
    at = rows[:, None, None] * (E * WIDTH) + e[None, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    inside = (rows < count)[:, None, None]
    gate = tl.minimum(tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32), limit)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    w = tl.load(w_ptr + rows[:, None] * E + e[None, :], mask=(rows < count)[:, None], other=0.0)
    tl.store(out_ptr + at, gate * tl.sigmoid(gate) * up * w[:, :, None], mask=inside)


@triton.jit
def _swiglu_bwd(gate_ptr, up_ptr, w_ptr, g_ptr, dgate_ptr, dup_ptr, dw_ptr, count, limit,
                R: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * R + tl.arange(0, R)
    e = tl.arange(0, E)
    at = rows[:, None, None] * (E * WIDTH) + e[None, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    inside = (rows < count)[:, None, None]
    raw_gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    raw_up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(raw_gate, limit)
    up = tl.minimum(tl.maximum(raw_up, -limit), limit)
    s = tl.sigmoid(gate)
    silu = gate * s
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    at_w = rows[:, None] * E + e[None, :]
    w = tl.load(w_ptr + at_w, mask=(rows < count)[:, None], other=0.0)
    tl.store(dw_ptr + at_w, tl.sum(g * silu * up, 2), mask=(rows < count)[:, None])
    g = g * w[:, :, None]
    tl.store(dup_ptr + at, tl.where(tl.abs(raw_up) <= limit, g * silu, 0.0), mask=inside)
    dgate = g * up * (s + silu * (1 - s))
    tl.store(dgate_ptr + at, tl.where(raw_gate <= limit, dgate, 0.0), mask=inside)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weights: Tensor, limit: float) -> Tensor:
        gate, up, weights = gate.contiguous(), up.contiguous(), weights.contiguous()
        e, i = gate.shape[-2:]
        ctx.sizes = (weights.numel() // e, limit)
        ctx.setting = {"R": max(1, 4096 // (e * i)), "E": e, "WIDTH": i}
        out = torch.empty_like(gate)
        _swiglu_fwd[_grid(ctx.sizes[0], ctx.setting["R"])](gate, up, weights, out, *ctx.sizes, **ctx.setting)
        ctx.save_for_backward(gate, up, weights)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        saved = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in saved]
        grid = _grid(ctx.sizes[0], ctx.setting["R"])
        _swiglu_bwd[grid](*saved, g.contiguous(), *grads, *ctx.sizes, **ctx.setting)
        return (*grads, None)


def swiglu(gate: Tensor, up: Tensor, weights: Tensor, limit: float) -> Tensor:
    return _SwiGLU.apply(gate, up, weights, limit)


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
