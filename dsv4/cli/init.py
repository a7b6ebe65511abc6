"""`dsv4 init`: a random checkpoint, for tests and benchmarks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from dsv4.cli.show import bytes_bar, out, print_json, size

EPILOG = """
[bold]Examples[/]
  dsv4 init ./random --preset tiny
  dsv4 init ./random --preset tiny --format modelopt --seed 7
"""


def init(
    folder: Annotated[Path, typer.Argument(help="new folder")],
    preset: Annotated[str, typer.Option(help="tiny, flash or pro")] = "tiny",
    format: Annotated[
        str, typer.Option(help="bf16, official, modelopt, ct, hfnvfp4, fp8 or hf-bf16")
    ] = "modelopt",
    seed: Annotated[int, typer.Option(help="the same seed gives the same files")] = 0,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Make a checkpoint with random weights and, if the vocabulary allows, a byte-level tokenizer."""
    from dsv4.config import preset as load_preset
    from dsv4.lab.init import make

    done = 0
    with bytes_bar(f"writing {folder.resolve().name}") as update, _nothing_left(folder):
        for done, total in make(folder, load_preset(preset), format, seed):
            update(done, total)
    if json:
        print_json({"folder": str(folder), "preset": preset, "format": format, "seed": seed, "bytes": done})
    else:
        out.print(f"{folder}: {preset}, {format}, seed {seed}, {size(done)}", markup=False)


@contextmanager
def _nothing_left(folder: Path) -> Iterator[None]:
    """What is cut short, as by a full disk, leaves the folder as it was: absent, or empty."""
    was_there = folder.exists()
    was_ours = not was_there or (folder.is_dir() and not any(folder.iterdir()))
    try:
        yield
    except BaseException:
        if was_ours and folder.is_dir():
            for path in folder.iterdir():
                path.unlink()
            if not was_there:
                folder.rmdir()
        raise
