"""Decides which stored bytes are read together, and where they lie in a buffer. Reads nothing."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsv4.quant.formats import FP8_TILE
from dsv4.weights.detect import Source
from dsv4.weights.reader import DTYPES, Entry

# One read by one thread; bytes between two tensors that are read with them, not skipped; buffers of one
# preadv, which takes 1024.
PIECE_BYTES, _GAP_BYTES, _MOST_BUFFERS = 16 << 20, 256, 512
_ALIGNED = 256
EXPERT = re.compile(r"(.*\.(?:shared_experts|experts))(?:\.(\d+))?\.(w[123])")


@dataclass(slots=True)
class Part:
    """Rows [start, stop) of weights that are stored alike, one weight after the other in the buffer."""

    sources: list[Source]
    start: int
    stop: int
    line: int  # bytes of a stored row
    scale_line: int
    data_at: int = 0
    scale_at: int = 0
    global_at: int = 0

    @property
    def scale_rows(self) -> int:
        return -(-(self.stop - self.start) // self.sources[0].tile[0])


@dataclass(slots=True)
class Piece:
    """A run of a file's bytes. Each span: its place in the buffer (-1: none), its length, its tensor."""

    offset: int
    num_bytes: int
    spans: list[tuple[int, int, Entry]]


@dataclass(slots=True)
class Batch:
    """What is processed together: `num_bytes` of a buffer."""

    index: int
    parts: list[Part] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    num_bytes: int = 0


def plan(sources: Iterable[Source], limit: int, together: bool) -> list[Batch]:
    """Cut weights into batches of about `limit` bytes, in the order of the files.

    `together`: the three matrices of an expert come in one batch, however large. Other linears are cut into
    rows where they are larger than a batch.
    """
    units: dict[str, list[Source]] = {}
    for source in sources:
        match = EXPERT.fullmatch(source.param.name) if together else None
        units.setdefault(source.param.name.rsplit(".", 1)[0] if match else source.param.name, []).append(
            source
        )
    files = {file: number for number, file in enumerate(sorted({s.weight.file for s in _flat(units)}))}
    ordered = sorted(units.values(), key=lambda unit: min(_place(source, files) for source in unit))
    batches: list[Batch] = []
    taken: list[tuple[Source, int, int]] = []
    size = 0
    for unit in ordered:
        for rows in _cut(unit, limit):
            num_bytes = sum(_bytes(*one) for one in rows)
            if taken and size + num_bytes > limit:
                batches.append(_batch(len(batches), taken))
                taken, size = [], 0
            taken += rows
            size += num_bytes
    if taken:
        batches.append(_batch(len(batches), taken))
    return batches


def _flat(units: dict[str, list[Source]]) -> Iterator[Source]:
    return (source for unit in units.values() for source in unit)


def _place(source: Source, files: dict[Path, int]) -> tuple[int, int]:
    return files[source.weight.file], source.weight.start + source.row * _line(source.weight)


def _line(entry: Entry) -> int:
    return (entry.shape[-1] if len(entry.shape) > 1 else 1) * DTYPES[entry.dtype][0]


def _bytes(source: Source, start: int, stop: int) -> int:
    scale = 0 if source.scale is None else _line(source.scale) * -(-(stop - start) // source.tile[0])
    return (stop - start) * _line(source.weight) + scale + 3 * _ALIGNED


def _cut(unit: list[Source], limit: int) -> Iterator[list[tuple[Source, int, int]]]:
    """Whole, or a single linear in runs of rows that end on tiles. Four bits count as eight (decoding)."""
    source, rows = unit[0], unit[0].param.shape[0]
    cost = max(_line(source.weight), source.param.shape[-1]) if source.format else 0
    if len(unit) > 1 or not cost or rows * cost <= limit:
        yield [(one, 0, one.param.shape[0]) for one in unit]
        return
    step = max(FP8_TILE, limit // cost // FP8_TILE * FP8_TILE)
    for start in range(0, rows, step):
        yield [(source, start, min(rows, start + step))]


def _batch(index: int, taken: Sequence[tuple[Source, int, int]]) -> Batch:
    """Weights that are stored alike and go to one bank lie side by side."""
    groups: dict[object, Part] = {}
    for source, start, stop in taken:
        part = groups.get(key := _key(source, start))
        if part is None:
            scale_line = 0 if source.scale is None else _line(source.scale)
            groups[key] = Part([source], start, stop, _line(source.weight), scale_line)
        else:
            part.sources.append(source)
    batch, at = Batch(index, list(groups.values())), 0
    reads: list[tuple[int, Entry, int, int]] = []
    for part in batch.parts:
        rows, count = part.stop - part.start, len(part.sources)
        part.data_at = at
        at += -(-count * rows * part.line // _ALIGNED) * _ALIGNED
        part.scale_at = at
        at += -(-count * part.scale_rows * part.scale_line // _ALIGNED) * _ALIGNED
        part.global_at = at
        at += -(-count * 4 // _ALIGNED) * _ALIGNED if part.sources[0].global_scale else 0
        reads += _reads(part)
    batch.num_bytes, batch.pieces = at, list(_pieces(reads))
    return batch


def _key(source: Source, start: int) -> object:
    match = EXPERT.fullmatch(source.param.name)
    if match is None:
        return source.param.name, start
    scale = source.scale and (source.scale.dtype, source.scale.shape[-1])
    stored = (source.format, source.param.shape, source.weight.dtype, _line(source.weight), scale)
    return match[1], match[3], start, stored, source.global_scale is None, source.is_reciprocal


def _reads(part: Part) -> Iterator[tuple[int, Entry, int, int]]:
    """(offset in the file, tensor, bytes, place in the buffer)"""
    size, scales = (part.stop - part.start) * part.line, part.scale_rows * part.scale_line
    for number, source in enumerate(part.sources):
        weight, scale, tensor = source.weight, source.scale, source.global_scale
        yield weight.start + (source.row + part.start) * part.line, weight, size, part.data_at + number * size
        if scale is not None:
            row = source.scale_row + part.start // source.tile[0]
            yield scale.start + row * part.scale_line, scale, scales, part.scale_at + number * scales
        if tensor is not None:
            yield tensor.start, tensor, 4, part.global_at + 4 * number


def _pieces(reads: list[tuple[int, Entry, int, int]]) -> Iterator[Piece]:
    piece: Piece | None = None
    for offset, entry, num_bytes, at in sorted(reads, key=lambda read: (str(read[1].file), read[0])):
        while num_bytes:
            gap = -1
            if piece is not None and piece.spans[0][2].file is entry.file:
                gap = offset - piece.offset - piece.num_bytes
            if piece is not None and (
                not 0 <= gap <= _GAP_BYTES
                or piece.num_bytes + gap >= PIECE_BYTES
                or len(piece.spans) > _MOST_BUFFERS - 2
            ):
                yield piece
                piece = None
            if piece is None:
                piece = Piece(offset, 0, [])
            elif gap:
                piece.spans.append((-1, gap, entry))
                piece.num_bytes += gap
            size = min(num_bytes, PIECE_BYTES - piece.num_bytes)
            piece.spans.append((at, size, entry))
            piece.num_bytes += size
            offset, num_bytes, at = offset + size, num_bytes - size, at + size
    if piece is not None:
        yield piece
