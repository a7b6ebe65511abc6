"""A short prompt step on a GPU: Model.forward over a fixed number of tokens, recorded as one graph.

The tokens of any sequences, at any positions, are put into fixed inputs; the rest is padding, at position -1.
What a kernel does ends with what its tokens see, so that one graph serves every context.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4.cache.store import Cache
from dsv4.model.model import Model
from dsv4.model.step import Mark, Span, Step, closings, columns, send

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

MAX_SEQUENCES = 16  # of a step: their blocks that close need places


def never_waits(model: Model) -> bool:
    """Whether no layer asks host or other ranks anything, as a graph cannot: some products ask how many
    tokens each expert has."""
    if model.mesh.size > 1 or set(model.ops.names().values()) != {"gpu"}:
        return False
    return all(
        model.ops.experts.never_waits(model.numerics.dtype, bank, activations)
        for moe in (block.moe for block in model.blocks)
        for bank, activations in ((moe.experts, moe.activations), (moe.shared, moe.shared_activations))
    )


class Prompt:
    """The step for up to `size` tokens of up to MAX_SEQUENCES sequences.

    `out` [size or more, N, D]: where steps of all sizes leave their streams; without it, in new memory.
    """

    def __init__(self, model: Model, cache: Cache, size: int, out: Tensor | None = None) -> None:
        self.model, self.cache, self.size, self.out = model, cache, size, out
        ratios = sorted({layer.ratio for layer in model.config.layers if layer.ratio})
        # A sequence of n tokens closes at most n // ratio + 1 blocks.
        self.places = {ratio: size // ratio + MAX_SEQUENCES for ratio in ratios}
        self.inputs = self._packed(()).to(cache.page_table.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.streams: Tensor | None = None  # [T, N, D], what the graph leaves

    def fits(self, spans: Sequence[Span]) -> bool:
        return len(spans) <= MAX_SEQUENCES and sum(len(ids) for _, _, ids in spans) <= self.size

    def _packed(self, spans: Sequence[Span], mark: Mark | None = None) -> Tensor:
        """What the host loads, in one copy: the tokens' columns, and the blocks that close."""
        parts = [columns(spans, self.size, mark).flatten()]
        for ratio, places in self.places.items():
            part = torch.full((places,), -1, dtype=torch.long)
            closing = closings(spans, ratio)
            part[: len(closing)] = torch.tensor(closing, dtype=torch.long)
            parts.append(part)
        return torch.cat(parts)

    def _step(self) -> Step:
        table, *lists = self.inputs.split([6 * self.size, *self.places.values()])
        ids, positions, slots, first, last, marked = table.view(6, self.size)
        layout = self.cache.layout
        return Step(
            ids=ids,
            positions=positions,
            slots=slots,
            first=first,
            last=last,
            longest=layout.max_context,
            lists=dict(zip(self.places, lists, strict=True)),
            marked=marked if layout.num_states > layout.num_slots else None,
            mark_slot=layout.num_slots,
        )

    def load(self, spans: Sequence[Span], mark: Mark | None = None) -> None:
        assert self.fits(spans), f"{len(spans)} sequences in a step of {self.size} tokens"
        self.inputs.copy_(send(self._packed(spans, mark), self.inputs.device))

    def run(self) -> None:
        """Launch by launch."""
        self.streams = self.model.read(self._step(), self.cache)
        if self.out is not None:
            self.streams = self.out[: self.size].copy_(self.streams)

    def capture(self, pool: "_POOL_HANDLE") -> None:
        """Record the launches, when each has run once, in memory that steps of other sizes use too."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.run()
        self.graph = graph

    def __call__(self, spans: Sequence[Span], mark: Mark | None = None) -> Tensor:
        """streams [T, N, D] of the tokens, valid until the next step of any size."""
        self.load(spans, mark)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.run()
        assert self.streams is not None
        return self.streams[: sum(len(ids) for _, _, ids in spans)]
