"""The target folder: claimed, locked, filled shard by shard, and picked up again after any interruption.

Unfinished work lies in a folder of its own inside the target; a file gets its final name only when it is
complete and on disk, and config.json comes last, so that an unfinished folder is never taken for a model.
"""

import fcntl
import json
import os
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

from dsv4 import disk
from dsv4.errors import CheckpointError, ConfigError

WORK = ".dsv4-quantize"
RECORD = "dsv4-quantize.json"
_JOB = "job.json"
# Larger writes cost the kernel five times as much per byte (docs/log.md).
WRITE_BYTES = 1 << 20
_AGAIN = "run the same command again to continue"

State = Literal["new", "resumed", "done"]


def examine(folder: Path, fingerprint: str) -> State:
    """What the folder is to a run with that fingerprint; refuses content of other origin. Changes nothing."""
    try:
        if not os.path.lexists(folder):
            _check_parent(folder)
            return "new"
        if not folder.is_dir():
            raise ConfigError(f"{folder} is a file; give a new folder")
        if (folder / "config.json").exists() and _fingerprint(folder / RECORD) == fingerprint:
            return "done"
        unfinished = _fingerprint(folder / WORK / _JOB)
        if unfinished == fingerprint:
            return "resumed"
        if unfinished is not None:
            raise ConfigError(
                f"{folder} holds an unfinished run with other options or another source; finish that one, "
                "remove the folder, or give a new one"
            )
        if any(path.name != WORK for path in folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; give a new folder")
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"{folder} cannot be written to; give a folder that can")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used: {error.strerror or error}; give a new folder") from None
    return "new"


def _check_parent(folder: Path) -> None:
    parent = next(path for path in folder.absolute().parents if os.path.lexists(path))
    if not parent.is_dir():
        raise ConfigError(f"{folder} cannot be made: {parent} is not a folder; give a new folder")
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"{folder} cannot be made: {parent} cannot be written to; give another folder")


def _fingerprint(path: Path) -> str | None:
    """Of a record or an unfinished job; None where there is none."""
    try:
        return json.loads(path.read_bytes())["fingerprint"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return "unreadable"


class Job:
    """A claimed folder. Use as a context: what is not finished at the end is left for the next run."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder, self.work, self.fingerprint = folder, folder / WORK, fingerprint
        self._lock: BinaryIO | None = None
        self._made = not folder.exists()

    def __enter__(self) -> "Job":
        try:
            while self._lock is None:
                self.work.mkdir(parents=True, exist_ok=True)
                lock = (self.work / "lock").open("wb")
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A run that ends removes the lock, which others may have opened just before.
                if os.fstat(lock.fileno()).st_nlink:
                    self._lock = lock
        except BlockingIOError:
            raise ConfigError(
                f"another run is writing {self.folder}; wait for it or give a new folder"
            ) from None
        except OSError as error:
            self._remove_if_empty()
            raise ConfigError(
                f"{self.folder} cannot be made: {error.strerror or error}; give a new folder"
            ) from None
        try:
            self._remove_parts()
            self.put(Path(WORK) / _JOB, json.dumps({"fingerprint": self.fingerprint}).encode())
        except CheckpointError as error:
            self.__exit__(error)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        # After an error on a disk that takes no more changes, that error is the one to tell.
        with suppress(OSError) if error[0] is not None else nullcontext():
            self._remove_parts()
            if error[0] is not None and self.work.is_dir() and not self.finished():
                shutil.rmtree(self.work)
                self._remove_if_empty()
        if self._lock:
            self._lock.close()

    def _remove_parts(self) -> None:
        for part in self.work.glob("*.part"):
            part.unlink(missing_ok=True)

    def _remove_if_empty(self) -> None:
        if self._made and self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def finished(self) -> list[str]:
        """Names of the shards that are complete, each with its statistics."""
        names = (path.name.removesuffix(".json") for path in self.work.glob("*.safetensors.json"))
        return sorted(name for name in names if (self.folder / name).exists())

    def statistics(self, shard: str) -> Any:
        return json.loads((self.work / f"{shard}.json").read_bytes())

    def put(self, name: Path | str, content: bytes) -> None:
        """A small file under its final name, complete or not at all."""
        target = self.folder / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with disk.whole(target, within=self.work) as part:
                part.write_bytes(content)
        except OSError as error:
            raise self.failed(target, error) from None

    def failed(self, path: Path, error: OSError) -> CheckpointError:
        done = len(self.finished())
        hope = f"; {done} shard(s) are finished: make room and {_AGAIN}" if done else ""
        return CheckpointError(f"{path} cannot be written: {error.strerror or error}{hope}")

    def complete(self, record: Any, small: dict[str, bytes], config: bytes) -> None:
        """Write everything but the shards, config.json last, and clear away the working folder."""
        for name, content in small.items():
            self.put(name, content)
        self.put(RECORD, json.dumps({"fingerprint": self.fingerprint, **record}).encode())
        self.put("config.json", config)
        disk.sync(self.folder)
        shutil.rmtree(self.work)


class Part:
    """A shard being written, by several threads at any offsets."""

    def __init__(self, job: Job, shard: str, size: int) -> None:
        self.job, self.shard = job, shard
        self.path, self.target = job.work / f"{shard}.part", job.folder / shard
        try:
            self.file = self.path.open("wb", buffering=0)
            os.truncate(self.file.fileno(), size)
        except OSError as error:
            raise job.failed(self.target, error) from None

    def write(self, offset: int, content: Any) -> None:
        view = memoryview(content).cast("B")
        done = 0
        try:
            while done < len(view):
                piece = view[done : done + WRITE_BYTES]
                done += os.pwrite(self.file.fileno(), piece, offset + done)
        except OSError as error:
            raise self.job.failed(self.target, error) from None

    def finish(self, statistics: Any) -> None:
        """On disk, with its statistics, then under its final name."""
        try:
            os.fsync(self.file.fileno())
            self.file.close()
            self.job.put(Path(WORK) / f"{self.shard}.json", json.dumps(statistics).encode())
            self.path.replace(self.target)
            disk.sync(self.job.folder)
        except OSError as error:
            raise self.job.failed(self.target, error) from None
