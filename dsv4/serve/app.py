"""The routes: bodies in, answers out, whole or as server-sent events. Knows no processes and no sockets."""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from dsv4.errors import Dsv4Error
from dsv4.serve.answer import ChatAnswer, Piece, PlainAnswer
from dsv4.serve.client import EngineProcess, Ticket
from dsv4.serve.metrics import Metrics
from dsv4.serve.openai import ChatShape, HttpError, PlainShape, error_body, usage
from dsv4.serve.schema import (
    MAX_BODY_BYTES,
    MAX_MESSAGES,
    Asked,
    BadField,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Kind,
    TokenizeBody,
    ask_chat,
    ask_completion,
    check_fits,
    parse,
)
from dsv4.text.chat import encode
from dsv4.text.tokenizer import Tokenizer

BODY_SECONDS = 30.0
RETRY_SECONDS = 1
OPEN_ROUTES = ("/health",)
QUIET_ROUTES = ("/health", "/ready", "/metrics")
LOGGED_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize")


@dataclass(frozen=True)
class Service:
    """What the routes need."""

    name: str
    engine: EngineProcess
    tokenizer: Tokenizer
    metrics: Metrics
    log: Callable[[str], None]
    key_hashes: tuple[bytes, ...] = ()  # none: everybody may
    thinking: bool = True  # where a request does not say
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass
class Job:
    """One request for tokens on its way to an answer."""

    service: Service
    shape: ChatShape | PlainShape
    answers: list[ChatAnswer] | list[PlainAnswer]
    ticket: Ticket
    num_prompt: int
    wants_logprobs: bool
    wants_usage: bool
    note: dict[str, Any]  # for the log line
    began: float = field(default_factory=time.monotonic)
    first: float | None = None

    async def next(self) -> tuple[int, Piece] | None:
        """The next piece that says anything; None at the end."""
        while (found := await self.ticket.next()) is not None:
            index, delta = found
            answer = self.answers[index]
            if answer.finish_reason is not None:
                continue  # tokens that were under way when a stop string was met
            if self.first is None:
                self.first = time.monotonic()
                self.service.metrics.first_token.observe(self.first - self.began)
            piece = answer.push(delta)
            if answer.finish_reason is not None:
                self.ticket.cancel(index)
            if not piece.is_empty:
                return index, piece
        return None

    async def whole(self) -> dict[str, Any]:
        pieces: list[list[Piece]] = [[] for _ in self.answers]
        while (found := await self.next()) is not None:
            pieces[found[0]].append(found[1])
        choices = [self.shape.whole(i, part, self.wants_logprobs) for i, part in enumerate(pieces)]
        counted = usage(self.num_prompt, self.answers)
        return {**self.shape.head, "object": self.shape.name, "choices": choices, "usage": counted}

    async def events(self, send: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Every chunk to `send`, which waits for a client that reads slowly."""
        for index in range(len(self.answers)):
            if opening := self.shape.opening(index):
                await send(opening)
        while (found := await self.next()) is not None:
            await send(self.shape.chunk(*found))
        if self.wants_usage:
            counted = usage(self.num_prompt, self.answers)
            await send({**self.shape.head, "object": self.shape.chunk_name, "choices": [], "usage": counted})

    def close(self) -> None:
        """Frees the pages of what is unfinished, and takes stock."""
        self.ticket.close()
        metrics, now = self.service.metrics, time.monotonic()
        tokens = sum(answer.num_tokens for answer in self.answers)
        metrics.prompt_tokens.inc(self.num_prompt)
        metrics.completion_tokens.inc(tokens)
        if self.first is not None and tokens > len(self.answers):
            metrics.per_token.observe((now - self.first) / (tokens / len(self.answers) - 1))
        reasons = ",".join(answer.finish_reason or "cut" for answer in self.answers)
        self.note |= {"prompt": self.num_prompt, "completion": tokens, "finish": reasons}
        if self.first is not None:
            self.note["first_ms"] = round(1000 * (self.first - self.began))


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


class EventStream(Response):
    """Server-sent events of a job; an error after the start is an event too."""

    media_type = "text/event-stream"

    def __init__(self, job: Job) -> None:
        self.job = job
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def event(value: Any) -> None:
            data = value if isinstance(value, bytes) else msgspec.json.encode(value)
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

        async def stream() -> None:
            try:
                await self.job.events(event)
                await event(b"[DONE]")
            except Dsv4Error as error:
                await event(error_body(error)[1])
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        with closing(self.job):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if not await unless_gone(receive, stream()):
                self.job.note["gone"] = "yes"


class Gate:
    """In front of all routes: the key, the request's id, the log line, and errors in OpenAI's shape."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, path = time.monotonic(), scope["path"]
        note = scope["note"] = {"id": f"req_{secrets.token_hex(12)}"}
        status = 0

        async def noted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", note["id"].encode())]
            await send(message)

        try:
            if path in OPEN_ROUTES or self._has_key(scope):
                await self.app(scope, receive, noted)
            else:
                why = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
                await _refusal(HttpError(401, why, "invalid_api_key"))(scope, receive, noted)
        finally:
            if path not in QUIET_ROUTES:
                route = path if path in LOGGED_ROUTES else "other"
                self.service.metrics.requests.labels(route, status).inc()
                fields = {"route": route, "status": status, **note}
                fields["ms"] = round(1000 * (time.monotonic() - began))
                self.service.log(" ".join(f"{key}={value}" for key, value in fields.items()))

    def _has_key(self, scope: Scope) -> bool:
        if not self.service.key_hashes:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        digest = key_hash(key.strip())
        # All are compared, whichever matches: the time taken says nothing about the keys.
        found = [hmac.compare_digest(digest, known) for known in self.service.key_hashes]
        return any(found) and kind.lower() == b"bearer"


def key_hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal(error: Dsv4Error) -> JSONResponse:
    status, body = error_body(error)
    headers = {"Retry-After": str(RETRY_SECONDS)} if status in (429, 503) else None
    return JSONResponse(body, status, headers)


async def read_body(request: Request, kind: type[Kind]) -> Kind:
    """The checked body; asking for JSON's media type keeps other web pages from posting here."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise HttpError(415, f"Content-Type is {media or 'missing'!r}, expected application/json")
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > MAX_BODY_BYTES:
                    raise HttpError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", "body_too_large")
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {BODY_SECONDS:g} s", "timeout") from None
    except ClientDisconnect:
        raise HttpError(499, "the client went away while it sent its request") from None
    return parse(kind, bytes(data))


def tidy(message: dict[str, Any]) -> dict[str, Any]:
    """What OpenAI's clients add to a message: fields that are null, and developer as the name for system."""
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    return {**kept, "role": "system"} if kept.get("role") == "developer" else kept


def make_app(service: Service) -> ASGIApp:
    app = FastAPI(title="dsv4", docs_url=None, redoc_url=None, openapi_url=None)
    tokenizer, engine = service.tokenizer, service.engine

    def check_model(model: str | None) -> None:
        if model not in (None, service.name):
            why = f"The model {model!r} does not exist; this server has {service.name!r}"
            raise HttpError(404, why, "model_not_found")

    async def chat_ids(body: ChatBody, asked: Asked) -> tuple[int, ...]:
        tools = body.tools if body.tool_choice != "none" else None

        def ids() -> tuple[int, ...]:
            messages = [tidy(message) for message in body.messages]
            segments = encode(
                messages, thinking=asked.thinking, reasoning_effort=asked.effort, tools=tools or None
            )
            return tuple(tokenizer.encode_prompt(segments))

        return await asyncio.to_thread(ids)

    async def answer(
        request: Request,
        body: Body,
        asked: Asked,
        ids: tuple[int, ...],
        shape: ChatShape | PlainShape,
        answers: list[ChatAnswer] | list[PlainAnswer],
    ) -> Response:
        ready = engine.check_available(len(asked.params))
        check_fits(len(ids), asked.params[0].max_tokens, ready.max_context)
        ticket = engine.submit(ids, asked.params)
        wants_logprobs = asked.params[0].logprobs is not None
        note = request.scope["note"]
        job = Job(service, shape, answers, ticket, len(ids), wants_logprobs, body.wants_usage, note)
        outcome: list[dict[str, Any]] = []

        async def start() -> None:
            await ticket.accepted()
            if not body.stream:
                outcome.append(await job.whole())

        is_handed_on = False
        try:
            if not await unless_gone(request.receive, start()):
                note["gone"] = "yes"
                return Response(status_code=499)
            if outcome:
                return JSONResponse(outcome[0])
            is_handed_on = True
            return EventStream(job)
        finally:
            if not is_handed_on:
                job.close()

    def head(request: Request, prefix: str) -> dict[str, Any]:
        id = request.scope["note"]["id"].removeprefix("req_")
        return {"id": f"{prefix}-{id}", "created": int(time.time()), "model": service.name}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await read_body(request, ChatBody)
        check_model(body.model)
        asked = ask_chat(body, service.thinking)
        engine.check_available(len(asked.params))
        ids = await chat_ids(body, asked)
        tools = body.tools if body.tool_choice != "none" else None
        call_id = f"call_{secrets.token_hex(8)}"
        answers = [
            ChatAnswer(
                tokenizer,
                thinking=asked.thinking,
                tools=tools,
                stops=body.stops,
                id_prefix=f"{call_id}_{index}_",
            )
            for index in range(len(asked.params))
        ]
        return await answer(request, body, asked, ids, ChatShape(head(request, "chatcmpl")), answers)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        check_model(body.model)
        asked = ask_completion(body)
        engine.check_available(len(asked.params))
        prompt = body.prompt
        if isinstance(prompt, str):
            encoded = await asyncio.to_thread(tokenizer.encode_text, prompt)
            ids = (tokenizer.bos_id, *encoded)
        else:
            ids = tuple(prompt)
        shape = PlainShape(head(request, "cmpl"), tokenizer)
        return await answer(request, body, asked, ids, shape, [PlainAnswer() for _ in asked.params])

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        ready = engine.ready
        model = {"id": service.name, "object": "model", "created": service.created, "owned_by": "dsv4"}
        return {
            "object": "list",
            "data": [{**model, "max_model_len": ready.max_context if ready else None}],
        }

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/ready")
    async def is_ready() -> dict[str, str]:
        engine.check_available(0)
        return {"status": "ready"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await read_body(request, TokenizeBody)
        check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise BadField("give prompt or messages, one of them", "prompt")
        if body.prompt is not None:
            ids = await asyncio.to_thread(tokenizer.encode_text, body.prompt)
        else:
            chat = ChatBody(messages=(body.messages or [])[: MAX_MESSAGES + 1])
            ids = list(await chat_ids(chat, ask_chat(chat, service.thinking)))
        return {"tokens": ids, "count": len(ids)}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, str]:
        body = await read_body(request, DetokenizeBody)
        check_model(body.model)
        return {"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens)}

    @app.exception_handler(Dsv4Error)
    async def refused(request: Request, error: Dsv4Error) -> Response:
        request.scope["note"]["error"] = type(error).__name__
        return _refusal(error)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return _refusal(HttpError(500, "the server made a mistake; its log has more", None, "server_error"))

    @app.exception_handler(404)
    async def unknown(request: Request, error: Exception) -> Response:
        why = f"Unknown request URL: {request.method} {request.url.path}; see /v1/models"
        return _refusal(HttpError(404, why, "unknown_url"))

    @app.exception_handler(405)
    async def wrong_method(request: Request, error: Exception) -> Response:
        why = f"{request.method} is not allowed for {request.url.path}"
        return _refusal(HttpError(405, why, "method_not_supported"))

    return Gate(app, service)
