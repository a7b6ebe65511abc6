"""A conversation's next message, as reasoning, text and tool calls."""

from dataclasses import dataclass, field

from dsv4.engine.request import Token
from dsv4.engine.stream import Reader, Stream, next_delta
from dsv4.text.deltas import CallArguments, CallBroken, CallEnd, CallStart, Content, Reasoning, ToolCall
from dsv4.text.stops import StopStrings
from dsv4.text.stream import OutputParser


@dataclass(frozen=True)
class ChatDelta:
    """What one token added. A tool call comes when it is complete. `token` is None after a cancellation."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None
    token: Token | None = None


@dataclass(frozen=True)
class ChatCompletion:
    """A whole answer. `finish_reason`: stop, length (max_tokens or a full context), tool_calls, cancelled."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    seed: int
    tokens: tuple[Token, ...] = field(repr=False)

    @property
    def message(self) -> dict[str, object]:
        """The answer as a message; append it, then the next question, to go on with the conversation."""
        message: dict[str, object] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        return message


class ChatStream(Reader[ChatDelta]):
    """The deltas of one answer. Closing early cancels it."""

    def __init__(self, stream: Stream, parser: OutputParser, stops: tuple[str, ...]) -> None:
        super().__init__(stream.engine, stream.output)
        self._parser, self._stops = parser, StopStrings(stops)
        self._calls: dict[int, tuple[CallStart, list[str]]] = {}
        self._deltas: list[ChatDelta] = []

    def completion(self) -> ChatCompletion:
        """Run to the end; -> the whole answer. After `close`, what there is of it."""
        for _ in self:
            pass
        sequence = self.output.sequence
        return ChatCompletion(
            text="".join(delta.text for delta in self._deltas),
            reasoning="".join(delta.reasoning for delta in self._deltas),
            tool_calls=tuple(call for delta in self._deltas for call in delta.tool_calls),
            finish_reason=self._deltas[-1].finish_reason or "cancelled",
            prompt_tokens=sequence.num_prompt,
            completion_tokens=len(sequence.tokens),
            cached_tokens=sequence.num_cached or 0,
            seed=sequence.seed,
            tokens=tuple(sequence.tokens),
        )

    def _take(self) -> ChatDelta:
        delta, parsed, reason = next_delta(self.output), [], None
        if delta.token is not None:
            parsed = self._parser.push_id(delta.token.id)
        if delta.finish_reason:
            last, reason = self._parser.finish(delta.finish_reason)
            parsed = [*parsed, *last]
        text, stopped = self._stops.push("".join(part.text for part in parsed if isinstance(part, Content)))
        if stopped:
            reason = "stop"
            self.close()
            # A step may have given more tokens than the one that ended the answer: they never were.
            untaken = sum(later.token is not None for later in self.output.deltas)
            del self.output.sequence.tokens[len(self.output.sequence.tokens) - untaken :]
            self.output.deltas.clear()
        elif reason:
            text += self._stops.finish()
        read = ChatDelta(
            text=text,
            reasoning="".join(part.text for part in parsed if isinstance(part, Reasoning)),
            tool_calls=tuple(call for part in parsed if (call := self._call(part))),
            finish_reason=reason,
            token=delta.token,
        )
        self._deltas.append(read)
        return read

    def _call(self, part: object) -> ToolCall | None:
        """The call that this part completes."""
        if isinstance(part, CallStart):
            self._calls[part.index] = (part, [])
        elif isinstance(part, CallArguments):
            self._calls[part.index][1].append(part.text)
        elif isinstance(part, CallEnd | CallBroken):
            start, arguments = self._calls.pop(part.index)
            return ToolCall(start.id, start.name, "".join(arguments)) if isinstance(part, CallEnd) else None
        return None
