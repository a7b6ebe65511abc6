"""Lists the models of this machine: where they lie, how they are stored, whether they fit."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.config import ModelConfig
from dsv4.device import available_memory, gpu_memory
from dsv4.errors import Dsv4Error
from dsv4.hub import cache
from dsv4.hub.names import short_name
from dsv4.models import embedded
from dsv4.weights.detect import storage_of
from dsv4.weights.reader import INDEX, Entry, read_header

# Left to the cache, the workspace and the driver, as a rule of thumb; dsv4 plan computes it.
_BESIDE_BYTES = 4 << 30
_FIRST_EXPERT = re.compile(r"(?:model\.)?layers\.0\..*experts\b(?:\.0\.|\.[a-z])|.*layers\.0\..*\bwq_a\.")


@dataclass(frozen=True)
class Here:
    """A model on this machine. `problem`: why it cannot be used, "" if nothing is known against it."""

    name: str
    revision: str
    folder: Path
    storage: str = ""
    num_bytes: int = 0
    draft: str = ""
    fits: str = ""
    problem: str = ""


def models(folder: Path | None = None) -> Iterator[Here]:
    """The embedded model, those of the hub cache, and those directly in a folder."""
    room = Room.find()
    yield _describe("embedded", "", embedded(), room)
    for repository, revision, found in cache.snapshots():
        if is_model(found):
            yield _describe(short_name(repository), revision, found, room)
    for path in sorted(folder.iterdir()) if folder is not None else ():
        if is_model(path):
            yield _describe(path.name, "", path, room)


def is_model(folder: Path) -> bool:
    """Whether its config names this engine's kind of model; the cache holds others too."""
    with suppress(OSError, ValueError, RecursionError):
        config = json.loads((folder / "config.json").read_bytes())
        return isinstance(config, dict) and config.get("model_type") == "deepseek_v4"
    return False


def _describe(name: str, revision: str, folder: Path, room: "Room") -> Here:
    files = cache.shards(folder)
    num_bytes = sum(path.stat().st_size for file in files if (path := folder / file).exists())
    here = Here(name, revision, folder, num_bytes=num_bytes)
    if missing := cache.missing_files(folder):
        return _replace(here, problem=f"{len(missing)} files are missing: dsv4 pull {name}")
    try:
        config = ModelConfig.load(folder)
        entries = _first_entries(folder, files)
        names = _names(folder) or entries.keys()
        storage = storage_of(entries, config)
    except Dsv4Error as error:
        return _replace(here, problem=str(error))
    has_draft = any(key.startswith("mtp.0.") for key in names)
    draft = "DSpark" if config.dspark else "yes" if has_draft else "no"
    return _replace(here, storage=storage, draft=draft, fits=room.verdict(num_bytes))


def _replace(here: Here, **changes: Any) -> Here:
    return Here(**{**vars(here), **changes})


def _names(folder: Path) -> list[str]:
    """All tensors by name, [] without an index."""
    try:
        return list(json.loads((folder / INDEX).read_bytes())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _first_entries(folder: Path, files: list[str]) -> dict[str, Entry]:
    """The tensors of the files that hold the first layer's first expert and attention."""
    names = _names(folder)
    if names:
        index = json.loads((folder / INDEX).read_bytes())["weight_map"]
        files = sorted({index[name] for name in names if _FIRST_EXPERT.match(name)}) or files[:1]
    entries: dict[str, Entry] = {}
    for file in files:
        entries |= read_header(folder / file)
    return entries


@dataclass(frozen=True)
class Room:
    """`gpus`: bytes of memory of each, not all of them free."""

    gpus: tuple[int, ...]
    host: int

    @classmethod
    def find(cls) -> "Room":
        return cls(tuple(memory.total for memory in gpu_memory()), available_memory())

    def verdict(self, num_bytes: int) -> str:
        needed = num_bytes + _BESIDE_BYTES
        for count in (1, 2, 4, 8):
            if count <= len(self.gpus) and needed <= sum(self.gpus[:count]) - (count - 1) * _BESIDE_BYTES:
                return "on 1 GPU" if count == 1 else f"on {count} GPUs"
        if self.gpus and needed <= self.gpus[0] + self.host:
            return "with experts in host memory"
        if needed <= self.host:
            return "on the CPU"
        return "no"
