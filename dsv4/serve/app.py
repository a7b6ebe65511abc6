"""The routes: bodies in, answers out. Knows no processes and no sockets."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from dsv4.engine.request import SamplingParams
from dsv4.serve.answer import ChatAnswer, Echo, PlainAnswer
from dsv4.serve.anthropic import CountBody, MessagesBody, MessagesShape
from dsv4.serve.ask import Asked, ask_chat, ask_completion, check_fits, check_ids
from dsv4.serve.client import Ticket
from dsv4.serve.describe import openapi
from dsv4.serve.files import routes as page_routes
from dsv4.serve.gate import PAGES, Gate, json_response, read_body
from dsv4.serve.job import AnyShape, EventStream, Job, Replay, Service
from dsv4.serve.openai import ChatShape, HttpError, PlainShape
from dsv4.serve.prompt import beside
from dsv4.serve.responses import ResponsesBody, ResponsesShape
from dsv4.serve.schema import (
    AnyMessage,
    BadField,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from dsv4.text.chat import encode
from dsv4.text.tokenizer import Segment


def shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """As the model gets to see it; `strict` is about its answer."""
    function = {key: value for key, value in tool["function"].items() if key != "strict"}
    return {**tool, "function": function}


def segments_of(messages: Sequence[AnyMessage], tools: list[dict[str, Any]], asked: Asked) -> list[Segment]:
    plain = [message.plain() for message in messages]
    if asked.continues:
        plain[-1]["wo_eos"] = True
    return encode(
        plain,
        thinking=asked.thinking,
        reasoning_effort=asked.effort,
        tools=[shown_tool(tool) for tool in tools] or None,
        response_format=asked.schema,
    )


class Routes:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.engine, self.encoder, self.tokenizer = service.engine, service.encoder, service.encoder.tokenizer

        self.posts: dict[str, Callable[..., Awaitable[Response]]] = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.completions,
            "/v1/messages": self.messages,
            "/v1/messages/count_tokens": self.count_tokens,
            "/v1/responses": self.responses,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        self.gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/openapi.json": self.description,
            "/v1/models": self.models,
            "/v1/models/{id:path}": self.model,
            "/health": self.health,
            "/ready": self.is_ready,
            "/metrics": self.metrics,
        }

    def router(self) -> Router:
        routes = [
            Route(path, self._reading(handler), methods=["POST"]) for path, handler in self.posts.items()
        ]
        routes += [Route(path, handler, methods=["GET"]) for path, handler in self.gets.items()]
        return Router([*routes, *page_routes(self.service)], redirect_slashes=False)

    def _reading(self, handler: Callable[..., Awaitable[Response]]) -> Callable[[Request], Any]:
        """The handler of a request, given a body of the type that it names."""

        async def read(request: Request) -> Response:
            body = await read_body(request, handler.__annotations__["body"])
            self._check_model(body.model)
            return await handler(request, body)

        return read

    # What makes tokens. The first line of a handler is its description in /openapi.json.

    async def chat(self, request: Request, body: ChatBody) -> Response:
        """The assistant's next turn."""
        with_logprobs = bool(body.logprobs)
        shape = ChatShape(self._head(request, "chatcmpl"), body.n or 1, with_logprobs, body.wants_usage)
        return await self._turn(request, body, shape)

    async def messages(self, request: Request, body: MessagesBody) -> Response:
        """The assistant's next turn, as Anthropic's clients ask for it."""
        shape = MessagesShape(f"msg_{self._id(request)}", self.service.name)
        return await self._turn(request, body.chat(), shape)

    async def responses(self, request: Request, body: ResponsesBody) -> Response:
        """The assistant's next turn, as items."""
        shape = ResponsesShape(self._id(request), _created(request), self.service.name, body)
        return await self._turn(request, body.chat(), shape)

    async def _turn(self, request: Request, body: ChatBody, shape: AnyShape) -> Response:
        """The assistant's next turn, in the shape of one API or another."""
        asked = self._asked(body)
        ticket = self._reserve(request, len(asked.params))
        segments = await beside(request.scope["size"], segments_of, body.messages, body.offered, asked)
        ids = await self._ids(ticket, segments, asked, "messages")
        call_id = f"call_{self._id(request)[:16]}"
        answers = [
            ChatAnswer(
                self.tokenizer,
                thinking=asked.thinking and not asked.continues,
                tools=body.offered,
                stops=body.stops,
                id_prefix=f"{call_id}_{index}_",
            )
            for index in range(len(asked.params))
        ]
        return await self._answer(request, body, asked, ticket, [ids], shape, answers)

    def _asked(self, body: ChatBody) -> Asked:
        return ask_chat(body, self.tokenizer, self.service.thinking, self.service.max_thinking)

    async def completions(self, request: Request, body: CompletionBody) -> Response:
        """The continuation of a text, or of several."""
        asked, given = ask_completion(body, self.tokenizer), body.prompts
        ticket = self._reserve(request, len(given) * len(asked.params))
        prompts, answers = [], []
        for prompt in given:
            if isinstance(prompt, str):
                encoded = await self._ids(ticket, [prompt], asked, "prompt")
                ids, text = (self.tokenizer.bos_id, *encoded), prompt
            else:
                check_ids(prompt, ticket.ready.vocab_size, "prompt")
                ids = tuple(prompt)
                text = await asyncio.to_thread(self.tokenizer.decode, ids) if body.echo else ""
            echo = Echo(text, ids, isinstance(prompt, str), body.max_tokens == 0) if body.echo else None
            check_fits(len(ids), asked.params[0].max_tokens, ticket.ready.max_context, "prompt")
            prompts.append(ids)
            answers += [PlainAnswer(echo) for _ in asked.params]
        with_logprobs = body.logprobs is not None
        head, count = self._head(request, "cmpl"), len(answers)
        shape = PlainShape(self.tokenizer, head, count, with_logprobs, body.wants_usage)
        return await self._answer(request, body, asked, ticket, prompts, shape, answers)

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self.service.name):
            why = f"The model {model!r} does not exist; this server has {self.service.name!r}"
            raise HttpError(404, why, "model_not_found")

    def _reserve(self, request: Request, count: int) -> Ticket:
        """Places, given back when the request has ended, however it did."""
        return request.scope["stack"].enter_context(self.engine.reserve(count))

    async def _ids(
        self, ticket: Ticket, segments: list[Segment], asked: Asked, field: str
    ) -> tuple[int, ...]:
        wanted, room = asked.params[0].max_tokens, ticket.ready.max_context
        ids = tuple(await self.encoder.ids(segments, wanted, room, field))
        check_fits(len(ids), wanted, room, field)
        return ids

    async def _answer(
        self,
        request: Request,
        body: Body,
        asked: Asked,
        ticket: Ticket,
        prompts: list[tuple[int, ...]],
        shape: AnyShape,
        answers: list[ChatAnswer] | list[PlainAnswer],
    ) -> Response:
        check_ids(body.logit_bias or (), ticket.ready.vocab_size, "logit_bias")
        replay: Replay | None = request.scope.get("replay")
        ticket.submit(prompts, _seeded(asked.params, replay), request.scope["owner"])
        note = request.scope["note"]
        if self.service.logs_texts:
            texts = [await asyncio.to_thread(self.tokenizer.decode, ids) for ids in prompts]
            note["prompt_text"] = json.dumps("\n".join(texts), ensure_ascii=False)
        job = Job(
            service=self.service,
            shape=shape,
            answers=answers,
            ticket=ticket,
            num_prompt=sum(map(len, prompts)),
            num_prompts=len(prompts),
            note=note,
            tells_cached=replay is None,
        )
        request.scope["stack"].enter_context(job)
        watcher = asyncio.create_task(job.watch(request.receive))
        request.scope["stack"].callback(watcher.cancel)
        await ticket.started()
        return EventStream(job) if body.stream else json_response(await job.whole())

    def _id(self, request: Request) -> str:
        return request.scope["note"]["id"].removeprefix("req_")

    def _head(self, request: Request, prefix: str) -> dict[str, Any]:
        id = f"{prefix}-{self._id(request)}"
        return {"id": id, "created": _created(request), "model": self.service.name}

    # What does not.

    async def count_tokens(self, request: Request, body: CountBody) -> Response:
        """How many tokens such a request has."""
        chat = body.chat()
        segments = await asyncio.to_thread(segments_of, chat.messages, chat.offered, self._asked(chat))
        ids = await self.encoder.ids(segments, None, None, "messages")
        return json_response({"input_tokens": len(ids)})

    async def tokenize(self, request: Request, body: TokenizeBody) -> Response:
        """A text's or a conversation's token ids."""
        if (body.prompt is None) == (body.messages is None):
            raise BadField("give prompt or messages, one of them", "prompt")
        segments: list[Segment] = [body.prompt or ""]
        if body.messages is not None:
            asked = Asked([], self.service.thinking)
            segments = await asyncio.to_thread(segments_of, body.messages, [], asked)
        ids = await self.encoder.ids(segments, None, None, "prompt")
        return json_response({"tokens": ids, "count": len(ids)})

    async def detokenize(self, request: Request, body: DetokenizeBody) -> Response:
        """The text of token ids."""
        check_fits(len(body.tokens), 0, self.engine.check_ready().max_context, "tokens")
        return json_response({"prompt": await asyncio.to_thread(self.tokenizer.decode, body.tokens)})

    async def description(self, request: Request) -> Response:
        return json_response(
            openapi(self.service.name, self.engine.check_ready(), posts=self.posts, gets=self.gets)
        )

    async def models(self, request: Request) -> Response:
        """The model."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["id"])
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        ready, service = self.engine.ready, self.service
        model = {"id": service.name, "object": "model", "created": service.created, "owned_by": "dsv4"}
        length = ready.max_context if ready else None
        return {**model, "max_model_len": length, "context_length": length}

    async def health(self, request: Request) -> Response:
        """Whether the server is alive."""
        return json_response({"status": "alive"})

    async def is_ready(self, request: Request) -> Response:
        """Whether a model is loaded."""
        self.engine.check_ready()
        return json_response({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """Counters, for Prometheus."""
        return Response(self.service.metrics.text(), media_type="text/plain; version=0.0.4")


def _created(request: Request) -> int:
    replay: Replay | None = request.scope.get("replay")
    return replay.created if replay else int(time.time())


def _seeded(params: list[SamplingParams], replay: Replay | None) -> list[SamplingParams]:
    if replay is None:
        return params
    return [
        one if one.seed is not None else replace(one, seed=(replay.seed + index) % (1 << 64))
        for index, one in enumerate(params)
    ]


def make_app(service: Service) -> ASGIApp:
    routes = Routes(service)
    return Gate(routes.router(), service, {*routes.posts, *routes.gets, *PAGES})
