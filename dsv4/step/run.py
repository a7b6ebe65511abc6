"""Runs a decode step: as a CUDA graph, launch by launch, or in torch by what each launch means."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.store import Cache
from dsv4.gpu.meaning import Difference, compute, run_and_check
from dsv4.gpu.pdl import Launch
from dsv4.model.bundle import Bundle
from dsv4.model.model import Model
from dsv4.ops.exchange.decode import Peers
from dsv4.step.buffers import Buffers
from dsv4.step.launches import Launches

Send = Callable[[Tensor], Tensor]  # a host tensor to the device, without waiting


@dataclass(frozen=True)
class Mismatch:
    """A launch whose kernel and meaning differ."""

    number: int
    launch: Launch
    difference: Difference

    def __str__(self) -> str:
        layer = f" of {self.launch.layer}" if self.launch.layer else ""
        return f"launch {self.number}, {self.launch.name!r}{layer}: {self.difference}"


@torch.inference_mode()
def check(launches: Sequence[Launch]) -> Iterator[tuple[Launch, Mismatch | None]]:
    """Run them one by one, each held against its meaning on the same inputs."""
    for number, launch in enumerate(launches):
        assert launch.claims is not None, f"{launch.name} has no meaning"
        found = run_and_check(launch.run, launch.claims())
        yield launch, Mismatch(number, launch, found[0]) if found else None


class Decoder:
    """One step for a fixed number of rows: its buffers, its launches, and three ways to run them."""

    def __init__(
        self,
        b: Bundle,
        model: Model,
        cache: Cache,
        rows: int,
        latest: Tensor | None = None,
        penalties: Tensor | None = None,
        overlap: bool = True,
        counts: Tensor | None = None,
        peers: Peers | None = None,
        sums: bool = True,
        taps: bool = False,
        goes_on: bool = True,
    ) -> None:
        """`latest` [slots]: where the last choice of every slot is kept, for all decoders of an engine.
        `penalties` [slots, HISTORY + max_context]: of every slot, likewise.
        `counts` int32 [layers, experts]: grow by every expert that a row chooses, likewise.
        `overlap`: launches with PDL, checked to give what serial ones give.
        `peers`: the other ranks, where there are some; all decoders of an engine share them.
        `sums`: False leaves the all-reduces of a rank out, to time the rest; its logits mean nothing.
        `taps`: the step leaves what DSpark sees of it.
        `goes_on`: a row's choice is its next input; False: whoever accepts it says so (round.py)."""
        size = 1 if peers is None else peers.size
        assert size == (b.mesh.size if sums else 1), f"{b.mesh.name}, {peers}"
        self.bundle, self.model, self.cache = b, model, cache
        self.peers, self.latest = peers, latest
        self.buffers = Buffers(
            c=b.config,
            rows=rows,
            max_context=cache.layout.max_context,
            dtype=b.numerics.dtype,
            device=cache.page_table.device,
            activations=b.numerics.activations,
            ranks=b.mesh.size,
            whole_experts=b.mesh.whole_experts,
            taps=taps,
        )
        built = Launches(
            b=b,
            model=model,
            cache=cache,
            buffers=self.buffers,
            latest=latest,
            penalties=penalties,
            counts=counts,
            peers=peers,
            overlap=overlap,
            sums=sums,
            goes_on=goes_on,
        )
        self.launches, self.names, self.between = built.list, built.names, built.between
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}  # with and without the choice of tokens

    def load(
        self, tokens: list[tuple[int, int, int]], settings: Tensor, send: Send, take_latest: bool = False
    ) -> None:
        """(slot, position, id) of each row in use, and its settings [R, WIDTH]; the other rows are padding.

        With `take_latest`, a row with a negative id takes the last choice of its slot.
        """
        f = self.buffers
        staged = torch.zeros(f.inputs.shape, dtype=torch.long)
        staged[1] = -1
        if tokens:
            slots, positions, ids = torch.tensor(tokens).t()
            staged[:3, : len(tokens)] = torch.stack((ids, positions, slots))
            staged[3:].view(f.settings.shape)[: len(tokens)] = settings
        f.inputs.copy_(send(staged))
        if take_latest:
            assert self.latest is not None
            f.ids.copy_(torch.where(f.ids < 0, self.latest[f.slots], f.ids))

    def run(self, samples: bool = True) -> None:
        """The launches, one by one."""
        for launch in self.launches if samples else self.launches[:-1]:
            launch.run()

    def sample(self) -> None:
        """The next token of every row, from its logits: it is the next input; positions move on."""
        self.launches[-1].run()

    def capture(self) -> None:
        """Record the launches as graphs, when each has run once."""
        for samples in (True, False):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.run(samples)
            self.graphs[samples] = graph

    def step(self, samples: bool = True) -> None:
        """One token of every row in use: logits and, if it `samples`, the next token."""
        if self.graphs:
            self.graphs[samples].replay()
        else:
            self.run(samples)

    @torch.inference_mode()
    def run_reference(self) -> None:
        """The step in torch, without any kernel. Not for several ranks: what they exchange has no meaning."""
        for launch in self.launches:
            assert launch.claims is not None, f"{launch.name} has no meaning"
            compute(launch.claims())
