"""The all-reduce between ranks under compute-sanitizer, which comes with the CUDA toolkit."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
ROOT = Path(__file__).parents[2]
SANITIZER = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
# Each tool's last line when it found nothing.
CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "synccheck": "ERROR SUMMARY: 0 errors",
    "initcheck": "ERROR SUMMARY: 0 errors",
}


def run(*command: str) -> str:
    # Without torch's cache every tensor is an allocation of its own, so a byte too far is found.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    return said


def test_the_script_passes_by_itself() -> None:
    """Without it a clean tool would say nothing: both ranks must have run at once, on every size."""
    said = run(sys.executable, "-m", "bench.exchange_checked")
    assert said.count("12 exchanges, the same bits on both ranks") == 4, said


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer was not found")
@pytest.mark.parametrize("tool", CLEAN)
def test_the_exchange_is_clean(tool: str) -> None:
    assert SANITIZER is not None
    options = ("--tool", tool, "--error-exitcode", "3", "--target-processes", "all")
    said = run(SANITIZER, *options, sys.executable, "-m", "bench.exchange_checked")
    assert CLEAN[tool] in said and "one by one, 4 sizes" in said, said[-4000:]
