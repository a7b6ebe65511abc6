"""What an operator does to a server, and what stands around it: logs, signals, probes, service managers."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_support import KEY, OTHER_KEY, ROOT, SHORT, STORY, Server, wait, worker_pid

from dsv4.models import EMBEDDED
from dsv4.serve.gate import LEAST_BODY_BYTES, body_limit
from dsv4.serve.lines import MAX_LINES, Lines
from dsv4.serve.store import Store

NEW_KEY = "a-key-that-came-later-012345"
CHAT: dict[str, Any] = {"messages": SHORT, "max_tokens": 4, "temperature": 0}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def get(port: int, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_log_that_nobody_reads_stops_nothing_and_loading_is_told() -> None:
    """stderr is a pipe whose reader stands still; before that, what /ready says while the model loads."""
    port = free_port()
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "dsv4", "serve", "--port", str(port), "--max-context", "512"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=writing)
    os.close(writing)
    phases: list[str] = []

    def is_ready() -> bool:
        with contextlib.suppress(OSError):
            status, text = get(port, "/ready")
            told = json.loads(text)
            phases.append(told["phase"])
            assert told["ready"] == (status == 200) and 0 <= told["fraction"] <= 1
            assert status == 200 or (status == 503 and told["error"]["code"] == "engine_unavailable")
            assert get(port, "/health")[0] == 200, "alive all the time"
            return told["ready"]
        return False

    try:
        wait(is_ready, 60)
        assert phases[-1] == "ready" and set(phases) <= {
            "starting",
            "checking",
            "weights",
            "preparing",
            "ready",
        }
        assert len(set(phases)) > 1
        for _ in range(MAX_LINES // 2):  # 64 kB are full after some hundreds
            assert get(port, "/nothing")[0] == 404
        assert get(port, "/health")[0] == 200
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0 and time.monotonic() - began < 8
    finally:
        process.kill()
        os.close(reading)


def test_lines_that_do_not_fit_are_counted() -> None:
    """A writer that stands still, four threads that say more than fits, then a writer that goes on."""
    goes_on, written, num_dropped = threading.Event(), list[str](), []

    def write(line: str) -> None:
        goes_on.wait(30)
        written.append(line)
        if line == "fails":
            raise OSError("disk full")

    lines = Lines(write)
    lines.on_drop = lambda: num_dropped.append(1)
    lines.put("fails")
    wait(lambda: lines._queue.empty(), 5)
    each = MAX_LINES // 2

    def say(name: int) -> None:
        for number in range(each):
            lines.put(f"{name} {number}")

    threads = [threading.Thread(target=say, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    goes_on.set()
    lines.close()
    told = [int(line.split()[1]) for line in written if "left out" in line]
    kept = [line for line in written if re.fullmatch(r"\d \d+", line)]
    assert sum(told) == len(num_dropped) == 4 * each - len(kept) > 0 and len(kept) == MAX_LINES
    for name in "0123":
        mine = [int(line.split()[1]) for line in kept if line[0] == name]
        assert mine == sorted(mine), "in order"


@contextlib.contextmanager
def listening(path: Path) -> Iterator[list[bytes]]:
    """A service manager's socket, and what it was told."""
    told: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(path))

        def read() -> None:
            with contextlib.suppress(OSError):
                while data := sock.recv(1024):
                    told.append(data)

        threading.Thread(target=read, daemon=True).start()
        yield told
        sock.shutdown(socket.SHUT_RDWR)


def test_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGHUP reads keys again, and streams go on; SIGTERM drains, and tells new requests to go elsewhere."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    model = tmp_path / "model"
    shutil.copytree(EMBEDDED, model)
    (model / "generation_config.json").write_text('{"temperature": 0.0, "top_p": 0.9, "do_sample": true}')
    names = ["--served-model-name", "own", "--served-model-name", "other", "--served-model-name", "claude-*"]
    with listening(tmp_path / "notify") as told, Server(tmp_path, model, *names, "--lenient") as server:
        wait(lambda: b"READY=1" in told, 5)
        maps = Path(f"/proc/{worker_pid(server)}/maps").read_text()
        assert "llguidance" in maps, "no stream waits for the first grammar's vocabulary"
        silent = [
            server.post("/v1/chat/completions", {"messages": SHORT, "max_tokens": 9})[1] for _ in range(2)
        ]
        assert silent[0]["choices"] == silent[1]["choices"], (
            "greedy, as the file beside the checkpoint has it"
        )
        models = server.raw("GET", "/v1/models")[1]["data"]
        assert [model["id"] for model in models] == ["own", "other"]
        assert models[0]["sampling_defaults"]["top_p"] == 0.9 and models[1]["root"] == "own"
        for name, status in (("own", 200), ("other", 200), ("claude-opus-9", 200), ("gpt-9", 404)):
            assert server.post("/v1/chat/completions", {**CHAT, "model": name})[0] == status
        odd = {**CHAT, "frob": 1, "tools": [{**TOOL, "x\n": 2}]}
        status, _, headers = server.post("/v1/chat/completions", odd)
        assert status == 200 and headers["x-ignored-fields"] == "frob,tools[0].x?"

        body = {**CHAT, "messages": STORY, "max_tokens": 150, "ignore_eos": True}
        answers: list[Any] = []

        def ask() -> None:
            answers.append(server.post("/v1/chat/completions", {**body, "stream": True}))

        stream = threading.Thread(target=ask)
        stream.start()
        wait(lambda: server.gauge("dsv4_num_requests_running") == 1, 10)
        keys = tmp_path / "keys.txt"
        keys.write_text("short\n")
        server.process.send_signal(signal.SIGHUP)
        wait(lambda: "stays in use" in server.log, 5)
        assert server.raw("GET", "/v1/models")[0] == 200, "a file that cannot be used changes nothing"
        keys.write_text(f"{KEY}\n{NEW_KEY}\n")
        for pid in (worker_pid(server), server.process.pid):  # as a terminal does that closes
            os.kill(pid, signal.SIGHUP)
        wait(lambda: "2 API keys" in server.log, 5)
        assert server.raw("GET", "/v1/models", key=NEW_KEY)[0] == 200
        assert server.raw("GET", "/v1/models", key=OTHER_KEY)[0] == 401
        assert stream.is_alive(), "longer than all this"

        half = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        half.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{{".encode())
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        wait(lambda: b"STOPPING=1" in told, 5)
        status, refused, headers = server.post("/v1/chat/completions", CHAT)
        assert status == 503 and "shuts down" in refused["error"]["message"] and headers["retry-after"]
        assert (
            server.raw("GET", "/ready")[1]["phase"] == "draining" and server.raw("GET", "/health")[0] == 200
        )
        stream.join(30)
        assert answers[0][0] == 200 and answers[0][1].endswith("data: [DONE]\n\n"), "whole, through all of it"
        text = b"".join(iter(lambda: half.recv(4096), b"")).decode()
        assert text.startswith("HTTP/1.1 503") and '"the server shuts down"' in text
        assert server.process.wait(20) == 0


TOOL = {"type": "function", "function": {"name": "f"}}


def test_answers_of_the_gate(server: Server) -> None:
    assert server.raw("GET", "/v1/models", key=None)[2]["www-authenticate"] == "Bearer"
    assert server.raw("PUT", "/v1/models")[2]["allow"] in ("GET, HEAD", "HEAD, GET")
    assert server.raw("GET", "/v1/models", key=KEY, **{"X-Api-Key": "wrong-but-beside-a-good-one"})[0] == 200
    assert server.raw("GET", "/v1/models", key="wrong", **{"X-Api-Key": KEY})[0] == 200
    assert server.raw("GET", "/v1/models", key="wrong", **{"X-Api-Key": "wrong"})[0] == 401
    status, body, _ = server.raw("POST", "/v1/completions", {"prompt": "x"}, **{"Content-Encoding": "gzip"})
    assert status == 415 and "Content-Encoding is 'gzip'" in body["error"]["message"]
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        sock.sendall(f"{head}Content-Type: application/json\r\nExpect: 100-continue\r\n".encode())
        sock.sendall(b"Content-Length: 99999999999\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 413")
    assert body_limit(1 << 20) > 12 << 20 and body_limit(1024) == LEAST_BODY_BYTES
    stamp = r"^time=\d{4}-\d\d-\d\dT[\d:.]+\+00:00 client=127\.0\.0\.1"
    pattern = stamp + r" route=/v1/completions status=413 .* key=2 "
    wait(lambda: bool(re.search(pattern, server.log, re.MULTILINE)), 5)


def test_metrics_are_named_and_typed(server: Server) -> None:
    before = server.gauge("dsv4_time_to_first_token_seconds_count")
    server.chat(SHORT, max_tokens=5)
    text = server.raw("GET", "/metrics")[1]
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    for name, kind in {
        "dsv4_num_preemptions": "counter",
        "dsv4_engine_restarts": "counter",
        "dsv4_spec_decode_num_draft_tokens": "counter",
        "dsv4_spec_decode_num_accepted_tokens": "counter",
        "dsv4_spec_decode_num_accepted_tokens_per_pos": "counter",
        "dsv4_spec_decode_num_steps": "counter",
        "dsv4_log_lines_dropped": "counter",
        "dsv4_expert_hits": "counter",
        "dsv4_expert_misses": "counter",
        "dsv4_host_memory_used_bytes": "gauge",
        "dsv4_request_success": "counter",
        "dsv4_num_requests_running": "gauge",
        "dsv4_kv_cache_usage_perc": "gauge",
        "dsv4_e2e_request_latency_seconds": "histogram",
        "dsv4_request_queue_time_seconds": "histogram",
        "dsv4_request_prompt_tokens": "histogram",
        "dsv4_request_generation_tokens": "histogram",
        "dsv4_inter_token_latency_seconds": "histogram",
    }.items():
        assert types.get(f"{name}_total" if kind == "counter" else name) == kind, name
    assert re.search(r'^dsv4_build_info\{.*model="tiny".*\} 1\.0$', text, re.MULTILINE)
    assert re.search(r'^dsv4_request_success_total\{finished_reason="length"\} [1-9]', text, re.MULTILINE)
    assert "process_resident_memory_bytes" in text
    assert server.gauge("dsv4_time_to_first_token_seconds_count") == before + 1
    assert (
        server.gauge("dsv4_e2e_request_latency_seconds_sum")
        > server.gauge("dsv4_time_to_first_token_seconds_sum")
        > server.gauge("dsv4_request_queue_time_seconds_sum")
        > 0
    )


# NVIDIA's management library for a machine of two GPUs, the second of which has been lost.
LIBRARY = """
typedef struct { unsigned long long total, free, used; } memory;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  *device = (void *)(long)(index + 1);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory *m) {
  m->total = 8000000000; m->used = 3000000000; m->free = 5000000000;
  return device == (void *)2 ? 15 : 0;
}
"""


def test_gpu_memory_is_read_from_nvidias_library(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-x", "c", "-", "-o", library], input=LIBRARY, text=True, check=True)
    code = """
from prometheus_client import CollectorRegistry, generate_latest
from dsv4.serve.metrics import GpuMemory
(registry := CollectorRegistry()).register(GpuMemory())
print(generate_latest(registry).decode())
"""
    for folder, found in ((tmp_path, ["3e+09", "8e+09"]), (tmp_path / "none", [])):
        environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert (
            re.findall(r'^dsv4_gpu_memory_(?:used|total)_bytes\{gpu="0"\} (\S+)$', done.stdout, re.M) == found
        )
        assert 'gpu="1"' not in done.stdout


def test_store_is_bounded_and_has_owners() -> None:
    store = Store(10_000)

    def response(number: int) -> dict[str, Any]:
        return {"id": f"r{number}", "output": [{"id": f"m{number}", "text": "x" * 1000}]}

    for number in range(50):
        store.put("a", [{"id": f"i{number}", "role": "user"}, {"role": "user"}], response(number))
        assert store.num_bytes <= store.max_bytes
        assert store.get("a", f"r{number}")[1] == response(number)
        assert store.item("a", f"m{number}")["text"] and store.item("a", f"i{number}")["role"] == "user"
    kept = [number for number in range(50) if ("a", f"r{number}") in store._kept]
    assert kept == list(range(50 - len(kept), 50)) and 5 < len(kept) < 10, "the latest ones"
    assert len(store._responses_of) == 2 * len(kept)
    for owner, id in (("b", "r49"), ("a", "r0")):
        with pytest.raises(Exception, match="not found"):
            store.get(owner, id)
    store.put("a", [], {"id": "huge", "output": [{"id": "m", "text": "x" * 20_000}]})
    assert store.drop("a", "r49") and not store.drop("a", "r49") and not store.drop("a", "huge")
    for number in kept[:-1]:
        assert store.drop("a", f"r{number}")
    assert store.num_bytes == 0 and not store._responses_of
    for ours, input in (("first", []), ("second", [{"id": "m1"}]), ("third", [{"id": "m1"}])):
        output = [] if input else [{"id": "m1"}]
        store.put("a", input, {"id": ours, "output": output})
    for ours in ("third", "first"):  # two that went on from one response
        assert store.drop("a", ours) and store.item("a", "m1") == {"id": "m1"}, "another one has it"
    assert store.drop("a", "second") and not store._responses_of


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_behind_nginx(server: Server, tmp_path: Path) -> None:
    """The example as it is, but for its ports, certificates and folders."""
    port, example = free_port(), (ROOT / "examples" / "nginx.conf").read_text()
    for ours, theirs in (
        ("listen 443 ssl;", f"listen 127.0.0.1:{port};"),
        ("127.0.0.1:8000", f"127.0.0.1:{server.port}"),
    ):
        assert ours in example
        example = example.replace(ours, theirs)
    example = re.sub(r"ssl_certificate.*;", "", example)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f"{kind}_temp_path {tmp_path / kind};" for kind in kinds)
    config = tmp_path / "nginx.conf"
    config.write_text(
        f"user root; daemon off; pid {tmp_path / 'pid'}; error_log {tmp_path / 'errors'}; events {{}}"
        f" http {{ {folders} access_log off; {example} }}"
    )
    process = subprocess.Popen(["nginx", "-c", str(config), "-e", str(tmp_path / "errors")])
    try:
        wait(lambda: (tmp_path / "pid").exists() or process.poll() is not None, 10)
        assert process.poll() is None, (tmp_path / "errors").read_text()
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
            body = json.dumps({**CHAT, "max_tokens": 60, "ignore_eos": True, "stream": True}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            began = time.monotonic()
            sock.sendall(head.encode() + body)
            parts, arrivals = [sock.recv(1 << 16)], [time.monotonic() - began]
            while b"[DONE]" not in parts[-1]:
                parts.append(sock.recv(1 << 16))
                arrivals.append(time.monotonic() - began)
        assert b"200 OK" in parts[0] and len(parts) > 4, parts
        assert arrivals[0] < 0.7 * arrivals[-1], f"as they come, not all at once: {arrivals}"
        for key, status in (("wrong", 401), (KEY, 200)):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert connection.getresponse().status == status
            connection.close()
        huge = json.dumps({"prompt": "x" * (9 << 20), "max_tokens": 1}).encode()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", huge, headers)
        assert b"context_length_exceeded" in connection.getresponse().read(), "read by dsv4"
        connection.close()
    finally:
        process.terminate()
        process.wait(10)
