"""How often each expert was chosen, kept per model between runs. Counts alone: no text, no order, no time.

A file is whole or not there. One that is damaged, or another model's, is ignored with a sentence.
"""

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor

from dsv4 import disk, identity
from dsv4.env import cache_folder
from dsv4.errors import ConfigError
from dsv4.weights.load import Checkpoint

Counts = list[list[float]]
# New counts are added to what is left of the earlier ones: half of them after so many choices of a layer.
HALF_LIFE = 6_000_000
EVERY = 1024  # decode steps from one look at the device's counts to the next
_VERSION = 1


def checksum(checkpoint: Checkpoint) -> str:
    """Of a model's sizes and of the first bytes of every router: which model it is, however it is stored."""
    digest = hashlib.sha256(json.dumps(checkpoint.config.to_dict(), sort_keys=True).encode())
    for source in checkpoint.inventory.sources:
        if source.param.name.endswith(".gate"):
            entry = source.weight
            with entry.file.open("rb") as file:
                file.seek(entry.start)
                digest.update(file.read(min(entry.num_bytes, 4096)))
    return digest.hexdigest()[:32]


def counts_path(model: str) -> Path:
    return cache_folder() / "experts" / f"{model}.json"


def write_counts(path: Path, model: str, counts: Counts) -> None:
    """Atomically: a process that is killed leaves the old file or the new one."""
    body = {
        "version": _VERSION,
        "model": model,
        "counts": counts,
        "digest": identity.digest(counts),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk.whole(path) as part:
        part.write_text(json.dumps(body))


def read_counts(path: Path, model: str | None = None) -> Counts:
    """The counts of a file; a ConfigError says what is wrong with it."""
    try:
        body = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is damaged: no JSON; delete it") from None
    counts = body.get("counts") if isinstance(body, dict) else None
    if (
        not isinstance(counts, list)
        or body.get("version") != _VERSION
        or body.get("digest") != identity.digest(counts)
    ):
        raise ConfigError(f"{path} is damaged, or of another version of dsv4; delete it")
    if model is not None and body.get("model") != model:
        raise ConfigError(f"{path} counts the experts of another model; delete it")
    return counts


def known_counts(model: str, layers: int, experts: int) -> tuple[Counts | None, str | None]:
    """What was recorded of this model, None without; and why a file was ignored."""
    path = counts_path(model)
    if not path.exists():
        return None, None
    try:
        counts = read_counts(path, model)
    except ConfigError as error:
        return None, f"{error}; experts are placed without it"
    if len(counts) != layers or any(len(row) != experts for row in counts):
        return (
            None,
            f"{path} has other numbers of layers or experts than the model; experts are placed without it",
        )
    return counts, None


def merged(before: Counts | None, new: Counts) -> Counts:
    """The old counts, decayed by as many choices as are new, and the new ones."""
    if before is None:
        return new
    left = 0.5 ** (sum(new[0]) / HALF_LIFE)
    return [[left * a + b for a, b in zip(*rows, strict=True)] for rows in zip(before, new, strict=True)]


def coverage(counts: Counts, resident: int) -> float:
    """The share of choices that the `resident` most frequent experts of all layers cover."""
    ranked = sorted((count for row in counts for count in row), reverse=True)
    return sum(ranked[:resident]) / max(sum(ranked), 1e-9)


class Recorder:
    """Brings the device's counts to the model's file now and then. Nothing waits: a copy is looked at when it
    has arrived, and a thread writes the file."""

    def __init__(self, counts: Tensor, model: str | None, note: Callable[[Tensor], None]) -> None:
        """counts: int32 [layers, experts] on a GPU, which decode steps add to. `note` is told of new ones."""
        self._note = note
        self.model, self._counts = model, counts
        self._seen = torch.zeros(counts.shape, dtype=torch.int64)
        self._landed = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=counts.is_cuda)
        self._done: torch.cuda.Event | None = None
        self._steps = 0
        self._writer: Thread | None = None

    def step(self) -> None:
        """After each decode step, on its stream."""
        self._steps += 1
        if self._done is None and self._steps % EVERY == 0:
            self._landed.copy_(self._counts, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        elif self._done is not None and self._done.query():
            self._done = None
            self._write()

    def _write(self) -> None:
        if self._writer is not None and self._writer.is_alive():
            return  # the next copy has these choices too
        now = self._landed.long()
        new = (now - self._seen) % (1 << 32)  # the device's numbers wrap around
        self._seen = now
        self._note(new)
        if self.model is None:
            return
        self._writer = Thread(target=save_counts, args=(self.model, new.tolist()), daemon=True)
        self._writer.start()


def save_counts(model: str, new: list[list[int]]) -> None:
    """Add a run's choices to what the model's file has; one that cannot be used is replaced."""
    path = counts_path(model)
    try:
        with _alone_in(path.parent):
            counts, _ = known_counts(model, len(new), len(new[0]))
            write_counts(path, model, merged(counts, [list(map(float, row)) for row in new]))
    except OSError as error:
        logging.getLogger(__name__).warning("choices of experts could not be kept: %s", error)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Processes that add to a file there do it one after the other; a lock ends with the one that has it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
