"""Runs the tests of decode steps, launch by launch and whole, in Triton's interpreter, in other processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.once import folder_of_run

pytest.importorskip("triton", reason="Triton is not installed")


HERE = Path(__file__).parent
WHOLE = [
    HERE / "test_step_whole.py",
    HERE.parent / "step" / "test_step_meanings.py",
    HERE.parent / "step" / "test_draft.py",
    HERE.parent / "engine" / "test_engine_emulated.py",
]
SINGLE = sorted(path for path in HERE.glob("test_step_*.py") if path not in (Path(__file__), *WHOLE))


def run(files: list[Path], factory: pytest.TempPathFactory, *options: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, *map(str, files)]
    twins = str(folder_of_run(factory, "twins"))
    environment = os.environ | {"TRITON_INTERPRET": "1", "DSV4_TWINS": twins}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]


is_outside = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreted process"
)


@is_outside
@pytest.mark.parametrize(
    "files", [*([path] for path in WHOLE), SINGLE], ids=[*(path.stem for path in WHOLE), "single launches"]
)
def test_all(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> None:
    run(files, tmp_path_factory)


@is_outside
@pytest.mark.slow
def test_long_ones(tmp_path_factory: pytest.TempPathFactory) -> None:
    run(WHOLE, tmp_path_factory, "-m", "slow")
