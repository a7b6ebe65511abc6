"""`dsv4 batch`: the server's answers without a server, the same bytes however often it was killed."""

import asyncio
import json
import os
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from batch_support import command, finish, kill_at, lines_of, requests
from batch_support import line as asking
from serve_support import ROOT, Server, wait

from dsv4.config import EngineConfig
from dsv4.errors import ConfigError
from dsv4.models import EMBEDDED
from dsv4.serve import client
from dsv4.serve.batch import Answerer, Job, Output, answering, count_requests, in_order, read_lines, run

COUNT = 30


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batch") / "in.jsonl"
    path.write_text("\n\n".join(requests(COUNT)))  # blank lines ask for nothing, and the last line has no end
    return path


def job_of(source: Path, **options: object) -> Job:
    engine = EngineConfig(max_context=1024, max_batch=4, max_stall_ms=600_000)
    return Job(EMBEDDED, engine, created=int(source.stat().st_mtime), **options)  # type: ignore[arg-type]


def answers(source: Path) -> bytes:
    made: list[bytes] = []
    asyncio.run(
        run(job_of(source), enumerate(read_lines(source)), 8, made.append, print, lambda done, total: None)
    )
    return b"".join(made)


@pytest.fixture(scope="module")
def undisturbed(source: Path) -> bytes:
    return answers(source)


def test_every_line_is_answered_in_order(undisturbed: bytes, source: Path) -> None:
    found = [json.loads(line) for line in undisturbed.splitlines()]
    asked = list(read_lines(source))
    assert len(found) == len(asked) == COUNT
    for number, (line, one) in enumerate(zip(asked, found, strict=True)):
        assert set(one) == {"id", "custom_id", "response", "error"} and one["id"].startswith("batch_req_")
        if number == 7:
            assert one["custom_id"] is None and one["response"] is None, "the line is no JSON"
            assert "not valid JSON" in one["error"]["message"]
            continue
        assert one["custom_id"] == json.loads(line)["custom_id"]
        if number == 17:
            assert one["response"] is None and "/v1/nothing" in one["error"]["message"]
        elif number == 27:
            assert one["error"] is None and one["response"]["status_code"] == 400
            assert "messages" in one["response"]["body"]["error"]["message"]
        else:
            assert one["response"]["status_code"] == 200, one
            assert one["response"]["request_id"].removeprefix("req_") in one["response"]["body"]["id"]
    call = found[3]["response"]["body"]["choices"][0]["message"]["tool_calls"][0]
    assert call["function"]["name"] == "add"
    assert len(found[1]["response"]["body"]["choices"]) == 2
    assert len({one["id"] for one in found}) == COUNT


def test_killed_and_resumed_it_is_the_same_file(undisturbed: bytes, source: Path, tmp_path: Path) -> None:
    """In another process, with another batch size, and with a last line that was cut in the middle."""
    target = tmp_path / "out.jsonl"
    kill_at(9, source, target)
    assert undisturbed.startswith(target.read_bytes()[: target.read_bytes().rfind(b"\n") + 1])
    kept = lines_of(target)
    with target.open("ab") as file:
        file.write(b'{"id":"batch_req_')
    summary = finish(source, target, "--max-batch", 2, "--parallel", 3)
    assert target.read_bytes() == undisturbed
    assert summary["answered_before"] == kept and summary["lines"] == COUNT and summary["failed"] == 3
    assert finish(source, target)["answered_before"] == COUNT, "and there is nothing left to do"
    assert target.read_bytes() == undisturbed


def test_copied_input_goes_on_with_its_first_time(undisturbed: bytes, source: Path, tmp_path: Path) -> None:
    """As after a download to another machine: the same lines, another modification time."""
    copied, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    copied.write_bytes(source.read_bytes())
    os.utime(copied, (1, 1))
    kept = undisturbed.splitlines(keepends=True)[: COUNT - 4]
    target.write_bytes(b"".join(kept))
    finish(copied, target, "--max-batch", 4)
    assert target.read_bytes() == undisturbed


def test_inputs_of_all_kinds(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{}\r\n\r\n [1] ")
    assert list(read_lines(path)) == [b"{}", b"[1]"], "as Windows writes it"
    path.write_bytes(b"")
    assert list(read_lines(path)) == []
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR)  # else whoever opens it waits for a writer
    for wrong, words in (
        (pipe, "is a pipe or a device"),
        (tmp_path, "directory"),
        (tmp_path / "x", "No such"),
    ):
        with pytest.raises(ConfigError, match=words):
            list(read_lines(wrong))
    os.close(held)


def test_outputs_that_are_no_files(tmp_path: Path) -> None:
    """Refused before anything is read of them: /dev/full gives zeros without end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for wrong in (pipe, Path("/dev/full"), Path("/dev/null"), tmp_path):
        with pytest.raises(ConfigError, match="cannot be written: it is no file"):
            Output(wrong)


def test_a_disk_that_fills_up(undisturbed: bytes, source: Path, tmp_path: Path) -> None:
    """Which file, why, and how to go on; what was written is kept, and the same command goes on."""
    target, lines = tmp_path / "out.jsonl", undisturbed.splitlines(keepends=True)
    target.write_bytes(b"".join(lines[:-3]))
    room = len(undisturbed) - len(lines[-1]) - 20

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    done = subprocess.run(
        command(source, target, "--max-batch", 4), cwd=ROOT, capture_output=True, text=True, preexec_fn=limit
    )
    error = f"error: {target} cannot be written: File too large; the lines so far are kept, and"
    assert done.returncode == 2 and error in done.stderr, done.stderr
    assert target.read_bytes() == undisturbed[:room]
    assert finish(source, target, "--max-batch", 4)["answered_before"] == COUNT - 2
    assert target.read_bytes() == undisturbed


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("out.jsonl", "was removed while it was written, and with it the answers; begin again"),
        ("in.jsonl", "was changed while it was answered: 60 lines were asked for, "),
    ],
)
def test_files_that_change_while_a_batch_runs(changed: str, words: str, tmp_path: Path) -> None:
    """A removed output takes its answers with it; an input that was cut is not answered to its end."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(requests(60)))
    with subprocess.Popen(
        command(source, target, "--parallel", 1), cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        wait(lambda: lines_of(target) > 0 or process.poll() is not None, 60)
        if changed == "out.jsonl":
            target.unlink()
        else:
            source.write_text("\n".join(requests(1)))
        said = process.communicate()[1]
    assert process.returncode == 2 and f"{tmp_path / changed} {words}" in said, said


def test_a_body_that_cannot_be_read_ends_its_own_line_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    huge = asking(1, **ask).replace('"max_tokens": 2', '"temperature": 1e999')
    array = asking(2).replace("{}", "[5]")
    lines = [asking(0, **ask), huge, array, asking(3, **ask, stream=True), asking(4, **ask)]
    source.write_text("\n".join(lines))
    assert finish(source, target)["failed"] == 3
    found = [json.loads(each) for each in target.read_bytes().splitlines()]
    codes = [each["response"] and each["response"]["status_code"] for each in found]
    assert codes == [200, None, 400, None, 200], found
    assert "number out of range" in found[1]["error"]["message"]
    assert "stream" in found[3]["error"]["message"]


def test_two_lines_of_one_name_are_refused_before_anything_runs(tmp_path: Path) -> None:
    """By their numbers in the file, blank lines counted; lines that have no name are no two of one."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    same = ['{"custom_id": "ab"}', '{"custom_id": "a\\u0062", "url": "no"}']
    lines = ["", "{}", "cut", '{"custom_id": 5}', '{"custom_id": 5}', "{}", requests(1)[0], *same]
    source.write_text("\n".join(lines))
    done = subprocess.run(command(source, target), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "lines 8 and 9 of" in done.stderr and "'ab'" in done.stderr, done.stderr
    assert not target.exists()
    source.write_text("\n".join(lines[:-1]))
    assert count_requests(source) == 7


@pytest.mark.slow
def test_engine_that_dies_changes_nothing(undisturbed: bytes, source: Path) -> None:
    made: list[bytes] = []

    async def go() -> None:
        async with answering(job_of(source), print, lambda done, total: None) as answerer:
            assert isinstance(answerer, Answerer)
            # Two at a time: a slow line holds back 16, so at the fifth not all have been answered.
            async for line in in_order(enumerate(read_lines(source)), answerer.answer, 2):
                made.append(line)
                if len(made) == 5:
                    assert answerer.engine._life is not None
                    os.kill(answerer.engine._life.process.pid, signal.SIGKILL)
            assert answerer.engine.num_restarts == 1

    asyncio.run(go())
    assert b"".join(made) == undisturbed


def test_interrupted_while_the_engine_is_being_launched(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process comes up after it was to be ended; nobody waits for it."""

    async def go() -> None:
        begun, launch = asyncio.Event(), client._launch

        async def slow() -> client._Life:
            life = await launch()
            begun.set()
            await asyncio.sleep(0.5)
            return life

        monkeypatch.setattr(client, "_launch", slow)
        running = asyncio.create_task(
            run(job_of(source), [(0, b"{}")], 1, print, print, lambda done, total: None)
        )
        await begun.wait()
        running.cancel()
        await asyncio.wait([running], timeout=client.STOP_SECONDS + 5)
        assert running.cancelled()

    asyncio.run(go())


def test_bodies_are_those_of_the_server(undisturbed: bytes, source: Path, server: Server) -> None:
    """Where the answer depends on the body alone: everything but ids, times and what was cached."""
    for line, made in zip(read_lines(source), undisturbed.splitlines(), strict=True):
        answer = json.loads(made)["response"]
        asked = json.loads(line) if answer else {"body": {}}
        if asked["body"].get("temperature") != 0 and (answer is None or answer["status_code"] == 200):
            continue
        status, body, _ = server.post(asked["url"], asked["body"])
        assert status == answer["status_code"]
        assert body.get("choices") == answer["body"].get("choices")
        assert body.get("error") == answer["body"].get("error")


def test_output_of_something_else_is_not_touched(undisturbed: bytes, source: Path, tmp_path: Path) -> None:
    target, lines = tmp_path / "out.jsonl", undisturbed.splitlines(keepends=True)
    wanted = job_of(source).fingerprint()
    for content in (b"hello\n", lines[1], undisturbed + lines[0]):
        target.write_bytes(content)
        with Output(target) as output, pytest.raises(ConfigError, match="is not the answer to that line"):
            output.resume(read_lines(source), wanted)
        assert target.read_bytes() == content
    target.write_bytes(lines[0])
    with Output(target) as output:
        other = job_of(source, thinking=False).fingerprint()
        with pytest.raises(ConfigError, match="these settings"):
            output.resume(read_lines(source), other)
        with pytest.raises(ConfigError, match="another run"):
            Output(target)


def test_a_slow_line_holds_back_a_bounded_number() -> None:
    async def go() -> None:
        begun: list[int] = []
        gate = asyncio.Event()

        async def answer(number: int, line: bytes) -> bytes:
            begun.append(number)
            if number == 0:
                await gate.wait()
            return b"%d" % number

        made = in_order(((at, b"") for at in range(1000)), answer, 4)
        first = asyncio.ensure_future(anext(made))
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(begun) == 32 and not first.done()
        gate.set()
        assert [await first, *[line async for line in made]] == [b"%d" % at for at in range(1000)]

    asyncio.run(go())
