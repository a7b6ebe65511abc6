"""What `--help` prints: usage, a line of words per option, examples; `--help-all` adds the rarer options."""

import inspect
import re
from typing import Any

import typer
from rich.console import Group as Lines
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from dsv4.cli.show import out

NARROW = 60  # columns; below it, words go under the option and not beside it
CONTEXT = {"help_option_names": ["-h", "--help"]}


class Command(TyperCommand):
    """A command whose options in a panel are shown by --help-all only."""

    def get_help(self, ctx: Any) -> str:
        return _help(self, ctx)


class Group(TyperGroup):
    """A program or a group of commands."""

    def get_help(self, ctx: Any) -> str:
        return _help(self, ctx)


def show_everything(context: typer.Context, value: bool) -> None:
    """What --help-all does."""
    if value:
        typer.echo(_help(context.command, context, everything=True))
        raise typer.Exit


def _help(command: Any, ctx: Any, everything: bool = False) -> str:
    usage = " ".join([ctx.command_path, *(piece for piece in command.collect_usage_pieces(ctx))])
    parts: list[Any] = [Text.assemble(("Usage: ", "bold"), usage), ""]
    parts += [Padding(re.sub(r"(?<!\n)\n(?!\n)", " ", command.help or ""), (0, 2)), ""]
    panels: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        if getattr(param, "hidden", False):
            continue
        is_argument = param.param_type_name == "argument"
        panel = param.rich_help_panel or ("Arguments" if is_argument else "Options")
        if everything or not param.rich_help_panel:
            panels.setdefault(panel, []).append((_name(param, is_argument), _words(param)))
    commands = [(name, _first(found.help)) for name, found in getattr(command, "commands", {}).items()]
    for title, rows in [*panels.items(), *([("Commands", commands)] if commands else [])]:
        parts += [Text(title, "bold"), _rows(rows), ""]
    if command.epilog:
        parts.append(inspect.cleandoc(command.epilog))
    with out.capture() as capture:
        out.print(Lines(*parts), soft_wrap=False)
    # Padding fills lines with spaces, which a terminal of another width would wrap.
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).rstrip()


def _name(param: Any, is_argument: bool) -> str:
    if is_argument:
        return param.metavar or param.name
    names = ", ".join(sorted(param.opts, key=len))
    names = names if names.startswith("-") and not names.startswith("--") else f"    {names}"
    if param.secondary_opts:
        names = names.replace("--", "--[no-]", 1)
    return names if param.is_flag else f"{names} {param.metavar}"


def _words(param: Any) -> str:
    words, default = param.help or "", param.default
    shown = param.show_default and not isinstance(default, bool) and default not in (None, "", [], ())
    return f"{words} (default: {default})" if shown and "default" not in words else words


def _first(help: str | None) -> str:
    """The first sentence of a command's help, without what it says in brackets."""
    return re.split(r"(?<=[^.])[.:](?:\s|$)", re.sub(r" \([^)]*\)", "", help or ""))[0].replace("\n", " ")


def _rows(rows: list[tuple[str, str]]) -> Any:
    if out.width < NARROW:
        pairs = [(Text(name, "cyan"), Padding(Text(words), (0, 0, 0, 6))) for name, words in rows]
        return Padding(Lines(*(part for pair in pairs for part in pair)), (0, 0, 0, 1))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="cyan")
    grid.add_column(overflow="fold")
    for name, words in rows:
        grid.add_row(f"  {escape(name)}", escape(words))
    return grid
