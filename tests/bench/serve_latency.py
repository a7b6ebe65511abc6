"""What the server adds to the engine's time: requests over kept-alive connections, tokens on their way out.

    PYTHONPATH=. python tests/bench/serve_latency.py [--streams 16] [--seconds 10]

The engine's process is replaced by one that computes nothing and gives each sequence a token every 4 ms. The
token's text is the time it was made; what passes until the client has it is the server's. Prints JSON.
"""

import argparse
import asyncio
import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STEP_SECONDS = 0.004
TOKENS = 64
PROMPT = "The boat is blue and it can jump. " * 20


def null_worker(descriptor: int) -> None:
    """Speaks the wire's language and computes nothing."""
    from dsv4.engine.request import Delta, Token
    from dsv4.serve import wire

    sock, frames = socket.socket(fileno=descriptor), wire.Frames()
    running: dict[str, int] = {}
    status = wire.Status()
    while True:
        now = time.monotonic()
        started: list[str] = []
        while select.select([sock], [], [], max(0.0, now + STEP_SECONDS - time.monotonic()))[0]:
            data = sock.recv(1 << 20)
            if not data:
                return
            for body in frames.push(data):
                message = wire.read(wire.to_engine, body)
                if isinstance(message, wire.Start):
                    sock.sendall(wire.frame(wire.Ready(1 << 20, 256, 4096, [], status)))
                elif isinstance(message, wire.Submit):
                    running[message.request.id] = 0
                    started.append(message.request.id)
                    sock.sendall(wire.frame(wire.Accepted(message.request.id)))
                elif isinstance(message, wire.Cancel):
                    running.pop(message.request_id, None)
            if started:  # a first token at once: its text says when the request arrived
                break
        deltas = []
        for id in started or list(running):
            running[id] += 1
            text = f"{time.monotonic():.6f} "
            deltas.append(Delta(id, Token(5), text, "length" if running[id] >= TOKENS else None))
        running = {id: count for id, count in running.items() if count < TOKENS}
        if deltas or started:
            sock.sendall(wire.frame(wire.Stepped(deltas, status, started)))


def serve(port: int) -> None:
    from dsv4.config import EngineConfig
    from dsv4.models import EMBEDDED
    from dsv4.serve import client
    from dsv4.serve.server import ServerConfig
    from dsv4.serve.server import serve as run

    async def launch() -> Any:
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, "--worker", str(theirs.fileno())]
        process = await asyncio.create_subprocess_exec(*command, pass_fds=(theirs.fileno(),))
        theirs.close()
        return client._Life(process, *await asyncio.open_connection(sock=ours))

    client._launch = launch
    config = ServerConfig(port=port)
    run(EMBEDDED, EngineConfig(), config, lambda line: None, lambda done, total: None)


async def request(reader: Any, writer: Any) -> tuple[float, list[tuple[float, bytes]]]:
    """-> when it began, and what came when; it is read later, so that reading delays no other stream."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": TOKENS, "stream": True}).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", "", ""]
    began = time.monotonic()
    writer.write("\r\n".join(lines).encode() + body)
    got: list[tuple[float, bytes]] = []
    header = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in header, header
    while True:
        size = int((await reader.readline()).strip() or b"0", 16)
        data = await reader.readexactly(size + 2)
        now = time.monotonic()
        if not size:
            return began, got
        got.append((now, data))


def read_times(began: float, got: list[tuple[float, bytes]]) -> list[float]:
    """Seconds: in (until the engine has it), then out, for each token."""
    times: list[float] = []
    for now, data in got:
        for line in data.split(b"\n\n"):
            if line.strip().startswith(b"data: {"):
                made = float(json.loads(line.strip()[6:])["choices"][0]["text"])
                times += [now - made] if times else [made - began, now - made]
    return times


async def measure(port: int, streams: int, seconds: float) -> dict[str, Any]:
    async def client() -> list[tuple[float, list[tuple[float, bytes]]]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        done, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            done.append(await request(reader, writer))
            await asyncio.sleep(random.uniform(0, 0.3))  # or all would come at once, and wait for each other
        writer.close()
        return done

    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    health = []
    for _ in range(500):
        began = time.monotonic()
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        health.append(time.monotonic() - began)
    writer.close()
    parts = await asyncio.gather(*(client() for _ in range(streams)))
    found = [read_times(*one) for part in parts for one in part]
    inward, outward = [times[0] for times in found], [out for times in found for out in times[1:]]
    overhead = [times[0] + times[1] for times in found]

    def shown(values: list[float]) -> dict[str, float]:
        ordered = sorted(values)
        picks = {"p50": 0.5, "p99": 0.99}
        return {
            f"{name}_ms": round(1000 * ordered[int(at * (len(ordered) - 1))], 2) for name, at in picks.items()
        }

    return {
        "requests": len(found),
        "streams": streams,
        "health": shown(health),
        "in": shown(inward),
        "out": shown(outward),
        "first_token_overhead": shown(overhead),
    }


def cpu_seconds(pid: int) -> float:
    """Of the HTTP process; unlike latencies, it does not depend on what else the machine does."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--worker", type=int)
    parser.add_argument("--serve", type=int)
    args = parser.parse_args()
    if args.worker is not None:
        return null_worker(args.worker)
    if args.serve is not None:
        return serve(args.serve)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, __file__, "--serve", str(port)])
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        time.sleep(1)
        before = cpu_seconds(server.pid)
        result = asyncio.run(measure(port, args.streams, args.seconds))
        spent = cpu_seconds(server.pid) - before
        result["cpu_us_per_token"] = round(1e6 * spent / (result["requests"] * TOKENS))
    finally:
        server.terminate()
        server.wait(20)
    print(json.dumps({**result, "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
