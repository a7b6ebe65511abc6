"""Decode step and prompts: reads from CUDA sources the structures that kernels take, as ctypes has them."""

import ctypes
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from dsv4.gpu.build import FOLDERS, HEADERS

_SCALARS = {
    **{"int": ctypes.c_int, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float},
    **{"uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64, "double": ctypes.c_double},
}


class Struct(ctypes.Structure):
    """A kernel's structure. Takes every field by name: a number; a tensor or None for a pointer; for an array
    a sequence, whose rest is zero."""

    __slots__ = ()
    declared = ""  # where, as errors name it
    source: Path

    def __init__(self, **given: Any) -> None:
        names = [name for name, *_ in self._fields_]
        missing, unknown = [n for n in names if n not in given], [n for n in given if n not in names]
        if missing or unknown:
            raise TypeError(f"{self.declared}: missing {missing or 'none'}, unknown {unknown or 'none'}")
        self._fill(given)

    @classmethod
    def blank(cls, **given: Any) -> Self:
        """Set all other fields to zero: for a structure that is filled in several steps."""
        made = cls.__new__(cls)
        made._fill(given)
        return made

    def _fill(self, given: dict[str, Any]) -> None:
        kinds = {name: kind for name, kind, *_ in self._fields_}
        for name, value in given.items():
            try:
                setattr(self, name, _value(value, kinds[name]))
            except (KeyError, TypeError, IndexError) as error:
                raise TypeError(f"{self.declared}.{name}: {error}") from error

    if TYPE_CHECKING:  # fields are known when the source is read

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


def _value(given: Any, kind: Any) -> Any:
    if isinstance(given, Tensor):
        return given.data_ptr()
    return kind(*given) if isinstance(given, Sequence) else given


def mirror(source: str, name: str) -> type[Struct]:
    """`struct NAME` of a source such as linear/matvec.cu, or of a header that this includes."""
    room, _, file = source.partition("/")
    return _declared({folder.name: folder for folder in FOLDERS}[room] / file, name, source)


def _declared(source: Path, name: str, where: str) -> type[Struct]:
    for path in _with_headers(source):
        if re.search(rf"\bstruct {name} \{{", _text(path)):
            return _mirror(path, name)
    raise LookupError(f"{where}: struct {name} is neither there nor in a header that it includes")


@cache
def _mirror(path: Path, name: str) -> type[Struct]:
    where = f"{path.parent.name}/{path.name}: struct {name}"
    body = re.split(rf"\bstruct {name} \{{", _text(path))[1].split("\n};")[0]
    while "{" in body:  # methods
        body = re.sub(r"[^;{}]*\{[^{}]*\}", "", body)
    fields: list[tuple[str, Any]] = []
    for declaration in filter(None, (part.strip() for part in body.split(";"))):
        kind, _, names = declaration.removeprefix("const ").replace("*", " *").partition(" ")
        for one in names.split(","):
            shape = re.fullmatch(r"\s*(\*?)\s*(\w+)(?:\[(\w+)\])?", one)
            if shape is None:
                raise LookupError(f"{where}: cannot read the field '{one.strip()}' of '{declaration}'")
            at = f"{where}.{shape[2]}"
            of: Any = ctypes.c_void_p if shape[1] else _SCALARS.get(kind) or _declared(path, kind, at)
            fields.append((shape[2], of * _number(shape[3], path, at) if shape[3] else of))
    return type(name, (Struct,), {"__slots__": (), "_fields_": fields, "declared": where, "source": path})


def _text(path: Path) -> str:
    return re.sub(r"//[^\n]*", "", path.read_text())


def _with_headers(source: Path) -> list[Path]:
    """The source, then all headers that it includes, or they do."""
    found = [source]
    for path in found:
        names = re.findall(r'#include "([^"]+)"', path.read_text())
        found += [header for header in HEADERS if header.name in names and header not in found]
    return found


def _number(given: str, source: Path, at: str) -> int:
    """An array's length: a number, or a constant of the source or of its headers."""
    if given.isdigit():
        return int(given)
    for path in _with_headers(source):
        if found := re.search(rf"\bconstexpr int [^;]*\b{given} = (\d+)[,;]", _text(path)):
            return int(found[1])
    raise LookupError(f"{at}: the constant {given} is not known")
