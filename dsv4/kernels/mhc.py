"""Hyper-connections of a decode step: two launches per site. Replaces ops.mhc.ref and the norm after it.

`mix_open` puts the last output back into the streams and multiplies them with `fn`, a few channels per
program; `mix_close` adds the parts up and makes the next input. Four streams, as in every V4 model.
"""

import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.numbers import OVERLAPPED, channels, let_next_start, norm, rounded, to_act, wait_for_earlier

STREAMS = 4
CHUNK = 32  # channels of each stream per program of mix_open
WIDTH = 32  # columns of `partial`: the mixes, and in the last the sum of squares
MAX_ROWS = 8  # programs along T of mix_open; each keeps its part of fn for all its rows


def num_chunks(hidden_size: int) -> int:
    return triton.cdiv(hidden_size, CHUNK)


@triton.jit
def _embed_kernel(ids_ptr, table_ptr, out_ptr, D: tl.constexpr, N: tl.constexpr,  # type: ignore[no-untyped-def]
                  BLOCK: tl.constexpr):  # fmt: skip
    # In this order: what kernels after this one read before they wait is then as old as the step.
    wait_for_earlier()
    let_next_start()
    row = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # A row whose last logits were not finite goes on with id -1 until the host hears of it.
    at = tl.maximum(tl.load(ids_ptr + row), 0)
    x = tl.load(table_ptr + at * D + c, mask=c < D, other=0.0).to(tl.float32)
    x = to_act(x, out_ptr.dtype.element_ty)
    for n in tl.static_range(N):
        tl.store(out_ptr + (row * N + n) * D + c, x, mask=c < D)


def embed(ids: Tensor, table: Tensor, streams: Tensor) -> None:
    """ids [T] int64, table [V, D] -> streams [T, N, D]: every stream is the token's row."""
    rows, n, d = streams.shape
    assert table.shape[1] == d and ids.shape == (rows,), (table.shape, ids.shape, streams.shape)
    if rows:
        _embed_kernel[(triton.cdiv(d, 1024), rows)](ids, table, streams, D=d, N=n, BLOCK=1024, **OVERLAPPED)


# One kernel for every T: a row's result must not depend on it.
@triton.jit(do_not_specialize=["rows"])
def _open_kernel(y_ptr, gate_ptr, comb_ptr, streams_ptr, fn_ptr, partial_ptr, rows, D: tl.constexpr,  # type: ignore[no-untyped-def]
                 N: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
                 CHUNK: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    act: tl.constexpr = streams_ptr.dtype.element_ty
    chunk = tl.program_id(0)
    c = chunk * CHUNK + tl.arange(0, CHUNK)
    n, m = tl.arange(0, N), tl.arange(0, MP)
    inside = c < D
    at = n[:, None] * D + c[None, :]
    # fn does not depend on the step, so its loads go first; nothing below waits for them until the product.
    mask = (m < M)[:, None, None] & inside[None, None, :]
    fn = tl.load(fn_ptr + m[:, None, None] * (N * D) + at[None, :, :], mask=mask, other=0.0)
    let_next_start()
    wait_for_earlier()
    first, step = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    for i in range(tl.cdiv(rows - first, step)):
        row = first + i * step
        streams = streams_ptr + row * (N * D)
        if y_ptr is None:
            new = tl.load(streams + at, mask=inside[None, :], other=0.0).to(tl.float32)
        else:
            y = tl.zeros([CHUNK], tl.float32)
            for p in tl.static_range(P):
                y += tl.load(y_ptr + (row * P + p) * D + c, mask=inside, other=0.0).to(tl.float32)
            mixed = tl.zeros([N, CHUNK], tl.float32)
            for j in tl.static_range(N):
                old = tl.load(streams + j * D + c, mask=inside, other=0.0).to(tl.float32)
                mixed += tl.load(comb_ptr + row * (N * N) + j * N + n)[:, None] * old[None, :]
            gate = tl.load(gate_ptr + row * N + n)
            out = to_act(gate[:, None] * rounded(y, act)[None, :] + mixed, act)
            # A stream's channel is read by several threads and written by one: all must have read.
            tl.debug_barrier()
            tl.store(streams + at, out, mask=inside[None, :])
            new = out.to(tl.float32)
        dots = tl.sum(tl.reshape(fn * new[None, :, :], (MP, N * CHUNK)), 1)
        partial = partial_ptr + (row * C + chunk) * WIDTH
        tl.store(partial + m, dots, mask=m < M)
        tl.store(partial + WIDTH - 1, tl.sum(tl.reshape(new * new, (N * CHUNK,)), 0))


def mix_open(
    y: Tensor | None, gate: Tensor | None, comb: Tensor | None, streams: Tensor, fn: Tensor, partial: Tensor
) -> None:
    """streams [T, N, D] <- mhc.post(sum over P of y, streams, gate, comb); partial <- products with fn.

    y [T, P, D] (None: the streams stay), gate [T, N], comb [T, N, N], fn [M, N*D] float32, partial
    [T, num_chunks(D), WIDTH] float32: columns 0 .. M-1 and the last are written.
    """
    rows, n, d = streams.shape
    mixes = fn.shape[0]
    assert n == STREAMS and mixes < WIDTH and fn.shape[1] == n * d, (streams.shape, fn.shape)
    assert partial.shape == (rows, num_chunks(d), WIDTH), partial.shape
    assert y is None or (gate is not None and comb is not None and y.shape[::2] == (rows, d)), y.shape
    assert streams.is_contiguous() and fn.is_contiguous() and (y is None or y.is_contiguous())
    if rows:
        _open_kernel[(num_chunks(d), min(rows, MAX_ROWS))](
            *(y, gate, comb, streams, fn, partial, rows),
            **{"D": d, "N": n, "M": mixes, "MP": triton.next_power_of_2(mixes)},
            **{"P": 0 if y is None else y.shape[1], "C": num_chunks(d), "CHUNK": CHUNK, "WIDTH": WIDTH},
            num_warps=4,
            **OVERLAPPED,
        )


@triton.jit
def _pick(values, k, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """values [WIDTH] -> number k of them, known to every thread."""
    return tl.sum(tl.where(tl.arange(0, WIDTH) == k, values, 0.0), 0)


@triton.jit
def _even(a, b, c, d, eps):  # type: ignore[no-untyped-def]
    """Four numbers divided by their sum."""
    share = 1.0 / ((a + b) + (c + d) + eps)
    return a * share, b * share, c * share, d * share


@triton.jit
def _softmax(a, b, c, d, eps):  # type: ignore[no-untyped-def]
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
    a, b, c, d = _even(a, b, c, d, 0.0)
    return a + eps, b + eps, c + eps, d + eps


@triton.jit
def _sinkhorn(logits, out_ptr, eps, ITERS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """mhc.sinkhorn of the 4 x 4 logits from column 8 on. Scalars: every sum stays within a thread."""
    a0, a1, a2, a3 = _softmax(_pick(logits, 8, WIDTH), _pick(logits, 9, WIDTH),
                              _pick(logits, 10, WIDTH), _pick(logits, 11, WIDTH), eps)  # fmt: skip
    b0, b1, b2, b3 = _softmax(_pick(logits, 12, WIDTH), _pick(logits, 13, WIDTH),
                              _pick(logits, 14, WIDTH), _pick(logits, 15, WIDTH), eps)  # fmt: skip
    c0, c1, c2, c3 = _softmax(_pick(logits, 16, WIDTH), _pick(logits, 17, WIDTH),
                              _pick(logits, 18, WIDTH), _pick(logits, 19, WIDTH), eps)  # fmt: skip
    d0, d1, d2, d3 = _softmax(_pick(logits, 20, WIDTH), _pick(logits, 21, WIDTH),
                              _pick(logits, 22, WIDTH), _pick(logits, 23, WIDTH), eps)  # fmt: skip
    a0, b0, c0, d0 = _even(a0, b0, c0, d0, eps)
    a1, b1, c1, d1 = _even(a1, b1, c1, d1, eps)
    a2, b2, c2, d2 = _even(a2, b2, c2, d2, eps)
    a3, b3, c3, d3 = _even(a3, b3, c3, d3, eps)
    for _ in range(ITERS - 1):
        a0, a1, a2, a3 = _even(a0, a1, a2, a3, eps)
        b0, b1, b2, b3 = _even(b0, b1, b2, b3, eps)
        c0, c1, c2, c3 = _even(c0, c1, c2, c3, eps)
        d0, d1, d2, d3 = _even(d0, d1, d2, d3, eps)
        a0, b0, c0, d0 = _even(a0, b0, c0, d0, eps)
        a1, b1, c1, d1 = _even(a1, b1, c1, d1, eps)
        a2, b2, c2, d2 = _even(a2, b2, c2, d2, eps)
        a3, b3, c3, d3 = _even(a3, b3, c3, d3, eps)
    tl.store(out_ptr + 0, a0)
    tl.store(out_ptr + 1, a1)
    tl.store(out_ptr + 2, a2)
    tl.store(out_ptr + 3, a3)
    tl.store(out_ptr + 4, b0)
    tl.store(out_ptr + 5, b1)
    tl.store(out_ptr + 6, b2)
    tl.store(out_ptr + 7, b3)
    tl.store(out_ptr + 8, c0)
    tl.store(out_ptr + 9, c1)
    tl.store(out_ptr + 10, c2)
    tl.store(out_ptr + 11, c3)
    tl.store(out_ptr + 12, d0)
    tl.store(out_ptr + 13, d1)
    tl.store(out_ptr + 14, d2)
    tl.store(out_ptr + 15, d3)


@triton.jit
def _close_kernel(partial_ptr, base_ptr, scale_ptr, streams_ptr, weight_ptr, x_ptr, gate_ptr, comb_ptr,  # type: ignore[no-untyped-def]
                  norm_eps, hc_eps, D: tl.constexpr, N: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
                  CP: tl.constexpr, SIZE: tl.constexpr, ITERS: tl.constexpr,
                  WIDTH: tl.constexpr):  # fmt: skip
    act: tl.constexpr = x_ptr.dtype.element_ty
    let_next_start()
    c = tl.arange(0, SIZE)
    weight = channels(weight_ptr, D, SIZE)
    row = tl.program_id(1).to(tl.int64)
    k, chunk = tl.arange(0, WIDTH), tl.arange(0, CP)
    part = partial_ptr + (row * C + chunk)[:, None] * WIDTH + k[None, :]
    wanted = (k < M) | (k == WIDTH - 1)
    scale = tl.load(scale_ptr + k, mask=k < M, other=0.0)
    base = tl.load(base_ptr + k, mask=k < M, other=0.0)
    wait_for_earlier()
    part = tl.load(part, mask=(chunk < C)[:, None] & wanted[None, :], other=0.0)
    if tl.program_id(0) == 0:
        streams = streams_ptr + row * (N * D) + c
        s0 = tl.load(streams, mask=c < D, other=0.0)
        s1 = tl.load(streams + D, mask=c < D, other=0.0)
        s2 = tl.load(streams + 2 * D, mask=c < D, other=0.0)
        s3 = tl.load(streams + 3 * D, mask=c < D, other=0.0)
        logits = _logits(tl.sum(part, 0), scale, base, norm_eps, N * D, WIDTH)
        share = tl.div_rn(1.0, 1.0 + tl.exp(-logits))
        if gate_ptr is not None:
            tl.store(gate_ptr + row * N + k - N, share * 2.0, mask=(k >= N) & (k < 2 * N))
        into = share + hc_eps
        x = _pick(into, 0, WIDTH) * s0.to(tl.float32) + _pick(into, 1, WIDTH) * s1.to(tl.float32)
        x += _pick(into, 2, WIDTH) * s2.to(tl.float32)
        x += _pick(into, 3, WIDTH) * s3.to(tl.float32)
        x = norm(rounded(x, act), weight, norm_eps, D, act)
        tl.store(x_ptr + row * D + c, x.to(act), mask=c < D)
    elif comb_ptr is not None:
        logits = _logits(tl.sum(part, 0), scale, base, norm_eps, N * D, WIDTH)
        _sinkhorn(logits, comb_ptr + row * (N * N), hc_eps, ITERS, WIDTH)


@triton.jit
def _logits(totals, scale, base, eps, COUNT: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """totals [WIDTH], squares in the last -> mixes, scaled, with their base."""
    mean = _pick(totals, WIDTH - 1, WIDTH) * (1.0 / COUNT) + eps
    return totals * tl.div_rn(1.0, tl.sqrt_rn(mean)) * scale + base


def mix_close(
    partial: Tensor,
    base: Tensor,
    scale: Tensor,
    streams: Tensor,
    weight: Tensor,
    x: Tensor,
    gate: Tensor | None,
    comb: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> None:
    """What mix_open left in `partial` -> x [T, D] (mhc.pre, then rms_norm), gate [T, N], comb [T, N, N].

    base, scale [M] (scale repeated for each mix), weight [D], all float32. gate None: mhc.head, M = N.
    The weights of the streams' mixing are made by a second program per row, beside the first.
    """
    rows, n, d = streams.shape
    mixes = n if gate is None else 2 * n + n * n
    assert n == STREAMS and base.shape == scale.shape == (mixes,), (streams.shape, base.shape, scale.shape)
    assert partial.shape == (rows, num_chunks(d), WIDTH) and (gate is None) == (comb is None), partial.shape
    size = triton.next_power_of_2(d)
    if rows:
        _close_kernel[(1 if gate is None else 2, rows)](
            *(partial, base, scale, streams, weight, x, gate, comb, norm_eps, hc_eps),
            **{"D": d, "N": n, "M": mixes, "C": num_chunks(d), "CP": triton.next_power_of_2(num_chunks(d))},
            **{"SIZE": size, "ITERS": iters, "WIDTH": WIDTH},
            num_warps=4 if size <= 4096 else 8,
            **OVERLAPPED,
        )
