"""Runs the tests of the GPU backends in Triton's interpreter, in one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
FILES = [
    "test_gpu_products.py",
    "test_gpu_rows.py",
    "test_gpu_attend.py",
    "test_gpu_prompt.py",
    "test_gpu_fp4.py",
]
PUBLISHED = 18  # tests of these at published sizes, which take too long
COMPILED = 13  # that compile, where there is nothing to interpret
ORDERED = 1  # of the order of sums, where the interpreter has its own


def test_all() -> None:
    files = [str(Path(__file__).with_name(name)) for name in FILES]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    # Those at published sizes need a GPU; what compiles, no interpreter.
    skipped = f" passed, {PUBLISHED + COMPILED + ORDERED} skipped"
    assert done.returncode == 0 and skipped in done.stdout, done.stdout[-4000:]
