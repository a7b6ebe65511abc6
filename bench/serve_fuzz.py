"""schemathesis against `dsv4 serve` on the embedded model: no request may be answered with a 5xx.

python -m bench.serve_fuzz [--cases 5000]: bodies made from /openapi.json, right and wrong ones. The
context is short, so that answers are. The last line is JSON: how many requests got which status.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.serve.serve_support import KEY, Server

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens")
ROUTES += ("/v1/responses", "/tokenize", "/detokenize")  # all that have bodies
NUM_OPERATIONS = len(ROUTES)
ROUND = 700  # cases between two lines of progress


def fuzz(server: Server, cases: int, seed: int, seconds: float) -> Counter[str]:
    """-> how many of the server's answers had which status; fails on any 5xx."""
    url = f"http://127.0.0.1:{server.port}/openapi.json"
    # One worker: with several, CPython 3.11 fails in ast.parse (recursion depth mismatch).
    command = [sys.executable, "-m", "schemathesis.cli", "run", url, "--checks", "not_a_server_error"]
    command += ["--phases", "fuzzing", "--max-examples", str(-(-cases // NUM_OPERATIONS)), "--workers", "1"]
    command += ["--include-method", "POST", "--seed", str(seed), "--suppress-health-check", "all"]
    command += ["-H", f"Authorization: Bearer {KEY}", "--request-timeout", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    counts: Counter[str] = Counter()
    routes: Counter[str] = Counter()
    line = r'dsv4_requests_total{route="(.*?)",status="(\d+)"} (\S+)'
    for route, status, count in re.findall(line, server.raw("GET", "/metrics")[1]):
        counts[status] += int(float(count))
        routes[route] += int(float(count))
    missed = [route for route in ROUTES if routes[route] < cases / NUM_OPERATIONS / 4]
    assert not missed, f"hardly any bodies were made for {missed}: {routes}"
    assert not [status for status in counts if status.startswith("5")], counts
    return counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        server = Server(Path(name), "--max-batch", 8, "--max-context", 48)
        with server:
            counts, seed = Counter[str](), args.seed
            # A simple operation has fewer different bodies than it is asked for: go on until all are many.
            while sum(counts.values()) < args.cases:
                counts = fuzz(server, min(ROUND, args.cases - sum(counts.values())), seed, 3600)
                seed += 1
                print(f"{sum(counts.values())} answers so far: {dict(sorted(counts.items()))}", flush=True)
            assert server.is_idle(), "pages are left behind"
            assert "engine: the engine's process has died" not in server.log
    print(json.dumps({"answers": sum(counts.values()), "statuses": dict(sorted(counts.items()))}))


if __name__ == "__main__":
    main()
