"""Stored rows of weights, seen in the buffer that they were read into."""

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


def stack_of(part: Part, stored: Tensor) -> Stack:
    source, count = part.sources[0], len(part.sources)
    rows = count * (part.stop - part.start)
    data = _typed(stored, part.data_at, rows, part.line, source.weight.dtype)
    scale, factor = None, torch.ones(count, dtype=torch.float64, device=stored.device)
    if source.format is not None:
        data = _columns(data, source, source.codes_per_byte)
    if source.scale is not None:
        scale_rows = count * part.scale_rows
        scale = _typed(stored, part.scale_at, scale_rows, part.scale_line, source.scale.dtype)
        scale = _columns(scale, source, source.tile[1])
        if source.scale.dtype == "BF16":
            scale = scale.float()
    if source.global_scale is not None:
        factor = stored[part.global_at : part.global_at + 4 * count].view(torch.float32).double()
        if source.is_reciprocal:
            factor = 1.0 / factor
    return Stack(part.start, data, scale, factor, source.format, source.param.shape[-1])


def _typed(stored: Tensor, at: int, rows: int, line: int, dtype: str) -> Tensor:
    return stored[at : at + rows * line].view(torch_type(dtype)).view(rows, -1)


def _columns(stored: Tensor, source: Source, per_place: int) -> Tensor:
    """The share of a rank that has some columns, of which so many have one place."""
    first, count = source.col // per_place, -(-source.param.shape[1] // per_place)
    return stored[:, first : first + count].contiguous()
