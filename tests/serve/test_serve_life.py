"""What happens to the processes: the engine's is killed, the server is told to end, or cannot start."""

import http.client
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
from serve_support import ROOT, SHORT, STORY, Server, wait, worker_pid

from dsv4.config import EngineConfig
from dsv4.errors import ConfigError
from dsv4.models import EMBEDDED
from dsv4.serve.server import ServerConfig, serve, url


def test_killed_or_frozen_engine_comes_back_and_sigterm_drains(tmp_path: Path) -> None:
    """With few descriptors, which idle connections would take all of if they could."""

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    with Server(tmp_path, "--drain-seconds", 20, "--stall-seconds", 3, before=few) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(120)]
        errors: list[Exception] = []

        def ask(stream: bool) -> None:
            try:
                list(server.chat(STORY, max_tokens=400, stream=stream))
            except openai.APIError as error:
                errors.append(error)

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        wait(lambda: server.gauge("dsv4_num_requests_running") == 2, 10)
        first = worker_pid(server)
        os.kill(first, signal.SIGKILL)
        for thread in threads:
            thread.join(5)
        assert len(errors) == 2 and all("died (signal 9)" in str(error) for error in errors)
        assert server.raw("GET", "/health")[0] == 200
        status, body, headers = server.raw("GET", "/ready")
        assert status == 503 and body["error"]["code"] == "engine_unavailable" and headers["retry-after"]
        wait(lambda: server.raw("GET", "/ready")[0] == 200, 60)
        assert worker_pid(server) != first and not Path(f"/proc/{first}").exists()
        assert server.chat(SHORT).choices[0].message.content == "2 + 3 = 5."
        assert server.gauge("dsv4_engine_restarts_total") == 1 and server.is_idle()

        chunks: list[Any] = []
        with pytest.raises(openai.APIError, match="did nothing for 3 s"):
            for chunk in server.chat(STORY, max_tokens=400, stream=True):
                chunks.append(chunk)
                if len(chunks) == 3:
                    os.kill(worker_pid(server), signal.SIGSTOP)
        idle += [socket.create_connection(("127.0.0.1", server.port)) for _ in range(120)]
        assert server.raw("GET", "/health")[0] == 200
        wait(lambda: server.raw("GET", "/ready")[0] == 200, 60)
        wait(lambda: "at most 24 connections" in server.log, 5)
        assert len(server.log) < 8000, server.log
        assert "Traceback" not in server.log
        for sock in idle:
            sock.close()

        done: list[Any] = []
        thread = threading.Thread(target=lambda: done.append(server.chat(SHORT)))
        thread.start()
        wait(lambda: server.gauge("dsv4_num_requests_running") == 1, 10)
        engine = worker_pid(server)
        # As a service manager does it: to every process of the group.
        os.kill(engine, signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        thread.join(20)
        assert done[0].choices[0].message.content == "2 + 3 = 5."
        assert server.process.wait(30) == 0
        assert not Path(f"/proc/{engine}").exists()
        with pytest.raises(ConnectionRefusedError):
            server.raw("GET", "/health")


@pytest.mark.slow
def test_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "dsv4",
        "serve",
        "--host",
        "::1",
        "--port",
        str(port),
        "--max-context",
        "64",
    ]
    with Path("/dev/full").open("wb") as full:
        process = subprocess.Popen(command, cwd=ROOT, stderr=full)

    def is_ready() -> bool:
        connection = http.client.HTTPConnection("::1", port, timeout=5)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except OSError:
            assert process.poll() is None, "it has ended"
            return False
        finally:
            connection.close()

    try:
        wait(is_ready, 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()


def test_options_of_an_operator(tmp_path: Path) -> None:
    """TLS, origins, a name, texts in the log, a limit to thoughts, ids that a client gives, other files."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    options = ["--tls-cert", cert, "--tls-key", key, "--cors-origins", "https://a.example,https://b.example"]
    options += ["--served-model-name", "org/small", "--log-texts", "--max-thinking", 4]
    with Server(tmp_path, *options) as server:
        assert server.scheme == "https"
        silent = socket.create_connection(("127.0.0.1", server.port))  # one without a handshake
        status, body, headers = server.raw(
            "POST",
            "/v1/chat/completions",
            {"model": "org/small", "messages": SHORT, "temperature": 0, "max_tokens": 60},
            Origin="https://b.example",
            **{"X-Request-Id": "my-id.7"},
        )
        assert status == 200 and headers["access-control-allow-origin"] == "https://b.example"
        assert headers["x-request-id"] == "my-id.7"
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5, "and closed"
        wait(lambda: "client_id=my-id.7" in server.log, 3)
        assert "What is 2 + 3?" in server.log and "answer_text=" in server.log
        assert (
            "access-control-allow-origin" not in server.raw("GET", "/health", Origin="https://c.example")[2]
        )
        preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        status, _, headers = server.raw("OPTIONS", "/v1/chat/completions", key=None, **preflight)
        assert status == 200 and headers["access-control-allow-origin"] == "https://a.example"
        (model,) = server.raw("GET", "/v1/models")[1]["data"]
        assert model["id"] == "org/small" and model["context_length"] == 1024
        assert server.raw("GET", "/v1/models/org/small")[1] == model
        dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text())
        metrics = server.raw("GET", "/metrics")[1]
        queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
        for name in {name for query in queries for name in re.findall(r"dsv4_\w+", query)}:
            assert re.search(rf"^{name}[ {{]", metrics, re.MULTILINE), name
        silent.close()
        new = tmp_path / "new.pem"
        subprocess.run([*command, "-keyout", new, "-out", cert], check=True, capture_output=True)
        for told in ("stays in use", "read again"):  # at first the certificate alone was renewed
            server.process.send_signal(signal.SIGHUP)
            wait(lambda told=told: told in server.log, 5)
            assert server.raw("GET", "/v1/models")[0] == 200, told
            key.write_bytes(new.read_bytes())
        locked = ["openssl", "pkey", "-in", new, "-aes256", "-passout", "pass:word", "-out", key]
        subprocess.run(locked, check=True, capture_output=True)
        server.process.send_signal(signal.SIGHUP)
        wait(lambda: "has a passphrase" in server.log, 5)  # nobody is asked for it
        assert server.raw("GET", "/v1/models")[0] == 200
    with pytest.raises(ConfigError, match=r"openssl pkey -in .* makes one without"):
        start(tls_cert=cert, tls_key=key)


def test_examples(tmp_path: Path) -> None:
    unit = (ROOT / "examples" / "dsv4.service").read_text()
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    arguments = shlex.split(line.removeprefix("ExecStart="))[1:]
    done = subprocess.run(
        [sys.executable, "-m", "dsv4", *arguments[:1], "--help-all"], cwd=ROOT, capture_output=True, text=True
    )
    for option in (word for word in arguments if word.startswith("--")):
        assert option in done.stdout, option
    lines = [
        line.removeprefix("Environment=") for line in unit.splitlines() if line.startswith("Environment=")
    ]
    kept = " ".join(lines).split()
    for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR"):  # where kernels go: homes are out of reach
        assert any(word.startswith(f"{name}=/var/cache/dsv4") for word in kept), kept
    if shutil.which("systemd-analyze"):
        (tmp_path / "dsv4.service").write_text(unit.replace(shlex.split(line)[0], "ExecStart=/bin/true"))
        checked = subprocess.run(
            ["systemd-analyze", "verify", tmp_path / "dsv4.service"], capture_output=True, text=True
        )
        assert "dsv4.service" not in checked.stderr, checked.stderr


def test_model_that_cannot_be_loaded_ends_the_server() -> None:
    command = [sys.executable, "-m", "dsv4", "serve", "--max-context", "99999999", "--port", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "max_context 99999999" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert sum(line.startswith("error:") for line in done.stderr.splitlines()) == 1


def start(folder: Path = EMBEDDED, **options: Any) -> None:
    serve(folder, EngineConfig(), ServerConfig(**options), lambda line: None, lambda done, total: None)


def test_address_of_version_6_is_written_in_brackets() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
        assert url(free) == f"http://[::1]:{free.getsockname()[1]}"


def test_cannot_start(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("short\n")
    for options, says in (
        ({"folder": Path("/nowhere/model")}, "does not exist"),
        ({"port": 70000}, "port is 70000"),
        ({"host": "203.0.113.7"}, "cannot listen on 203.0.113.7"),
        ({"api_key_file": Path("/nowhere/keys")}, "cannot be read"),
        ({"api_key_file": keys}, "less than 16"),
        ({"isolate_by_key": True}, "give --api-key-file"),
        ({"request_seconds": float("nan")}, "request_seconds is nan"),
        ({"tls_cert": keys}, "expected one beside tls_cert"),
        ({"tls_cert": keys, "tls_key": keys}, "cannot be used"),
    ):
        with pytest.raises(ConfigError, match=says):
            start(**options)
