"""Readers of the output that go away, and streams that are closed: the program ends as any other would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import ROOT

EMBEDDED = "no model named: using the embedded one\n"
LINE = (
    '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "A", "max_tokens": 2}}'
)


def unread(arguments: list[str], stream: str, *python: str) -> tuple[int, str]:
    """Exit code, and what it said on the other stream, when nobody reads that one."""
    reader, writer = os.pipe()
    os.close(reader)
    other = {"stdout": "stderr", "stderr": "stdout"}[stream]
    try:
        done = subprocess.run(
            [sys.executable, *python, "-m", "dsv4", *arguments],
            **{stream: writer, other: subprocess.PIPE},  # type: ignore[call-overload]
            cwd=ROOT,
            timeout=120,
        )
    finally:
        os.close(writer)
    return done.returncode, getattr(done, other).decode().removeprefix(EMBEDDED)


@pytest.mark.parametrize(
    "command",
    [
        "generate Once --max-tokens 200 --threads 1", "generate Once --max-tokens 2 --json --threads 1",
        "inspect", "inspect --json", "plan flash --compare", "info", "--help", "plan --help", "--version",
    ],
)  # fmt: skip
def test_output_that_nobody_reads(command: str) -> None:
    assert unread(command.split(), "stdout") == (141, "")


def test_unbuffered_output_that_nobody_reads() -> None:
    assert unread(["plan", "tiny", "--gpus", "H200"], "stdout", "-u") == (141, "")


def test_notes_that_nobody_reads() -> None:
    assert unread(["inspect"], "stderr") == (141, "")


def test_batch_whose_summary_nobody_reads(tmp_path: Path) -> None:
    """The answers are there all the same."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(LINE)
    command = ["batch", str(source), str(target), "--max-context", "512", "--threads", "1"]
    assert unread(command, "stdout") == (141, "")
    assert target.read_bytes().count(b"\n") == 1


def test_reader_that_leaves_in_the_middle() -> None:
    shell = f'"{sys.executable}" -m dsv4 plan flash --compare | head -n 1; echo "${{PIPESTATUS[*]}}"'
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=60)
    first, last = done.stdout.splitlines()
    assert first.startswith("flash (modelopt) ") and last in ("141 0", "3 0") and done.stderr == ""


@pytest.mark.parametrize(
    "command", ["inspect", "plan tiny --gpus H200", "info --json", "--help", "--version"]
)
def test_closed_output(command: str) -> None:
    shell = f'"{sys.executable}" -m dsv4 {command} >&-'
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=60)
    error = "error: standard input or output is closed\n"
    assert done.returncode == 2 and done.stderr.removeprefix(EMBEDDED) == error


def test_closed_input() -> None:
    shell = f'"{sys.executable}" -m dsv4 chat --threads 1 <&-'
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.endswith("standard input or output is closed\n")


def test_batch_without_streams(tmp_path: Path) -> None:
    """Its files and those of its processes get no stream's number."""
    (tmp_path / "in.jsonl").write_text(f"{LINE}\ncut")
    source, target = f'"{tmp_path}/in.jsonl"', f'"{tmp_path}/out.jsonl"'
    options = "--max-context 512 --ranks 2 --threads 1"
    shell = f'"{sys.executable}" -m dsv4 batch {source} {target} {options} <&- 2>&-'
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 4 and done.stdout.startswith("2 lines, 1 of them with an error")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert len(lines) == 2 and all(line.startswith('{"id":"batch_req_') for line in lines)
