"""The HTTP process's side of the engine: starts its process, restarts it, hands out deltas. Knows no HTTP."""

import asyncio
import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from dsv4.child import begin, child_command
from dsv4.config import EngineConfig
from dsv4.engine.request import Delta
from dsv4.env import launched_by
from dsv4.errors import ConfigError, DeviceError, Dsv4Error, RequestError
from dsv4.serve import wire
from dsv4.serve.ticket import Busy, Ticket, Unavailable

MAX_UNSENT_BYTES = 64 << 20
_READ_BYTES = 1 << 20
# After a process that died before it was ready: wait, longer each time.
MAX_RESTART_SECONDS = 30.0
STOP_SECONDS = 10.0
MAX_RETRY_SECONDS = 60
MEAN_OVER = 16


@dataclass
class _Life:
    """One run of the engine's process."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    ready: wire.Ready | None = None
    loading: wire.Loading = field(default_factory=lambda: wire.Loading("starting"))
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
    def phase(self) -> tuple[str, float]:
        """What it does, and how much of its weights are loaded."""
        if self._stop_reason is not None:
            return "draining", 1.0
        if self._life is None:
            return "restarting" if self._first_ready.done() else "starting", 0.0
        loading = self._life.loading
        loaded = loading.done_bytes / loading.total_bytes if loading.total_bytes else 0.0
        return ("ready", 1.0) if self._life.ready else (loading.phase, loaded)

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

    def num_ahead(self, client_id: str) -> int | None:
        """How many requests that came earlier still wait; None: that one has begun, or need not wait."""
        tickets = dict.fromkeys(self._life.tickets.values() if self._life and self.status.waiting else ())
        waiting = [ticket.client_id for ticket in tickets if not ticket.has_started]
        return waiting.index(client_id) if client_id in waiting else None

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
            for progress in message.progress:
                if ticket := life.tickets.get(progress.request_id):
                    ticket.note_progress(progress)
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
            life.loading = message
            if message.says:
                self._log(f"engine: {message.says}")
            elif message.total_bytes:
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
