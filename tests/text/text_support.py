"""Random conversations, a second renderer to compare with, and ways to drive the output parser."""

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

from dsv4.text.deltas import CallArguments, CallBroken, CallEnd, CallStart, Content, Delta, Message, Reasoning
from dsv4.text.stream import OutputParser, collect
from dsv4.text.tokenizer import CHAT_TOKENS, Segment, Special

WORDS = ("a", "the cat", "über", "数字", "答案", "🙂", "é́", "0", "12345", "don't", "x_y", "​", "\t")
BREAKS = (" ", "\n", "\n\n", "\n\n\n", "", "  ")
TRAPS = (
    *CHAT_TOKENS,
    "<｜DSML｜tool_calls>",
    "\n\n<｜DSML｜tool_calls>\n",
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
    '<｜DSML｜invoke name="f">',
    "<",
    "</",
    "\n\n<",
    "｜",
    "<tool_result>",
    '"',
    "\\",
    "{",
)


def some_text(rng: random.Random, longest: int = 6) -> str:
    parts = []
    for _ in range(rng.randrange(longest + 1)):
        parts.append(rng.choice(TRAPS if rng.random() < 0.15 else WORDS))
        parts.append(rng.choice(BREAKS))
    return "".join(parts)


def some_value(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.randrange(8 if depth else 6)
    if kind < 3:
        return some_text(rng, 4)
    if kind < 6:
        return rng.choice((None, True, False, 0, -17, 10**20, 0.5, -1.25e-9))
    if kind == 6:
        return [some_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    return {some_name(rng): some_value(rng, depth - 1) for _ in range(rng.randrange(3))}


def some_name(rng: random.Random) -> str:
    """A name the tags can carry: not empty, no quotes."""
    return some_text(rng, 1).replace('"', "") + rng.choice("abcdé")


def some_arguments(rng: random.Random) -> str:
    if rng.random() < 0.05:
        return rng.choice(("", "not json", "[1, 2]", '"text"', '{"a": ', "3", some_text(rng)))
    arguments = {some_name(rng): some_value(rng) for _ in range(rng.randrange(4))}
    return json.dumps(arguments, ensure_ascii=rng.random() < 0.5)


def some_tool(rng: random.Random) -> dict[str, Any]:
    function = {"name": some_name(rng), "description": some_text(rng), "parameters": some_value(rng)}
    return {"type": "function", "function": function}


def some_assistant(rng: random.Random) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": some_text(rng)}
    if rng.random() < 0.6:
        message["reasoning_content"] = some_text(rng)
    if rng.random() < 0.4:
        message["tool_calls"] = [
            {
                "id": f"c{i}",
                "type": "function",
                "function": {"name": some_name(rng), "arguments": some_arguments(rng)},
            }
            for i in range(rng.randrange(1, 4))
        ]
        if rng.random() < 0.3:
            message["content"] = None
    return message


def some_conversation(rng: random.Random) -> list[dict[str, Any]]:
    """Any order of roles, then a user or tool message, then the assistant turn."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        system: dict[str, Any] = {"role": "system", "content": some_text(rng)}
        if rng.random() < 0.3:
            system["tools"] = [some_tool(rng) for _ in range(rng.randrange(3))]
        if rng.random() < 0.1:
            system["response_format"] = {"type": "object", "of": some_value(rng)}
        messages.append(system)
    for _ in range(rng.randrange(5)):
        role = rng.choice(
            ("user", "user", "assistant", "assistant", "tool", "tool", "latest_reminder", "system")
        )
        message = some_assistant(rng) if role == "assistant" else {"role": role, "content": some_text(rng)}
        if role in ("user", "assistant") and rng.random() < 0.1:
            message["task"] = rng.choice(("action", "query", "title"))
        if role == "tool":
            message["tool_call_id"] = rng.choice(("c0", "c1", "c2", "other"))
        messages.append(message)
    for message in reversed(messages):
        # A task on the last user turn would take the place of the primer.
        if message["role"] not in ("user", "tool"):
            break
        message.pop("task", None)
    messages.append({"role": rng.choice(("user", "tool")), "content": some_text(rng)})
    return [*messages, some_assistant(rng)]


def plain_render(messages: list[dict[str, Any]], thinking: bool, drop: bool, effort_prefix: str) -> str:
    """The prompt of the April models by a second, naive route: dicts and strings."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] not in ("user", "tool"):
            turns.append(message)
            continue
        part = (message.get("tool_call_id", "") if message["role"] == "tool" else None, message["content"])
        joinable = turns and turns[-1]["role"] == "user"
        if joinable and (message["role"] == "tool" or not turns[-1].get("task")):
            turns[-1]["parts"].append(part)
        else:
            task = message.get("task") if message["role"] == "user" else None
            turns.append({"role": "user", "parts": [part], "task": task})
    ids: list[str] = []
    for turn in turns:
        if turn.get("tool_calls"):
            ids = [call["id"] for call in turn["tool_calls"]]
        if turn["role"] == "user" and ids:
            results = [part for part in turn["parts"] if part[0] is not None]
            results.sort(key=lambda part: ids.index(part[0]) if part[0] in ids else 0)
            turn["parts"] = [results.pop(0) if part[0] is not None else part for part in turn["parts"]]
    drop = drop and not any(turn.get("tools") for turn in turns)
    last_user = max([i for i, turn in enumerate(turns) if turn["role"] == "user"], default=-1)

    prompt = "<｜begin▁of▁sentence｜>" + (effort_prefix if thinking else "")
    for i, turn in enumerate(turns):
        role = turn["role"]
        keeps = thinking and (not drop or i >= last_user)
        if role == "system":
            prompt += turn["content"]
            if turn.get("tools"):
                prompt += "\n\n" + tools_block([tool["function"] for tool in turn["tools"]])
            if turn.get("response_format"):
                prompt += (
                    "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
                )
                prompt += json.dumps(turn["response_format"], ensure_ascii=False)
        elif role == "user":
            texts = [t if id is None else "<tool_result>" + t + "</tool_result>" for id, t in turn["parts"]]
            prompt += "<｜User｜>" + "\n\n".join(texts)
        elif role == "latest_reminder":
            prompt += "<｜latest_reminder｜>" + turn["content"]
        else:
            if keeps and not (i and turns[i - 1].get("task")):
                prompt += (turn.get("reasoning_content") or "") + "</think>"
            prompt += (turn["content"] or "") + calls_block(turn.get("tool_calls") or [])
            prompt += "" if turn.get("wo_eos") else "<｜end▁of▁sentence｜>"
        follower = turns[i + 1]["role"] if i + 1 < len(turns) else "end"
        if follower not in ("end", "assistant", "latest_reminder"):
            continue
        if turn.get("task") == "action":
            prompt += "<｜Assistant｜>" + ("<think>" if thinking else "</think>") + "<｜action｜>"
        elif turn.get("task"):
            prompt += "<｜" + turn["task"] + "｜>"
        elif role == "user":
            prompt += "<｜Assistant｜>" + ("<think>" if keeps else "</think>")
    return prompt


def tools_block(functions: list[dict[str, Any]]) -> str:
    schemas = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    return TOOLS_TEXT.replace("{SCHEMAS}", schemas)


def calls_block(calls: list[dict[str, Any]]) -> str:
    if not calls:
        return ""
    lines = ["\n\n<｜DSML｜tool_calls>"]
    for call in calls:
        lines.append(f'<｜DSML｜invoke name="{call["function"]["name"]}">')
        parameters = []
        for key, value in expected_parameters(call["function"]["arguments"]).items():
            kind, text = (
                ("true", value)
                if isinstance(value, str)
                else ("false", json.dumps(value, ensure_ascii=False))
            )
            parameters.append(f'<｜DSML｜parameter name="{key}" string="{kind}">{text}</｜DSML｜parameter>')
        lines += parameters or [""]
        lines.append("</｜DSML｜invoke>")
    return "\n".join([*lines, "</｜DSML｜tool_calls>"])


def expected_parameters(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


TOOLS_TEXT = (
    "## Tools\n\nYou have access to a set of tools to help answer the user's question. You can invoke "
    'tools by writing a "<｜DSML｜tool_calls>" block like the following:\n\n<｜DSML｜tool_calls>\n'
    '<｜DSML｜invoke name="$TOOL_NAME">\n<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">'
    "$PARAMETER_VALUE</｜DSML｜parameter>\n...\n</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="$TOOL_NAME2">\n...\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>\n\n'
    'String parameters should be specified as is and set `string="true"`. For all other types (numbers, '
    'booleans, arrays, objects), pass the value in JSON format and set `string="false"`.\n\n'
    "If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside "
    "<think>...</think> BEFORE any tool calls or final response.\n\n"
    "Otherwise, output directly after </think> with tool calls or final response.\n\n"
    "### Available Tool Schemas\n\n{SCHEMAS}\n\n"
    "You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
)


def pushed(parser: OutputParser, segment: Segment) -> list[Delta]:
    return parser.push_special(segment.text) if isinstance(segment, Special) else parser.push_text(segment)


def run(
    segments: Iterable[Segment], *, thinking: bool, reason: str = "stop", tools: Sequence[Any] = ()
) -> tuple[Message, list[Delta]]:
    """The message and the deltas, neighbours of one kind joined, so that only real differences show."""
    parser = OutputParser(thinking=thinking, tools=tools)
    deltas = [delta for segment in segments for delta in pushed(parser, segment)]
    last, finish_reason = parser.finish(reason)
    deltas += last
    return collect(deltas, finish_reason, parser.problems, parser.dropped), joined(deltas)


def joined(deltas: list[Delta]) -> list[Delta]:
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if isinstance(delta, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + delta.text)
        elif isinstance(delta, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + delta.text)
        elif (
            isinstance(delta, CallArguments) and isinstance(last, CallArguments) and last.index == delta.index
        ):
            result[-1] = CallArguments(delta.index, last.text + delta.text)
        else:
            assert isinstance(delta, Reasoning | Content | CallStart | CallArguments | CallEnd | CallBroken)
            result.append(delta)
    return result


def split_texts(rng: random.Random, segments: Iterable[Segment]) -> list[Segment]:
    """The same output in other pieces."""
    result: list[Segment] = []
    for segment in segments:
        if isinstance(segment, Special):
            result.append(segment)
            continue
        while segment:
            count = rng.randrange(1, 9)
            result.append(segment[:count])
            segment = segment[count:]
    return result
