"""The server's two processes: how they begin and end with each other."""

import asyncio
import fcntl
import resource
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from dsv4.config import EngineConfig
from dsv4.serve import client, wire
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
