"""The only reader of environment variables. Nothing here changes what is computed, only who computes it."""

import os
from pathlib import Path


def wants_traceback() -> bool:
    """DSV4_TRACEBACK=1: show where an error was raised instead of one sentence."""
    return os.environ.get("DSV4_TRACEBACK", "") not in ("", "0")


def cache_folder() -> Path:
    """Where compiled kernels are kept: XDG_CACHE_HOME/dsv4, else ~/.cache/dsv4."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dsv4"


def state_folder() -> Path:
    """Where the history of chat is kept: XDG_STATE_HOME/dsv4, else ~/.local/state/dsv4."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "dsv4"


def variables_with(more: dict[str, str]) -> dict[str, str]:
    """The variables for a program that this one starts: its own, and more."""
    return {**os.environ, **more}


def launched_by() -> dict[str, str] | None:
    """What torchrun tells the ranks that it starts; None: it did not start this process."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = {name: os.environ.get(name, "") for name in names}
    return found | {"LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")} if all(found.values()) else None


def has_agent_store() -> bool:
    """Whether torchrun itself holds the meeting point."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def attempt() -> str:
    """How often torchrun has started the ranks again; its meeting point remembers all of them."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def library_settings() -> list[str]:
    """Variables that make torch, MKL or oneDNN compute otherwise; what was measured holds under them."""
    prefixes = ("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_")
    return sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(prefixes))
