"""The options that several scripts share, and their last line."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dsv4.errors import Dsv4Error
from dsv4.lab.bench.record import append, check_target, command, machine
from dsv4.lab.bench.record import run as facts_of_run
from dsv4.lab.bench.subject import Subject, synthetic


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """With the options of a synthetic model."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--experts", type=int, help="resident experts per layer; default: 192, or all if fewer")
    made.add_argument("--layers", type=int, help="the first N layers; default: all")
    made.add_argument("--layout", default="modelopt", help="modelopt, official or nvfp4")
    made.add_argument("--context", type=int, default=4096, help="tokens before the first")
    made.add_argument("--batch", type=numbers, default=[1], help="sequences that decode together: 1,8")
    made.add_argument("--steps", type=int, default=128, help="tokens of each sequence that are timed")
    made.add_argument("--save", type=Path, help="append the last line to this .jsonl file")
    return made


def subject_of(given: argparse.Namespace, name: str, **options: Any) -> Subject:
    subject = synthetic(name, given.experts, given.layers, given.layout, **options)
    if given.save is not None:
        check_target(given.save, subject.is_whole)
    return subject


def finish(line: dict[str, Any], save: Path | None = None) -> dict[str, Any]:
    """Print the measurement with its machine, versions and command, and keep it where that was asked for."""
    made_by = command(f"python -m bench.{Path(sys.argv[0]).stem}", sys.argv[1:])
    device = torch.device("cuda", torch.cuda.current_device())
    line = {**line, **machine(device), **facts_of_run(made_by)}
    print(json.dumps(line))
    if save is not None:
        append(save, line)
    return line


def run(main: Callable[[], None]) -> None:
    """What a user can cause is one sentence."""
    try:
        main()
    except Dsv4Error as error:
        sys.exit(f"error: {error}")
