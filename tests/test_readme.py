"""Runs what README.md shows: its console block must print what it says, its Python block must run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory that looks like the checkout to the commands, but keeps build/ to itself."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "tests").symlink_to(ROOT / "tests")
    return folder


def run(arguments: list[str], folder: Path) -> str:
    command = [sys.executable, *arguments]
    environment = {
        "PYTHONPATH": str(ROOT),
        "PATH": "/usr/bin:/bin",
        "COLUMNS": "80",
        "PYTHONIOENCODING": "utf-8",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def test_console_block_prints_what_it_says(folder: Path) -> None:
    (block,) = blocks("console")
    parts = re.split(r"^\$ dsv4 (.*)\n", block, flags=re.MULTILINE)[1:]
    assert len(parts) == 8
    for command, shown in zip(parts[::2], parts[1::2], strict=True):
        printed = run(["-m", "dsv4", *shlex.split(command)], folder)
        got = [line.rstrip() for line in printed.splitlines()]
        assert got == shown.rstrip("\n").split("\n"), command


def test_python_block_runs(folder: Path) -> None:
    if not (folder / "build" / "demo").exists():
        run(["-m", "dsv4", "init", "build/demo", "--preset", "tiny", "--format", "modelopt"], folder)
    (block,) = blocks("python")
    assert run(["-c", block], folder).startswith("[")


def test_commands_for_real_checkpoints_parse(folder: Path) -> None:
    """They need a download to run; their options must exist all the same."""
    for line in "".join(blocks("sh")).splitlines():
        command = shlex.split(line, comments=True)
        if command[:1] == ["dsv4"]:
            refused = subprocess.run(
                [sys.executable, "-m", "dsv4", *command[1:]],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert refused.returncode == 2 and "DeepSeek-V4-Flash does not exist" in refused.stderr


def test_make_demo_runs_the_same_commands() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)/", "").replace("$(DEMO)", "build/demo")
    (block,) = blocks("console")
    for command in re.findall(r"^\$ (.*)$", block, flags=re.MULTILINE):
        assert command in makefile, command


def test_line_counts_in_reading_order_are_true() -> None:
    section = README.split("## Reading order")[1]
    found = re.findall(r"`(?:dsv4/)?([a-z]+/[a-z_/]+\.py)` \((\d+)(?: lines)?\)", section)
    assert len(found) == 7
    for name, lines in found:
        assert len((ROOT / "dsv4" / name).read_text().splitlines()) == int(lines), name
