"""The model's output, piece by piece, to reasoning, content and function calls. Knows no HTTP, no sampling.

Laws. However the output is cut into pieces, the deltas join to the same result. No text is lost: what is not
reasoning, content or part of a call is in `dropped`; what was not as the protocol has it is in `problems`.

Think tags, turn ends and the `｜DSML｜` of call tags count only as special tokens. The same characters made
of ordinary tokens are text: a model that quotes a page or a tool result cannot be tricked into a call. The
rest of a tag (`<`, `invoke name="f">`) is ordinary text and matched as text.

A call is announced (CallStart) when its first string parameter begins, else at its end: long strings stream.
A call that turns out unusable (a value that is not JSON, a parameter given twice, cut by the token limit) is
given out as content, with a problem; if it was announced already, CallBroken takes it back first. Without
`keeps_markup` nothing is taken back: such a call ends where it broke, its arguments a beginning and no JSON.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsv4.errors import TextError
from dsv4.text.deltas import (
    CallArguments,
    CallBroken,
    CallEnd,
    CallStart,
    Content,
    Delta,
    Message,
    Reasoning,
    collect,
)
from dsv4.text.dsml import (
    CODES,
    END_INVOKE,
    END_PARAMETER,
    END_THINK_CODE,
    EVENT,
    EVENT_START,
    MARKS,
    THINK_CODE,
    Tag,
    json_string,
    overlap,
    read_json,
    shown,
    tag_at,
    unmarked,
)
from dsv4.text.messages import read_tools
from dsv4.text.tokenizer import DSML, EOS, STOP_TOKENS, TextStream, Tokenizer

_WRAPPERS = frozenset(("arguments", "input"))
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass
class _Value:
    """The parameter being read, or with no key the whole body of an invoke given as one JSON object."""

    key: str | None
    is_string: bool | None  # None: not said
    streams: bool = False
    may_wrap: bool = False
    pieces: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Wrapper:
    """A first parameter that may hold all the others; known only when the call ends."""

    key: str
    encoded: str
    text: str


@dataclass
class _Call:
    name: str
    raw: list[str] = field(default_factory=list)  # its text so far, should it have to be shown
    index: int | None = None  # once announced
    unsent: list[str] = field(default_factory=list)
    is_begun: bool = False  # the arguments have their opening brace
    keys: list[str] = field(default_factory=list)
    value: _Value | None = None
    wrapper: _Wrapper | None = None


class OutputParser:
    """Reads one assistant turn, from after the primer. Each push returns the deltas that became certain.

    With `tools`, a lone parameter `arguments` or `input` that wraps the declared ones is unwrapped. Without
    `keeps_markup`, what would be given out as content from inside a call block is dropped, stray marks too.
    """

    def __init__(
        self,
        *,
        thinking: bool,
        tokenizer: Tokenizer | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        id_prefix: str = "call_",
        keeps_markup: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._keeps_markup = keeps_markup
        self._utf8 = TextStream(tokenizer) if tokenizer else None
        self._properties = {name: keys for name, keys in map(_declared, read_tools(tools, "tools")) if keys}
        self._id_prefix = id_prefix
        self._buffer = ""
        self._state: Callable[[], bool] = self._in_text
        self._is_reasoning = thinking
        self._in_call_block = False
        self._call: _Call | None = None
        self._num_announced = 0
        self._num_complete = 0
        self._ended = False
        self._finish_reason: str | None = None
        self._out: list[Delta] = []
        self._problems: list[str] = []
        self._dropped: list[str] = []
        self._has_dropped = False

    @property
    def problems(self) -> tuple[str, ...]:
        """What was not as the protocol has it, in order."""
        return tuple(self._problems)

    @property
    def dropped(self) -> str:
        """Text after the call block, or after the end of the turn."""
        return "".join(self._dropped)

    @property
    def section(self) -> str:
        """What is being read: "reasoning", "content" or "calls"."""
        return "calls" if self._in_call_block else "reasoning" if self._is_reasoning else "content"

    @property
    def ended(self) -> bool:
        """Whether a token that ends the turn has arrived."""
        return self._ended

    def push_text(self, text: str) -> list[Delta]:
        """Ordinary text: nothing in it is special."""
        return self._push(_SURROGATE.sub("\ufffd", text))

    def push_special(self, name: str) -> list[Delta]:
        """A special token by its text; those without a meaning in an answer count as text."""
        if name in STOP_TOKENS and not self._ended:
            self._ended = True
            if name != EOS:
                self._problems.append(f"the turn was ended by {name}")
            return []
        return self._push(CODES[name]) if name in CODES else self.push_text(name)

    def push_id(self, id: int) -> list[Delta]:
        """A token of the model's vocabulary; U+FFFD for a row of it that the tokenizer does not have."""
        if self._tokenizer is None or self._utf8 is None:
            raise TextError("this parser has no tokenizer; construct it with one to push ids")
        name = self._tokenizer.special_texts.get(id)
        if name is None:
            try:
                return self.push_text(self._utf8.push(id))
            except TextError:
                return self.push_text("\ufffd")
        return self.push_text(self._utf8.finish()) + self.push_special(name)

    def finish(self, reason: str = "stop") -> tuple[list[Delta], str]:
        """The last deltas and the finish reason.

        A `reason` other than "stop" (such as "length") means that the model was interrupted: an open call is
        then broken instead of closed, and the reason is passed on. A turn that has ended itself ignores it.
        """
        if self._finish_reason is not None:
            return [], self._finish_reason
        deltas = self.push_text(self._utf8.finish()) if self._utf8 else []
        reason = "stop" if self._ended else reason
        self._close(interrupted=reason != "stop")
        if reason == "stop" and self._num_complete:
            reason = "tool_calls"
        self._finish_reason = reason
        return deltas + self._handed_over(), reason

    def _push(self, coded: str) -> list[Delta]:
        if self._ended or self._finish_reason is not None:
            self._drop(coded)
            return []
        self._buffer += coded
        while self._buffer and self._state():
            pass
        return self._handed_over()

    def _handed_over(self) -> list[Delta]:
        deltas, self._out = self._out, []
        return deltas

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        if self._call is not None:
            self._call.raw.append(taken)
        return taken

    def _say(self, coded: str) -> None:
        if not self._keeps_markup:
            if self._in_call_block:
                return self._drop(coded)
            coded = unmarked(coded)
        if coded:
            self._out.append((Reasoning if self._is_reasoning else Content)(shown(coded)))

    def _drop(self, coded: str) -> None:
        if coded.strip() and not self._has_dropped:
            self._has_dropped = True
            self._problems.append("text after the calls or after the end of the turn was dropped")
        self._dropped.append(shown(coded))

    def _skipped_space(self) -> bool:
        """Takes white space and stray think tags between tags; whether anything is left to look at."""
        while self._buffer:
            self._take(len(self._buffer) - len(self._buffer.lstrip(" \t\r\n")))
            if not self._buffer.startswith((THINK_CODE, END_THINK_CODE)):
                break
            self._problems.append(f"swallowed a stray {shown(self._take(1))} inside the call block")
        return bool(self._buffer)

    # The states. Each looks at a buffer that is not empty, and returns False when it needs more of it.

    def _in_text(self) -> bool:
        event = EVENT.search(self._buffer)
        if event is None:
            held = EVENT_START.search(self._buffer)
            assert held is not None
            self._say(self._take(held.start()))
            return False
        self._say(self._take(event.start()))
        mark = event.group()
        if mark in (THINK_CODE, END_THINK_CODE):
            self._take(1)
            if self._is_reasoning == (mark == THINK_CODE):
                self._problems.append(f"swallowed a stray {shown(mark)}")
            self._is_reasoning = mark == THINK_CODE
            return True
        start = mark.find("<")
        tag = tag_at(self._buffer, start) if start >= 0 else Tag("")
        if tag is None:
            return False
        if tag.kind == "block":
            if self._is_reasoning:
                self._problems.append("the reasoning was not closed before the call block")
            self._take(tag.end)
            self._is_reasoning = False
            self._in_call_block = True
            self._state = self._in_block
        elif tag.kind == "invoke" and not self._is_reasoning:
            lead = self._take(start)
            if self._in_call_block:
                self._say(lead)
            else:
                self._problems.append("a call stands outside a call block")
            self._in_call_block = True
            self._state = self._in_block
        elif tag.kind in ("/invoke", "/block") and self._in_call_block and not self._is_reasoning:
            # The end of a call that was given out as content, or of a block with other text in it.
            if tag.kind == "/invoke":
                self._say(self._take(tag.end))
            self._state = self._in_block
        else:
            self._say(self._take(len(mark)))
            if not self._in_call_block:
                self._problems.append(f"a stray {DSML} is kept as text")
        return True

    def _in_block(self) -> bool:
        if not self._skipped_space():
            return False
        tag = tag_at(self._buffer, 0)
        if tag is None:
            return False
        if tag.kind == "invoke":
            self._call = _Call(tag.name)
            self._take(tag.end)
            self._state = self._in_invoke
        elif tag.kind == "/block":
            self._take(tag.end)
            self._state = self._after_block
        elif tag.kind == "block":
            self._take(tag.end)
            self._problems.append("swallowed a second opening of the call block")
        else:
            self._problems.append("text between the calls is kept as content")
            self._state = self._in_text
        return True

    def _in_invoke(self) -> bool:
        call = self._call
        assert call is not None
        if not self._skipped_space():
            return False
        if self._buffer[0] == "{" and not call.keys:
            call.value = _Value(None, False)
            self._state = self._in_value
            return True
        tag = tag_at(self._buffer, 0)
        if tag is None:
            return False
        if tag.kind == "parameter":
            self._open_parameter(call, tag)
        elif tag.kind == "/invoke":
            self._take(tag.end)
            self._close_call(call)
        elif tag.kind in ("invoke", "/block"):
            self._problems.append(f"call {call.name!r} has no closing tag")
            self._close_call(call)
        else:
            self._break_call(call, "holds text outside its parameters")
        return True

    def _in_value(self) -> bool:
        call = self._call
        assert call is not None and call.value is not None
        terminator = END_INVOKE if call.value.key is None else END_PARAMETER
        end = self._buffer.find(terminator)
        if end < 0:
            safe = len(self._buffer) - overlap(self._buffer, (terminator,))
            self._gather(call, call.value, self._take(safe))
            return False
        self._gather(call, call.value, self._take(end))
        self._take(len(terminator))
        self._end_value(call, call.value)
        return True

    def _after_block(self) -> bool:
        self._drop(self._take(len(self._buffer)))
        return False

    # What happens to the open call.

    def _open_parameter(self, call: _Call, tag: Tag) -> None:
        self._take(tag.end)
        if tag.name in call.keys:
            return self._break_call(call, f"gives parameter {tag.name!r} twice")
        if call.wrapper is not None:
            self._argue(call, call.wrapper.key, call.wrapper.encoded)
            call.wrapper = None
        declared = self._properties.get(call.name)
        may_wrap = declared is not None and not call.keys and tag.name in _WRAPPERS - declared
        call.keys.append(tag.name)
        call.value = _Value(tag.name, tag.is_string, bool(tag.is_string) and not may_wrap, may_wrap)
        if call.value.streams:
            self._announce(call)
            self._argue(call, tag.name, '"')
        self._state = self._in_value

    def _gather(self, call: _Call, value: _Value, coded: str) -> None:
        if value.streams:
            self._send(call, json_string(self._spelled(coded))[1:-1])
        else:
            value.pieces.append(self._spelled(coded))

    def _spelled(self, coded: str) -> str:
        return shown(coded) if self._keeps_markup else unmarked(coded)

    def _end_value(self, call: _Call, value: _Value) -> None:
        call.value = None
        self._state = self._in_invoke
        if value.streams:
            return self._send(call, '"')
        text = "".join(value.pieces)
        is_json, parsed = (False, None) if value.is_string else read_json(text)
        if value.key is None:
            if not isinstance(parsed, dict):
                return self._break_call(call, "has a body that is not valid JSON", is_closed=True)
            self._send(call, text.strip())
            return self._end_call(call)
        if value.is_string is False and not is_json:
            return self._break_call(call, f"has a value for {value.key!r} that is not valid JSON")
        encoded = text if is_json else json_string(text)
        if value.may_wrap:
            call.wrapper = _Wrapper(value.key, encoded, text)
        else:
            self._argue(call, value.key, encoded)

    def _argue(self, call: _Call, key: str, encoded: str) -> None:
        self._send(call, f"{', ' if call.is_begun else '{'}{json_string(key)}: {encoded}")
        call.is_begun = True

    def _send(self, call: _Call, text: str) -> None:
        if call.index is None:
            call.unsent.append(text)
        elif text:
            self._out.append(CallArguments(call.index, text))

    def _announce(self, call: _Call) -> None:
        if call.index is None:
            call.index = self._num_announced
            self._num_announced += 1
            self._out.append(CallStart(call.index, f"{self._id_prefix}{call.index}", call.name))
            self._send(call, "".join(call.unsent))

    def _close_call(self, call: _Call) -> None:
        if call.wrapper is not None:
            _, inner = read_json(call.wrapper.text)
            if isinstance(inner, dict) and inner and inner.keys() <= self._properties[call.name]:
                self._send(call, call.wrapper.text.strip())
                return self._end_call(call)
            self._argue(call, call.wrapper.key, call.wrapper.encoded)
        self._send(call, "}" if call.is_begun else "{}")
        self._end_call(call)

    def _end_call(self, call: _Call) -> None:
        self._announce(call)
        assert call.index is not None
        self._out.append(CallEnd(call.index))
        self._num_complete += 1
        self._call = None
        self._state = self._in_block

    def _break_call(self, call: _Call, why: str, is_closed: bool = False) -> None:
        self._problems.append(f"call {call.name!r} {why}; its text is kept as content")
        if call.index is not None and self._keeps_markup:
            self._out.append(CallBroken(call.index))
        self._say("".join(call.raw))
        self._call = None
        self._state = self._in_block if is_closed else self._in_text

    def _close(self, interrupted: bool) -> None:
        call = self._call
        if call is not None and call.value is not None and not interrupted:
            self._gather(call, call.value, self._take(len(self._buffer)))
            self._end_value(call, call.value)
        if self._call is not None:
            if interrupted:
                if not self._keeps_markup:
                    self._announce(self._call)
                self._break_call(self._call, "was cut short")
            elif self._buffer:
                self._break_call(self._call, "ends inside a tag")
            else:
                self._close_call(self._call)
        self._say(self._take(len(self._buffer)))
        if not interrupted and self._is_reasoning:
            self._problems.append("the reasoning was not closed")
        if not interrupted and self._in_call_block and self._state != self._after_block:
            self._problems.append("the call block was not closed")


def parse(
    output: str | Sequence[int],
    *,
    thinking: bool,
    tokenizer: Tokenizer | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    reason: str = "stop",
    id_prefix: str = "call_",
) -> Message:
    """A whole output at once. In a string the protocol's marks count as special tokens; ids are exact."""
    parser = OutputParser(thinking=thinking, tokenizer=tokenizer, tools=tools, id_prefix=id_prefix)
    deltas: list[Delta] = []
    if isinstance(output, str):
        for position, part in enumerate(MARKS.split(output)):
            deltas += parser.push_special(part) if position % 2 else parser.push_text(part)
    else:
        for id in output:
            deltas += parser.push_id(id)
    last, finish_reason = parser.finish(reason)
    return collect([*deltas, *last], finish_reason, parser.problems, parser.dropped)


def _declared(tool: Mapping[str, Any]) -> tuple[str, frozenset[str]]:
    """The name of a function and the names of its parameters, as far as the declaration gives them."""
    function = tool["function"]
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return function["name"], frozenset(properties if isinstance(properties, Mapping) else ())
