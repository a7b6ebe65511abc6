"""Ctrl-C while modules are imported: exit code 130 at once, no word. Later it is each command's own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_support import ROOT, Terminal

# Stands in for numpy: torch's C code imports it, drops whatever it raises, and goes on without it.
SWALLOWS = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
except KeyboardInterrupt:
    pass
"""


def run(folder: Path, ignored: bool = False) -> subprocess.CompletedProcess[str]:
    handler = signal.SIG_IGN if ignored else signal.default_int_handler
    return subprocess.run(
        [sys.executable, "-m", "dsv4", "info", "--json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler) and None,
    )


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_ctrl_c_inside_an_import_that_swallows_it(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(SWALLOWS)
    done = run(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As under nohup: the import goes on, here into a module that is none."""
    (tmp_path / "typer.py").write_text(SWALLOWS)
    done = run(tmp_path, ignored=True)
    assert done.returncode == 1 and "module 'typer' has no attribute" in done.stderr


def test_ctrl_c_while_the_server_loads(tmp_path: Path) -> None:
    """A terminal sends it to the engine's process too, which imports torch just then."""
    log = tmp_path / "log.txt"
    with log.open("wb") as stderr:
        server = subprocess.Popen(
            [sys.executable, "-m", "dsv4", "serve", "--port", "0"],
            cwd=ROOT,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
        )
    try:
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
        end = time.monotonic() + 60
        while not children.read_text() and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.3)  # Python has begun, torch is being imported
        os.killpg(server.pid, signal.SIGINT)
        server.wait(30)
    finally:
        server.kill()
    assert "Traceback" not in log.read_text() and "server: ended" in log.read_text()


def test_ctrl_c_in_a_batch_says_how_to_go_on(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 400}
    common = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = [json.dumps({"custom_id": str(i), **common}) for i in range(40)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    with Terminal("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--max-batch", 2) as terminal:
        terminal.expect("answering")
        time.sleep(2)
        terminal.type("\x03")
        shown = terminal.expect(r"stopped after \d+ of 40 lines; the same command goes on from there")
        assert "Traceback" not in shown + terminal.unread
        assert terminal.wait() == 130
