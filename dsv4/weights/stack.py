"""Stored rows of weights, seen in the buffer that they were read into."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.quant.formats import Format, QuantTensor
from dsv4.weights.batches import Part
from dsv4.weights.detect import Source
from dsv4.weights.reader import torch_type


@dataclass(frozen=True)
class Stack:
    """Rows of weights that are stored alike, one weight below the other; not copied where all columns are
    wanted. Each weight's rows begin with its row `first`. `factor`: float64, of each weight."""

    first: int
    data: Tensor  # [weights x rows, columns, or bytes of codes], as the reader types it
    scale: Tensor | None
    factor: Tensor
    format: Format | None
    columns: int

    def __len__(self) -> int:
        """Weights."""
        return len(self.factor)

    def one(self, number: int) -> "Stack":
        """A single weight of them."""

        def cut(rows: Tensor) -> Tensor:
            return rows.view(len(self), -1, rows.shape[1])[number]

        factor = self.factor[number : number + 1]
        scale = None if self.scale is None else cut(self.scale)
        return replace(self, data=cut(self.data), scale=scale, factor=factor)

    def quant(self, factor: float = 1.0) -> QuantTensor:
        assert self.format is not None
        shape = (self.data.shape[0], self.columns)
        return QuantTensor(self.format, self.data, shape, self.scale, factor)


def stack_of(
    part: Part, stored: Tensor, own: Mapping[str, Source]
) -> tuple[Stack, list[Source]] | tuple[None, None]:
    """The rows of the rank that has the sources `own`, and of which sources; None: it has nothing here."""
    numbers = [number for number, source in enumerate(part.sources) if source.param.name in own]
    if not numbers:
        return None, None
    sources = [own[part.sources[number].param.name] for number in numbers]
    source, whole, count = sources[0], part.sources[numbers[0]], len(part.sources)
    begin = source.row - whole.row
    first, stop = max(part.start, begin), min(part.stop, begin + source.param.shape[0])
    if first >= stop:
        return None, None
    every = slice(None) if len(numbers) == count else numbers
    data = _typed(stored, part.data_at, count, part.stop - part.start, part.line, source.weight.dtype)
    data = data[every, first - part.start : stop - part.start].flatten(0, 1)
    scale, factor = None, torch.ones(len(numbers), dtype=torch.float64, device=stored.device)
    if source.format is not None:
        data = _columns(data, source, source.codes_per_byte)
    if source.scale is not None:
        high = source.tile[0]
        scale = _typed(stored, part.scale_at, count, part.scale_rows, part.scale_line, source.scale.dtype)
        row = source.scale_row - whole.scale_row + (first - begin) // high - part.start // high
        scale = scale[every, row : row - (-(stop - first) // high)].flatten(0, 1)
        scale = _columns(scale, source, source.tile[1])
        if source.scale.dtype == "BF16":
            scale = scale.float()
    if source.global_scale is not None:
        factor = stored[part.global_at : part.global_at + 4 * count].view(torch.float32).double()[every]
        if source.is_reciprocal:
            factor = 1.0 / factor
    return Stack(first - begin, data, scale, factor, source.format, source.param.shape[-1]), sources


def _typed(stored: Tensor, at: int, count: int, rows: int, line: int, dtype: str) -> Tensor:
    """[weights, rows, columns]"""
    return stored[at : at + count * rows * line].view(torch_type(dtype)).view(count, rows, -1)


def _columns(stored: Tensor, source: Source, per_place: int) -> Tensor:
    """The share of a rank that has some columns, of which so many have one place."""
    first, count = source.col // per_place, -(-source.param.shape[1] // per_place)
    return stored[:, first : first + count].contiguous()
