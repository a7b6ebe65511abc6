"""Pages and snapshots as files: names, checksums, and a limit in bytes. Knows bytes, not what they mean.

A file has its place by what it depends on: a folder for the model and all that changes bits (`identity`), a
name from the owner and all tokens up to its end, hashed. It appears whole, by a rename, or not at all.
Nothing is kept in memory, so several processes can share a folder; what one removes is a miss for the others.
"""

import errno
import hashlib
import os
import re
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsv4 import disk
from dsv4.errors import ConfigError

Kind = Literal["page", "snapshot"]

MAGIC = b"dsv4pfx1"  # the last character is the version of this form
DIGEST_BYTES = 32
HEADER_BYTES = len(MAGIC) + DIGEST_BYTES
# What a process that was killed has left of a file is removed when nobody can still be writing it.
STALE_SECONDS = 600.0
# After a write that failed (a full disk), none is tried for so long.
PAUSE_SECONDS = 10.0
_FOLDER = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(r"[0-9a-f]{64}\.(page|snapshot)")
_UNFINISHED = re.compile(r"\.[0-9a-f]{32}\.part")


def chain(parent: bytes, ids: Sequence[int]) -> bytes:
    """The key of a page with these tokens after the page (or root) of `parent`."""
    return hashlib.blake2b(array("Q", ids).tobytes(), key=parent, digest_size=DIGEST_BYTES).digest()


def why_unusable(folder: Path) -> str:
    """What keeps this user from having files there; empty: nothing does."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(folder, os.R_OK | os.W_OK | os.X_OK) else "no permission to write"


@dataclass(frozen=True)
class _Found:
    """One of our files: its time of use, size and path."""

    used_ns: int
    num_bytes: int
    path: str


class PrefixFolder:
    """`say` is told what an operator should know; every sort of thing once."""

    def __init__(self, folder: Path, identity: str, max_bytes: int, say: Callable[[str], object]) -> None:
        assert _FOLDER.fullmatch(identity), identity
        self.folder, self.max_bytes = folder, max_bytes
        self._own = folder / identity
        self._say, self._said = say, set[str]()
        self._unchecked = max_bytes  # bytes written since the folder was last measured
        self._paused_until = 0.0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._own.mkdir(mode=0o700, exist_ok=True)
            if not os.access(self._own, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "no permission to write")
            self._survey()
        except OSError as error:
            raise ConfigError(
                f"prefix_dir {str(folder)!r} cannot be used ({error.strerror or error}); "
                "give a folder that this user can write to"
            ) from None

    def root(self, owner: str) -> bytes:
        """The key that an owner's first pages follow."""
        return hashlib.blake2b(owner.encode(), digest_size=DIGEST_BYTES).digest()

    def path(self, key: bytes, kind: Kind) -> Path:
        return self._own / f"{key.hex()}.{kind}"

    def has(self, key: bytes, kind: Kind) -> bool:
        path = self.path(key, kind)
        try:
            path.stat()
        except FileNotFoundError:
            return False
        except OSError as error:  # a disk that fails, a server of files that is gone
            self._miss(path, error)
            return False
        return True

    def _miss(self, path: Path, error: OSError) -> None:
        why = error.strerror or error
        self.say_once("read", f"{path.name} cannot be read ({why}); it counts as a miss")

    def read(self, key: bytes, kind: Kind, target: memoryview) -> bool:
        """Fill the target with the file's bytes; False where it is not there, or not whole and ours."""
        path, header = self.path(key, kind), bytearray(HEADER_BYTES)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                got = os.preadv(file, [header, target], 0)
                while 0 < got < HEADER_BYTES + len(target):
                    more = os.preadv(file, [target[max(0, got - HEADER_BYTES) :]], got)
                    if not more:
                        break
                    got += more
                size = os.fstat(file).st_size
            finally:
                os.close(file)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._miss(path, error)
            return False
        want = HEADER_BYTES + len(target)
        if header[: len(MAGIC)] != MAGIC:
            found = bytes(header[: len(MAGIC)])
            why = f"begins with {found!r}, expected {MAGIC!r}: it is of another version, or foreign"
        elif size != want or got != want:
            why = f"has {size} bytes, expected {want}"
        elif header[len(MAGIC) :] != _digest(key, kind, target):
            why = "does not match its checksum"
        else:
            return True
        self.say_once(
            "damage", f"{path.name} {why}; it is removed, counts as a miss, and is not the last one to"
        )
        with suppress(OSError):
            path.unlink()
        return False

    def write(self, key: bytes, kind: Kind, data: memoryview, used_ns: int) -> None:
        """The file appears whole, or not at all; one that is there only counts as used."""
        if self.touch(key, kind, used_ns) or time.monotonic() < self._paused_until:
            return
        size = HEADER_BYTES + len(data)
        try:
            self._make_room(size)
            self._own.mkdir(mode=0o700, exist_ok=True)
            # Not synced: after a power cut, a file's checksum shows that bytes are missing.
            with disk.whole(self.path(key, kind), synced=False) as unfinished:
                file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                try:
                    for part in (memoryview(MAGIC + _digest(key, kind, data)), data):
                        while part:
                            part = part[os.write(file, part) :]
                    os.utime(file, ns=(used_ns, used_ns))
                finally:
                    os.close(file)
        except OSError as error:
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            self.say_once(
                "write", f"cannot be written ({error.strerror or error}); what cannot be is not kept"
            )

    def touch(self, key: bytes, kind: Kind, used_ns: int) -> bool:
        """Whether the file is there, which is used now."""
        try:
            os.utime(self.path(key, kind), ns=(used_ns, used_ns))
        except OSError:  # gone, or not to be touched: then it is older than it could be
            return False
        return True

    def _make_room(self, num_bytes: int) -> None:
        """Each process measures the folder before it has written 1/32 of the limit, and leaves 1/16 free."""
        self._unchecked += num_bytes
        if self._unchecked <= self.max_bytes // 32:
            return
        limit = self.max_bytes - self.max_bytes // 16
        if num_bytes > limit:
            raise OSError(errno.ENOSPC, f"a file of {num_bytes} bytes, the limit is {self.max_bytes}")
        found = sorted(self._all(), key=lambda file: file.used_ns)
        excess = sum(file.num_bytes for file in found) + num_bytes - limit
        for file in found:
            if excess <= 0:
                break
            with suppress(FileNotFoundError):
                os.unlink(file.path)
            excess -= file.num_bytes
        self._unchecked = num_bytes

    def _all(self) -> list[_Found]:
        """Our files of every identity. What does not look like ours is never counted and never removed."""
        out: list[_Found] = []
        for folder in os.scandir(self.folder):
            if not _FOLDER.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder.path):
                with suppress(FileNotFoundError):
                    is_unfinished = bool(_UNFINISHED.fullmatch(entry.name))
                    if not is_unfinished and not _FILE.fullmatch(entry.name):
                        continue
                    stat = entry.stat(follow_symlinks=False)
                    if is_unfinished and time.time() - stat.st_mtime > STALE_SECONDS:
                        os.unlink(entry.path)
                    else:
                        out.append(_Found(stat.st_mtime_ns, stat.st_size, entry.path))
        return out

    def _survey(self) -> None:
        found = self._all()
        others = [file for file in found if Path(file.path).parent != self._own]
        if others:
            used = sum(file.num_bytes for file in others) / 1e6
            self.say_once(
                "others",
                f"{len(others)} files ({used:.1f} MB) are of another model, version or setting: they are not "
                "used, and go first when room is needed and they are the oldest",
            )
        if os.stat(self.folder).st_mode & 0o077:
            self.say_once("open", "other users can list the folder; chmod 700 it (the files are private)")

    def say_once(self, sort: str, what: str) -> None:
        if sort not in self._said:
            self._said.add(sort)
            self._say(f"prefix_dir {self.folder}: {what}")


def _digest(key: bytes, kind: Kind, data: memoryview) -> bytes:
    """Of the contents in their place: a file under another's name does not pass for it."""
    return hashlib.blake2b(data, key=key, person=kind.encode(), digest_size=DIGEST_BYTES).digest()
