"""Files for `dsv4 batch`, and runs of it that are killed."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from serve_support import ROOT

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        "strict": True,
    },
}


def line(number: int, url: str = "/v1/chat/completions", **body: Any) -> str:
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": url, "body": body})


def requests(count: int) -> list[str]:
    """Greedy, sampled without a seed, with logprobs, several answers, a call, other routes, bad lines; after
    the first sixty, short ones only."""
    made = []
    for number in range(count):
        if number >= 60:
            made.append(line(number, "/v1/completions", prompt=f"{number} boats", max_tokens=1 + number % 4))
            continue
        ask: dict[str, Any] = {"messages": [{"role": "user", "content": f"What is {number} + {number * 7}?"}]}
        ask |= {"max_tokens": 3 + number % 5, "thinking": {"type": "disabled"}}
        kind = number % 10
        if kind in (0, 5):
            made.append(line(number, **ask, temperature=0))
        elif kind == 1:
            made.append(line(number, **ask, n=2, logprobs=True, top_logprobs=2))
        elif kind == 2:
            made.append(line(number, "/v1/completions", prompt=f"A boat {number}", max_tokens=3))
        elif number == 3:
            made.append(line(number, **{**ask, "tools": [TOOL], "tool_choice": "required", "max_tokens": 40}))
        elif kind == 4:
            made.append(line(number, "/v1/responses", input="Hello", max_output_tokens=16))
        elif kind == 7:
            made.append(
                ['{"custom_id": "cut', line(number, "/v1/nothing"), line(number, messages=[])][
                    number // 10 % 3
                ]
            )
        else:
            made.append(line(number, **ask))
    return made


def command(source: Path, target: Path, *options: object) -> list[str]:
    start = [sys.executable, "-m", "dsv4", "batch", str(source), str(target), "--max-context", "1024"]
    return [*start, "--json", *map(str, options)]


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_at(count: int, source: Path, target: Path, *options: object, seconds: float = 300) -> None:
    """Run until the output has so many lines, then kill -9."""
    process = subprocess.Popen(
        command(source, target, *options),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    end = time.monotonic() + seconds
    try:
        while lines_of(target) < count:
            assert process.poll() is None and time.monotonic() < end, (process.poll(), lines_of(target))
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def finish(source: Path, target: Path, *options: object) -> dict[str, Any]:
    done = subprocess.run(command(source, target, *options), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 4), done.stderr
    summary = json.loads(done.stdout)
    assert done.returncode == (4 if summary["failed"] else 0)
    return summary
