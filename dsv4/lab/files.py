"""Sizes for people; names of results, refused before the work."""

import os
from pathlib import Path

from dsv4.errors import ConfigError


def size(count: float) -> str:
    """1234567 -> '1.23 MB'; decimal units, as disks and memory bandwidths are quoted."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def check_writable(path: Path, option: str) -> None:
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: expected the name of a file in an existing folder")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: {path.parent} cannot be written to; give another folder")
