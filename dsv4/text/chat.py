"""Messages to the exact prompt V4 was trained on, text and special tokens. Knows no ids and no sampling.

Whatever a caller wrote (contents, schemas, names, arguments, results) is plain text in the outcome; only the
protocol's own marks are special tokens, so no message can forge a turn, a thought or a call.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dsv4.errors import TextError
from dsv4.text.messages import Call, Turn, read_format, read_tools, read_turns, to_json
from dsv4.text.tokenizer import (
    ASSISTANT,
    BOS,
    DSML,
    END_THINK,
    EOS,
    LATEST_REMINDER,
    THINK,
    USER,
    Segment,
    Special,
)

Release = Literal["april", "0731"]

_TOOLS_HEAD = """## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. \
For all other types (numbers, booleans, arrays, objects), \
pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_TAIL = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_FORMAT_TITLE = "## Response Format:\n\n"
_SCHEMA_HEAD = _FORMAT_TITLE + "You MUST strictly adhere to the following schema to reply:\n"
# DeepSeek's own words of the 0731 era for an answer that may be any object.
_ANY_OBJECT = {"type": "object"}
_JSON_HEAD = "You are a helpful assistant designed to output JSON.\n"
_OBJECT_ONLY = f"{_JSON_HEAD}{_FORMAT_TITLE}Reply with JSON object ONLY."
_THOROUGH = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the "
    "root cause, rigorously stress-testing your logic against all potential paths, edge cases, and "
    "adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_EXHAUSTIVE = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively "
    "decompose the problem into its most fundamental components, trace every causal chain to its root, and "
    "resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are "
    "certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
EFFORT_PREFIX: dict[str, dict[str | None, str]] = {
    "april": {None: "", "high": "", "max": _THOROUGH},
    "0731": {None: _THOROUGH, "low": "", "high": _THOROUGH, "max": _EXHAUSTIVE},
}

_MARKS = re.compile(f"({re.escape(THINK)}|{re.escape(END_THINK)}|{re.escape(DSML)})")


@dataclass
class _Writer:
    segments: list[Segment] = field(default_factory=list)

    def text(self, text: str) -> None:
        if text:
            self.segments.append(text)

    def special(self, text: str) -> None:
        self.segments.append(Special(text))

    def markup(self, constant: str) -> None:
        """Text of the protocol itself, whose marks are special tokens; never anything a caller wrote."""
        for position, part in enumerate(_MARKS.split(constant)):
            if position % 2:
                self.special(part)
            else:
                self.text(part)


def encode(
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool = False,
    drop_thinking: bool = True,
    reasoning_effort: str | None = None,
    add_bos: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    response_format: Mapping[str, Any] | None = None,
    release: Release = "april",
    allow_developer: bool = False,
) -> list[Segment]:
    """The prompt for the next assistant turn.

    `tools` and `response_format` of the request join the first system message, or a new empty one in front.
    `drop_thinking` leaves out the reasoning before the last user turn, unless any tools are declared.
    The releases of 31 July and 13 August 2026 have rules of their own, `release` "0731".
    """
    if release not in EFFORT_PREFIX:
        raise TextError(f"release {release!r} is unknown; use one of {', '.join(EFFORT_PREFIX)}")
    efforts = EFFORT_PREFIX[release]
    if not isinstance(reasoning_effort, str | None) or reasoning_effort not in efforts:
        known = ", ".join(effort or "none (leave it out)" for effort in efforts)
        raise TextError(
            f"reasoning_effort {reasoning_effort!r} is unknown to the {release} models; use one of {known}"
        )
    is_new = release == "0731"
    turns = read_turns(messages, allow_developer, systems_first=is_new)
    turns = _with_request_options(
        turns, read_tools(tools, "tools"), read_format(response_format, "response_format")
    )
    turns = _results_in_call_order(turns)
    drop = drop_thinking and not any(turn.tools for turn in turns)
    if thinking and drop:
        turns = _without_old_reasoning(turns)
    last_user = _last_user(turns)

    out = _Writer()
    if add_bos:
        out.special(BOS)
    if thinking:
        out.text(efforts[reasoning_effort])
    for index, turn in enumerate(turns):
        following = turns[index + 1].role if index + 1 < len(turns) else None
        if turn.role == "assistant":
            after_task = index > 0 and turns[index - 1].task is not None
            is_kept = not drop or (not turn.ends_turn if is_new else index > last_user)
            if is_new and not after_task:
                _open_answer(out, thinking and is_kept)
            if thinking and is_kept and not after_task:
                out.text(turn.reasoning)
                if turn.content or turn.ends_turn or not is_new:  # else the thought goes on
                    out.special(END_THINK)
            _write_answer(out, turn, is_new)
        else:
            _write_input(out, turn, is_new)
        if turn.task is not None and following in (None, "assistant", "latest_reminder"):
            _write_task(out, turn.task, thinking)
        elif is_new:
            if following is None and turn.ends_turn:
                _open_answer(out, thinking)
        elif following in (None, "assistant", "latest_reminder") and turn.role in ("user", "developer"):
            _open_answer(out, thinking and (not drop or index >= last_user))
    return out.segments


def render(messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """The prompt of `encode` as one string, for people to read: text and special tokens look alike in it."""
    return join(encode(messages, **options))


def opens_thought(prompt: Sequence[Segment]) -> bool:
    """Whether the answer to a prompt begins, or goes on, with a thought."""
    marks = [segment for segment in prompt if segment in (Special(THINK), Special(END_THINK))]
    return bool(marks) and marks[-1] == Special(THINK)


def join(segments: Sequence[Segment]) -> str:
    """The segments as one string."""
    return "".join(segment if isinstance(segment, str) else segment.text for segment in segments)


def _with_request_options(
    turns: list[Turn], tools: tuple[Mapping[str, Any], ...], response_format: Mapping[str, Any] | None
) -> list[Turn]:
    if not tools and not response_format:
        return turns
    at = next((index for index, turn in enumerate(turns) if turn.role == "system"), None)
    if at is None:
        return [Turn("system", tools=tools, response_format=response_format), *turns]
    system = turns[at]
    for name, of_request, of_message in (
        ("tools", tools, system.tools),
        ("response_format", response_format, system.response_format),
    ):
        if of_request and of_message:
            raise TextError(f"{name} is given by the request and by the first system message; give it once")
    joined = replace(
        system, tools=tools or system.tools, response_format=response_format or system.response_format
    )
    return [*turns[:at], joined, *turns[at + 1 :]]


def _results_in_call_order(turns: list[Turn]) -> list[Turn]:
    order: dict[str, int] = {}
    sorted_turns = []
    for turn in turns:
        if turn.calls:
            order = {call.id: position for position, call in enumerate(turn.calls) if call.id}
        results = [block for block in turn.blocks if block.is_result]
        if len(results) > 1 and order:
            ranked = iter(sorted(results, key=lambda block: order.get(block.call_id, 0)))
            blocks = tuple(next(ranked) if block.is_result else block for block in turn.blocks)
            turn = replace(turn, blocks=blocks)
        sorted_turns.append(turn)
    return sorted_turns


def _without_old_reasoning(turns: list[Turn]) -> list[Turn]:
    last_user = _last_user(turns)
    old = [replace(turn, reasoning="") for turn in turns[: max(last_user, 0)] if turn.role != "developer"]
    return old + turns[max(last_user, 0) :]


def _last_user(turns: list[Turn]) -> int:
    return max((i for i, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1)


def _write_input(out: _Writer, turn: Turn, is_new: bool) -> None:
    if turn.role == "latest_reminder":
        out.special(LATEST_REMINDER)
    elif turn.role != "system":
        out.special(USER)
    results = [f"<tool_result>{b.text}</tool_result>" if b.is_result else b.text for b in turn.blocks]
    out.text("\n\n".join(results) if turn.role == "user" else turn.content)
    if turn.tools:
        out.text("\n\n")
        out.markup(_TOOLS_HEAD)
        out.text("\n".join(to_json(_shown(tool["function"], is_new)) for tool in turn.tools))
        out.markup(_TOOLS_TAIL)
    if is_new and turn.response_format == _ANY_OBJECT:
        out.text("\n\n" + _OBJECT_ONLY)
    elif turn.response_format:
        out.text("\n\n" + _SCHEMA_HEAD + to_json(turn.response_format))


def _shown(function: Mapping[str, Any], is_new: bool) -> Mapping[str, Any]:
    """A function as the model sees it: as it was given, or its three fields in their order."""
    fields: dict[str, Any] = {"name": None, "description": "", "parameters": {}}
    return {name: function.get(name, usual) for name, usual in fields.items()} if is_new else function


def _write_answer(out: _Writer, turn: Turn, is_new: bool) -> None:
    out.text(turn.content)
    if turn.calls:
        out.markup("\n\n<｜DSML｜tool_calls>\n")
        for position, call in enumerate(turn.calls):
            out.text("\n" if position else "")
            _write_call(out, call, is_new)
        out.markup("\n</｜DSML｜tool_calls>")
    if turn.ends_turn:
        out.special(EOS)


def _write_call(out: _Writer, call: Call, is_new: bool) -> None:
    out.markup("<｜DSML｜invoke name=")
    out.text(f'"{call.name}">' if is_new and not call.parameters else f'"{call.name}">\n')
    for position, (key, value) in enumerate(call.parameters.items()):
        is_string = isinstance(value, str)
        out.text("\n" if position else "")
        out.markup("<｜DSML｜parameter name=")
        out.text(
            f'"{key}" string="{"true" if is_string else "false"}">{value if is_string else to_json(value)}'
        )
        out.markup("</｜DSML｜parameter>")
    out.markup("\n</｜DSML｜invoke>")


def _open_answer(out: _Writer, thinks: bool) -> None:
    out.special(ASSISTANT)
    out.special(THINK if thinks else END_THINK)


def _write_task(out: _Writer, task: str, thinking: bool) -> None:
    if task == "action":
        _open_answer(out, thinking)
    out.special(f"<｜{task}｜>")
