"""The server's two processes: how they begin and end with each other."""

import asyncio
import fcntl
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dsv4.config import EngineConfig
from dsv4.engine.engine import Engine
from dsv4.engine.request import Request, SamplingParams
from dsv4.serve import client, wire, worker
from dsv4.serve.worker import Link


@pytest.fixture
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_engine_hears_at_a_high_descriptor(many_files: None) -> None:
    """Where it is started again while a thousand clients are connected."""
    ours, theirs = socket.socketpair()
    bell, alarm = socket.socketpair()
    high = [socket.socket(fileno=fcntl.fcntl(one, fcntl.F_DUPFD, 1500)) for one in (theirs, alarm)]
    theirs.close()
    with ours, bell, alarm, high[0], high[1]:
        link = Link(high[0])
        began = time.monotonic()
        assert link.receive(0.05, high[1]) == [] and time.monotonic() - began >= 0.05
        for id in ("a", "b"):
            ours.sendall(wire.frame(wire.Cancel(id)))
        assert link.receive(None) == [wire.Cancel("a"), wire.Cancel("b")]
        bell.send(b"!")
        assert link.receive(None, high[1]) == [], "the alarm ends the wait"
        ours.close()
        assert link.receive(None, high[1]) is None


def test_a_grammar_that_waits_for_others_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time begins when it is compiled. One that takes too long then is refused."""
    monkeypatch.setattr(worker, "COMPILE_SECONDS", 0.3)
    ours, theirs = socket.socketpair()
    goes_on = threading.Event()
    with Engine.load(config=EngineConfig(max_context=512)) as engine, ours, theirs:
        engine.grammars.matcher('start: "a"')  # the vocabulary is read once
        mine = worker.Worker(Link(theirs), engine)
        for _ in range(worker.MAX_COMPILERS):
            mine._compilers.submit(goes_on.wait, 30)
        params = SamplingParams(grammar='start: "b"', max_tokens=4)
        mine._handle(wire.Submit(Request("r", (1,), params), False))
        time.sleep(0.4)
        mine._take_compiled()
        goes_on.set()
        end = time.monotonic() + 10
        while mine._compiling and time.monotonic() < end:
            mine._take_compiled()
            time.sleep(0.001)
        answer = wire.Frames().push(ours.recv(1 << 16))[0]
        assert wire.read(wire.from_engine, answer) == wire.Accepted("r")

        goes_on.clear()
        monkeypatch.setattr(engine.grammars, "matcher", lambda text: goes_on.wait(30))
        mine._handle(wire.Submit(Request("s", (1,), params), False))
        while mine._compiling and time.monotonic() < end:
            mine._take_compiled()
            time.sleep(0.001)
        answer = wire.Frames().push(ours.recv(1 << 16))[0]
        assert "took longer than 0.3 s" in wire.read(wire.from_engine, answer).error
        goes_on.set()


def test_stopped_while_the_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in that moment: nobody may wait for an engine that nobody told to end."""

    async def run() -> None:
        begun, go, real, lives = asyncio.Event(), asyncio.Event(), client._launch, list[client._Life]()

        async def launch() -> client._Life:
            begun.set()
            await go.wait()
            lives.append(await real())
            return lives[-1]

        monkeypatch.setattr(client, "_launch", launch)
        engine = client.EngineProcess(
            "nowhere",
            EngineConfig(),
            max_queue=1,
            queue_seconds=60,
            request_seconds=60,
            stall_seconds=60,
            log=print,
            progress=lambda done, total: None,
        )
        start = asyncio.create_task(engine.start())
        await begun.wait()
        stop = asyncio.create_task(engine.stop("Ctrl-C"))
        await asyncio.sleep(0)
        go.set()
        # With a model the engine would load it and wait for ever; with none it would say so.
        async with asyncio.timeout(30):
            await stop
        # By itself, or where starting takes longer than it is given for that, killed.
        assert lives[0].process.returncode in (0, -signal.SIGKILL) and lives[0].why == ""
        with pytest.raises(client.Unavailable):
            await start

    asyncio.run(run())
