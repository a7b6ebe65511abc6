"""A rank is killed, stopped or fails: an error with its number within seconds, and no process is left."""

import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
from ranks_support import SECONDS, children, engine_on, is_running, rank_pids, wait

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.engine import ranks as ranks_module
from dsv4.engine.ranks import Ranks
from dsv4.errors import DeviceError, LostError
from dsv4.models import EMBEDDED
from dsv4.parallel.channel import Channel, Kind
from dsv4.parallel.machines import Guest, World
from dsv4.parallel.mesh import Mesh
from dsv4.parallel.reading import Memory
from tests.serve.serve_support import STORY, Server, worker_pid

LONG = SamplingParams(max_tokens=450, temperature=0, ignore_eos=True)


def loses(engine: Engine, act: object, words: str) -> float:
    """Run until the ranks are lost -> seconds from the act, which runs beside the third step."""
    began: list[float] = []

    def later() -> None:
        began.append(time.monotonic())
        act()  # type: ignore[operator]

    engine.submit(engine.request([1, 2, 3], LONG))
    for _ in range(3):
        engine.step()
    threading.Timer(0.1, later).start()
    with pytest.raises(DeviceError, match=words):
        while True:
            engine.step()
    return time.monotonic() - began[0]


def test_slow_rank() -> None:
    """It sleeps while a plan lies in its channel: once it wakes up, once it dies and has not applied it.

    One that dies while it computes: test_server_comes_back, test_killed_rank.
    """
    params = SamplingParams(max_tokens=6, temperature=0.9, seed=4, ignore_eos=True, logprobs=2)
    with engine_on(None, 2) as engine:
        (rank,) = rank_pids()
        want = engine.generate([[1, 2, 3]], params)[0].tokens
        os.kill(rank, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (rank, signal.SIGCONT)).start()
        gone = engine.stream(engine.request([1, 2, 3], params))
        kept = engine.stream(engine.request([1, 2, 3], params))
        engine.step()
        gone.close()  # its rows were gathered with the other's, and are in the next plan no more
        assert kept.completion().tokens == want
        os.kill(rank, signal.SIGSTOP)
        engine.submit(engine.request([1, 2, 3], LONG))
        threading.Timer(0.5, os.kill, (rank, signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises(DeviceError, match=r"rank 1 has died \(signal 9\)"):
            while True:
                engine.step()
        assert time.monotonic() - began < 5
        wait(lambda: rank_pids() == [], 5)
        assert engine.ranks is not None and select.select([engine.ranks.alarm], [], [], 5)[0], "for the idle"
        with pytest.raises(DeviceError, match="start the engine anew"):
            engine.step()


def test_rank_that_dies_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """After all have met: its number and how it ended, not what a collective says."""
    join = Ranks.join

    def join_and_kill(ranks: Ranks) -> Mesh:
        mesh = join(ranks)
        os.kill(*rank_pids(), signal.SIGKILL)
        return mesh

    monkeypatch.setattr(Ranks, "join", join_and_kill)
    began = time.monotonic()
    with pytest.raises(DeviceError, match=r"rank 1 has died \(signal 9\)"), engine_on(None, 2):
        pass
    assert time.monotonic() - began < 15
    wait(lambda: rank_pids() == [], 5)


def test_rank_that_dies_while_rank_zero_loads() -> None:
    """A share takes minutes to load; nobody waits for the rest of it."""
    calls: list[int] = []

    def progress(done: int, total: int) -> None:
        calls.append(done)
        os.kill(*rank_pids(), signal.SIGKILL)
        time.sleep(1)

    settings = EngineConfig(device="cpu", ranks=2, threads=1)
    with pytest.raises(DeviceError, match=r"rank 1 has died \(signal 9\)"):
        Engine.load(None, settings, progress)
    assert len(calls) == 1


def test_rank_that_loads_slowly_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ranks_module, "LATE_SECONDS", 0.2)
    join = Ranks.join

    def stop_and_join(ranks: Ranks) -> Mesh:
        (rank,) = rank_pids()
        wait(lambda: ranks._peers[0].is_loaded, 20)  # no word of that is on its way then
        os.kill(rank, signal.SIGSTOP)
        ranks._peers[0].is_loaded = False
        threading.Timer(1.0, os.kill, (rank, signal.SIGCONT)).start()
        threading.Timer(1.5, ranks.take, (ranks._peers[0], Kind.LOADED, b"")).start()
        return join(ranks)

    monkeypatch.setattr(Ranks, "join", stop_and_join)
    with engine_on(None, 2):
        pass
    assert "still waiting for rank 1 to load" in caplog.text


def test_rank_that_is_gone_before_it_is_told_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of torchrun's: whoever hears of it first finds all that it needs, and its name is said."""

    class Now(threading.Thread):
        def start(self) -> None:
            self.run()

    ours, theirs = socket.socketpair()
    theirs.close()
    guest = Guest(rank=1, local_rank=0, host="there", channel=Channel(ours, 1.0))
    world = World(rank=0, size=2, local_rank=0, address="127.0.0.1", port=9)
    monkeypatch.setattr(ranks_module, "receive_guests", lambda world, seconds: ([guest], None))
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", Now)
        ranks = Ranks(EMBEDDED, EngineConfig(device="cpu"), ["cpu", "cpu"], world)
    with pytest.raises(LostError, match="rank 1 on there has died") as caught:
        ranks.join()
    assert caught.value.public == "rank 1 has died (its connection has ended); all 2 ranks were ended"
    ranks.stop()


def test_interrupted_while_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C in a notebook, whose process goes on: none of them is left, nor started after that."""
    launch = ranks_module._launch

    def launch_slowly(rank: int, seconds: float, memory: Memory | None) -> ranks_module._Peer:
        peer = launch(rank, seconds, memory)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        return peer

    monkeypatch.setattr(ranks_module, "_launch", launch_slowly)
    started = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        Ranks(EMBEDDED, EngineConfig(device="cpu"), ["cpu"] * 3)
    wait(lambda: threading.active_count() <= started and rank_pids() == [], 10)


def test_group_is_freed_with_the_engine() -> None:
    """Not by the thread that watches the ranks, which may still hold them while the interpreter ends: freed
    there, the group aborts the process (signal 6 instead of an exit code)."""
    with engine_on(None, 2) as engine:
        ranks, group = engine.ranks, weakref.ref(engine.model.mesh.comm)
    del engine
    gc.collect()
    assert ranks is not None and group() is None


@pytest.mark.slow
def test_killed_rank() -> None:
    with engine_on(None, 2) as engine:
        (rank,) = rank_pids()
        assert loses(engine, lambda: os.kill(rank, signal.SIGKILL), r"rank 1 has died \(signal 9\)") < 5
        wait(lambda: rank_pids() == [], 5)


def test_rank_that_sleeps() -> None:
    with engine_on(None, 2, rank_seconds=2.0) as engine:
        (rank,) = rank_pids()
        took = loses(engine, lambda: os.kill(rank, signal.SIGSTOP), "rank 1 did not answer for 2 s")
        assert 1.5 < took < 10
        wait(lambda: rank_pids() == [], 5)


def test_killed_rank_zero_leaves_nothing(tmp_path: Path) -> None:
    """Whatever the others do at that moment: this one is stopped, and ends all the same."""
    code = (
        "import sys; from dsv4 import Engine, EngineConfig, SamplingParams\n"
        "engine = Engine.load(None, EngineConfig(device='cpu', ranks=2, threads=1))\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read(1)\n"
        "engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2000, ignore_eos=True))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as zero:
        assert zero.stdout is not None and zero.stdin is not None
        assert zero.stdout.readline() == "ready\n"
        (rank,) = rank_pids(zero.pid)
        zero.stdin.write("x")
        zero.stdin.flush()
        time.sleep(0.5)
        os.kill(rank, signal.SIGSTOP)
        zero.kill()
        wait(lambda: not is_running(rank), 5)
    assert not list(tmp_path.glob("dsv4-ranks-*"))


@pytest.mark.parametrize("command", ["load", "serve"])
@pytest.mark.parametrize("module", ["torch", "sitecustomize"])
def test_killed_parent_of_a_process_that_is_stopped_while_it_starts(
    tmp_path: Path, command: str, module: str
) -> None:
    """A rank, and the engine's process of a server: in the long part of a start, before its first line."""
    (tmp_path / f"{module}.py").write_text(
        "import os, signal\n"
        "if os.environ.get('STARTED_BY') == str(os.getppid()):\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)"
    )
    mark = "import os, sys; os.environ['STARTED_BY'] = str(os.getpid())\n"
    shadow = f"sys.path.insert(0, {str(tmp_path)!r})\n"
    code = {
        "load": f"{mark}import torch; from dsv4 import Engine, EngineConfig; {shadow}"
        "Engine.load(None, EngineConfig(device='cpu', ranks=2, threads=1))",
        "serve": f"{mark}{shadow}sys.argv[1:] = ['serve', '--port', '0']\n"
        "from dsv4.cli.main import main; main()",
    }[command]

    def is_stopped(pid: int) -> bool:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"

    paths = [str(tmp_path)] if module == "sitecustomize" else []
    paths += [path for path in (os.environ.get("PYTHONPATH"), os.getcwd()) if path]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as parent:
        try:
            wait(lambda: any(map(is_stopped, children(parent.pid))), SECONDS)
            (stopped,) = children(parent.pid)
        finally:
            parent.kill()
        wait(lambda: not is_running(stopped), 5)


def test_signals_of_the_terminal_are_not_for_a_process_that_starts() -> None:
    """From its first instruction on, while Python starts in it."""
    peers: list[ranks_module._Peer] = []
    is_over = threading.Event()

    def launch() -> None:  # as the ranks' own thread does, with which they end
        peers.append(ranks_module._launch(1, SECONDS))
        is_over.wait(SECONDS)

    thread = threading.Thread(target=launch)
    thread.start()
    wait(lambda: peers, SECONDS)
    process = peers[0].process
    assert process is not None
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
    finally:
        process.kill()
        process.wait()
        is_over.set()
        thread.join()


def test_process_whose_parent_died_before_it_could_be_bound_to_it() -> None:
    code = "from dsv4.child import end_with; import os; end_with(os.getppid() + 1); print('goes on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=SECONDS)
    assert done.returncode == 1 and not done.stdout


@pytest.mark.parametrize("is_awaited", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_server_comes_back(tmp_path: Path, is_awaited: bool) -> None:
    """Under load: clients of every kind are told which rank and why, and the server serves again, or is told
    to end before that."""
    before = children(os.getpid())
    with Server(tmp_path, "--device", "cpu", "--ranks", 2, "--threads", 1) as server:
        chat: dict[str, object] = {"messages": STORY, "max_tokens": 400}
        bodies: list[tuple[str, dict[str, object]]] = [
            ("/v1/chat/completions", chat),
            ("/v1/messages", chat),
            ("/v1/responses", {"input": "Write a story.", "max_output_tokens": 400}),
        ]
        answers: list[str] = []

        def ask(path: str, body: dict[str, object]) -> None:
            answers.append(str(server.post(path, {"model": "tiny", **body})[1]))

        wanted = [(path, body | {"stream": stream}) for path, body in bodies for stream in (True, False)]
        threads = [threading.Thread(target=ask, args=one) for one in wanted]
        for thread in threads:
            thread.start()
        wait(lambda: server.gauge("dsv4_num_requests_running") == len(wanted), SECONDS)
        first = worker_pid(server)
        (rank,) = rank_pids(first)
        os.kill(rank, signal.SIGKILL)
        for thread in threads:
            thread.join(5)
        said = "the engine has died: rank 1 has died (signal 9); all 2 ranks were ended; it is being"
        assert len(answers) == len(wanted) and all(said in answer for answer in answers), answers
        wait(lambda: not is_running(first) and not is_running(rank), 5)
        assert "rank 1 has died (signal 9); all 2 ranks were ended; restarting, it has run for" in server.log
        if is_awaited:
            wait(lambda: server.raw("GET", "/ready")[0] == 200, SECONDS)
            assert server.chat(max_tokens=5).choices[0].message
        else:
            wait(lambda: children(server.process.pid), SECONDS)
        last = children(server.process.pid)
        last += [rank for worker in last for rank in rank_pids(worker)]
    wait(lambda: not any(map(is_running, last)), 10)
    assert children(os.getpid()) == before
