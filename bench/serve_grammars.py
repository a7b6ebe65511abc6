"""Hostile grammars beside 16 streams of `dsv4 serve` on the embedded model: the pauses that streams see.

python -m bench.serve_grammars [--count 200]: powers, nested repeats, exponential $ref, thousands of enums,
deep anyOf, long repeats, no two equal. Gaps between chunks of a stream are measured in turns: with nothing
beside it, with as many plain requests, with the grammars, with nothing again. So the pauses of the machine,
and those of any request, stand beside those of grammars; `step_cpu_ms`, the time of the engine's thread on a
core between two chunks, is hardly changed by a busy machine. Each must be answered or refused; memory must
come back. The last line is JSON.
"""

import argparse
import http.client
import itertools
import json
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.serve_load import resident_bytes
from tests.serve.serve_support import KEY, Server, worker_pid

STREAMS, BESIDE = 16, 4
MAX_SECONDS, MAX_GROWTH = 1.0, 50e6
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


def hostile(number: int) -> dict[str, Any]:
    """What a request of this number asks for; no two are equal."""
    word = "".join(random.Random(number).choices("abcdefgh", k=6))
    kind = number % 7
    if kind < 4:
        regexes = (f"(((({word}{{99}}){{99}}){{99}}){{99}})", f"({word}?){{300}}({word}){{300}}")
        regexes += (f"{word}{{260000}}", f"(({word}|a)*b{{50}}){{50}}")
        return {"structured_outputs": {"regex": regexes[kind]}}
    if kind == 4:
        names = [f"{word}{at}" for at in range(40)]
        pairs = itertools.pairwise(names)
        twice = {a: {"allOf": [{"$ref": f"#/$defs/{b}"}, {"$ref": f"#/$defs/{b}"}]} for a, b in pairs}
        schema: Any = {"$defs": {**twice, names[-1]: {"type": "string"}}, "$ref": f"#/$defs/{names[0]}"}
    elif kind == 5:
        schema = {"enum": [f"{word[:2]}{at}" for at in range(6000 if number % 2 else 10_000)]}
    else:
        schema = {"type": "string", "const": word}
        for _ in range(9):
            schema = {"anyOf": [schema, {"type": "object", "properties": {word: schema}}]}
    named = {"name": "s", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


class Streams:
    """The gaps between chunks, under the name of what was beside them."""

    def __init__(self, port: int, worker: int) -> None:
        self.port, self.beside = port, "warming up"
        self.gaps: dict[str, list[float]] = {}
        self.on_core: dict[str, list[float]] = {}
        self._schedule = Path(f"/proc/{worker}/task/{worker}/schedstat")
        self.is_over = threading.Event()
        self.threads = [threading.Thread(target=self._go_on, args=(at,)) for at in range(STREAMS)]
        for thread in self.threads:
            thread.start()

    def _go_on(self, number: int) -> None:
        while not self.is_over.is_set():
            body = {"prompt": f"Story {number}:", "max_tokens": 900, "ignore_eos": True, "stream": True}
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            connection.request("POST", "/v1/completions", json.dumps(body), HEADERS)
            answer, last, ran = connection.getresponse(), 0.0, 0.0
            assert answer.status == 200, answer.read()
            while not self.is_over.is_set() and (line := answer.readline()):
                if line.startswith(b"data: {"):
                    now, beside = time.monotonic(), self.beside
                    if last:
                        self.gaps.setdefault(beside, []).append(1000 * (now - last))
                    if number == 0:
                        total = int(self._schedule.read_text().split()[0]) / 1e6
                        if last:
                            self.on_core.setdefault(beside, []).append(total - ran)
                        ran = total
                    last = now
            connection.close()


def ask(port: int, bodies: list[Any], taken: list[float], statuses: Counter[int]) -> None:
    for body in bodies:
        began, connection = time.monotonic(), http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), HEADERS)
        answer = connection.getresponse()
        answer.read()
        taken.append(time.monotonic() - began)
        statuses[answer.status] += 1
        connection.close()


def beside(streams: Streams, name: str, bodies: list[Any]) -> dict[str, Any]:
    streams.beside = name
    taken, statuses = list[float](), Counter[int]()
    shares = [bodies[at::BESIDE] for at in range(BESIDE)]
    threads = [threading.Thread(target=ask, args=(streams.port, s, taken, statuses)) for s in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not bodies:
        time.sleep(20)
    streams.beside = "between"
    facts: dict[str, Any] = {"chunks": len(streams.gaps[name])}
    for what, known in (("gap_ms", streams.gaps), ("step_cpu_ms", streams.on_core)):
        values = sorted(known[name])
        facts[what] = {f"p{100 * at:g}": round(values[int(at * len(values))], 1) for at in (0.5, 0.99, 0.999)}
        facts[what] |= {"max": round(values[-1], 1), "over_100": sum(value > 100 for value in values)}
    if taken:
        late = sum(one > MAX_SECONDS for one in taken)
        facts |= {
            "statuses": dict(statuses),
            "slowest_s": round(max(taken), 2),
            f"over_{MAX_SECONDS:g}_s": late,
        }
    return facts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200)
    args = parser.parse_args()
    ours = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "thinking": {"type": "disabled"}}
    with tempfile.TemporaryDirectory() as name:
        options = ("--max-batch", STREAMS + BESIDE, "--cache-pages", 128)
        with Server(Path(name), *options) as server:
            worker = worker_pid(server)
            streams = Streams(server.port, worker)
            time.sleep(5)
            before = resident_bytes(worker)
            plain = [{**ours, "seed": at} for at in range(args.count)]
            report: dict[str, Any] = {"nothing": beside(streams, "nothing", [])}
            report["plain requests"] = beside(streams, "plain requests", plain)
            grammars = [{**ours, **hostile(at)} for at in range(args.count)]
            report["hostile grammars"] = beside(streams, "hostile grammars", grammars)
            report["nothing again"] = beside(streams, "nothing again", [])
            streams.is_over.set()
            for thread in streams.threads:
                thread.join()
            time.sleep(2)
            report["engine_mb"] = [round(before / 1e6), round(resident_bytes(worker) / 1e6)]
            restarts = server.gauge("dsv4_engine_restarts_total")
    print(json.dumps(report, indent=1))
    print(json.dumps(report))
    assert not restarts and set(report["hostile grammars"]["statuses"]) <= {200, 400}, "see above"
    assert report["engine_mb"][1] - report["engine_mb"][0] < MAX_GROWTH / 1e6, "memory did not come back"


if __name__ == "__main__":
    main()
