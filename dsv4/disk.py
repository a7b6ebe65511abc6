"""Write a file whole: it appears under its name complete and on disk, or not at all. Read a text exactly."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dsv4.errors import ConfigError, RequestError


@contextmanager
def whole(path: Path, within: Path | None = None, synced: bool = True) -> Iterator[Path]:
    """Yield the name of an unfinished file to write; without an error it becomes `path`.

    within: folder of the unfinished file, on the same disk (default: that of `path`). synced: wait until the
    bytes are on disk, or a power cut could leave an empty file under the new name.
    """
    # Random, not the process's number: another container may have a process of the same number.
    part = (within or path.parent) / f".{secrets.token_hex(16)}.part"
    try:
        yield part
        if synced:
            sync(part)
        part.replace(path)
    finally:
        with suppress(
            OSError
        ):  # a folder that does not exist, or takes no more changes: the first error tells
            part.unlink(missing_ok=True)


@contextmanager
def result(path: Path) -> Iterator[Path]:
    """`whole`, for a name that a user gave: a failure is a ConfigError."""
    try:
        with whole(path) as part:
            yield part
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


def keep(path: Path, text: str, otherwise: str) -> str:
    """Write a file of the cache folder, whose loss costs time only. -> "" or a sentence for the user."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as part:
            part.write_text(text)
    except OSError as error:
        return f"{path} cannot be written ({error.strerror}); {otherwise}"
    return ""


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_text(path: Path) -> str:
    """A file that a user named, as UTF-8; its line ends stay what they are."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from None
