"""Many clients at once against `dsv4 serve` on the embedded model, and a plain Transformers loop beside it.

python -m bench.serve_load [--clients 64] [--seconds 300]: random lengths, streams and whole answers,
cancels, disconnects, wrong bodies, penalties, seeds, grammars, tools in three APIs, prefixes in files. Every
completed answer must equal the same request run alone on a server without prefix cache or batching; no error
but the planned ones (400 for wrong bodies, 429 for a full queue); memory flat after warm-up; all pages free
at the end. The last line is JSON.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

from tests.serve.serve_support import KEY, Server, wait, worker_pid

HEADERS = {"Authorization": f"Bearer {KEY}"}
WORDS = (
    *("the", "boat", "was", "blue", "and", "a", "little", "girl", "saw", "one"),
    "big",
    "dog",
    "jump",
    "tree",
)
NUM_REQUESTS = 48
WARM_UP = 0.2  # share of the time after which memory must be flat
MEMORY_SECONDS = 1.0
MAX_SPREAD = 0.05  # of memory, above its median


# What a request asks for beside its text, in turns.
MIXED: list[dict[str, Any]] = [
    {},
    {"min_tokens": 6, "bad_words": ["boat", "dog"], "temperature": 0.7, "seed": 13},
    {"allowed_token_ids": list(range(5, 1500)), "include_stop_str_in_output": True, "stop": ["a"]},
    {"stop_token_ids": [22, 229], "temperature": 1.0, "seed": 14},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 0.8, "top_p": 0.9, "seed": 11},
    {"logit_bias": {"73": -100, "400": 5}},
    {"repetition_penalty": 1.3, "stop": ["."]},
    {"temperature": 1.2, "min_p": 0.05, "seed": 12, "presence_penalty": -0.5},
]


def requests(chance: random.Random, max_tokens: int) -> list[dict[str, Any]]:
    """A fixed set of requests, greedy or with a seed; a third of them begin alike for more than a page."""
    shared = " ".join(chance.choice(WORDS) for _ in range(320))
    made: list[dict[str, Any]] = []
    for number in range(NUM_REQUESTS):
        text = " ".join(chance.choice(WORDS) for _ in range(int(2 ** chance.uniform(1, 8))))
        text = f"{shared} {text}" if number % 3 == 0 else text
        body: dict[str, Any] = {"temperature": 0, "max_tokens": chance.randint(1, max_tokens)}
        if number % 2:
            body |= {"prompt": text, "path": "/v1/completions"}
        else:
            thinking = {"type": "enabled" if number % 4 else "disabled"}
            body |= {"messages": [{"role": "user", "content": text}], "thinking": thinking}
            body["path"] = "/v1/chat/completions"
            if number % 8 == 0:
                body["response_format"] = {"type": "json_object"}
        body |= MIXED[number % len(MIXED)]
        if "min_tokens" in body:
            body["min_tokens"] = min(body["min_tokens"], body["max_tokens"])
        made.append(body)
    return made + [body for at in range(4) for body in calls(f"{chance.choice(WORDS)} {at}", at % 2 == 0)]


def calls(text: str, must: bool) -> Iterator[dict[str, Any]]:
    """The three APIs with tools, which must be called or may; custom tools where an API has them."""
    said: Any = [{"role": "user", "content": text}]
    schema = {"type": "object", "properties": {"c": {"enum": ["red", "blue"]}}, "required": ["c"]}
    pick, choice = {"name": "pick", "parameters": schema}, "required" if must else "auto"
    form = {"syntax": "regex", "definition": "go [0-9]{2}"}
    asked: dict[str, Any] = {"temperature": 0, "tool_choice": choice}
    chat = {**asked, "messages": said, "max_tokens": 150, "path": "/v1/chat/completions"}
    yield {**chat, "tools": [{"type": "function", "function": pick}]}
    go = {"name": "go", "format": {"type": "grammar", "grammar": form}}
    yield {**chat, "tools": [{"type": "custom", "custom": go}], "thinking": {"type": "disabled"}}
    flat = {**asked, "input": said, "max_output_tokens": 150, "path": "/v1/responses", "store": must}
    yield {**flat, "tools": [{"type": "custom", "name": "go", "format": {"type": "grammar", **form}}]}
    ours = {"messages": said, "model": "tiny", "max_tokens": 150, "path": "/v1/messages", "temperature": 0}
    tool = {"name": "pick", "input_schema": schema}
    yield {**ours, "tools": [tool], "tool_choice": {"type": "any" if must else "auto"}}


def called(call: dict[str, Any]) -> str:
    inner = call.get("function") or call.get("custom") or call
    return "".join(inner.get(key) or "" for key in ("name", "arguments", "input"))


def shown(answer: dict[str, Any]) -> tuple[str, str, str | None]:
    """Reasoning, text with calls, and how it ended, of an answer or of a chunk of one."""
    kind = answer.get("type", "")
    if kind in ("response.completed", "response.incomplete"):
        answer = answer["response"]
    if answer.get("choices"):
        choice = answer["choices"][0]
        inner = choice.get("message") or choice.get("delta") or choice
        text = inner.get("content") or inner.get("text") or ""
        text += "".join(map(called, inner.get("tool_calls") or ()))
        return inner.get("reasoning_content") or "", text, choice["finish_reason"]
    if answer.get("object") == "response":
        parts = [part for item in answer["output"] for part in item.get("content") or [item]]
        thought = "".join(part["text"] for part in parts if part["type"] == "reasoning_text")
        text = "".join(part["text"] for part in parts if part["type"] == "output_text")
        return thought, text + "".join(called(part) for part in parts if "call_id" in part), answer["status"]
    if kind == "message":
        blocks = answer["content"]
        thought = "".join(block.get("thinking", "") for block in blocks)
        inputs = (block["name"] + json.dumps(block["input"]) for block in blocks if "input" in block)
        return (
            thought,
            "".join(block.get("text", "") for block in blocks) + "".join(inputs),
            answer["stop_reason"],
        )
    delta = answer.get("delta") if isinstance(answer.get("delta"), dict) else {}
    text = (
        delta.get("text", "")
        + delta.get("partial_json", "")
        + answer.get("content_block", {}).get("name", "")
    )
    return delta.get("thinking", ""), text, delta.get("stop_reason")


@dataclass
class Seen:
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    cached: int = 0


class Load:
    def __init__(self, port: int, truth: dict[int, tuple[str, str, str | None]], bodies: list[Any]) -> None:
        self.port, self.truth, self.bodies, self.seen = port, truth, bodies, Seen()

    async def client(self, seed: int, end: float) -> None:
        chance = random.Random(seed)
        limits = httpx.Timeout(600)  # a busy machine is no mistake of the server
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}", headers=HEADERS, timeout=limits
        ) as http:
            while time.monotonic() < end:
                number, draw = chance.randrange(len(self.bodies)), chance.random()
                body = dict(self.bodies[number])
                path = body.pop("path")
                try:
                    if draw < 0.08:
                        await self.leave(body, path, chance)
                    elif draw < 0.14:
                        await self.wrong_body(http, path)
                    elif draw < 0.18:
                        await self.hostile(http, chance)
                    elif draw < 0.6:
                        await self.stream(http, number, body, path, chance.random() < 0.15)
                    else:
                        await self.whole(http, number, body, path)
                except httpx.HTTPError as error:
                    self.seen.wrong.append(f"{type(error).__name__}: {error}")

    async def hostile(self, http: httpx.AsyncClient, chance: random.Random) -> None:
        """A regular expression of 96 MB of text, each its own."""
        letters = "".join(chance.choices("abcdefgh", k=6))
        regex = f"(((({letters}{{99}}){{99}}){{99}}){{99}})"
        body = {"prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": regex}}
        answer = await http.post("/v1/completions", json=body)
        if answer.status_code not in (200, 400, 429):
            self.seen.wrong.append(f"status {answer.status_code}: {answer.text[:200]}")
        self.seen.outcomes[f"hostile {answer.status_code}"] += 1

    async def pause(self, answer: httpx.Response) -> None:
        self.seen.outcomes["429"] += 1
        await asyncio.sleep(float(answer.headers["retry-after"]) * random.uniform(0.2, 0.6))

    async def whole(self, http: httpx.AsyncClient, number: int, body: Any, path: str) -> None:
        answer = await http.post(path, json=body)
        if answer.status_code == 429:
            return await self.pause(answer)
        if answer.status_code != 200:
            return self.seen.wrong.append(f"status {answer.status_code}: {answer.text[:200]}")
        done = answer.json()
        self.check(number, shown(done))
        self.count(done["usage"])
        self.seen.outcomes["whole"] += 1

    async def stream(self, http: httpx.AsyncClient, number: int, body: Any, path: str, cancels: bool) -> None:
        began, first, parts, finish = time.monotonic(), 0.0, ["", ""], None
        body |= {"stream": True}
        if "completions" in path:
            body |= {"return_progress": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", path, json=body) as answer:
            if answer.status_code == 429:
                return await self.pause(answer)
            if answer.status_code != 200:
                return self.seen.wrong.append(f"status {answer.status_code}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if chunk.get("error") or chunk.get("type") == "error":
                    return self.seen.wrong.append(str(chunk))
                if chunk.get("choices", True):
                    reasoning, text, ended = shown(chunk)
                    finish = ended or finish
                    parts = [parts[0] + reasoning, parts[1] + text]
                    first = first or (time.monotonic() if reasoning or text else 0.0)
                    if cancels and len(parts[0] + parts[1]) > 10:
                        self.seen.outcomes["cancelled"] += 1
                        return
                else:
                    self.count(chunk["usage"])
                    tokens = chunk["usage"]["completion_tokens"]
                    if first:
                        self.seen.first_ms.append(1000 * (first - began))
                    if first and tokens > 2:
                        self.seen.token_ms.append(1000 * (time.monotonic() - first) / (tokens - 1))
        self.check(number, (parts[0], parts[1], finish))
        self.seen.outcomes["streamed"] += 1

    async def leave(self, body: Any, path: str, chance: random.Random) -> None:
        """A client that vanishes: a reset, at any moment of the request or the answer."""
        data = json.dumps({**body, "stream": chance.random() < 0.5}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write((head.encode() + data)[: chance.choice([20, len(head) + 5, 10**6])])
        await writer.drain()
        await asyncio.sleep(chance.uniform(0, 1))
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        self.seen.outcomes["vanished"] += 1

    async def wrong_body(self, http: httpx.AsyncClient, path: str) -> None:
        answer = await http.post(path, json={"frobnicate": 1})
        if answer.status_code != 400:
            self.seen.wrong.append(f"a wrong body got status {answer.status_code}")
        self.seen.outcomes["400"] += 1

    def check(self, number: int, found: tuple[str, str, str | None]) -> None:
        if found != self.truth[number]:
            self.seen.wrong.append(f"request {number} gave {found}, alone {self.truth[number]}")

    def count(self, usage: Any) -> None:
        self.seen.num_tokens += usage.get("completion_tokens") or usage["output_tokens"]
        self.seen.cached += usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def watch(pids: dict[str, int], end: float) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {name: [] for name in pids}
    while time.monotonic() < end:
        for name, pid in pids.items():
            found[name].append(resident_bytes(pid))
        await asyncio.sleep(MEMORY_SECONDS)
    return found


async def run(load: Load, pids: dict[str, int], clients: int, seconds: float) -> dict[str, list[int]]:
    end = time.monotonic() + seconds
    memory, *_ = await asyncio.gather(watch(pids, end), *(load.client(seed, end) for seed in range(clients)))
    return memory


def alone(bodies: list[Any]) -> dict[int, tuple[str, str, str | None]]:
    with tempfile.TemporaryDirectory() as name:
        options = ("--max-batch", 1, "--prefix-snapshots", 0)
        with Server(Path(name), *options) as server:
            truth = {}
            for number, body in enumerate(bodies):
                body = dict(body)
                status, done, _ = server.post(body.pop("path"), body)
                assert status == 200, done
                truth[number] = shown(done)
            return truth


def percentile(values: list[float], share: float) -> float:
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 1) if values else 0.0


def transformers_loop(bodies: list[Any], seconds: float) -> dict[str, float]:
    """The same shapes in Transformers, one request after the other: weights do not matter for the speed."""
    import torch
    import transformers

    from dsv4.models import EMBEDDED
    from dsv4.text.tokenizer import Tokenizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    raw = json.loads((EMBEDDED / "config.json").read_text())
    raw.pop("quantization_config", None)
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**raw)).float().eval()
    tokenizer, done, tokens, began = Tokenizer.load(EMBEDDED), 0, 0, time.monotonic()
    chance = random.Random(0)
    while time.monotonic() - began < seconds:
        body = chance.choice(bodies)
        text = body.get("prompt") or (body.get("messages") or body["input"])[0]["content"]
        ids = torch.tensor([[0, *tokenizer.encode_text(text)]])
        size = body.get("max_tokens") or body["max_output_tokens"]
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=size, min_new_tokens=size, do_sample=False, pad_token_id=2)
        done, tokens = done + 1, tokens + size
    taken = time.monotonic() - began
    return {"requests_per_s": round(done / taken, 2), "tokens_per_s": round(tokens / taken, 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument(
        "--cache-pages", type=int, default=64, help="10 and --max-tokens 250: sequences pause"
    )
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--transformers-seconds", type=float, default=30)
    args = parser.parse_args()
    bodies = requests(random.Random(7), args.max_tokens)
    truth = alone(bodies)
    with tempfile.TemporaryDirectory() as name:
        options = ("--max-batch", args.max_batch, "--max-queue", 40, "--queue-seconds", 100)
        options += ("--cache-pages", args.cache_pages)
        # Small enough that files are evicted too.
        options += ("--prefix-dir", f"{name}/kept", "--prefix-dir-bytes", 20_000_000)
        with Server(Path(name), *options, "--prefix-snapshots", 16) as server:
            pids = {"http": server.process.pid, "engine": worker_pid(server)}
            load = Load(server.port, truth, bodies)
            memory = asyncio.run(run(load, pids, args.clients, args.seconds))
            wait(server.is_idle, 30)
            kept, pauses = server.gauge("dsv4_cache_pages_kept"), server.gauge("dsv4_num_preemptions_total")
            restarts = server.gauge("dsv4_engine_restarts_total")
    seen = load.seen
    completed = seen.outcomes["whole"] + seen.outcomes["streamed"]
    report = {
        "clients": args.clients,
        "seconds": args.seconds,
        "outcomes": dict(seen.outcomes),
        "requests_per_s": round(completed / args.seconds, 2),
        "tokens_per_s": round(seen.num_tokens / args.seconds, 1),
        "first_ms_p50_p99": [percentile(seen.first_ms, 0.5), percentile(seen.first_ms, 0.99)],
        "token_ms_p50_p99": [percentile(seen.token_ms, 0.5), percentile(seen.token_ms, 0.99)],
        "cached_tokens": seen.cached,
        "pages_kept": kept,
        "pauses": pauses,
    }
    for who, values in memory.items():
        flat = values[int(WARM_UP * len(values)) :]
        middle = statistics.median(flat)
        report[f"{who}_mb"] = round(middle / 1e6, 1)
        report[f"{who}_spread"] = [round(min(flat) / middle - 1, 4), round(max(flat) / middle - 1, 4)]
        if max(flat) > (1 + MAX_SPREAD) * middle:
            seen.wrong.append(f"memory is not flat: {who} went from {middle} bytes to {max(flat)}")
    if args.transformers_seconds:
        report["transformers"] = transformers_loop(bodies, args.transformers_seconds)
    report["wrong"] = len(seen.wrong)
    for problem in seen.wrong[:10]:
        print(problem)
    print(json.dumps(report))
    assert not seen.wrong and not restarts and completed, "see above"


if __name__ == "__main__":
    main()
