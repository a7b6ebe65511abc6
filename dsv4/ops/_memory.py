"""What was measured on this machine, kept for the next start: a file per CPU, torch, settings and code."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dsv4 import disk, identity
from dsv4.env import cache_folder

Facts = dict[str, Any]  # what was measured -> what came out


def path_of(device: torch.device, threads: int) -> Path:
    """One file for each CPU, torch, library setting, number of threads and version of what was measured."""
    facts = [identity.machine(device), torch.__version__, threads, identity.code("ops")]
    return cache_folder() / "exact" / f"{identity.digest(facts)}.json"


@cache
def recall(device: torch.device, threads: int) -> tuple[Facts, str]:
    """What an earlier start found, read once, and a sentence where that could not be read."""
    return _read(path_of(device, threads))


def _read(path: Path) -> tuple[Facts, str]:
    try:
        found = json.loads(path.read_text())["facts"]
        if wrong := [name for name, fact in found.items() if not _is_fact(name, fact)]:
            raise ValueError(wrong[0])
        return found, ""
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, f"{path} cannot be used ({type(error).__name__}); what it held is measured again"


def _is_fact(name: str, fact: Any) -> bool:
    """A product, whose name begins with a size, is [library, heights, why]; all else holds or does not."""
    if not name[:1].isdigit():
        return isinstance(fact, bool)
    library, heights, why = fact
    return isinstance(library, str) and all(isinstance(h, int) for h in heights) and isinstance(why, str)


def remember(device: torch.device, threads: int, found: Facts) -> str:
    """Add to the file what it lacks; a sentence where that was not possible."""
    path = path_of(device, threads)
    # As it is now: since it was recalled, other models and other processes have added to it.
    known, _ = _read(path)
    if found.keys() <= known.keys():
        return ""
    text = json.dumps({"facts": known | found}, indent=1)
    return disk.keep(path, text, "the CPU is measured again at the next start")
