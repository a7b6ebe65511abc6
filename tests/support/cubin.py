"""Reads a cubin: what the compiler says of each kernel's parameters, registers and memory."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

# EIATTR_* of the sections .nv.info
_FRAME, _PARAMETER, _REGISTERS = 0x11, 0x17, 0x2F
# Of every block, from Hopper on, beside what it may have.
RESERVED = 1024
# Of a multiprocessor, on every GPU that kernels are built for; threads get them in eights.
REGISTERS = 65536


@dataclass(frozen=True)
class Resources:
    registers: int  # of a thread
    shared: int  # bytes that the kernel declares itself
    frame: int  # bytes of local memory of a thread: arrays and spilled registers


def _sections(cubin: bytes) -> dict[str, tuple[int, bytes]]:
    """Name -> size and bytes; some have a size alone."""
    (at,), (count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HH", cubin, 0x3C)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, at + 64 * i) for i in range(count)]
    strings = cubin[headers[names][4] :]
    return {_string(strings, h[0]): (h[5], cubin[h[4] : h[4] + h[5]]) for h in headers}


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()


def _entries(info: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) of those that have more than four bytes."""
    place = 0
    while place < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, place)
        place += 4
        if form == 4:
            yield attribute, info[place : place + size]
            place += size


def parameter_sizes(cubin: bytes, symbol: str) -> list[int]:
    """Bytes of each parameter of a kernel."""
    sizes: dict[int, int] = {}
    for attribute, value in _entries(_sections(cubin)[f".nv.info.{symbol}"][1]):
        if attribute == _PARAMETER:  # index, ordinal, offset, then the size above other bits
            _, ordinal, _, rest = struct.unpack("<IHHI", value)
            sizes[ordinal] = rest >> 18
    return [sizes[i] for i in range(len(sizes))]


def resources(cubin: bytes, symbol: str) -> Resources:
    sections = _sections(cubin)
    table, strings = sections[".symtab"][1], sections[".strtab"][1]
    names = [_string(strings, struct.unpack_from("<I", table, at)[0]) for at in range(0, len(table), 24)]
    found: dict[int, int] = {}
    for attribute, value in _entries(sections[".nv.info"][1]):
        if attribute in (_FRAME, _REGISTERS):
            index, number = struct.unpack("<II", value)
            if names[index] == symbol:
                found[attribute] = number
    shared, _ = sections.get(f".nv.shared.{symbol}", (RESERVED, b""))
    return Resources(found[_REGISTERS], shared - RESERVED, found[_FRAME])
