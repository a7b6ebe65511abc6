"""Checks messages in OpenAI form and makes them typed turns. Knows nothing of prompts or special tokens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsv4.errors import TextError

TASKS = ("action", "query", "authority", "domain", "title", "extracted_url", "read_url")

_FIELDS = {
    "system": {"content", "tools", "response_format"},
    "developer": {"content", "tools", "response_format"},
    "user": {"content", "task"},
    "assistant": {"content", "reasoning_content", "tool_calls", "wo_eos", "task"},
    "tool": {"content", "tool_call_id"},
    "latest_reminder": {"content"},
}


@dataclass(frozen=True)
class Call:
    id: str
    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Block:
    """One part of a user turn: the user's text, or the result of the call with this id."""

    text: str
    is_result: bool = False
    call_id: str = ""


@dataclass(frozen=True)
class Turn:
    """A checked message; `role` is never "tool", since results are blocks of user turns."""

    role: str
    content: str = ""
    blocks: tuple[Block, ...] = ()
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    response_format: Mapping[str, Any] | None = None
    task: str | None = None
    ends_turn: bool = True


def read_turns(
    messages: Sequence[Mapping[str, Any]], allow_developer: bool, systems_first: bool = False
) -> list[Turn]:
    """Checked messages, with neighbouring user texts and tool results made into one user turn.

    `systems_first`: system messages are one turn, in front.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise TextError("the conversation is empty or not a list; expected at least one message")
    checked = [_checked(raw, f"message {index}", allow_developer) for index, raw in enumerate(messages)]
    if systems_first:
        systems = [turn for turn in checked if turn.role == "system"]
        checked = [*_joined_systems(systems), *(turn for turn in checked if turn.role != "system")]
    turns: list[Turn] = []
    for turn in checked:
        # A task closes its message for further text; a result joins it all the same.
        if (
            turns
            and turns[-1].role == turn.role == "user"
            and (turns[-1].task is None or turn.blocks[0].is_result)
        ):
            turns[-1] = replace(turns[-1], blocks=turns[-1].blocks + turn.blocks)
        else:
            turns.append(turn)
    return turns


def _joined_systems(turns: list[Turn]) -> list[Turn]:
    if not turns:
        return []
    formats = [turn.response_format for turn in turns if turn.response_format]
    if len(formats) > 1:
        raise TextError("response_format is given by several system messages; give it once")
    content = "\n\n".join(turn.content for turn in turns if turn.content)
    tools = tuple(tool for turn in turns for tool in turn.tools)
    return [Turn("system", content, tools=tools, response_format=formats[0] if formats else None)]


def to_json(value: Any) -> str:
    """JSON as the model was shown it: spaces after `,` and `:`, non-ASCII kept, keys in their order."""
    return json.dumps(value, ensure_ascii=False)


def _parameters(text: str) -> dict[str, Any]:
    """The parameters of a call; what is not a JSON object is one parameter holding the text as it came."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # no lone surrogate, no infinity
    except (ValueError, RecursionError):
        return {"arguments": text}
    return value if isinstance(value, dict) else {"arguments": text}


def _checked(raw: Any, where: str, allow_developer: bool) -> Turn:
    """The message, or an error that names the field which is wrong."""
    message = _object(raw, where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _FIELDS:
        raise TextError(f"{where}: role is {role!r}; use one of {', '.join(_FIELDS)}")
    if role == "developer" and not allow_developer:
        raise TextError(f"{where}: role developer is internal to V4's training; use system")
    _known(message, _FIELDS[role] | {"role"}, where)
    task = message.get("task")
    if task is not None and (not isinstance(task, str) or task not in TASKS):
        raise TextError(f"{where}: task is {task!r}; use one of {', '.join(TASKS)}")
    content = message.get("content")
    if role == "tool":
        text = _content_text(content, where, is_result=True)
        call_id = _optional_string(message, "tool_call_id", where)
        return Turn("user", blocks=(Block(text, is_result=True, call_id=call_id),))
    if role == "user":
        return Turn("user", blocks=(Block(_content_text(content, where)),), task=task)
    if role == "assistant":
        calls = _calls(message.get("tool_calls"), where)
        unfinished = message.get("wo_eos", False)
        if not isinstance(unfinished, bool):
            raise TextError(f"{where}: wo_eos is {unfinished!r}; expected true or false")
        if content is None and not calls and message.get("reasoning_content") is None:
            raise TextError(f"{where}: content is missing; expected a string, or tool_calls")
        return Turn(
            role,
            content="" if content is None else _content_text(content, where),
            reasoning=_optional_string(message, "reasoning_content", where),
            calls=calls,
            task=task,
            ends_turn=not unfinished,
        )
    text = _content_text(content, where)
    if role == "developer" and not text:
        raise TextError(f"{where}: content of a developer message is empty; expected text")
    return Turn(
        role,
        content=text,
        tools=read_tools(message.get("tools"), f"{where}: tools"),
        response_format=read_format(message.get("response_format"), f"{where}: response_format"),
    )


def _calls(raw: Any, where: str) -> tuple[Call, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise TextError(f"{where}: tool_calls is {_kind(raw)}; expected a list of calls")
    calls = []
    for position, item in enumerate(raw):
        at = f"{where}: tool_calls[{position}]"
        call = _object(item, at)
        _known(call, {"id", "type", "function"}, at)
        if call.get("type", "function") != "function":
            raise TextError(f"{at}: type is {call['type']!r}; expected function")
        function = _object(call.get("function"), f"{at}.function")
        _known(function, {"name", "arguments"}, f"{at}.function")
        name = _string(function.get("name"), f"{at}.function.name")
        parameters = _parameters(_string(function.get("arguments"), f"{at}.function.arguments"))
        calls.append(Call(_optional_string(call, "id", at), name, parameters))
    return tuple(calls)


def read_tools(raw: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Checked function declarations, `{"type": "function", "function": {"name": ..., ...}}`."""
    if raw is None:
        return ()
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise TextError(f"{where} is {_kind(raw)}; expected a list of functions")
    for position, item in enumerate(raw):
        at = f"{where}[{position}]"
        tool = _object(item, at)
        _known(tool, {"type", "function"}, at)
        if tool.get("type") != "function":
            raise TextError(f"{at}: type is {tool.get('type')!r}; expected function")
        function = _object(tool.get("function"), f"{at}.function")
        _string(function.get("name"), f"{at}.function.name")
        _check_json(function, f"{at}.function")
    return tuple(raw)


def read_format(raw: Any, where: str) -> Mapping[str, Any] | None:
    """A checked response format: any JSON object, shown to the model as it is."""
    if raw is not None:
        _check_json(_object(raw, where), where)
    return raw


def _check_json(value: Any, where: str) -> None:
    try:
        text = to_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise TextError(f"{where} cannot be written as JSON ({error}); expected JSON values only") from None
    _string(text, where)


def _content_text(content: Any, where: str, is_result: bool = False) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [_part(part, f"{where}: content[{i}]", is_result) for i, part in enumerate(content)]
        return "\n\n".join(parts)
    return _string(content, f"{where}: content")


def _part(raw: Any, where: str, is_result: bool) -> str:
    part = _object(raw, where)
    kind = _string(part.get("type"), f"{where}.type")
    if kind == "text":
        _known(part, {"type", "text"}, where)
        return _string(part.get("text"), f"{where}.text")
    if is_result:
        return f"[Unsupported {kind}]"
    raise TextError(f"{where}: type is {kind!r}; this model reads text parts only")


def _object(raw: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise TextError(f"{where} is {_kind(raw)}; expected an object")
    return raw


def _known(found: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := [str(name) for name in found if name not in known]:
        raise TextError(f"{where}: unknown field {', '.join(unknown)}; known are {', '.join(sorted(known))}")


def _optional_string(message: Mapping[str, Any], name: str, where: str) -> str:
    value = message.get(name)
    return "" if value is None else _string(value, f"{where}: {name}")


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise TextError(f"{where} is {_kind(value)}; expected a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise TextError(f"{where} holds a lone surrogate; expected Unicode text; remove it") from None
    return value


def _kind(value: Any) -> str:
    return "missing or null" if value is None else f"of type {type(value).__name__}"
