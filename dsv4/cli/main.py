"""`dsv4`: the program. Errors a user can cause end in one sentence and exit code 2."""

import sys

import typer

from dsv4.cli import chat, generate, info, init, inspect, score
from dsv4.cli.show import err
from dsv4.env import wants_traceback
from dsv4.errors import Dsv4Error

app = typer.Typer(
    help="A small, fast, exact inference engine for DeepSeek-V4.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (generate, chat, score, inspect, info, init):
    command.register(app)


def main() -> None:
    try:
        app()
    except Dsv4Error as error:
        if wants_traceback():
            raise
        err.print(f"[bold red]error:[/] {error}", markup=True)
        sys.exit(2)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing is wrong.
        sys.stderr.close()
        sys.exit(141)
