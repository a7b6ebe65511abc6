"""The only reader of environment variables. Diagnostics only: nothing here changes what is computed."""

import os


def wants_traceback() -> bool:
    """DSV4_TRACEBACK=1: show where an error was raised instead of one sentence."""
    return os.environ.get("DSV4_TRACEBACK", "") not in ("", "0")
