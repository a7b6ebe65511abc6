"""The bodies that clients send: the fields that have an effect, and their limits. Knows no routes.

`fields` has those without an effect; any other is refused by name, so that no wish is passed over in silence.
"""

import json
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from dsv4.engine.request import MAX_BIAS
from dsv4.errors import RequestError

MAX_BODY_BYTES = 32 << 20  # a million tokens of \uXXXX
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 << 10
MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 32
MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_TOP_LOGPROBS = 20
MAX_STOP_IDS = 256
MAX_BAD_WORDS = 256
MAX_ALLOWED_IDS = 1 << 18
MAX_INT = (1 << 31) - 1
# In the declaration of a custom tool, which the model is shown as a function of one text: what that text is
# held to, {"lark" or "regex": grammar} or nothing.
INPUT_FORM = "x-input-form"

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Count = Annotated[int, Meta(ge=1, le=MAX_INT)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
Alternatives = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]


class BadField(RequestError):
    """A body that cannot be served; `param` names the field, `code` is OpenAI's word for it, if any."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class TooLong(BadField):
    """A prompt without room for its answer, with the numbers that clients act on."""

    def __init__(self, num_prompt: int, wanted: int, max_context: int, field: str, least: str = "") -> None:
        super().__init__(
            f"This model's maximum context length is {max_context} tokens. However, you requested {least}"
            f"{num_prompt + wanted} tokens ({least}{num_prompt} in the prompt, {wanted} for the answer). "
            "Please shorten one of them.",
            field,
            "context_length_exceeded",
        )
        self.num_prompt, self.wanted, self.max_context = num_prompt, wanted, max_context


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of what clients send. Of what `comes_back`, unknown fields are not read."""

    comes_back: ClassVar[bool] = False


# Messages.


class TextPart(Strict, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str


Text = str | list[TextPart]


class CalledFunction(Strict, frozen=True, kw_only=True):
    name: str
    arguments: str


class CalledCustom(Strict, frozen=True, kw_only=True):
    name: str
    input: str

    @property
    def function(self) -> CalledFunction:
        return CalledFunction(name=self.name, arguments=json.dumps({"input": self.input}, ensure_ascii=False))


class ToolCall(Strict, frozen=True, kw_only=True):
    """Of a function, or of a custom tool."""

    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    id: str | None = None
    type: Literal["function", "custom"] = "function"

    def plain(self) -> dict[str, Any]:
        called = self.custom.function if self.custom else self.function
        if called is None:
            raise BadField("messages: a tool call has neither function nor custom", "messages")
        return {"id": self.id, "type": "function", "function": msgspec.to_builtins(called)}


class Message(Strict, frozen=True, kw_only=True, tag_field="role"):
    """`content` is text; `plain` is the form that `text.chat` takes."""

    def plain(self) -> dict[str, Any]:
        fields = msgspec.to_builtins(self)
        fields |= {"role": "system"} if fields["role"] == "developer" else {}
        return {key: value for key, value in fields.items() if value is not None and key != "prefix"}


class SystemMessage(Message, frozen=True, kw_only=True, tag="system"):
    content: Text


class DeveloperMessage(Message, frozen=True, kw_only=True, tag="developer"):
    content: Text


class ReminderMessage(Message, frozen=True, kw_only=True, tag="latest_reminder"):
    content: Text


class UserMessage(Message, frozen=True, kw_only=True, tag="user"):
    content: Text
    task: str | None = None


class ToolMessage(Message, frozen=True, kw_only=True, tag="tool"):
    content: str | list[dict[str, Any]] = ""
    tool_call_id: str | None = None


class AssistantMessage(Message, frozen=True, kw_only=True, tag="assistant"):
    """With `prefix`, and last of all: the beginning of the answer."""

    comes_back: ClassVar[bool] = True
    content: Text = ""
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    prefix: bool | None = None
    wo_eos: bool | None = None
    task: str | None = None

    def plain(self) -> dict[str, Any]:
        calls = [call.plain() for call in self.tool_calls or ()]
        return {**super().plain(), **({"tool_calls": calls} if calls else {})}


AnyMessage = SystemMessage | DeveloperMessage | ReminderMessage | UserMessage | ToolMessage | AssistantMessage

# What the answer is held to.

_FUNCTION = {
    "properties": {
        "name": {"type": "string"},
        "description": {"type": "string"},
        "parameters": {"type": "object"},
        "strict": {"type": "boolean"},
    },
    "required": ["name"],
}


class InputGrammar(Strict, frozen=True, kw_only=True):
    definition: str
    syntax: Literal["lark", "regex"] = "lark"


class InputForm(Strict, frozen=True, kw_only=True):
    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None


class CustomTool(Strict, frozen=True, kw_only=True):
    """A function of one text. Its form is told to the model, and kept to."""

    name: str
    description: str | None = None
    format: InputForm | None = None

    @property
    def function(self) -> dict[str, Any]:
        """What the model is shown, and our own note of the form."""
        text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        made = {"name": self.name, "description": self.description, "parameters": text, INPUT_FORM: {}}
        if self.format is None or self.format.type == "text":
            return made
        form = self.format.grammar
        if form is None or not form.definition:
            raise BadField(f"tool {self.name!r}: the grammar's definition is missing", "tools")
        told = f"The input has the form of this {form.syntax} grammar:\n{form.definition}"
        told = f"{self.description or ''}\n\n{told}".strip()
        return {**made, "description": told, "strict": True, INPUT_FORM: {form.syntax: form.definition}}


class Tool(Strict, frozen=True, kw_only=True):
    """`function` stays as it was given: the model sees its fields in their order."""

    function: Annotated[dict[str, Any], Meta(extra_json_schema=_FUNCTION)] | None = None
    custom: CustomTool | None = None
    type: Literal["function", "custom"] = "function"

    def declared(self, where: str) -> dict[str, Any]:
        """As a function, of which nothing is null."""
        function = self.custom.function if self.custom else self.function
        if function is None or (self.type == "custom") != (self.custom is not None):
            where = f"{where}.{self.type}"
            raise BadField(f"{where} is missing; a tool of this type has it, and no other", where)
        return {key: value for key, value in function.items() if value is not None}


class FunctionName(Strict, frozen=True, kw_only=True):
    name: str


class NamedTool(Strict, frozen=True, kw_only=True):
    function: FunctionName | None = None
    custom: FunctionName | None = None
    type: Literal["function", "custom"] = "function"


class AllowedTools(Strict, frozen=True, kw_only=True):
    """All tools are shown to the model, and these may be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolChoice(Strict, frozen=True, kw_only=True):
    """One function that must be called, or some of which one may or must."""

    type: Literal["function", "custom", "allowed_tools"] = "function"
    function: FunctionName | None = None
    custom: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class TextFormat(Strict, frozen=True, kw_only=True, tag_field="type", tag="text"):
    pass


class JsonFormat(Strict, frozen=True, kw_only=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class NamedSchema(Strict, frozen=True, kw_only=True):
    schema: dict[str, Any] | None = None


class JsonSchema(Strict, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    """As the newer endpoints have it."""

    schema: dict[str, Any]


class SchemaFormat(Strict, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema


class StructuredOutputs(Strict, frozen=True, kw_only=True):
    """As vLLM has it, one of them; `grammar` is llguidance's Lark."""

    json: dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


# Whole bodies.


class StreamOptions(Strict, frozen=True, kw_only=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # in every chunk, beside include_usage


class Thinking(Strict, frozen=True, kw_only=True):
    """DeepSeek's and Anthropic's field."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class TemplateOptions(Strict, frozen=True, kw_only=True):
    """What chat templates of other servers take."""

    thinking: bool | None = None
    enable_thinking: bool | None = None


class Body(Strict, frozen=True, kw_only=True):
    """What both of OpenAI's first endpoints take, most of it as vLLM has it."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_BIAS)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[Stop], Meta(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_IDS)] | None = None
    prompt_logprobs: Alternatives | None = None
    return_token_ids: bool | None = None
    return_progress: bool | None = None  # of the prompt, in a stream's chunks
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None  # who shares prefixes

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatBody(Body, frozen=True, kw_only=True):
    messages: Annotated[list[AnyMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None
    thinking_token_budget: Count | None = None
    chat_template_kwargs: TemplateOptions | None = None
    response_format: TextFormat | JsonFormat | SchemaFormat | None = None
    continue_final_message: bool | None = None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that are shown to the model."""
        given = (self.tools or []) if self.tool_choice != "none" else []
        return [
            {"type": "function", "function": tool.declared(f"tools[{at}]")} for at, tool in enumerate(given)
        ]

    @property
    def must_call(self) -> bool:
        choice = self.tool_choice
        if isinstance(choice, ToolChoice):
            return choice.allowed_tools is None or choice.allowed_tools.mode == "required"
        return choice == "required"

    @property
    def must_call_one(self) -> bool:
        return isinstance(self.tool_choice, ToolChoice) and self.tool_choice.allowed_tools is None

    @property
    def named(self) -> list[str] | None:
        """The tools that may be called, where not all."""
        choice = self.tool_choice
        if not isinstance(choice, ToolChoice):
            return None
        known = choice.allowed_tools.tools if choice.allowed_tools else [choice]
        return [each.name for one in known for each in (one.function, one.custom) if each is not None]


class CompletionBody(Body, frozen=True, kw_only=True):
    prompt: str | list[Any]
    logprobs: Alternatives | None = None
    echo: bool | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more prompts, as texts or as ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if given and all(isinstance(item, str) for item in given):
            return given
        if given and all(_is_id(item) for item in given):
            return [given]
        if given and all(isinstance(ids, list) and ids and all(map(_is_id, ids)) for ids in given):
            return given
        raise BadField(
            "prompt is not a text, a list of texts, a list of token ids or a list of such lists, none empty",
            "prompt",
            "invalid_type",
        )


def _is_id(value: Any) -> bool:
    return type(value) is int


class TokenizeBody(Strict, frozen=True, kw_only=True):
    prompt: str | None = None
    messages: Annotated[list[AnyMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    model: str | None = None


class DetokenizeBody(Strict, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None
