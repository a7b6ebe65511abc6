"""The log: what is said beside the line per request, and a queue for logs that are slow or stuck."""

import contextlib
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

MAX_LINES = 4096
LAST_SECONDS = 1.0


def stamp() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Lines:
    """A thread writes the lines, so that nobody waits for a pipe that is not read. What does not fit is left
    out and counted; a log that fails, as on a full disk, stops nothing."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._queue: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._lock, self._num_dropped = threading.Lock(), 0
        self.on_drop: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """From any thread."""
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            with self._lock:
                self._num_dropped += 1
            self.on_drop()

    def close(self) -> None:
        """Writes what there is, if it can be written soon."""
        end = time.monotonic() + LAST_SECONDS
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=LAST_SECONDS)
        self._thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            with self._lock:
                num_dropped, self._num_dropped = self._num_dropped, 0
            with contextlib.suppress(OSError, ValueError):
                if num_dropped:
                    self._write(f"server: {num_dropped} log lines were left out, since nobody read the log")
                self._write(line)


class Reports(logging.Handler):
    """Of each kind of report one a second, and how many were left out."""

    def __init__(self, log: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._last: dict[tuple[str, int], tuple[float, int]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        kind, now = (record.pathname, record.lineno), time.monotonic()
        last, num_missed = self._last.get(kind, (-1.0, 0))
        if now - last < 1:
            self._last[kind] = (last, num_missed + 1)
            return
        self._last[kind] = (now, 0)
        line = record.getMessage() + (f" (and {num_missed} times before)" if num_missed else "")
        if record.exc_info and record.exc_info[1] is not None:
            line += "".join(traceback.format_exception(record.exc_info[1], limit=-8)).join(("\n", ""))
        self._log(f"server: {line}")


@contextmanager
def reported(log: Callable[[str], None]) -> Iterator[None]:
    """While open, warnings of this package, uvicorn and asyncio go to `log`."""
    handler, loggers = Reports(log), [logging.getLogger(name) for name in ("dsv4", "uvicorn", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
