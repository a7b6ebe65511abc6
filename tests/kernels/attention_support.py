"""Rows of a decode step before attention, and what the reference makes of them."""

import torch
from step_support import check, rand
from torch import Tensor

from dsv4.ops.attention import cpu
from dsv4.ops.index.cpu import visible_rows
from dsv4.quant.codec import encode_kv
from dsv4.quant.formats import Format

D, ROPE, WINDOW, RING, SLOTS = 512, 64, 128, 136, 3
EPS = 4.0  # queries' mean square is 9: one that is left out shows
BF16 = torch.bfloat16
SHARE = 2.0**-7  # weights rounded relative to another maximum


def blocks(heads: int) -> "Case":
    """Rows of drafts: blocks of five that see each other and what ends before them; one block is padding."""
    anchors, count = [301, 4, -1, 129], 5
    positions = [at + j if at >= 0 else -1 for at in anchors for j in range(count)]
    case = Case("listed", positions, heads, ratio=4, page=64)
    block = torch.arange(len(case.positions)) // count
    case.slots, case.ends = block % SLOTS, (torch.tensor(anchors) - 1).clamp(min=-1)[block]
    case.listed = (block.unsqueeze(1) * count + torch.arange(count)).int()
    return case


class Case:
    """Rows at these positions of a layer of one kind: window, listed (CSA) or visible (HCA)."""

    def __init__(
        self, kind: str, positions: list[int], heads: int, ratio: int, page: int, topk: int = 512
    ) -> None:
        self.kind, self.ratio, self.page = kind, ratio, page
        self.positions, count = torch.tensor(positions), len(positions)
        self.slots = torch.arange(count) % SLOTS
        pages = max(1, -(-(max(positions) + 1) // ratio // page))
        generator = torch.Generator().manual_seed(9)
        self.page_table = torch.randperm(SLOTS * pages, generator=generator).view(SLOTS, pages).int()
        self.q = rand(count, heads, D, seed=1, dtype=BF16) * 3
        self.sinks = rand(heads, seed=2) * 3
        self.ring = encode_kv(rand(SLOTS * RING, D, seed=3, dtype=BF16), ROPE, Format.KV8)
        pool = encode_kv(rand(SLOTS * pages * page, D, seed=4, dtype=BF16), ROPE, Format.KV8)
        for store in (self.ring, pool):
            assert store.scale is not None
            spread = torch.randint(0, 6, store.scale.shape, generator=generator)
            store.scale.copy_((store.scale.int() - spread).clamp(min=1).to(torch.uint8))
        self.entries = None if kind == "window" else pool
        angles = torch.outer(torch.arange(max(positions) + 1), 0.3 ** torch.arange(ROPE // 2).float())
        self.cos, self.sin = angles.cos(), angles.sin()
        self.visible = visible_rows(self.page_table, self.slots, self.positions.clamp(min=0), ratio, page)
        self.listed: Tensor | None = None
        self.ends: Tensor | None = None
        if kind == "listed":
            self.listed = torch.full((count, topk), -1, dtype=torch.int32)
            for row, places in enumerate(self.visible):
                seen = places[places >= 0]
                kept = torch.randperm(len(seen), generator=generator)[:topk].sort().values
                self.listed[row, : len(kept)] = seen[kept].int()

    def arguments(self, out: Tensor) -> dict[str, object]:
        return {
            **{"q": self.q, "ring": self.ring, "ring_rows": RING, "window": WINDOW, "entries": self.entries},
            **{"rows": self.listed, "page_table": self.page_table, "page_entries": self.page},
            **{"ratio": self.ratio if self.entries is not None else 0, "slots": self.slots},
            **{"positions": self.positions, "sinks": self.sinks, "cos": self.cos, "sin": self.sin},
            **{"eps": EPS, "out": out, "ends": self.ends},
        }

    def want(self) -> Tensor:
        """Of the rows in use."""
        live = (self.positions >= 0).nonzero().flatten()
        if self.ends is None:
            return self._want(live, self.positions[live])
        # Rows whose positions and windows differ have no place in one sequence.
        return torch.cat([self._want(row, self.ends[row]) for row in live.split(1)])

    def _want(self, rows: Tensor, ends: Tensor) -> Tensor:
        slots, positions = self.slots[rows], self.positions[rows]
        fresh = self.ring.take(slots * RING + ends % RING)
        listed = {"window": None, "visible": self.visible, "listed": self.listed}[self.kind]
        return cpu.attend(
            *(self.q[rows], fresh, self.ring, slots, ends, ends, WINDOW, RING, self.entries),
            *(None if listed is None else listed[rows].long(), self.sinks),
            *(self.cos[positions], self.sin[positions]),
            eps=EPS,
        )

    def check(self, out: Tensor, what: str) -> None:
        out, live = out.cpu().view(self.q.shape), self.positions >= 0
        check(out[live], self.want(), what, 4, SHARE)
        assert not out[~live].any(), "a row of padding is zero"
