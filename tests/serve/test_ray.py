"""Ray on this machine: two replicas behind its router, one of them killed; batches over Ray Data."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_support import command, finish, kill_at, lines_of, requests
from openai import OpenAI
from serve_support import ROOT, wait

pytestmark = pytest.mark.ray
PORT = 18123
CLIENTS, EACH = 6, 12


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {number % 50} + {number % 37}?"}]


@pytest.fixture(scope="module")
def ray_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    log = tmp_path_factory.mktemp("ray") / "log.txt"
    command = [sys.executable, "-m", "dsv4", "serve", "--ray", "--replicas", "2", "--port", str(PORT)]
    command += ["--max-context", "1024", "--max-batch", "4"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
    client = OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0, timeout=300)

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    try:
        wait(is_up, 300)
        yield client
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            process.kill()  # what Ray started for it ends with it; a cluster of somebody else does not


def replica_pids(title: bytes = b"ServeReplica:dsv4:Replica") -> list[int]:
    """Processes of Ray's actors that hold an engine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if title in name:
            found.append(int(folder.name))
    return found


def test_answers_are_the_servers_and_streamed(ray_server: OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    options["extra_body"] = {"thinking": {"type": "disabled"}}
    whole = ray_server.chat.completions.create(messages=question(1), **options)
    parts = ray_server.chat.completions.create(messages=question(1), stream=True, **options)
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content and text
    assert [model.id for model in ray_server.models.list()] == ["tiny"]
    with pytest.raises(Exception, match="does not exist"):
        ray_server.chat.completions.create(messages=question(1), **{**options, "model": "other"})


def test_turns_of_a_conversation_find_their_prefix(ray_server: OpenAI) -> None:
    """More conversations than replicas: each second turn goes where the first one is cached."""
    story = "The boat is blue and it can jump over the water. " * 30
    for number in range(4):
        talk: list[Any] = [{"role": "user", "content": f"{number}. {story}"}]
        options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 4}
        options["extra_body"] = {"thinking": {"type": "disabled"}}
        first = ray_server.chat.completions.create(messages=talk, **options)
        talk += [{"role": "assistant", "content": first.choices[0].message.content or "."}, question(2)[0]]
        second = ray_server.chat.completions.create(messages=talk, **options)
        assert second.usage.prompt_tokens_details.cached_tokens >= 256, second.usage


def test_a_killed_replica_loses_only_what_it_was_serving(ray_server: OpenAI) -> None:
    wait(lambda: len(replica_pids()) == 2, 120)
    answered: dict[int, str] = {}
    failed: list[Exception] = []

    def ask(client: int) -> None:
        for turn in range(EACH):
            number = client * EACH + turn
            try:
                made = ray_server.chat.completions.create(
                    model="tiny",
                    messages=question(number),  # type: ignore[arg-type]
                    temperature=0,
                    max_tokens=8,
                    extra_body={"thinking": {"type": "disabled"}},
                )
                answered[number] = made.choices[0].message.content
            except Exception as error:  # noqa: BLE001
                failed.append(error)

    askers = [threading.Thread(target=ask, args=(client,)) for client in range(CLIENTS)]
    for asker in askers:
        asker.start()
    wait(lambda: len(answered) >= CLIENTS, 240)
    before, victim = len(answered), replica_pids()[0]
    os.kill(victim, signal.SIGKILL)
    for asker in askers:
        asker.join(400)
    # Sent again by the entrance, since no byte of their answers was out yet.
    assert not failed, failed
    assert len(answered) == CLIENTS * EACH and before < CLIENTS * EACH, "and it was killed under load"
    wait(lambda: len(replica_pids()) == 2 and victim not in replica_pids(), 240)
    for number in (0, 13, 70):
        again = ray_server.chat.completions.create(
            model="tiny",
            messages=question(number),  # type: ignore[arg-type]
            temperature=0,
            max_tokens=8,
            extra_body={"thinking": {"type": "disabled"}},
        )
        assert again.choices[0].message.content == answered[number]


def test_batch_over_ray_data_gives_the_same_bytes(tmp_path: Path) -> None:
    source, alone, target = tmp_path / "in.jsonl", tmp_path / "alone.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(requests(60)))
    finish(source, alone)
    finish(source, target, "--ray", "--replicas", 2)
    assert target.read_bytes() == alone.read_bytes()


def test_killed_batch_over_ray_has_what_was_answered(tmp_path: Path) -> None:
    """Not only whole blocks: what one engine has answered is written while it goes on."""
    source, alone, target = tmp_path / "in.jsonl", tmp_path / "alone.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([*requests(200), "ends in zeros\0\0"]))
    finish(source, alone)
    kill_at(8, source, target, "--ray", "--parallel", 16)
    assert 8 <= lines_of(target) < 80
    assert finish(source, target, "--ray", "--replicas", 2)["answered_before"] >= 8
    assert target.read_bytes() == alone.read_bytes()


def test_killed_engine_of_a_batch_changes_nothing(tmp_path: Path) -> None:
    """Neither in the answers nor on stdout, where Ray would say it."""
    source, alone, target = tmp_path / "in.jsonl", tmp_path / "alone.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(requests(150)))
    finish(source, alone)
    with subprocess.Popen(
        command(source, target, "--ray", "--replicas", 2),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        wait(lambda: lines_of(target) > 3 or process.poll() is not None, 300)
        os.kill(replica_pids(b"MapWorker(MapBatches(Engines)).submit")[0], signal.SIGKILL)
        said = process.communicate(timeout=300)[0]
    assert json.loads(said)["lines"] == 150
    assert target.read_bytes() == alone.read_bytes()


def test_500_requests_killed_three_times(tmp_path: Path) -> None:
    source, alone, target = tmp_path / "in.jsonl", tmp_path / "alone.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(requests(500)))
    finish(source, alone)
    for count in (60, 200, 390):
        kill_at(count, source, target, seconds=600)
    kept = lines_of(target)
    summary = finish(source, target)
    assert summary["answered_before"] == kept >= 390
    assert target.read_bytes() == alone.read_bytes()
    assert [json.loads(line)["custom_id"] for line in target.open()][:3] == ["c0", "c1", "c2"]
