"""OpenAI's Responses: bodies to those of a chat, answers as items and events. Knows no routes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from dsv4.errors import Dsv4Error
from dsv4.serve import schema
from dsv4.serve.answer import Piece
from dsv4.serve.blocks import Block, Blocks, sealed, unsealed
from dsv4.serve.openai import Usage, error_body
from dsv4.serve.parse import Notes, checked_each

LOGPROBS, SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
# What an answer may include; of tools that are not here, nothing comes.
_Included = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]

# Items of the input: what comes back of our own answers, and what is new.


class Part(schema.Strict, frozen=True, kw_only=True):
    comes_back: ClassVar[bool] = True
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class Item(schema.Strict, frozen=True, kw_only=True):
    comes_back: ClassVar[bool] = True


class MessageItem(Item, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class CallItem(Item, frozen=True, kw_only=True):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomCallItem(Item, frozen=True, kw_only=True):
    call_id: str
    name: str
    input: str
    namespace: str | None = None

    @property
    def arguments(self) -> str:
        return schema.CalledCustom(name=self.name, input=self.input).function.arguments


class OutputItem(Item, frozen=True, kw_only=True):
    call_id: str
    output: str | list[dict[str, Any]]


class ReasoningItem(Item, frozen=True, kw_only=True):
    summary: list[Part] | None = None
    content: list[Part] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """Another server's thought, sealed, is one that nobody else can read."""
        return (
            _text(self.content or []) or unsealed(self.encrypted_content or "") or _text(self.summary or [])
        )


ITEMS: dict[str, type] = {
    "message": MessageItem,
    "function_call": CallItem,
    "custom_tool_call": CustomCallItem,
    "function_call_output": OutputItem,
    "custom_tool_call_output": OutputItem,
    "reasoning": ReasoningItem,
}


class FlatTool(schema.Strict, frozen=True, kw_only=True):
    name: str
    type: str = "function"
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class InputForm(schema.Strict, frozen=True, kw_only=True):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] = "lark"
    definition: str | None = None


class CustomTool(schema.Strict, frozen=True, kw_only=True):
    name: str
    type: str
    description: str | None = None
    format: InputForm | None = None

    @property
    def of_chat(self) -> schema.CustomTool:
        form = None
        if self.format is not None and self.format.type == "grammar":
            definition = self.format.definition or ""
            grammar = schema.InputGrammar(definition=definition, syntax=self.format.syntax)
            form = schema.InputForm(type="grammar", grammar=grammar)
        return schema.CustomTool(name=self.name, description=self.description, format=form)


class Namespace(schema.Strict, frozen=True, kw_only=True):
    """Functions whose names share a beginning; only they are shown to the model."""

    name: str
    type: str
    tools: Annotated[list[dict[str, Any]], Meta(max_length=schema.MAX_TOOLS)]
    description: str | None = None


_FLAT: dict[str, type] = {"function": FlatTool, "custom": CustomTool}
TOOLS: dict[str, type] = {**_FLAT, "namespace": Namespace}


class FlatChoice(schema.Strict, frozen=True, kw_only=True):
    type: Literal["function", "custom", "allowed_tools"]
    name: str = ""
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[dict[str, Any]], Meta(max_length=schema.MAX_TOOLS)] = msgspec.field(
        default_factory=list
    )


class Reasoning(schema.Strict, frozen=True, kw_only=True):
    effort: schema.Effort | None = None


class TextConfig(schema.Strict, frozen=True, kw_only=True):
    format: schema.TextFormat | schema.JsonFormat | schema.JsonSchema | None = None


@dataclass(frozen=True)
class Declared:
    """A tool as the client knows it, and the function that the model is shown."""

    kind: str
    name: str
    namespace: str | None
    function: dict[str, Any] = field(repr=False)


class ResponsesBody(schema.Strict, frozen=True, kw_only=True):
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=schema.MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: schema.Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: schema.Alternatives | None = None
    stream: bool | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=schema.MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    previous_response_id: str | None = None
    include: list[_Included] | None = None
    store: bool | None = None
    chat_template_kwargs: schema.TemplateOptions | None = None
    seed: int | None = None
    top_k: Annotated[int, Meta(ge=-1, le=schema.MAX_INT)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None

    @property
    def items(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def declared(self, notes: Notes) -> dict[str, Declared]:
        """The tools by the names that the model is shown."""
        return dict(_declared(self.tools or [], None, "tools", notes))

    def chat(self, items: list[dict[str, Any]], tools: dict[str, Declared], notes: Notes) -> schema.ChatBody:
        """The same request as a chat's; `items` is the whole input."""
        messages = _chat_messages(items, notes)
        if self.instructions:
            messages.insert(0, schema.SystemMessage(content=self.instructions))
        given = self.text.format if self.text else None
        form: Any = given
        if isinstance(given, schema.JsonSchema):
            form = schema.SchemaFormat(json_schema=schema.NamedSchema(schema=given.schema))
        return schema.ChatBody(
            messages=messages,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stream=self.stream,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs,
            tools=[schema.Tool(function=tool.function) for tool in tools.values()],
            tool_choice=_choice(self.tool_choice, tools) if tools else None,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            chat_template_kwargs=self.chat_template_kwargs,
            response_format=form,
            cache_salt=self.cache_salt,
        )


def _declared(
    tools: list[dict[str, Any]], namespace: str | None, where: str, notes: Notes
) -> Iterator[tuple[str, Declared]]:
    for tool in checked_each(_FLAT if namespace else TOOLS, "function", tools, where, notes):
        if isinstance(tool, Namespace):
            yield from _declared(tool.tools, tool.name, f"{where}.tools", notes)
            continue
        name = _shown_name(tool.name, namespace)
        if isinstance(tool, CustomTool):
            function = {**tool.of_chat.function, "name": name}
        else:
            known = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
            function = {"name": name, **known}
        yield name, Declared(tool.type, tool.name, namespace, function)


def _shown_name(name: str, namespace: str | None) -> str:
    return f"{namespace}__{name}" if namespace else name


def _choice(choice: Any, tools: dict[str, Declared]) -> Any:
    if not isinstance(choice, FlatChoice):
        return choice
    if choice.type != "allowed_tools":
        name = _shown_name(choice.name, choice.namespace)
        return schema.ToolChoice(function=schema.FunctionName(name=name))
    names = [_shown_name(str(tool.get("name")), tool.get("namespace")) for tool in choice.tools]
    named = [schema.NamedTool(function=schema.FunctionName(name=name)) for name in names]
    if not named:
        raise schema.BadField("tool_choice allows no tool; name some, or use none", "tool_choice")
    allowed = schema.AllowedTools(mode=choice.mode, tools=named)
    return schema.ToolChoice(type="allowed_tools", allowed_tools=allowed)


def _chat_messages(items: list[dict[str, Any]], notes: Notes) -> list[schema.AnyMessage]:
    """A thought, a text and calls that follow each other are one turn of the assistant."""
    messages: list[schema.AnyMessage] = []
    turn: dict[str, Any] = {}

    def end_turn() -> None:
        if turn:
            messages.append(schema.AssistantMessage(**turn))
            turn.clear()

    for item in checked_each(ITEMS, "message", items, "input", notes):
        if isinstance(item, ReasoningItem):
            end_turn()
            turn["reasoning_content"] = item.text
        elif isinstance(item, CallItem | CustomCallItem):
            name = _shown_name(item.name, item.namespace)
            called = schema.CalledFunction(name=name, arguments=item.arguments)
            turn.setdefault("tool_calls", []).append(schema.ToolCall(id=item.call_id, function=called))
        elif isinstance(item, MessageItem) and item.role == "assistant":
            if "content" in turn or "tool_calls" in turn:
                end_turn()
            turn["content"] = _text(item.content)
        else:
            end_turn()
            messages.append(_input_message(item))
    end_turn()
    return messages


def _input_message(item: OutputItem | MessageItem) -> schema.AnyMessage:
    if isinstance(item, OutputItem):
        output: Any = item.output
        if isinstance(output, list):
            texts = ("input_text", "output_text", "text")
            output = [
                {"type": "text", "text": p.get("text")} if p.get("type") in texts else p for p in output
            ]
        return schema.ToolMessage(content=output, tool_call_id=item.call_id)
    content = item.content
    parts = content if isinstance(content, str) else [schema.TextPart(text=part.text) for part in content]
    # A developer's word is a part of the user's turn, as DeepSeek has it: agents send new ones all the time.
    return schema.SystemMessage(content=parts) if item.role == "system" else schema.UserMessage(content=parts)


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "\n\n".join(part.text for part in content)


class ResponsesShape:
    """`keep` takes the finished response."""

    end, counts_each = b"", False

    def __init__(
        self,
        id: str,
        created: int,
        model: str,
        body: ResponsesBody,
        tools: dict[str, Declared],
        keep: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self._id, self._body, self._tools, self._keep = id, body, tools, keep
        self._blocks, self._number = Blocks(), 0
        shown = msgspec.to_builtins(body)
        kept = ("instructions", "max_output_tokens", "temperature", "top_p", "previous_response_id")
        self._head = {
            "id": f"resp_{id}",
            "object": "response",
            "created_at": created,
            "model": model,
            "error": None,
            **{key: shown[key] for key in kept},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": shown["reasoning"] or {"effort": None, "summary": None},
            "metadata": {},
            "background": False,
            "top_logprobs": body.top_logprobs or 0,
            "store": keep is not None,
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
        response = self._finished(usage)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def whole(self, pieces: list[list[Piece]], usage: Usage) -> dict[str, Any]:
        for piece in pieces[0]:
            for _ in self._blocks.push(piece):
                pass
        return self._finished(usage)

    def error(self, error: Dsv4Error) -> dict[str, Any]:
        body = error_body(error)[1]["error"]
        return self._event("error", message=body["message"], code=body["code"], param=body["param"])

    def _finished(self, usage: Usage) -> dict[str, Any]:
        response = self._response(usage)
        if self._keep is not None:
            self._keep(response)
        return response

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
            return {**item, **self._call(block)}
        part = [self._part(block)] if status == "completed" else []
        if block.kind == "text":
            return {**item, "type": "message", "role": "assistant", "content": part}
        is_wanted = status == "completed" and SEALED in (self._body.include or ())
        seal = sealed(block.text) if is_wanted else None
        return {**item, "type": "reasoning", "summary": [], "content": part, "encrypted_content": seal}

    def _call(self, block: Block) -> dict[str, Any]:
        """By the name that the client knows."""
        tool = self._tools.get(block.name) or Declared("function", block.name, None, {})
        call = {"call_id": block.id, "name": tool.name}
        call |= {"namespace": tool.namespace} if tool.namespace else {}
        if tool.kind == "custom":
            return {**call, "type": "custom_tool_call", "input": block.text}
        return {**call, "type": "function_call", "arguments": block.text}

    def _item_id(self, block: Block) -> str:
        return f"{ {'reasoning': 'rs', 'text': 'msg', 'call': 'fc'}[block.kind] }_{self._id}_{block.index}"

    def _events(self, what: str, block: Block, text: str) -> Iterator[dict[str, Any]]:
        at = {"item_id": self._item_id(block), "output_index": block.index}
        inside = at if block.kind == "call" else {**at, "content_index": 0}
        tool = self._tools.get(block.name)
        is_custom = block.kind == "call" and tool is not None and tool.kind == "custom"
        names = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
        name = f"response.{'custom_tool_call_input' if is_custom else names[block.kind]}"
        key = "input" if is_custom else "arguments" if block.kind == "call" else "text"
        extra: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if what == "more":
            if extra and self._body.wants_logprobs:
                extra = {"logprobs": self._blocks.logprobs}
            yield self._event(f"{name}.delta", **inside, delta=text, **extra)
            return
        verb, status = ("added", "in_progress") if what == "open" else ("done", "completed")
        item = {"output_index": block.index, "item": self._item(block, status)}
        part = {**inside, "part": self._part(block)} if block.kind != "call" else None
        if what == "open":
            yield self._event("response.output_item.added", **item)
        else:
            if extra:
                extra = {"logprobs": self._part(block)["logprobs"]}
            yield self._event(f"{name}.done", **inside, **{key: block.text}, **extra)
        if part is not None:
            yield self._event(f"response.content_part.{verb}", **part)
        if what == "close":
            yield self._event("response.output_item.done", **item)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _part(self, block: Block) -> dict[str, Any]:
        logprobs = block.logprobs if self._body.wants_logprobs else []
        if block.kind == "reasoning":
            return {
                "type": "reasoning_text",
                "text": block.text,
                **({"logprobs": logprobs} if logprobs else {}),
            }
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}
