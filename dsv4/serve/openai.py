"""OpenAI's shapes: answers whole and in chunks, usage, errors. Values in, dictionaries out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsv4.engine.request import Token
from dsv4.errors import Dsv4Error, RequestError, TextError
from dsv4.serve.answer import LOWEST_LOGPROB, ChatAnswer, Piece, PlainAnswer, join_calls, token_text
from dsv4.serve.schema import BadField, Body, StreamOptions
from dsv4.serve.ticket import Busy, TooSlow, Unavailable
from dsv4.text.tokenizer import Tokenizer


class HttpError(Dsv4Error):
    """An error with a status of its own."""

    def __init__(self, status: int, message: str, code: str | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.kind = kind or "invalid_request_error"


def error_body(error: Dsv4Error) -> tuple[int, dict[str, Any]]:
    """-> status and OpenAI's error object."""
    status, kind, code, param = 500, "server_error", None, None
    if isinstance(error, HttpError):
        status, kind, code = error.status, error.kind, error.code
    elif isinstance(error, BadField):
        status, kind, code, param = 400, "invalid_request_error", error.code, error.param
    elif isinstance(error, RequestError | TextError):
        status, kind = 400, "invalid_request_error"
    elif isinstance(error, Busy):
        status, kind, code = 429, "rate_limit_error", "queue_full"
    elif isinstance(error, Unavailable):
        status, code = 503, "engine_unavailable"
    elif isinstance(error, TooSlow):
        status, code = 504, "timeout"
    return status, {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Usage:
    """Tokens of a request; `cached` ones of its prompts were not processed."""

    prompt: int
    completion: int
    reasoning: int
    cached: int

    @classmethod
    def of(cls, num_prompt: int, answers: Sequence[ChatAnswer | PlainAnswer], num_prompts: int) -> "Usage":
        """The answers to one prompt are neighbours, and the prompt counts once."""
        each = len(answers) // num_prompts
        groups = (answers[at : at + each] for at in range(0, len(answers), each))
        return cls(
            prompt=num_prompt,
            completion=sum(answer.num_tokens for answer in answers),
            reasoning=sum(answer.num_reasoning for answer in answers),
            cached=sum(max(answer.num_cached for answer in group) for group in groups),
        )

    def shown(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


class Shape:
    """What OpenAI's first two endpoints have in common; `head` is what every object of one answer carries."""

    name = chunk_name = ""
    end = b"data: [DONE]\n\n"

    def __init__(self, head: dict[str, Any], count: int, body: Body, tokenizer: Tokenizer) -> None:
        self.head, self.count, self.body, self.tokenizer = head, count, body, tokenizer
        self.prompts: list[tuple[int, ...]] = []  # their ids, once they are known
        options = body.stream_options or StreamOptions()
        self.with_usage = options.include_usage
        self.counts_each = options.include_usage and options.continuous_usage_stats

    def opening(self, usage: Usage) -> list[dict[str, Any]]:
        return []

    def progress(self, told: dict[str, Any]) -> dict[str, Any]:
        """How far the prompts are, in a chunk that adds nothing."""
        (chunk,) = self.chunks(0, Piece())
        return {**chunk, "prompt_progress": told}

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        raise NotImplementedError

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        return [{**self.head, "object": self.chunk_name, "choices": [self.chunk(index, piece)]}]

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        last = {**self.head, "object": self.chunk_name, "choices": [], "usage": usage.shown()}
        return [last] if self.with_usage else []

    def whole(self, pieces: list[list[Piece]], usage: Usage) -> dict[str, Any]:
        choices = [self.choice(index, part) for index, part in enumerate(pieces)]
        for choice, part in zip(choices, pieces, strict=True):
            if self.body.return_token_ids:
                choice["token_ids"] = [id for piece in part for id in piece.ids]
        return {**self.head, "object": self.name, "choices": choices, "usage": usage.shown()}

    def prompt_of(self, index: int) -> tuple[int, ...]:
        return self.prompts[index // (self.count // len(self.prompts))]

    def scored(self, index: int, pieces: list[Piece]) -> list[dict[int, Any] | None]:
        """vLLM's `prompt_logprobs`: of each token of the prompt and its alternatives, none of the first."""
        tokens = [token for piece in pieces for token in piece.prompt]
        return [None, *(self._alternatives(token) for token in tokens)]

    def _alternatives(self, token: Token) -> dict[int, Any]:
        ranked = {id: (value, rank) for rank, (id, value) in enumerate(token.top, 1)}
        assert token.logprob is not None
        known = {**ranked, token.id: ranked.get(token.id, (token.logprob, None))}
        return {
            id: {
                "logprob": max(value, LOWEST_LOGPROB),
                "rank": rank,
                "decoded_token": token_text(self.tokenizer, id)[0],
            }
            for id, (value, rank) in known.items()
        }

    def error(self, error: Dsv4Error) -> dict[str, Any]:
        return error_body(error)[1]


class ChatShape(Shape):
    """Pieces of a chat answer."""

    name, chunk_name = "chat.completion", "chat.completion.chunk"

    def opening(self, usage: Usage) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        chunks: list[dict[str, Any]] = [
            {**self.head, "object": self.chunk_name, "choices": [self._chunk(index, delta, None, None)]}
            for index in range(self.count)
        ]
        if self.body.return_token_ids:
            chunks[0]["prompt_token_ids"] = self.prompts[0]
        return chunks

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.content:
            delta["content"] = piece.content
        if piece.calls:
            delta["tool_calls"] = [_shown(call) for call in join_calls([piece])]
        # OpenAI's schema has `content` in every logprobs object: null where a chunk is reasoning.
        logprobs = {"content": None, **piece.logprobs} if piece.logprobs else None
        return _with_ids(self._chunk(index, delta, logprobs, piece.finish_reason), piece)

    @staticmethod
    def _chunk(index: int, delta: Any, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        content = "".join(piece.content for piece in pieces)
        calls = [_shown({k: v for k, v in call.items() if k != "index"}) for call in join_calls(pieces)]
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        if reasoning := "".join(piece.reasoning for piece in pieces):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = None
        if getattr(self.body, "logprobs", None):
            logprobs = {
                name: [entry for piece in pieces for entry in piece.logprobs.get(name, ())]
                for name in ("content", "reasoning_content")
            }
        reason = pieces[-1].finish_reason
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def whole(self, pieces: list[list[Piece]], usage: Usage) -> dict[str, Any]:
        made = super().whole(pieces, usage)
        if self.body.return_token_ids:
            made["prompt_token_ids"] = self.prompts[0]
        if self.body.prompt_logprobs is not None:
            made["prompt_logprobs"] = self.scored(0, pieces[0])
        return made


def _shown(call: dict[str, Any]) -> dict[str, Any]:
    """A custom tool's call has a text for arguments."""
    if call.get("type") != "custom":
        return call
    custom = {"input" if key == "arguments" else key: value for key, value in call["function"].items()}
    return {**{key: value for key, value in call.items() if key != "function"}, "custom": custom}


def _with_ids(choice: dict[str, Any], piece: Piece) -> dict[str, Any]:
    return {**choice, "token_ids": piece.ids} if piece.ids else choice


class PlainShape(Shape):
    """Pieces of a plain continuation."""

    name = chunk_name = "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(index, piece.tokens) if piece.tokens else None
        made: dict[str, Any] = {
            "index": index,
            "text": piece.content,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }
        if self.body.return_token_ids and piece.ids and index not in self._begun:
            self._begun.add(index)
            made["prompt_token_ids"] = self.prompt_of(index)
        return _with_ids(made, piece)

    def choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        text = "".join(piece.content for piece in pieces)
        tokens = [token for piece in pieces for token in piece.tokens]
        ids = [id for piece in pieces for id in piece.ids]
        last = pieces[-1].finish_reason
        made = self.chunk(index, Piece(content=text, tokens=tokens, ids=ids, finish_reason=last))
        if self.body.prompt_logprobs is not None:
            made["prompt_logprobs"] = self.scored(index, pieces)
        return made

    def _logprobs(self, index: int, tokens: list[Token]) -> dict[str, Any]:
        texts = [token_text(self.tokenizer, token.id)[0] for token in tokens]
        offsets, at = [], self._offsets.get(index, 0)
        for text in texts:
            offsets.append(at)
            at += len(text)
        self._offsets[index] = at
        return {
            "tokens": texts,
            "token_logprobs": [
                None if token.logprob is None else max(token.logprob, LOWEST_LOGPROB) for token in tokens
            ],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float] | None:
        """The alternatives and the token itself; nothing stands before a prompt's first token."""
        if token.logprob is None:
            return None
        pairs = (*token.top, (token.id, token.logprob))
        return {
            token_text(self.tokenizer, id)[0]: max(value, LOWEST_LOGPROB) for id, value in reversed(pairs)
        }
