"""The last line of a benchmark: figures with the machine, versions, commit and date; and where it is kept."""

import json
import shlex
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import dsv4
from dsv4 import identity
from dsv4.device import driver
from dsv4.errors import ConfigError

ROOT = Path(dsv4.__file__).parents[1]


def machine(device: torch.device) -> dict[str, Any]:
    """The GPU, and the most memory that this run took of it."""
    major, minor = torch.cuda.get_device_capability(device)
    return {
        **{"device_name": torch.cuda.get_device_name(device), "compute_capability": f"{major}.{minor}"},
        "gpu_memory_bytes": torch.cuda.max_memory_allocated(device),
        "gpu_memory_total_bytes": torch.cuda.get_device_properties(device).total_memory,
    }


def run(command: str) -> dict[str, Any]:
    """What made the figures: versions, commit, command, date."""
    return {
        **identity.versions(),
        **{"cuda": torch.version.cuda, "driver": driver()},
        **{"commit": commit(ROOT), "command": command},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def command(program: str, arguments: list[str]) -> str:
    """As typed, but for `--save`: where the line was kept is no part of how it was made."""
    kept: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if "--save" not in (before, argument) and not argument.startswith("--save="):
            kept.append(argument)
    return shlex.join([*program.split(), *kept])


def commit(root: Path) -> str | None:
    """Of the checkout that holds this package, with a `+` if files differ from it; None if it is none."""
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None  # no git here, or a copied .git that points nowhere


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()


def check_target(path: Path, is_whole: bool) -> None:
    """Before anything is measured: whether the line could be kept, and would say something about a model."""
    if path.suffix != ".jsonl":
        raise ConfigError(f"{path}: dsv4 plan reads records from *.jsonl; give a name that ends so")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: its folder must exist, and it must not be one")
    if not is_whole:
        raise ConfigError(
            "--save keeps figures of whole models, which dsv4 plan reads; leave out --layers, or --save"
        )


def append(path: Path, line: dict[str, Any]) -> None:
    """One more record. A share above 1 is refused: dsv4 plan would refuse the whole file."""
    share = line.get("share")
    if share is not None and not 0 < share <= 1:
        raise ConfigError(
            f"the share of the read ceiling is {share}, so not every counted byte came from memory; "
            f"{path} is left as it was"
        )
    try:
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(line).encode() + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
