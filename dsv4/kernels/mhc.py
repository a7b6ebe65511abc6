"""Hyper-connections of a decode step: one launch per site, in mix.cu; and the token's row that opens a step.

Replaces ops.mhc.ref and the norm after it. Four streams, as in every V4 model.
"""

import ctypes
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.errors import DeviceError
from dsv4.kernels.build import call
from dsv4.kernels.numbers import OVERLAPPED, begin, to_act

# A block's channels, its words per row, blocks on a multiprocessor, the most rows of a block: as in mix.cu.
STREAMS, CHANNELS, WORDS, RESIDENT, MAX_ROWS = 4, 64, 35, 2, 16
MAX_PARTS = 8
MIXES = 2 * STREAMS + STREAMS * STREAMS


@triton.jit
def _embed_kernel(ids_ptr, table_ptr, out_ptr, D: tl.constexpr, N: tl.constexpr,  # type: ignore[no-untyped-def]
                  BLOCK: tl.constexpr):  # fmt: skip
    begin()
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


class _Mix(ctypes.Structure):
    _fields_ = (
        *(("y", ctypes.c_void_p), ("y_is_f32", ctypes.c_int), ("parts", ctypes.c_int)),
        *((name, ctypes.c_void_p) for name in ("streams", "fn", "base", "scale", "weight", "logits")),
        *((name, ctypes.c_void_p) for name in ("x", "board", "launches")),
        *((name, ctypes.c_int) for name in ("mixes", "d", "chunks", "rows", "groups", "iters")),
        *(("norm_eps", ctypes.c_float), ("hc_eps", ctypes.c_float)),
    )


@dataclass(frozen=True)
class Board:
    """Where the blocks of a launch tell each other their sums; one launch after the other may use it."""

    words: Tensor  # int64 [rows, WORDS, chunks]
    launches: Tensor  # int32 [blocks], the number of the next one; words of number 0 are none's
    groups: int  # of blocks; each takes every groups-th row

    @classmethod
    def empty(cls, rows: int, hidden_size: int, device: torch.device) -> "Board":
        chunks = -(-hidden_size // CHANNELS)
        room = RESIDENT * torch.cuda.get_device_properties(device).multi_processor_count
        groups = min(rows, room // (chunks + 1))
        if groups * MAX_ROWS < rows:
            raise DeviceError(
                f"{rows} rows of {hidden_size} channels need {-(-rows // MAX_ROWS) * (chunks + 1)} resident "
                f"blocks and this GPU has room for {room}; use fewer running sequences (--max-seqs)"
            )
        words = torch.zeros(rows, WORDS, chunks, dtype=torch.int64, device=device)
        return cls(words, torch.ones(groups * (chunks + 1), dtype=torch.int32, device=device), groups)


def mix(
    y: Tensor | None,
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    weight: Tensor,
    logits: Tensor,
    x: Tensor,
    board: Board,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> None:
    """streams [T, N, D] <- mhc.post of them and the sum over P of y; x [T, D] <- mhc.pre of them, normed.

    y [T, P, D] of the streams' type or float32 (None: the streams stay); fn [M, N*D], base and scale [M]
    (scale repeated for each mix), weight [D] float32. logits [T, 2N + N*N] float32: those of the last site,
    of which gate and comb are made; on return those of this one. M = N: mhc.head, which leaves them.
    A launch begins before the one before it is over: from site to site there must be a MatVec between them.
    """
    rows, n, d = streams.shape
    mixes = fn.shape[0]
    assert n == STREAMS and mixes in (n, MIXES) and fn.shape[1] == n * d, (streams.shape, fn.shape)
    assert base.shape == scale.shape == (mixes,) and weight.shape == (d,), (base.shape, scale.shape)
    assert logits.shape == (rows, MIXES) and x.shape == (rows, d), (logits.shape, x.shape)
    assert y is None or (y.shape[::2] == (rows, d) and y.dtype in (streams.dtype, torch.float32)), y.shape
    assert y is None or y.shape[1] <= MAX_PARTS, y.shape
    assert board.words.shape == (rows, WORDS, -(-d // CHANNELS)), board.words.shape
    assert all(t.is_contiguous() for t in (streams, fn, logits, x)) and (y is None or y.is_contiguous())
    is_float = streams.dtype == torch.float32
    params = _Mix(
        y=None if y is None else y.data_ptr(),
        y_is_f32=int(y is not None and y.dtype == torch.float32),
        parts=0 if y is None else y.shape[1],
        **{"mixes": mixes, "d": d, "chunks": board.words.shape[2], "rows": rows, "groups": board.groups},
        **{"iters": iters, "norm_eps": norm_eps, "hc_eps": hc_eps},
    )
    pointers = {"streams": streams, "fn": fn, "base": base, "scale": scale, "weight": weight}
    for name, tensor in (pointers | {"logits": logits, "x": x}).items():
        setattr(params, name, tensor.data_ptr())
    params.board, params.launches = board.words.data_ptr(), board.launches.data_ptr()
    call("mix", "mix", streams.device, ctypes.byref(params), int(is_float))
