"""The local cache of the Hugging Face hub, in the layout that all its programs share.

models--OWNER--NAME/ holds blobs/HASH (contents), snapshots/COMMIT/FILE (links to them) and refs/REVISION (the
commit that a branch or tag is at).
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from dsv4 import disk, env
from dsv4.errors import ConfigError
from dsv4.weights.reader import INDEX

_COMMIT = re.compile(r"[0-9a-f]{40}")


def folder_of(repository: str) -> Path:
    return env.hub_cache() / f"models--{repository.replace('/', '--')}"


def snapshot(repository: str, revision: str) -> Path | None:
    """The folder of a revision (branch, tag or commit), None if nothing of it is here."""
    root = folder_of(repository)
    commit = revision
    if not _COMMIT.fullmatch(revision):
        try:
            commit = (root / "refs" / revision).read_text(encoding="utf-8").strip()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError):
            return None
        if not _COMMIT.fullmatch(commit):
            return None
    folder = root / "snapshots" / commit
    return folder if folder.is_dir() else None


def title(folder: Path) -> str:
    """What a model folder is called: its name; a snapshot, which is named by its commit: its repository's."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        return folder.parents[1].name.rpartition("--")[2]
    return folder.name


def snapshots() -> Iterator[tuple[str, str, Path]]:
    """(repository, revision, folder) of every branch and tag of the cache."""
    root = env.hub_cache()
    for folder in sorted(root.glob("models--*--*")) if root.is_dir() else ():
        repository = folder.name.removeprefix("models--").replace("--", "/", 1)
        refs = folder / "refs"
        for ref in sorted(path for path in refs.rglob("*") if path.is_file()):
            revision = str(ref.relative_to(refs))
            if (found := snapshot(repository, revision)) is not None:
                yield repository, revision, found


def shards(folder: Path) -> list[str]:
    """The weight files that a model folder should have: those of its index, else the single one or all."""
    try:
        index = json.loads((folder / INDEX).read_bytes())["weight_map"]
        return sorted({str(name) for name in index.values()})
    except FileNotFoundError:
        found = sorted(path.name for path in folder.glob("model*.safetensors"))
        return found or ["model.safetensors"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []  # the reader says what is wrong with it


def missing_files(folder: Path) -> list[str]:
    return [name for name in ("config.json", *shards(folder)) if not (folder / name).exists()]


def link(repository: str, commit: str, name: str, blob: str) -> None:
    """Show a blob as a file of a commit."""
    path = folder_of(repository) / "snapshots" / commit / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return
    try:
        # Whole, since another process may do the same; also in place of a link to a blob that was removed.
        with disk.whole(path, synced=False) as part:
            part.symlink_to(Path("..", "..", "blobs", blob))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be a symbolic link ({error.strerror}), which the hub cache is made of; "
            "give dsv4 pull a FOLDER, or set HF_HUB_CACHE to another disk"
        ) from None


def set_revision(repository: str, revision: str, commit: str) -> None:
    """Remember the commit that a branch or tag is at."""
    if revision != commit:
        path = folder_of(repository) / "refs" / revision
        path.parent.mkdir(parents=True, exist_ok=True)
        with disk.result(path) as part:
            part.write_text(commit, encoding="utf-8")
