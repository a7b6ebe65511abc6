"""Ranks on several machines, by torchrun or the variables it sets: one engine, one sentence when it is lost.

The machines are this one: each has its own torchrun, which knows of the other by address and port alone.
"""

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from ranks_support import SECONDS, children, engine_on, is_running, wait

from dsv4 import SamplingParams
from dsv4.errors import ConfigError
from dsv4.parallel.channel import HEADER, Channel, Kind
from dsv4.parallel.machines import World, receive_guests
from tests.serve.serve_support import STORY, Server, openai

COMMAND = ["dsv4", "generate", "--device", "cpu", "--threads", "1", "--temperature", "0", "Once upon a"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def variables(rank: int, port: int, size: int = 2) -> dict[str, str]:
    said = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in said.items()}


@contextmanager
def started(
    command: list[str], log: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    def hear() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever runs these tests in the background ignores it

    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=os.environ | (environment or {}),
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=hear,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_one_answer_of_two_machines(tmp_path: Path) -> None:
    """Variables without torchrun: the text of one process, and both end well."""
    port, logs = free_port(), [tmp_path / "0", tmp_path / "1"]
    command = [sys.executable, "-m", *COMMAND, "--max-tokens", "12"]
    with (
        started(command, logs[1], variables(1, port)) as other,
        started(command, logs[0], variables(0, port)) as zero,
    ):
        assert zero.wait(SECONDS) == 0, logs[0].read_text()
        assert other.wait(5) == 0 and logs[1].read_text() == ""
    with engine_on(None, 1) as engine:
        (want,) = engine.generate(["Once upon a"], SamplingParams(max_tokens=12, temperature=0))
    assert want.text in logs[0].read_text()


def test_a_machine_is_lost(tmp_path: Path) -> None:
    """Two torchruns; the second is killed with its rank while tokens come."""
    port, logs = free_port(), [tmp_path / "0", tmp_path / "1"]

    def command(node: int) -> list[str]:
        meeting = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        nodes = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", *meeting]
        return [*TORCHRUN, *nodes, "-m", *COMMAND, "--max-tokens", "900", "--ignore-eos"]

    with started(command(1), logs[1]) as other, started(command(0), logs[0]) as zero:
        wait(lambda: "," in logs[0].read_text(), SECONDS)
        (first,) = children(zero.pid)
        os.killpg(other.pid, signal.SIGSTOP)  # nothing of it can say a last word
        os.killpg(other.pid, signal.SIGKILL)
        wait(lambda: not is_running(first), 5)
        said = logs[0].read_text()
        assert said.count("error: rank 1 on ") == said.count("all 2 ranks were ended") == 1, said
        ours = said.partition("failed (exitcode")[0]  # torchrun has a traceback for every rank that ends so
        assert "Traceback" not in ours, said
        assert zero.wait(SECONDS) != 0


@contextmanager
def two_networks() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them; -> their names."""
    names, wires = [f"dsv4-{os.getpid()}-{end}" for end in "ab"], ["wire-a", "wire-b"]

    def ip(*words: str) -> None:
        made = subprocess.run(["ip", *words], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")

    if shutil.which("ip") is None:
        pytest.skip("ip is not installed")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", wires[0], "netns", names[0], "type", "veth", "peer", wires[1], "netns", names[1])
        for number, (name, wire) in enumerate(zip(names, wires, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.9.0.{number}/24", "dev", wire)
            for link in ("lo", wire):
                ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_a_machine_is_cut_off(tmp_path: Path) -> None:
    """No process dies and no connection is closed: the cable is pulled."""
    logs = [tmp_path / "0", tmp_path / "1"]
    command = [sys.executable, "-m", *COMMAND, "--max-tokens", "900", "--ignore-eos"]
    with two_networks() as networks:
        machines = [["ip", "netns", "exec", name, *command] for name in networks]
        meeting = [variables(rank, 29500) | {"MASTER_ADDR": "10.9.0.1"} for rank in range(2)]
        with (
            started(machines[1], logs[1], meeting[1]) as other,
            started(machines[0], logs[0], meeting[0]) as zero,
        ):
            wait(lambda: "," in logs[0].read_text(), SECONDS)
            began = time.monotonic()
            subprocess.run(["ip", "-n", networks[1], "link", "set", "wire-b", "down"], check=True)
            assert zero.wait(10) == 2 and other.wait(10) == 1
            assert time.monotonic() - began < 7, (
                "3 s until the kernel gives up, and how long Python takes to end"
            )
        assert "error: rank 1 on " in logs[0].read_text() and "(10.9.0.2)" in logs[0].read_text()
        assert logs[1].read_text().count("error: rank 1 of 2: ") == 1


@pytest.mark.slow
def test_rank_zero_is_lost(tmp_path: Path) -> None:
    port, logs = free_port(), [tmp_path / "0", tmp_path / "1"]
    command = [sys.executable, "-m", *COMMAND, "--max-tokens", "900", "--ignore-eos"]
    with (
        started(command, logs[1], variables(1, port)) as other,
        started(command, logs[0], variables(0, port)) as zero,
    ):
        wait(lambda: "," in logs[0].read_text(), SECONDS)
        zero.kill()
        assert other.wait(5) == 1
        said = logs[1].read_text().splitlines()
        assert len(said) == 1 and said[0].startswith("error: rank 1 of 2: "), said


@pytest.mark.slow
def test_server_ends_with_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own ranks it would start again; torchrun's are torchrun's."""
    port, log = free_port(), tmp_path / "1"
    command = [sys.executable, "-m", "dsv4", "serve"]
    with started(command, log, variables(1, port)) as other:
        for name, value in variables(0, port).items():
            monkeypatch.setenv(name, value)
        with Server(tmp_path, "--device", "cpu", "--threads", 1) as server:
            stream = server.chat(STORY, max_tokens=400, stream=True)
            next(iter(stream))
            began = time.monotonic()
            other.kill()
            with pytest.raises(openai.APIError) as caught:
                list(stream)
            assert "rank 1 has died (its connection has ended)" in str(caught.value)
            assert "127.0.0.1" not in str(caught.value) and socket.gethostname() not in str(caught.value)
            assert server.process.wait(10) == 2 and time.monotonic() - began < 10
            assert "rank 1 on " in server.log and "torchrun can start all of them again" in server.log


def test_an_attempt_finds_nothing_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's meeting point lives on: the place of a rank 0 that is gone lies there."""
    world = World(rank=0, size=2, local_rank=0, address="127.0.0.1", port=free_port())
    held = world.store()
    held.set("place", "of the first")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not world.store().check(["place"]) and held.check(["place"])


@pytest.mark.slow
def test_torchrun_starts_all_again(tmp_path: Path) -> None:
    log, port = tmp_path / "log", free_port()
    command = [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1", "--master-port", str(free_port())]
    command += ["-m", "dsv4", "serve", "--port", str(port), "--device", "cpu"]
    with started(command, log) as torchrun:
        wait(lambda: "ready at" in log.read_text(), SECONDS)
        for pid in children(torchrun.pid):
            if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)
        wait(lambda: log.read_text().count("ready at") == 2, SECONDS)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        assert client.completions.create(model="tiny", prompt="Once", max_tokens=4).choices[0].text


def test_rank_zero_waits_and_can_be_interrupted(tmp_path: Path) -> None:
    """Nobody else has come; Ctrl-C ends it all the same."""
    log = tmp_path / "0"
    with started([sys.executable, "-m", *COMMAND], log, variables(0, port := free_port())) as zero:

        def listens() -> bool:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            return False

        wait(listens, SECONDS)
        time.sleep(0.5)
        zero.send_signal(signal.SIGINT)
        assert zero.wait(5) != 0


def test_strangers_at_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds rank 0's port and is no rank is shown out; the rank that comes after is let in."""
    port = free_port()
    for name, value in variables(0, port).items():
        monkeypatch.setenv(name, value)
    caller = (
        "import json, os, socket; from dsv4.parallel.machines import World, call_on\n"
        "world = World.find(); store = world.store(); place = json.loads(store.get('dsv4/rank 0'))\n"
        "where = place['address'], place['port']\n"
        "a = socket.create_connection(where); a.sendall(b'GET / HTTP/1.1\\r\\n\\r\\n')\n"
        "b = socket.create_connection(where); b.sendall(bytes([10, 0, 0, 0, 2]) + b'[]')\n"
        "c = socket.create_connection(where); c.close()\n"
        "channel, _ = call_on(world); print(channel.receive()[0].name)\n"
    )
    with started([sys.executable, "-c", caller], tmp_path / "1", variables(1, port)) as other:
        world = World.find()
        assert world is not None
        (guest,), _store = receive_guests(world, 5.0)
        assert guest.rank == 1 and guest.name.startswith("rank 1 on ")
        guest.channel.say_last(Kind.END)
        assert other.wait(SECONDS) == 0 and (tmp_path / "1").read_text().endswith("END\n")
        with pytest.raises(ConfigError, match="serve one engine"):
            receive_guests(world, 5.0)


def test_what_the_environment_may_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(0, 29500, size=1).items():
        monkeypatch.setenv(name, value)
    assert World.find() is None, "a world of one needs no meeting"
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE=two, expected numbers"):
        World.find()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match="RANK=2 of WORLD_SIZE=2"):
        World.find()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="leave gpus and ranks out"), engine_on(None, 2):
        pass
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="rank 1 of 2, and the engine is rank 0's"), engine_on(None, 1):
        pass
    monkeypatch.delenv("MASTER_ADDR")
    assert World.find() is None


def test_hello_is_one_frame() -> None:
    ours, theirs = socket.socketpair()
    Channel(theirs).send(Kind.HELLO, json.dumps({"rank": 1}).encode())
    assert Channel(ours, 1.0).receive() == (Kind.HELLO, b'{"rank": 1}')
    theirs.sendall(struct.pack("!BI", 99, 0)[: HEADER.size])
    with pytest.raises(Exception, match="damaged"):
        Channel(ours, 1.0).receive()
    Channel(ours).hang_up()
    ours.close()
    theirs.close()
