"""Nobody waits behind a long prompt: short ones are answered while it is read."""

import json
import select
import time
from pathlib import Path

from serve_support import KEY, SHORT, Server, wait

LONG = 12_000


def test_short_prompts_are_answered_while_a_long_one_is_read(tmp_path: Path) -> None:
    with Server(tmp_path, "--max-context", 16384, "--max-batch", 4) as server:
        began = time.monotonic()
        server.chat(SHORT, max_tokens=4)
        alone = time.monotonic() - began
        body = json.dumps({"prompt": [5 + at * at % 4000 for at in range(LONG)], "max_tokens": 1})
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        long = server.connection()
        long.request("POST", "/v1/completions", body, headers)
        wait(lambda: server.gauge("dsv4_num_requests_running") == 1, 20)
        waits = []
        for _ in range(2):
            began = time.monotonic()
            answer = server.chat(SHORT, max_tokens=4)
            waits.append(time.monotonic() - began)
            assert answer.usage.completion_tokens == 4
        assert not select.select([long.sock], [], [], 0)[0], "the long prompt was read first"
        # Behind the chunk that was under way, then a few steps in turns with the long one.
        assert max(waits) < 5 + 10 * alone, (waits, alone)
        text = server.raw("GET", "/metrics")[1]
        assert "dsv4_inter_token_latency_seconds_count 9.0" in text
        long.close()
        wait(server.is_idle, 20)
