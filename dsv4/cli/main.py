"""`dsv4`: the program. Errors a user can cause end in one sentence and exit code 2."""

import errno
import os
import sys
from importlib import import_module
from typing import Annotated

import typer

from dsv4 import __version__
from dsv4.child import end_with
from dsv4.cli.bench import group as bench
from dsv4.cli.help import CONTEXT, Command, Group
from dsv4.cli.options import add_command, show_help
from dsv4.cli.show import say_error
from dsv4.cli.streams import forget_output, prepare
from dsv4.env import launched_by, wants_traceback
from dsv4.errors import Dsv4Error

# Some versions of typer carry their own copy of click; this is the class of whichever it uses.
UsageError: type[typer.BadParameter] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    cls=Group,
    context_settings=CONTEXT,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
# As --help lists them: each is a module here, with a function of the same name and its EPILOG.
COMMANDS = (
    "generate chat serve launch batch score eval inspect quantize plan experts doctor compare info init"
)
for name in COMMANDS.split():
    module = import_module(f"dsv4.cli.{name}")
    add_command(app, getattr(module, name), module.EPILOG)
app.add_typer(bench, name="bench", cls=Group)


@app.command(cls=Command, name="help", context_settings={"ignore_unknown_options": True})
def _show_help(words: Annotated[list[str] | None, typer.Argument(metavar="COMMAND")] = None) -> None:
    """Show the help of a command, as its --help does."""
    app([*(words or ()), "--help"], prog_name="dsv4", standalone_mode=False)


@app.callback(invoke_without_command=True)
def _begin(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="show the version")] = False,
) -> None:
    """A small, fast, exact inference engine for DeepSeek-V4."""
    if version:
        typer.echo(f"dsv4 {__version__}")
        raise typer.Exit
    show_help(context)


def main() -> None:
    prepare()
    try:
        _follow()
        code = app(prog_name="dsv4", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code)
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else "dsv4"
        say_error(f"{error.format_message().rstrip('.')}; see {command} --help")
        sys.exit(2)
    except Dsv4Error as error:
        if wants_traceback():
            raise
        say_error(str(error))
        sys.exit(2)
    except ModuleNotFoundError as error:
        # A core without a GPU has no Triton, which every kernel is imported with.
        if error.name != "triton" or wants_traceback():
            raise
        say_error(_without_triton())
        sys.exit(2)
    except OSError as error:
        # A name that no file system takes, a disk that is full behind our output: nothing we should explain.
        if wants_traceback():
            raise
        reason = error.strerror or str(error)
        output = f"cannot write output: {reason[:1].lower()}{reason[1:]}"
        if error.errno == errno.EBADF:
            output = "standard input or output is closed"
        say_error(output if error.filename is None else f"{error.filename} cannot be used: {reason}")
        forget_output()
        sys.exit(2)


def _follow() -> None:
    """A rank of torchrun's other than 0 does what rank 0 says, whatever the command; it ends here."""
    if (said := launched_by()) is not None:
        if said["RANK"] != "0":
            end_with(os.getppid())  # torchrun: before torch is imported, which takes seconds
        from dsv4.parallel.machines import World

        if (world := World.find()) is not None and world.rank > 0:
            from dsv4.engine.follow import main_launched

            main_launched(world)


def _without_triton() -> str:
    """Triton is not what is missing where there is no GPU."""
    import torch

    if torch.cuda.is_available():
        return "this runs GPU kernels, which need Triton; it is not installed: pip install triton"
    found = f"torch {torch.__version__} sees no CUDA GPU"
    return f"this runs GPU kernels, and {found}; run it on a machine with one"
