"""`dsv4 launch`: the settings of each client, a server that ends with it, one that runs already."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cli_support import ROOT, dsv4, ok, refused

pytest.importorskip("uvicorn")


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def is_open(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def settings(client: str, port: int) -> tuple[dict[str, str], list[str], str]:
    """Variables, command and the server's command of a dry run."""
    shown = ok("launch", client, "--port", port, "--max-context", "8k", "--dry-run", "--", "--a b", "c d")
    server, *exports, command = shown.splitlines()
    pairs = (shlex.split(line)[1].partition("=") for line in exports)
    return {name: value for name, _, value in pairs}, shlex.split(command), server


def test_the_settings_of_each_client(port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    variables, command, server = settings("claude", port)
    assert server.startswith("dsv4 serve ") and server.endswith(f" --port={port} --max-context=8192 &")
    assert (variables["ANTHROPIC_BASE_URL"], variables["ANTHROPIC_MODEL"]) == (url, "tiny")
    assert variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "1024" and command == ["claude", "--a b", "c d"]
    variables, command, _ = settings("codex", port)
    options = tomllib.loads("\n".join(command[2:-2:2]))
    assert command[1:-2:2] == ["-c"] * 4 and options["model_context_window"] == 8192
    provider = options["model_providers"][options["model_provider"]]
    assert provider["base_url"] == f"{url}/v1" and variables[provider["env_key"]] == "any"
    variables, _, _ = settings("opencode", port)
    config = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
    provider = config["provider"]["dsv4"]
    assert config["model"] == "dsv4/tiny" and provider["options"] == {"baseURL": f"{url}/v1", "apiKey": "any"}
    assert provider["models"] == {"tiny": {"reasoning": True, "limit": {"context": 8192, "output": 1024}}}
    assert settings("aider", port)[0]["AIDER_MODEL"] == "openai/tiny"
    assert settings("anything", port)[0]["OPENAI_BASE_URL"] == f"{url}/v1"
    assert not is_open(port), "nothing was started"


def launch(port: int, *arguments: object, state: Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dsv4", "launch", sys.executable, f"--port={port}", *arguments]
    environment = {**os.environ, "XDG_STATE_HOME": str(state), "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([str(word) for word in command], env=environment, text=True, **pipes, **options)


def test_a_client_streams_from_a_server_that_ends_with_it(port: int, tmp_path: Path) -> None:
    """The client: the openai package in a program of its own, which reads these variables by itself."""
    pytest.importorskip("openai")
    code = """
import os, sys
from openai import OpenAI
asked = [{"role": "user", "content": "What is 27 + 58?"}]
model = os.environ["OPENAI_MODEL"]
for part in OpenAI().chat.completions.create(model=model, messages=asked, stream=True, temperature=0):
    print(part.choices[0].delta.content or "", end="")
sys.exit(7)
"""
    done = launch(port, "--", "-c", code, state=tmp_path)
    out, err = done.communicate(timeout=120)
    assert out == "27 + 58 = 85." and done.returncode == 7, err
    assert not is_open(port)
    log = tmp_path / "dsv4" / "launch.log"
    assert "server: ended" in log.read_text() and log.stat().st_mode & 0o777 == 0o600


def test_a_server_that_runs_is_used_and_left(port: int, tmp_path: Path) -> None:
    """The inner one finds the outer one's server; a SIGTERM ends the client, and the server with it."""
    code = f"""
import subprocess, sys, time
inner = [sys.executable, "-m", "dsv4", "launch", "env", "--port", "{port}"]
print(subprocess.run(inner, capture_output=True, text=True).stdout)
print(subprocess.run([*inner, "-m", "."], capture_output=True, text=True).stderr, flush=True)
time.sleep(60)
"""
    outer = launch(port, "--", "-c", code, state=tmp_path)
    assert outer.stdout is not None
    shown = ""
    while "take another --port" not in shown:
        line = outer.stdout.readline()
        assert line, shown
        shown += line
    assert f"OPENAI_BASE_URL=http://127.0.0.1:{port}/v1\n" in shown and is_open(port)
    assert f"error: http://127.0.0.1:{port} serves tiny already; leave out --model" in shown
    outer.send_signal(signal.SIGTERM)
    outer.communicate(timeout=60)
    assert outer.returncode == 128 + signal.SIGTERM and not is_open(port)


def test_what_cannot_be_launched(port: int, tmp_path: Path) -> None:
    assert "claude is not installed: npm install -g" in refused(dsv4("launch", "claude", "--port", port))
    assert "missing does not exist" in refused(dsv4("launch", "env", "--port", port, "-m", "./missing"))
