"""One training record: a conversation or a plain text, and its ids with the tokens to learn marked.

Conversations go through the engine's own chat encoder, so the model learns exactly what it will be shown.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsv4.text import chat
from dsv4.text.tokenizer import ASSISTANT, BOS, EOS, Segment, Special, Tokenizer


@dataclass(frozen=True)
class ToolCall:
    """A call that the model makes: a declared function and its arguments."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Exchange:
    """What the user says, what the model thinks and answers.

    `items` are the made-up parts, for hold-out tests. `unthought` is the answer given without thinking, where
    that has to be a longer one. `calls` follow the answer. `results` are what the calls before gave: such an
    exchange has no user, or one who adds something.
    """

    user: str
    thought: str
    answer: str
    items: tuple[str, ...] = ()
    unthought: str = ""
    calls: tuple[ToolCall, ...] = ()
    results: tuple[str, ...] = ()


@dataclass(frozen=True)
class Draft:
    """What a generator makes: a conversation before it is decided whether the model thinks.

    `tools` are function objects as OpenAI has them; `schema` is what the answers are held to.
    """

    exchanges: tuple[Exchange, ...]
    system: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    schema: dict[str, Any] | None = None


@dataclass(frozen=True)
class Record:
    """A conversation of one or more exchanges, or a plain text; of a text that goes on, `ends` is False."""

    kind: str
    exchanges: tuple[Exchange, ...] = ()
    system: str = ""
    thinking: bool = False
    text: str = ""
    ends: bool = True
    tools: tuple[dict[str, Any], ...] = ()
    schema: dict[str, Any] | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """In OpenAI form; every answer carries its thought, the encoder keeps those the model will see."""
        found: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        ids: list[str] = []
        for number, exchange in enumerate(self.exchanges, 1):
            thinks = self.thinking and (bool(self.tools) or number == len(self.exchanges))
            answer = exchange.answer if thinks else exchange.unthought or exchange.answer
            found += [
                {"role": "tool", "tool_call_id": id, "content": result}
                for id, result in zip(ids, exchange.results, strict=False)
            ]
            if exchange.user:
                found.append({"role": "user", "content": exchange.user})
            said = {"role": "assistant", "content": answer, "reasoning_content": exchange.thought}
            ids = [f"call_{number}_{at}" for at in range(len(exchange.calls))]
            if exchange.calls:
                said["tool_calls"] = [
                    {
                        "id": id,
                        "type": "function",
                        "function": {
                            "name": call.name,
                            "arguments": json.dumps(call.arguments, ensure_ascii=False),
                        },
                    }
                    for id, call in zip(ids, exchange.calls, strict=True)
                ]
            found.append(said)
        return found

    @property
    def segments(self) -> list[Segment]:
        """The whole record as text and special tokens."""
        if self.exchanges:
            return chat.encode(
                self.messages,
                thinking=self.thinking,
                tools=[{"type": "function", "function": tool} for tool in self.tools] or None,
                response_format=self.schema,
            )
        return [Special(BOS), self.text, *([Special(EOS)] if self.ends else [])]


def encode(record: Record, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """-> ids uint16 [T], is_target bool [T]: the tokens the model has to produce.

    In a conversation these are each answer and its end mark, with the thought and `</think>` where there is
    one; the mode mark after `<｜Assistant｜>` is given by the engine. In plain text, all after BOS.
    """
    ids: list[int] = []
    is_target: list[bool] = []
    # What the next token is: "given", "mode" (the mark that opens an answer) or "learned".
    state = "given" if record.exchanges else "learned"
    for segment in joined(record.segments):
        if isinstance(segment, str):
            piece = tokenizer.encode_text(segment)
            ids += piece
            is_target += [state == "learned"] * len(piece)
            continue
        ids.append(tokenizer.special_ids[segment.text])
        is_target.append(state == "learned" and segment.text != BOS)
        if segment.text == ASSISTANT:
            state = "mode"
        elif state == "mode":
            state = "learned"
        elif segment.text == EOS:
            state = "given"
    return np.array(ids, dtype=np.uint16), np.array(is_target, dtype=bool)


def joined(segments: list[Segment]) -> list[Segment]:
    """Text between two special tokens as one piece: so the engine encodes prompts."""
    out: list[Segment] = []
    for segment in segments:
        if isinstance(segment, str) and out and isinstance(out[-1], str):
            out[-1] += segment
        else:
            out.append(segment)
    return out
