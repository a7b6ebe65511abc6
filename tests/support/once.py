"""Made once in a run of the tests, whichever worker needs it first."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def folder_of_run(factory: pytest.TempPathFactory, name: str) -> Path:
    """One folder for all workers."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """`make(path)` writes what `target` is to hold, if it is not there; who comes meanwhile waits."""
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            out = target.with_name(f"{target.name}.new")
            make(out)
            out.replace(target)
    return target
