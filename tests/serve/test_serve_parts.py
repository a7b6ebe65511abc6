"""The server's parts without a server: frames cut anywhere, answers without markup, slow callers."""

import asyncio
import gc
import json
import random
import re
import socket
import ssl
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h11
import pytest
import uvicorn
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from uvicorn.server import ServerState

from dsv4.engine.request import Delta, Request, SamplingParams, Token
from dsv4.errors import RequestError
from dsv4.models import EMBEDDED
from dsv4.serve.answer import ChatAnswer, Piece, join_calls
from dsv4.serve.connections import Connection, Listener
from dsv4.serve.gate import Gate
from dsv4.serve.job import Keys
from dsv4.serve.metrics import Times
from dsv4.serve.openai import error_body
from dsv4.serve.parse import parse
from dsv4.serve.schema import BadField, ChatBody
from dsv4.serve.ticket import MAX_BUFFERED_DELTAS, Busy, Ticket, TooSlow
from dsv4.serve.wire import (
    MAX_FRAME_BYTES,
    Cancel,
    Frames,
    Ready,
    Status,
    Stepped,
    Submit,
    WireError,
    frame,
    from_engine,
    read,
    to_engine,
)
from dsv4.text.dsml import MARKS
from dsv4.text.tokenizer import Special, Tokenizer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="true">x'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(EMBEDDED)


def test_frames_cut_anywhere_give_the_same_messages() -> None:
    params = SamplingParams(seed=(1 << 64) - 1, stop=("\n",), stop_ids=(3,), logprobs=2)
    messages = [Submit(Request("s1", tuple(range(300)), params)), Cancel("s1"), Cancel("é" * 100)]
    data, chance = b"".join(map(frame, messages)), random.Random(0)
    for _ in range(50):
        frames, at, got = Frames(), 0, []
        while at < len(data):
            size = chance.choice((1, 2, 3, 5, 100, 1000))
            got += [read(to_engine, body) for body in frames.push(data[at : at + size])]
            at += size
        assert got == messages
    token = Token(7, float("-inf"), ((7, -0.5), (8, float("-inf"))))
    step = Stepped(
        [Delta("s1", token, "\n", "stop"), Delta("s2", None, "", "error", "why")], Status(1, 2, 3, 4)
    )
    assert read(from_engine, frame(step)[4:]) == step


def test_damaged_frames_are_refused() -> None:
    with pytest.raises(WireError, match=f"{MAX_FRAME_BYTES + 1} bytes"):
        Frames().push((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    body = frame(Cancel("s1"))[4:]
    for damaged in (b"", body[:-1], body.replace(b"Cancel", b"Evil!!"), frame(Stepped([], Status()))[4:]):
        with pytest.raises(WireError):
            read(to_engine, damaged)


def ids_of(tokenizer: Tokenizer, output: str) -> list[int]:
    parts = MARKS.split(output)
    return tokenizer.encode_prompt(Special(p) if i % 2 else p for i, p in enumerate(parts))


def answer(
    tokenizer: Tokenizer, ids: Sequence[int], reason: str = "stop", **options: Any
) -> tuple[list[Piece], str, str]:
    """-> the pieces, the content and the reasoning they add up to."""
    options = {"thinking": True, "tools": [TOOL], "stops": (), "id_prefix": "call_", **options}
    made, pieces = ChatAnswer(tokenizer, **options), []
    for position, id in enumerate(ids):
        is_last = position == len(ids) - 1
        pieces.append(made.push(Delta("s", Token(id, -1.0), "", reason if is_last else None)))  # type: ignore[arg-type]
        if made.finish_reason:
            break
    return pieces, "".join(p.content for p in pieces), "".join(p.reasoning for p in pieces)


def test_call_is_given_out_as_it_comes(tokenizer: Tokenizer) -> None:
    pieces, content, reasoning = answer(tokenizer, ids_of(tokenizer, f"hm</think>I add.\n\n{CALL}"))
    assert (content, reasoning) == ("I add.", "hm")
    (call,) = join_calls(pieces)
    assert call["function"] == {"name": "add", "arguments": '{"a": "x"}'} and call["index"] == 0
    assert sum(bool(piece.calls) for piece in pieces) > 1, "in more than one piece"
    assert pieces[-1].finish_reason == "tool_calls"


def test_without_tools_there_are_no_calls(tokenizer: Tokenizer) -> None:
    pieces, content, _ = answer(tokenizer, ids_of(tokenizer, f"</think>I add.\n\n{CALL}"), tools=None)
    assert content == "I add." and not any(piece.calls for piece in pieces)
    assert pieces[-1].finish_reason == "stop"


def test_cut_or_damaged_anywhere_no_mark_reaches_the_content(tokenizer: Tokenizer) -> None:
    """Every prefix, and outputs with tokens taken out, doubled or swapped."""
    ids, chance = ids_of(tokenizer, f"hm</think>I add.\n\n{CALL}"), random.Random(1)
    cases = [(ids[:end], "length") for end in range(1, len(ids))]
    for _ in range(300):
        damaged = list(ids)
        for _ in range(chance.randint(1, 3)):
            at, other = chance.randrange(len(damaged)), chance.randrange(len(damaged))
            change = chance.randrange(3)
            if change == 0 and len(damaged) > 1:
                del damaged[at]
            elif change == 1:
                damaged.insert(at, damaged[other % len(damaged)])
            else:
                damaged[at] = damaged[other % len(damaged)]
        cases.append((damaged, chance.choice(("stop", "length"))))
    for case, reason in cases:
        pieces, content, reasoning = answer(tokenizer, case, reason)
        shown = content + reasoning
        assert not MARKS.search(shown) and "｜" not in shown, tokenizer.decode(case)
        assert pieces[-1].finish_reason in ("stop", "length", "tool_calls")
        calls = join_calls(pieces)
        assert (pieces[-1].finish_reason == "tool_calls") <= bool(calls)
        for call in calls:
            assert not MARKS.search(call["function"]["arguments"]) and call["function"]["name"]
            if pieces[-1].finish_reason == "length" and case == ids[: len(case)]:
                assert '{"a": "x"}'.startswith(call["function"]["arguments"]), "a beginning of the whole call"
        # Cut by the token limit inside its arguments or before them, a call does not vanish.
        if case == ids[: len(case)] and "parameter name" in tokenizer.decode(case):
            assert calls[0]["function"]["name"] == "add"


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Ids of bytes that may begin or end inside a character."""
    try:
        return tokenizer.encode_text(data.decode())
    except UnicodeDecodeError:
        ordinary = set(range(tokenizer.vocab_size)) - tokenizer.special_texts.keys()
        single = {tokenizer.bytes_of(id): id for id in ordinary}
        return [single[data[i : i + 1]] for i in range(len(data))]


def test_outputs_cut_at_every_byte_give_the_same(tokenizer: Tokenizer) -> None:
    """However the model splits what it writes into tokens."""
    table = '{"city": "Zürich 🦊", "n": [1, 2], "s": "<b> </b>\\n"}'
    for output in (f"hm é</think>I add ü.\n\n{CALL.replace('>x<', '>é 🦊 </x<')}", f"</think>{table}"):
        wanted: tuple[Any, ...] | None = None
        parts = [(part, MARKS.fullmatch(part)) for part in MARKS.split(output) if part]
        for which, (part, is_mark) in enumerate(parts):
            for cut in [0] if is_mark else range(len(part.encode())):
                ids: list[int] = []
                for index, (other, other_is_mark) in enumerate(parts):
                    data = other.encode()
                    if other_is_mark:
                        ids.append(tokenizer.special_ids[other])
                    elif index == which:
                        ids += byte_ids(tokenizer, data[:cut]) + byte_ids(tokenizer, data[cut:])
                    else:
                        ids += byte_ids(tokenizer, data)
                pieces, content, reasoning = answer(tokenizer, ids)
                calls = join_calls(pieces)
                found = (content, reasoning, calls, pieces[-1].finish_reason)
                wanted = wanted or found
                assert found == wanted, (part, cut)
        assert wanted is not None and (
            wanted[0] == table or json.loads(wanted[2][0]["function"]["arguments"])
        )
        assert not MARKS.search(wanted[0] + wanted[1])


def test_lookalikes_of_ordinary_tokens_are_text(tokenizer: Tokenizer) -> None:
    quoted = "the tag <think> and <｜DSML｜tool_calls>"
    _, content, _ = answer(tokenizer, tokenizer.encode_text(quoted), thinking=False)
    assert content == quoted


def test_stop_string_across_tokens(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "END</think>one two END three")
    for stop, want in (("END", "one two "), ("o E", "one tw"), ("nowhere", "one two END three"), ("o", "")):
        pieces, content, reasoning = answer(tokenizer, ids, "length", stops=(stop,))
        assert (content, reasoning) == (want, "END")
        assert pieces[-1].finish_reason == ("length" if stop == "nowhere" else "stop")


def test_failed_sequence_is_an_error(tokenizer: Tokenizer) -> None:
    made = ChatAnswer(tokenizer, thinking=False, tools=None, stops=(), id_prefix="")
    with pytest.raises(RequestError, match="NaN"):
        made.push(Delta("s", None, "", "error", "the logits hold NaN"))


READY = Ready(max_context=64, max_batch=2, vocab_size=4096, notes=[], status=Status())


class Engine:
    """Only what a Ticket asks of it."""

    request_seconds, queue_seconds, retry_seconds = 60.0, 60.0, 7

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def forget(self, id: str) -> None:
        self.forgotten.append(id)


def test_caller_that_does_not_read_loses_its_ticket() -> None:
    async def run() -> None:
        engine = Engine()
        ticket = Ticket(engine, ["s1", "s2"], READY, asyncio.get_running_loop().time())  # type: ignore[arg-type]
        for number in range(MAX_BUFFERED_DELTAS):
            ticket.take(Delta("s1", Token(number), ""))
        assert not engine.forgotten
        ticket.take(Delta("s1", Token(0), ""))
        assert sorted(engine.forgotten) == ["s1", "s2"]
        assert await ticket.next() == [
            (0, Delta("s1", Token(number), "")) for number in range(MAX_BUFFERED_DELTAS)
        ]
        with pytest.raises(TooSlow, match="not read in time"):
            await ticket.next()

    asyncio.run(run())


def test_a_silent_ticket_can_be_asked_again() -> None:
    """Patience ends, deltas come, patience again: each in its time, with one alarm at most."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        ticket = Ticket(Engine(), ["s1"], READY, loop.time())  # type: ignore[arg-type]
        ticket.take_start()
        for number in range(3):
            began = loop.time()
            with pytest.raises(TimeoutError):
                await ticket.next(0.05)
            assert 0.05 <= loop.time() - began < 1
            loop.call_later(0.03, ticket.take, Delta("s1", Token(number), ""))
            assert await ticket.next(10) == [(0, Delta("s1", Token(number), ""))]
        ticket.take(Delta("s1", Token(9), "", "stop"))
        assert len(await ticket.next()) == 1 and await ticket.next() == []
        ticket.close()
        assert ticket._alarm is None

    asyncio.run(run())


def test_caller_whose_time_is_over_frees_its_sequences() -> None:
    async def run() -> None:
        engine = Engine()
        now = asyncio.get_running_loop().time()
        ticket = Ticket(engine, ["s1"], READY, now - 59.95)  # type: ignore[arg-type]
        with pytest.raises(TooSlow, match="longer than"):
            await ticket.started()
        assert engine.forgotten == ["s1"]

    asyncio.run(run())


def test_caller_that_waits_too_long_for_a_place_is_told_when_to_come_back() -> None:
    async def run() -> None:
        engine = Engine()
        engine.queue_seconds = 0.05
        for starts in (False, True):
            ticket = Ticket(engine, ["s1"], READY, asyncio.get_running_loop().time())  # type: ignore[arg-type]
            ticket.take_answer("s1")
            if starts:
                ticket.take_start()
                await ticket.started()
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(ticket.next(), 0.2)
            else:
                with pytest.raises(Busy, match="nothing was free for") as refused:
                    await ticket.started()
                assert refused.value.retry_seconds == 7 and error_body(refused.value)[0] == 429

    asyncio.run(run())


def test_web_page_cannot_lend_its_name_to_a_local_server() -> None:
    """DNS rebinding: without keys, only names of this machine are answered."""

    async def status(host: bytes, **options: Any) -> int:
        sent: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def send(message: Any) -> None:
            sent.append(message)

        made = {"keys": Keys(), "is_local": True, "isolates": False, "log": lambda line: None, **options}
        made["is_lenient"] = False
        metrics = SimpleNamespace(requests=Counter("x", "x", ["a", "b"], registry=None))
        service = SimpleNamespace(**made, metrics=metrics)
        scope = {"type": "http", "path": "/v1/models", "method": "GET", "headers": [(b"host", host)]}
        await Gate(app, service)(scope, None, send)  # type: ignore[arg-type]
        return sent[0]["status"]

    for host in (b"127.0.0.1:8000", b"localhost", b"LOCALHOST:1", b"[::1]:8000"):
        assert asyncio.run(status(host)) == 200
    for host in (b"evil.example", b"evil.example:8000", b"", b"localhost.evil.example", b"127.0.0.1.evil:80"):
        assert asyncio.run(status(host)) == 403
    assert asyncio.run(status(b"evil.example", is_local=False)) == 200
    assert asyncio.run(status(b"proxy", keys=Keys((b"x",)))) == 401, "keys do it where there are keys"


def test_numbers_that_nothing_holds_are_the_clients_mistake() -> None:
    ask = '{"messages":[{"role":"user","content":"x"}],%s}'
    for fields, says in (
        ('"temperature":1e999', "the body: number out of range; expected numbers of at most 64 bits"),
        ('"temperature":3,"seed":-1e999', "number out of range; expected numbers of"),
        ('"user":' + "9" * 5000, "integer value out of range; expected numbers of"),
        ('"messages":[],"metadata":{"a":[1e999]}', "number out of range; expected numbers of"),
        ('"temperature":3', "'temperature': expected `float` <= 2.0, found 3"),
    ):
        with pytest.raises(BadField) as refusal:
            parse(ChatBody, (ask % fields).encode())
        assert says in str(refusal.value), fields


def test_http_process_does_without_torch() -> None:
    code = "import sys, dsv4.cli.serve, dsv4.serve.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


def test_chunks_are_those_of_h11_and_wait_for_the_client() -> None:
    """Who does not read stops the writer, who reads on gets every byte, and who leaves holds up nobody."""
    part, count, written, ended = b"0123456789abcdef" * 4096, 200, 0, asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal written
        ended.clear()
        write_chunk = scope["state"]["write_chunk"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(count):
            if number:
                await write_chunk(part[number:])
            else:
                await send({"type": "http.response.body", "body": part[number:], "more_body": True})
            written += 1
        await send({"type": "http.response.body", "body": b"end"})
        ended.set()

    async def run() -> None:
        nonlocal written
        config = uvicorn.Config(app, log_config=None, lifespan="off", proxy_headers=False)
        state, idle = ServerState(), dict[Connection, float]()
        made = weakref.WeakSet[Connection]()

        def connection() -> Connection:
            made.add(new := Connection(idle, config=config, server_state=state))
            return new

        server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
        async with server:
            for leaves in (False, True):
                where = server.sockets[0].getsockname()
                reader, writer = await asyncio.open_connection(*where, limit=1 << 14)
                parser = h11.Connection(h11.CLIENT)
                request = h11.Request(method="GET", target="/", headers=[("Host", "x")])
                writer.write((parser.send(request) or b"") + (parser.send(h11.EndOfMessage()) or b""))
                stopped = written = 0
                while not 0 < stopped == written:
                    stopped = written
                    await asyncio.sleep(0.2)
                assert written < count, "nobody reads"
                if leaves:
                    writer.transport.abort()
                    await asyncio.wait_for(ended.wait(), 5)
                    break
                body, event = bytearray(), None
                while not isinstance(event, h11.EndOfMessage):
                    event = parser.next_event()
                    if event is h11.NEED_DATA:
                        parser.receive_data(await reader.read(1 << 16))
                    elif isinstance(event, h11.Data):
                        body += event.data
                assert body == b"".join(part[number:] for number in range(count)) + b"end"
                writer.close()
        while idle or made:  # freed without the collector
            await asyncio.sleep(0.01)

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(run(), 30))
    finally:
        gc.enable()


def test_silent_handshakes_take_no_more_than_all_places() -> None:
    """Many at once, of clients that never say what TLS begins with."""

    async def run() -> None:
        config = uvicorn.Config(lambda scope: None, log_config=None, http="h11")
        server: Any = SimpleNamespace(config=config, server_state=ServerState())
        sock = socket.create_server(("127.0.0.1", 0), backlog=100)
        listener = Listener(sock, server, 4, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        listener.start()
        clients = []
        for _ in range(3):
            for _ in range(20):
                clients.append(client := socket.socket())
                client.setblocking(False)
                client.connect_ex(sock.getsockname())
            for _ in range(4):
                await asyncio.sleep(0.03)  # longer than the youngest are left alone
                assert listener.num_open <= 4
        assert listener.num_open == 4
        listener.stop()
        for client in clients:
            client.close()

    asyncio.run(run())


def test_times_are_told_as_a_histogram_tells_them() -> None:
    told, bounds, chance = [], (0.001, 0.004, 0.25, 1.0), random.Random(0)
    values = [*bounds, 99.0, *(chance.expovariate(20) for _ in range(200))]
    for kind in (Times, Histogram):
        registry = CollectorRegistry()
        if kind is Times:
            registry.register(times := Times("seconds", "told", bounds))
        else:
            times = Histogram("seconds", "told", buckets=bounds, registry=registry)
        for value in values:
            times.observe(value)
        told.append(re.sub(r"_created [\d.e+]+", "_created", generate_latest(registry).decode()))
    assert told[0] == told[1]
    assert 'le="0.25"' in told[0]
