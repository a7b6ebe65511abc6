"""The engine's process: reads messages between steps, runs the engine, writes what came out. Knows no HTTP.

It lives as long as its socket: when the HTTP process closes it, this one ends; when that process dies, the
kernel ends it (`dsv4.child`). Signals of the terminal or the service manager are for the HTTP process, which
drains first.
"""

import select
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from dsv4.cache.folder import why_unusable
from dsv4.config import EngineConfig
from dsv4.engine.engine import Engine
from dsv4.engine.first import ensure
from dsv4.engine.grammar import Matcher
from dsv4.engine.request import Delta, Request
from dsv4.errors import DeviceError, Dsv4Error, LostError, RequestError
from dsv4.serve import wire

_PROGRESS_SECONDS = 0.1
_POLL_SECONDS = 0.005
_READ_BYTES = 1 << 20
MAX_COMPILERS = 2
COMPILE_SECONDS = 5.0


class Link:
    """The socket to the HTTP process: whole messages in and out."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = wire.Frames()

    def send(self, message: wire.Message) -> None:
        self._socket.sendall(wire.frame(message))

    def receive(
        self, seconds: float | None, alarm: socket.socket | None = None
    ) -> list[wire.ToEngine] | None:
        """The messages that arrive within that time (None: until some do, or the alarm goes off).

        None: the other end is gone.
        """
        bodies: list[bytes] = []
        # Not `select.select`: a server with a thousand connections starts this process at a descriptor beyond
        # those that it knows.
        poll = select.poll()
        for one in (self._socket,) if alarm is None else (self._socket, alarm):
            poll.register(one, select.POLLIN)
        patience = None if seconds is None else round(1000 * seconds)
        while any(file == self._socket.fileno() for file, _ in poll.poll(patience)):
            data = self._socket.recv(_READ_BYTES)
            if not data:
                return None
            bodies += self._frames.push(data)
            patience = 0
        return [wire.read(wire.to_engine, body) for body in bodies]


@dataclass
class _Reading:
    """A prompt on its way: its tokens, how many are processed, since when."""

    total: int
    processed: int = -1
    began: float = 0.0


@dataclass
class _Compiling:
    """A request whose grammar is being compiled, since when; None: others are compiled before it."""

    request: Request
    made: Future[Matcher]
    began: float | None = None


class Worker:
    def __init__(self, link: Link, engine: Engine) -> None:
        self.link, self.engine = link, engine
        self._running: set[str] = set()
        self._queued: set[str] = set()  # those of them that no step has begun with
        self._reading: dict[str, _Reading] = {}  # those whose prompt's progress is to be told
        self._step_began = 0.0
        # Grammars are compiled beside the steps; requests wait here meanwhile.
        self._compiling: dict[str, _Compiling] = {}
        self._compilers = ThreadPoolExecutor(MAX_COMPILERS, "grammar")

    def status(self) -> wire.Status:
        scheduler, pages = self.engine.scheduler, self.engine.slots.pool
        waiting = len(self.engine.arrivals.waiting)
        return wire.Status(
            running=len(scheduler.running),
            waiting=waiting,
            free_pages=pages.num_available,
            num_pages=pages.num_pages,
            kept_pages=pages.num_idle,
            pauses=scheduler.num_pauses,
            expert_hits=self.engine.runner.executor.expert_hits,
            expert_misses=self.engine.runner.executor.expert_misses,
            drafts=self.engine.counts,
        )

    def run(self) -> None:
        """Until the other end closes the link."""
        ranks = self.engine.ranks
        alarm = ranks.alarm if ranks else None
        while (messages := self.link.receive(self._patience, alarm)) is not None:
            if ranks:
                ranks.check()
            for message in messages:
                self._handle(message)
            self._take_compiled()
            steps = bool(self._running)
            self._step_began = time.monotonic()
            deltas = self.engine.step() if steps else []
            self._running -= {delta.request_id for delta in deltas if delta.finish_reason}
            started = self._take_started()
            # After every step, also one that gave nothing: silence means that the engine hangs.
            if steps or messages or started:
                progress = self._progress(deltas) if self._reading else []
                notices = self.take_notices()
                self.link.send(wire.Stepped(deltas, self.status(), started, notices, progress))

    def _progress(self, deltas: list[Delta]) -> list[wire.Progress]:
        """Of the prompts that got further; with its first token a prompt is whole."""
        told, now = [], time.monotonic()
        first = {delta.request_id: delta for delta in deltas if delta.request_id in self._reading}
        for id, reading in list(self._reading.items()):
            delta = first.get(id)
            if delta is not None:
                at = (delta.cached_tokens, reading.total) if delta.token is not None else None
            else:
                at = self.engine.progress(id) if id in self._running else None
            if at is not None and at[1] > reading.processed:
                reading.processed, reading.began = at[1], reading.began or self._step_began
                told.append(wire.Progress(id, *at, now - reading.began))
            if delta is not None or not (id in self._running or id in self._compiling):
                del self._reading[id]
        return told

    def take_notices(self) -> list[str]:
        """Lines that other threads may add to meanwhile."""
        notices = self.engine.notices[:]
        del self.engine.notices[: len(notices)]
        return notices

    def _take_started(self) -> list[str]:
        if not self._queued:
            return []
        # Of the deltas too: an answer of one token may have come and gone within the step.
        waiting = {sequence.request.id for sequence in self.engine.arrivals.waiting}
        started = [id for id in self._queued if id not in waiting]
        self._queued &= waiting
        return started

    def _handle(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.Submit):
            grammar = message.request.params.grammar
            if message.tells_progress:
                self._reading[message.request.id] = _Reading(len(message.request.ids))
            if grammar is None:
                self._submit(message.request)
            else:
                made = self._compilers.submit(self.engine.grammars.matcher, grammar)
                self._compiling[message.request.id] = _Compiling(message.request, made)
        elif isinstance(message, wire.Cancel):
            if waiting := self._compiling.pop(message.request_id, None):
                waiting.made.cancel()
            elif message.request_id in self._running:
                self._running.remove(message.request_id)
                self._queued.discard(message.request_id)
                self.engine.cancel(message.request_id)
        else:
            raise wire.WireError("the engine is loaded already; expected a request or its end")

    @property
    def _patience(self) -> float | None:
        """How long to wait for messages: not at all while something runs, else until there are some."""
        return 0 if self._running else _POLL_SECONDS if self._compiling else None

    def _take_compiled(self) -> None:
        now = time.monotonic()
        for id, one in list(self._compiling.items()):
            made = one.made
            if one.began is None and made.running():
                one.began = now
            if not made.done() and (one.began is None or now < one.began + COMPILE_SECONDS):
                continue
            del self._compiling[id]
            if not made.done():
                made.cancel()
                why = f"the output's grammar took longer than {COMPILE_SECONDS:g} s to prepare; simplify it"
                self.link.send(wire.Refused(id, why))
            elif isinstance(error := made.exception(), Dsv4Error):
                self.link.send(wire.Refused(id, str(error)))
            else:
                made.result()
                self._submit(one.request)

    def _submit(self, request: Request) -> None:
        try:
            self.engine.submit(request)
        except RequestError as error:
            self.link.send(wire.Refused(request.id, str(error)))
        else:
            self._running.add(request.id)
            self._queued.add(request.id)
            self.link.send(wire.Accepted(request.id))


def load(link: Link) -> Engine | None:
    """The engine that the first message asks for; None when that failed (which was said)."""
    messages: list[wire.ToEngine] | None = []
    while messages == []:
        messages = link.receive(None)
    if messages is None:
        return None
    start = messages[0]
    if not isinstance(start, wire.Start) or len(messages) > 1:
        raise wire.WireError("expected the model's name as the first message, and no more until it is loaded")
    last = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > _PROGRESS_SECONDS or done == total:
            last = time.monotonic()
            link.send(wire.Loading("weights" if done < total else "preparing", done, total))

    def say(what: str) -> None:
        link.send(wire.Loading("checking", says=what))

    try:
        ensure(start.config, say)
        return Engine.load(start.model, _config(start, say), progress)
    except Dsv4Error as error:
        link.send(wire.Failed(str(error)))
        return None


def _config(start: wire.Start, say: Callable[[str], object]) -> EngineConfig:
    """As asked for. A folder that has failed since the first start, as a disk does that turns read-only, is
    left out: the engine that died had gone on without it too."""
    config = start.config
    if not start.again or config.prefix_dir is None:
        return config
    if not (why := why_unusable(Path(config.prefix_dir).expanduser())):
        return config
    what = f"prefix_dir {config.prefix_dir} cannot be used any more ({why})"
    say(f"{what}; until the server is started again, prefixes are kept in memory only")
    return replace(config, prefix_dir=None)


def main(descriptor: int) -> None:
    link = Link(socket.socket(fileno=descriptor))
    try:
        engine = load(link)
        if engine is None:
            return
        worker, settings = Worker(link, engine), engine.settings
        notes = [*engine.notes]
        try:
            engine.grammars.prepare()
        except RequestError as error:
            notes.append(str(error))
        config, vocab_size = engine.config, engine.model_config.vocab_size
        link.send(
            wire.Ready(
                max_context=settings.max_context,
                max_batch=config.max_batch,
                vocab_size=vocab_size,
                notes=[*notes, *worker.take_notices()],
                status=worker.status(),
            )
        )
        try:
            worker.run()
        except DeviceError as error:  # the GPU or a rank is lost, and with it all that this process holds
            lost = error if isinstance(error, LostError) else LostError(str(error))
            link.send(wire.Lost(lost.reason, lost.public))
            sys.exit(1)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the HTTP process is gone, and nobody is left to answer
