"""A real `dsv4 serve` in a process of its own, on the embedded model, and ways to talk to it."""

import http.client
import json
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Not on a bare GPU machine, where the rest of the tests must run all the same; `make test` installs it.
openai = pytest.importorskip("openai")
ROOT = Path(__file__).parents[2]
KEY = "a-key-for-the-tests-0123456789"
OTHER_KEY = "another-key-of-somebody"
QUESTION: list[Any] = [{"role": "user", "content": "What is 27 + 58?"}]
SHORT: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
STORY: list[Any] = [{"role": "user", "content": "Write a short story with the words boat, blue and jump."}]


class Server:
    def __init__(self, folder: Path, *options: object, before: Callable[[], None] | None = None) -> None:
        keys, self.log_file = folder / "keys.txt", folder / "log.txt"
        keys.write_text(f"{OTHER_KEY}\n{KEY}\n")
        command = [sys.executable, "-m", "dsv4", "serve", "--port", "0"]
        command += [] if "--max-context" in options else ["--max-context", "1024"]
        command += ["--api-key-file", str(keys), *map(str, options)]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stderr=log, preexec_fn=before)
        try:
            wait(lambda: "is ready at" in self.log or self.process.poll() is not None, 60)
            found = re.search(r"ready at (https?)://127\.0\.0\.1:(\d+)/v1", self.log)
            assert found is not None, self.log
            self.scheme, self.port = found[1], int(found[2])
        except BaseException:
            self.process.kill()
            raise
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key=KEY, max_retries=0, timeout=60
        )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            finally:
                self.process.kill()

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def chat(self, messages: list[Any] = QUESTION, **options: Any) -> Any:
        options = {"temperature": 0, "max_tokens": 80, **options}
        return self.client.chat.completions.create(model="tiny", messages=messages, **options)

    def connection(self) -> http.client.HTTPConnection:
        if self.scheme == "https":
            context = ssl._create_unverified_context()
            return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=context)
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def raw(
        self,
        method: str,
        path: str,
        body: Any = None,
        key: str | None = KEY,
        media: str = "application/json",
        **more: str,
    ) -> tuple[int, Any, dict[str, str]]:
        """-> status, body (read as JSON if it is), headers."""
        connection = self.connection()
        headers = {**more, "Content-Type": media} if body is not None else {**more}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        is_json = answer.headers.get_content_type() == "application/json"
        return (
            answer.status,
            json.loads(text) if is_json and text else text,
            {k.lower(): v for k, v in answer.headers.items()},
        )

    def post(self, path: str, body: Any) -> tuple[int, Any, dict[str, str]]:
        return self.raw("POST", path, body)

    def gauge(self, name: str) -> float:
        text = self.raw("GET", "/metrics")[1]
        return float(re.search(rf"^{name} (\S+)$", text, flags=re.MULTILINE)[1])  # type: ignore[index]

    def is_idle(self) -> bool:
        free = self.gauge("dsv4_cache_pages_free")
        return free == self.gauge("dsv4_cache_pages") and self.gauge("dsv4_num_requests_waiting") == 0


def wait(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)


def worker_pid(server: Server) -> int:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    (pid,) = map(int, children)
    return pid
