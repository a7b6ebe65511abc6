"""What a launch has declared of a step's memory, byte by byte: what it may touch at all, and what only after
its PDL wait. Until then, or for good, that memory holds noise."""

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from dsv4.gpu.pdl import Touches

Span = tuple[int, int]  # addresses: the first byte, and the one after the last
_NOISE = 0xFF  # NaN, and -1


def spans_of(tensors: Iterable[Tensor]) -> list[Span]:
    """Of each, from its first byte to its last, whatever lies between; joined where they overlap."""
    out: list[Span] = []
    for begin, end in sorted(_span(tensor) for tensor in tensors if tensor.numel()):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((begin, end))
    return out


def _span(tensor: Tensor) -> Span:
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def without(spans: list[Span], holes: list[Span]) -> list[Span]:
    """Both in order and without overlap."""
    out = []
    for begin, end in spans:
        for hole_begin, hole_end in holes:
            if hole_end <= begin or hole_begin >= end:
                continue
            if hole_begin > begin:
                out.append((begin, hole_begin))
            begin = hole_end
        if begin < end:
            out.append((begin, end))
    return out


def undeclared(state: list[Span], touches: Touches) -> list[Span]:
    """Of all that a step writes, what this launch neither reads nor writes."""
    return without(state, spans_of((*touches.reads, *touches.reads_early, *touches.writes)))


def late(state: list[Span], touches: Touches) -> list[Span]:
    """What it touches after its wait alone."""
    declared = spans_of((*touches.reads, *touches.writes))
    declared = without(declared, spans_of(touches.reads_early))
    return without(declared, without(declared, state))


@contextmanager
def noise(spans: list[Span], whose: str) -> Iterator[None]:
    """Inside, these hold noise, which nobody overwrites."""
    there = [ctypes.string_at(begin, end - begin) for begin, end in spans]
    for begin, end in spans:
        ctypes.memset(begin, _NOISE, end - begin)
    yield
    for (begin, end), held in zip(spans, there, strict=True):
        is_written = ctypes.string_at(begin, end - begin).count(_NOISE) < end - begin
        assert not is_written, f"{whose} writes what it has not declared"
        ctypes.memmove(begin, held, end - begin)
