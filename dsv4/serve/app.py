"""The routes: bodies in, answers out. Knows no processes and no sockets."""

import asyncio
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp

from dsv4.errors import Dsv4Error
from dsv4.serve.answer import ChatAnswer, Echo, PlainAnswer
from dsv4.serve.describe import openapi
from dsv4.serve.gate import Gate, read_body, refusal
from dsv4.serve.grammar import Form
from dsv4.serve.job import EventStream, Job, Service, unless_gone
from dsv4.serve.openai import ChatShape, HttpError, PlainShape
from dsv4.serve.schema import (
    MAX_MESSAGES,
    Asked,
    BadField,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    NamedTool,
    TokenizeBody,
    ask_chat,
    ask_completion,
    check_fits,
)
from dsv4.text.chat import encode

_FILES = Path(__file__).parent / "page"
# The chat page: three files of ours, nothing from elsewhere, and no string that becomes a script.
PAGE = {
    path: ((_FILES / name).read_bytes(), f"{media}; charset=utf-8")
    for path, name, media in (
        ("/", "index.html", "text/html"),
        ("/page.css", "page.css", "text/css"),
        ("/page.js", "page.js", "text/javascript"),
    )
}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def tidy(message: dict[str, Any]) -> dict[str, Any]:
    """What OpenAI's clients add to a message: fields that are null, and developer as the name for system."""
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    return {**kept, "role": "system"} if kept.get("role") == "developer" else kept


def shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """As the model gets to see it; `strict` is about its answer."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool  # refused later, by name
    return {**tool, "function": {key: value for key, value in function.items() if key != "strict"}}


def form_of(body: ChatBody) -> Form | None:
    """What the answer is held to: always where JSON or a call is required, else by a tool's `strict`."""
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    tools = [tool for tool in body.offered if named in (None, tool["function"]["name"])]
    if body.schema is None and not body.must_call and not any(t["function"].get("strict") for t in tools):
        return None
    many = named is None and body.parallel_tool_calls is not False
    return Form(body.schema, tools, body.must_call, many)


def make_app(service: Service) -> ASGIApp:
    app = FastAPI(title="dsv4", docs_url=None, redoc_url=None, openapi_url=None)
    tokenizer, engine = service.tokenizer, service.engine

    def check_model(model: str | None) -> None:
        if model not in (None, service.name):
            why = f"The model {model!r} does not exist; this server has {service.name!r}"
            raise HttpError(404, why, "model_not_found")

    async def chat_ids(body: ChatBody, asked: Asked) -> tuple[int, ...]:
        def ids() -> tuple[int, ...]:
            segments = encode(
                [tidy(message) for message in body.messages],
                thinking=asked.thinking,
                reasoning_effort=asked.effort,
                tools=[shown_tool(tool) for tool in body.offered] or None,
                response_format=body.schema,
            )
            return tuple(tokenizer.encode_prompt(segments))

        return await asyncio.to_thread(ids)

    async def answer(
        request: Request,
        body: Body,
        asked: Asked,
        prompts: list[tuple[int, ...]],
        shape: ChatShape | PlainShape,
        answers: list[ChatAnswer] | list[PlainAnswer],
    ) -> Response:
        ready = engine.check_available(len(prompts) * len(asked.params))
        field = "messages" if isinstance(body, ChatBody) else "prompt"
        for ids in prompts:
            check_fits(len(ids), asked.params[0].max_tokens, ready.max_context, field)
        ticket = engine.submit(prompts, asked.params, request.scope["owner"])
        wants_logprobs = asked.params[0].logprobs is not None
        note = request.scope["note"]
        length = sum(map(len, prompts))
        job = Job(
            service, shape, answers, ticket, length, len(prompts), wants_logprobs, body.wants_usage, note
        )
        outcome: list[dict[str, Any]] = []

        async def start() -> None:
            await ticket.started()
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
        if (form := form_of(body)) is not None:
            grammar = form.grammar(tokenizer, asked.thinking)
            asked = replace(asked, params=[replace(params, grammar=grammar) for params in asked.params])
        call_id = f"call_{secrets.token_hex(8)}"
        answers = [
            ChatAnswer(
                tokenizer,
                thinking=asked.thinking,
                tools=body.offered,
                stops=body.stops,
                id_prefix=f"{call_id}_{index}_",
            )
            for index in range(len(asked.params))
        ]
        return await answer(request, body, asked, [ids], ChatShape(head(request, "chatcmpl")), answers)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        check_model(body.model)
        asked, given = ask_completion(body), body.prompts
        engine.check_available(len(given) * len(asked.params))
        prompts, answers = [], []
        for prompt in given:
            if isinstance(prompt, str):
                encoded = await asyncio.to_thread(tokenizer.encode_text, prompt)
                ids, text = (tokenizer.bos_id, *encoded), prompt
            else:
                ids = tuple(prompt)
                text = await asyncio.to_thread(tokenizer.decode, ids) if body.echo else ""
            echo = Echo(text, ids, isinstance(prompt, str), body.max_tokens == 0) if body.echo else None
            prompts.append(ids)
            answers += [PlainAnswer(echo) for _ in asked.params]
        shape = PlainShape(head(request, "cmpl"), tokenizer)
        return await answer(request, body, asked, prompts, shape, answers)

    @app.get("/")
    @app.get("/page.css")
    @app.get("/page.js")
    async def page(request: Request) -> Response:
        data, media = PAGE[request.url.path]
        return Response(data, media_type=media, headers=PAGE_HEADERS)

    @app.get("/openapi.json")
    async def description() -> dict[str, Any]:
        ready = engine.check_available(0)
        return openapi(service.name, ready.max_context, ready.vocab_size)

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
        return refusal(error)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return refusal(HttpError(500, "the server made a mistake; its log has more", None, "server_error"))

    @app.exception_handler(404)
    async def unknown(request: Request, error: Exception) -> Response:
        why = f"Unknown request URL: {request.method} {request.url.path}; see /v1/models"
        return refusal(HttpError(404, why, "unknown_url"))

    @app.exception_handler(405)
    async def wrong_method(request: Request, error: Exception) -> Response:
        why = f"{request.method} is not allowed for {request.url.path}"
        return refusal(HttpError(405, why, "method_not_supported"))

    return Gate(app, service)
