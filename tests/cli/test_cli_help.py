"""Help, completion, the model's name: what people try first, at the width of their terminal."""

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_support import completed, dsv4, ok, refused

from dsv4 import EngineConfig, __version__
from dsv4.cli import help as cli_help
from dsv4.cli.main import COMMANDS, app

PROGRAM = typer.main.get_command(app)


def commands(group: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for name, command in group.commands.items():
        is_group = hasattr(command, "commands")
        found += commands(command, (*path, name)) if is_group else [((*path, name), command)]
    return found


ALL = commands(PROGRAM)


@pytest.mark.parametrize("path, command", ALL, ids=[" ".join(path) for path, _ in ALL])
def test_every_option_has_a_line_of_words(path: tuple[str, ...], command: Any) -> None:
    silent = [param.name for param in command.params if not (param.help or param.name == "words")]
    assert not silent


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("path", [path for path, _ in ALL], ids=" ".join)
def test_help_fits_the_terminal(path: tuple[str, ...], columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_help.out, "width", columns)
    everything = "--help-all" if "--help-all" in ok(*path, "--help") else "--help"
    for line in ok(*path, everything).split("\nExamples")[0].splitlines():
        assert len(line) <= columns, line
        assert not re.search(r"^ +-\S.* None\b", line), "every value has a name"
        assert "<bool>" not in line and "…" not in line, "types are words; nothing is cut"


def options(text: str) -> set[str]:
    return set(re.findall(r"^ +(?:-\w, )?(--[\w-]+)", text, flags=re.MULTILINE)) - {"--help", "--help-all"}


def test_generates_help_has_the_ten_options_that_matter() -> None:
    short, everything = options(ok("generate", "--help")), options(ok("generate", "--help-all"))
    assert len(short) <= 10 and {"--model", "--max-tokens", "--temperature", "--json"} <= short < everything
    assert {f"--{field.name.replace('_', '-')}" for field in fields(EngineConfig)} - everything == {"--ops"}


def test_ways_to_ask_for_help_and_the_version() -> None:
    for name in COMMANDS.split():
        assert ok(name, "-h") == ok(name, "--help") == ok("help", name)
    assert ok("help") == ok("--help") == ok("-h")
    assert ok("help", "bench", "decode") == ok("bench", "decode", "-h")
    assert ok("-V") == ok("--version") == f"dsv4 {__version__}\n"
    assert "No such command 'nope'" in refused(dsv4("help", "nope"))


def test_a_model_may_be_an_option_everywhere(checkpoint: Callable[..., Path]) -> None:
    model = checkpoint("modelopt")
    assert ok("inspect", "-m", model) == ok("inspect", "--model", model) == ok("inspect", model)
    message = refused(dsv4("inspect", model, "-m", "./other"))
    assert f"two models are named, {model} and other; name one" in message
    for path, command in ALL:
        flags = {flag for param in command.params for flag in param.opts}
        if any(param.name == "model" and not param.required for param in command.params):
            assert {"-m", "--model"} <= flags, path


def test_integers_may_end_in_k(checkpoint: Callable[..., Path]) -> None:
    model = checkpoint("modelopt")
    message = refused(dsv4("generate", "hi", "-m", model, "--max-context", "128k"))
    assert "max_context 131072 exceeds" in message
    assert "'many' is not an integer, e.g. 4096 or 4k" in refused(dsv4("generate", "hi", "--top-k", "many"))


def test_completion(tmp_path: Path) -> None:
    for name in ("flash", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "flash" / "config.json").touch()
    assert completed("gen", folder=tmp_path) == ["generate"]
    assert "--max-tokens" in completed("chat", "--max-t", folder=tmp_path)
    for words, want in (
        (("chat", ""), "flash"),
        (("generate", "-m", "fl"), "flash"),
        (("inspect", "./f"), "./flash"),
    ):
        assert completed(*words, folder=tmp_path) == [want]
