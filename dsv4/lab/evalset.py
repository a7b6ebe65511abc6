"""Evaluation sets: JSON lines of prompts, each with what is expected of the answer. Read strictly."""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from dsv4.errors import ConfigError
from dsv4.lab.judge import as_number

SUITES = ("stories", "sums", "recall", "chat", "tools", "json", "unknown")
TEXT = "text"
_KEYS = {"suite", "kind", "messages", "thinking", "expected", "distance_tokens", "context_tokens", "text"}
_KEYS |= {"tools", "schema"}


@dataclass(frozen=True)
class Item:
    """A prompt or a held-out text. `expected`: words of stories, the number of sums, the steps of tools, the
    object of JSON, nothing for what is not known, else a text or None.

    A step is what the model must call (`calls`: names and arguments, none: it must call nothing) or say
    (`says`), and what it is then given (`results`), which leads to the next step.
    """

    suite: str
    kind: str
    messages: tuple[dict[str, Any], ...] = ()
    thinking: bool = False
    expected: Any = None
    distance_tokens: int = 0  # recall: from the line with the answer to the end of the prompt
    context_tokens: int = 0
    text: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    schema: dict[str, Any] | None = None


def read_set(path: Path) -> list[Item]:
    """Every line of the file, or one sentence that names the line and what is wrong with it."""
    try:
        lines = path.read_bytes().decode().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}), expected JSON lines") from None
    items = [_item(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise ConfigError(f"{path} is empty, expected JSON lines with one prompt each")
    return items


def choose(items: list[Item], suite: str, limit: int | None) -> list[Item]:
    """The items of a suite (`all`: every one), held-out text with `stories`; at most `limit` of each.

    Drawn by a fixed lot: the first few would be of one length, and every n-th one of one kind.
    """
    wanted = {"all": (*SUITES, TEXT), "stories": ("stories", TEXT)}.get(suite, (suite,))
    chosen = []
    for name in wanted:
        mine = [item for item in items if item.suite == name]
        drawn = Random(0).sample(range(len(mine)), min(len(mine), limit or len(mine)))
        chosen += [mine[index] for index in sorted(drawn)]
    return chosen


def _item(line: str, where: str) -> Item:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} holds a {type(raw).__name__}, expected a JSON object")
    if unknown := sorted(raw.keys() - _KEYS):
        raise ConfigError(f"{where}: unknown keys {unknown}; the keys are {', '.join(sorted(_KEYS))}")
    suite, expected = str(raw.get("suite")), raw.get("expected")
    rules: list[tuple[str, object, str]] = [
        ("suite", suite in (*SUITES, TEXT), f"one of {', '.join((*SUITES, TEXT))}"),
        ("kind", isinstance(raw.get("kind"), str), "a text"),
    ]
    if suite == TEXT:
        rules.append(("text", isinstance(raw.get("text"), str) and raw["text"], "a text that is not empty"))
    else:
        rules += [
            ("messages", _is_conversation(raw.get("messages")), "a list of messages with role and content"),
            ("thinking", isinstance(raw.get("thinking"), bool), "true or false"),
        ]
    if suite == "stories":
        is_list = isinstance(expected, list) and expected and all(map(_is_word, expected))
        rules.append(("expected", is_list, "a list of words"))
    elif suite == "sums":
        rules.append(
            ("expected", _is_word(expected) and as_number(str(expected)) is not None, "a number as text")
        )
    elif suite == "recall":
        rules.append(("expected", _is_word(expected), "a text"))
        for key in ("distance_tokens", "context_tokens"):
            rules.append((key, type(raw.get(key)) is int and raw[key] > 0, "a positive number of tokens"))
    elif suite == "tools":
        rules.append(("tools", _is_list_of_objects(raw.get("tools")), "a list of tools"))
        rules.append(
            (
                "expected",
                _are_steps(expected),
                "a list of steps with calls or says, all but the last with results",
            )
        )
    elif suite == "json":
        rules.append(("expected", isinstance(expected, dict), "an object"))
        rules.append(("schema", isinstance(raw.get("schema"), dict | None), "an object or null"))
    elif suite == "unknown":
        rules.append(("expected", expected is None, "null"))
    elif suite == "chat":
        rules.append(("expected", expected is None or _is_word(expected), "a text or null"))
    for key, holds, wanted in rules:
        if not holds:
            raise ConfigError(f"{where}: {key} is {raw.get(key)!r:.60}, expected {wanted}")
    if suite == TEXT:
        return Item(suite, raw["kind"], text=raw["text"])
    return Item(
        *(suite, raw["kind"], tuple(raw["messages"]), raw["thinking"], expected),
        *(raw.get("distance_tokens") or 0, raw.get("context_tokens") or 0),
        tools=tuple(raw.get("tools") or ()),
        schema=raw.get("schema"),
    )


def _are_steps(value: object) -> bool:
    """At least one; each but the last goes on with results of its calls."""
    if not isinstance(value, list) or not _is_list_of_objects(value):
        return False
    for number, step in enumerate(value, 1):
        is_last = number == len(value)
        if step.keys() - {"calls", "says", "results"} or not step.keys() & {"calls", "says"}:
            return False
        if is_last == bool(step.get("results")):
            return False
        if not is_last and len(step["results"]) != len(step.get("calls", ())):
            return False
    return True


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _is_conversation(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value)
    )
