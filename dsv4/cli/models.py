"""`dsv4 models`: which models are on this machine, and which names dsv4 pull knows."""

from pathlib import Path
from typing import Annotated

import typer

from dsv4.cli.show import out, print_json, size
from dsv4.errors import ConfigError

EPILOG = """
[bold]Examples[/]
  dsv4 models
  dsv4 models ./checkpoints --json
  dsv4 models --known
The last column is a rule of thumb, from the size of the files; dsv4 plan NAME computes it.
"""


def models(
    folder: Annotated[
        Path | None, typer.Argument(help="also list the model folders directly inside this one")
    ] = None,
    known: Annotated[bool, typer.Option("--known", help="list the names that dsv4 pull knows")] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """List the models on this machine: the embedded one, those in the hub's cache, those in a folder."""
    if known:
        _known(json)
        return
    from dsv4.hub.here import models as find

    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give one that holds model folders, or none")
    found = list(find(folder))
    if json:
        print_json({"models": [{**vars(here), "folder": str(here.folder)} for here in found]})
        return
    rows = [("name", "stored as", "size", "draft", "fits", "folder")]
    for here in found:
        name = here.name + (f"@{here.revision}" if here.revision not in ("", "main") else "")
        verdict = here.problem or here.fits
        rows.append((name, here.storage, size(here.num_bytes), here.draft, verdict, str(here.folder)))
    # Plain lines, not a table: a table would cut folders to fit the width it thinks it has.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        out.print("  ".join(map(str.ljust, row, widths)).rstrip(), markup=False)


def _known(json: bool) -> None:
    from dsv4.hub.names import KNOWN

    if json:
        print_json({"known": KNOWN})
        return
    for name, repository in KNOWN.items():
        out.print(f"{name:<18} {repository}", markup=False)
