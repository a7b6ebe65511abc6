"""OpenAI's Responses: bodies to those of a chat, answers as items and events. Nothing is kept for later."""

import base64
import binascii
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dsv4.errors import Dsv4Error
from dsv4.serve import schema
from dsv4.serve.answer import Piece
from dsv4.serve.blocks import Block, Blocks
from dsv4.serve.openai import Usage, error_body

# Items of the input. Fields without a type are what comes back of our own answers, and has no effect.


class Part(schema.Strict, frozen=True, kw_only=True):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


class Item(schema.Strict, frozen=True, kw_only=True):
    id: Any = None
    status: Any = None


class MessageItem(Item, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    type: Literal["message"] = "message"
    phase: Any = None


class CallItem(Item, frozen=True, kw_only=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputItem(Item, frozen=True, kw_only=True):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]


class ReasoningItem(Item, frozen=True, kw_only=True):
    type: Literal["reasoning"]
    summary: list[Part] | None = None
    content: list[Part] | None = None
    encrypted_content: str | None = None


ITEMS: dict[Any, type[Any]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}


class FlatTool(schema.Strict, frozen=True, kw_only=True):
    type: Literal["function"]
    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class FlatChoice(schema.Strict, frozen=True, kw_only=True):
    type: Literal["function"]
    name: str


class Reasoning(schema.Strict, frozen=True, kw_only=True):
    effort: schema.Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextConfig(schema.Strict, frozen=True, kw_only=True):
    format: schema.TextFormat | schema.JsonFormat | schema.JsonSchema | None = None
    verbosity: str | None = None


class ResponsesBody(schema.Strict, frozen=True, kw_only=True):
    """The last group has no effect."""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=schema.MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: schema.Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stream: bool | None = None
    tools: Annotated[list[FlatTool], Meta(max_length=schema.MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    previous_response_id: str | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None

    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    stream_options: schema.StreamOptions | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    conversation: None = None
    prompt: None = None

    def chat(self) -> schema.ChatBody:
        if self.previous_response_id is not None:
            why = "responses are not kept here; send the whole conversation as input"
            raise schema.BadField(
                f"previous_response_id is {self.previous_response_id!r}, but {why}", "previous_response_id"
            )
        system: list[schema.AnyMessage] = (
            [schema.SystemMessage(content=self.instructions)] if self.instructions else []
        )
        given = self.text.format if self.text else None
        form: Any = given
        if isinstance(given, schema.JsonSchema):
            form = schema.SchemaFormat(json_schema=schema.NamedSchema(name="answer", schema=given.schema))
        choice: Any = self.tool_choice
        if isinstance(choice, FlatChoice):
            choice = schema.NamedTool(function=schema.FunctionName(name=choice.name))
        return schema.ChatBody(
            messages=[*system, *_chat_messages(self.input)],
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            tools=[schema.Tool(function=_function(tool)) for tool in self.tools or ()],
            tool_choice=choice if self.tools else None,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            response_format=form,
        )


def _function(tool: FlatTool) -> dict[str, Any]:
    fields = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
    return {name: value for name, value in fields.items() if value is not None}


def _chat_messages(given: str | list[dict[str, Any]]) -> list[schema.AnyMessage]:
    """A thought, a text and calls that follow each other are one turn of the assistant."""
    messages: list[schema.AnyMessage] = []
    turn: dict[str, Any] = {}

    def end_turn() -> None:
        if turn:
            messages.append(schema.AssistantMessage(**turn))
            turn.clear()

    for at, raw in enumerate([{"role": "user", "content": given}] if isinstance(given, str) else given):
        kind = ITEMS.get(raw.get("type", "message"))
        if kind is None:
            raise schema.BadField(
                f"input[{at}]: type is {raw.get('type')!r}; use one of {', '.join(ITEMS)}", "input"
            )
        try:
            item = msgspec.convert(raw, kind)
        except msgspec.ValidationError as error:
            raise schema.BadField(f"input[{at}]: {error}", "input", "invalid_type") from None
        if isinstance(item, ReasoningItem):
            end_turn()
            turn["reasoning_content"] = _thought(item, at)
        elif isinstance(item, CallItem):
            called = schema.CalledFunction(name=item.name, arguments=item.arguments)
            turn.setdefault("tool_calls", []).append(schema.ToolCall(id=item.call_id, function=called))
        elif isinstance(item, MessageItem) and item.role == "assistant":
            if "content" in turn or "tool_calls" in turn:
                end_turn()
            turn["content"] = _text(item.content)
        else:
            end_turn()
            if isinstance(item, OutputItem):
                messages.append(schema.ToolMessage(content=_text(item.output), tool_call_id=item.call_id))
            else:
                kinds = {
                    "user": schema.UserMessage,
                    "system": schema.SystemMessage,
                    "developer": schema.SystemMessage,
                }
                parts = (
                    item.content
                    if isinstance(item.content, str)
                    else [schema.TextPart(text=p.text) for p in item.content]
                )
                messages.append(kinds[item.role](content=parts))
    end_turn()
    return messages


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _thought(item: ReasoningItem, at: int) -> str:
    """`encrypted_content` is what clients send back that keep nothing else; here it is the text as it is."""
    if item.content or not item.encrypted_content:
        return _text(item.content or item.summary or "")
    try:
        return base64.b64decode(item.encrypted_content, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise schema.BadField(f"input[{at}]: encrypted_content is not this server's", "input") from None


class ResponsesShape:
    end = b""

    def __init__(self, id: str, created: int, model: str, body: ResponsesBody) -> None:
        self._id, self._body, self._blocks, self._number = id, body, Blocks(), 0
        shown = msgspec.to_builtins(body)
        kept = ("instructions", "max_output_tokens", "temperature", "top_p", "metadata", "user")
        self._head = {
            "id": f"resp_{id}",
            "object": "response",
            "created_at": created,
            "model": model,
            "error": None,
            **{key: shown[key] for key in kept},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": shown["reasoning"] or {"effort": None, "summary": None},
            "store": False,
            "text": shown["text"] or {"format": {"type": "text"}},
            "tool_choice": shown["tool_choice"] or "auto",
            "tools": shown["tools"] or [],
            "truncation": "disabled",
        }

    def opening(self, usage: Usage) -> list[dict[str, Any]]:
        response = {**self._response(usage), "status": "in_progress", "usage": None}
        return [self._event(f"response.{what}", response=response) for what in ("created", "in_progress")]

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        return [event for step in self._blocks.push(piece) for event in self._events(*step)]

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        events = [event for step in self._blocks.close() for event in self._events(*step)]
        response = self._response(usage)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def whole(self, pieces: list[list[Piece]], usage: Usage) -> dict[str, Any]:
        for piece in pieces[0]:
            for _ in self._blocks.push(piece):
                pass
        return self._response(usage)

    def error(self, error: Dsv4Error) -> dict[str, Any]:
        body = error_body(error)[1]["error"]
        return self._event("error", message=body["message"], code=body["code"], param=body["param"])

    def _response(self, usage: Usage) -> dict[str, Any]:
        is_cut = self._blocks.finish_reason == "length"
        return {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(block, "completed") for block in self._blocks.all],
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.completion,
            },
        }

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            call = {"call_id": block.id, "name": block.name, "arguments": block.text}
            return {**item, "type": "function_call", **call}
        part = [_part(block, block.text)] if status == "completed" else []
        if block.kind == "text":
            return {**item, "type": "message", "role": "assistant", "content": part}
        is_wanted = status == "completed" and "reasoning.encrypted_content" in (self._body.include or ())
        sealed = base64.b64encode(block.text.encode()).decode() if is_wanted else None
        return {**item, "type": "reasoning", "summary": [], "content": part, "encrypted_content": sealed}

    def _item_id(self, block: Block) -> str:
        return f"{ {'reasoning': 'rs', 'text': 'msg', 'call': 'fc'}[block.kind] }_{self._id}_{block.index}"

    def _events(self, what: str, block: Block, text: str) -> Iterator[dict[str, Any]]:
        at = {"item_id": self._item_id(block), "output_index": block.index}
        inside = at if block.kind == "call" else {**at, "content_index": 0}
        names = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
        name = f"response.{names[block.kind]}"
        extra: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if what == "more":
            yield self._event(f"{name}.delta", **inside, delta=text, **extra)
            return
        verb, status = ("added", "in_progress") if what == "open" else ("done", "completed")
        item = {"output_index": block.index, "item": self._item(block, status)}
        part = {**inside, "part": _part(block, block.text)} if block.kind != "call" else None
        if what == "open":
            yield self._event("response.output_item.added", **item)
        else:
            key = "arguments" if block.kind == "call" else "text"
            yield self._event(f"{name}.done", **inside, **{key: block.text}, **extra)
        if part is not None:
            yield self._event(f"response.content_part.{verb}", **part)
        if what == "close":
            yield self._event("response.output_item.done", **item)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
