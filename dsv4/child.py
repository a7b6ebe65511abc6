"""Processes that this one starts, of the same program: they end with it. Imports next to nothing."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Found here, not between fork and exec, where another thread may have held the loader's lock.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def child_command(module: str, descriptor: int) -> list[str]:
    """Runs `main(descriptor)` of the module. Start it with `preexec_fn=partial(begin, os.getpid())`."""
    # The same import path as ours, and not the working directory, which `-m` would put in front of it.
    path = f"sys.path[:] = {sys.path!r}"
    # Again, before torch is imported: a Python with capabilities of its own loses at exec what it was told.
    bound = f"from dsv4.child import end_with; end_with({os.getpid()})"
    code = f"import sys; {path}; {bound}; from {module} import main; main({descriptor})"
    return [sys.executable, "-P", "-c", code]


def begin(parent: int) -> None:
    """Between fork and exec. Signals of the terminal or the service manager are for the first process, also
    while Python starts in this one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with(parent)


def end_with(parent: int) -> None:
    """When that process dies, or its thread that started this one, the kernel kills this one, whatever it
    does: also if it is stopped. Between fork and exec no moment is left in which it could outlive it."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it could be bound to
        os._exit(1)
