"""The server's overhead: what passes outside the engine, over kept-alive connections, 200-token prompts.

    python -m bench.serve_latency [--streams 16] [--seconds 10]

The engine's process is replaced by one that computes nothing and gives each sequence a token every 4 ms. Its
token's text is the time it was made. Three clocks are read, all the same one (CLOCK_MONOTONIC):

    in     from before the client writes its request until the engine's process has read it
    out    from before the engine's process writes a token until the server has written it to the client
    first  in + out of a request's first token: the overhead of a request
    seen   as out, until the client has read it: with the client's own time, which is not the server's

All requests count, also the first ones of all streams, which arrive at once and wait for each other; `burst`
shows them alone. With three cores or more, server, engine and clients get cores of their own. With fewer they
take turns, and the figures are an upper bound; `cpu` does not depend on that. Prints JSON.
"""

import argparse
import asyncio
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEP_SECONDS = 0.004
TOKENS = 64
WORDS = (
    "the",
    "boat",
    "is",
    "blue",
    "and",
    "it",
    "can",
    "jump",
    "over",
    "big",
    "trees",
    "while",
    "dog",
    "water",
)
PROMPT_WORDS = 200
_TEXT = re.compile(rb'"text":"(\d+) "')


def pin(*cores: int) -> None:
    """To cores of one's own, numbered among those there are, if there are enough."""
    there = sorted(os.sched_getaffinity(0))
    if len(there) >= 3:
        os.sched_setaffinity(0, {there[at] for at in cores})


def null_worker(descriptor: int) -> None:
    """Speaks the wire's language and computes nothing."""
    from dsv4.engine.request import Delta, Token
    from dsv4.serve import wire

    sock, frames = socket.socket(fileno=descriptor), wire.Frames()
    running: dict[str, int] = {}
    status = wire.Status()
    while True:
        end = time.monotonic() + STEP_SECONDS
        started: dict[str, int] = {}
        while select.select([sock], [], [], max(0.0, end - time.monotonic()))[0]:
            data = sock.recv(1 << 20)
            if not data:
                return
            for body in frames.push(data):
                message = wire.read(wire.to_engine, body)
                if isinstance(message, wire.Start):
                    sock.sendall(wire.frame(wire.Ready(1 << 20, 256, 4096, [], status)))
                elif isinstance(message, wire.Submit):
                    started[message.request.id] = time.monotonic_ns()
                    sock.sendall(wire.frame(wire.Accepted(message.request.id)))
                elif isinstance(message, wire.Cancel):
                    running.pop(message.request_id, None)
            if started:  # a first token at once: its text says when the request arrived
                break
        running |= dict.fromkeys(started, 0)
        deltas = []
        for id in started or list(running):
            running[id] += 1
            text = f"{started.get(id) or time.monotonic_ns()} "
            deltas.append(Delta(id, Token(5), text, "length" if running[id] >= TOKENS else None))
        running = {id: count for id, count in running.items() if count < TOKENS}
        if deltas:
            sock.sendall(wire.frame(wire.Stepped(deltas, status, list(started))))


class Stamped:
    """A transport that notes when what was written."""

    def __init__(self, transport: Any, written: list[tuple[int, bytes]]) -> None:
        self._transport, self._written = transport, written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._transport.write(data)
        self._written.append((time.monotonic_ns(), data))


def serve(port: int, stamps: Path) -> None:
    from dsv4.config import EngineConfig
    from dsv4.models import EMBEDDED
    from dsv4.serve import client, connections
    from dsv4.serve.server import ServerConfig
    from dsv4.serve.server import serve as run

    async def launch() -> Any:
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, "--worker", str(theirs.fileno())]
        process = await asyncio.create_subprocess_exec(*command, pass_fds=(theirs.fileno(),))
        theirs.close()
        pin(0)
        return client._Life(process, *await asyncio.open_connection(sock=ours))

    made, written = connections.Connection.connection_made, list[tuple[int, bytes]]()
    client._launch = launch
    connections.Connection.connection_made = lambda self, real: made(self, Stamped(real, written))
    config = ServerConfig(port=port)
    with open(os.devnull, "w", buffering=1) as log:
        run(EMBEDDED, EngineConfig(), config, lambda line: print(line, file=log), lambda done, total: None)
    found = [(int(text), at) for at, data in written for text in _TEXT.findall(data)]
    stamps.write_text(json.dumps(dict(found)))


async def request(reader: Any, writer: Any, prompt: str) -> tuple[int, list[tuple[int, bytes]]]:
    """-> when it began, and what came when; it is read later, so that reading delays no other stream."""
    body = json.dumps({"prompt": prompt, "max_tokens": TOKENS, "stream": True}).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", "", ""]
    data = "\r\n".join(lines).encode() + body
    began = time.monotonic_ns()
    writer.write(data)
    got: list[tuple[int, bytes]] = []
    header = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in header, header
    while True:
        size = int((await reader.readline()).strip() or b"0", 16)
        data = await reader.readexactly(size + 2)
        now = time.monotonic_ns()
        if not size:
            return began, got
        got.append((now, data))


async def health_times(port: int, count: int) -> list[int]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    times = []
    for _ in range(count):
        began = time.monotonic_ns()
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        times.append(time.monotonic_ns() - began)
    writer.close()
    return times


async def load(port: int, streams: int, seconds: float) -> list[list[tuple[int, list[tuple[int, bytes]]]]]:
    """Per stream, its requests one after the other."""

    async def client(seed: int) -> list[tuple[int, list[tuple[int, bytes]]]]:
        chance = random.Random(seed)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        done, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            prompt = " ".join(chance.choice(WORDS) for _ in range(PROMPT_WORDS))
            done.append(await request(reader, writer, prompt))
            await asyncio.sleep(chance.uniform(0, 0.3))
        writer.close()
        return done

    return await asyncio.gather(*(client(seed) for seed in range(streams)))


def shown(nanoseconds: list[int]) -> dict[str, float]:
    ordered = sorted(nanoseconds)
    picks = {"p50_ms": 0.5, "p99_ms": 0.99}
    return {name: round(ordered[int(at * (len(ordered) - 1))] / 1e6, 2) for name, at in picks.items()}


def report(parts: list[list[tuple[int, list[tuple[int, bytes]]]]], written: dict[int, int]) -> dict[str, Any]:
    rows: dict[str, list[int]] = {"in": [], "out": [], "seen": [], "first": [], "burst": []}
    for part in parts:
        for number, (began, got) in enumerate(part):
            made = [(now, int(text)) for now, data in got for text in _TEXT.findall(data)]
            rows["in"].append(made[0][1] - began)
            rows["out"] += [written[at] - at for _, at in made]
            rows["seen"] += [now - at for now, at in made]
            overhead = written[made[0][1]] - began
            rows["first"].append(overhead)
            rows["burst"] += [overhead] if number == 0 else []
    return {"requests": len(rows["first"]), **{name: shown(values) for name, values in rows.items()}}


def cpu_seconds(pid: int) -> float:
    """Of the HTTP process; unlike latencies, it hardly depends on what else the machine does."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(streams: int, seconds: float, stamps: Path) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, __file__, "--serve", str(port), "--stamps", str(stamps)])
    pin(*range(2, len(os.sched_getaffinity(0))))
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        time.sleep(1)
        health = asyncio.run(health_times(port, 500))
        before = cpu_seconds(server.pid)
        parts = asyncio.run(load(port, streams, seconds))
        spent = cpu_seconds(server.pid) - before
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    written = {int(made): at for made, at in json.loads(stamps.read_text()).items()}
    result = {"streams": streams, "health": shown(health), **report(parts, written)}
    return {**result, "cpu_us_per_token": round(1e6 * spent / (result["requests"] * TOKENS))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--worker", type=int)
    parser.add_argument("--serve", type=int)
    parser.add_argument("--stamps", type=Path)
    args = parser.parse_args()
    if args.worker is not None:
        pin(1)
        return null_worker(args.worker)
    if args.serve is not None:
        return serve(args.serve, args.stamps)
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        result = measured(args.streams, args.seconds, Path(folder) / "stamps.json")
    print(json.dumps({**result, "cores": cores, "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
