"""Runs the tests of the decode step's kernels in Triton's interpreter, all in one process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreted process")
def test_all() -> None:
    files = sorted(
        str(path) for path in Path(__file__).parent.glob("test_step_*.py") if path != Path(__file__)
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]
