"""What an attacker or an unlucky operator does: others are served all the same, or told."""

import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serve_support import KEY, QUESTION, SHORT, STORY, Server, wait

CHAT: dict[str, Any] = {"messages": SHORT, "max_tokens": 4, "temperature": 0}
HUGE = 1 << 64


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--max-batch", 3, "--max-queue", 3, "--max-connections", 24, "--max-context", 4096)
    with Server(tmp_path_factory.mktemp("limits"), *options) as running:
        yield running


def http(path: str, body: Any = None, *, close: bool = False, version: str = "1.1") -> bytes:
    """A request as bytes."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/{version}", "Host: localhost"]
    lines += [
        f"Authorization: Bearer {KEY}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    ]
    lines += ["Connection: close"] if close else []
    return "\r\n".join([*lines, "", ""]).encode() + data


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while part := sock.recv(1 << 16):
        data += part
    return data


def test_huge_numbers_are_400_and_keep_no_place(server: Server) -> None:
    for _ in range(2):  # more places than there are would be lost
        for name in ("top_k", "max_tokens", "seed", "n", "top_logprobs", "max_completion_tokens"):
            status, body, _ = server.post("/v1/chat/completions", {**CHAT, "logprobs": True, name: HUGE})
            assert status == 400 and name in body["error"]["message"], body
        for prompt in ([HUGE], [1, -HUGE], [[HUGE]], [1 << 70]):
            status, body, _ = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
            assert status == 400 and "vocabulary" in body["error"]["message"], body
        assert server.post("/detokenize", {"tokens": [HUGE]})[0] == 400
    assert server.chat(SHORT, n=6, max_tokens=2).usage.completion_tokens == 12, "all places are there"


@pytest.mark.parametrize("text", ["0123456789" * 1_000_000, " " * 10_000_000], ids=["digits", "spaces"])
def test_prompt_that_cannot_fit_disturbs_nobody(server: Server, text: str) -> None:
    """It is refused before it is tokenised in full; memory returns; others do not wait for it."""
    waits: list[float] = []
    is_over = threading.Event()

    def watch() -> None:
        connection = server.connection()
        while not is_over.is_set():
            began = time.monotonic()
            connection.request("GET", "/health")
            connection.getresponse().read()
            waits.append(time.monotonic() - began)
            time.sleep(0.002)

    def resident_mb() -> int:
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) // 1024  # type: ignore[index]

    before, body = (
        resident_mb(),
        json.dumps({**CHAT, "messages": [{"role": "user", "content": text}]}).encode(),
    )
    plain = json.dumps({"prompt": text, "max_tokens": 1}).encode()
    watching = threading.Thread(target=watch)
    watching.start()
    began = time.monotonic()
    try:
        for path, data in (("/v1/chat/completions", body), ("/v1/completions", plain)):
            status, answer, _ = server.post(path, data)
            assert status == 400 and answer["error"]["code"] == "context_length_exceeded", answer
        # Not refused by its size alone: it could be 2,000 tokens, and is 40,000.
        status, answer, _ = server.post("/v1/completions", {"prompt": "0123456789" * 4000, "max_tokens": 1})
        assert status == 400 and "at least" in answer["error"]["message"]
    finally:
        took = time.monotonic() - began
        is_over.set()
        watching.join(10)
    assert took < 10, "tokenised in full it takes a minute"
    # The 50 ms that are promised, and as much again for a machine that runs other tests.
    assert sorted(waits)[int(len(waits) * 0.9)] < 0.05 and max(waits) < 1, (sorted(waits)[-5:], len(waits))
    assert resident_mb() - before < 150


def test_long_text_is_tokenised_beside_others(server: Server) -> None:
    text = "The boat is blue, and it jumps over 12 dogs.\n" * 6000
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(server.post, "/tokenize", {"prompt": text})
        num_short = 0
        while not long.done():
            began = time.monotonic()
            assert server.post("/tokenize", {"prompt": "short"})[0] == 200
            assert time.monotonic() - began < 1, "short texts pass long ones"
            num_short += 1
        assert num_short > 3 and long.result()[1]["count"] > 50_000


def test_kept_alive_requests_are_not_delayed(server: Server) -> None:
    """Nagle's algorithm against delayed acknowledgements costs 40 ms each."""
    connection, times = server.connection(), []
    for _ in range(30):
        began = time.monotonic()
        connection.request("GET", "/health")
        connection.getresponse().read()
        times.append(time.monotonic() - began)
    connection.close()
    assert sorted(times)[15] < 0.02, times


def test_idle_and_half_sent_connections_keep_nobody_out(server: Server) -> None:
    """Five times as many as may be open, of each kind, and no key needed for any of them."""
    beginnings = (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: ")
    for beginning in beginnings:
        sockets = [connect(server) for _ in range(40)]
        for sock in sockets:
            sock.sendall(beginning)
        assert server.raw("GET", "/health")[0] == 200
        assert server.chat(SHORT, max_tokens=2).usage.completion_tokens == 2
        closed = 0
        for sock in sockets:
            sock.settimeout(0.01)
            try:
                closed += sock.recv(1) == b""
            except ConnectionResetError:
                closed += 1
            except TimeoutError:
                pass
            sock.close()
        assert 15 < closed < 40, "the oldest made room"
    assert len(server.log.splitlines()) < 60 + server.log.count("route=")


def test_connections_in_use_are_not_taken(server: Server) -> None:
    streams = []
    body = {**CHAT, "messages": STORY, "max_tokens": 12, "stream": True}
    for _ in range(6):
        streams.append(connect(server))
        streams[-1].sendall(http("/v1/chat/completions", body, close=True))
    idle = [connect(server) for _ in range(60)]
    for sock in streams:
        assert read_all(sock).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    for sock in (*streams, *idle):
        sock.close()


def test_half_closed_client_is_answered_and_one_that_left_is_not(server: Server) -> None:
    for stream in (False, True):
        sock = connect(server)
        sock.sendall(http("/v1/chat/completions", {**CHAT, "max_tokens": 30, "stream": stream}))
        sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock).decode()
        sock.close()
        assert ("[DONE]" if stream else '"finish_reason":') in answer
        final = re.sub(r"^(HTTP/1.1 100 Continue\r\n\r\n)+", "", answer)
        assert final.startswith("HTTP/1.1 200 OK")
    for body in ({**CHAT, "messages": STORY, "max_tokens": 2000},):
        sock = connect(server)
        sock.sendall(http("/v1/chat/completions", body))
        wait(lambda: server.gauge("dsv4_num_requests_running") == 1, 10)
        sock.close()  # an ordinary one, which looks like half of one
        wait(server.is_idle, 5)


def test_stream_of_http_1_0_is_the_same_without_chunks(server: Server) -> None:
    """Clients that know no chunks get the events as they are, until the connection ends."""
    body, streams = {**CHAT, "temperature": 0, "max_tokens": 12, "stream": True}, []
    for version in ("1.1", "1.0"):
        with connect(server) as sock:
            sock.sendall(http("/v1/chat/completions", body, close=True, version=version))
            head, _, data = read_all(sock).partition(b"\r\n\r\n")
        assert (b"chunked" in head) == (version == "1.1")
        if version == "1.1":
            parts = data.split(b"\r\n")[:-3]
            sizes, chunks = parts[::2], parts[1::2]
            assert [int(size, 16) for size in sizes] == list(map(len, chunks))
            data = b"".join(chunks)
        streams.append(re.sub(rb'"id":"[^"]*","created":\d+', b"", data))
    assert streams[0] == streams[1]
    assert streams[0].endswith(b"data: [DONE]\n\n")


def test_client_that_does_not_read_is_cut(server: Server) -> None:
    """Its sequences end when its buffer is full; the connection goes too, see connections.WRITE_SECONDS."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(http("/v1/chat/completions", {**CHAT, "messages": STORY, "max_tokens": 200, "stream": True}))
    time.sleep(0.5)
    assert server.chat(SHORT, max_tokens=2).usage.completion_tokens == 2
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    wait(server.is_idle, 10)


TAKEN: list[dict[str, Any]] = [
    {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    {"logit_bias": {}},
    {"logit_bias": {"5": 0}},
    {"presence_penalty": 0.1, "frequency_penalty": -2, "repetition_penalty": 1.1, "logit_bias": {"5": 1}},
    {"logit_bias": {str(id): -100 for id in range(1024)}},
    {"top_k": -1},
    {"ignore_eos": True},
    {"chat_template_kwargs": {"thinking": False}},
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"messages": [{**SHORT[0], "name": "Ann"}]},
    {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}],
            }
        ]
    },
    {"messages": [*SHORT, {"role": "assistant", "content": "5", "refusal": None, "annotations": []}, *SHORT]},
    {"messages": [*SHORT, {"role": "assistant", "content": "2 + 3", "prefix": True}]},
]
CALL = {"id": "c", "type": "function", "index": 0, "function": {"name": "add", "arguments": "{}"}}
TAKEN += [
    {"messages": [*SHORT, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "5"}]},
    {"messages": [{"role": "system", "content": "Add."}, {"role": "developer", "content": "Well."}, *SHORT]},
]
TOOL = {"type": "function", "function": {"name": "f"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"presence_penalty": 2.1}, "'presence_penalty': expected `float` <= 2.0, found 2.1"),
    ({"repetition_penalty": 0}, "'repetition_penalty': expected `float` >= 0.01, found 0"),
    ({"logit_bias": {"5": 101}}, "'logit_bias[...]': expected `float` <= 100.0"),
    ({"logit_bias": {"five": 1}}, "'logit_bias': expected keys of `int`"),
    ({"logit_bias": {"-5": 1}}, "'logit_bias': expected keys of `int` >= 0"),
    ({"logit_bias": {"4096": 1}}, "logit_bias: id 4096 is outside the vocabulary of 4096"),
    ({"logit_bias": {str(id): 1 for id in range(1025)}}, "'logit_bias': expected `object` of length <= 1024"),
    ({"chat_template_kwargs": {"frobnicate": 1}}, "chat_template_kwargs.frobnicate"),
    ({"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "none"}, "contradicts"),
    ({"messages": [{"role": "assistant", "content": "5", "prefix": True}, *SHORT]}, "last message"),
    ({"messages": [*SHORT, {"role": "system", "content": "x"}]}, "nothing to answer"),
    ({"messages": [*SHORT, {"role": "assistant", "content": "x"}]}, "prefix: true"),
    ({"messages": [{**SHORT[0], "task": "title"}]}, "no token <｜title｜>"),
    (
        {"tools": [{"function": {"name": "f", "parameters": {"required": 5}}}], "tool_choice": "required"},
        "required is 5",
    ),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "one of"),
    ({"structured_outputs": {"grammar": "start: nowhere"}}, "grammar"),
    ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
    ({"prompt_logprobs": 1, "stream": True}, "leave out stream"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "the field that its type names"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "the field that its type names"),
    ({"structured_outputs": "x", "guided_regex": "a"}, "give guided_regex or structured_outputs, not both"),
]


def test_what_clients_send_is_taken(server: Server) -> None:
    for extra in TAKEN:
        status, body, _ = server.post("/v1/chat/completions", {**CHAT, "max_tokens": 2, **extra})
        assert status == 200, (extra, body)
    for extra, says in REFUSED:
        status, body, _ = server.post("/v1/chat/completions", {**CHAT, **extra})
        assert status == 400 and says in body["error"]["message"], (extra, body)
    for path in ("/v1/chat/completions", "/v1/completions"):
        ask = CHAT if "chat" in path else {"prompt": "x"}
        status, body, _ = server.post(path, {**ask, "max_tokens": 0})
        assert status == 400 and body["error"]["param"] == "max_tokens", body
    assert server.client.models.retrieve("tiny").id == "tiny"
    assert server.raw("GET", "/v1/models/other/one")[0] == 404
    for path in ("/health", "/v1/models", "/"):
        status, body, headers = server.raw("HEAD", path)
        assert status == 200 and not body and int(headers["content-length"]) > 0
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True})[0] == 200


def test_answer_that_was_begun_goes_on_as_content(server: Server) -> None:
    whole = server.chat(SHORT).choices[0].message
    begun = {
        "role": "assistant",
        "content": "2 + 3",
        "reasoning_content": whole.reasoning_content,
        "prefix": True,
    }
    for effort in ("high", "none"):
        choice = server.chat([*SHORT, begun], reasoning_effort=effort).choices[0]
        assert choice.message.content == " = 5." and choice.finish_reason == "stop"
        assert not getattr(choice.message, "reasoning_content", None)


def test_forms_as_vllm_spells_them(server: Server) -> None:
    for form in ({"regex": "[ab]{3}"}, {"choice": ["aab", "bba"]}, {"grammar": "start: /[ab]{3}/"}):
        done = server.chat(SHORT, extra_body={"structured_outputs": form}, reasoning_effort="none")
        assert re.fullmatch("[ab]{3}", done.choices[0].message.content), form
        options: dict[str, Any] = {"prompt": "x", "max_tokens": 20, "structured_outputs": form}
        status, body, _ = server.post("/v1/completions", options)
        assert status == 200 and re.fullmatch("[ab]{3}", body["choices"][0]["text"]), body


def test_errors_show_no_path_of_the_machine(server: Server) -> None:
    for path, body in (
        ("/detokenize", {"tokens": [4090, 99999]}),
        ("/tokenize", {"messages": [{**SHORT[0], "task": "action"}]}),
        ("/v1/chat/completions", {**CHAT, "messages": [{**SHORT[0], "task": "query"}]}),
    ):
        status, answer, _ = server.post(path, body)
        assert status == 400 and "/" not in answer["error"]["message"], answer


def test_times_per_token_have_fine_buckets(server: Server) -> None:
    server.chat(QUESTION, max_tokens=8)
    text = server.raw("GET", "/metrics")[1]
    name = "dsv4_request_time_per_output_token_seconds"
    edges = [float(edge) for edge in re.findall(name + r'_bucket{le="([\d.e-]+)"', text)]
    assert edges[0] == 0.0005 and sum(edge <= 0.02 for edge in edges) >= 8


def test_nothing_went_wrong(server: Server) -> None:
    """Last: the tests above left no trace in the log but lines for requests."""
    assert "Traceback" not in server.log and "mistake" not in server.log, server.log
    wait(server.is_idle, 5)
