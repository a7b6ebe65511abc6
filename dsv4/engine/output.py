"""A sequence's answer as it grows, and its end: the one place where the engine knows that ids are words."""

from collections import deque
from collections.abc import Iterable

from dsv4.engine.request import Delta, FinishReason, Sequence, Token
from dsv4.errors import RequestError, TextError
from dsv4.text.stops import StopStrings
from dsv4.text.tokenizer import TextStream, Tokenizer


class Output:
    """Characters are released when complete and when they can no longer begin a stop string."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None) -> None:
        self.sequence = sequence
        self.deltas: deque[Delta] = deque()  # not yet taken by a Stream
        self.failure = ""  # why the request must end with an error
        self._text = TextStream(tokenizer) if tokenizer else None
        params = sequence.request.params
        self._min_tokens, self._includes_stop = params.min_tokens, params.include_stop
        self._stops = StopStrings(params.stop, params.include_stop)

    def fail(self, why: str) -> None:
        """The next delta is the last one, with the first reason."""
        self.failure = self.failure or why

    def advance(self, tokens: Iterable[Token | None]) -> list[Delta]:
        """A token after the other, until one ends the request: what was accepted after that never was."""
        deltas: list[Delta] = []
        for token in tokens:
            deltas.append(self._take(token))
            if deltas[-1].finish_reason:
                break
        return deltas

    def _take(self, token: Token | None) -> Delta:
        sequence = self.sequence
        if self.failure:
            return self.end("error", self.failure)
        if token is None:
            position = sequence.num_prompt + len(sequence.tokens)
            why = f"request {sequence.request.id!r}: the logits for position {position} hold NaN or infinity"
            return self.end("error", f"{why}; the weights are damaged or their products overflow")
        try:
            if sequence.matcher:
                sequence.matcher.accept(token.id)
        except RequestError as error:
            return self.end("error", str(error))
        sequence.tokens.append(token)
        reason: FinishReason | None = None
        if token.id in sequence.stop_ids:
            is_told = self._includes_stop and token.id in sequence.request.params.stop_ids
            text, reason = (self.push(token.id)[0] if is_told else "") + self.finish(), "stop"
        else:
            text, stopped = self.push(token.id)
            if stopped:
                reason = "stop"
            elif len(sequence.tokens) >= sequence.max_tokens:
                text, reason = text + self.finish(), "length"
        delta = Delta(
            request_id=sequence.request.id,
            token=token,
            text=text,
            finish_reason=reason,
            cached_tokens=sequence.num_cached or 0,
            prompt=tuple(sequence.prompt) if len(sequence.tokens) == 1 else (),
        )
        return self._give(delta)

    def end(self, reason: FinishReason, error: str = "") -> Delta:
        """The last delta of a request that ends without a further token."""
        return self._give(Delta(self.sequence.request.id, None, self.finish(), reason, error))

    def _give(self, delta: Delta) -> Delta:
        self.deltas.append(delta)
        # Last: a reader in another thread that sees the reason takes the deltas for complete.
        self.sequence.finish_reason = delta.finish_reason
        return delta

    def push(self, token_id: int) -> tuple[str, bool]:
        """-> text released by this token, and whether it completed a stop string."""
        if self._text is None:
            return "", False
        try:
            piece = self._text.push(token_id)
        except TextError:
            # A padded output row can be sampled, but has no entry in the tokenizer and no text of its own.
            piece = self._text.finish() + "\ufffd"
        if len(self.sequence.tokens) <= self._min_tokens:
            return piece, False
        return self._stops.push(piece)

    def finish(self) -> str:
        """What was held back, at the end of the sequence."""
        if self._text is None:
            return ""
        text, stopped = self._stops.push(self._text.finish())
        return text if stopped else text + self._stops.finish()
