"""One request for tokens on its way: tickets to pieces, whole or as server-sent events. Knows no routes."""

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsv4.engine.request import Delta
from dsv4.errors import Dsv4Error, RequestError
from dsv4.serve.answer import ChatAnswer, Piece, PlainAnswer
from dsv4.serve.ask import Usual
from dsv4.serve.client import EngineProcess
from dsv4.serve.metrics import Metrics
from dsv4.serve.openai import HttpError, Usage
from dsv4.serve.prompt import Encoder
from dsv4.serve.store import Store
from dsv4.serve.ticket import Ticket

# A stream that is silent for so long says that it is still there: proxies and clients give up on silence.
KEEP_ALIVE_SECONDS = 10.0


@dataclass
class Keys:
    """The hashes of the API keys, in the file's order; none: everybody may. Read again on SIGHUP."""

    hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Service:
    """What the routes need."""

    names: tuple[str, ...]  # of the model: what it is called, then other names and patterns of them
    engine: EngineProcess
    encoder: Encoder
    metrics: Metrics
    log: Callable[[str], None]
    keys: Keys = field(default_factory=Keys)
    store: Store = field(default_factory=Store)
    usual: Usual = field(default_factory=Usual)
    is_local: bool = False  # reached by names of this machine only
    isolates: bool = False  # cached prefixes are shared among requests with the same key only
    logs_texts: bool = False  # prompts and answers
    is_lenient: bool = False  # unknown fields are left out and named in a header
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        return self.names[0]

    def serves(self, model: str | None) -> bool:
        return model is None or any(fnmatchcase(model, name) for name in self.names)


@dataclass(frozen=True)
class Replay:
    """In the scope of a request that must give the same bytes whenever it is run: what else would be drawn by
    lot or read from a clock. What was in the cache is not told, since that depends on when it ran."""

    id: str
    created: int
    seed: int


class AnyShape(Protocol):
    """What an API makes of pieces: events of a stream, or a whole answer."""

    end: bytes  # of a stream, after the last event
    counts_each: bool  # every chunk has the usage so far

    def opening(self, usage: Usage) -> list[dict[str, Any]]: ...
    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]: ...
    def closing(self, usage: Usage) -> list[dict[str, Any]]: ...
    def whole(self, pieces: list[list[Piece]], usage: Usage) -> dict[str, Any]: ...
    def error(self, error: Dsv4Error) -> dict[str, Any]: ...


@dataclass
class Job:
    """One request for tokens on its way to an answer."""

    service: Service
    shape: AnyShape
    answers: list[ChatAnswer] | list[PlainAnswer]
    ticket: Ticket
    num_prompt: int  # tokens of all prompts
    num_prompts: int
    note: dict[str, Any]  # for the log line
    began: float  # when the request arrived
    progress: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # a chunk that tells it
    tells_cached: bool = True
    first: float | None = None
    texts: list[str] = field(default_factory=list)  # of the answers, where they are logged

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *error: object) -> None:
        """Takes stock; the ticket has an owner of its own."""
        now, usage = time.monotonic(), self.usage
        reasons = [answer.finish_reason or "abort" for answer in self.answers]
        self.service.metrics.count(
            usage,
            reasons,
            seconds=now - self.began,
            queued=self.ticket.began and self.ticket.began - self.ticket.submitted,
            answered=None if self.first is None else now - self.first,
        )
        counts = {"prompt": usage.prompt, "cached": usage.cached, "completion": usage.completion}
        self.note |= {**counts, "finish": ",".join(reasons)}
        if self.service.logs_texts:
            self.note["answer_text"] = json.dumps("".join(self.texts), ensure_ascii=False)
        if self.first is not None:
            self.note["first_ms"] = round(1000 * (self.first - self.began))

    @property
    def usage(self) -> Usage:
        usage = Usage.of(self.num_prompt, self.answers, self.num_prompts)
        return usage if self.tells_cached else replace(usage, cached=0)

    async def pieces(self, patience: float = math.inf) -> list[tuple[int, Piece]]:
        """All pieces that there are, as soon as one says anything; none at the end. See Ticket.next."""
        while deltas := await self.ticket.next(patience):
            found: list[tuple[int, Piece]] = []
            for index, delta in deltas:
                if delta.finish_reason == "error" and found:
                    self.ticket.fail(RequestError(delta.error))  # after what came before it
                    return found
                piece = self._piece(index, delta)
                if piece is not None and not piece.is_empty:
                    found.append((index, piece))
            if found:
                return found
        return []

    def _piece(self, index: int, delta: Delta) -> Piece | None:
        answer = self.answers[index]
        if answer.finish_reason is not None:
            return None  # a token that was under way when a stop string was met
        if self.first is None:
            self.first = time.monotonic()
            self.service.metrics.first_token.observe(self.first - self.began)
        piece = answer.push(delta)
        if self.service.logs_texts:
            self.texts.append(delta.text)
        if answer.finish_reason is not None:
            self.ticket.cancel(index)
        return piece

    async def whole(self) -> dict[str, Any]:
        pieces: list[list[Piece]] = [[] for _ in self.answers]
        while found := await self.pieces():
            for index, piece in found:
                pieces[index].append(piece)
        return self.shape.whole(pieces, self.usage)

    async def events(self) -> list[dict[str, Any]]:
        """The next ones; none where nothing came for long, and with the last all that ends the stream."""
        found: list[tuple[int, Piece]] = []
        with contextlib.suppress(TimeoutError):
            found = await self.pieces(KEEP_ALIVE_SECONDS)
        told = self.ticket.take_progress()
        events = [self.progress(told)] if self.progress is not None and told is not None else []
        events += [event for index, piece in found for event in self.shape.chunks(index, piece)]
        if self.shape.counts_each:
            events = [{**event, "usage": self.usage.shown()} for event in events]
        return events + self.shape.closing(self.usage) if self.ticket.is_over else events

    async def watch(self, receive: Receive) -> None:
        """Ends the sequences, and so the request, when the client goes away."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.note["gone"] = "yes"
        self.ticket.fail(HttpError(499, "the client went away"))


_encode = msgspec.json.Encoder().encode


def _event(value: dict[str, Any]) -> bytes:
    name = f"event: {value['type']}\n".encode() if "type" in value else b""
    return b"%bdata: %b\n\n" % (name, _encode(value))


class EventStream(Response):
    """Server-sent events of a job; an error after the start is an event too."""

    media_type = "text/event-stream"

    def __init__(self, job: Job) -> None:
        self.job = job
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job, shape, ticket = self.job, self.job.shape, self.job.ticket
        # The connection's own way for what comes often; HTTP/1.0 knows no chunks.
        write_chunk = (
            scope.get("state", {}).get("write_chunk") if scope.get("http_version") == "1.1" else None
        )

        async def write(events: list[dict[str, Any]], end: bytes | None = None) -> None:
            body = (b"".join(map(_event, events)) or b": waiting\n\n") + (end or b"")
            if write_chunk is not None and end is None:
                await write_chunk(body)
            else:
                await send({"type": "http.response.body", "body": body, "more_body": end is None})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            if opening := shape.opening(job.usage):
                await write(opening)
            while not ticket.is_over:
                events = await job.events()
                await write(events, shape.end if ticket.is_over else None)
        except Dsv4Error as error:
            await write([shape.error(error)], b"")
