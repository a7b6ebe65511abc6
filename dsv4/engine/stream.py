"""What a caller reads of one request. Asking for the next delta runs the engine."""

from typing import TYPE_CHECKING

from dsv4.engine.output import Output
from dsv4.engine.request import Completion, Delta
from dsv4.errors import RequestError

if TYPE_CHECKING:
    from dsv4.engine.engine import Engine


class Stream:
    """The deltas of one request. Asking for the next one runs the engine; closing early cancels the request.

    A request that was cancelled ends with a delta without a token; one that failed raises its error.
    """

    def __init__(self, engine: "Engine", output: Output) -> None:
        self.engine, self.output = engine, output

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Delta:
        while not self.is_done:
            if self.output.deltas:
                return self._take()
            self.engine.step()
        raise StopIteration

    def advance(self) -> list[Delta]:
        """What there is, after one step of the engine if that was nothing: empty inside a prompt."""
        if not self.output.deltas and not self.is_done:
            self.engine.step()
        return [self._take() for _ in range(len(self.output.deltas))]

    def _take(self) -> Delta:
        delta = self.output.deltas.popleft()
        if delta.finish_reason == "error":
            raise RequestError(delta.error)
        return delta

    def completion(self) -> Completion:
        """Run to the end; -> every token, and the text that was not taken yet."""
        text, sequence = "".join(delta.text for delta in self), self.output.sequence
        assert sequence.finish_reason is not None
        return Completion(
            *(sequence.request.id, tuple(sequence.tokens), text, sequence.finish_reason),
            *(sequence.num_prompt, sequence.seed, sequence.num_cached or 0, tuple(sequence.prompt)),
        )

    @property
    def is_done(self) -> bool:
        """Whether all deltas were taken and no more will come."""
        return not self.output.deltas and self.output.sequence.finish_reason is not None

    def close(self) -> None:
        with self.engine.turn:  # else another thread's step may end it between the two
            if not self.output.sequence.finish_reason:
                self.engine.cancel(self.output.sequence.request.id)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
