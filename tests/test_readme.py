"""Runs what README.md shows: console blocks must print what they say, the Python block must run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "cli"))

from cli_support import Done, dsv4, ok, process, refused  # noqa: E402

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


def commands(block: str) -> list[tuple[str, str]]:
    """The dsv4 commands of a console block, each with what is printed below it."""
    parts = re.split(r"^\$ dsv4 (.*)\n", block, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("block", blocks("console"), ids=lambda block: block.split("\n")[0])
def test_console_block_prints_what_it_says(block: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first command in a process of its own, the others in this one."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    assert commands(block)
    for number, (command, shown) in enumerate(commands(block)):
        words = shlex.split(command)
        printed = ok(*words) if number else run(["-m", "dsv4", *words], folder)
        got = [line.rstrip() for line in printed.splitlines()]
        assert got == shown.rstrip("\n").split("\n"), command


def test_python_block_runs(folder: Path) -> None:
    (block,) = blocks("python")
    assert run(["-c", block], folder).startswith("27 + 58 = 85.\n")


def test_commands_for_real_checkpoints_parse() -> None:
    """They need a download to run; their options must exist all the same."""
    lines = [line for line in "".join(blocks("sh")).splitlines() if "./DeepSeek-V4-Flash" in line]
    assert len(lines) == 8
    for line in lines:
        command = shlex.split(line, comments=True)
        assert command[0] == "dsv4"
        done = dsv4(*command[1:]) if command[1] != "serve" else outside(command[1:])
        assert "DeepSeek-V4-Flash does not exist" in refused(done)


def outside(arguments: list[str]) -> Done:
    """In a process of its own: the server writes to that one's stderr."""
    done = process(arguments)
    return Done(done.returncode, done.stdout, done.stderr)


def test_make_demo_runs_the_same_commands() -> None:
    """README's first block of dsv4 commands is what `make demo` runs, with or without the outputs."""
    recipe = (ROOT / "Makefile").read_text().split("\ndemo:")[1].split("\n\n")[0]
    demo = re.findall(r"^\t\$\(BIN\)/(dsv4 .*)$", recipe, flags=re.MULTILINE)
    assert demo and len(demo) == len(recipe.splitlines()) - 1
    all_blocks = re.findall(r"```(?:sh|console)\n(.*?)```", README, flags=re.DOTALL)
    first = next(block for block in all_blocks if "dsv4 " in block)
    assert re.findall(r"^(?:\$ )?(dsv4 .*)$", first, flags=re.MULTILINE) == demo


def test_make_demo_answers() -> None:
    """A thought, a line of its own for the answer, and the speed on stderr."""
    recipe = (ROOT / "Makefile").read_text().split("\ndemo:")[1].split("\n\n")[0]
    sum_command = re.findall(r"^\t\$\(BIN\)/dsv4 (.*)$", recipe, flags=re.MULTILINE)[-1]
    done = dsv4(*shlex.split(sum_command))
    thought, answer = done.out.splitlines()
    assert done.code == 0 and thought and "85" in answer and "first token after" in done.err


def test_files_of_the_reading_order_exist() -> None:
    """And they are few lines: how a token is made, on a CPU and on a GPU."""
    section = README.split("## Reading order")[1].split("## Licence")[0]
    found = re.findall(r"`(?:dsv4/)?([a-z]+/[a-z_/]+\.py)`", section)
    assert len(found) == 10
    room = [ROOT / "dsv4" / "ops" / "route" / name for name in ("meaning.py", "decode.py", "decode.cu")]
    files = [*(ROOT / "dsv4" / name for name in found), *room]
    assert sum(len(path.read_text().splitlines()) for path in files) <= 2000
