"""The device tensors of one forward pass: which tokens, of which sequences, at which positions."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

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
    tap: Tap | None = None

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
        table = torch.tensor(rows, dtype=torch.long, device=device).reshape(-1, 5)
        ids, positions, slots, first, last = table.unbind(1)
        return cls(ids, positions, slots, first, last, tap)

    def see(self, name: str, part: str, value: Tensor) -> None:
        """Show an intermediate result to whoever looks; almost always nobody does."""
        if self.tap is not None:
            self.tap(name, part, value)

    def closing(self, ratio: int) -> Tensor:
        """Tokens that complete a block of `ratio`."""
        return ((self.positions + 1) % ratio == 0).nonzero().squeeze(1)

    def survivors(self, size: int) -> Tensor:
        """Tokens that remain in a ring of `size` positions after this step (each ring row at most once)."""
        return (self.positions > self.last - size).nonzero().squeeze(1)
