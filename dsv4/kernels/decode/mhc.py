"""Decode step: hyper-connections, two launches per site. Replaces ops.mhc.ref and the norm after it.

`mix_open` puts the last output back into the streams and multiplies them with `fn`, a few channels per
program; `mix_close` (mix.cu) adds the parts up and makes the next input. Four streams, as in every V4 model.
"""

import ctypes

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.common.build import address, call
from dsv4.kernels.common.numbers import launch, launch_dependents, rounded, to_act, wait_for_prerequisites
from dsv4.kernels.common.overlap import launcher
from dsv4.kernels.common.shapes import HOW
from dsv4.kernels.common.shapes import MIX_CHUNK as CHUNK
from dsv4.kernels.common.shapes import MIX_WIDTH as WIDTH
from dsv4.kernels.common.shapes import mix_chunks as num_chunks

STREAMS = 4
ITEM, MAX_CHANNELS = 8, 8192  # of a stream: a thread of mix.cu takes up to two items
# Programs of mix_open that an H200 surely holds at once, with 96 registers a thread; how many there may be
# along T; what it costs one to begin, in rows. Measured with 8 along T, 32 rows: 12.8 us with Flash's 128
# chunks, two waves of four rows, and 19 us with Pro's 224, three. So a row takes 1.3 us, to begin 1.
RESIDENT, MAX_PROGRAMS, BEGIN = 5 * 132, 8, 0.75


@triton.jit
def _embed_kernel(ids_ptr, table_ptr, out_ptr, D: tl.constexpr, N: tl.constexpr,  # type: ignore[no-untyped-def]
                  BLOCK: tl.constexpr):  # fmt: skip
    # Late: so the launches after this one may read what is older than the step before they wait.
    wait_for_prerequisites()
    launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # A row whose last logits were not finite goes on with id -1 until the host hears of it.
    at = tl.maximum(tl.load(ids_ptr + row), 0)
    x = tl.load(table_ptr + at * D + c, mask=c < D, other=0.0).to(tl.float32)
    x = to_act(x, out_ptr.dtype.element_ty)
    for n in tl.static_range(N):
        tl.store(out_ptr + (row * N + n) * D + c, x, mask=c < D)


@launcher(reads=("ids", "table"), writes=("streams",), triggers_late=True)
def embed(ids: Tensor, table: Tensor, streams: Tensor, overlap: bool = True) -> None:
    """ids [T] int64, table [V, D] -> streams [T, N, D]: every stream is the token's row."""
    rows, n, d = streams.shape
    assert table.shape[1] == d and ids.shape == (rows,), (table.shape, ids.shape, streams.shape)
    if rows:
        launch(
            _embed_kernel,
            grid=(triton.cdiv(d, 1024), rows),
            num_warps=4,
            overlap=overlap,
            ids_ptr=ids,
            table_ptr=table,
            out_ptr=streams,
            D=d,
            N=n,
            BLOCK=1024,
        )


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
    # fn is a weight, so its loads go before the wait; nothing below needs them until the product.
    mask = (m < M)[:, None, None] & inside[None, None, :]
    fn = tl.load(fn_ptr + m[:, None, None] * (N * D) + at[None, :, :], mask=mask, other=0.0)
    launch_dependents()
    wait_for_prerequisites()
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
        tl.store(partial + m + (m >= N).to(tl.int32), dots, mask=m < M)
        tl.store(partial + N, tl.sum(tl.reshape(new * new, (N * CHUNK,)), 0))


def programs(rows: int, chunks: int) -> int:
    """Along T: what takes the least time, in waves of programs that go through their rows one by one."""

    def time(count: int) -> float:
        return triton.cdiv(chunks * count, RESIDENT) * (BEGIN + triton.cdiv(rows, count))

    return min(range(1, min(rows, MAX_PROGRAMS) + 1), key=time)


@launcher(
    reads=("y", "gate", "comb", "streams"),
    reads_early=("fn",),
    writes=("streams", "partial"),
)
def mix_open(
    y: Tensor | None,
    gate: Tensor | None,
    comb: Tensor | None,
    streams: Tensor,
    fn: Tensor,
    partial: Tensor,
    overlap: bool = True,
) -> None:
    """streams [T, N, D] <- mhc.post(sum over P of y, streams, gate, comb); partial <- products with fn.

    y [T, P, D] (None: the streams stay), gate [T, N], comb [T, N, N], fn [M, N*D] float32, partial
    [T, num_chunks(D), WIDTH] float32: columns 0 .. M are written.
    """
    rows, n, d = streams.shape
    mixes = fn.shape[0]
    assert n == STREAMS and mixes < WIDTH and fn.shape[1] == n * d, (streams.shape, fn.shape)
    assert partial.shape == (rows, num_chunks(d), WIDTH), partial.shape
    assert y is None or (gate is not None and comb is not None and y.shape[::2] == (rows, d)), y.shape
    assert streams.is_contiguous() and fn.is_contiguous() and (y is None or y.is_contiguous())
    if rows:
        launch(
            _open_kernel,
            grid=(num_chunks(d), programs(rows, num_chunks(d))),
            num_warps=4,
            overlap=overlap,
            y_ptr=y,
            gate_ptr=gate,
            comb_ptr=comb,
            streams_ptr=streams,
            fn_ptr=fn,
            partial_ptr=partial,
            rows=rows,
            D=d,
            N=n,
            M=mixes,
            MP=triton.next_power_of_2(mixes),
            P=0 if y is None else y.shape[1],
            C=num_chunks(d),
            CHUNK=CHUNK,
            WIDTH=WIDTH,
        )


class _Closing(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("partial", "base", "scale", "streams", "weight")),
        *((name, ctypes.c_void_p) for name in ("x", "x_in", "gate", "comb")),
        *((name, ctypes.c_int) for name in ("rows", "d", "chunks", "how")),
        *((name, ctypes.c_float) for name in ("norm_eps", "hc_eps")),
    )


@launcher(
    reads=("partial", "streams"),
    reads_early=("base", "scale", "weight"),
    writes=("x", "x_in", "gate", "comb"),
)
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
    x_in: Tensor | None = None,
    activations: str = "a16",
    overlap: bool = True,
) -> None:
    """What mix_open left in `partial` -> x [T, D] (mhc.pre, then rms_norm), gate [T, N], comb [T, N, N].

    x_in [T, D]: x as quantised products see it, round_input(x, activations); None with a16.
    base, scale [M] (scale repeated for each mix), weight [D], all float32. gate and comb None: mhc.head.
    comb is what Sinkhorn's rounds start from; a product's launch does them (matvec.Mixing).
    """
    rows, n, d = streams.shape
    chunks = num_chunks(d)
    mixes = n if gate is None else 2 * n + n * n
    assert n == STREAMS and base.shape == scale.shape == (mixes,), (streams.shape, base.shape, scale.shape)
    assert (gate is None) == (comb is None) and partial.shape == (rows, chunks, WIDTH), partial.shape
    assert d % ITEM == 0 and d <= MAX_CHANNELS, f"{d} channels"
    assert (x_in is None) == (activations == "a16"), activations
    if rows:
        act = "float" if x.dtype == torch.float32 else "__nv_bfloat16"
        closing = _Closing(
            partial=partial.data_ptr(),
            base=base.data_ptr(),
            scale=scale.data_ptr(),
            streams=streams.data_ptr(),
            weight=weight.data_ptr(),
            x=x.data_ptr(),
            x_in=address(x_in),
            gate=address(gate),
            comb=address(comb),
            rows=rows,
            d=d,
            chunks=chunks,
            how=HOW[activations],
            norm_eps=norm_eps,
            hc_eps=hc_eps,
        )
        call(
            "mix",
            f"close_kernel<{act}>",
            x.device,
            closing,
            blocks=rows if gate is None else 2 * rows,
            threads=512,
            overlap=overlap,
        )
