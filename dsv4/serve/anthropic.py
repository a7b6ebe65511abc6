"""Anthropic's Messages: bodies to those of a chat, answers and errors in their shape. Knows no routes.

A thought's signature is a checksum: it says that the thought which comes back is the one that was given out.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dsv4.errors import Dsv4Error
from dsv4.serve import schema
from dsv4.serve.answer import Piece
from dsv4.serve.blocks import Block, Blocks
from dsv4.serve.openai import Usage, error_body

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ThinkingBlock(schema.Strict, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(schema.Strict, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None
    toolset_name: None = None


class ToolResultBlock(schema.Strict, frozen=True, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[dict[str, Any]] = ""
    is_error: bool | None = None
    cache_control: Any = None


class Message(schema.Strict, frozen=True, kw_only=True):
    role: Literal["user", "assistant"]
    content: str | list[schema.TextPart | ThinkingBlock | ToolUseBlock | ToolResultBlock]


class CustomTool(schema.Strict, frozen=True, kw_only=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None


class ToolChoice(schema.Strict, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(schema.Strict, frozen=True, kw_only=True):
    effort: schema.Effort | None = None
    format: schema.JsonSchema | None = None


class CountBody(schema.Strict, frozen=True, kw_only=True):
    """What `count_tokens` takes; all of it is in a request for a message too."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1, max_length=schema.MAX_MESSAGES)]
    system: str | list[schema.TextPart] | None = None
    tools: Annotated[list[CustomTool], Meta(max_length=schema.MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: schema.Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None

    def chat(self, **more: Any) -> schema.ChatBody:
        """The same request as a chat's. Who does not ask for thinking gets none."""
        system: list[schema.AnyMessage] = [schema.SystemMessage(content=self.system)] if self.system else []
        choice, config = self.tool_choice, self.output_config or OutputConfig()
        names: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
        if choice is not None and choice.type == "tool":
            names["tool"] = schema.NamedTool(function=schema.FunctionName(name=choice.name or ""))
        form = None
        if config.format is not None:
            form = schema.SchemaFormat(
                json_schema=schema.NamedSchema(name="answer", schema=config.format.schema)
            )
        is_off = self.thinking is None or self.thinking.type == "disabled"
        messages = [*system, *(chat for message in self.messages for chat in _chat_messages(message))]
        if messages and isinstance(messages[-1], schema.AssistantMessage):  # the beginning of the answer
            messages[-1] = msgspec.structs.replace(messages[-1], prefix=True)
        return schema.ChatBody(
            messages=messages,
            tools=[schema.Tool(function=_function(tool)) for tool in self.tools or ()],
            tool_choice=names[choice.type] if choice and self.tools else None,
            parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
            thinking=self.thinking or schema.Thinking(type="disabled"),
            reasoning_effort=None if is_off else config.effort,
            response_format=form,
            **more,
        )


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """The last group has no effect."""

    max_tokens: schema.Count
    stop_sequences: Annotated[list[schema.Stop], Meta(max_length=schema.MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 30)] | None = None

    metadata: Any = None
    service_tier: str | None = None

    def chat(self, **more: Any) -> schema.ChatBody:
        return super().chat(
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )


def _function(tool: CustomTool) -> dict[str, Any]:
    given = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {key: value for key, value in {**given, "strict": tool.strict}.items() if value is not None}


def _chat_messages(message: Message) -> Iterator[schema.AnyMessage]:
    blocks = [schema.TextPart(text=message.content)] if isinstance(message.content, str) else message.content
    if message.role == "user":
        for block in blocks:
            if isinstance(block, schema.TextPart):
                yield schema.UserMessage(content=[block])
            elif isinstance(block, ToolResultBlock):
                yield schema.ToolMessage(content=block.content, tool_call_id=block.tool_use_id)
            else:
                raise schema.BadField(f"a user's message cannot hold a {type(block).__name__}", "messages")
        return
    thoughts, texts, calls = [], [], []
    for block in blocks:
        if isinstance(block, ThinkingBlock):
            if block.signature != signature(block.thinking):
                raise schema.BadField(
                    "a thinking block's signature is not of its text; send it as it came", "messages"
                )
            thoughts.append(block.thinking)
        elif isinstance(block, schema.TextPart):
            texts.append(block.text)
        elif isinstance(block, ToolUseBlock):
            called = schema.CalledFunction(
                name=block.name, arguments=json.dumps(block.input, ensure_ascii=False)
            )
            calls.append(schema.ToolCall(id=block.id, function=called))
        else:
            raise schema.BadField("an assistant's message cannot hold a tool_result", "messages")
    yield schema.AssistantMessage(
        content="".join(texts), reasoning_content="".join(thoughts) or None, tool_calls=calls or None
    )


def signature(thought: str) -> str:
    return base64.b64encode(hashlib.sha256(b"dsv4 thought\0" + thought.encode()).digest()).decode()


class MessagesShape:
    end = b""

    def __init__(self, id: str, model: str) -> None:
        self._head = {"id": id, "type": "message", "role": "assistant", "model": model}
        self._blocks = Blocks()

    def opening(self, usage: Usage) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": self._message([], usage)}]

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        return [event for step in self._blocks.push(piece) for event in _events(*step)]

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        message = self._message([], usage)
        delta = {key: message[key] for key in ("stop_reason", "stop_sequence")}
        return [
            *(event for step in self._blocks.close() for event in _events(*step)),
            {"type": "message_delta", "delta": delta, "usage": message["usage"]},
            {"type": "message_stop"},
        ]

    def whole(self, pieces: list[list[Piece]], usage: Usage) -> dict[str, Any]:
        for piece in pieces[0]:
            for _ in self._blocks.push(piece):
                pass
        return self._message([_whole(block) for block in self._blocks.all], usage)

    def _message(self, content: list[Any], usage: Usage) -> dict[str, Any]:
        blocks = self._blocks
        reason = "stop_sequence" if blocks.stop else STOP_REASONS.get(blocks.finish_reason or "")
        counts = {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
        }
        ending = {"stop_reason": reason, "stop_sequence": blocks.stop}
        return {**self._head, "content": content, **ending, "usage": counts}

    def error(self, error: Dsv4Error) -> dict[str, Any]:
        return error_shape(error)


def error_shape(error: Dsv4Error) -> dict[str, Any]:
    status, _ = error_body(error)
    return {"type": "error", "error": {"type": ERROR_KINDS.get(status, "api_error"), "message": str(error)}}


def _whole(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": signature(block.text)}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    try:
        arguments = msgspec.json.decode(block.text)
    except msgspec.DecodeError:  # cut by the token limit, as the stop reason says
        arguments = {}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}


def _events(what: str, block: Block, text: str) -> Iterator[dict[str, Any]]:
    names = {"reasoning": "thinking", "text": "text", "call": "partial_json"}
    kinds = {"reasoning": "thinking_delta", "text": "text_delta", "call": "input_json_delta"}
    head = {"index": block.index}
    if what == "open":
        start = _whole(Block(block.kind, block.index, block.id, block.name, parts=["{}"]))
        start |= {"thinking": "", "signature": ""} if block.kind == "reasoning" else {}
        start |= {"text": ""} if block.kind == "text" else {}
        yield {"type": "content_block_start", **head, "content_block": start}
    elif what == "more":
        delta = {"type": kinds[block.kind], names[block.kind]: text}
        yield {"type": "content_block_delta", **head, "delta": delta}
    else:
        if block.kind == "reasoning":
            signed = {"type": "signature_delta", "signature": signature(block.text)}
            yield {"type": "content_block_delta", **head, "delta": signed}
        yield {"type": "content_block_stop", **head}
