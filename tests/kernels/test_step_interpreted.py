"""Runs the tests of the decode step's kernels in Triton's interpreter, all in one process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.once import folder_of_run

pytest.importorskip("triton", reason="Triton is not installed")


HERE = Path(__file__).parent
WHOLE = HERE / "test_step_whole.py"
SINGLE = sorted(path for path in HERE.glob("test_step_*.py") if path not in (Path(__file__), WHOLE))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreted process")
@pytest.mark.parametrize("files", [[WHOLE], SINGLE], ids=["whole steps", "single launches"])
def test_all(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, files)]
    twins = str(folder_of_run(tmp_path_factory, "twins"))
    environment = os.environ | {"TRITON_INTERPRET": "1", "DSV4_TWINS": twins}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]
