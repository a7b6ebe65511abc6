"""Attacks on `dsv4 serve` at full size, one after the other, while a client goes on asking.

    python -m bench.serve_attacks [--connections 2000] [--seconds 15]

For each attack: how long /health and an answer of 8 tokens took, how many were told to come back (429, 503),
and how the log has grown. Whoever is answered gets the same answer as before; /health never waits for more
than MAX_HEALTH_SECONDS. The disk that is full holds the log and --prefix-dir: a tmpfs where one can be
mounted, else the server's file-size limit. All traffic is with 127.0.0.1. The last line is JSON.
tests/serve/test_serve_limits.py and test_serve_life.py have small forms of the same.
"""

import argparse
import contextlib
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai

from tests.serve.serve_support import SHORT, Server, wait, worker_pid

DIGITS, SPACES = "0123456789" * 1_000_000, " " * 10_000_000
MAX_HEALTH_SECONDS = 5.0
STALL_SECONDS = 8
DISK_BYTES = 32 << 20
OPTIONS = ("--stall-seconds", STALL_SECONDS, "--prefix-dir")


def connections(server: Server, count: int, beginning: bytes) -> list[socket.socket]:
    made = []
    for _ in range(count):
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        with contextlib.suppress(OSError):
            sock.sendall(beginning)
        made.append(sock)
    return made


@contextlib.contextmanager
def idle(server: Server, count: int) -> Iterator[None]:
    made = connections(server, count, b"")
    yield
    for sock in made:
        sock.close()


@contextlib.contextmanager
def slow_loris(server: Server, count: int) -> Iterator[None]:
    """A byte of a header per second, from all of them."""
    made, is_over = connections(server, count, b"GET / HTTP/1.1\r\nX: "), threading.Event()

    def drip() -> None:
        while not is_over.wait(1):
            for sock in made:
                with contextlib.suppress(OSError):
                    sock.send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    yield
    is_over.set()
    thread.join()
    for sock in made:
        sock.close()


@contextlib.contextmanager
def huge_prompts(server: Server, count: int) -> Iterator[None]:
    is_over = threading.Event()

    def send() -> None:
        bodies = [json.dumps({"prompt": text, "max_tokens": 1}).encode() for text in (DIGITS, SPACES)]
        while not is_over.is_set():
            for body in bodies:
                status = server.post("/v1/completions", body)[0]
                assert status in (400, 429), status

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    yield
    is_over.set()
    for thread in threads:
        thread.join()


def long_prompts(server: Server) -> None:
    """Such as are kept in files."""
    for number in range(3):
        body = {"prompt": f"{number} is a word " * 120, "max_tokens": 1}
        status, answer, _ = server.post("/v1/completions", body)
        assert status == 200, answer


@contextlib.contextmanager
def full_disk(server: Server, count: int) -> Iterator[None]:
    """Under the log and the prefixes; then there is room again, and the log goes on."""
    folder, pids = server.log_file.parent, (server.process.pid, worker_pid(server))
    if os.path.ismount(folder):
        filler = folder / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        long_prompts(server)
        yield
        filler.unlink()
    else:
        limits = [resource.prlimit(pid, resource.RLIMIT_FSIZE, (1024, -1)) for pid in pids]
        long_prompts(server)
        yield
        for pid, limit in zip(pids, limits, strict=True):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
    before = len(server.log)
    server.chat(SHORT, max_tokens=8)
    wait(lambda: len(server.log) > before, 5)


@contextlib.contextmanager
def frozen_engine(server: Server, count: int) -> Iterator[None]:
    """It has work and does nothing: ended and started again, and who waits for it is told."""
    restarts = server.gauge("dsv4_engine_restarts_total")
    os.kill(worker_pid(server), signal.SIGSTOP)
    yield
    wait(lambda: server.raw("GET", "/ready")[0] == 200, 60)
    assert server.gauge("dsv4_engine_restarts_total") == restarts + 1


@contextlib.contextmanager
def nothing(server: Server, count: int) -> Iterator[None]:
    yield


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """A folder that can be filled, or a plain one where nothing can be mounted."""
    with tempfile.TemporaryDirectory() as name:
        options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "dsv4", name]
        is_mounted = subprocess.run(["mount", *options], capture_output=True).returncode == 0
        try:
            yield Path(name)
        finally:
            if is_mounted:
                subprocess.run(["umount", name], check=True)


def measured(
    server: Server, attack: Callable[[Server, int], Any], count: int, seconds: float
) -> dict[str, Any]:
    before, health, answers, told = len(server.log), [], [], 0
    want = server.chat(SHORT, max_tokens=8).choices[0].message
    with attack(server, count):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            assert server.raw("GET", "/health")[0] == 200
            health.append(time.monotonic() - began)
            began = time.monotonic()
            try:
                found = server.chat(SHORT, max_tokens=8).choices[0].message
                assert found == want, (found, want)
                answers.append(time.monotonic() - began)
            except openai.APIStatusError as error:
                assert error.status_code in (429, 503) and "retry-after" in error.response.headers, error
                told += 1
                time.sleep(0.2)
    wait(server.is_idle, 20)
    assert max(health) < MAX_HEALTH_SECONDS, max(health)
    assert answers or told, "nobody was answered"
    assert server.chat(SHORT, max_tokens=8).choices[0].message == want
    return {
        "health_p50_ms": round(1000 * statistics.median(health), 1),
        "health_max_ms": round(1000 * max(health), 1),
        "answers": len(answers),
        "answer_p50_ms": round(1000 * statistics.median(answers or [0]), 1),
        "answer_max_ms": round(1000 * max(answers, default=0), 1),
        "told": told,
        "log_bytes_per_request": (len(server.log) - before) // (len(health) + len(answers)),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=15)
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, args.connections + 200), hard))
    result = {}
    for limit in (None, 64):

        def few(limit: int | None = limit) -> None:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

        with small_disk() as disk, Server(disk, *OPTIONS, disk / "kept", before=few) as server:
            for attack in (nothing, idle, slow_loris, huge_prompts, full_disk, frozen_engine):
                case = f"{attack.__name__}, ulimit -n {limit}" if limit else attack.__name__
                result[case] = measured(server, attack, args.connections, args.seconds)
                print(case, result[case], flush=True)
            assert "Traceback" not in server.log, server.log
    print(json.dumps(result))


if __name__ == "__main__":
    main()
