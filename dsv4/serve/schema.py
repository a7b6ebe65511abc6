"""The bodies that clients send: their fields and limits. Knows no routes, and not what is done with them.

A field that is not here is refused by name. One whose effect is missing is taken only at values that ask for
nothing, so that no wish is passed over in silence. Fields of which nothing depends (names of participants,
marks for other servers' caches) are taken and not read.
"""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import msgspec.inspect
from msgspec import Meta

from dsv4.engine.request import MAX_BIAS
from dsv4.errors import RequestError

MAX_BODY_BYTES = 10 << 20
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 << 10
MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 32
MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_TOP_LOGPROBS = 20
MAX_INT = (1 << 31) - 1

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


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of what clients send."""


# Messages.


class TextPart(Strict, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str
    cache_control: Any = None
    annotations: Any = None
    citations: None = None
    parsed_output: None = None


Text = str | list[TextPart]


class CalledFunction(Strict, frozen=True, kw_only=True):
    name: str
    arguments: str


class ToolCall(Strict, frozen=True, kw_only=True):
    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class Message(Strict, frozen=True, kw_only=True, tag_field="role"):
    """`content` is text; `plain` is the form that `text.chat` takes."""

    name: str | None = None
    cache_control: Any = None

    def plain(self) -> dict[str, Any]:
        fields = msgspec.to_builtins(self)
        fields |= {"role": "system"} if fields["role"] == "developer" else {}
        if isinstance(parts := fields["content"], list):
            kept = ("type", "text")
            fields["content"] = [{k: v for k, v in p.items() if k in kept or "text" not in p} for p in parts]
        for call in fields.get("tool_calls") or ():
            call.pop("index")
        unread = {"name", "cache_control", "refusal", "annotations", "audio", "function_call", "prefix"}
        return {key: value for key, value in fields.items() if value is not None and key not in unread}


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
    content: str | list[dict[str, Any]]
    tool_call_id: str | None = None


class AssistantMessage(Message, frozen=True, kw_only=True, tag="assistant"):
    """With `prefix`, and last of all: the beginning of the answer."""

    content: Text | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    prefix: bool | None = None
    wo_eos: bool | None = None
    task: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


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


class Tool(Strict, frozen=True, kw_only=True):
    """`function` stays as it was given: the model sees its fields in their order."""

    function: Annotated[dict[str, Any], Meta(extra_json_schema=_FUNCTION)]
    type: Literal["function"] = "function"
    cache_control: Any = None


class FunctionName(Strict, frozen=True, kw_only=True):
    name: str


class NamedTool(Strict, frozen=True, kw_only=True):
    function: FunctionName
    type: Literal["function"] = "function"


class TextFormat(Strict, frozen=True, kw_only=True, tag_field="type", tag="text"):
    pass


class JsonFormat(Strict, frozen=True, kw_only=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class NamedSchema(Strict, frozen=True, kw_only=True):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None  # the schema is always kept to


class JsonSchema(Strict, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    """As the newer endpoints have it; the first three have no effect beside it."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


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
    include_obfuscation: bool = False


class Thinking(Strict, frozen=True, kw_only=True):
    """DeepSeek's and Anthropic's field."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized"] | None = None


class TemplateOptions(Strict, frozen=True, kw_only=True):
    """What chat templates of other servers take."""

    thinking: bool | None = None
    enable_thinking: bool | None = None


class Body(Strict, frozen=True, kw_only=True):
    """What both of OpenAI's first endpoints take. The last group has no effect on the answer."""

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

    user: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatBody(Body, frozen=True, kw_only=True):
    messages: Annotated[list[AnyMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateOptions | None = None
    response_format: TextFormat | JsonFormat | SchemaFormat | None = None

    store: bool | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    verbosity: str | None = None
    modalities: list[Literal["text"]] | None = None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools the model may call."""
        given = (self.tools or []) if self.tool_choice != "none" else []
        return [{"type": "function", "function": tool.function} for tool in given]

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)


class CompletionBody(Body, frozen=True, kw_only=True):
    prompt: str | list[Any]
    logprobs: Alternatives | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

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


Kind = TypeVar("Kind")


def parse(kind: type[Kind], data: bytes) -> Kind:
    """A body from its bytes, or a BadField that names what is wrong."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        if path.startswith("key` in `"):
            message, path = message.replace("Expected", "Expected keys of", 1), path.removeprefix("key` in `")
        param = path.rstrip("`").removeprefix("$").removeprefix(".") or None
        if message.startswith("Object contains unknown field `"):
            name = message.split("`")[1]
            param = f"{param}.{name}" if param else name
            raise BadField(
                f"Unrecognized request argument supplied: {param}", param, "unknown_parameter"
            ) from None
        if message.startswith("Object missing required field `"):
            name = message.split("`")[1]
            param = f"{param}.{name}" if param else name
            raise BadField(
                f"you must provide a {param!r} parameter", param, "missing_required_parameter"
            ) from None
        where = f"'{param}': " if param else "the body: "
        is_said = "got `" in message or message.startswith("Invalid ")
        found = "" if is_said else _found(data, path)
        if message.startswith("Invalid ") and (choices := _choices(kind, path)):
            found = f", expected {', '.join(choices[:-1])}{' or ' if choices[1:] else ''}{choices[-1]}"
        raise BadField(f"{where}{message[:1].lower()}{message[1:]}{found}", param, "invalid_type") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadField(f"the body is not valid JSON ({error}); check it and its encoding (UTF-8)") from None


_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


def _choices(kind: type, path: str) -> list[str]:
    """The texts allowed at a path such as `$.messages[0].role`: a literal's, or the tags of messages."""
    here = _ways([msgspec.inspect.type_info(kind)])
    for name, _ in _STEP.findall(path):
        here = _ways([below for each in here for below in _below(each, name)])
    said = (value for each in here if isinstance(each, msgspec.inspect.LiteralType) for value in each.values)
    return list(dict.fromkeys(repr(value) for value in said))


def _ways(types: list[msgspec.inspect.Type]) -> list[msgspec.inspect.Type]:
    """Without unions and limits around them."""
    out: list[msgspec.inspect.Type] = []
    for each in types:
        if isinstance(each, msgspec.inspect.Metadata):
            out += _ways([each.type])
        else:
            out += _ways(list(each.types)) if isinstance(each, msgspec.inspect.UnionType) else [each]
    return out


def _below(each: msgspec.inspect.Type, name: str) -> list[msgspec.inspect.Type]:
    """One step into an object's field, or with no name into a list."""
    if isinstance(each, msgspec.inspect.ListType):
        return [] if name else [each.item_type]
    if not isinstance(each, msgspec.inspect.StructType):
        return []
    if name == each.tag_field:
        return [msgspec.inspect.LiteralType((each.tag,))]
    return [field.type for field in each.fields if field.encode_name == name]


def _found(data: bytes, path: str) -> str:
    """The value at a path such as `$.messages[0].role`; of a list or a long text its length.

    A number that no float holds, such as 1e999, hides all of them.
    """
    try:
        value = msgspec.json.decode(data)
    except msgspec.ValidationError:
        return "; expected numbers of at most 64 bits"
    for name, index in _STEP.findall(path):
        value = value[name] if name else value[int(index)]
    text = repr(value)
    is_long = isinstance(value, list | str) and len(text) > 60
    return f", found one of length {len(value)}" if is_long else f", found {text[:60]}"
