"""What every command prints with: consoles, progress bars, JSON lines, sizes for people."""

import gc
import json
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from textwrap import wrap
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.segment import Segment, Segments

from dsv4.config import ModelConfig
from dsv4.hub.cache import title
from dsv4.hub.names import resolve
from dsv4.lab.files import size as size
from dsv4.models import embedded

if TYPE_CHECKING:
    from dsv4.config import EngineConfig
    from dsv4.engine.engine import Engine

out = Console(highlight=False, soft_wrap=True, emoji=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

# Escape sequences in a model's text would reach the terminal; there they are shown as symbols instead.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def visible(piece: str) -> str:
    """The text with symbols in place of control characters."""
    return piece.translate(_CONTROLS)


def text(piece: str, style: str | None = None) -> None:
    """Write model text as it is: no markup, no wrapping; control characters made visible on a terminal."""
    # As a segment: anything rich takes for text loses its carriage returns and has its tabs expanded.
    shown = visible(piece) if out.is_terminal else piece
    out.print(Segments([Segment(shown, out.get_style(style) if style else None)]))


def say_note(message: str) -> None:
    _say("[yellow]note:[/]", message)


def say_error(message: str) -> None:
    _say("[bold red]error:[/]", message)


def _say(label: str, message: str) -> None:
    """One line on stderr; the message may quote anything a file or a user wrote."""
    line = visible(message.replace("\n", " "))
    err.print(f"{label} {escape(line)}")


def print_words(head: str, words: str, indent: int) -> None:
    """Words beside a head of `indent` columns, which may have markup; wrapped below themselves."""
    first, *others = wrap(words, max(20, out.width - indent), break_on_hyphens=False) or [""]
    out.print(f"{head}{escape(first)}")
    for line in others:
        out.print(" " * indent + line, markup=False)


def print_json(value: Any) -> None:
    """One object per line, valid in any encoding and without a raw control character."""
    is_utf = (sys.stdout.encoding or "").lower().startswith("utf")
    line = json.dumps(value, ensure_ascii=not is_utf)
    sys.stdout.write(re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", line) + "\n")
    sys.stdout.flush()


def _title() -> TextColumn:
    """Not TextColumn(title): a folder's name may hold braces and brackets."""
    return TextColumn("{task.description}", markup=False)


def bytes_bar(title: str) -> AbstractContextManager[Any]:
    """A bar with bytes per second; yields update(done, total)."""
    return _bar(title, DownloadColumn(), TransferSpeedColumn())


def count_bar(title: str) -> AbstractContextManager[Any]:
    """A bar with counts and the time left; yields update(done, total)."""
    return _bar(title, MofNCompleteColumn())


@contextmanager
def _bar(title: str, *middle: ProgressColumn) -> Iterator[Any]:
    columns = (_title(), BarColumn(), *middle, TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def load_bars(title: str) -> Iterator[tuple[Any, Any]]:
    """A bar of bytes read and, once one is compiled, a bar of kernels; yields the updates of both."""
    columns = (_title(), BarColumn(), TextColumn("{task.fields[shown]}", markup=False), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def update(title: str, done: int, total: int, shown: str) -> None:
            if title not in tasks:
                tasks[title] = bar.add_task(title, total=total, shown="")
            bar.update(tasks[title], completed=done, total=total, shown=shown)

        yield (
            lambda done, total: update(title, done, total, f"{done / 1e9:.2f} of {total / 1e9:.2f} GB"),
            lambda done, total, name: update("compiling kernels", done, total, f"{done} of {total}, {name}"),
        )


@contextmanager
def ctrl_c() -> Iterator[list[int]]:
    """While open, Ctrl-C fills the list instead of raising inside a step; a second one ends the program."""
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def ctrl_c_cancels() -> Iterator[None]:
    """While open, `asyncio.run` cancels its tasks on Ctrl-C: it does so under Python's own handler only."""
    previous = signal.getsignal(signal.SIGINT)
    if callable(previous):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def nothing_is_garbage() -> Iterator[None]:
    """What is made while open stays to the end: do not search it for garbage, neither now nor later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def model_folder(model: Path | None) -> Path:
    """The folder of a model that was given by path or name; the embedded one, with a note, by default."""
    if model is None:
        model = embedded()
        err.print("[dim]no model named: using the embedded one[/]")
    model = resolve(model)
    if not model.is_file():
        ModelConfig.load(model)  # a wrong name is refused before torch is imported
    return model


def load_engine(model: Path | None, config: "EngineConfig") -> "Engine":
    """Load with a progress bar; what the checkpoint lacks is said on stderr."""
    model = model_folder(model)
    with nothing_is_garbage():
        from dsv4.engine.engine import Engine
        from dsv4.engine.first import ensure

        ensure(config, say_note)
        with load_bars(f"loading {title(model)}") as (read, compiled):
            engine = Engine.load(model, config, read, compiled)
    for note in (*engine.notes, *engine.notices):
        say_note(note)
    engine.notify = say_note
    return engine
