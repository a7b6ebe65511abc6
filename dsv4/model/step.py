"""One forward pass: which tokens, of which sequences, at which positions, and which cache rows they meet."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from dsv4.model.rope import Rope

# Looks at intermediate results: whose (`layers.3.attn`), which (`q`), and the tensor, not to be changed.
Tap = Callable[[str, str, Tensor], None]
Method = TypeVar("Method", bound=Callable[..., Any])


def once(method: Method) -> Method:
    """Compute the result when a layer first asks for it: layers of one kind ask for the same."""

    @wraps(method)
    def ask(step: "Step", *arguments: Any) -> Any:
        key = (method, *arguments)
        if key not in step.known:
            step.known[key] = method(step, *arguments)
        return step.known[key]

    return ask  # type: ignore[return-value]


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
    known: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False, repr=False)

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

    @once
    def rotation(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """cos and sin at the tokens' positions."""
        return rope(self.positions)

    @once
    def phase(self, ratio: int) -> Tensor:
        """[T] each token's place in its block of `ratio`."""
        return self.positions % ratio

    @once
    def closing(self, ratio: int) -> Tensor:
        """[C] tokens that complete a block of `ratio`."""
        return ((self.positions + 1) % ratio == 0).nonzero().squeeze(1)

    @once
    def block_rotation(self, rope: Rope, ratio: int) -> tuple[Tensor, Tensor]:
        """cos and sin at the first positions of the blocks that end now."""
        return rope(self.positions[self.closing(ratio)] + 1 - ratio)

    @once
    def entry_rows(self, ratio: int, page_entries: int, page_table: Tensor) -> Tensor:
        """[C] pool rows of the entries made of the blocks that end now; page_table [S, P]."""
        closing = self.closing(ratio)
        block = self.positions[closing] // ratio
        page = page_table[self.slots[closing], block // page_entries].long()
        return page * page_entries + block % page_entries

    @once
    def visible_rows(self, index: ModuleType, ratio: int, page_entries: int, page_table: Tensor) -> Tensor:
        """[T, S] pool rows of every entry a token may attend to, -1 beyond; `index` is the op."""
        return index.visible_rows(page_table, self.slots, self.positions, ratio, page_entries)

    @once
    def remaining(self, size: int) -> tuple[Tensor | None, Tensor]:
        """Tokens that remain in rings of `size` rows after this step (None: all), and their rows.

        A ring holds one row per slot and position mod size, so each row is named at most once.
        """
        rows = self.slots * size + self.positions % size
        tokens = (self.positions > self.last - size).nonzero().squeeze(1)
        return (None, rows) if len(tokens) == len(rows) else (tokens, rows[tokens])
