"""Whole decode steps of two ranks as streams of one process, by width and with whole experts: near those of
one rank, the same bits on both, and for every batch."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from bench.echo import Echo
from dsv4.cache.layout import CacheLayout
from dsv4.cache.store import Cache
from dsv4.gpu import build
from dsv4.lab.bench.decode import fill
from dsv4.model.bundle import Bundle, Numerics
from dsv4.model.model import Model
from dsv4.ops import IMPLEMENTATIONS, Ops
from dsv4.ops.exchange.decode import Peers, inbox_places
from dsv4.parallel.inbox import GONE
from dsv4.parallel.mesh import Mesh
from dsv4.quant.formats import Format
from dsv4.step.run import Decoder
from dsv4.weights.load import Checkpoint
from dsv4.weights.tiled import load_tiled
from tests.parallel.test_shards import WIDE
from tests.support.checkpoints import write_model

pytestmark = pytest.mark.gpu
SMALL = replace(WIDE, num_streams=4, hidden_size=256, num_experts=6)
STEPS, POSITION, CAPACITY, SLOTS = 6, 300, 512, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build.load_all(torch.device("cuda"))  # loading a kernel waits for those that run
    return write_model(tmp_path_factory.mktemp("ranks") / "small", "modelopt", SMALL)


def tokens(rows: int) -> Tensor:
    """[STEPS, rows]; a row's do not depend on how many there are."""
    row, step = torch.arange(rows), torch.arange(STEPS).unsqueeze(1)
    return (31 * row + 7 * step + 5) % SMALL.vocab_size


class World:
    """The decoders of all ranks, each with its weights, cache, inbox and stream."""

    def __init__(self, folder: Path, dtype: torch.dtype, rows: int, size: int, whole: bool) -> None:
        self.rows = rows
        share = SMALL.vocab_size // size
        places = inbox_places(rows, SMALL.hidden_size, share)
        inboxes = [torch.zeros(size, places, dtype=torch.int64, device="cuda") for _ in range(size)]
        ops = Ops.choose("cuda", **dict.fromkeys(IMPLEMENTATIONS, "gpu"))
        layout = CacheLayout(SMALL, Format.KV8, Format.MXFP4, dtype.itemsize, CAPACITY, SLOTS, 0)
        self.decoders, self.streams = [], []
        for rank in range(size):
            weights = load_tiled(Checkpoint.open(folder).shard(rank, size, whole), "cuda")
            mesh = Mesh() if size == 1 else Mesh(rank, size, Echo(size), whole)
            bundle = Bundle(SMALL, weights, ops, Numerics(dtype, "a16", True), mesh)
            cache = Cache(layout, "cuda", dtype)
            fill(cache)
            peers = None
            if size > 1:
                peers = Peers(
                    rank=rank,
                    rows=rows,
                    hidden=SMALL.hidden_size,
                    vocab=share,
                    inbox=inboxes[rank],
                    addresses=tuple(inbox[rank].data_ptr() for inbox in inboxes),
                    ended=torch.zeros(1, dtype=torch.int32, pin_memory=True),
                    seconds=20.0,
                )
                peers.ended.fill_(GONE)
            model = Model(bundle, CAPACITY, "cuda")
            # Both ranks' blocks must find room on the one GPU, so their launches do not overlap.
            decoder = Decoder(bundle, model, cache, rows, overlap=False, peers=peers)
            # Compiles. Nobody answers, so every sum is NaN, and what later steps do not write stays so.
            decoder.run()
            self.decoders.append(decoder)
            self.streams.append(torch.cuda.Stream())
        torch.cuda.synchronize()
        for decoder in self.decoders:
            if decoder.peers is not None:
                decoder.peers.ended.zero_()
        for inbox in inboxes:
            inbox.zero_()

    def logits(self) -> list[Tensor]:
        """Of each rank, [STEPS, rows, vocabulary]."""
        out = [torch.empty(STEPS, self.rows, SMALL.vocab_size) for _ in self.decoders]
        for step, ids in enumerate(tokens(self.rows)):
            for decoder in self.decoders:
                f = decoder.buffers
                f.ids.copy_(ids)
                f.slots.copy_(torch.arange(self.rows))
                f.positions.fill_(POSITION + step)
            torch.cuda.synchronize()
            for decoder, stream in zip(reversed(self.decoders), reversed(self.streams), strict=True):
                with torch.cuda.stream(stream):
                    decoder.run()
            torch.cuda.synchronize()
            for found, decoder in zip(out, self.decoders, strict=True):
                found[step] = decoder.buffers.logits.cpu()
                assert decoder.peers is None or not int(decoder.peers.ended), "a rank waited in vain"
        return out


@pytest.mark.parametrize("whole", [False, True], ids=["width", "whole experts"])
@torch.inference_mode()
def test_near_one_rank(folder: Path, whole: bool) -> None:
    """In float32: the sums have another order, and nothing else differs."""
    (want,) = World(folder, torch.float32, rows=3, size=1, whole=False).logits()
    first, second = World(folder, torch.float32, rows=3, size=2, whole=whole).logits()
    assert torch.equal(first, second), "ranks differ"
    error = float(((first - want).norm(dim=2) / want.norm(dim=2)).max())
    print(f"{error:.1e}")
    assert error < 2e-3


@pytest.mark.parametrize("whole", [False, True], ids=["width", "whole experts"])
@torch.inference_mode()
def test_every_batch(folder: Path, whole: bool) -> None:
    """In BF16, where a single row has kernels of its own: its bits are those it has among others."""
    alone = World(folder, torch.bfloat16, rows=1, size=2, whole=whole).logits()
    among = World(folder, torch.bfloat16, rows=4, size=2, whole=whole).logits()
    assert torch.equal(alone[0], alone[1]) and torch.equal(among[0], among[1]), "ranks differ"
    assert bool(among[0].isfinite().all()) and torch.equal(alone[0], among[0][:, :1])
