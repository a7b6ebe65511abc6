"""stdin, stdout and stderr as the program finds them: readers that go away, and streams that were closed."""

import io
import os
import sys
from typing import Any, TextIO

# As a shell says it of who dies of SIGPIPE.
PIPE_EXIT = 141


class _Output(io.FileIO):
    """When its reader goes away (`| head`) the program ends, in order, with the exit code of who dies of it.

    A BrokenPipeError would not do: typer and rich catch it on its way, and end with 1.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # for what is said on the way out
            raise SystemExit(PIPE_EXIT) from None


def prepare() -> None:
    """Before anything is printed, and before a file takes the number of a stream that was closed."""
    _reopen()
    sys.stdout, sys.stderr = _output(sys.stdout, 1), _output(sys.stderr, 2)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # What is typed or generated may not fit the terminal's encoding; that is no reason to end.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _reopen() -> None:
    """A stream that was closed (`>&-`) leaves its number to the next file or socket, which would get what is
    said there. So reading stdin or writing to stdout becomes an error; who closes stderr wants silence."""
    flags = {"stdin": os.O_WRONLY, "stdout": os.O_RDONLY, "stderr": os.O_WRONLY}
    for number, (name, flag) in enumerate(flags.items()):
        if getattr(sys, name) is None:
            taken = os.open(os.devnull, flag)  # the lowest number that is free: this one
            os.set_inheritable(taken, True)  # as streams are
            setattr(sys, name, os.fdopen(taken, "w" if number else "r", closefd=False))


def _file(stream: TextIO) -> io.FileIO | None:
    """Where it writes to in the end; None: in a test, no file."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # the latter with `python -u`
    return raw if isinstance(raw, io.FileIO) else None


def _output(stream: TextIO, number: int) -> TextIO:
    """The same with an `_Output`, unless it is a test's."""
    file = _file(stream)
    if file is None or file.fileno() != number or not isinstance(stream, io.TextIOWrapper):
        return stream
    output = _Output(number, "w", closefd=False)
    return io.TextIOWrapper(
        output if file is stream.buffer else io.BufferedWriter(output),
        encoding=stream.encoding,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def forget_output() -> None:
    """What stdout could not take would be tried again at exit, and fail again."""
    if isinstance(file := _file(sys.stdout), _Output):
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
