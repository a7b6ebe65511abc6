"""A server that speaks the hub's protocol: listings with LFS hashes, redirects to another host, ranges."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REPOSITORY = "deepseek-ai/DeepSeek-V4-Flash"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"
_PIECE = 16 << 10


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Refusal:
    status: int
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Served:
    """What the server holds, how it behaves, and what it was asked."""

    files: dict[str, bytes]
    needs_token: bool = False
    knows_ranges: bool = True
    refusals: list[Refusal] = field(default_factory=list)  # for the next requests of a file
    cut_after: list[int] = field(default_factory=list)  # bytes, of the next answers with weights
    seconds_per_piece: float = 0.0
    damaged: set[str] = field(default_factory=set)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)  # host, path, headers
    sent_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.asked]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    host: str
    served: Served
    cdn: str

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.served.asked.append((self.host, path, headers))
        if self.host == "cdn":
            self._content(path.rpartition("/")[2], is_weights=True)
            return
        if self.served.needs_token and headers.get("authorization") != f"Bearer {TOKEN}":
            self._answer(401, b"", {"X-Error-Message": "Invalid username or password."})
        elif path == f"/api/models/{REPOSITORY}/revision/main":
            self._answer(200, json.dumps(self._listing()).encode(), {})
        elif path.startswith("/api/models/"):
            code = "RevisionNotFound" if f"/{REPOSITORY}/" in path else "RepoNotFound"
            self._answer(404, b"", {"X-Error-Code": code})
        elif path.startswith(f"/{REPOSITORY}/resolve/{COMMIT}/"):
            self._resolve(path.rpartition("/")[2])
        else:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _listing(self) -> dict[str, Any]:
        siblings = []
        for name, data in self.served.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_sha1(data)}
            if name.endswith(".safetensors"):
                pointer = f"oid sha256:{sha256(data)}".encode()
                entry["blobId"] = git_sha1(pointer)
                entry["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": len(pointer)}
            siblings.append(entry)
        return {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}

    def _resolve(self, name: str) -> None:
        with self.served.lock:
            refusal = self.served.refusals.pop(0) if self.served.refusals else None
        if refusal is not None:
            self._answer(refusal.status, b"", refusal.headers)
        elif name.endswith(".safetensors"):
            data = self.served.files[name]
            linked = {"X-Linked-Etag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data))}
            self._answer(302, b"", {**linked, "X-Repo-Commit": COMMIT, "Location": f"{self.cdn}/{name}"})
        else:
            self._content(name, is_weights=False)

    def _content(self, name: str, is_weights: bool) -> None:
        data = self.served.files[name]
        etag = sha256(data)
        if name in self.served.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        start, wanted = 0, self.headers.get("Range", "")
        if wanted and self.served.knows_ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
        with self.served.lock:
            cut = self.served.cut_after.pop(0) if is_weights and self.served.cut_after else None
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", f'"{etag}"')
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        stop = len(data) if cut is None else min(len(data), start + cut)
        for at in range(start, stop, _PIECE):
            piece = data[at : min(at + _PIECE, stop)]
            try:
                self.wfile.write(piece)
            except OSError:
                break  # the client was killed
            with self.served.lock:
                self.served.sent_bytes += len(piece)
            if is_weights:
                time.sleep(self.served.seconds_per_piece)
        if stop < len(data):
            self.close_connection = True
            self.connection.close()

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients are killed here


@contextmanager
def serving(folder: Path) -> Iterator[tuple[Served, str]]:
    """Serve the files of a folder as REPOSITORY; yields what is served and the endpoint."""
    served = Served({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
    servers, urls = [], []
    for host in ("cdn", "hub"):
        facts = {"host": host, "served": served, "cdn": urls[0] if urls else ""}
        handler = type("Handler", (_Handler,), facts)
        server = _Server(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        # Two names of this machine: a redirect from one to the other crosses origins.
        urls.append(f"http://{'127.0.0.1' if host == 'cdn' else 'localhost'}:{server.server_port}")
    try:
        yield served, urls[1]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
