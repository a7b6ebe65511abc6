"""Anthropic's Messages: bodies to those of a chat, answers and errors in their shape. Knows no routes."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from dsv4.errors import Dsv4Error
from dsv4.serve import schema
from dsv4.serve.answer import Piece
from dsv4.serve.blocks import Block, Blocks, sealed, unsealed
from dsv4.serve.openai import HttpError, Usage, error_body
from dsv4.serve.parse import Notes, checked_each

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

# What Claude Code puts in front of its first system block.
_BILLING = "x-anthropic-billing-header:"


class ThinkingBlock(schema.Strict, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str = ""
    signature: str = ""

    @property
    def text(self) -> str:
        """Where it was left out, the signature carries it; another server's carries nothing we could read."""
        return self.thinking or unsealed(self.signature)


class RedactedBlock(schema.Strict, frozen=True, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """Another server's thought, which nobody else can read."""

    data: Any = None


class ToolUseBlock(schema.Strict, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(schema.Strict, frozen=True, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[dict[str, Any]] = ""


class Turn(schema.Strict, frozen=True, kw_only=True, tag_field="role"):
    pass


class UserTurn(Turn, frozen=True, kw_only=True, tag="user"):
    content: str | list[schema.TextPart | ToolResultBlock]


class SystemTurn(Turn, frozen=True, kw_only=True, tag="system"):
    """What an agent has to say meanwhile; V4 knows such a text as a part of the user's turn."""

    content: schema.Text


class AssistantTurn(Turn, frozen=True, kw_only=True, tag="assistant"):
    comes_back: ClassVar[bool] = True
    content: str | list[schema.TextPart | ThinkingBlock | RedactedBlock | ToolUseBlock]


class ClientTool(schema.Strict, frozen=True, kw_only=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None  # shown from where a result refers to it


class ToolChoice(schema.Strict, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(schema.Strict, frozen=True, kw_only=True):
    effort: schema.Effort | None = None
    format: schema.JsonSchema | None = None


class KeptTurns(schema.Strict, frozen=True, kw_only=True):
    type: Literal["thinking_turns"]
    value: schema.Count


class Edit(schema.Strict, frozen=True, kw_only=True):
    """Leaves out the thoughts of older turns."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | KeptTurns = KeptTurns(type="thinking_turns", value=1)


class ContextManagement(schema.Strict, frozen=True, kw_only=True):
    edits: Annotated[list[Edit], Meta(max_length=1)] = msgspec.field(default_factory=list)


class Thread(schema.Strict, frozen=True, kw_only=True):
    """Nothing is kept here, so every thread begins with the whole conversation."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class CountBody(schema.Strict, frozen=True, kw_only=True):
    """What `count_tokens` takes; all of it is in a request for a message too."""

    model: str
    messages: Annotated[
        list[UserTurn | SystemTurn | AssistantTurn], Meta(min_length=1, max_length=schema.MAX_MESSAGES)
    ]
    system: schema.Text | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=schema.MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: schema.Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    thread: Thread | None = None

    def chat(self, notes: Notes, **more: Any) -> schema.ChatBody:
        """The same request as a chat's. Who does not ask for thinking gets none."""
        if self.thread is not None and self.thread.type == "continue":
            why = f"no thread with {self.thread.previous_message_id!r} is kept"
            raise HttpError(404, f"{why}; send the whole conversation, with type create", "thread_not_found")
        choice, config = self.tool_choice, self.output_config or OutputConfig()
        names: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
        if choice is not None and choice.type == "tool":
            names["tool"] = schema.ToolChoice(function=schema.FunctionName(name=choice.name or ""))
        form = None
        if config.format is not None:
            form = schema.SchemaFormat(json_schema=schema.NamedSchema(schema=config.format.schema))
        is_off = self.thinking is None or self.thinking.type == "disabled"
        tools = list(checked_each({"custom": ClientTool}, "custom", self.tools or [], "tools", notes))
        found = _referred(self.messages) if any(tool.defer_loading for tool in tools) else ()
        shown = [tool for tool in tools if not tool.defer_loading or tool.name in found]
        return schema.ChatBody(
            messages=self._chat_messages(),
            tools=[schema.Tool(function=_function(tool)) for tool in shown],
            tool_choice=names[choice.type] if choice and shown else None,
            parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
            thinking=self.thinking or schema.Thinking(type="disabled"),
            reasoning_effort=None if is_off else config.effort,
            response_format=form,
            **more,
        )

    def _chat_messages(self) -> list[schema.AnyMessage]:
        system = _parts(self.system or [])
        if system and system[0].text.startswith(_BILLING):
            del system[0]  # it changes with every conversation, and no two would share their beginning
        messages: list[schema.AnyMessage] = [schema.SystemMessage(content=system)] if system else []
        messages += [chat for turn in self.messages for chat in _chat_messages(turn)]
        for edit in self.context_management.edits if self.context_management else ():
            if isinstance(edit.keep, KeptTurns):
                thought = [at for at, one in enumerate(messages) if getattr(one, "reasoning_content", None)]
                for at in thought[: -edit.keep.value]:
                    messages[at] = msgspec.structs.replace(messages[at], reasoning_content=None)
        if isinstance(messages[-1], schema.AssistantMessage):  # the beginning of the answer
            messages[-1] = msgspec.structs.replace(messages[-1], prefix=True)
        return messages


class MessagesBody(CountBody, frozen=True, kw_only=True):
    max_tokens: schema.Count
    stop_sequences: Annotated[list[schema.Stop], Meta(max_length=schema.MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 30)] | None = None

    def chat(self, notes: Notes, **more: Any) -> schema.ChatBody:
        return super().chat(
            notes,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )


def _function(tool: ClientTool) -> dict[str, Any]:
    given = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {key: value for key, value in {**given, "strict": tool.strict}.items() if value is not None}


def _parts(content: str | list[Any]) -> list[Any]:
    return [schema.TextPart(text=content)] if isinstance(content, str) else list(content)


def _referred(turns: list[Any]) -> set[Any]:
    """The names of tools that results refer to."""
    parts = [part for turn in turns for part in _parts(turn.content)]
    lists = [p.content for p in parts if isinstance(p, ToolResultBlock) and isinstance(p.content, list)]
    return {b.get("tool_name") for blocks in lists for b in blocks if b.get("type") == "tool_reference"}


def _chat_messages(turn: UserTurn | SystemTurn | AssistantTurn) -> Iterator[schema.AnyMessage]:
    blocks = _parts(turn.content)
    if isinstance(turn, SystemTurn):
        text = "\n\n".join(block.text for block in blocks)
        yield schema.UserMessage(content=f"<system-reminder>\n{text}\n</system-reminder>")
    elif isinstance(turn, UserTurn):
        for block in blocks:
            if isinstance(block, schema.TextPart):
                yield schema.UserMessage(content=[block])
            else:
                yield schema.ToolMessage(content=_result(block.content), tool_call_id=block.tool_use_id)
    else:
        calls = [
            schema.ToolCall(
                id=block.id,
                function=schema.CalledFunction(
                    name=block.name, arguments=json.dumps(block.input, ensure_ascii=False)
                ),
            )
            for block in blocks
            if isinstance(block, ToolUseBlock)
        ]
        yield schema.AssistantMessage(
            content=[block for block in blocks if isinstance(block, schema.TextPart)],
            reasoning_content="\n\n".join(b.text for b in blocks if isinstance(b, ThinkingBlock)) or None,
            tool_calls=calls or None,
        )


def _result(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Texts as they are; a reference to a tool in words."""
    if isinstance(content, str):
        return content
    shown = []
    for block in content:
        if block.get("type") == "tool_reference":
            block = {"type": "text", "text": f"The tool {block.get('tool_name')} can be called now."}
        elif block.get("type") == "text":
            block = {"type": "text", "text": block.get("text")}
        shown.append(block)
    return shown


class MessagesShape:
    end, counts_each = b"", False

    def __init__(self, id: str, model: str, body: MessagesBody) -> None:
        self._head = {"id": id, "type": "message", "role": "assistant", "model": model}
        self._blocks = Blocks()
        self._omits = body.thinking is not None and body.thinking.display == "omitted"

    def opening(self, usage: Usage) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": self._message([], usage)}]

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        return [event for step in self._blocks.push(piece) for event in self._events(*step)]

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        message = self._message([], usage)
        delta = {key: message[key] for key in ("stop_reason", "stop_sequence")}
        return [
            *(event for step in self._blocks.close() for event in self._events(*step)),
            {"type": "message_delta", "delta": delta, "usage": message["usage"]},
            {"type": "message_stop"},
        ]

    def whole(self, pieces: list[list[Piece]], usage: Usage) -> dict[str, Any]:
        for piece in pieces[0]:
            for _ in self._blocks.push(piece):
                pass
        return self._message([self._whole(block) for block in self._blocks.all], usage)

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

    def _whole(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            signature = self._signature(block)
            return {"type": "thinking", "thinking": "" if self._omits else block.text, "signature": signature}
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        try:
            arguments = msgspec.json.decode(block.text)
        except msgspec.DecodeError:  # cut by the token limit, as the stop reason says
            arguments = {}
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}

    def _signature(self, block: Block) -> str:
        """Clients want one that is not empty; of a thought that is left out, it carries the text."""
        return sealed(block.text if self._omits else "")

    def _events(self, what: str, block: Block, text: str) -> Iterator[dict[str, Any]]:
        names = {"reasoning": "thinking", "text": "text", "call": "partial_json"}
        kinds = {"reasoning": "thinking_delta", "text": "text_delta", "call": "input_json_delta"}
        head = {"index": block.index}
        if what == "open":
            start = self._whole(Block(block.kind, block.index, block.id, block.name, parts=["{}"]))
            start |= {"thinking": "", "signature": ""} if block.kind == "reasoning" else {}
            start |= {"text": ""} if block.kind == "text" else {}
            yield {"type": "content_block_start", **head, "content_block": start}
        elif what == "more" and not (block.kind == "reasoning" and self._omits):
            delta = {"type": kinds[block.kind], names[block.kind]: text}
            yield {"type": "content_block_delta", **head, "delta": delta}
        elif what == "close":
            if block.kind == "reasoning":
                signed = {"type": "signature_delta", "signature": self._signature(block)}
                yield {"type": "content_block_delta", **head, "delta": signed}
            yield {"type": "content_block_stop", **head}


def error_shape(error: Dsv4Error) -> dict[str, Any]:
    status, _ = error_body(error)
    body: dict[str, Any] = {"type": ERROR_KINDS.get(status, "api_error"), "message": _words(error)}
    if isinstance(error, HttpError) and error.code == "thread_not_found":
        body["details"] = {"error_code": error.code}
    return {"type": "error", "error": body}


def _words(error: Dsv4Error) -> str:
    """Where a prompt is too long, those by which agents shorten their conversation or max_tokens."""
    if not isinstance(error, schema.TooLong):
        return str(error)
    if error.num_prompt >= error.max_context:
        return f"prompt is too long: {error.num_prompt} tokens > {error.max_context} maximum"
    counts = f"{error.num_prompt} + {error.wanted} > {error.max_context}"
    why = f"input length and `max_tokens` exceed context limit: {counts}"
    return f"{why}, decrease input length or `max_tokens` and try again"
