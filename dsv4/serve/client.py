"""The HTTP process's side of the engine: starts its process, restarts it, hands out deltas. Knows no HTTP.

A Ticket is the places of one caller's sequences (n answers of one prompt) and one bounded buffer. It is made
before the prompts are known, and as a context manager the only owner of its places: whatever ends its block
gives them back. Nothing here waits for a caller: one that does not take its deltas loses its ticket, and the
others do not notice.
"""

import asyncio
import contextlib
import itertools
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from dsv4.child import begin, child_command
from dsv4.config import EngineConfig
from dsv4.engine.request import Delta, Request, SamplingParams
from dsv4.env import launched_by
from dsv4.errors import ConfigError, DeviceError, Dsv4Error, RequestError
from dsv4.serve import wire

MAX_BUFFERED_DELTAS = 8192
MAX_UNSENT_BYTES = 64 << 20
_READ_BYTES = 1 << 20
# After a process that died before it was ready: wait, longer each time.
MAX_RESTART_SECONDS = 30.0
STOP_SECONDS = 10.0
MAX_RETRY_SECONDS = 60
MEAN_OVER = 16


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
        self._has_started = self.is_submitted = False
        self._open = set(ids)
        self._unanswered = set(ids)
        self._deltas: list[tuple[int, Delta]] = []
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
        self.is_submitted = True
        self._queue_deadline = asyncio.get_running_loop().time() + self._engine.queue_seconds
        wanted = [(ids, one) for ids in prompts for one in params]
        for id, (prompt, one) in zip(self._ids, wanted, strict=True):
            self._engine.send(wire.Submit(Request(id, prompt, one, owner)))

    async def started(self) -> None:
        """Until the engine has taken all sequences and begun with one; raises why it has not."""
        while (self._unanswered or not self._has_started) and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error

    async def next(self, patience: float = math.inf) -> list[tuple[int, Delta]]:
        """All deltas that there are, as soon as there are some; none when all sequences have ended.

        TimeoutError: nothing came for so many seconds; ask again.
        """
        end = asyncio.get_running_loop().time() + patience
        while not self._deltas and self._error is None and self._open:
            if await self._wait(end) >= end and not self._deltas:
                raise TimeoutError
        if not self._deltas and self._error is not None:
            raise self._error
        deltas, self._deltas = self._deltas, []
        return deltas

    async def _wait(self, until: float = math.inf) -> float:
        """Until something has changed, or that time has come; -> the time."""
        loop = asyncio.get_running_loop()
        deadline = self._deadline if self._has_started else min(self._deadline, self._queue_deadline)
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
        self._has_started = True
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


@dataclass
class _Life:
    """One run of the engine's process."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    ready: wire.Ready | None = None
    tickets: dict[str, Ticket] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)  # sequences that run, since when
    latest: dict[str, float] = field(default_factory=dict)  # when a sequence's last token came
    heard: float = field(default_factory=time.monotonic)  # when the last message came
    why: str = ""  # it has ended, where more is known than how
    noted: str = ""  # the same for the log, where it says more


class EngineProcess:
    """The engine in its own process, kept alive. `log` gets one line per start and death."""

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        *,
        max_queue: int,
        queue_seconds: float,
        request_seconds: float,
        stall_seconds: float,
        log: Callable[[str], None],
        progress: Callable[[int, int], None],
    ) -> None:
        self.model, self.config = model, config
        self.max_queue, self.queue_seconds, self.request_seconds = max_queue, queue_seconds, request_seconds
        self.stall_seconds = stall_seconds
        self._mean_seconds = 1.0  # that a sequence holds its place, the later ones counting more
        self.status = wire.Status()
        self.on_gap: Callable[[float], None] = lambda seconds: None  # between two tokens of a sequence
        self.num_restarts = 0
        self._log, self._progress = log, progress
        self._life: _Life | None = None
        self._trouble = ""  # why there is no engine
        self._first_ready: asyncio.Future[wire.Ready] = asyncio.get_running_loop().create_future()
        # Has an error once there will be no engine again: it was one of torchrun's ranks.
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop_reason: str | None = None
        self._stopping = asyncio.Event()
        self._counter = itertools.count()
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> wire.Ready:
        """Until the model is loaded for the first time; what keeps it from loading is raised."""
        self._keeper = asyncio.create_task(self._keep())
        return await self._first_ready

    @property
    def ready(self) -> wire.Ready | None:
        """What is loaded, or None while nothing is."""
        return self._life.ready if self._life else None

    @property
    def num_open(self) -> int:
        return len(self._life.tickets) if self._life else 0

    @property
    def retry_seconds(self) -> int:
        """When it may be worth coming back: the time in which those that wait now are through."""
        batch = self.ready.max_batch if self.ready else 1
        return min(MAX_RETRY_SECONDS, max(1, round(self._mean_seconds * (1 + self.status.waiting / batch))))

    def check_ready(self) -> wire.Ready:
        """What is loaded; raises Unavailable if nothing is."""
        if self._stop_reason is not None:
            raise Unavailable(self._stop_reason)
        if self._life is None or self._life.ready is None:
            raise Unavailable(f"{self._trouble or 'the engine is loading'}; try again in a few seconds")
        return self._life.ready

    def reserve(self, count: int) -> Ticket:
        """Places for so many sequences, to be used in a `with` block; raises Busy or Unavailable."""
        ready = self.check_ready()
        assert self._life is not None
        limit = self.max_queue + ready.max_batch
        if count > limit:
            raise RequestError(f"{count} sequences were asked for at once, at most {limit} may run or wait")
        if self.num_open + count > limit or self._unsent() > MAX_UNSENT_BYTES:
            raise Busy(
                f"{self.num_open} sequences run or wait, {count} more were asked for, at most {limit} may; "
                "try again later",
                self.retry_seconds,
            )
        ids = [f"s{next(self._counter)}" for _ in range(count)]
        ticket = Ticket(self, ids, ready, asyncio.get_running_loop().time())
        self._life.tickets.update(dict.fromkeys(ids, ticket))
        return ticket

    def forget(self, id: str) -> None:
        """Nobody waits for this sequence any more."""
        if self._life and self._life.tickets.pop(id, None):
            self._life.began.pop(id, None)
            self._life.latest.pop(id, None)
            self.send(wire.Cancel(id))

    def refuse_new(self, why: str) -> None:
        """From now on there are no new tickets; open ones go on."""
        self._stop_reason = why

    async def stop(self, why: str) -> None:
        """End the engine's process; open tickets fail with `why`."""
        self.refuse_new(why)
        self._stopping.set()
        if self._life is not None:
            self._fail_all(self._life, Unavailable(why))
            self._life.writer.close()
        if self._keeper is not None:
            # Not `await self._keeper`: who is cancelled here must not cancel the keeper too.
            await asyncio.wait([self._keeper])
            self._keeper.result()

    def _unsent(self) -> int:
        return self._life.writer.transport.get_write_buffer_size() if self._life else 0

    def send(self, message: wire.Message) -> None:
        if self._life is not None and not self._life.writer.is_closing():
            self._life.writer.write(wire.frame(message))

    async def _keep(self) -> None:
        """Start the process, serve until it dies, start it again."""
        delay = 0.0
        while not self._stopping.is_set():
            began, was_ready = time.monotonic(), False
            try:
                life = await _launch()
            except OSError as error:  # no file descriptor, no memory
                noted = self._trouble = f"the engine's process cannot be started ({error.strerror or error})"
            else:
                self._life = life
                if self._stopping.is_set():  # `stop` came during the launch, and found nothing to end
                    life.writer.close()
                watchdog = asyncio.create_task(self._watch(life))
                try:
                    self.send(wire.Start(self.model, self.config, again=self._first_ready.done()))
                    await self._read(life)
                except OSError:
                    pass  # the process has ended, or is about to
                except (wire.WireError, ConfigError) as error:
                    if self._first_ready.done():
                        self._log(f"engine: {error}")
                    self._give_up(error)
                finally:
                    self._life = None
                    watchdog.cancel()
                    code = await _ended(life)
                was_ready = life.ready is not None
                self._trouble = life.why or f"the engine's process has died ({_how(code)})"
                noted = life.noted or self._trouble
                again = f"{self._trouble}; it is being restarted, send the request again"
                self._fail_all(life, Unavailable(self._stop_reason or again))
            self._give_up(Unavailable(f"{self._trouble} while loading"))
            if self._stopping.is_set():
                return
            if launched_by() is not None:
                why = f"{noted}, and torchrun's ranks with it; torchrun can start all of them again"
                self.ended.set_exception(DeviceError(why))
                return
            self.num_restarts += 1
            self.status = wire.Status()
            delay = 0.0 if was_ready else min(MAX_RESTART_SECONDS, max(1.0, 2 * delay))
            self._log(
                f"engine: {noted}; restarting{f' in {delay:g} s' if delay else ''}, "
                f"it has run for {time.monotonic() - began:.1f} s"
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    async def _watch(self, life: _Life) -> None:
        """Ends a process that has work and does not step; who waits for it is told, and it starts again."""
        while True:
            await asyncio.sleep(self.stall_seconds / 8)
            if not life.ready or not any(ticket.is_submitted for ticket in life.tickets.values()):
                life.heard = time.monotonic()
            elif time.monotonic() - life.heard > self.stall_seconds:
                what = f"did nothing for {self.stall_seconds:g} s while requests waited, and was ended"
                life.why = f"the engine's process {what}"
                life.process.kill()
                return

    def _give_up(self, error: Dsv4Error) -> None:
        """What goes wrong before the first model is loaded goes to `start`, and there is no second try."""
        if not self._first_ready.done():
            self._first_ready.set_exception(error)
            self._stopping.set()

    async def _read(self, life: _Life) -> None:
        """Until the other end closes."""
        frames = wire.Frames()
        while data := await life.reader.read(_READ_BYTES):
            life.heard = time.monotonic()
            for body in frames.push(data):
                self._take(life, wire.read(wire.from_engine, body))

    def _take(self, life: _Life, message: wire.FromEngine) -> None:
        if isinstance(message, wire.Stepped):
            self.status = message.status
            for notice in message.notices:
                self._log(f"engine: {notice}")
            for id in message.started:
                if ticket := life.tickets.get(id):
                    ticket.take_start()
                    life.began[id] = time.monotonic()
            for delta in message.deltas:
                ended = delta.finish_reason is not None
                tickets = life.tickets
                ticket = tickets.pop(delta.request_id, None) if ended else tickets.get(delta.request_id)
                if ticket is not None:
                    self._take_gap(life, delta)
                    ticket.take(delta)
                if ended and (began := life.began.pop(delta.request_id, None)):
                    self._mean_seconds += (time.monotonic() - began - self._mean_seconds) / MEAN_OVER
        elif isinstance(message, wire.Accepted):
            if ticket := life.tickets.get(message.request_id):
                ticket.take_answer(message.request_id)
        elif isinstance(message, wire.Refused):
            if ticket := life.tickets.pop(message.request_id, None):
                ticket.fail(RequestError(message.error))
        elif isinstance(message, wire.Loading):
            self._progress(message.done_bytes, message.total_bytes)
        elif isinstance(message, wire.Ready):
            life.ready, self.status, self._trouble = message, message.status, ""
            if not self._first_ready.done():
                self._first_ready.set_result(message)
        elif isinstance(message, wire.Failed):
            life.why = "the engine cannot be loaded, the server's log says why"
            raise ConfigError(message.error)
        elif isinstance(message, wire.Lost):
            life.why = f"the engine has died: {message.public}"
            life.noted = f"the engine has died: {message.reason}"

    def _take_gap(self, life: _Life, delta: Delta) -> None:
        last = life.latest.pop(delta.request_id, None)
        if last is not None and delta.token is not None:
            self.on_gap(life.heard - last)
        if delta.finish_reason is None:
            life.latest[delta.request_id] = life.heard

    @staticmethod
    def _fail_all(life: _Life, error: Dsv4Error) -> None:
        for ticket in set(life.tickets.values()):
            ticket.fail(error)
        life.tickets.clear()


async def _launch() -> _Life:
    ours, theirs = socket.socketpair()
    with theirs, contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        process = await asyncio.create_subprocess_exec(
            *child_command("dsv4.serve.worker", theirs.fileno()),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            preexec_fn=partial(begin, os.getpid()),
        )
        undo.pop_all()
    reader, writer = await asyncio.open_connection(sock=ours)
    return _Life(process, reader, writer)


async def _ended(life: _Life) -> int:
    """Close the link and wait for the process, which ends with it; kill it if it does not."""
    life.writer.close()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            return await life.process.wait()
    except TimeoutError:
        life.process.kill()
        return await life.process.wait()


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
