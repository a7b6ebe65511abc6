"""The places of one caller's sequences (n answers of one prompt) and one bounded buffer of what they give.

A Ticket is made before the prompts are known, and as a context manager the only owner of its places: whatever
ends its block gives them back. Nothing waits for a caller: one that does not take its deltas loses its
ticket, and the others do not notice.
"""

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any

from dsv4.engine.request import Delta, Request, SamplingParams
from dsv4.errors import Dsv4Error
from dsv4.serve import wire

if TYPE_CHECKING:
    from dsv4.serve.client import EngineProcess

MAX_BUFFERED_DELTAS = 8192


class Busy(Dsv4Error):
    """As many requests wait as may, or for as long as they may; come back after so many seconds."""

    def __init__(self, message: str, retry_seconds: int) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class Unavailable(Dsv4Error):
    """The engine is loading, has died, or the server shuts down."""


class TooSlow(Dsv4Error):
    """The caller did not take its tokens, or its time is over."""


class Ticket:
    """The deltas of one caller's sequences, in the order they came: (index of the sequence, delta)."""

    def __init__(self, engine: "EngineProcess", ids: list[str], ready: wire.Ready, now: float) -> None:
        self._engine, self._ids, self.ready = engine, ids, ready
        self._deadline = now + engine.request_seconds
        self._queue_deadline = now + engine.queue_seconds
        self.client_id: str | None = None  # the request's, where its client gave one
        self.has_started = self.is_submitted = False
        self._open = set(ids)
        self._unanswered = set(ids)
        self._deltas: list[tuple[int, Delta]] = []
        self._progress: dict[str, wire.Progress] = {}  # the latest of each, if `tells_progress`
        self._is_progress_new = self.tells_progress = False
        self._num_prompt = 0  # tokens, of all sequences
        self.submitted = 0.0
        self.began: float | None = None  # when the engine began with the first one
        self._error: Dsv4Error | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the one task that takes the deltas
        self._alarm: asyncio.TimerHandle | None = None

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_over(self) -> bool:
        """Whether all deltas were taken and none will come, for no other reason than that all have ended."""
        return not (self._open or self._deltas or self._error)

    def submit(self, prompts: list[tuple[int, ...]], params: list[SamplingParams], owner: str) -> None:
        """One sequence per prompt and entry of `params`, the prompt's entries one after the other."""
        if self._error is not None:
            raise self._error
        self.is_submitted, self.submitted = True, time.monotonic()
        self._queue_deadline = asyncio.get_running_loop().time() + self._engine.queue_seconds
        wanted = [(ids, one) for ids in prompts for one in params]
        self._num_prompt = sum(len(ids) for ids, _ in wanted)
        for id, (prompt, one) in zip(self._ids, wanted, strict=True):
            self._engine.send(wire.Submit(Request(id, prompt, one, owner), self.tells_progress))

    async def started(self) -> None:
        """Until the engine has taken all sequences and begun with one; raises why it has not."""
        while (self._unanswered or not self.has_started) and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error

    async def next(self, patience: float = math.inf) -> list[tuple[int, Delta]]:
        """All deltas that there are, as soon as there are some; none when all sequences have ended.

        TimeoutError: nothing came for so many seconds, or the prompt got further; ask again.
        """
        end = asyncio.get_running_loop().time() + patience
        while not self._deltas and self._error is None and self._open:
            if self._is_progress_new or (await self._wait(end) >= end and not self._deltas):
                raise TimeoutError
        if not self._deltas and self._error is not None:
            raise self._error
        deltas, self._deltas = self._deltas, []
        return deltas

    def take_progress(self) -> dict[str, Any] | None:
        """How far the prompts are, all together, as llama.cpp spells it; once each time they get further."""
        if not self._is_progress_new:
            return None
        self._is_progress_new, told = False, self._progress.values()
        return {
            "total": self._num_prompt,
            "cache": sum(one.cached for one in told),
            "processed": sum(one.processed for one in told),  # the cached ones among them
            "time_ms": round(1000 * max(one.seconds for one in told)),
        }

    async def _wait(self, until: float = math.inf) -> float:
        """Until something has changed, or that time has come; -> the time."""
        loop = asyncio.get_running_loop()
        deadline = self._deadline if self.has_started else min(self._deadline, self._queue_deadline)
        self._ring_at(min(deadline, until), loop)
        self._waiter = loop.create_future()
        await self._waiter
        now = loop.time()
        if now < deadline:
            return now
        if deadline == self._deadline:
            why = f"the answer took longer than the {self._engine.request_seconds:g} s allowed"
            self.fail(TooSlow(why))
        else:
            why = f"nothing was free for {self._engine.queue_seconds:g} s, the longest a request may wait"
            self.fail(Busy(f"{why}; try again later", self._engine.retry_seconds))
        return now

    def _ring_at(self, time: float, loop: asyncio.AbstractEventLoop) -> None:
        """Something changes by then. An earlier alarm stays, since tokens are more frequent than alarms: who
        wakes too early waits again."""
        if self._alarm is None or self._alarm.when() > time:
            self._stop_alarm()
            self._alarm = loop.call_at(time, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _stop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def cancel(self, index: int) -> None:
        """End one sequence; its pages are free within one step."""
        self._drop(self._ids[index])

    def close(self) -> None:
        """End what has not ended."""
        self._stop_alarm()
        for id in list(self._open):
            self._drop(id)

    def _drop(self, id: str) -> None:
        if id in self._open:
            self._open.discard(id)
            self._engine.forget(id)
        self._wake()

    # What the engine's reader calls.

    def fail(self, error: Dsv4Error) -> None:
        self._error = self._error or error
        self.close()
        self._wake()

    def take_start(self) -> None:
        if not self.has_started:
            self.has_started, self.began = True, time.monotonic()
        self._wake()

    def note_progress(self, progress: wire.Progress) -> None:
        self._progress[progress.request_id] = progress
        self._is_progress_new = True
        self._wake()

    def take_answer(self, id: str) -> None:
        self._unanswered.discard(id)
        self._wake()

    def take(self, delta: Delta) -> None:
        if len(self._deltas) >= MAX_BUFFERED_DELTAS:
            return self.fail(TooSlow(f"{MAX_BUFFERED_DELTAS} tokens were not read in time; read faster"))
        self._deltas.append((self._ids.index(delta.request_id), delta))
        if delta.finish_reason:
            self._open.discard(delta.request_id)
        self._wake()
