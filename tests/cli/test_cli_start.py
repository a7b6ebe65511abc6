"""Start times: what does not compute does not wait for torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = [
    "", "--help", "-V", "generate --help-all", "help chat", "nope", "generate", "chat --nope", "inspect",
    "inspect --json", "inspect ./missing", "generate hi -m ./missing", "generate hi --temperature -1",
    "chat ./missing", "serve ./missing", "experts ./missing",
    "compare ./missing", "quantize ./missing ./new --format bf16", "info --brief",
    "info --brief --json", "batch ./missing ./new",
]  # fmt: skip


def test_nothing_waits_for_torch_that_does_not_compute(tmp_path: Path) -> None:
    """One process for all: torch is not in it after any of them."""
    code = """
import contextlib, io, json, sys
from dsv4.cli.main import main
for line in json.load(sys.stdin):
    sys.argv = ["dsv4", *line.split()]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
    if "torch" in sys.modules or "numpy" in sys.modules:
        sys.exit(f"{line!r} imports torch or numpy")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(WITHOUT_TORCH),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_completion_does_not_wait_for_torch_either(tmp_path: Path) -> None:
    asked = {"_DSV4_COMPLETE": "complete_bash", "COMP_WORDS": "dsv4\ngenerate\n--max-t", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "dsv4"],
        env={**os.environ, "PYTHONPATH": str(ROOT), **asked},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["--max-tokens"]
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "dsv4.cli.main" in names and not names & {"torch", "numpy", "prompt_toolkit", "rich.markdown"}
