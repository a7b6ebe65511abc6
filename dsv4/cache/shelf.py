"""Between the device and the folder of kept prefixes: copies on their way to files, and what files had.

Files are written and read by two threads of their own, never by whoever runs the steps. What lies here has a
number, which is never used twice; a plan names it by that.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from dsv4.cache.folder import Kind, PrefixFolder, chain

# Copies that wait to be written: more are not kept, so that a slow disk slows nobody down.
MAX_UNWRITTEN_BYTES = 256 << 20
# Prompts whose files wait to be marked as used; more are not, so that a disk that hangs takes no memory.
MAX_UNMARKED = 1024
# What was read for prompts that have no slot yet: further reads wait, for so long.
MAX_FOUND_BYTES = 1 << 30
MAX_FOUND_SECONDS = 10.0
_POLL_SECONDS = 0.01


class Done(Protocol):
    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class Landing:
    """Bytes on their way from the device to the host, uint8 [N, bytes]; there when `done` is."""

    values: Tensor
    done: Done | None = None


@dataclass(frozen=True, eq=False)
class Found:
    """Pages of a prompt from the one with index `first` on, and a snapshot at the end of the last."""

    first: int
    pages: Tensor  # uint8 [N, page_bytes]
    snapshot: Tensor  # uint8 [bytes]

    @property
    def depth(self) -> int:
        """Pages of the prompt that can be had."""
        return self.first + self.pages.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.pages.numel() + self.snapshot.numel()


@dataclass(frozen=True)
class _File:
    key: bytes
    kind: Kind
    used_ns: int


class Shelf:
    """`snapshot_bytes` gives the size of a snapshot by its position."""

    def __init__(
        self,
        folder: PrefixFolder,
        page_tokens: int,
        page_bytes: int,
        snapshot_bytes: Callable[[int], int],
        pin_memory: bool,
    ) -> None:
        self.folder, self.page_tokens, self.page_bytes = folder, page_tokens, page_bytes
        self.num_unkept = 0  # copies that were not written because the disk was too slow
        self._snapshot_bytes, self._pin_memory = snapshot_bytes, pin_memory
        self._numbers = count()
        self._outgoing: dict[int, list[_File]] = {}
        self._incoming: dict[int, Tensor] = {}
        self._found: WeakSet[Found] = WeakSet()
        self._unwritten_bytes = self._unmarked = 0
        self._lock = Lock()
        self._writer = ThreadPoolExecutor(1, "prefix-write")
        self._reader = ThreadPoolExecutor(1, "prefix-read")

    # Out: the prefix cache expects, the runner puts.

    def expect(self, kind: Kind, keys: Sequence[bytes], used_ns: Sequence[int]) -> int:
        """The number under which the contents of these will be put."""
        number = next(self._numbers)
        self._outgoing[number] = [_File(key, kind, ns) for key, ns in zip(keys, used_ns, strict=True)]
        return number

    def put(self, number: int, landing: Landing) -> None:
        files, size = self._outgoing.pop(number), landing.values.numel()
        with self._lock:
            fits = self._unwritten_bytes + size <= MAX_UNWRITTEN_BYTES
            self._unwritten_bytes += size * fits
        if fits:
            self._writer.submit(self._write, files, landing)
        else:
            self.num_unkept += len(files)
            self._say_slow()

    def _write(self, files: list[_File], landing: Landing) -> None:
        try:
            if landing.done is not None:
                landing.done.synchronize()
            for file, row in zip(files, landing.values, strict=True):
                self.folder.write(file.key, file.kind, row.numpy().data, file.used_ns)
        except RuntimeError as error:  # the device is lost, and the engine will say so
            self.folder.say_once("copy", f"a copy did not arrive ({error}); it is not kept")
        finally:
            with self._lock:
                self._unwritten_bytes -= landing.values.numel()

    def use(self, keys: Sequence[bytes], used_ns: Sequence[int], snapshot: bytes | None) -> None:
        """These pages are used again, and a snapshot at the end of one of them."""
        with self._lock:
            fits = self._unmarked < MAX_UNMARKED
            self._unmarked += fits
        if not fits:
            return self._say_slow()

        def touch() -> None:
            for key, ns in zip(keys, used_ns, strict=True):
                self.folder.touch(key, "page", ns)
                if key == snapshot:
                    self.folder.touch(key, "snapshot", ns)
            with self._lock:
                self._unmarked -= 1

        self._writer.submit(touch)

    def _say_slow(self) -> None:
        self.folder.say_once("slow", "the disk is too slow to keep everything; what it misses is not kept")

    # In: found for a prompt, offered when it has a slot, taken by the runner.

    def find(self, owner: str, ids: Sequence[int], known: int, saved: int) -> "Future[Found | None]":
        """What the folder has of a prompt beyond its `known` pages, or `saved` pages with a snapshot."""
        return self._reader.submit(self._find, owner, tuple(ids), known, saved)

    def _find(self, owner: str, ids: tuple[int, ...], known: int, saved: int) -> Found | None:
        try:
            return self._read(self._keys(owner, ids), known, saved)
        except (RuntimeError, MemoryError) as error:  # no memory, or none that can be pinned
            self.folder.say_once("memory", f"what was found could not be read ({error}); it counts as a miss")
            return None

    def _keys(self, owner: str, ids: tuple[int, ...]) -> list[bytes]:
        keys, key, size = [], self.folder.root(owner), self.page_tokens
        for start in range(0, (len(ids) - 1) // size * size, size):
            key = chain(key, ids[start : start + size])
            keys.append(key)
        return keys

    def _read(self, keys: list[bytes], known: int, saved: int) -> Found | None:
        depth = known
        while depth < len(keys) and self.folder.has(keys[depth], "page"):
            depth += 1
        while depth > saved:
            if self.folder.has(keys[depth - 1], "snapshot"):
                first = min(known, depth)
                found = self._make_found(first, depth)
                whole = self._read_pages(keys[first:depth], found.pages)
                if first + whole < depth:
                    depth = first + whole
                    continue
                if self.folder.read(keys[depth - 1], "snapshot", found.snapshot.numpy().data):
                    return found
            depth -= 1
        return None

    def _make_found(self, first: int, depth: int) -> Found:
        snapshot = self._snapshot_bytes(depth * self.page_tokens)
        need = (depth - first) * self.page_bytes + snapshot
        end = time.monotonic() + MAX_FOUND_SECONDS
        while (held := sum(found.num_bytes for found in list(self._found))) and held + need > MAX_FOUND_BYTES:
            if time.monotonic() > end:
                raise MemoryError(f"{held} bytes of others wait for slots")
            time.sleep(_POLL_SECONDS)
        pages = torch.empty(depth - first, self.page_bytes, dtype=torch.uint8, pin_memory=self._pin_memory)
        found = Found(first, pages, torch.empty(snapshot, dtype=torch.uint8, pin_memory=self._pin_memory))
        self._found.add(found)
        return found

    def _read_pages(self, keys: list[bytes], target: Tensor) -> int:
        """How many of them, from the first on, are whole."""
        for at, (key, row) in enumerate(zip(keys, target, strict=True)):
            if not self.folder.read(key, "page", row.numpy().data):
                return at
        return len(keys)

    def offer(self, values: Tensor) -> int:
        number = next(self._numbers)
        self._incoming[number] = values
        return number

    def take(self, number: int) -> Tensor:
        return self._incoming.pop(number)

    def clear(self) -> None:
        """Forget what no plan will name any more. What was put is written nevertheless."""
        self._outgoing.clear()
        self._incoming.clear()

    def flush(self) -> None:
        """Until all that was put is written."""
        self._writer.submit(lambda: None).result()
