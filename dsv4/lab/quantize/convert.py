"""Turns units of a plan into tasks for threads: scan what must be known first, then convert a few rows each.

Results do not depend on the number of threads or on the order in which tasks run.
"""

import math
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4.errors import CheckpointError
from dsv4.lab.quantize.job import WRITE_BYTES
from dsv4.lab.quantize.plan import Inverse, Item, Output, Span, Unit, row_chunks
from dsv4.quant.bulk import (
    SLICE_COLS,
    Buffers,
    Tally,
    decode_slice,
    encode_slice,
    largest,
    nvfp4_global_scale,
    tally,
)
from dsv4.quant.cast import SPAN, cast_scales, global_scale, zero_blocks
from dsv4.quant.formats import FP8_TILE, MX_BLOCK, NV_BLOCK, Format, QuantTensor
from dsv4.weights.detect import Source
from dsv4.weights.load import check_finite, check_scales
from dsv4.weights.reader import Entry, Reader, torch_type

TASK_BYTES = 32 << 20

Write = Callable[[int, Any], None]  # offset in the file, bytes
# Columns per stored byte group and per scale.
_PER_CODE = {Format.MXFP4: 2, Format.NVFP4: 2, Format.FP8: 1, Format.BF16: 1}
_PER_SCALE = {Format.MXFP4: MX_BLOCK, Format.NVFP4: NV_BLOCK, Format.FP8: FP8_TILE}


@dataclass(frozen=True)
class Task:
    """Work of one thread on one parameter; `num_bytes` of the source are done with it."""

    item: Item
    num_bytes: int
    run: Callable[[], Tally]


@dataclass(frozen=True)
class Cast:
    """What the scales of a cast unit allow. `top`: the largest E8M0 code of a block that is not all zero."""

    codes: tuple[Any, ...]  # E8M0 codes of each item, numpy [N, K/32]
    top: int
    is_exact: bool


@dataclass
class Converter:
    """Reads one checkpoint and converts units of its plan. Each thread has buffers of its own."""

    reader: Reader
    search: bool
    _local: threading.local = field(default_factory=threading.local)

    def scans(self, unit: Unit) -> list[Callable[[], Any]]:
        """What must be known before the unit's tasks can be made; `tasks` takes the results in this order."""
        if unit.how == "cast":
            return [partial(self._scan_cast, unit)]
        if unit.how == "round" and unit.items[0].format is Format.NVFP4:
            return [
                partial(self._scan_rows, _source(item), start, stop)
                for item in unit.items
                for start, stop in row_chunks(_source(item).param.shape[0])
            ]
        return []

    def tasks(self, unit: Unit, scanned: list[Any], write: Write, offsets: dict[str, int]) -> Iterator[Task]:
        cast: Cast | None = scanned[0] if unit.how == "cast" else None
        scale = 1.0
        if cast:
            scale = global_scale(cast.top)
        elif scanned:
            scale = nvfp4_global_scale(max(scanned))
        for index, item in enumerate(unit.items):
            places = [offsets[output.declared.name] for output in item.outputs]
            settled = (cast.codes[index], cast.top) if cast else None
            is_rounded = unit.how == "round" or bool(cast and not cast.is_exact)
            if is_rounded:
                rows = _source(item).param.shape[0]
                rounding = partial(self._round, item, scale, settled, places, write)
                for start, stop in row_chunks(rows):
                    share = item.source_bytes * stop // rows - item.source_bytes * start // rows
                    yield Task(item, share, partial(rounding, start, stop))
            elif settled:
                rest = item.source_bytes - item.outputs[0].declared.num_bytes
                yield Task(item, rest, partial(self._write_cast, item, settled, places[1], write))
            small = []
            if item.format is Format.NVFP4:
                small.append((places[2], struct.pack("<f", scale)))
            for output, place in zip(item.outputs, places, strict=True):
                content = output.content
                if isinstance(content, bytes):
                    small.append((place, content))
                elif isinstance(content, Inverse):
                    small.append((place, self._inverse(content.entry)))
                elif content and not is_rounded:
                    yield from self._copies(item, content, place, write)
            if small:
                yield Task(item, 0, partial(_put, small, write))

    def _buffers(self) -> Buffers:
        if not hasattr(self._local, "buffers"):
            self._local.buffers = Buffers()
        return self._local.buffers

    def _scan_rows(self, source: Source, start: int, stop: int) -> float:
        """The largest magnitude of some rows, which must all be numbers."""
        buffers, amax = self._buffers(), 0.0
        rows = check_scales(source.read_rows(self.reader, start, stop), source)
        for first, last in _column_slices(source):
            x = decode_slice(rows, first, last, buffers)
            found = largest(x)
            if not math.isfinite(found):
                check_finite(x, source, start, first)
            amax = max(amax, found)
        return amax

    def _scan_cast(self, unit: Unit) -> Cast:
        codes = tuple(self._e8m0(_source(item)) for item in unit.items)
        low, top = min(int(c.min()) for c in codes), max(int(c.max()) for c in codes)
        if top - low > SPAN:
            # The scale of a block of zeros does not matter.
            used = [self._used_scales(_source(item), c) for item, c in zip(unit.items, codes, strict=True)]
            everything = np.concatenate(used)
            low, top = (int(everything.min()), int(everything.max())) if len(everything) else (127, 127)
        return Cast(codes, top, top - low <= SPAN)

    def _used_scales(self, source: Source, codes: Any) -> Any:
        """Those of blocks that hold a value, in any order."""
        out = [np.empty(0, np.uint8)]
        for start, stop in row_chunks(source.param.shape[0]):
            data = self.reader.read(source.weight.name, source.row + start, source.row + stop)
            out.append(codes[start:stop][~zero_blocks(data.numpy())])
        return np.concatenate(out)

    def _e8m0(self, source: Source) -> Any:
        rows, cols = source.param.shape
        assert source.scale is not None
        scale = self.reader.read(source.scale.name, source.scale_row, source.scale_row + rows)
        check_scales(QuantTensor(Format.MXFP4, scale, (rows, cols), scale), source)
        return scale.numpy()

    def _write_cast(self, item: Item, settled: tuple[Any, int], place: int, write: Write) -> Tally:
        rows, cols = _source(item).param.shape
        scales = cast_scales(*settled, -(-cols // NV_BLOCK))
        write(place, scales)
        return Tally(values=rows * cols, exponents=_exponents(scales))

    def _inverse(self, entry: Entry) -> bytes:
        value = float(self.reader.read(entry.name).flatten()[0])
        if value == 0 or not math.isfinite(value):
            raise CheckpointError(
                f"{entry.name} in {entry.file.name} is {value}, expected a number to divide by; "
                "the checkpoint is damaged: download or convert it again"
            )
        return struct.pack("<f", 1.0 / value)

    def _copies(self, item: Item, span: Span, place: int, write: Write) -> Iterator[Task]:
        for done in range(0, span.num_bytes, TASK_BYTES):
            count = min(TASK_BYTES, span.num_bytes - done)
            yield Task(
                item, count, partial(self._copy, span.entry, span.start + done, count, place + done, write)
            )

    def _copy(self, entry: Entry, start: int, count: int, place: int, write: Write) -> Tally:
        buffer = self._buffers().get("copy", (WRITE_BYTES,), torch.uint8).numpy().data
        for done in range(0, count, WRITE_BYTES):
            piece = buffer[: min(WRITE_BYTES, count - done)]
            self.reader.fill(entry, start + done, piece)
            write(place + done, piece)
        return Tally()

    def _round(
        self,
        item: Item,
        scale: float,
        settled: tuple[Any, int] | None,
        places: list[int],
        write: Write,
        start: int,
        stop: int,
    ) -> Tally:
        """Rows [start, stop) of a parameter, rounded and written. `settled`: block scales from a cast."""
        source, format, buffers = _source(item), item.format, self._buffers()
        assert format is not None
        rows = check_scales(source.read_rows(self.reader, start, stop), source)
        data = _rows_of(item.outputs[0], stop - start)
        scales = None
        if format is not Format.BF16:
            scales = _rows_of(item.outputs[1], 1 if format is Format.FP8 else stop - start)
        fixed = None
        if settled:
            codes, top = settled
            fixed = cast_scales(codes[start:stop], top, -(-source.param.shape[1] // NV_BLOCK))
        total = Tally()
        for first, last in _column_slices(source):
            x = decode_slice(rows, first, last, buffers)
            if format is not Format.NVFP4:
                check_finite(x, source, start, first)
            given = None if fixed is None else _padded(fixed, first, last, x.shape[1])
            encoded = encode_slice(x, format, buffers, scale, self.search, given)
            _place(data, encoded.data, first, last, _PER_CODE[format])
            if scales is not None:
                assert encoded.scale is not None
                _place(scales, encoded.scale, first, last, _PER_SCALE[format])
            total.add(tally(x, encoded, (stop - start) * (last - first), buffers))
        if not math.isfinite(total.yy):
            raise CheckpointError(
                f"{source.weight.name} in {source.weight.file.name} holds values too large for {format}; "
                "leave it as it is with a smaller --scope"
            )
        write(places[0] + start * (data.nbytes // len(data)), data.view(torch.uint8).numpy())
        if scales is not None:
            row = start // FP8_TILE if format is Format.FP8 else start
            write(places[1] + row * scales.shape[1], scales.numpy())
        if format is Format.NVFP4:
            total.exponents = _exponents(scales)
        return total


def _source(item: Item) -> Source:
    assert item.source is not None
    return item.source


def _put(contents: list[tuple[int, bytes]], write: Write) -> Tally:
    for place, content in contents:
        write(place, content)
    return Tally()


def _column_slices(source: Source) -> Iterator[tuple[int, int]]:
    cols = source.param.shape[1]
    return ((first, min(cols, first + SLICE_COLS)) for first in range(0, cols, SLICE_COLS))


def _rows_of(output: Output, count: int) -> Tensor:
    declared = output.declared
    return torch.empty((count, declared.shape[1]), dtype=torch_type(declared.dtype))


def _place(target: Tensor, values: Tensor, first: int, last: int, per: int) -> None:
    """Put an encoded slice of columns [first, last) where it belongs; its padding is cut off."""
    begin, end = first // per, -(-last // per)
    target[:, begin:end] = values[:, : end - begin]


def _padded(scales: Any, first: int, last: int, width: int) -> Tensor:
    """Block scales of columns [first, last), and any for the padding behind them."""
    out = torch.ones((len(scales), width // NV_BLOCK), dtype=torch.uint8)
    part = torch.from_numpy(scales[:, first // NV_BLOCK : -(-last // NV_BLOCK)])
    out[:, : part.shape[1]] = part
    return out.view(-1)


def _exponents(scales: Any) -> list[int]:
    """How many blocks have a scale of each of E4M3's 16 exponents. Few occur: a pass for each is fast."""
    exponents = np.asarray(scales) >> 3
    out = [0] * 16
    for exponent in range(int(exponents.min(initial=15)), int(exponents.max(initial=0)) + 1):
        out[exponent] = int(np.count_nonzero(exponents == exponent))
    return out
