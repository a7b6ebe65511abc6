"""A round of speculation as launches: tokens and drafts of each sequence verified as rows of one step, what
is accepted, and the next drafts. All of it lies on the device, so the next round may follow at once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.cache.store import Cache
from dsv4.gpu.pdl import Launch, check, tensors_of
from dsv4.gpu.tiles import Tiled
from dsv4.model.bundle import Bundle
from dsv4.model.model import Model
from dsv4.ops.draft import round as rounds
from dsv4.step.draft import Draft
from dsv4.step.run import Decoder

PARTS = ("verify", "sample", "draft")


class Round:
    """For `seats` sequences, each with its token and up to `drafts` drafts. Without a draft to verify it is a
    decode step that also makes the drafter's context, and the first drafts if `drafts` is above 0."""

    def __init__(
        self,
        b: Bundle,
        model: Model,
        cache: Cache,
        seats: int,
        drafts: int,
        state: Tensor,
        costs: Tensor,
        penalties: Tensor | None = None,
        counts: Tensor | None = None,
        overlap: bool = True,
        head: Tiled | None = None,
    ) -> None:
        """`state`: what the device knows of each slot (ops/draft/round.py), for all rounds of an engine.
        `costs` [drafts + 1]: relative times of this round by how many drafts each sequence verifies. `head`:
        what drafts are made with instead of the trunk's. Others: as Decoder has them."""
        device, rows = cache.page_table.device, seats * (drafts + 1)
        self.num_seats, self.num_drafts, self.state, self.costs = seats, drafts, state, costs
        self.seats = torch.zeros(seats, rounds.SEAT, dtype=torch.long, device=device)
        self.seats[:, rounds.SLOT] = -1
        self.verified = torch.full((seats,), -1, dtype=torch.long, device=device)
        self.taken = torch.zeros(seats, 2, dtype=torch.int32, device=device)
        self.decoder = decoder = Decoder(
            b=b,
            model=model,
            cache=cache,
            rows=rows,
            penalties=penalties,
            overlap=overlap,
            counts=counts,
            taps=True,
            goes_on=False,
        )
        names, f = decoder.names, decoder.buffers
        held = {"seats": self.seats, "verified": self.verified, "taken": self.taken, "state": state}
        for name, tensor in {**held, "costs": costs}.items():
            names.add(f"round.{name}", tensor)
        own = names.of(tensors_of([*held.values(), costs, penalties]), "round")
        self.draft = Draft(b, model, cache, seats if drafts else 0, f, names, overlap, head, drafts or None)
        d = self.draft.drafter
        opens = {
            **{"seats": self.seats, "state": state, "ids": f.ids, "positions": f.positions, "slots": f.slots},
            **{"settings": f.settings, "verified": self.verified, "penalties": penalties},
        }
        accepts = {
            **{"seats": self.seats, "state": state, "out": f.out, "verified": self.verified},
            **{"taken": self.taken, "committed": d.committed},
        }
        if drafts:
            accepts |= {"anchors": d.anchors, "anchors_at": d.anchors_at, "anchors_slots": d.anchors_slots}
            accepts |= {"settings": d.settings}
        keeps = {
            **{"drafts": d.drafts, "confidence": d.confidence, "anchors_at": d.anchors_at},
            **{"anchors_slots": d.anchors_slots, "costs": costs, "state": state},
        }
        add = self.draft.add
        ends = [add("accept", rounds.accept, **accepts), *self.draft.commit]
        if drafts:
            ends += [*self.draft.block, add("keep drafts", rounds.keep, **keeps)]
        *verify, sample = decoder.launches
        self.launches: dict[str, list[Launch]] = {
            "verify": [add("open round", rounds.open_round, **opens), *verify],
            "sample": [sample],
            "draft": ends,
        }
        check(self.list(PARTS), between={*decoder.between, *self.draft.between, *own})
        self.graphs: dict[tuple[str, ...], torch.cuda.CUDAGraph] = {}

    def list(self, parts: Sequence[str]) -> list[Launch]:
        return [launch for part in parts for launch in self.launches[part]]

    def run(self, parts: Sequence[str] = PARTS) -> None:
        """Launch by launch."""
        for launch in self.list(parts):
            launch.run()

    def capture(self) -> None:
        """Record the launches, when each has run once: all together, and those up to what a grammar's mask is
        awaited for and after it."""
        for parts in (PARTS, PARTS[:1], PARTS[1:]):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.run(parts)
            self.graphs[tuple(parts)] = graph

    def step(self, parts: Sequence[str] = PARTS) -> None:
        if self.graphs:
            self.graphs[tuple(parts)].replay()
        else:
            self.run(parts)
