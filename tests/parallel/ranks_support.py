"""Engines on several ranks of this CPU, and who their processes are."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dsv4 import Engine, EngineConfig

SECONDS = 60.0  # that a loaded machine may take for what is usually done in two


@contextmanager
def engine_on(folder: Path | None, ranks: int, **options: object) -> Iterator[Engine]:
    settings = {"max_context": 512, "max_batch": 3, "threads": 1, "device": "cpu", "rank_seconds": SECONDS}
    engine = Engine.load(folder, EngineConfig(ranks=ranks, **settings | options))  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.close()


def children(pid: int) -> list[int]:
    """Processes that `pid` has started and that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue  # it has just ended
        if int(parent) == pid and state != "Z":
            found.append(int(entry.name))
    return sorted(found)


def rank_pids(pid: int | None = None) -> list[int]:
    """Those of them that are ranks, in the order they were started."""

    def is_rank(child: int) -> bool:
        try:
            return b"dsv4.engine.follow" in Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            return False

    return [child for child in children(pid or os.getpid()) if is_rank(child)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait(condition: Callable[[], object], seconds: float) -> float:
    """-> how long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"not within {seconds:g} s"
        time.sleep(0.02)
    return time.monotonic() - start
