"""What an output is made of: the deltas of a stream, and the message they add up to. Knows no markup."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class CallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments; the pieces of one index join to one JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    index: int


@dataclass(frozen=True)
class CallBroken:
    """In place of CallEnd: the call is unusable and void, its text follows as content."""

    index: int


Delta = Reasoning | Content | CallStart | CallArguments | CallEnd | CallBroken


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """A whole output. `finish_reason` is "tool_calls" when there is a complete call, else as it ended."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    problems: tuple[str, ...]
    dropped: str


def collect(
    deltas: Iterable[Delta], finish_reason: str, problems: tuple[str, ...] = (), dropped: str = ""
) -> Message:
    """The message that the deltas of one turn add up to."""
    texts: dict[type, list[str]] = {Reasoning: [], Content: []}
    starts: dict[int, CallStart] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        if isinstance(delta, Reasoning | Content):
            texts[type(delta)].append(delta.text)
        elif isinstance(delta, CallStart):
            starts[delta.index] = delta
            arguments[delta.index] = []
        elif isinstance(delta, CallArguments):
            arguments[delta.index].append(delta.text)
        elif isinstance(delta, CallBroken):
            del starts[delta.index]
    calls = (ToolCall(start.id, start.name, "".join(arguments[index])) for index, start in starts.items())
    reasoning, content = "".join(texts[Reasoning]), "".join(texts[Content])
    return Message(reasoning, content, tuple(calls), finish_reason, problems, dropped)
