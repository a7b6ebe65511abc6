"""Rows of a decode step before a CSA layer's choice of entries, and what the reference chooses."""

import torch
from step_support import rand
from torch import Tensor

from dsv4.ops.index import ref
from dsv4.quant.codec import decode, encode_kv
from dsv4.quant.formats import Format, empty_rows

HEADS, DI, HALF, SLOTS, RATIO, FACTOR = 64, 128, 32, 3, 4, 0.01
BF16 = torch.bfloat16


class Case:
    def __init__(self, positions: list[int], page: int, topk: int, capacity: int, seed: int = 0) -> None:
        count, self.page, self.topk, self.capacity = len(positions), page, topk, capacity
        self.positions = torch.tensor(positions)
        self.slots = torch.arange(count) % SLOTS
        pages = max(1, -(-(max(positions) + 1) // RATIO // page))
        generator = torch.Generator().manual_seed(seed)
        self.page_table = torch.randperm(SLOTS * pages, generator=generator).view(SLOTS, pages).int()
        self.iq = rand(count, HEADS, DI, seed=seed + 1, dtype=BF16) * 3
        self.weights = rand(count, HEADS, seed=seed + 2, dtype=BF16)
        self.keys = encode_kv(rand(SLOTS * pages * page, DI, seed=seed + 3), 0, Format.MXFP4)
        self.entries = empty_rows(Format.KV8, SLOTS * pages * page, 512, 64)
        angles = torch.outer(torch.arange(max(positions) + 1), 0.3 ** torch.arange(HALF).float())
        self.cos, self.sin = angles.cos(), angles.sin()

    def arguments(self, out: Tensor) -> dict[str, object]:
        return {
            **{"iq": self.iq, "weights": self.weights, "keys": self.keys, "entries": self.entries},
            **{"page_table": self.page_table, "slots": self.slots, "positions": self.positions},
            **{"cos": self.cos, "sin": self.sin, "capacity": self.capacity, "ratio": RATIO},
            **{"page_entries": self.page, "factor": FACTOR, "out": out},
        }

    def blank(self) -> Tensor:
        return torch.full((len(self.iq), self.topk), -7, dtype=torch.int32)

    def check(self, out: Tensor) -> None:
        """As many as there can be, in order, none twice; and none left out that scores clearly better than
        the worst one taken: sums run in another order."""
        out = out.cpu().long()
        at = self.positions.clamp(min=0)
        q = ref.queries(self.iq, self.cos[at], self.sin[at], True).double()
        for row, position in enumerate(self.positions.tolist()):
            count = (position + 1) // RATIO
            rows = ref.pool_rows(self.page_table, int(self.slots[row]), count, self.page)
            taken = out[row][: min(count, self.topk)]
            assert bool((out[row][len(taken) :] == -1).all()), f"row {row}: more than it sees"
            number = {int(place): entry for entry, place in enumerate(rows)}
            chosen = [number.get(place, -1) for place in taken.tolist()]
            assert -1 not in chosen and chosen == sorted(set(chosen)), f"row {row}: {chosen}"
            if count <= self.topk:
                continue
            dots = (q[row] @ decode(self.keys.take(rows)).double().t()).relu()
            scores = (dots * self.weights[row].double().unsqueeze(1) * FACTOR).sum(0)
            is_chosen = torch.zeros(count, dtype=torch.bool)
            is_chosen[chosen] = True
            slack = 1e-6 * float((dots.abs().max() * self.weights[row].abs().max()) * FACTOR * HEADS)
            assert float(scores[~is_chosen].max()) <= float(scores[is_chosen].min()) + slack, f"row {row}"
