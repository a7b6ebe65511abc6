"""Attacks on `dsv4 serve` at full size, one after the other, while a client goes on asking.

    PYTHONPATH=. python tests/bench/serve_attacks.py [--connections 2000] [--seconds 15]

For each attack: how long /health and an answer of 8 tokens took, and how the log has grown. All traffic is
with 127.0.0.1. The last line is JSON. tests/serve/test_serve_limits.py has small forms of the same.
"""

import argparse
import contextlib
import json
import resource
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.serve.serve_support import SHORT, Server, wait

DIGITS, SPACES = "0123456789" * 1_000_000, " " * 10_000_000


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


@contextlib.contextmanager
def nothing(server: Server, count: int) -> Iterator[None]:
    yield


def measured(
    server: Server, attack: Callable[[Server, int], Any], count: int, seconds: float
) -> dict[str, Any]:
    before, health, answers = len(server.log), [], []
    with attack(server, count):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for times, ask in (
                (health, lambda: server.raw("GET", "/health")),
                (answers, lambda: server.chat(SHORT, max_tokens=8)),
            ):
                began = time.monotonic()
                ask()
                times.append(time.monotonic() - began)
    wait(server.is_idle, 20)
    return {
        "health_p50_ms": round(1000 * statistics.median(health), 1),
        "health_max_ms": round(1000 * max(health), 1),
        "answer_p50_ms": round(1000 * statistics.median(answers), 1),
        "answer_max_ms": round(1000 * max(answers), 1),
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

        with tempfile.TemporaryDirectory() as name, Server(Path(name), before=few) as server:
            for attack in (nothing, idle, slow_loris, huge_prompts):
                case = f"{attack.__name__}, ulimit -n {limit}" if limit else attack.__name__
                result[case] = measured(server, attack, args.connections, args.seconds)
                print(case, result[case], flush=True)
            assert "Traceback" not in server.log, server.log
    print(json.dumps(result))


if __name__ == "__main__":
    main()
