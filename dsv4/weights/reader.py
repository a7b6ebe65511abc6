"""Reads safetensors files that may be damaged or hostile: lengths and offsets are checked before use."""

import json
import math
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from dsv4.errors import CheckpointError

# Headers are read without torch and NumPy, which take a second to import.
if TYPE_CHECKING:
    import torch
    from torch import Tensor

# safetensors name -> bytes per element, and the name of the torch type it is read as. 8-bit codes stay bytes.
DTYPES: dict[str, tuple[int, str]] = {
    "F64": (8, "float64"),
    "F32": (4, "float32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "I64": (8, "int64"),
    "I32": (4, "int32"),
    "I16": (2, "int16"),
    "I8": (1, "uint8"),
    "U8": (1, "uint8"),
    "BOOL": (1, "uint8"),
    "F8_E4M3": (1, "uint8"),
    "F8_E5M2": (1, "uint8"),
    "F8_E8M0": (1, "uint8"),
}
# How a file begins that stands for another one in a clone without Git LFS.
_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_HEADER = 100_000_000
MAX_RANK = 8
INDEX = "model.safetensors.index.json"
AGAIN = "the file is damaged or incomplete: copy or download it again"


def torch_type(dtype: str) -> "torch.dtype":
    """The type of a tensor read from an entry of this dtype."""
    import torch

    return getattr(torch, DTYPES[dtype][1])


@dataclass(frozen=True)
class Entry:
    """One stored tensor: where its bytes lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    num_bytes: int


def read_header(path: Path) -> dict[str, Entry]:
    """All tensors of one file, after checking that they fill it exactly, without overlap or gap."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if prefix + file.read(len(_POINTER) - 8) == _POINTER:
                raise CheckpointError(
                    f"{path} is a Git LFS pointer, not the weights themselves; run git lfs pull in "
                    f"{path.parent}, or fetch the model with dsv4 pull"
                )
            file.seek(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8 or length > MAX_HEADER:
                raise CheckpointError(
                    f"{path}: the header claims {length:,} bytes, the file has {size:,}; {AGAIN}"
                )
            text = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; the checkpoint is incomplete") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r} is no file name ({error}); {AGAIN}") from None
    try:
        header = json.loads(text, object_pairs_hook=lambda pairs: _unique(path, pairs))
    # ValueError: not UTF-8, not JSON, or an integer of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON ({error}); {AGAIN}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is a {type(header).__name__}, expected an object; {AGAIN}")
    header.pop("__metadata__", None)
    data_start, data_size = 8 + length, size - 8 - length
    entries = {name: _entry(path, name, info, data_start, data_size) for name, info in header.items()}
    _check_cover(path, list(entries.values()), data_start, data_size)
    return entries


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in pairs:
        if name in out:
            raise CheckpointError(f"{path} names {name!r} twice; one of them would be lost: convert it again")
        out[name] = value
    return out


def _entry(path: Path, name: str, info: Any, data_start: int, data_size: int) -> Entry:
    try:
        dtype, shape, (start, stop) = info["dtype"], info["shape"], info["data_offsets"]
        if not isinstance(dtype, str) or not isinstance(shape, list) or len(shape) > MAX_RANK:
            raise TypeError(f"dtype and shape must be a string and a list of at most {MAX_RANK} sizes")
        if not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, start, stop)):
            raise TypeError("sizes and offsets must be integers from 0")
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path}: tensor {name!r} has a malformed header entry ({error}); {AGAIN}"
        ) from None
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name!r} has dtype {dtype!r}, expected one of {', '.join(DTYPES)}"
        )
    expected = math.prod(shape) * DTYPES[dtype][0]
    if stop - start != expected:
        raise CheckpointError(
            f"{path}: tensor {name!r} of {dtype} {shape} has {stop - start:,} bytes, "
            f"expected {expected:,}; {AGAIN}"
        )
    if stop > data_size:
        raise CheckpointError(
            f"{path}: tensor {name!r} ends at byte {stop:,} of {data_size:,}; the file is truncated: "
            "copy or download it again"
        )
    return Entry(name, dtype, tuple(shape), path, data_start + start, expected)


def _check_cover(path: Path, entries: list[Entry], data_start: int, data_size: int) -> None:
    end, previous = data_start, "the header"
    for entry in sorted(entries, key=lambda e: (e.start, e.num_bytes)):
        if entry.start != end:
            what = "overlaps" if entry.start < end else "leaves a gap after"
            raise CheckpointError(f"{path}: tensor {entry.name!r} {what} {previous!r}; {AGAIN}")
        end, previous = entry.start + entry.num_bytes, entry.name
    if end != data_start + data_size:
        raise CheckpointError(
            f"{path}: {data_start + data_size - end:,} bytes follow the last tensor; {AGAIN}"
        )


class Reader:
    """The tensors of a model folder (sharded or single-file), or of one .safetensors file."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        self.folder = path if path.is_dir() else path.parent
        self._open: dict[Path, BinaryIO] = {}
        self._lock = threading.Lock()
        self.num_read = 0  # bytes of tensors, so far
        self.entries: dict[str, Entry] = {}
        files, index = _files_of(path)
        self._identities: dict[Path, tuple[int, int, int]] = {}
        for file in files:
            with suppress(OSError, ValueError):  # read_header says what is wrong
                self._identities[file] = _identity(file.stat())
            for name, entry in read_header(file).items():
                if name in self.entries:
                    raise CheckpointError(
                        f"tensor {name!r} is in both {self.entries[name].file.name} and {file.name}; "
                        "keep the shards of one checkpoint only"
                    )
                self.entries[name] = entry
        if index is not None:
            self._check_index(index)

    def _check_index(self, index: dict[str, str]) -> None:
        for name, file in index.items():
            if name not in self.entries:
                raise CheckpointError(f"tensor {name!r} is listed in {INDEX} but missing in {file}; {AGAIN}")
            if self.entries[name].file.name != file:
                raise CheckpointError(
                    f"tensor {name!r} is in {self.entries[name].file.name}, but {INDEX} says {file}; "
                    "index and shards are of different checkpoints"
                )
        if extra := sorted(self.entries.keys() - index.keys()):
            raise CheckpointError(
                f"{len(extra)} tensors are not in {INDEX}, the first is {extra[0]!r}; {AGAIN}"
            )

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def read(
        self, name: str, start: int = 0, stop: int | None = None, first: int = 0, last: int | None = None
    ) -> "Tensor":
        """Rows [start, stop) of the tensor, leading dimensions flattened, of them columns [first, last).

        Plain file reads, not a memory map: only what is asked for takes memory. Threads may read at once.
        """
        import torch

        entry = self.entries[name]
        itemsize = DTYPES[entry.dtype][0]
        is_matrix = len(entry.shape) > 1
        rows = math.prod(entry.shape[:-1]) if is_matrix else math.prod(entry.shape)
        cols = entry.shape[-1] if is_matrix else 1
        stop, last = rows if stop is None else stop, cols if last is None else last
        assert 0 <= start <= stop <= rows and 0 <= first <= last <= cols, (name, start, stop, first, last)
        buffer = torch.empty((stop - start) * (last - first) * itemsize, dtype=torch.uint8)
        offset, line = entry.start + start * cols * itemsize, cols * itemsize
        if last - first == cols:
            self.fill(entry, offset, buffer.numpy().data)
        elif buffer.numel():
            self._fill_columns(entry, offset, line, slice(first * itemsize, last * itemsize), buffer)
        shape = (stop - start, last - first) if is_matrix else (stop - start,) if entry.shape else ()
        return buffer.view(torch_type(entry.dtype)).reshape(shape)

    def _fill_columns(self, entry: Entry, offset: int, line: int, part: slice, target: "Tensor") -> None:
        """The same bytes of every line from `offset` on: mapped, because a call for each would take long."""
        import numpy as np

        rows = target.numel() // (part.stop - part.start)
        begin = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with self._lock:
            file = self._file(entry)
            self.num_read += target.numel()
        try:
            with mmap.mmap(file, offset - begin + rows * line, access=mmap.ACCESS_READ, offset=begin) as map:
                lines = np.frombuffer(map, np.uint8, rows * line, offset - begin).reshape(rows, line)
                target.numpy().reshape(rows, -1)[:] = lines[:, part]
                del lines  # a map that is looked at cannot be closed
        except ValueError:  # longer than the file
            raise CheckpointError(f"{entry.file} ended while reading {entry.name!r}; {AGAIN}") from None
        except OSError as error:
            raise _unreadable(entry, error) from None

    def _file(self, entry: Entry) -> int:
        """The descriptor of the entry's file; the lock is held."""
        if entry.file not in self._open:
            try:
                self._open[entry.file] = entry.file.open("rb", buffering=0)
            except OSError as error:
                raise _unreadable(entry, error) from None
            self._check_unchanged(entry.file, os.fstat(self._open[entry.file].fileno()))
        return self._open[entry.file].fileno()

    def check_unchanged(self) -> None:
        """Raise if a file has been written to since its header was read, or is another one now.

        Also those that this process has not opened: another rank, which read all of them, may know another
        header.
        """
        for path in self._identities:
            file = self._open.get(path)
            try:
                now = path.stat() if file is None else os.fstat(file.fileno())
            except OSError as error:
                raise CheckpointError(f"{path} went away while weights were read: {error.strerror}") from None
            self._check_unchanged(path, now)

    def _check_unchanged(self, path: Path, now: os.stat_result) -> None:
        if _identity(now) != self._identities[path]:
            raise CheckpointError(f"{path} was changed while it was read; load it again when it is complete")

    def fill(self, entry: Entry, offset: int, target: memoryview) -> None:
        """Bytes of the entry's file from `offset` on, exactly as many as the target holds."""
        self.scatter(offset, [(entry, target)])

    def scatter(self, offset: int, targets: Sequence[tuple[Entry, memoryview]]) -> None:
        """Bytes of one file from `offset` on into several places, each with the tensor that it belongs to."""
        targets = [(entry, target) for entry, target in targets if len(target)]
        if not targets:
            return
        entry, rest = targets[0][0], [target for _, target in targets]
        with self._lock:
            file = self._file(entry)
            self.num_read += sum(map(len, rest))
        try:
            while rest:
                count = os.preadv(file, rest, offset)
                if not count:
                    entry = targets[len(targets) - len(rest)][0]
                    raise CheckpointError(f"{entry.file} ended while reading {entry.name!r}; {AGAIN}")
                offset += count
                while rest and count >= len(rest[0]):
                    count -= len(rest.pop(0))
                if count:
                    rest[0] = rest[0][count:]
        except OSError as error:
            raise _unreadable(targets[len(targets) - len(rest)][0], error) from None


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _unreadable(entry: Entry, error: OSError) -> CheckpointError:
    return CheckpointError(f"{entry.file} cannot be read at {entry.name!r}: {error.strerror or error}")


def _files_of(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    if path.is_file():
        return [path], None
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; give a model folder or a .safetensors file")
    if (path / INDEX).exists():
        index = _read_index(path / INDEX)
        names = sorted(set(index.values()))
        if (path / "model.safetensors").exists() and "model.safetensors" not in names:
            raise CheckpointError(
                f"{path} holds both model.safetensors and {INDEX} with other shards; "
                "move one of the two checkpoints elsewhere"
            )
        return [path / name for name in names], index
    if (path / "model.safetensors").exists():
        return [path / "model.safetensors"], None
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} holds no {INDEX} and no model*.safetensors; is this a model folder?")
    return files, None


def _read_index(path: Path) -> dict[str, str]:
    try:
        raw = json.loads(path.read_bytes(), object_pairs_hook=lambda pairs: _unique(path, pairs))
        index = raw["weight_map"]
        if not all(isinstance(k, str) and isinstance(v, str) for k, v in index.items()):
            raise TypeError("names and files must be strings")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors index ({error}); {AGAIN}") from None
    for file in set(index.values()):
        if Path(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(
                f"{path} points outside its folder: {file!r}; shards must lie beside the index"
            )
    return index
