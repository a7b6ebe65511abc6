"""The routes: bodies in, answers out. Knows no processes and no sockets."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from dsv4 import __version__
from dsv4.engine.request import SamplingParams
from dsv4.serve.answer import ChatAnswer, Echo, PlainAnswer
from dsv4.serve.anthropic import CountBody, MessagesBody, MessagesShape
from dsv4.serve.ask import Asked, ask_chat, ask_completion, check_fits, check_ids
from dsv4.serve.describe import openapi
from dsv4.serve.files import routes as page_routes
from dsv4.serve.gate import PAGES, Gate, body_limit, json_response, key_hash, read_body, refusal
from dsv4.serve.job import AnyShape, EventStream, Job, Replay, Service
from dsv4.serve.openai import ChatShape, HttpError, PlainShape, Shape
from dsv4.serve.parse import Notes
from dsv4.serve.prompt import beside
from dsv4.serve.responses import ResponsesBody, ResponsesShape
from dsv4.serve.schema import (
    INPUT_FORM,
    AnyMessage,
    BadField,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from dsv4.serve.ticket import Ticket, Unavailable
from dsv4.text.chat import Release, encode, opens_thought
from dsv4.text.tokenizer import Segment


def shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """As the model gets to see it; what is left out is about its answer."""
    left_out = ("strict", INPUT_FORM)
    function = {key: value for key, value in tool["function"].items() if key not in left_out}
    return {**tool, "function": function}


def segments_of(
    messages: Sequence[AnyMessage], tools: list[dict[str, Any]], asked: Asked, release: Release
) -> list[Segment]:
    plain = [message.plain() for message in messages]
    if asked.continues:
        plain[-1]["wo_eos"] = True
    return encode(
        plain,
        thinking=asked.thinking,
        reasoning_effort=asked.effort,
        tools=[shown_tool(tool) for tool in tools] or None,
        response_format=asked.schema,
        release=release,
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
            "/v1/responses/{id}": self.response,
            "/version": self.version,
            "/health": self.health,
            "/ready": self.is_ready,
            "/metrics": self.metrics,
        }

    def router(self) -> Router:
        routes = [
            Route(path, self._reading(handler), methods=["POST"]) for path, handler in self.posts.items()
        ]
        routes += [Route(path, handler, methods=["GET"]) for path, handler in self.gets.items()]
        routes.append(Route("/v1/responses/{id}", self.delete_response, methods=["DELETE"]))
        return Router([*routes, *page_routes(self.service)], redirect_slashes=False)

    def _reading(self, handler: Callable[..., Awaitable[Response]]) -> Callable[[Request], Any]:
        """The handler of a request, given a body of the type that it names."""

        async def read(request: Request) -> Response:
            ready = self.engine.ready
            most = body_limit(ready.max_context if ready else 0)
            body = await read_body(request, handler.__annotations__["body"], most)
            self._check_model(body.model)
            return await handler(request, body)

        return read

    # What makes tokens. The first line of a handler is its description in /openapi.json.

    async def chat(self, request: Request, body: ChatBody) -> Response:
        """The assistant's next turn."""
        head = self._head(request, "chatcmpl")
        return await self._turn(request, body, ChatShape(head, body.n or 1, body, self.tokenizer))

    async def messages(self, request: Request, body: MessagesBody) -> Response:
        """The assistant's next turn, as Anthropic's clients ask for it."""
        shape = MessagesShape(f"msg_{self._id(request)}", self.service.name, body)
        return await self._turn(request, body.chat(request.scope["notes"]), shape)

    async def responses(self, request: Request, body: ResponsesBody) -> Response:
        """The assistant's next turn, as items."""
        notes, store, owner = request.scope["notes"], self.service.store, request.scope["key"]
        items = self._referred(body, owner, notes)
        tools = body.declared(notes)
        keep = partial(store.put, owner, items)
        is_kept = body.store is not False and "replay" not in request.scope
        shape = ResponsesShape(
            *(self._id(request), _created(request), self.service.name, body, tools),
            keep=keep if is_kept else None,
        )
        return await self._turn(request, body.chat(items, tools, notes), shape)

    def _referred(self, body: ResponsesBody, owner: str, notes: Notes) -> list[dict[str, Any]]:
        """The whole input: after that of the response it continues, with the items that it refers to."""
        store, items = self.service.store, list[dict[str, Any]]()
        if body.previous_response_id is not None:
            given, response = store.get(owner, body.previous_response_id)
            items = [*given, *response["output"]]
        for at, item in enumerate(body.items):
            # Vercel's SDK sends references without their type.
            if item.get("type", "item_reference" if item.keys() == {"id"} else None) != "item_reference":
                items.append(item)
                continue
            try:
                items.append(store.item(owner, str(item.get("id"))))
            except HttpError:
                if notes.ignored is None:
                    raise
                notes.ignored.append(f"input[{at}]")
        return items

    async def response(self, request: Request) -> Response:
        """A response that is kept."""
        return json_response(self.service.store.get(request.scope["key"], request.path_params["id"])[1])

    async def delete_response(self, request: Request) -> Response:
        owner, id = request.scope["key"], request.path_params["id"]
        self.service.store.get(owner, id)
        self.service.store.drop(owner, id)
        return json_response({"id": id, "object": "response", "deleted": True})

    async def _turn(self, request: Request, body: ChatBody, shape: AnyShape) -> Response:
        """The assistant's next turn, in the shape of one API or another."""
        asked = self._asked(body)
        ticket = self._reserve(request, len(asked.params))
        segments = await beside(request.scope["size"], self._segments, body.messages, body.offered, asked)
        ids = await self._ids(ticket, segments, asked, "messages")
        if isinstance(shape, Shape):
            shape.prompts = [ids]
        call_id = f"call_{self._id(request)[:16]}"
        answers = [
            ChatAnswer(
                self.tokenizer,
                thinking=opens_thought(segments),
                tools=body.offered,
                stops=body.stops,
                id_prefix=f"{call_id}_{index}_",
                params=params,
                tells_ids=bool(body.return_token_ids),
            )
            for index, params in enumerate(asked.params)
        ]
        return await self._answer(request, body, asked, ticket, [ids], shape, answers)

    def _asked(self, body: ChatBody) -> Asked:
        return ask_chat(body, self.tokenizer, self.service.usual)

    def _segments(
        self, messages: Sequence[AnyMessage], tools: list[dict[str, Any]], asked: Asked
    ) -> list[Segment]:
        return segments_of(messages, tools, asked, self.service.usual.release)

    async def completions(self, request: Request, body: CompletionBody) -> Response:
        """The continuation of a text, or of several."""
        asked, given = ask_completion(body, self.tokenizer, self.service.usual), body.prompts
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
            answers += [PlainAnswer(echo, bool(body.return_token_ids)) for _ in asked.params]
        shape = PlainShape(self._head(request, "cmpl"), len(answers), body, self.tokenizer)
        shape.prompts = prompts
        return await self._answer(request, body, asked, ticket, prompts, shape, answers)

    def _check_model(self, model: str | None) -> None:
        if not self.service.serves(model):
            why = f"The model {model!r} does not exist; this server has {self.service.name!r}"
            raise HttpError(404, why, "model_not_found")

    def _reserve(self, request: Request, count: int) -> Ticket:
        """Places, given back when the request has ended, however it did."""
        ticket: Ticket = request.scope["stack"].enter_context(self.engine.reserve(count))
        ticket.client_id = request.scope["note"].get("client_id")
        return ticket

    async def _ids(
        self, ticket: Ticket, segments: list[Segment], asked: Asked, field: str
    ) -> tuple[int, ...]:
        wanted, room = asked.params[0].max_tokens, ticket.ready.max_context
        ids = tuple(await self.encoder.ids(segments, room, field))
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
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            check_ids(getattr(body, name) or (), ticket.ready.vocab_size, name)
        replay: Replay | None = request.scope.get("replay")
        ticket.tells_progress = bool(body.return_progress)
        owner = request.scope["owner"]
        if body.cache_salt is not None:
            owner = key_hash(f"{owner} {body.cache_salt}".encode()).hex()
        ticket.submit(prompts, _seeded(asked.params, replay), owner)
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
            began=request.scope["began"],
            progress=shape.progress if body.return_progress and isinstance(shape, Shape) else None,
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
        chat = body.chat(request.scope["notes"])
        segments = await asyncio.to_thread(self._segments, chat.messages, chat.offered, self._asked(chat))
        ids = await self.encoder.ids(segments, None, "messages")
        return json_response({"input_tokens": len(ids)})

    async def tokenize(self, request: Request, body: TokenizeBody) -> Response:
        """A text's or a conversation's token ids."""
        if (body.prompt is None) == (body.messages is None):
            raise BadField("give prompt or messages, one of them", "prompt")
        segments: list[Segment] = [body.prompt or ""]
        if body.messages is not None:
            asked = Asked([], self.service.usual.thinking)
            segments = await asyncio.to_thread(self._segments, body.messages, [], asked)
        ids = await self.encoder.ids(segments, None, "prompt")
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
        """The model, under each of its names."""
        models = [self._model(name) for name in self.service.names if not set(name) & set("*?[")]
        ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}
        return json_response({"object": "list", "data": models, **ends})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["id"])
        return json_response(self._model(request.path_params["id"]))

    def _model(self, name: str) -> dict[str, Any]:
        """In OpenAI's shape and in Anthropic's."""
        ready, created = self.engine.ready, self.service.created
        length = ready.max_context if ready else None
        return {
            **{
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "dsv4",
                "root": self.service.name,
            },
            **{"type": "model", "display_name": name},
            "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
            **{"lifecycle": "active", "max_input_tokens": length, "max_tokens": length},
            **{"max_model_len": length, "context_length": length},
            "sampling_defaults": self.service.usual.sampling.shown(),
        }

    async def version(self, request: Request) -> Response:
        """The server's version."""
        return json_response({"version": __version__})

    async def health(self, request: Request) -> Response:
        """Whether the server is alive."""
        return json_response({"status": "alive"})

    async def is_ready(self, request: Request) -> Response:
        """Whether a model is loaded, and how far it is."""
        phase, fraction = self.engine.phase
        try:
            self.engine.check_ready()
        except Unavailable as error:
            answer = refusal(error, ready=False, phase=phase, fraction=round(fraction, 4))
        else:
            answer = json_response({"ready": True, "status": "ready", "phase": phase, "fraction": fraction})
        return answer

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
