"""Fetches a model: its config first, then its weights, several files at once."""

import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError, ConfigError
from dsv4.hub import cache
from dsv4.hub.client import Hub, Listing, RemoteFile, Say
from dsv4.hub.fetch import Transfer, hash_file
from dsv4.hub.names import Name
from dsv4.weights.detect import read_headers

_WANTED = re.compile(r"[^/]+\.safetensors|[^/]+\.json|tokenizer[^/]*", re.IGNORECASE)
_AT_ONCE = 8
# A file system needs some space beside the files.
_SPARE_BYTES = 64 << 20

Progress = Callable[[int, int], object]  # bytes here, bytes in all


@dataclass(frozen=True)
class Pulled:
    """`fetched_bytes`: of `num_bytes` those that came now."""

    repository: str
    commit: str
    folder: Path
    num_files: int
    num_bytes: int
    fetched_bytes: int
    notes: tuple[str, ...]


class _InCache:
    """Files lie under their hashes, and snapshots link to them."""

    def __init__(self, name: Name, listing: Listing) -> None:
        self._name, self._commit = name, listing.commit
        self._root = cache.folder_of(name.repository)
        self.folder = self._root / "snapshots" / listing.commit

    def target(self, file: RemoteFile) -> Path:
        return self._root / "blobs" / file.hash

    def part(self, file: RemoteFile) -> Path:
        return self._root / "blobs" / f"{file.hash}.incomplete"

    def show(self, file: RemoteFile) -> None:
        cache.link(self._name.repository, self._commit, file.name, file.hash)

    def finish(self) -> None:
        cache.set_revision(self._name.repository, self._name.revision, self._commit)


class _InFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def target(self, file: RemoteFile) -> Path:
        return self.folder / file.name

    def part(self, file: RemoteFile) -> Path:
        return self.folder / f".{file.name}.{file.hash[:16]}.incomplete"

    def show(self, file: RemoteFile) -> None:
        pass

    def finish(self) -> None:
        pass


def pull(name: Name, folder: Path | None, verify: bool, notify: Say, progress: Progress) -> Pulled:
    """Bring a model into the hub cache, or a folder. `verify`: hash weights that were here before, too."""
    hub = Hub(notify)
    if hub.is_offline:
        return _offline(name, folder)
    listing = hub.list(name.repository, name.revision)
    files = [file for file in listing.files if _WANTED.fullmatch(file.name)]
    if not any(file.name == "config.json" for file in files):
        raise CheckpointError(f"{name.repository} holds no config.json; it is not a model in safetensors")
    place = _InCache(name, listing) if folder is None else _InFolder(folder)
    return _Pull(hub, name, listing, files, place, progress).run(verify)


def _offline(name: Name, folder: Path | None) -> Pulled:
    here = cache.snapshot(name.repository, name.revision) if folder is None else folder
    if here is None or cache.missing_files(here):
        raise ConfigError(f"{name.text} is not here, and HF_HUB_OFFLINE is set; unset it to fetch the model")
    sizes = [path.stat().st_size for path in here.iterdir() if _WANTED.fullmatch(path.name)]
    return Pulled(
        repository=name.repository,
        commit=here.name if folder is None else "",
        folder=here,
        num_files=len(sizes),
        num_bytes=sum(sizes),
        fetched_bytes=0,
        notes=("HF_HUB_OFFLINE is set: the hub was not asked whether there is a newer one",),
    )


class _Pull:
    def __init__(
        self,
        hub: Hub,
        name: Name,
        listing: Listing,
        files: list[RemoteFile],
        place: _InCache | _InFolder,
        progress: Progress,
    ) -> None:
        self._hub, self._name, self._listing, self._place = hub, name, listing, place
        self._small = [file for file in files if not file.name.endswith(".safetensors")]
        self._weights = [file for file in files if file.name.endswith(".safetensors")]
        self._total = sum(file.num_bytes for file in files)
        self._progress, self._lock = progress, threading.Lock()
        self._here = self._before = 0

    def run(self, verify: bool) -> Pulled:
        files = [*self._small, *self._weights]
        here = [file for file in files if self._is_here(file, verify or file in self._small)]
        parts = {file.name: _size(self._place.part(file)) or 0 for file in files if file not in here}
        self._check_space([file for file in files if file not in here], sum(parts.values()))
        self._before = sum(file.num_bytes for file in here) + sum(parts.values())
        self._count(sum(file.num_bytes for file in here))
        for file in here:
            self._place.show(file)
        for file in self._small:
            if file not in here:
                self._fetch(file)
        ModelConfig.load(self._place.folder)  # refused before its weights are fetched
        self._fetch_all([file for file in self._weights if file not in here])
        for file in files:
            if _size(self._place.target(file)) != file.num_bytes:
                raise CheckpointError(
                    f"{self._place.target(file)} changed meanwhile; run the same command again"
                )
        self._place.finish()
        _, _, inventory = read_headers(self._place.folder)
        return Pulled(
            repository=self._name.repository,
            commit=self._listing.commit,
            folder=self._place.folder,
            num_files=len(files),
            num_bytes=self._total,
            fetched_bytes=self._total - self._before,
            notes=inventory.notes,
        )

    def _is_here(self, file: RemoteFile, hashed: bool) -> bool:
        target = self._place.target(file)
        size = _size(target)
        if size is None:
            return False
        if size != file.num_bytes or (hashed and hash_file(file, target) != file.hash):
            raise ConfigError(
                f"{target} is not {file.name} of {self._name.repository}@{self._listing.commit[:12]}; "
                "delete it, or give another folder"
            )
        return True

    def _check_space(self, files: list[RemoteFile], partly: int) -> None:
        needed = sum(file.num_bytes for file in files) - partly
        folder = self._place.target(self._small[0]).absolute().parent
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if needed and needed + _SPARE_BYTES > free:
            raise ConfigError(
                f"{self._name.text} needs {needed / 1e9:.2f} GB more on the disk of {folder}, which has "
                f"{free / 1e9:.2f} GB free; free some, or give a FOLDER on another disk"
            )

    def _fetch_all(self, files: list[RemoteFile]) -> None:
        """The first failure ends all. Daemon threads: one that waits for a silent server delays no exit."""
        waiting, ended = SimpleQueue[RemoteFile](), SimpleQueue[BaseException | None]()
        for file in files:
            waiting.put(file)

        def work() -> None:
            while not self._hub.stop.is_set():
                try:
                    self._fetch(waiting.get_nowait())
                    ended.put(None)
                except Empty:
                    return
                except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                    ended.put(error)
                    return

        for _ in files[:_AT_ONCE]:
            threading.Thread(target=work, daemon=True, name="dsv4-pull").start()
        try:
            for _ in files:
                if (error := ended.get()) is not None:
                    raise error
        finally:
            self._hub.stop.set()

    def _fetch(self, file: RemoteFile) -> None:
        part = self._place.part(file)
        transfer = Transfer(self._hub, self._name.repository, self._listing, file, part, self._count)
        transfer.fetch(self._place.target(file))
        self._place.show(file)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._here += num_bytes
            self._progress(self._here, self._total)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
