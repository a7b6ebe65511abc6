"""Tokens of one answer to the pieces that clients get: text, reasoning, calls, logprobs. Knows no HTTP."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsv4.engine.request import Delta, SamplingParams, Token
from dsv4.errors import RequestError, TextError
from dsv4.serve.schema import INPUT_FORM
from dsv4.text.deltas import CallArguments, CallEnd, CallStart, Content, Reasoning
from dsv4.text.deltas import Delta as Parsed
from dsv4.text.stops import StopStrings
from dsv4.text.stream import OutputParser
from dsv4.text.tokenizer import Tokenizer

# JSON has no infinity; this is what OpenAI gives for a token that is all but impossible.
LOWEST_LOGPROB = -9999.0


@dataclass
class Piece:
    """What one token added. Of a call, the first piece has id and name, the others have more arguments.

    Of a custom tool's call, these are its one text, which is known when its JSON is whole.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)  # with log-probabilities, for plain completions
    ids: list[int] = field(default_factory=list)  # where they are asked for
    prompt: tuple[Token, ...] = ()  # of the prompt, where they are scored
    finish_reason: str | None = None
    stop: str | None = None  # the stop string that ended it

    @property
    def is_empty(self) -> bool:
        texts = (self.content, self.reasoning, self.calls, self.finish_reason)
        return not any((*texts, self.logprobs, self.tokens, self.ids, self.prompt))


@dataclass(frozen=True)
class Echo:
    """A prompt that is to be given out before its continuation; `hides_first`: without our own BOS."""

    text: str
    ids: tuple[int, ...]
    hides_first: bool
    is_all: bool  # no continuation was asked for


class PlainAnswer:
    """A continuation as it is; the engine has cut it at a stop string."""

    def __init__(self, echo: Echo | None = None, tells_ids: bool = False) -> None:
        self._echo, self._is_first, self._tells_ids = echo, True, tells_ids
        self.num_tokens = self.num_reasoning = self.num_cached = 0
        self.finish_reason: str | None = None

    def push(self, delta: Delta) -> Piece:
        _check(delta)
        self.num_cached = max(self.num_cached, delta.cached_tokens)
        piece = Piece(content=delta.text, finish_reason=delta.finish_reason, prompt=delta.prompt)
        self.finish_reason = delta.finish_reason
        silent = self._echo is not None and self._echo.is_all
        if silent:
            piece.content = ""
        elif delta.token is not None:
            self.num_tokens += 1
            piece.tokens = [delta.token] if delta.token.logprob is not None else []
            piece.ids = [delta.token.id] if self._tells_ids else []
        if self._echo is not None and self._is_first:
            piece.content = self._echo.text + piece.content
            if delta.prompt or (delta.token is not None and delta.token.logprob is not None):
                prompt = [Token(self._echo.ids[0]), *delta.prompt]
                piece.tokens = prompt[self._echo.hides_first :] + piece.tokens
        self._is_first = False
        return piece


class ChatAnswer:
    """An assistant's turn: the parser tells reasoning, content and calls apart; no mark reaches content."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        id_prefix: str,
        stops: tuple[str, ...] = (),
        params: SamplingParams | None = None,
        tells_ids: bool = False,
    ) -> None:
        self.num_tokens = self.num_reasoning = self.num_cached = 0
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._parser = OutputParser(
            thinking=thinking, tokenizer=tokenizer, tools=tools, id_prefix=id_prefix, keeps_markup=False
        )
        self._has_tools, self._tells_ids = bool(tools), tells_ids
        declared = [tool["function"] for tool in tools or ()]
        self._custom = {function["name"] for function in declared if INPUT_FORM in function}
        self._inputs: dict[int, list[str]] = {}  # arguments of open calls of custom tools
        self._params = params or SamplingParams()
        self._stops = StopStrings(stops, self._params.include_stop)

    @property
    def problems(self) -> tuple[str, ...]:
        return self._parser.problems

    def push(self, delta: Delta) -> Piece:
        _check(delta)
        assert self.finish_reason is None, "the answer has ended"
        piece, token = Piece(prompt=delta.prompt), delta.token
        self.num_cached = max(self.num_cached, delta.cached_tokens)
        if token is not None:
            self.num_tokens += 1
            section = self._parser.section
            self.num_reasoning += section == "reasoning"
            piece.ids = [token.id] if self._tells_ids else []
            is_stop = delta.finish_reason == "stop" and token.id in self._params.stop_ids
            if not is_stop or self._params.include_stop:
                self._add(piece, self._parser.push_id(token.id))
            is_text = token.id not in self._tokenizer.special_texts
            if token.logprob is not None and is_text and section != "calls":
                name = "reasoning_content" if section == "reasoning" else "content"
                piece.logprobs = {name: [chat_logprob(self._tokenizer, token)]}
        if delta.finish_reason and self.finish_reason is None:
            last, reason = self._parser.finish(delta.finish_reason)
            self._add(piece, last)
            if self.finish_reason is None:
                piece.content += self._stops.finish()
                self.finish_reason = "stop" if reason == "tool_calls" and not self._has_tools else reason
        piece.finish_reason, piece.stop = self.finish_reason, self._stops.found
        return piece

    def _add(self, piece: Piece, deltas: list[Parsed]) -> None:
        for delta in deltas:
            if isinstance(delta, Reasoning):
                piece.reasoning += delta.text
            elif isinstance(delta, Content):
                is_early = self.num_tokens <= self._params.min_tokens
                text, stopped = (delta.text, False) if is_early else self._stops.push(delta.text)
                piece.content += text
                if stopped:
                    self.finish_reason = "stop"
                    return
            elif isinstance(delta, CallStart) and self._has_tools:
                kind = "custom" if delta.name in self._custom else "function"
                function = {"name": delta.name, "arguments": ""}
                piece.calls.append({"index": delta.index, "id": delta.id, "type": kind, "function": function})
                if kind == "custom":
                    self._inputs[delta.index] = []
            elif isinstance(delta, CallArguments) and delta.index in self._inputs:
                self._inputs[delta.index].append(delta.text)
            elif isinstance(delta, CallArguments) and self._has_tools:
                piece.calls.append({"index": delta.index, "function": {"arguments": delta.text}})
            elif isinstance(delta, CallEnd) and delta.index in self._inputs:
                given = json.loads("".join(self._inputs.pop(delta.index))).get("input", "")
                custom = {"index": delta.index, "type": "custom"}
                piece.calls.append({**custom, "function": {"arguments": str(given)}})


def join_calls(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """The calls that the pieces add up to."""
    calls: dict[int, dict[str, Any]] = {}
    for part in (part for piece in pieces for part in piece.calls):
        call = calls.setdefault(part["index"], {**part, "function": {**part["function"], "arguments": ""}})
        call["function"]["arguments"] += part["function"]["arguments"]
    return list(calls.values())


def token_text(tokenizer: Tokenizer, id: int) -> tuple[str, list[int]]:
    """A token as text, with U+FFFD for a part of a character, and its bytes."""
    try:
        data = tokenizer.bytes_of(id)
    except TextError:
        data = b""
    return data.decode(errors="replace"), list(data)


def chat_logprob(tokenizer: Tokenizer, token: Token) -> dict[str, Any]:
    assert token.logprob is not None
    return {
        **_logprob(tokenizer, token.id, token.logprob),
        "top_logprobs": [_logprob(tokenizer, id, logprob) for id, logprob in token.top],
    }


def _logprob(tokenizer: Tokenizer, id: int, logprob: float) -> dict[str, Any]:
    text, data = token_text(tokenizer, id)
    return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": data}


def _check(delta: Delta) -> None:
    if delta.finish_reason == "error":
        raise RequestError(delta.error)
