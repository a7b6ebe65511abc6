"""Decode step: launches indexer.cu. Index queries, scores and the choice of entries of a CSA layer in one
launch. Replaces ops.index.ref.queries and select for V4's sizes, in BF16, and rows of few entries.

prepare.py, index.py and choose.py have the same for other sizes, for float32 and for long rows.
"""

import ctypes

import torch
from torch import Tensor

from dsv4.kernels.common.build import address, call
from dsv4.kernels.common.overlap import launcher
from dsv4.kernels.decode.attention import bits_of
from dsv4.quant.formats import Format, QuantTensor

# Numbers of indexer.cu.
HEADS, CHANNELS, ROPE, CLUSTER, THREADS = 64, 128, 64, 8, 256
# Bytes of shared memory by the keys that a lane chooses from: rows of as many entries as THREADS times those.
SHARED_BYTES = {5: 21648, 16: 32912, 32: 49296}
MAX_ENTRIES = max(SHARED_BYTES) * THREADS


class _Indexing(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("iq", "weights", "keys", "key_scale", "entries")),
        *((name, ctypes.c_void_p) for name in ("entries_scale", "cos", "sin", "slots", "positions")),
        *((name, ctypes.c_void_p) for name in ("page_table", "out")),
        *((name, ctypes.c_int) for name in ("pages", "topk", "ratio_bits", "page_bits")),
        ("factor", ctypes.c_float),
    )


def serves(heads: int, channels: int, rope: int, capacity: int, topk: int, dtype: torch.dtype) -> bool:
    """Whether rows of up to `capacity` entries, of which `topk` are chosen, are what it is made for."""
    sizes = (heads, channels, rope) == (HEADS, CHANNELS, ROPE) and dtype == torch.bfloat16
    return sizes and topk <= min(capacity, MAX_ENTRIES) and capacity <= MAX_ENTRIES


def keys_of_lane(capacity: int) -> int:
    return next(keys for keys in SHARED_BYTES if capacity <= keys * THREADS)


def arguments(
    iq: Tensor,
    weights: Tensor,
    keys: QuantTensor,
    entries: QuantTensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    capacity: int,
    ratio: int,
    page_entries: int,
    factor: float,
    out: Tensor,
) -> _Indexing:
    """What the kernel takes, checked."""
    rows, heads, channels = iq.shape
    assert serves(heads, channels, 2 * cos.shape[1], capacity, out.shape[1], iq.dtype), (iq.shape, capacity)
    assert iq.is_contiguous() and weights.is_contiguous() and weights.shape == (rows, heads)
    assert weights.dtype == iq.dtype and out.is_contiguous() and out.dtype == torch.int32
    assert keys.format is Format.MXFP4 and keys.shape[1] == CHANNELS and keys.data.is_contiguous()
    assert entries.format is Format.KV8 and entries.data.shape[1] == 576, entries.data.shape
    assert cos.is_contiguous() and sin.is_contiguous() and cos.dtype == sin.dtype == torch.float32
    return _Indexing(
        iq=iq.data_ptr(),
        weights=weights.data_ptr(),
        keys=keys.data.data_ptr(),
        key_scale=address(keys.scale),
        entries=entries.data.data_ptr(),
        entries_scale=address(entries.scale),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        slots=slots.data_ptr(),
        positions=positions.data_ptr(),
        page_table=page_table.data_ptr(),
        out=out.data_ptr(),
        pages=page_table.stride(0),
        topk=out.shape[1],
        ratio_bits=bits_of(ratio),
        page_bits=bits_of(page_entries),
        factor=factor,
    )


@launcher(
    reads=("iq", "weights", "keys", "page_table"),
    reads_early=("keys", "page_table", "slots", "positions", "cos", "sin"),
    writes=("out",),
    prefetches=("entries",),
)
def choose_entries(
    iq: Tensor,
    weights: Tensor,
    keys: QuantTensor,
    entries: QuantTensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    capacity: int,
    ratio: int,
    page_entries: int,
    factor: float,
    out: Tensor,
    overlap: bool = True,
) -> None:
    """iq [T, Hi, di], as its product left it; weights [T, Hi], times factor; keys MXFP4 -> out [T, topk]
    int32: the places in the pool of the entries that score best, by rising entry; -1s.

    A row chooses among the (position + 1) // ratio that it sees, at most `capacity`. `entries`, among which
    attention will read, are prefetched to L2.
    """
    rows = iq.shape[0]
    given = arguments(
        iq=iq,
        weights=weights,
        keys=keys,
        entries=entries,
        page_table=page_table,
        slots=slots,
        positions=positions,
        cos=cos,
        sin=sin,
        capacity=capacity,
        ratio=ratio,
        page_entries=page_entries,
        factor=factor,
        out=out,
    )
    if rows:
        keys_each = keys_of_lane(capacity)
        call(
            "indexer",
            f"indexer_kernel<{keys_each}>",
            iq.device,
            given,
            blocks=rows * CLUSTER,
            threads=THREADS,
            shared=SHARED_BYTES[keys_each],
            cluster=CLUSTER,
            overlap=overlap,
        )
