"""Processes that this one starts, of the same program: they end with it. Imports next to nothing."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Found here, not between fork and exec, where another thread may have held the loader's lock.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def child_command(module: str, descriptor: int) -> list[str]:
    """Runs `main(descriptor)` of the module. Start it with `preexec_fn=partial(end_with, os.getpid())`."""
    # Signals of the terminal or the service manager are for the first process, before anything is imported.
    quiet = "import signal, sys; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN)"
    # The same import path as ours, and not the working directory, which `-m` would put in front of it.
    path = f"sys.path[:] = {sys.path!r}"
    # Again, before torch is imported: a Python with capabilities of its own loses at exec what it was told.
    bound = f"from dsv4.child import end_with; end_with({os.getpid()})"
    code = f"{quiet}; {path}; {bound}; from {module} import main; main({descriptor})"
    return [sys.executable, "-P", "-c", code]


def end_with(parent: int) -> None:
    """When that process dies, or its thread that started this one, the kernel kills this one, whatever it
    does: also if it is stopped. Between fork and exec no moment is left in which it could outlive it."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it could be bound to
        os._exit(1)
