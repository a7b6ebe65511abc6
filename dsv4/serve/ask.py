"""What a checked body asks of the engine: how to think, how to sample, what form to keep. Knows no routes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from dsv4.engine.request import SamplingParams
from dsv4.serve.grammar import Form
from dsv4.serve.schema import (
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    MAX_TOOLS_BYTES,
    AssistantMessage,
    BadField,
    Body,
    ChatBody,
    CompletionBody,
    JsonFormat,
    SchemaFormat,
    ToolChoice,
    ToolMessage,
    TooLong,
    UserMessage,
)
from dsv4.text.chat import Release
from dsv4.text.generation import SamplingDefaults
from dsv4.text.messages import read_tools
from dsv4.text.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
# Efforts as the model itself knows them, or as tokens that a thought may have.
EFFORTS: dict[str, dict[str, str]] = {
    "april": {"xhigh": "max", "max": "max"},
    "0731": {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "high", "max": "max"},
}
EFFORT_TOKENS = {"april": {"minimal": 512, "low": 2048, "medium": 8192}, "0731": {"minimal": 512}}


@dataclass(frozen=True)
class Usual:
    """What holds where a request does not say."""

    thinking: bool = True
    max_thinking: int | None = None  # tokens; also where a request asks for more
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    release: Release = "april"  # of the model; its conversations have their rules


@dataclass(frozen=True)
class Asked:
    """One set of sampling parameters per answer; what the model is shown beside the messages."""

    params: list[SamplingParams]
    thinking: bool = False
    effort: str | None = None
    schema: Mapping[str, Any] | None = None
    continues: bool = False  # the last message is the beginning of the answer


def ask_chat(body: ChatBody, tokenizer: Tokenizer, usual: Usual) -> Asked:
    if not body.messages:
        raise BadField("the conversation is empty; expected at least one message with content", "messages")
    _check_json("tools", body.offered, MAX_TOOLS_BYTES)
    read_tools(body.offered, "tools")
    _check_tool_choice(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise BadField("top_logprobs goes with logprobs: true", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise BadField("give max_tokens or max_completion_tokens, not both", "max_tokens")
    thinking = _thinking(body, usual.thinking)
    wished = body.reasoning_effort or ""
    form, continues = _form(body), _continues(body, usual.release)
    if continues and form is not None:
        raise BadField("an answer that was begun cannot be held to a form; leave out prefix", "messages")
    budget = body.thinking.budget_tokens if body.thinking else None
    effort_tokens = EFFORT_TOKENS[usual.release].get(wished)
    budgets = (budget, body.thinking_token_budget, effort_tokens, usual.max_thinking)
    if thinking and not continues and (known := [number for number in budgets if number is not None]):
        # The thought is closed there; the answer is not cut.
        form = replace(form or Form(is_free=True), max_thinking=min(known))
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    grammar = form.grammar(tokenizer, thinking) if form is not None else None
    # Stop strings of a chat end its content, which only the parser of the answer can tell from the reasoning.
    params = _params(body, limit, logprobs, (), grammar, tokenizer, usual.sampling)
    if body.min_tokens and form is not None and not form.is_free:
        raise BadField(
            "min_tokens cannot go on where the form of the answer ends; leave it out", "min_tokens"
        )
    effort = EFFORTS[usual.release].get(wished)
    return Asked(params, thinking, effort, form.schema if form else None, continues)


def ask_completion(body: CompletionBody, tokenizer: Tokenizer, usual: Usual) -> Asked:
    limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo:
        # Nothing but the prompt's own tokens is asked for; one more is made, and left out of the answer.
        limit = limit or 1
    form = _structured(body)
    grammar = form.grammar(tokenizer, False) if form else None
    params = _params(body, limit, body.logprobs, body.stops, grammar, tokenizer, usual.sampling)
    if body.echo and body.logprobs is not None:
        if body.prompt_logprobs is not None:
            raise BadField(
                "echo with logprobs scores the prompt; leave out prompt_logprobs", "prompt_logprobs"
            )
        params = [replace(one, prompt_logprobs=body.logprobs) for one in params]
    return Asked(params)


def check_fits(
    num_prompt: int, max_tokens: int | None, max_context: int, field: str, least: str = ""
) -> None:
    """Refuse with the numbers what can never run; `least`: "at least " where not all is counted."""
    wanted = 1 if max_tokens is None else max_tokens
    if num_prompt + wanted > max_context:
        raise TooLong(num_prompt, wanted, max_context, field, least)


def check_ids(ids: Iterable[int], vocab_size: int, field: str) -> None:
    if bad := [id for id in ids if not 0 <= id < vocab_size]:
        raise BadField(f"{field}: id {bad[0]} is outside the vocabulary of {vocab_size}", field)


def _thinking(body: ChatBody, default: bool) -> bool:
    options = body.chat_template_kwargs
    given = {
        "thinking": None if body.thinking is None else body.thinking.type != "disabled",
        "reasoning_effort": None if body.reasoning_effort is None else body.reasoning_effort != "none",
        "chat_template_kwargs.thinking": options.thinking if options else None,
        "chat_template_kwargs.enable_thinking": options.enable_thinking if options else None,
    }
    said = {name: value for name, value in given.items() if value is not None}
    if len(set(said.values())) > 1:
        wishes = ", ".join(f"{name} turns it {'on' if value else 'off'}" for name, value in said.items())
        raise BadField(f"the request contradicts itself about thinking: {wishes}; give one", list(said)[-1])
    return next(iter(said.values()), default)


def _continues(body: ChatBody, release: Release) -> bool:
    """Whether the last message is the beginning of the answer; one that nobody can answer is refused."""
    last, where = body.messages[-1], f"message {len(body.messages) - 1}"
    if any(isinstance(message, AssistantMessage) and message.prefix for message in body.messages[:-1]):
        raise BadField("prefix: true is for the last message", "messages")
    if body.continue_final_message and not isinstance(last, AssistantMessage):
        raise BadField(f"{where} is not the assistant's, so it cannot go on", "continue_final_message")
    if isinstance(last, UserMessage | ToolMessage) or (
        release == "0731" and not isinstance(last, AssistantMessage)
    ):
        return False
    if isinstance(last, AssistantMessage):
        if not (last.prefix or last.wo_eos or body.continue_final_message):
            why = "is the assistant's, and the last; to have it continued, give it prefix: true"
            raise BadField(f"{where} {why}", "messages")
        if last.tool_calls:
            raise BadField(f"{where} has tool_calls and is to be continued; only text can be", "messages")
        return True
    raise BadField(
        f"{where} is the last and not the user's or a tool's; there is nothing to answer", "messages"
    )


def _form(body: ChatBody) -> Form | None:
    """What the answer is held to: always where JSON or a call is required, else by a tool's `strict`."""
    form = _structured(body) or Form()
    given = body.response_format
    if isinstance(given, SchemaFormat | JsonFormat):
        if form != Form():
            raise BadField("give response_format or structured_outputs, not both", "response_format")
        schema = given.json_schema.schema if isinstance(given, SchemaFormat) else None
        form = Form(schema={"type": "object"} if schema is None else schema)
        _check_json("response_format", form.schema, MAX_SCHEMA_BYTES)
    named = body.named
    tools = [tool for tool in body.offered if named is None or tool["function"]["name"] in named]
    is_strict = any(tool["function"].get("strict") for tool in tools)
    if form == Form() and named is None and not body.must_call and not is_strict:
        return None
    many = body.parallel_tool_calls is not False and not body.must_call_one
    return replace(form, tools=tools, must_call=body.must_call, many_calls=many)


def _structured(body: Body) -> Form | None:
    given = body.structured_outputs
    if given is None:
        return None
    schema = {"type": "object"} if given.json_object else given.json
    wanted = {"schema": schema, "regex": given.regex, "choice": given.choice, "lark": given.grammar}
    said: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
    if len(said) != 1 or not next(iter(said.values())) or (given.json_object and given.json is not None):
        raise BadField("expected one of json, regex, choice and grammar, not empty", "structured_outputs")
    _check_json("structured_outputs", list(said.values()), MAX_SCHEMA_BYTES)
    return Form(**said)


def _params(
    body: Body,
    max_tokens: int | None,
    logprobs: int | None,
    stops: tuple[str, ...],
    grammar: str | None,
    tokenizer: Tokenizer,
    usual: SamplingDefaults,
) -> list[SamplingParams]:
    if body.seed is not None and not -(1 << 63) <= body.seed < 1 << 64:
        raise BadField(f"seed is {body.seed}, expected a 64-bit integer", "seed")
    if max_tokens == 0:
        raise BadField("max_tokens is 0, expected a positive integer", "max_tokens")
    if body.ignore_eos and grammar is not None:
        raise BadField("ignore_eos goes on where the form of the answer ends; give one of them", "ignore_eos")
    if body.return_progress and not body.stream:
        raise BadField("return_progress goes with stream: true", "return_progress")
    if body.prompt_logprobs is not None and body.stream:
        raise BadField("prompt_logprobs come with a whole answer; leave out stream", "prompt_logprobs")
    bad_words = tuple(spelled for word in body.bad_words or () for spelled in _spelled(word, tokenizer))
    return [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=_or(body.temperature, usual.temperature),
            top_k=max(0, _or(body.top_k, usual.top_k)),
            top_p=_or(body.top_p, usual.top_p),
            min_p=_or(body.min_p, usual.min_p),
            seed=None if body.seed is None else (body.seed + index) % (1 << 64),
            stop=stops,
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
            grammar=grammar,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=_or(body.repetition_penalty, usual.repetition_penalty),
            logit_bias=body.logit_bias or {},
            stop_ids=(*usual.stop_ids, *(body.stop_token_ids or ())),
            min_tokens=body.min_tokens or 0,
            bad_words=bad_words,
            allowed_ids=tuple(body.allowed_token_ids or ()),
            include_stop=bool(body.include_stop_str_in_output),
            prompt_logprobs=body.prompt_logprobs,
        )
        for index in range(body.n or 1)
    ]


def _or(value: Any, usual: Any) -> Any:
    return usual if value is None else value


def _spelled(word: str, tokenizer: Tokenizer) -> set[tuple[int, ...]]:
    """The word's tokens, at the beginning of a text and after a space."""
    return {tuple(tokenizer.encode_text(text)) for text in (word, f" {word.lstrip(' ')}")}


def _check_tool_choice(body: ChatBody) -> None:
    if body.tool_choice not in (None, "none", "auto") and not body.tools:
        raise BadField("tool_choice is only allowed when tools are given", "tool_choice")
    choice = body.tool_choice
    if isinstance(choice, ToolChoice) and (
        [choice.function, choice.custom, choice.allowed_tools].count(None) != 2
        or getattr(choice, choice.type) is None
    ):
        raise BadField("tool_choice has the field that its type names, and no other", "tool_choice")
    known = [tool["function"]["name"] for tool in body.offered]
    if unknown := [name for name in body.named or () if name not in known]:
        raise BadField(f"tool_choice names {unknown[0]!r}, which is not among the tools", "tool_choice")


def _check_json(name: str, value: Any, max_bytes: int) -> None:
    """A schema goes into the prompt and into a grammar, whose cost grows with its size and depth."""
    found = len(msgspec.json.encode(value))
    if found > max_bytes:
        raise BadField(f"{name} has {found} bytes as JSON, expected at most {max_bytes}", name)
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise BadField(f"{name} has more than {MAX_SCHEMA_DEPTH} levels", name)
        inner = [item for item in level if isinstance(item, dict | list)]
        level = [below for item in inner for below in (item.values() if isinstance(item, dict) else item)]
