"""The device tensors of one forward pass: which tokens, of which sequences, at which positions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")
# Looks at intermediate results: whose (`layers.3.attn`), which (`q`), and the tensor, not to be changed.
Tap = Callable[[str, str, Tensor], None]


@dataclass(frozen=True)
class Step:
    """T tokens of one or more sequences; a sequence's tokens are neighbours, in order of position."""

    ids: Tensor  # [T] token ids
    positions: Tensor  # [T]
    slots: Tensor  # [T] the sequence's place in the cache
    first: Tensor  # [T] position of the sequence's first token in this step
    last: Tensor  # [T] position of its last token in this step
    longest: int  # tokens of the longest sequence, those of this step included
    tap: Tap | None = None
    results: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def build(
        cls, spans: list[tuple[int, int, list[int]]], device: str | torch.device, tap: Tap | None = None
    ) -> "Step":
        """spans: (slot, start position, token ids) per sequence."""
        rows: list[tuple[int, int, int, int, int]] = []
        for slot, start, tokens in spans:
            end = start + len(tokens) - 1
            rows += [(id, start + i, slot, start, end) for i, id in enumerate(tokens)]
        assert len({slot for slot, _, tokens in spans if tokens}) == sum(bool(t) for _, _, t in spans)
        columns = torch.tensor(rows, dtype=torch.long, device=device).reshape(-1, 5).t().contiguous()
        ids, positions, slots, first, last = columns
        longest = max((start + len(tokens) for _, start, tokens in spans), default=0)
        return cls(ids, positions, slots, first, last, longest, tap)

    def see(self, name: str, part: str, value: Tensor) -> None:
        """Show an intermediate result to whoever looks; almost always nobody does."""
        if self.tap is not None:
            self.tap(name, part, value)

    def once(self, function: Callable[..., R], *arguments: Any) -> R:
        """function(*arguments), computed by the first layer that asks: layers of one kind ask for the same.

        Tensors among the arguments are told apart by identity, so they must be those of the step or cache.
        """
        key = (function, *arguments)
        if key not in self.results:
            self.results[key] = function(*arguments)
        return self.results[key]

    def closing(self, ratio: int) -> Tensor:
        """Tokens that complete a block of `ratio`."""
        return self.once(_closing, self.positions, ratio)

    def block_starts(self, ratio: int) -> Tensor:
        """Positions of the first tokens of the blocks that `closing` tokens complete."""
        return self.once(_block_starts, self.positions, self.closing(ratio), ratio)

    def remaining(self, size: int) -> tuple[Tensor | None, Tensor]:
        """Tokens that remain in rings of `size` rows after this step (None: all), and their rows.

        A ring holds one row per slot and position mod size, so each row is named at most once.
        """
        return self.once(_remaining, self.slots, self.positions, self.last, size)


def _closing(positions: Tensor, ratio: int) -> Tensor:
    return ((positions + 1) % ratio == 0).nonzero().squeeze(1)


def _block_starts(positions: Tensor, closing: Tensor, ratio: int) -> Tensor:
    return positions[closing] + 1 - ratio


def _remaining(slots: Tensor, positions: Tensor, last: Tensor, size: int) -> tuple[Tensor | None, Tensor]:
    rows = slots * size + positions % size
    tokens = (positions > last - size).nonzero().squeeze(1)
    return (None, rows) if len(tokens) == len(rows) else (tokens, rows[tokens])
