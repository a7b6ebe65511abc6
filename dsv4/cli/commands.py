"""The /commands of `dsv4 chat`."""

import base64
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4.cli.show import err, out, say_error
from dsv4.disk import read_text, result
from dsv4.engine.request import SamplingParams
from dsv4.errors import REFUSALS, RequestError, TextError

if TYPE_CHECKING:
    from dsv4.cli.chat import Conversation

# name -> what follows it, and what it does
COMMANDS = {
    "/help": ("", "list the commands"),
    "/new": ("", "start a new conversation"),
    "/retry": ("", "answer the last question again"),
    "/edit": ("", "change the last question"),
    "/undo": ("", "take back the last question and its answer"),
    "/save": ("FILE", "write the conversation, as JSON that the API takes"),
    "/load": ("FILE", "go on with a saved conversation"),
    "/set": ("[NAME VALUE]", "sampling, e.g. temperature 0.6; alone: what is set"),
    "/system": ("[TEXT]", "set the system message; alone: remove it"),
    "/think": ("on|off|N", "let the model think first; N: with at most N tokens"),
    "/file": ("PATH", "send a file's text with the next question"),
    "/stats": ("", "show the last answer's timing"),
    "/copy": ("", "copy the last answer to the clipboard"),
    "/quit": ("", "end; as Ctrl-D does"),
}
ALIASES = {"/exit": "/quit", "/reset": "/new", "/clear": "/new", "/?": "/help"}
_OTHERS = ("grammar", "prompt_logprobs", "logprobs", "bad_words", "allowed_ids")
SETTABLE = tuple(field.name for field in fields(SamplingParams) if field.name not in _OTHERS)


def run_command(talk: "Conversation", line: str) -> bool:
    """False ends the program. What went wrong is one sentence, and nothing changed."""
    typed, _, rest = line.strip().partition(" ")
    name, rest = ALIASES.get(typed, typed), rest.strip()
    if name not in COMMANDS:
        say_error(f"{typed} is no command; /help lists them, // begins a message with a slash")
        return True
    wanted = COMMANDS[name][0]
    if name == "/quit" and not rest:
        return False
    try:
        if bool(rest) != bool(wanted) and not (not rest and wanted.startswith("[")):
            raise RequestError(f"usage: {name} {wanted}".rstrip())
        said = _ACTIONS[name](talk, rest)
    except REFUSALS as error:
        say_error(str(error))
        return True
    if said:
        err.print(said, style="dim", markup=False)
    return True


def _help(talk: "Conversation", rest: str) -> str:
    return "\n".join(f"{f'{name} {what}':<20} {words}" for name, (what, words) in COMMANDS.items())


def _new(talk: "Conversation", rest: str) -> str:
    talk.turns, talk.files, talk.used = [], [], 0
    return "a new conversation"


def _take_back(talk: "Conversation") -> str:
    """The last question, which is removed with all that followed it."""
    at = max((i for i, turn in enumerate(talk.turns) if turn["role"] == "user"), default=None)
    if at is None:
        raise RequestError("there is no question yet")
    question = talk.turns[at]["content"]
    del talk.turns[at:]
    return str(question)


def _retry(talk: "Conversation", rest: str) -> str:
    talk.turns.append({"role": "user", "content": _take_back(talk)})
    talk.answer()
    return ""


def _edit(talk: "Conversation", rest: str) -> str:
    if talk.choose is None:
        raise RequestError("/edit needs a terminal")
    talk.draft = _take_back(talk)
    return ""


def _undo(talk: "Conversation", rest: str) -> str:
    question = _take_back(talk)
    return f"taken back: {question.splitlines()[0][:60] if question.strip() else 'an empty question'}"


def _save(talk: "Conversation", rest: str) -> str:
    path = Path(rest).expanduser()
    body = {"model": talk.name, "messages": talk.messages()}
    with result(path) as part:
        part.touch(mode=0o600)
        part.write_text(json.dumps(body, ensure_ascii=False, indent=1) + "\n")
    return f"{path}: {len(talk.turns)} messages"


def _load(talk: "Conversation", rest: str) -> str:
    from dsv4.text.chat import encode

    path = Path(rest).expanduser()
    try:
        found = json.loads(read_text(path))
        messages = found["messages"] if isinstance(found, dict) else found
        encode(messages)
    except (ValueError, KeyError):
        raise RequestError(f"{path} holds no conversation; expected JSON with messages") from None
    except TextError as error:
        raise RequestError(f"{path}: {error}") from None
    is_system = messages[0]["role"] == "system" and isinstance(messages[0]["content"], str)
    talk.system = messages[0]["content"] if is_system else ""
    talk.turns = [dict(message) for message in messages[is_system:]]
    return f"{len(talk.turns)} messages" + (f", the system message is {talk.system!r}" if talk.system else "")


def _set(talk: "Conversation", rest: str) -> str:
    name, _, text = rest.partition(" ")
    if not rest:
        return "\n".join(f"{name} {getattr(talk.params, name)}" for name in SETTABLE)
    if name not in SETTABLE or not text:
        raise RequestError(
            f"usage: /set NAME VALUE; names: {', '.join(SETTABLE)}; VALUE default: as at first"
        )
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = text
    if value == "default":
        value = getattr(talk.usual, name)
    elif name == "stop" and isinstance(value, str):
        value = (value,)
    elif isinstance(value, dict):
        value = {int(id): bias for id, bias in value.items() if id.isdecimal()}
    changed: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value}
    talk.params = replace(talk.params, **changed)
    return f"{name} is {getattr(talk.params, name)}"


def _system(talk: "Conversation", rest: str) -> str:
    talk.system = rest
    return f"the system message is {rest!r}" if rest else "no system message"


def _think(talk: "Conversation", rest: str) -> str:
    if rest not in ("on", "off") and not (rest.isdecimal() and int(rest)):
        raise RequestError("usage: /think on|off|N")
    talk.thinking, talk.budget = rest != "off", int(rest) if rest.isdecimal() else None
    return f"thinking is {rest}" if talk.budget is None else f"thinking ends after {rest} tokens"


def _file(talk: "Conversation", rest: str) -> str:
    path = Path(rest).expanduser()
    talk.files.append((path.name, read_text(path)))
    return f"{path.name}: {len(talk.files[-1][1]):,} characters go with the next question"


def _stats(talk: "Conversation", rest: str) -> str:
    return "\n".join([talk.last or "no answer yet", " · ".join(talk.status())])


def _copy(talk: "Conversation", rest: str) -> str:
    answers = [turn["content"] for turn in talk.turns if turn["role"] == "assistant" and turn["content"]]
    if not answers or not out.is_terminal:
        raise RequestError("there is no answer yet" if out.is_terminal else "/copy needs a terminal")
    # The terminal's own way to its clipboard (OSC 52), which works over SSH too.
    out.file.write(f"\x1b]52;c;{base64.b64encode(answers[-1].encode()).decode()}\x07")
    return f"{len(answers[-1]):,} characters copied, if the terminal allows it"


_ACTIONS: dict[str, Callable[["Conversation", str], str]] = {
    **{"/help": _help, "/new": _new, "/retry": _retry, "/edit": _edit, "/undo": _undo, "/save": _save},
    **{"/load": _load, "/set": _set, "/system": _system, "/think": _think, "/file": _file},
    **{"/stats": _stats, "/copy": _copy},
}
