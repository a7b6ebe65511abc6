"""What a caller reads of one request. Asking for the next delta runs the engine."""

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from dsv4.engine.output import Output
from dsv4.engine.request import Completion, Delta
from dsv4.errors import RequestError

if TYPE_CHECKING:
    from dsv4.engine.engine import Engine

Item = TypeVar("Item")


class Reader(ABC, Generic[Item]):
    """Deltas by `for`, or by `async for`: the engine then runs in a thread, and the event loop goes on."""

    def __init__(self, engine: "Engine", output: Output) -> None:
        self.engine, self.output = engine, output

    @abstractmethod
    def _take(self) -> Item:
        """The oldest delta that is there."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        self._run()
        if self.is_done:
            raise StopIteration
        return self._take()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        await asyncio.to_thread(self._run)
        # Not in the thread, which goes on when this is cancelled: what it took would be lost.
        if self.is_done:
            raise StopAsyncIteration
        return self._take()

    def _run(self) -> None:
        """Until there is a delta, or none will come."""
        while not self.output.deltas:
            with self.engine.turn:  # in which no other thread ends the sequence, or closes the engine
                if self.is_done or self.output.deltas:
                    return
                self.engine.step()

    def advance(self) -> list[Item]:
        """What there is, after one step of the engine if that was nothing: empty inside a prompt."""
        if not self.output.deltas and not self.is_done:
            self.engine.step()
        taken = []
        while self.output.deltas:
            taken.append(self._take())
        return taken

    @property
    def is_done(self) -> bool:
        """Whether all deltas were taken and no more will come."""
        # In this order: another thread's step adds the last delta, then the reason.
        return self.output.sequence.finish_reason is not None and not self.output.deltas

    def close(self) -> None:
        """Cancel the request if it has not ended."""
        with self.engine.turn:  # else another thread's step may end it between the two
            if not self.output.sequence.finish_reason:
                self.engine.cancel(self.output.sequence.request.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Stream(Reader[Delta]):
    """The deltas of one request. Closing early cancels it.

    A request that was cancelled ends with a delta without a token; one that failed raises its error.
    """

    def _take(self) -> Delta:
        return next_delta(self.output)

    def completion(self) -> Completion:
        """Run to the end; -> every token, and the text that was not taken yet."""
        text, sequence = "".join(delta.text for delta in self), self.output.sequence
        assert sequence.finish_reason is not None
        return Completion(
            *(sequence.request.id, tuple(sequence.tokens), text, sequence.finish_reason),
            *(sequence.num_prompt, sequence.seed, sequence.num_cached or 0, tuple(sequence.prompt)),
        )


def next_delta(output: Output) -> Delta:
    """The oldest delta; a failure is raised."""
    delta = output.deltas.popleft()
    if delta.finish_reason == "error":
        raise RequestError(delta.error)
    return delta
