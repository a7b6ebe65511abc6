"""Places in the queue are given back: whatever is raised wherever, and whenever a request is cancelled."""

import asyncio
import errno
import json
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest
from serve_support import SHORT

from dsv4.config import EngineConfig
from dsv4.models import EMBEDDED
from dsv4.serve import app as app_module
from dsv4.serve import client as client_module
from dsv4.serve import job as job_module
from dsv4.serve import wire
from dsv4.serve.answer import ChatAnswer
from dsv4.serve.app import make_app
from dsv4.serve.client import EngineProcess
from dsv4.serve.job import Job, Service
from dsv4.serve.metrics import Metrics
from dsv4.serve.prompt import Encoder
from dsv4.serve.ticket import Ticket, Unavailable
from dsv4.text.tokenizer import Tokenizer

BODY = {
    "messages": SHORT,
    "max_tokens": 3,
    "temperature": 0,
    "n": 2,
    "stream_options": {"include_usage": True},
}


class Panic(BaseException):
    """Like what the tokenizer raises when it panics: no Exception."""


class Harness:
    def __init__(self, service: Service) -> None:
        self.engine, self.app = service.engine, make_app(service)
        self.sent: list[Any] = []

    async def request(self, body: Any, send: Callable[[Any], Awaitable[None]] | None = None) -> int:
        """-> the answer's status; 0 if there was none."""
        parts = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self.sent = []

        async def receive() -> Any:
            if parts:
                return parts.pop()
            await asyncio.Event().wait()

        async def keep(message: Any) -> None:
            self.sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        scope |= {"query_string": b"", "root_path": "", "http_version": "1.1"}
        await self.app(scope, receive, send or keep)
        return self.sent[0]["status"] if self.sent else 0

    async def is_given_back(self) -> bool:
        """At once in this process, soon in the engine's."""
        if self.engine.num_open:
            return False
        end = time.monotonic() + 10
        while self.engine.status.running or self.engine.status.waiting:
            assert time.monotonic() < end, "the engine still runs what nobody waits for"
            await asyncio.sleep(0.01)
        return True


def run(check: Callable[[Harness], Awaitable[None]]) -> None:
    async def started() -> None:
        silent: Callable[..., None] = lambda *_: None  # noqa: E731
        engine = EngineProcess(
            str(EMBEDDED),
            EngineConfig(max_context=256, max_batch=2),
            max_queue=2,
            queue_seconds=30,
            request_seconds=60,
            stall_seconds=60,
            log=silent,
            progress=silent,
        )
        await engine.start()
        encoder = Encoder(Tokenizer.load(EMBEDDED))
        metrics = Metrics(engine)
        service = Service(names=("tiny",), engine=engine, encoder=encoder, metrics=metrics, log=silent)
        harness = Harness(service)
        try:
            assert await harness.request(BODY) == 200
            await check(harness)
            # All four places are there.
            assert await harness.request({**BODY, "n": 4}) == 200
        finally:
            await engine.stop("the test is over")

    asyncio.run(started())


def test_whatever_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every part of a request's way, with every kind of exception."""

    async def check(harness: Harness) -> None:
        parts: list[tuple[Any, str]] = [
            (app_module, "segments_of"),
            (Encoder, "ids"),
            (Tokenizer, "text_pieces"),
            (app_module, "check_fits"),
            (ChatAnswer, "__init__"),
            (Ticket, "submit"),
            (EngineProcess, "send"),
            (Ticket, "started"),
            (Ticket, "next"),
            (ChatAnswer, "push"),
            (Job, "whole"),
            (Job, "events"),
            (app_module, "json_response"),
        ]
        for owner, name in parts:
            real = getattr(owner, name)
            for kind, stream in ((OverflowError, False), (Panic, True)):
                with monkeypatch.context() as patch:
                    is_first = True

                    def broken(*args: Any, kind: Any = kind, real: Any = real, **options: Any) -> Any:
                        nonlocal is_first
                        if is_first:  # giving back may need it too
                            is_first = False
                            raise kind("broken on purpose")
                        return real(*args, **options)

                    patch.setattr(owner, name, broken)
                    status = await harness.request({**BODY, "stream": stream})
                    assert status in (200, 500), (name, kind)
                    if status == 500:
                        error = json.loads(harness.sent[1]["body"])["error"]
                        assert error["type"] == "server_error" and "broken" not in error["message"]
                assert await harness.is_given_back(), (name, kind)

        # A stream that has nothing to say for long says that it is there.
        monkeypatch.setattr(job_module, "KEEP_ALIVE_SECONDS", 0.001)
        assert await harness.request({**BODY, "stream": True}) == 200
        sent = [message["body"] for message in harness.sent[1:]]
        assert b": waiting\n\n" in sent and sent[-1].endswith(b"data: [DONE]\n\n")

    run(check)


def test_engine_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(harness: Harness) -> None:
        engine, real, tries = harness.engine, client_module._launch, 0

        async def launch() -> Any:
            nonlocal tries
            tries += 1
            if tries <= 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return await real()

        monkeypatch.setattr(client_module, "_launch", launch)
        monkeypatch.setattr(client_module, "MAX_RESTART_SECONDS", 0.3)
        monkeypatch.setattr(engine, "stall_seconds", 2)  # the patience of the next life's watchdog
        assert engine._life is not None
        engine._life.process.kill()
        said = set()
        end = time.monotonic() + 180
        while engine.ready is None or tries < 4:
            assert time.monotonic() < end
            try:
                engine.check_ready()
            except Unavailable as error:
                said.add(str(error))
            await asyncio.sleep(0.02)
        assert any("cannot be started (Too many open files)" in text for text in said), said
        assert engine.num_restarts == 4

        # A prompt that takes long to tokenise is no work that the engine leaves undone.
        async def slowly(*args: Any) -> list[int]:
            await asyncio.sleep(3)
            return [1, 2, 3]

        with monkeypatch.context() as patch:
            patch.setattr(Encoder, "ids", slowly)
            assert await harness.request(BODY) == 200
        monkeypatch.setattr(engine, "stall_seconds", 60)
        assert engine.num_restarts == 4

    run(check)


def test_whenever_it_is_cancelled() -> None:
    """After so many turns of the event loop, through the whole of a request; and a send that fails."""

    async def check(harness: Harness) -> None:
        for stream in (False, True):
            turns, is_done = 0, False
            while not is_done:
                task = asyncio.ensure_future(harness.request({**BODY, "stream": stream}))
                for _ in range(turns):
                    if not task.done():
                        await asyncio.sleep(0 if turns < 40 else 0.002)
                is_done = task.done()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert await harness.is_given_back(), (stream, turns)
                turns += 1 if turns < 40 else 20
            assert turns > 20

        for fails_at in range(6):
            num_sent = 0

            async def send(message: Any, fails_at: int = fails_at) -> None:
                nonlocal num_sent
                num_sent += 1
                if num_sent > fails_at:
                    raise OSError("the client is gone")

            await harness.request({**BODY, "stream": True}, send)
            assert await harness.is_given_back(), fails_at

    run(check)


def test_clients_do_not_hear_the_names_of_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log does. Frames as the process of torchrun's rank 0 sends them."""

    class Process:
        async def wait(self) -> int:
            return 1

    async def go() -> None:
        reader, logged = asyncio.StreamReader(), list[str]()
        ours, theirs = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=ours)
        life = client_module._Life(Process(), reader, writer)  # type: ignore[arg-type]
        monkeypatch.setattr(client_module, "_launch", AsyncMock(return_value=life))
        engine = EngineProcess(
            str(EMBEDDED),
            EngineConfig(),
            **{"max_queue": 1, "queue_seconds": 9, "request_seconds": 9, "stall_seconds": 9},
            log=logged.append,
            progress=lambda done, total: None,
        )
        reader.feed_data(wire.frame(wire.Ready(512, 1, 512, [], wire.Status())))
        await engine.start()
        with engine.reserve(1) as ticket:
            reader.feed_data(wire.frame(wire.Lost("rank 1 on there (10.9.0.2) has died", "rank 1 has died")))
            monkeypatch.setattr(client_module, "_launch", AsyncMock(side_effect=OSError(12, "no memory")))
            reader.feed_eof()
            with pytest.raises(Unavailable) as caught:
                await ticket.next()
        assert str(caught.value).startswith("the engine has died: rank 1 has died; it is being restarted")
        assert logged[0].startswith(
            "engine: the engine has died: rank 1 on there (10.9.0.2) has died; restart"
        )
        await engine.stop("the test is over")
        theirs.close()

    asyncio.run(go())
