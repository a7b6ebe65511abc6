"""From rank 0 to another rank and back: bounded frames over a socket. No pickle."""

import socket
import struct
import sys
from contextlib import suppress
from enum import IntEnum

from dsv4.errors import DeviceError

HEADER = struct.Struct("!BI")
MAX_BYTES = 64 << 20


def child_command(module: str, descriptor: int) -> list[str]:
    """A Python that runs `module.main(descriptor)`, a socket's.

    Signals of the terminal are for its parent: they are ignored before anything is imported. It has our
    import path, and not the working directory, which `-m` would put in front of it.
    """
    quiet = "import signal, sys; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN)"
    path = f"sys.path[:] = {sys.path!r}"
    return [sys.executable, "-P", "-c", f"{quiet}; {path}; from {module} import main; main({descriptor})"]


class Kind(IntEnum):
    """What a frame holds. Rank 0 sends the first seven, the others answer with the rest."""

    START = 0  # what to load, JSON
    JOIN = 1  # all ranks have loaded: meet
    PLAN = 2  # a plan to apply
    STUDY = 3  # a plan to study, JSON
    MASK = 4  # the tokens that a grammar allows, as bits; empty: all
    FORGET = 5  # the last plan was interrupted
    END = 6  # the engine was closed
    LOADED = 7
    WAITED = 8  # another rank is gone or late; it ends with this
    FAILED = 9  # why this rank ends, text
    HELLO = 10  # of a rank that rank 0 did not start: who it is, JSON


class Closed(DeviceError):
    """The other end is gone."""


class Channel:
    """Whole frames in and out. `seconds`: the longest that the other end may take to accept one."""

    def __init__(self, sock: socket.socket, seconds: float | None = None) -> None:
        self._socket = sock
        sock.settimeout(seconds)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Raises TimeoutError, or Closed."""
        if len(body) > MAX_BYTES:
            raise DeviceError(f"a message of {len(body)} bytes to another rank, expected at most {MAX_BYTES}")
        try:
            self._socket.sendall(HEADER.pack(kind, len(body)) + body)
        except TimeoutError:
            raise
        except OSError as error:
            raise Closed(f"the other rank is gone ({error.strerror or error})") from None

    def receive(self) -> tuple[Kind, bytes]:
        """The next frame; waits for it. Raises Closed."""
        kind, size = HEADER.unpack(self._take(HEADER.size))
        if size > MAX_BYTES or kind not in iter(Kind):
            raise DeviceError(f"a damaged message between ranks: kind {kind}, {size} bytes")
        return Kind(kind), self._take(size)

    def _take(self, size: int) -> bytes:
        buffer = bytearray()
        while len(buffer) < size:
            try:
                data = self._socket.recv(min(size - len(buffer), 1 << 20))
            except TimeoutError as error:
                if error.errno is None:  # ours; else the kernel has probed the other end in vain
                    raise
                data = b""
            except OSError:
                data = b""
            if not data:
                raise Closed("the other rank is gone")
            buffer += data
        return bytes(buffer)

    def hang_up(self) -> None:
        """Nothing more comes from either end; whoever waits for it hears that."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def say_last(self, kind: Kind, body: bytes = b"") -> None:
        """A frame, and that no other follows; to whoever is still there."""
        with suppress(OSError, DeviceError):
            self.send(kind, body)
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()
