"""Decode step: what ranks share, and the gather of their logits (decode.cu). Sums are in mhc/decode.py.

An inbox holds, for each sender, two places per channel of every row, for sums in turn, then one per logit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.gpu.build import call
from dsv4.gpu.pdl import launcher
from dsv4.gpu.structs import Struct, mirror

MAX_RANKS, TURNS = 8, 2
GATHER_THREADS, GATHER_BLOCKS = 256, 2  # of a block, and blocks that a multiprocessor surely holds


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


_Peers = mirror("exchange/decode.cu", "Peers")

_Gather = mirror("exchange/decode.cu", "Gather")


def passed(peers: Peers | None) -> Struct:
    """As kernels take it; None: a rank by itself."""
    if peers is None:
        return _Peers.blank(size=1)
    return _Peers(
        inbox=peers.addresses,
        own=peers.inbox,
        ended=peers.ended,
        places=peers.inbox.shape[1],
        limit_ns=int(peers.seconds * 1e9),
        rank=peers.rank,
        size=peers.size,
    )


def tag(number: int, rows: int) -> int:
    return rows << 16 | number + 1


def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@launcher(reads=("share", "peers.inbox"), writes=("logits", "peers.inbox"))
def gather(peers: Peers, number: int, share: Tensor, logits: Tensor, overlap: bool = True) -> None:
    """share [T, V / ranks], of each rank its own -> logits [T, V] on all of them, float32."""
    rows, count = share.shape
    assert logits.shape == (rows, peers.size * count) and count == peers.vocab, (share.shape, logits.shape)
    assert share.is_contiguous() and logits.is_contiguous() and rows <= peers.rows
    if not rows:
        return
    most = GATHER_BLOCKS * multiprocessors(logits.device)
    blocks = min(most, -(-rows * count * (peers.size - 1) // GATHER_THREADS))
    params = _Gather(
        peers=passed(peers),
        share=share,
        logits=logits,
        first_place=peers.logits_place,
        rows=rows,
        count=count,
        blocks=blocks,
        tag=tag(number, rows),
    )
    call(
        "exchange/decode",
        "gather_kernel",
        logits.device,
        params,
        blocks=blocks,
        threads=GATHER_THREADS,
        overlap=overlap,
    )
