"""Talks to the hub: its listing of a model, ranges of its files, retries. Settings are huggingface_hub's."""

import email.utils
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx2
from huggingface_hub import constants
from huggingface_hub.utils import get_session, get_token_to_send

from dsv4 import __version__
from dsv4.errors import CheckpointError, ConfigError, Dsv4Error

_RETRIED = (408, 429, 500, 502, 503, 504)
_TRIES, _FIRST_TRIES = 6, 3  # of a transfer; of the listing, where a wrong address or proxy shows
_LONGEST_WAIT = 600.0  # seconds that the hub may ask for
_CONNECT_SECONDS = 10.0

Say = Callable[[str], object]


class Stopped(Exception):
    """Another file failed, or the user pressed Ctrl-C."""


class Transient(Exception):
    """A failure that may pass. `wait`: seconds that the hub asks for."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


@dataclass(frozen=True)
class RemoteFile:
    """`sha256` of files in large file storage; of the others Git's own hash of the content, `git_sha1`."""

    name: str
    num_bytes: int
    sha256: str | None
    git_sha1: str | None

    @property
    def hash(self) -> str:
        return self.sha256 or self.git_sha1 or ""


@dataclass(frozen=True)
class Listing:
    commit: str
    files: tuple[RemoteFile, ...]


class Hub:
    """`notify` receives sentences about retries; `stop` ends waits and transfers."""

    def __init__(self, notify: Say) -> None:
        self._notify, self.stop = notify, threading.Event()
        # Not build_hf_headers, which asks the hub about the program that runs it.
        token = get_token_to_send(None)
        self._headers = {"user-agent": f"dsv4/{__version__}", "accept-encoding": "identity"}
        self._headers |= {"authorization": f"Bearer {token}"} if token else {}
        self._timeout = httpx2.Timeout(constants.HF_HUB_DOWNLOAD_TIMEOUT, connect=_CONNECT_SECONDS)

    @property
    def is_offline(self) -> bool:
        return constants.is_offline_mode()

    def list(self, repository: str, revision: str) -> Listing:
        """The commit of a revision, and all its files with sizes and hashes."""
        url = f"{constants.ENDPOINT}/api/models/{repository}/revision/{quote(revision, safe='')}?blobs=true"
        found: dict[str, Any] = {}

        def once() -> bool:
            with self._get(url, f"{repository}@{revision}") as response:
                try:
                    found.update(json.loads(b"".join(response.iter_bytes())))
                except (ValueError, TypeError):
                    raise CheckpointError(
                        f"{constants.ENDPOINT} did not answer with JSON; {_PROXY}"
                    ) from None
            return True

        self.persist(once, _FIRST_TRIES)
        try:
            files = [
                RemoteFile(
                    name=file["rfilename"],
                    num_bytes=(file.get("lfs") or file)["size"],
                    sha256=(file.get("lfs") or {}).get("sha256"),
                    git_sha1=file.get("blobId"),
                )
                for file in found["siblings"]
            ]
            listing = Listing(found["sha"], tuple(files))
            if not all(isinstance(f.num_bytes, int) and isinstance(f.hash, str) and f.hash for f in files):
                raise TypeError("a file without size and hash")
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{constants.ENDPOINT} lists {repository} in a form that is not the hub's ({error}); {_PROXY}"
            ) from None
        return listing

    @contextmanager
    def read(self, repository: str, commit: str, name: str, start: int) -> Iterator[Any]:
        """One answer with the file's bytes from `start` on, or from 0 if the server knows no ranges."""
        url = f"{constants.ENDPOINT}/{repository}/resolve/{commit}/{quote(name)}"
        ranges = {"range": f"bytes={start}-"} if start else {}
        with self._get(url, f"{name} of {repository}", ranges) as response:
            yield response

    def persist(self, step: Callable[[], bool], tries: int = _TRIES) -> None:
        """Repeat a step until it returns True; Transient failures in a row end it. A step that returns False
        made progress."""
        failures = 0
        while True:
            try:
                if step():
                    return
                failures = 0
            except Transient as error:
                failures += 1
                if failures == tries:
                    raise ConfigError(
                        f"{error}, {tries} times in a row; run the same command again later: it goes on here"
                    ) from None
                wait = 2.0 ** (failures - 1) if error.wait is None else error.wait
                if wait > _LONGEST_WAIT:
                    raise ConfigError(
                        f"{error}, to be asked again in {wait:.0f} s; run the same command again then"
                    ) from None
                self._notify(f"{error}; trying again in {wait:.0f} s")
                if self.stop.wait(wait):
                    raise Stopped from None

    @contextmanager
    def _get(self, url: str, what: str, headers: dict[str, str] | None = None) -> Iterator[Any]:
        """An open answer that is no error; a cross-origin redirect loses the token (httpx2 sees to it)."""
        if self.stop.is_set():
            raise Stopped
        headers = self._headers | (headers or {})
        try:
            with get_session().stream("GET", url, headers=headers, timeout=self._timeout) as response:
                if response.status_code >= 400:
                    raise _refusal(response, what)
                yield response
        except httpx2.ProxyError as error:
            raise ConfigError(f"the proxy refused the connection to {constants.ENDPOINT}: {error}") from None
        except (httpx2.UnsupportedProtocol, httpx2.InvalidURL, httpx2.TooManyRedirects) as error:
            raise ConfigError(f"{url} cannot be asked: {error}; {_PROXY}") from None
        except httpx2.TransportError as error:
            reason = str(error) or type(error).__name__
            raise Transient(f"{constants.ENDPOINT} cannot be reached ({reason})") from None


_PROXY = "check HF_ENDPOINT, and any proxy between here and there"


def _refusal(response: Any, what: str) -> Dsv4Error | Transient:
    status, code = response.status_code, response.headers.get("x-error-code", "")
    if status in _RETRIED:
        why = "the hub limits requests" if status == 429 else "the hub failed"
        return Transient(f"{why} (HTTP {status})", _seconds(response.headers.get("retry-after")))
    if code == "GatedRepo" or status == 403:
        return ConfigError(
            f"{what} is not open to you (HTTP {status}); accept its terms on {constants.ENDPOINT}, and set "
            "HF_TOKEN to a token that may read it"
        )
    if status == 401:
        return ConfigError(
            f"{what} does not exist, or is private (HTTP 401); check the name, or set HF_TOKEN to a token "
            "that may read it"
        )
    if code == "RevisionNotFound":
        return ConfigError(f"{what}: there is no such revision (HTTP {status}); leave @REVISION out")
    if status == 404:
        return ConfigError(f"{what} was not found (HTTP 404); dsv4 models --known lists names")
    return ConfigError(f"{what}: the hub answered HTTP {status}; {_PROXY}")


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After: seconds, or a date."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return None
