"""The scripts of bench on a GPU: a run of each kind on the smallest model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


def lines(name: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", f"bench.{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()


def last(name: str, *arguments: str) -> dict[str, Any]:
    return json.loads(lines(name, *arguments)[-1])


def test_ops() -> None:
    chosen = ("--op", "rows", "--op", "attention", "--op", "decode", "--experts", "8", "--context", "1024")
    found = last("ops", "--preset", "tiny", *chosen)
    assert found["refused"] == 0 and {r["backend"] for r in found["results"]} == {"cpu", "gpu"}
    assert found["command"].startswith("python -m bench.ops --preset tiny")


def test_beside_transformers() -> None:
    pytest.importorskip("transformers")
    assert last("beside", "tiny", "--steps", "4", "--context", "200")["transformers"]["ms_per_token"] > 0


def test_ranks() -> None:
    found = last("ranks", "tiny:2", "--layout", "nvfp4", "--context", "600", "--steps", "8")
    assert found["ms_without_all_reduces"] > 0 and found["ranks"] == 2


def test_spilled() -> None:
    given = ("tiny", "--layout", "official", "--spill", "2", "--context", "600", "--steps", "8")
    assert last("spilled", "decode", *given)["spill"]["explained_ms"] > 0
    assert last("spilled", "prefill", *given, "--tokens", "700")["spill"]["ms_all_resident"] > 0


def test_sweep() -> None:
    assert last("sweep", "tiny", "--steps", "8", "--context", "600")["over_batch"]


def test_drafts() -> None:
    found = lines("draft", "tiny", "--sequences", "1", "2", "--context", "600", "--rounds", "8")
    assert [line.split()[0] for line in found] == ["sequences", "1", "2"]
    assert all(float(time) > 0 for line in found[1:] for time in line.split()[2:])
