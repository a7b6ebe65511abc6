"""A sequence's text as it grows: the one place where the engine knows that ids are words."""

from collections import deque

from dsv4.engine.request import Delta, Sequence
from dsv4.errors import TextError
from dsv4.text.stream import StopStrings
from dsv4.text.tokenizer import TextStream, Tokenizer


class Output:
    """Characters are released when complete and when they can no longer begin a stop string."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None) -> None:
        self.sequence = sequence
        self.deltas: deque[Delta] = deque()  # not yet taken by a Stream
        self.failure = ""  # why the request must end with an error
        self._text = TextStream(tokenizer) if tokenizer else None
        self._stops = StopStrings(sequence.request.params.stop)

    def push(self, token_id: int) -> tuple[str, bool]:
        """-> text released by this token, and whether it completed a stop string."""
        if self._text is None:
            return "", False
        try:
            piece = self._text.push(token_id)
        except TextError:
            # A padded output row can be sampled, but has no entry in the tokenizer and no text of its own.
            piece = self._text.finish() + "\ufffd"
        return self._stops.push(piece)

    def finish(self) -> str:
        """What was held back, at the end of the sequence."""
        if self._text is None:
            return ""
        text, stopped = self._stops.push(self._text.finish())
        return text if stopped else text + self._stops.finish()
