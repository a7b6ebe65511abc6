"""The server's two processes: how they begin and end with each other."""

import fcntl
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from dsv4.serve import wire
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
