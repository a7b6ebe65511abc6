"""Decode step: launches exchange.cu, which pushes to the other ranks' memory and takes from this one's.

An inbox holds, for each sender, two places per channel of every row, for sums in turn, then one per logit.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.kernels.common.build import call
from dsv4.kernels.common.overlap import launcher
from dsv4.kernels.common.shapes import MIX_CHUNK, MIX_WIDTH, mix_chunks

MAX_RANKS, STREAMS, TURNS = 8, 4, 2
OPEN_THREADS, OPEN_BLOCKS = 128, 4  # of a block, and blocks that a multiprocessor surely holds
GATHER_THREADS, GATHER_BLOCKS = 256, 2


@dataclass(frozen=True)
class Peers:
    """This rank's inbox, and where the others' are."""

    rank: int
    rows: int  # of the largest step
    hidden: int
    vocab: int  # of one rank
    inbox: Tensor  # int64 [ranks, places], by sender; empty places are 0
    addresses: tuple[int, ...]  # of each rank's inbox, from this rank's part on
    ended: Tensor  # int32 [1], pinned: 0; whom a step waited for in vain, + 1; or -1: the host ends the wait
    seconds: float  # that it waits

    def __post_init__(self) -> None:
        assert self.inbox.shape == (self.size, inbox_places(self.rows, self.hidden, self.vocab))
        assert self.inbox.dtype == torch.int64 and self.inbox.is_contiguous()
        assert 1 < self.size <= MAX_RANKS and 0 <= self.rank < self.size

    @property
    def size(self) -> int:
        return len(self.addresses)

    def first_place(self, number: int) -> int:
        """Of a step's exchange of that number, a sum."""
        return number % TURNS * self.rows * self.hidden

    @property
    def logits_place(self) -> int:
        return TURNS * self.rows * self.hidden


def inbox_places(rows: int, hidden: int, vocab: int) -> int:
    """Packets of 8 bytes that one sender needs; `vocab` of one rank."""
    return rows * (TURNS * hidden + vocab)


class _Peers(ctypes.Structure):
    _fields_ = (
        ("inbox", ctypes.c_void_p * MAX_RANKS),
        ("own", ctypes.c_void_p),
        ("ended", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("places", "limit_ns")),
        *((name, ctypes.c_int) for name in ("rank", "size")),
    )


class _Open(ctypes.Structure):
    _fields_ = (
        ("peers", _Peers),
        *((name, ctypes.c_void_p) for name in ("y", "chosen", "ids", "table", "gate", "comb", "streams")),
        *((name, ctypes.c_void_p) for name in ("fn", "partial")),
        ("first_place", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("rows", "programs", "chunks", "d", "parts", "mixes", "vocab")),
        *((name, ctypes.c_int) for name in ("first_own", "own", "is_wide")),
        ("tag", ctypes.c_uint),
    )


class _Gather(ctypes.Structure):
    _fields_ = (
        ("peers", _Peers),
        *((name, ctypes.c_void_p) for name in ("share", "logits")),
        ("first_place", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("rows", "count", "blocks")),
        ("tag", ctypes.c_uint),
    )


def _peers(peers: Peers) -> _Peers:
    return _Peers(
        inbox=(ctypes.c_void_p * MAX_RANKS)(*peers.addresses),
        own=peers.inbox.data_ptr(),
        ended=peers.ended.data_ptr(),
        places=peers.inbox.shape[1],
        limit_ns=int(peers.seconds * 1e9),
        rank=peers.rank,
        size=peers.size,
    )


def _tag(number: int, rows: int) -> int:
    return rows << 16 | number + 1


def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _open(
    peers: Peers,
    number: int,
    streams: Tensor,
    fn: Tensor,
    partial: Tensor,
    overlap: bool,
    y: Tensor | None = None,
    gate: Tensor | None = None,
    comb: Tensor | None = None,
    ids: Tensor | None = None,
    table: Tensor | None = None,
    chosen: Tensor | None = None,
    own: range = range(0),
) -> None:
    rows, n, d = streams.shape
    chunks, mixes = mix_chunks(d), fn.shape[0]
    assert n == STREAMS and mixes in (n, n * (n + 2)) and fn.shape[1] == n * d, (streams.shape, fn.shape)
    assert partial.shape == (rows, chunks, MIX_WIDTH) and MIX_CHUNK * n == OPEN_THREADS, partial.shape
    assert rows <= peers.rows and d == peers.hidden, (streams.shape, peers)
    assert streams.is_contiguous() and fn.is_contiguous()
    device = streams.device
    # All blocks are resident at once: a block that waits may keep none from starting.
    programs = min(rows, max(1, OPEN_BLOCKS * _multiprocessors(device) // chunks))
    params = _Open(
        peers=_peers(peers),
        y=None if y is None else y.data_ptr(),
        chosen=None if chosen is None else chosen.data_ptr(),
        ids=None if ids is None else ids.data_ptr(),
        table=None if table is None else table.data_ptr(),
        gate=None if gate is None else gate.data_ptr(),
        comb=None if comb is None else comb.data_ptr(),
        streams=streams.data_ptr(),
        fn=fn.data_ptr(),
        partial=partial.data_ptr(),
        first_place=peers.first_place(number),
        rows=rows,
        programs=programs,
        chunks=chunks,
        d=d,
        parts=0 if y is None else y.shape[1],
        mixes=mixes,
        vocab=0 if table is None else table.shape[0],
        first_own=own.start,
        own=len(own),
        is_wide=table is not None and table.dtype == torch.float32,
        tag=_tag(number, rows),
    )
    act = "float" if streams.dtype == torch.float32 else "__nv_bfloat16"
    blocks = chunks * programs
    assert blocks <= OPEN_BLOCKS * _multiprocessors(device), f"{chunks} chunks of {d} channels"
    call(
        "exchange",
        f"open_kernel<{act}>",
        device,
        params,
        blocks=blocks,
        threads=OPEN_THREADS,
        overlap=overlap,
    )


@launcher(
    reads=("y", "chosen", "gate", "comb", "streams", "peers.inbox"),
    reads_early=("fn",),
    writes=("streams", "partial", "peers.inbox"),
)
def mix_open(
    peers: Peers,
    number: int,
    y: Tensor,
    gate: Tensor,
    comb: Tensor,
    streams: Tensor,
    fn: Tensor,
    partial: Tensor,
    chosen: Tensor | None = None,
    own: range = range(0),
    overlap: bool = True,
) -> None:
    """As mhc.mix_open, where y [T, P, D] float32 is this rank's share of the output: all ranks' are added up.

    `number`: of the exchange, in its step. `chosen` int32 [T, P - 1]: the experts whose outputs y holds, then
    something that always counts; of experts that are not among this rank's `own`, nothing is read.
    """
    rows, _, d = streams.shape
    assert y.shape[::2] == (rows, d) and y.dtype == torch.float32 and y.is_contiguous(), y.shape
    if chosen is not None:
        assert chosen.dtype == torch.int32 and chosen.is_contiguous() and len(own), own
        assert chosen.shape == (rows, y.shape[1] - 1), (chosen.shape, y.shape)
    if rows:
        _open(
            peers=peers,
            number=number,
            streams=streams,
            fn=fn,
            partial=partial,
            overlap=overlap,
            y=y,
            gate=gate,
            comb=comb,
            chosen=chosen,
            own=own,
        )


@launcher(
    reads=("ids", "table", "peers.inbox"),
    reads_early=("fn",),
    writes=("streams", "partial", "peers.inbox"),
    triggers_late=True,
)
def embed_open(
    peers: Peers,
    number: int,
    ids: Tensor,
    table: Tensor,
    streams: Tensor,
    fn: Tensor,
    partial: Tensor,
    overlap: bool = True,
) -> None:
    """As mhc.embed, then mhc.mix_open without an output: of `table` [V / ranks, D] each rank has its rows."""
    rows, _, d = streams.shape
    assert table.shape == (peers.vocab, d) and ids.shape == (rows,), (table.shape, ids.shape)
    assert table.dtype in (torch.float32, torch.bfloat16) and table.is_contiguous(), table.dtype
    if rows:
        _open(peers, number, streams, fn, partial, overlap, ids=ids, table=table)


@launcher(reads=("share", "peers.inbox"), writes=("logits", "peers.inbox"))
def gather(peers: Peers, number: int, share: Tensor, logits: Tensor, overlap: bool = True) -> None:
    """share [T, V / ranks], of each rank its own -> logits [T, V] on all of them, float32."""
    rows, count = share.shape
    assert logits.shape == (rows, peers.size * count) and count == peers.vocab, (share.shape, logits.shape)
    assert share.is_contiguous() and logits.is_contiguous() and rows <= peers.rows
    if not rows:
        return
    most = GATHER_BLOCKS * _multiprocessors(logits.device)
    blocks = min(most, -(-rows * count * (peers.size - 1) // GATHER_THREADS))
    params = _Gather(
        peers=_peers(peers),
        share=share.data_ptr(),
        logits=logits.data_ptr(),
        first_place=peers.logits_place,
        rows=rows,
        count=count,
        blocks=blocks,
        tag=_tag(number, rows),
    )
    call(
        "exchange",
        "gather_kernel",
        logits.device,
        params,
        blocks=blocks,
        threads=GATHER_THREADS,
        overlap=overlap,
    )
