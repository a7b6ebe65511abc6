"""Connections: how many, how long they may be silent, and what becomes of clients that do not read or leave.

uvicorn speaks HTTP; what it leaves unlimited is limited here. When all places are taken, a new connection
takes that of the one that has been without a request for longest: whoever opens many keeps nobody out.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0  # from a request's first byte to the end of its header
IDLE_SECONDS = 75  # between requests
WRITE_SECONDS = 60.0  # for a client to read what it was sent
PROBE_SECONDS = 5.0
# A connection younger than this may have sent a request that was not read yet. With few descriptors, a full
# backlog of idle ones takes so long for each --max-connections of them.
MIN_IDLE_SECONDS = 0.05
# Descriptors for everything else: standard streams, the event loop, the engine's process and its successor.
OTHER_DESCRIPTORS = 40
_ACCEPTS_PER_TURN = 16
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
)
_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

logger = logging.getLogger("dsv4.serve")


class Connection(H11Protocol):
    """`idle` holds the connections without a request, with the time since when, the longest idle first."""

    def __init__(self, idle: dict["Connection", float], **options: Any) -> None:
        super().__init__(app_state={"write_chunk": self.write_chunk}, **options)
        self._idle = idle
        self._has_header_begun = False
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def abort(self) -> None:
        self._idle.pop(self, None)
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle[self] = time.monotonic()
        self._start("header", HEADER_SECONDS, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.pop(self, None)
        for timer in self._timers.values():
            timer.cancel()
        super().connection_lost(exc)
        for state in (self.app_state, self.scope["state"] if self.scope else {}):
            state.clear()  # it leads back here, and what is in no circle is freed at once

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_idle:
            self._idle.pop(self, None)
            self._stop("header")
            self._has_header_begun = False
        elif not self._has_header_begun:
            self._has_header_begun = True
            self._start("header", HEADER_SECONDS, self._late)

    def on_response_complete(self) -> None:
        self._stop("probe")
        if not self.transport.is_closing():
            self._idle[self] = time.monotonic()
        super().on_response_complete()  # which may begin with the next request
        if not self.is_idle:
            self._idle.pop(self, None)

    def _late(self) -> None:
        if self._has_header_begun and not self.transport.is_closing():
            self.transport.write(_LATE)
        self.transport.close()
        self._start("write", WRITE_SECONDS, self.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("write", WRITE_SECONDS, self.abort)

    def resume_writing(self) -> None:
        self._stop("write")
        super().resume_writing()

    async def write_chunk(self, data: bytes) -> None:
        """A part, not empty, of a chunked answer that has begun and goes on: what h11 would write."""
        if self.flow.write_paused and not self.cycle.disconnected:
            await self.flow.drain()
        if not self.cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to answer a client that has ended its side. It may wait for that, or be gone."""
        if self.is_idle or self.cycle.more_body or self.scope["http_version"] != "1.1":
            return False
        self.cycle.keep_alive = False
        self._probe()
        return True

    def _probe(self) -> None:
        """Writing tells which: a client that is gone answers with a reset, one that waits ignores it."""
        if self.cycle.response_started or self.transport.is_closing():
            return
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        is_first = "probe" not in self._timers
        self._start("probe", 0.2 if is_first else PROBE_SECONDS, self._probe)

    def _start(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        self._stop(name)
        self._timers[name] = self.loop.call_later(seconds, action)

    def _stop(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()


class Listener:
    """Accepts connections for a uvicorn server, which is run without sockets of its own."""

    def __init__(
        self,
        sock: socket.socket,
        server: uvicorn.Server,
        max_connections: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._socket, self._server, self._tls = sock, server, tls
        self._max = usable_connections(max_connections)
        self._idle: dict[Connection, float] = {}
        self._handshakes: dict[asyncio.Task[None], float] = {}
        self._loop = asyncio.get_running_loop()
        if self._max < max_connections:
            logger.warning("at most %d connections, not %d; see ulimit -n", self._max, max_connections)

    def start(self) -> None:
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._accept)

    def stop(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for task in self._handshakes:
            task.cancel()

    @property
    def num_open(self) -> int:
        return len(self._server.server_state.connections) + len(self._handshakes)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            is_full = self.num_open >= self._max and not self._make_room()
            if is_full and (self._idle or self._handshakes):
                return self._pause(MIN_IDLE_SECONDS / 4)
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor or no memory is left
                logger.warning("a connection cannot be accepted: %s", error.strerror)
                self._make_room()
                return self._pause(0.5)
            if is_full:
                logger.warning("all %d connections are in use, and a new one was refused", self._max)
                with sock, contextlib.suppress(OSError):
                    sock.send(_FULL if self._tls is None else b"")
                continue
            task = self._loop.create_task(self._connect(sock))
            self._handshakes[task] = time.monotonic()

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)

    def _make_room(self) -> bool:
        """Ends the connection that has been without a request for longest, if for long enough."""
        latest = time.monotonic() - MIN_IDLE_SECONDS
        if self._idle and next(iter(self._idle.values())) < latest:
            next(iter(self._idle)).abort()
        elif self._handshakes and next(iter(self._handshakes.values())) < latest:
            task = next(iter(self._handshakes))
            del self._handshakes[task]  # it ends in the loop's next turn, and makes room once
            task.cancel()
        else:
            return False
        return True

    async def _connect(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
            seconds = HEADER_SECONDS if self._tls else None
            await self._loop.connect_accepted_socket(
                self._protocol, sock, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except (OSError, asyncio.CancelledError):  # gone, no TLS, or its place was needed
            sock.close()
        finally:
            self._handshakes.pop(asyncio.current_task(), None)  # type: ignore[arg-type]

    def _protocol(self) -> Connection:
        return Connection(self._idle, config=self._server.config, server_state=self._server.server_state)


def usable_connections(wanted: int) -> int:
    """As many of them as there are file descriptors for; the soft limit is raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(4, min(wanted, soft - OTHER_DESCRIPTORS)) if soft != resource.RLIM_INFINITY else wanted
