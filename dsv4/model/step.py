"""One forward pass: which tokens, of which sequences, at which positions, and which cache rows they meet."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from types import ModuleType
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from dsv4.model.rope import Rope
from dsv4.ops.experts.staging import READ_IN_PLACE, Staging

# Looks at intermediate results: whose (`layers.3.attn`), which (`q`), and the tensor, not to be changed.
Tap = Callable[[str, str, Tensor], None]
P = ParamSpec("P")
T = TypeVar("T")


def once(method: "Callable[Concatenate[Step, P], T]") -> "Callable[Concatenate[Step, P], T]":
    """Compute the result when a layer first asks for it: layers of one kind ask for the same."""

    @wraps(method)
    def ask(step: "Step", *arguments: P.args, **named: P.kwargs) -> T:
        assert not named, "asked for by place"
        key = (method, *arguments)
        if key not in step.known:
            step.known[key] = method(step, *arguments, **named)
        return cast(T, step.known[key])

    return ask


Span = tuple[int, int, Sequence[int]]  # slot, start position, token ids


class Mark(NamedTuple):
    """The state of the sequence in `slot` before `position`, which the step passes, is left in slot `to`."""

    slot: int
    position: int
    to: int


# Tokens of the prompt steps that are recorded as graphs (prompt.py): up to where launching takes the host as
# long as the GPU needs.
SIZES = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 768, 896, 1024)


def prompt_sizes(chunk: int, spills: bool = False) -> list[int]:
    """Of the steps for prompts that are read in chunks of so many tokens; longer ones copy spilled experts
    ahead, which is no graph."""
    most = READ_IN_PLACE if spills else SIZES[-1]
    return [size for size in SIZES if size < 2 * chunk and size <= most]


def columns(spans: Sequence[Span], size: int, mark: Mark | None = None) -> Tensor:
    """[6, size] on the host: ids, positions, slots, first and last positions, and the marked one (0: none);
    padding has position -1."""
    # Not torch, which wakes its threads for so many numbers: that took up to 15 ms of a long step.
    out = np.zeros((6, size), dtype=np.int64)
    out[1] = -1
    row = 0
    for slot, start, tokens in spans:
        mine, row = slice(row, row + len(tokens)), row + len(tokens)
        out[0, mine] = np.frombuffer(array("q", tokens), dtype=np.int64)  # a list's fastest way
        out[1, mine] = np.arange(start, start + len(tokens))
        out[2, mine], out[3, mine], out[4, mine] = slot, start, start + len(tokens) - 1
        if mark is not None and mark.slot == slot:
            out[5, mine] = mark.position
    return torch.from_numpy(out)


def closings(spans: Sequence[Span], ratio: int) -> list[int]:
    """Tokens that complete a block of `ratio`."""
    out: list[int] = []
    row = 0
    for _, start, tokens in spans:
        out += range(row + (ratio - 1 - start) % ratio, row + len(tokens), ratio)
        row += len(tokens)
    return out


def send(values: Tensor, device: str | torch.device) -> Tensor:
    """A host tensor on the device, without waiting for what that does."""
    if torch.device(device).type != "cuda":
        return values.to(device)
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    pinned.numpy()[...] = values.numpy()  # in this thread, as above
    return pinned.to(device, non_blocking=True)


@dataclass(frozen=True)
class Step:
    """T tokens of one or more sequences; a sequence's tokens are neighbours, in order of position.

    What a layer asks about them comes from the host's integers: no answer waits for the device. In a graph
    (`lists`) it comes from the device: any sequences, padded with tokens at position -1, which touch nothing.
    """

    ids: Tensor  # [T] token ids
    positions: Tensor  # [T]
    slots: Tensor  # [T] the sequence's place in the cache
    first: Tensor  # [T] position of the sequence's first token in this step
    last: Tensor  # [T] position of its last token in this step
    longest: int  # tokens of the longest sequence, those of this step included
    spans: tuple[Span, ...] = ()
    mark: Mark | None = None
    lists: Mapping[int, Tensor] | None = None  # in a graph: `closing` by ratio, -1 beyond the last
    marked: Tensor | None = None  # [T] in a graph that can mark: the position before which the state is left
    mark_slot: int = 0  # there: where it is left
    # [T] if these are drafts: each sees all of its sequence in this step, and of the ring what lies before
    # the step, not before this position. They leave nothing in the ring.
    oldest: Tensor | None = None
    tap: Tap | None = None
    staging: Staging | None = None  # experts copied ahead to the GPU, if they are in this step
    known: dict[tuple[object, ...], object] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def build(
        cls,
        spans: Sequence[Span],
        device: str | torch.device,
        tap: Tap | None = None,
        mark: Mark | None = None,
    ) -> "Step":
        """spans: (slot, start position, token ids) per sequence."""
        assert len({slot for slot, _, tokens in spans if tokens}) == sum(bool(t) for _, _, t in spans)
        table = send(columns(spans, sum(len(tokens) for _, _, tokens in spans)), device)
        longest = max((start + len(tokens) for _, start, tokens in spans), default=0)
        ids, positions, slots, first, last, _ = table
        return cls(ids, positions, slots, first, last, longest, tuple(spans), mark, tap=tap)

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
        """[C] tokens that complete a block of `ratio`; in a graph -1 beyond the last."""
        if self.lists is not None:
            return self.lists[ratio]
        return send(torch.tensor(closings(self.spans, ratio), dtype=torch.long), self.ids.device)

    @once
    def block_rotation(self, rope: Rope, ratio: int) -> tuple[Tensor, Tensor]:
        """cos and sin at the first positions of the blocks that end now."""
        return rope((self.positions[self.closing(ratio)] + 1 - ratio).clamp(min=0))

    @once
    def entry_rows(self, ratio: int, page_entries: int, page_table: Tensor) -> Tensor:
        """[C] pool rows of the entries made of the blocks that end now, -1 for none; page_table [S, P]."""
        closing = self.closing(ratio)
        block = self.positions[closing] // ratio
        page = page_table[self.slots[closing], block // page_entries].long()
        rows = page * page_entries + block % page_entries
        return rows if self.lists is None else torch.where(closing >= 0, rows, -1)

    @once
    def visible_rows(self, index: ModuleType, ratio: int, page_entries: int, page_table: Tensor) -> Tensor:
        """[T, S] pool rows of every entry a token may attend to, -1 beyond; `index` is the op."""
        return index.visible_rows(page_table, self.slots, self.positions, ratio, page_entries)

    def choices(self, chosen: Tensor) -> Tensor:
        """Experts [T, K] that are wanted: -1, none, for padding."""
        return chosen if self.lists is None else torch.where(self._is_token(), chosen, -1)

    @once
    def _is_token(self) -> Tensor:
        return (self.positions >= 0).unsqueeze(1)

    @once
    def remaining(self, size: int) -> tuple[Tensor | None, Tensor]:
        """Tokens that remain in rings of `size` rows after this step (None: all), and their rows.

        A ring holds one row per slot and position mod size, so each row is named at most once. In a graph a
        token that does not remain has row -1. Tokens before a mark have a row in its slot too.
        """
        if self.lists is not None:
            return self._remaining_of_graph(size)
        if self.mark is None and all(len(tokens) <= size for _, _, tokens in self.spans):
            return None, self.slots * size + self.positions % size
        kept: list[tuple[int, int]] = []
        row = 0
        for slot, start, tokens in self.spans:
            ends = [(start + len(tokens), slot)]
            if self.mark is not None and self.mark.slot == slot:
                assert start < self.mark.position <= start + len(tokens), self.mark
                ends.append((self.mark.position, self.mark.to))
            for end, to in ends:
                which = range(max(start, end - size), end)
                kept += [(row + p - start, to * size + p % size) for p in which]
            row += len(tokens)
        both = send(torch.tensor(kept, dtype=torch.long).t().contiguous(), self.ids.device)
        return both[0], both[1]

    def _remaining_of_graph(self, size: int) -> tuple[Tensor | None, Tensor]:
        at = self.positions % size
        remains = (self.positions >= 0) & (self.positions > self.last - size)
        rows = torch.where(remains, self.slots * size + at, -1)
        if self.marked is None:
            return None, rows
        is_before = (self.positions >= 0) & (self.positions < self.marked)
        is_before &= self.positions >= self.marked - size
        tokens = torch.arange(len(rows), device=rows.device).repeat(2)
        return tokens, torch.cat((rows, torch.where(is_before, self.mark_slot * size + at, -1)))
