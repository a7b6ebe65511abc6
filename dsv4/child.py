"""Processes that this one starts, of the same program: they end with it. Imports next to nothing."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def child_command(module: str, descriptor: int) -> list[str]:
    """Runs `main(descriptor)` of the module in a process that ends with the thread that starts it."""
    # The same import path as ours, and not the working directory, which `-m` would put in front of it.
    path = f"import sys; sys.path[:] = {sys.path!r}"
    # Before the module is imported: torch alone takes seconds, in which this process may die.
    first = f"from dsv4.child import begin; begin({os.getpid()})"
    return [sys.executable, "-P", "-c", f"{path}; {first}; from {module} import main; main({descriptor})"]


def begin(parent: int) -> None:
    """The first thing that such a process does."""
    end_with(parent)
    # Signals of the terminal or the service manager are for the first process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def end_with(parent: int) -> None:
    """When that process dies, the kernel kills this one, whatever it does: also if it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it could be bound to
        os._exit(1)
