"""Fetches one file: continues an earlier run, hashes every byte, shows the file when it is complete."""

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from dsv4 import disk
from dsv4.errors import CheckpointError, ConfigError
from dsv4.hub.client import Hub, Listing, RemoteFile, Stopped, Transient

_PIECE = 1 << 20

Count = Callable[[int], object]  # bytes that came, or were lost


def hash_file(file: RemoteFile, path: Path) -> str:
    """The hash of a local file, of the kind that the hub lists for `file`."""
    digest = _digest(file)
    with path.open("rb") as source:
        _feed(digest, source)
    return digest.hexdigest()


def _digest(file: RemoteFile) -> Any:
    return hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % file.num_bytes)


def _feed(digest: Any, source: BinaryIO) -> None:
    while piece := source.read(_PIECE):
        digest.update(piece)


class Transfer:
    """One file on its way into `part`, which keeps what has come across runs."""

    def __init__(
        self, hub: Hub, repository: str, listing: Listing, file: RemoteFile, part: Path, count: Count
    ) -> None:
        self._hub, self._file, self._part, self._count = hub, file, part, count
        self._from = (repository, listing.commit, file.name)
        self._done = 0
        self._digest = _digest(file)

    def fetch(self, target: Path) -> None:
        """Make `target`, complete and with the right hash, or leave `part` for the next run."""
        try:
            self._fetch(target)
        except OSError as error:  # of the end too, where the rest of what was written goes out
            raise _unwritable(self._part, error) from None

    def _fetch(self, target: Path) -> None:
        self._part.parent.mkdir(parents=True, exist_ok=True)
        with self._part.open("a+b") as out:
            self._lock(out)
            out.seek(0)
            _feed(self._digest, out)
            self._done = out.tell()
            self._count(self._done)
            if self._done > self._file.num_bytes:
                self._start_over(out)
            if self._done < self._file.num_bytes:
                self._hub.persist(lambda: self._go_on(out))
            out.flush()
            if (found := self._digest.hexdigest()) != self._file.hash:
                self._start_over(out)
                raise CheckpointError(
                    f"{self._file.name} arrived with hash {found[:12]}, expected {self._file.hash[:12]}; it "
                    "was removed: run the same command again"
                )
            os.fsync(out.fileno())
            self._part.replace(target)
        disk.sync(target.parent)

    def _lock(self, out: BinaryIO) -> None:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self._file.name} is being fetched by another process; wait for it, or end it"
            ) from None
        # Between open and lock the other process may have finished, and renamed what was opened here.
        if not self._part.exists() or os.fstat(out.fileno()).st_ino != self._part.stat().st_ino:
            raise ConfigError(f"{self._file.name} was just fetched by another process; run this again")

    def _start_over(self, out: BinaryIO) -> None:
        out.truncate(0)
        self._count(-self._done)
        self._done, self._digest = 0, _digest(self._file)

    def _go_on(self, out: BinaryIO) -> bool:
        """One answer's worth of bytes; True when the file is complete."""
        before = self._done
        try:
            with self._hub.read(*self._from, self._done) as response:
                self._check_start(response, out)
                for piece in response.iter_raw():
                    if self._hub.stop.is_set():
                        raise Stopped
                    self._take(out, piece)
        except Transient:
            if self._done > before:
                return False
            raise
        if self._done == before:
            raise Transient(f"the hub sent nothing more of {self._file.name}")
        return self._done == self._file.num_bytes

    def _check_start(self, response: Any, out: BinaryIO) -> None:
        if not self._done:
            return
        if response.status_code == 200:  # the server knows no ranges
            self._start_over(out)
            return
        found = response.headers.get("content-range", "")
        if not found.startswith(f"bytes {self._done}-"):
            raise CheckpointError(
                f"{self._file.name}: the hub sent the range {found!r}, expected one from {self._done}; "
                "check any proxy between here and there"
            )

    def _take(self, out: BinaryIO, piece: bytes) -> None:
        if self._done + len(piece) > self._file.num_bytes:
            self._start_over(out)
            raise CheckpointError(
                f"{self._file.name} is longer than the {self._file.num_bytes:,} bytes that the hub lists; "
                "check any proxy between here and there, and run the same command again"
            )
        out.write(piece)
        out.flush()
        self._digest.update(piece)
        self._done += len(piece)
        self._count(len(piece))


def _unwritable(part: Path, error: OSError) -> ConfigError:
    reason = error.strerror or str(error)
    todo = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "see to it"
    return ConfigError(
        f"{part.parent} cannot be written to ({reason}); {todo} and run the same command again, which "
        "continues here"
    )
