"""A server that is killed and started again goes on from its folder of prefixes, for each key its own."""

import os
import re
import signal
from pathlib import Path

import pytest
from serve_support import KEY, OTHER_KEY, Server, wait, worker_pid

from dsv4.config import EngineConfig
from dsv4.serve import wire
from dsv4.serve.worker import _config

PROMPT = " ".join(f"The {number} boats are blue." for number in range(70))


def ask(server: Server, key: str = KEY) -> tuple[str, int]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    status, answer, _ = server.raw("POST", "/v1/completions", body, key)
    assert status == 200, answer
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def ask_first(server: Server, kept: Path) -> str:
    """-> the answer, once its prompt lies in the folder."""
    text, cached = ask(server)
    assert cached == 0
    wait(lambda: len(list(kept.rglob("*.page"))) >= 2, 20)
    wait(lambda: len(list(kept.rglob("*.snapshot"))) >= 1, 20)
    return text


def test_prefixes_survive_kill_9(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    options = ("--isolate-by-key", "--prefix-dir", kept)
    with Server(tmp_path, *options) as server:
        text = ask_first(server, kept)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(20)
    with Server(tmp_path, *options) as server:
        assert ask(server, OTHER_KEY) == (text, 0), "a prefix of one key is nothing to another"
        again, cached = ask(server)
        assert again == text and cached >= 512, server.log
        assert PROMPT[:20] not in server.log


def test_folder_that_fails_later_keeps_no_engine_from_coming_back(tmp_path: Path) -> None:
    """Only what is wrong from the start is refused, by the engine itself."""
    good, bad, said = tmp_path / "kept", tmp_path / "file", list[str]()
    bad.touch()
    for folder, again, wanted in ((good, True, str(good)), (bad, False, str(bad)), (bad, True, None)):
        start = wire.Start("tiny", EngineConfig(prefix_dir=str(folder)), again)
        assert _config(start, said.append) == EngineConfig(prefix_dir=wanted)
    assert len(said) == 1 and f"prefix_dir {bad} cannot be used any more (File exists)" in said[0]


@pytest.mark.slow
def test_killed_engine_and_damaged_files(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    options = ("--isolate-by-key", "--prefix-dir", kept)
    with Server(tmp_path, *options) as server:
        text = ask_first(server, kept)
        os.kill(worker_pid(server), signal.SIGKILL)
        wait(lambda: server.raw("GET", "/ready")[0] == 200 and "restarting" in server.log, 60)
        again, cached = ask(server)
        assert again == text and cached >= 512, server.log
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(20)
    for path in kept.rglob("*.page"):
        raw = path.read_bytes()
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with Server(tmp_path, *options) as server:
        assert ask(server, OTHER_KEY) == (text, 0), "a prefix of one key is nothing to another"
        assert ask(server) == (text, 0), "damaged"
        assert ask(server) == (text, cached), "from memory"
        said = re.findall("does not match its checksum; it is removed, counts as a miss", server.log)
        assert len(said) == 1, server.log
        kept.rename(tmp_path / "away")
        kept.touch()
        assert ask(server) == (text, cached), "the folder is gone"
        os.kill(worker_pid(server), signal.SIGKILL)
        wait(lambda: server.raw("GET", "/ready")[0] == 200 and "restarting" in server.log, 60)
        assert ask(server) == (text, 0)
        wait(lambda: "cannot be used any more" in server.log, 5)
        assert PROMPT[:20] not in server.log
