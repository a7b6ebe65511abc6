"""Runs the program: in this process, in another one, or in one that has a terminal."""

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from dsv4.cli.main import main

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def dsv4(*arguments: object, stdin: str | bytes = "", encoding: str = "utf-8") -> Done:
    """The program in this process: everything but the process itself is real."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="") for _ in range(2)]
    typed = io.TextIOWrapper(
        io.BytesIO(stdin if isinstance(stdin, bytes) else stdin.encode()), encoding="utf-8"
    )
    code: Any = 0
    with (
        mock.patch.object(sys, "argv", ["dsv4", *map(str, arguments)]),
        mock.patch.object(sys, "stdin", typed),
        redirect_stdout(streams[0]),
        redirect_stderr(streams[1]),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
    texts = []
    for stream in streams:
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return Done(code or 0, *texts)


def ok(*arguments: object, encoding: str = "utf-8") -> str:
    """What a run that must succeed printed."""
    done = dsv4(*arguments, encoding=encoding)
    assert done.code == 0, done
    return done.out


def refused(done: Done) -> str:
    """The one sentence of a refusal."""
    assert done.code == 2, done
    assert done.out == "", done
    assert re.fullmatch(r"error: [^\n]+\n", done.err), done.err
    assert "Traceback" not in done.err
    return done.err


def process(
    arguments: Iterable[object], prepare: Callable[[], None] | None = None, module: str | None = "dsv4"
) -> subprocess.CompletedProcess[str]:
    """The program (or Python with other arguments) in a process of its own."""
    return subprocess.run(
        [sys.executable, *(["-m", module] if module else []), *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=prepare,
    )


class Terminal:
    """The program on a pseudo-terminal; what it prints is collected until something expected appears."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))

        def own_the_terminal() -> None:
            # Only the controlling terminal turns a typed \x03 into SIGINT, which background jobs ignore.
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        self.process = subprocess.Popen(
            [sys.executable, "-m", "dsv4", *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "200", **environment},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=own_the_terminal,
        )
        os.close(slave)
        self.unread = ""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def expect(self, pattern: str, seconds: float = 60) -> str:
        """Read until the pattern appears; what was printed up to and with it."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.unread)):
            ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {pattern!r} within {seconds} s in {self.unread!r}"
            try:
                piece = os.read(self.master, 65536)
            except OSError:  # how Linux says that the other side is closed
                piece = b""
            assert piece, f"ended without {pattern!r} in {self.unread!r}"
            if b"\x1b[6n" in piece:  # a program asks where the cursor is
                self.type("\x1b[1;1R")
            self.unread += piece.decode(errors="replace")
        shown, self.unread = self.unread[: found.end()], self.unread[found.end() :]
        return shown

    def wait(self, seconds: float = 30) -> int:
        return self.process.wait(seconds)


def completed(*words: str, folder: Path) -> list[str]:
    """What bash would offer for the last word."""
    environment = {**os.environ, "_DSV4_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(["dsv4", *words])}
    done = subprocess.run(
        [sys.executable, "-m", "dsv4"],
        env={**environment, "COMP_CWORD": str(len(words)), "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done
    return done.stdout.split()
