"""Whole decode steps of the GPU's path on a CPU: Triton's kernels interpreted, CUDA's as their twins, one
launch after the other. Several ranks take turns, but for what they exchange: there all run at once."""

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.cache.store import Cache
from dsv4.config import Activations
from dsv4.kernels.common import architectures, quantize
from dsv4.kernels.decode import attention, choose, exchange, index, matvec, mhc, sample
from dsv4.kernels.decode.exchange import Peers, inbox_places
from dsv4.lab.bench.decode import Wanted, fill
from dsv4.lab.bench.echo import Echo
from dsv4.model.bundle import Bundle, Numerics
from dsv4.model.decode import Decoder
from dsv4.model.model import Model
from dsv4.model.step import Step
from dsv4.ops import IMPLEMENTATIONS, Ops
from dsv4.parallel.mesh import Mesh
from dsv4.weights.load import Checkpoint
from dsv4.weights.tiled import load_tiled
from tests.support.twin import of_source

MULTIPROCESSORS = 4  # so that a launch has few blocks
CUDA = (mhc, choose, matvec, sample, attention, index, exchange, quantize)


class _Everything(ctypes.Structure):
    """Of memory: whatever a copy reads is there."""

    _fields_ = (("at", ctypes.c_void_p), ("bytes", ctypes.c_int64))


@dataclass
class Launches:
    """In the place of `build.call`. `ranks` that exchange wait until each has come."""

    folder: Path
    ranks: int = 1
    seed: int = 0
    counts: dict[str, int] = field(default_factory=dict)  # of each source
    waiting: list[Any] = field(default_factory=list)

    def __call__(
        self,
        source: str,
        kernel: str,
        device: torch.device,
        given: ctypes.Structure,
        blocks: int,
        threads: int,
        shared: int = 0,
        cluster: int = 1,
        overlap: bool = True,
    ) -> None:
        self.counts[source] = self.counts.get(source, 0) + 1
        self.seed += 1
        twin = of_source(source, self.folder)
        at, kinds = ctypes.byref(given), re.findall(r"\w+", kernel.partition("<")[2])
        match source:
            case "open" | "exchange":
                self.waiting.append(given)
                if len(self.waiting) < (self.ranks if source == "exchange" or kinds[-1] == "true" else 1):
                    return
                all_given = (ctypes.c_void_p * len(self.waiting))(*map(ctypes.addressof, self.waiting))
                said = self._run(twin.launched, kernel.encode(), len(all_given), all_given, blocks)
                self.waiting.clear()
            case "mix":
                said = self._run(twin.launch, at, kinds[0] == "float", blocks)
            case "route":
                said = self._run(twin.launch, at)
            case "choose":
                warps = int(kinds[0]) if "few" in kernel else 0
                rows = [self._run(twin.launch, at, row, warps, shared) for row in range(blocks // cluster)]
                said = next(filter(None, rows), "")
            case "index":
                said = self._run(getattr(twin, kernel.removesuffix("_kernel")), at, blocks)
            case "attention":
                said = self._run(twin.attend, blocks // cluster >> given.group_bits, at)
            case "sample":
                said = self._run(twin.launch, at, blocks, shared)
            case "quantize":
                wanted = ("PLAIN", "NORM", "SWIGLU").index(kinds[2])
                said = self._run(twin.launch, at, blocks, threads, int(kinds[0]), kinds[1] == "true", wanted)
            case "matvec":
                readable = _Everything(None, 1 << 62)
                of = (blocks, threads, shared, None, 0, ctypes.byref(readable), 1)
                said = self._run(twin.launch, at, *(kind == "true" for kind in kinds), *of)
        assert not said, f"{kernel}: {said}"

    def _run(self, function: Any, *arguments: Any) -> str:
        function.restype = ctypes.c_char_p
        return function(*arguments, self.seed).decode()


@contextmanager
def emulated(launches: Launches) -> Iterator[None]:
    """Inside, CPU tensors are a Hopper GPU's."""
    with pytest.MonkeyPatch.context() as patch:
        properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(architectures, "capability", lambda device: 90)
        for module in CUDA:
            patch.setattr(module, "call", launches)
        serves = lambda iq: iq.dtype == torch.bfloat16 and iq.shape[1:] == (64, 128)  # noqa: E731
        patch.setattr(index, "serves", serves)
        yield


def _peers(c: Any, ranks: int, rows: int) -> list[Peers | None]:
    if ranks == 1:
        return [None]
    vocab = c.vocab_size // ranks
    places = inbox_places(rows, c.hidden_size, vocab)
    inboxes = [torch.zeros(ranks, places, dtype=torch.int64) for _ in range(ranks)]
    return [
        Peers(
            rank=rank,
            rows=rows,
            hidden=c.hidden_size,
            vocab=vocab,
            inbox=inboxes[rank],
            addresses=tuple(inbox[rank].data_ptr() for inbox in inboxes),
            ended=torch.zeros(1, dtype=torch.int32),
            seconds=20.0,
        )
        for rank in range(ranks)
    ]


class Decoders:
    """A model's decoder on every rank, each with its own cache, filled alike; and the reference's."""

    def __init__(
        self,
        path: Path,
        launches: Launches,
        rows: int,
        position: int,
        dtype: torch.dtype = torch.float32,
        activations: Activations = "a16",
        whole_experts: bool = False,
        slots: int | None = None,
    ) -> None:
        """`slots` of the cache, of which the first have a row each; None: as many as there are rows."""
        self.launches, ranks = launches, launches.ranks
        numerics = Numerics(dtype, activations, True)
        checkpoint = Checkpoint.open(path)
        c = checkpoint.config
        stored = replace(Wanted(position, slots or rows).layout(c), rope_itemsize=dtype.itemsize)

        def cache() -> Cache:
            made = Cache(stored, "cpu", dtype)
            fill(made)
            return made

        bundle = Bundle(c, checkpoint.load(False, "cpu"), Ops.choose("cpu"), numerics)
        self.model, self.cache = Model(bundle, stored.max_context, "cpu"), cache()
        self.ranks = []
        ops = Ops.choose("cuda", **dict.fromkeys(IMPLEMENTATIONS, "gpu"))
        with emulated(launches):
            for rank, peers in enumerate(_peers(c, ranks, rows)):
                share = Checkpoint.open(path).shard(rank, ranks, whole_experts)
                mesh = Mesh() if ranks == 1 else Mesh(rank, ranks, Echo(ranks), whole_experts)
                own = Bundle(c, load_tiled(share, "cpu"), ops, numerics, mesh)
                model = Model(own, stored.max_context, "cpu")
                self.ranks.append(Decoder(own, model, cache(), rows, peers=peers))
        ids = torch.arange(7, 7 + rows)
        self.tokens = [(row, position, [int(ids[row])]) for row in range(rows)]
        for decoder in self.ranks:
            f = decoder.buffers
            f.ids.copy_(ids)
            f.slots.copy_(torch.arange(rows))
            f.positions.fill_(position)

    @torch.inference_mode()
    def step(self) -> Tensor:
        """[ranks, rows, V]: each launch on every rank, then the next one."""
        with emulated(self.launches):
            for launches in zip(*(decoder.launches for decoder in self.ranks), strict=True):
                for launch in launches:
                    launch.run()
        assert not self.launches.waiting
        return torch.stack([decoder.buffers.logits for decoder in self.ranks])

    def reference(self) -> Tensor:
        """[rows, V] of the same step."""
        return self.model.logits(self.model.forward(Step.build(self.tokens, "cpu"), self.cache))
