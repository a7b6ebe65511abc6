"""`dsv4 pull`: fetch a model from the Hugging Face hub."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from dsv4.cli.options import needs_extra
from dsv4.cli.show import bytes_bar, out, print_json, say_note, size
from dsv4.errors import ConfigError
from dsv4.hub.names import KNOWN

EPILOG = """
[bold]Examples[/]
  dsv4 pull flash && dsv4 serve flash
  dsv4 pull nvidia/DeepSeek-V4-Flash-NVFP4@main ./flash-nvfp4
  HF_TOKEN=... HF_HUB_CACHE=/data/hub dsv4 pull pro --json
An interrupted run continues when the same command is given again. The variables of huggingface_hub apply:
HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_HUB_OFFLINE; and HTTPS_PROXY.
"""
_REPORT_SECONDS = 1.0


def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@REVISION]",
            help="a name of dsv4 models --known, or OWNER/REPOSITORY",
            autocompletion=lambda incomplete: list(KNOWN),
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(help="default: the hub's cache, where all commands find the model by its name"),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="also hash weights that were fetched earlier")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="print progress once a second and the result as JSON lines")
    ] = False,
) -> None:
    """Fetch a model's weights, config and tokenizer; check every hash."""
    with needs_extra("dsv4 pull", "hub"):
        from dsv4.hub.pull import pull as fetch
    from dsv4.hub.names import Name

    wanted = Name.parse(name)
    if wanted is None:
        raise ConfigError(
            f"{name!r} names no model; expected a name of dsv4 models --known or OWNER/REPOSITORY, each with "
            "or without @REVISION"
        )
    with _lines() if json else bytes_bar(f"fetching {name}") as update:
        found = fetch(wanted, folder, verify, say_note, update)
    if json:
        print_json({**vars(found), "folder": str(found.folder), "notes": list(found.notes)})
        return
    for note in found.notes:
        say_note(note)
    news = "nothing new" if not found.fetched_bytes else f"{size(found.fetched_bytes)} fetched"
    out.print(f"{found.folder}: {found.num_files} files, {size(found.num_bytes)}, {news}", markup=False)


@contextmanager
def _lines() -> Iterator[Callable[[int, int], None]]:
    """Progress for programs: yields update(done, total)."""
    began = last = time.monotonic()
    first: int | None = None

    def update(done: int, total: int) -> None:
        nonlocal last, first
        first = done if first is None else first
        now = time.monotonic()
        if now - last < _REPORT_SECONDS:
            return
        last, rate = now, max(0.0, (done - first) / (now - began))
        seconds = round((total - done) / rate) if rate else None
        print_json({"done": done, "total": total, "bytes_per_second": round(rate), "seconds_left": seconds})

    yield update
