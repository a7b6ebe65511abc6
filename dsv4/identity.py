"""Identify the code, the versions and the machine that a result came from."""

import hashlib
import json
import platform
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import torch

import dsv4
from dsv4.device import machine_id
from dsv4.env import library_settings

PACKAGE = Path(dsv4.__file__).parent
# Parts of dsv4 on which no result of a model depends.
_ASIDE = ("cli", "lab", "models", "serve")


def digest(facts: Any) -> str:
    """32 hexadecimal digits of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


@cache
def code(*packages: str, root: Path = PACKAGE) -> str:
    """Digest of the sources of these packages (default: all that compute). Versions change less often."""
    every = [path.name for path in root.iterdir() if path.name not in _ASIDE]
    found = (path for name in packages or every for path in (root / name, *(root / name).rglob("*")))
    return files(found, root)


def files(paths: Iterable[Path], root: Path = PACKAGE) -> str:
    """Digest of names and contents; the order does not matter."""
    found = hashlib.sha256()
    for path in sorted(paths):
        if path.is_file() and "__pycache__" not in path.parts:
            content = path.read_bytes()
            found.update(f"\n{path.relative_to(root)} {len(content)}\n".encode() + content)
    return found.hexdigest()[:32]


def version(package: str) -> str:
    try:
        return installed(package)
    except PackageNotFoundError:
        return "none"


def versions() -> dict[str, str]:
    """Of the software that decides a result's bits."""
    return {
        **{"dsv4": dsv4.__version__, "python": platform.python_version()},
        **{"torch": torch.__version__, "triton": version("triton")},
    }


def machine(device: torch.device) -> list[str]:
    """The processor, and the settings under which libraries choose their algorithms."""
    return [machine_id(device), *library_settings()]
