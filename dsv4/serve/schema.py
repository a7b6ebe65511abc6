"""The bodies that clients send: their fields, their limits, and what they ask of the engine. Knows no routes.

A field that is not here is refused by name. One whose effect is missing is taken only at the value that asks
for nothing, so that no wish is passed over in silence.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import msgspec

from dsv4.engine.request import SamplingParams
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
DEFAULT_COMPLETION_TOKENS = 16

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class BadField(RequestError):
    """A body that cannot be served; `param` names the field, `code` is OpenAI's word for it, if any."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """DeepSeek's field: {"type": "enabled"} or {"type": "disabled"}."""

    type: Literal["enabled", "disabled"]


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    pass


class JsonFormat(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"
):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None  # the schema is always kept to


class SchemaFormat(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    json_schema: NamedSchema


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: FunctionName
    type: Literal["function"] = "function"


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints take. The second group has no effect on the answer and is OpenAI's own."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None

    user: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatBody(Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None
    response_format: TextFormat | JsonFormat | SchemaFormat | None = None

    store: bool | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def schema(self) -> dict[str, Any] | None:
        """What the content must be, if it must be JSON."""
        if isinstance(self.response_format, SchemaFormat):
            wanted = self.response_format.json_schema.schema
            return {"type": "object"} if wanted is None else wanted
        return {"type": "object"} if isinstance(self.response_format, JsonFormat) else None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools the model may call."""
        return (self.tools or []) if self.tool_choice != "none" else []

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)


class CompletionBody(Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None
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


class TokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


@dataclass(frozen=True)
class Asked:
    """A checked body: how to think, and one set of sampling parameters per answer."""

    params: list[SamplingParams]
    thinking: bool = False
    effort: str | None = None


Kind = TypeVar("Kind")


def parse(kind: type[Kind], data: bytes) -> Kind:
    """A body from its bytes, or a BadField that names what is wrong."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        param = path.rstrip("`").removeprefix("$").removeprefix(".") or None
        if message.startswith("Object contains unknown field `"):
            name = message.split("`")[1]
            param = f"{param}.{name}" if param else name
            raise BadField(
                f"Unrecognized request argument supplied: {param}", param, "unknown_parameter"
            ) from None
        if message.startswith("Object missing required field `"):
            name = message.split("`")[1]
            raise BadField(
                f"you must provide a {name!r} parameter", name, "missing_required_parameter"
            ) from None
        where = f"'{param}': " if param else "the body: "
        raise BadField(f"{where}{message[:1].lower()}{message[1:]}", param, "invalid_type") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadField(f"the body is not valid JSON ({error}); check it and its encoding (UTF-8)") from None


def ask_chat(body: ChatBody, default_thinking: bool) -> Asked:
    _limit("messages", len(body.messages), 1, MAX_MESSAGES)
    _limit("tools", len(body.tools or ()), 0, MAX_TOOLS)
    _check_json("tools", body.tools or [], MAX_TOOLS_BYTES)
    if body.schema is not None:
        _check_json("response_format", body.schema, MAX_SCHEMA_BYTES)
    _check_tool_choice(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise BadField("top_logprobs goes with logprobs: true", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise BadField("give max_tokens or max_completion_tokens, not both", "max_tokens")
    thinking, effort = _thinking(body, default_thinking)
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    # Stop strings of a chat end its content, which only the parser of the answer can tell from the reasoning.
    return Asked(_params(body, limit, logprobs, ()), thinking, effort)


def ask_completion(body: CompletionBody) -> Asked:
    limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo:
        # Nothing but the prompt's own tokens is asked for; one more is made, and left out of the answer.
        limit = limit or 1
    params = _params(body, limit, body.logprobs, body.stops)
    if body.echo and body.logprobs is not None:
        params = [replace(one, prompt_logprobs=body.logprobs) for one in params]
    return Asked(params)


def check_fits(num_prompt: int, max_tokens: int | None, max_context: int, field: str) -> None:
    """Refuse with the numbers what can never run."""
    wanted = 1 if max_tokens is None else max_tokens
    if num_prompt + wanted > max_context:
        raise BadField(
            f"This model's maximum context length is {max_context} tokens. However, you requested "
            f"{num_prompt + wanted} tokens ({num_prompt} in the prompt, {wanted} for the answer). "
            "Please shorten one of them.",
            field,
            "context_length_exceeded",
        )


def _thinking(body: ChatBody, default: bool) -> tuple[bool, str | None]:
    effort = "max" if body.reasoning_effort in ("xhigh", "max") else None
    if body.thinking is not None:
        wanted = body.thinking.type == "enabled"
        if body.reasoning_effort is not None and wanted == (body.reasoning_effort == "none"):
            raise BadField(
                f"thinking is {body.thinking.type}, reasoning_effort {body.reasoning_effort}; give one",
                "reasoning_effort",
            )
        return wanted, effort
    return (default if body.reasoning_effort is None else body.reasoning_effort != "none"), effort


def _params(
    body: Body, max_tokens: int | None, logprobs: int | None, stops: tuple[str, ...]
) -> list[SamplingParams]:
    count = 1 if body.n is None else body.n
    _limit("n", count, 1, MAX_CHOICES)
    if logprobs is not None:
        _limit("top_logprobs" if isinstance(body, ChatBody) else "logprobs", logprobs, 0, MAX_TOP_LOGPROBS)
    _limit("stop", len(body.stops), 0, MAX_STOPS)
    for stop in body.stops:
        _limit("stop", len(stop), 1, MAX_STOP_CHARACTERS, "characters")
    temperature = 1.0 if body.temperature is None else body.temperature
    if not 0 <= temperature <= 2:
        raise BadField(f"temperature is {temperature:g}, expected a number from 0 to 2", "temperature")
    if body.seed is not None and not -(1 << 63) <= body.seed < 1 << 64:
        raise BadField(f"seed is {body.seed}, expected a 64-bit integer", "seed")
    return [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=body.top_k or 0,
            top_p=1.0 if body.top_p is None else body.top_p,
            min_p=body.min_p or 0.0,
            seed=None if body.seed is None else (body.seed + index) % (1 << 64),
            stop=stops,
            logprobs=logprobs,
        )
        for index in range(count)
    ]


def _check_tool_choice(body: ChatBody) -> None:
    if body.tool_choice not in (None, "none") and not body.tools:
        raise BadField("tool_choice is only allowed when tools are given", "tool_choice")
    if isinstance(body.tool_choice, NamedTool):
        wanted, functions = (
            body.tool_choice.function.name,
            [tool.get("function") for tool in body.tools or ()],
        )
        if wanted not in [function.get("name") for function in functions if isinstance(function, dict)]:
            raise BadField(f"tool_choice names {wanted!r}, which is not among the tools", "tool_choice")


def _check_json(name: str, value: Any, max_bytes: int) -> None:
    """A schema goes into the prompt and into a grammar, whose cost grows with its size and depth."""
    _limit(name, len(msgspec.json.encode(value)), 0, max_bytes, "bytes as JSON")
    level, depth = [value], 0
    while level:
        depth += 1
        _limit(name, depth, 0, MAX_SCHEMA_DEPTH, "levels")
        inner = [item for item in level if isinstance(item, dict | list)]
        level = [below for item in inner for below in (item.values() if isinstance(item, dict) else item)]


def _limit(name: str, found: int, low: int, high: int, what: str = "") -> None:
    if not low <= found <= high:
        raise BadField(f"{name} is of size {found}{what and ' ' + what}, expected {low} to {high}", name)
