"""Files of requests in OpenAI's batch format: lines in, lines out, in order, by the server's own routes.

A line's answer is a function of the line, the model and the settings: ids and seeds are made from them, its
time is the file's. So a run that was killed goes on after the lines it left, and gives the same bytes as one
that was not. Knows no sockets and no cluster.
"""

import asyncio
import codecs
import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import ConfigError
from dsv4.hub.cache import title
from dsv4.serve.app import make_app
from dsv4.serve.client import EngineProcess
from dsv4.serve.job import Replay
from dsv4.serve.parse import parse
from dsv4.serve.schema import MAX_BODY_BYTES, BadField, Strict
from dsv4.serve.server import ServerConfig, make_service
from dsv4.text.generation import FILE as GENERATION

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
# Of the engine's settings, those that change no token.
_ALIKE = {
    *("max_batch", "chunk", "max_stall_ms", "threads", "rank_seconds", "no_graph", "no_overlap"),
    *("prefix_snapshots", "prefix_dir", "prefix_dir_bytes", "cache_pages"),
}
# How often a request is tried when the engine dies under it, and how long a new engine may take.
MAX_TRIES, RESTART_SECONDS = 3, 600.0
_DAY = 86400.0


class Line(Strict, frozen=True, kw_only=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: Any


class _Named(msgspec.Struct):
    """Of a line no more than this is read."""

    custom_id: str | None = None


class Answered(msgspec.Struct, frozen=True):
    """What a line of an output says about its request."""

    id: str
    custom_id: str | None
    response: dict[str, Any] | None
    error: dict[str, Any] | None

    @property
    def is_good(self) -> bool:
        return self.response is not None and self.response["status_code"] == 200


@dataclass(frozen=True)
class Job:
    """What a batch is run with. It can be sent to other machines, which see the same folder."""

    folder: Path
    engine: EngineConfig
    name: str = ""  # empty: the folder's name
    thinking: bool = True
    max_thinking: int | None = None
    created: int = 0  # of every answer: the input's own time

    @property
    def served_name(self) -> str:
        return self.name or title(self.folder)

    def fingerprint(self) -> str:
        """Of all that answers depend on. Weights count by their sizes: reading them takes minutes."""
        settings = {key: value for key, value in asdict(self.engine).items() if key not in _ALIKE}
        folder = self.folder if self.folder.is_dir() else self.folder.parent
        files = sorted((path.name, path.stat().st_size) for path in folder.glob("*.safetensors"))
        names = ("config.json", "tokenizer.json", GENERATION)
        small = [path.read_bytes() for name in names if (path := folder / name).exists()]
        parts = [settings, self.served_name, self.thinking, self.max_thinking, files]
        return hashlib.sha256(b"\0".join([msgspec.json.encode(parts), *small])).hexdigest()


def line_id(fingerprint: str, number: int, line: bytes) -> str:
    return hashlib.sha256(f"{fingerprint} {number} ".encode() + line).hexdigest()[:24]


def count_requests(path: Path) -> int:
    """Lines that are not blank; refuses two of one name, since nobody could tell their answers apart."""
    count, names = 0, set[str]()
    for number, line in _numbered_lines(path):
        count += 1
        if (name := _custom_id(line)) is None:
            continue
        if name in names:
            first = next(at for at, other in _numbered_lines(path) if _custom_id(other) == name)
            raise ConfigError(
                f"lines {first} and {number} of {path} have the same custom_id {name!r}, expected another "
                "one on each line; rename one of them"
            )
        names.add(name)
    return count


def state_of(path: Path) -> tuple[int, ...]:
    """Another one: the file has changed."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def read_lines(path: Path) -> Iterator[bytes]:
    """Every line that is not blank, without the byte order mark that some editors put in front."""
    return (line for _, line in _numbered_lines(path))


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """With their numbers in the file, from 1."""
    try:
        with path.open("rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path} is a pipe or a device, and a batch is read twice; give it a file")
            for number, line in enumerate(file, 1):
                if line := (line if number > 1 else line.removeprefix(codecs.BOM_UTF8)).strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None


class Output:
    """The lines so far. One run at a time has it; what a killed one left unfinished is cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.exists() and not path.is_file():
                raise OSError(errno.EINVAL, "it is no file, and a batch reads again what it has written")
            self._file = path.open("ab+", buffering=0)
        except OSError as error:
            raise self._refusal(error) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(f"{path} is being written by another run; wait for it or end it") from None

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *error: object) -> None:
        with self._file:
            try:
                os.fsync(self._file.fileno())
            except OSError as failed:
                raise self._refusal(failed) from None

    def _refusal(self, error: OSError) -> ConfigError:
        return ConfigError(f"{self.path} cannot be written: {error.strerror or error}")

    def resume(self, lines: Iterable[bytes], fingerprint: str) -> "Tally":
        """What is there already, checked line by line against the input."""
        tally, end = Tally(), 0
        wanted = iter(lines)
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                given = next(wanted, None)
                if given is None or _id_of(line) != f"batch_req_{line_id(fingerprint, tally.done, given)}":
                    raise ConfigError(
                        f"line {tally.done + 1} of {self.path} is not the answer to that line of the input "
                        "with this model and these settings; go on with what it was begun with, or name a "
                        "new file"
                    )
                tally.count(line)
                end += len(line)
        self._file.truncate(end)
        tally.before = tally.done
        return tally

    def write(self, line: bytes) -> None:
        """Whole, in one call of the system: a kill leaves it there or not, or cut in the last line."""
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            why = f"{self._refusal(error)}; the lines so far are kept, and the same command goes on"
            raise ConfigError(why) from None
        if os.fstat(self._file.fileno()).st_nlink == 0:
            why = "was removed while it was written, and with it the answers"
            raise ConfigError(f"{self.path} {why}; begin again")


@dataclass
class Tally:
    done: int = 0
    before: int = 0  # of these, by earlier runs
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    created: int | None = None  # the time that its answers have
    began: float = field(default_factory=time.monotonic)

    def count(self, line: bytes) -> None:
        answered = msgspec.json.decode(line, type=Answered)
        self.done += 1
        self.failed += not answered.is_good
        if answered.response is not None:
            body = answered.response["body"]
            if self.created is None:
                self.created = body.get("created", body.get("created_at"))
            usage = body.get("usage") or {}
            self.prompt_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0))
            self.completion_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))


def _id_of(line: bytes) -> str:
    try:
        return msgspec.json.decode(line, type=Answered).id
    except msgspec.DecodeError:
        return ""


class Answerer:
    """Lines to lines, as many at a time as are asked for. Made by `answering`."""

    def __init__(self, job: Job, engine: EngineProcess, app: Any) -> None:
        self.job, self.engine, self.app = job, engine, app
        self.fingerprint = job.fingerprint()
        # Those under which an engine died are tried one at a time: one of them may be the reason.
        self._suspects = asyncio.Lock()

    async def answer(self, number: int, line: bytes) -> bytes:
        id = line_id(self.fingerprint, number, line)
        custom_id: str | None = None
        response: dict[str, Any] | None = None
        error: dict[str, Any] | None = None
        try:
            custom_id = _custom_id(line)
            asked = _checked(line)
            seed = int.from_bytes(hashlib.sha256(line).digest()[:8], "big")
            status, body = await self._until_served(asked, Replay(id, self.job.created, seed))
            response = {"status_code": status, "request_id": f"req_{id}", "body": msgspec.Raw(body)}
        except BadField as bad:
            error = {"code": bad.code or "invalid_line", "message": str(bad)}
        made = {"id": f"batch_req_{id}", "custom_id": custom_id, "response": response, "error": error}
        return msgspec.json.encode(made) + b"\n"

    async def _until_served(self, asked: Line, replay: Replay) -> tuple[int, bytes]:
        status, body = await self._call(asked, replay)
        for _ in range(MAX_TRIES - 1):
            if status != 503:
                break
            async with self._suspects:
                await self._wait_for_engine()
                status, body = await self._call(asked, replay)
        return status, body

    async def _wait_for_engine(self) -> None:
        end = time.monotonic() + RESTART_SECONDS
        while self.engine.ready is None:
            if self.engine.ended.done():
                self.engine.ended.result()
            if time.monotonic() > end:
                raise ConfigError(
                    f"the engine died and did not come back within {RESTART_SECONDS:g} s; the lines so far "
                    "are kept, and the same command goes on"
                )
            await asyncio.sleep(0.1)

    async def _call(self, asked: Line, replay: Replay) -> tuple[int, bytes]:
        """The routes' answer, as the server would give it over HTTP."""
        scope = {
            "type": "http",
            "method": asked.method,
            "path": asked.url,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "replay": replay,
        }
        parts = deque([{"type": "http.request", "body": msgspec.json.encode(asked.body), "more_body": False}])
        status, data = 0, b""

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.popleft()
            await asyncio.Event().wait()  # nobody goes away
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            nonlocal status, data
            status = message.get("status", status)
            data += message.get("body", b"")

        await self.app(scope, receive, send)
        return status, data


def _custom_id(line: bytes) -> str | None:
    """As far as it can be told."""
    try:
        return msgspec.json.decode(line, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _checked(line: bytes) -> Line:
    if len(line) > MAX_BODY_BYTES:
        raise BadField(f"the line has {len(line)} bytes, expected at most {MAX_BODY_BYTES}")
    asked = parse(Line, line)
    if asked.url not in URLS:
        raise BadField(f"url is {asked.url!r}, expected one of {', '.join(URLS)}", "url")
    if isinstance(asked.body, dict) and asked.body.get("stream"):  # what else is wrong, the routes say
        raise BadField("stream is for clients that wait; a batch has none, leave it out", "body.stream")
    return asked


@contextlib.asynccontextmanager
async def answering(
    job: Job, log: Callable[[str], None], progress: Callable[[int, int], None]
) -> AsyncIterator[Answerer]:
    """A loaded model, in a process of its own, and the server's routes around it."""
    ModelConfig.load(job.folder)
    config = ServerConfig(
        names=(job.served_name,),
        max_queue=100_000,
        queue_seconds=_DAY,
        request_seconds=_DAY,
        stall_seconds=RESTART_SECONDS,
        thinking=job.thinking,
        max_thinking=job.max_thinking,
    )
    service = make_service(job.folder, job.engine, config, log, progress)
    engine = service.engine
    try:
        for note in (await engine.start()).notes:
            log(f"engine: {note}")
        yield Answerer(job, engine, make_app(replace(service, log=lambda line: None)))
    finally:
        await engine.stop("the batch has ended")


async def in_order(
    items: Iterable[tuple[int, bytes]],
    answer: Callable[[int, bytes], Awaitable[bytes]],
    parallel: int,
) -> AsyncGenerator[bytes, None]:
    """The answers in the order of the items, `parallel` under way; a slow one holds back a bounded number."""
    source, running = iter(items), asyncio.Semaphore(parallel)
    pending: deque[asyncio.Task[bytes]] = deque()

    async def one(number: int, line: bytes) -> bytes:
        async with running:
            return await answer(number, line)

    try:
        while True:
            while len(pending) < 8 * parallel and (item := next(source, None)) is not None:
                pending.append(asyncio.create_task(one(*item)))
            if not pending:
                return
            yield await pending[0]
            pending.popleft()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def run(
    job: Job,
    items: Iterable[tuple[int, bytes]],
    parallel: int,
    take: Callable[[bytes], None],
    log: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> None:
    """Every line's answer to `take`, in order."""
    async with (
        answering(job, log, progress) as answerer,
        contextlib.aclosing(in_order(items, answerer.answer, parallel)) as made,
    ):
        async for line in made:
            take(line)
