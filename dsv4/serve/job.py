"""One request for tokens on its way: tickets to pieces, whole or as server-sent events. Knows no routes."""

import asyncio
import json
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsv4.engine.request import Delta
from dsv4.errors import Dsv4Error, RequestError
from dsv4.serve.answer import ChatAnswer, Piece, PlainAnswer
from dsv4.serve.client import EngineProcess, Ticket
from dsv4.serve.metrics import Metrics
from dsv4.serve.openai import Usage
from dsv4.serve.prompt import Encoder

# A stream that is silent for so long says that it is still there: proxies and clients give up on silence.
KEEP_ALIVE_SECONDS = 10.0


@dataclass(frozen=True)
class Service:
    """What the routes need."""

    name: str
    engine: EngineProcess
    encoder: Encoder
    metrics: Metrics
    log: Callable[[str], None]
    key_hashes: tuple[bytes, ...] = ()  # none: everybody may
    is_local: bool = False  # reached by names of this machine only
    thinking: bool = True  # where a request does not say
    max_thinking: int | None = None  # tokens, where a request does not ask for less
    isolates: bool = False  # cached prefixes are shared among requests with the same key only
    logs_texts: bool = False  # prompts and answers
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class Replay:
    """In the scope of a request that must give the same bytes whenever it is run: what else would be drawn by
    lot or read from a clock. What was in the cache is not told, since that depends on when it ran."""

    id: str
    created: int
    seed: int


class AnyShape(Protocol):
    """What an API makes of pieces: events of a stream, or a whole answer."""

    end: bytes | None  # what the last event says, if there is one

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
    tells_cached: bool = True
    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    texts: list[str] = field(default_factory=list)  # of the answers, where they are logged

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *error: object) -> None:
        """Takes stock; the ticket has an owner of its own."""
        metrics, now, usage = self.service.metrics, time.monotonic(), self.usage
        tokens = usage.completion
        metrics.prompt_tokens.inc(usage.prompt)
        metrics.completion_tokens.inc(tokens)
        metrics.cached_tokens.inc(usage.cached)
        if self.first is not None and tokens > len(self.answers):
            metrics.per_token.observe((now - self.first) / (tokens / len(self.answers) - 1))
        reasons = ",".join(answer.finish_reason or "cut" for answer in self.answers)
        counts = {"prompt": usage.prompt, "cached": usage.cached, "completion": tokens}
        self.note |= {**counts, "finish": reasons}
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

    async def events(self, send: Callable[[list[dict[str, Any]]], Coroutine[Any, Any, None]]) -> None:
        """All events to `send`, which waits for slow clients; an empty list where nothing came for long."""
        if opening := self.shape.opening(self.usage):
            await send(opening)
        while True:
            try:
                found = await self.pieces(KEEP_ALIVE_SECONDS)
            except TimeoutError:
                await send([])
                continue
            if not found:
                break
            await send([event for index, piece in found for event in self.shape.chunks(index, piece)])
        if closing := self.shape.closing(self.usage):
            await send(closing)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Any]) -> bool:
    """Runs `work`; if the client goes away first, cancels it and returns False."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    worker, watcher = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
        return worker.done()
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


def _event(value: dict[str, Any]) -> bytes:
    name = f"event: {value['type']}\n".encode() if "type" in value else b""
    return name + b"data: " + msgspec.json.encode(value) + b"\n\n"


class EventStream(Response):
    """Server-sent events of a job; an error after the start is an event too."""

    media_type = "text/event-stream"

    def __init__(self, job: Job) -> None:
        self.job = job
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shape = self.job.shape

        async def write(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        async def write_events(events: list[dict[str, Any]]) -> None:
            await write(b"".join(map(_event, events)) or b": waiting\n\n")

        async def stream() -> None:
            try:
                await self.job.events(write_events)
                if shape.end is not None:
                    await write(b"data: " + shape.end + b"\n\n")
            except Dsv4Error as error:
                await write(_event(shape.error(error)))
            await write(b"", more=False)

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if not await unless_gone(receive, stream()):
            self.job.note["gone"] = "yes"
