"""The server as its clients see it: OpenAI's own client, and raw requests where that one is too polite."""

import json
import math
import socket
import struct
import threading
from typing import Any

import openai
import pytest
from serve_support import KEY, OTHER_KEY, QUESTION, SHORT, STORY, Server, wait

from dsv4.serve.gate import LEAST_BODY_BYTES


def joined(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """What the chunks of a stream add up to, per choice."""
    out: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            into = out.setdefault(
                choice.index, {"content": "", "reasoning": "", "finish": None, "logprobs": []}
            )
            assert into["finish"] is None, "nothing follows the finish reason"
            into["content"] += choice.delta.content or ""
            into["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            into["finish"] = choice.finish_reason
            if choice.logprobs is not None:
                into["logprobs"] += [entry.token for entry in choice.logprobs.content or ()]
    return out


def test_chat_thinks_and_answers(server: Server) -> None:
    done = server.chat()
    choice = done.choices[0]
    assert choice.message.content == "27 + 58 = 85." and choice.finish_reason == "stop"
    assert "15" in choice.message.reasoning_content
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert 0 < done.usage.completion_tokens_details.reasoning_tokens < done.usage.completion_tokens
    assert done.model == "tiny" and done.id.startswith("chatcmpl-")


@pytest.mark.parametrize(
    "extra", [{"reasoning_effort": "none"}, {"extra_body": {"thinking": {"type": "disabled"}}}]
)
def test_thinking_off(server: Server, extra: dict[str, Any]) -> None:
    done = server.chat(max_tokens=8, **extra)
    assert done.usage.completion_tokens_details.reasoning_tokens == 0
    assert getattr(done.choices[0].message, "reasoning_content", None) is None
    assert done.choices[0].message.content


def test_stream_and_whole_are_the_same(server: Server) -> None:
    options: dict[str, Any] = {"n": 2, "temperature": 0.9, "seed": 11, "logprobs": True, "max_tokens": 32}
    whole = server.chat(SHORT, **options)
    chunks = list(server.chat(SHORT, **options, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    parts = joined(chunks)
    assert sorted(parts) == [0, 1]
    for choice in whole.choices:
        part = parts[choice.index]
        assert part["content"] == choice.message.content
        assert part["reasoning"] == getattr(choice.message, "reasoning_content", "")
        assert part["finish"] == choice.finish_reason
        assert part["logprobs"] == [entry.token for entry in choice.logprobs.content]


def test_logprobs_are_of_the_tokens_shown(server: Server) -> None:
    choice = server.chat(SHORT, logprobs=True, top_logprobs=3).choices[0]
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert bytes(entry.bytes).decode() == entry.token
        assert sum(math.exp(other.logprob) for other in entry.top_logprobs) <= 1 + 1e-5


def test_streamed_logprobs_are_those_of_the_whole_answer(server: Server) -> None:
    """Chunks of reasoning have no `content`, but its key, which clients read."""
    whole = server.chat(SHORT, logprobs=True).choices[0].logprobs.model_dump()
    parts: dict[str, list[Any]] = {"content": [], "reasoning_content": []}
    for chunk in server.chat(SHORT, logprobs=True, stream=True):
        said = chunk.choices[0].logprobs
        if said is not None:
            assert "content" in said.model_fields_set
            for name, entries in parts.items():
                entries += said.model_dump().get(name) or []
    assert parts["content"] == whole["content"] and parts["content"]
    assert parts["reasoning_content"] == whole["reasoning_content"] and parts["reasoning_content"]


def test_stop_ends_the_content_and_not_the_reasoning(server: Server) -> None:
    choice = server.chat(SHORT, stop=["3 =", "nowhere"]).choices[0]
    assert choice.message.content == "2 + " and choice.finish_reason == "stop"
    part = joined(list(server.chat(SHORT, stop="3", stream=True)))[0]
    assert part["content"] == "2 + " and "3" in part["reasoning"]
    wait(server.is_idle, 5)


def test_plain_completions(server: Server) -> None:
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 6, "logprobs": 2}
    done = server.client.completions.create(prompt="Once upon", **options)
    choice = done.choices[0]
    assert choice.text.startswith(" a time") and choice.finish_reason == "length"
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == [
        len("".join(choice.logprobs.tokens[:i])) for i in range(len(choice.logprobs.tokens))
    ]
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)
    ids = server.post("/tokenize", {"prompt": "Once upon"})[1]["tokens"]
    assert server.post("/detokenize", {"tokens": ids})[1] == {"prompt": "Once upon"}
    chunks = list(server.client.completions.create(prompt=[0, *ids], stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    offsets = [at for chunk in chunks for at in (chunk.choices[0].logprobs or choice.logprobs).text_offset]
    assert offsets == choice.logprobs.text_offset
    two = server.client.completions.create(
        model="tiny", prompt="The", n=2, seed=5, temperature=2, max_tokens=8
    )
    assert two.choices[0].text != two.choices[1].text, "each answer has a seed of its own"


def test_echo_scores_the_prompt(server: Server) -> None:
    """As evaluation harnesses ask: the log-probability of every token of a given text."""
    text = "Once upon a time there was a boat."
    ids = server.post("/tokenize", {"prompt": text})[1]["tokens"]
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "logprobs": 2}
    done = server.client.completions.create(prompt=text, echo=True, max_tokens=3, **options)
    choice, logprobs = done.choices[0], done.choices[0].logprobs
    assert choice.text.startswith(text) and "".join(logprobs.tokens) == choice.text
    assert len(logprobs.tokens) == len(ids) + 3 and done.usage.completion_tokens == 3
    assert all(value <= 0 for value in logprobs.token_logprobs)
    # The same numbers come out when each token is generated instead of given.
    for position in (1, 4, len(ids) - 1):
        again = server.client.completions.create(prompt=[0, *ids[:position]], max_tokens=1, **options)
        assert again.choices[0].logprobs.top_logprobs[0].items() <= logprobs.top_logprobs[position].items()
    chosen = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    assert all(top[token] == value and 2 <= len(top) <= 3 for token, value, top in chosen)

    given = server.client.completions.create(
        prompt=[[0, *ids], ids[:5]], echo=True, max_tokens=0, n=2, **options
    )
    assert [choice.index for choice in given.choices] == [0, 1, 2, 3] and given.usage.completion_tokens == 0
    assert given.choices[0].logprobs.token_logprobs == [None, *logprobs.token_logprobs[: len(ids)]]
    assert given.choices[0] == given.choices[1].model_copy(update={"index": 0})
    assert given.choices[2].text == "".join(given.choices[2].logprobs.tokens)
    assert given.usage.prompt_tokens == len(ids) + 1 + 5
    stream = list(
        server.client.completions.create(prompt=text, echo=True, max_tokens=3, stream=True, **options)
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == choice.text
    offsets = [at for chunk in stream for at in (chunk.choices[0].logprobs or logprobs).text_offset]
    assert offsets[: len(logprobs.text_offset)] == logprobs.text_offset


def test_penalties_and_biases(server: Server) -> None:
    length = 12

    def texts(**wishes: Any) -> list[str]:
        how = {"temperature": 0, "max_tokens": length, **wishes}
        extra = {"repetition_penalty": how.pop("repetition_penalty", 1), "ignore_eos": True}
        extra["top_k"] = 3  # of which some come again soon
        made = server.client.completions.create(model="tiny", prompt="Once", **how, extra_body=extra)
        return [choice.text for choice in made.choices]

    sampled: dict[str, Any] = {"temperature": 2, "seed": 3}
    (plain,) = texts(**sampled)
    (forced,) = texts(logit_bias={"70": 100})
    assert len(set(forced)) == 1 and len(forced) == length
    wishes: dict[str, Any] = {"presence_penalty": 2, "frequency_penalty": 1.5, "repetition_penalty": 2}
    assert all(texts(**sampled, **{name: value}) != [plain] for name, value in wishes.items())
    both = texts(n=2, **sampled, **wishes)
    assert both == texts(**sampled, **wishes) + texts(temperature=2, seed=4, **wishes)


def test_several_prompts(server: Server) -> None:
    prompts = ["Once upon", "The boat", "What is"]
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 5}
    together = server.client.completions.create(prompt=prompts, **options)
    alone = [server.client.completions.create(prompt=prompt, **options) for prompt in prompts]
    assert [c.text for c in together.choices] == [one.choices[0].text for one in alone]
    assert together.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
    status, body, _ = server.post("/v1/completions", {"prompt": ["x"] * 7, "max_tokens": 1})
    assert status == 400 and "7 sequences" in body["error"]["message"], "more than may ever wait"


def test_conversation_with_what_the_server_answered(server: Server) -> None:
    first = server.chat(SHORT).choices[0].message
    messages = [*SHORT, first, *SHORT]
    assert server.chat(messages, max_tokens=1).usage.prompt_tokens > 20
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    counts = [
        server.chat(tools=[tool], tool_choice=choice, max_tokens=1).usage.prompt_tokens
        for choice in ("auto", "none")
    ]
    assert counts[0] > counts[1] == len(server.post("/tokenize", {"messages": QUESTION})[1]["tokens"])


def test_cached_tokens_and_keys_that_share_nothing(server: Server) -> None:
    long = [{"role": "user", "content": "Tell me about the boat and the blue fish. " * 40}, *SHORT]

    def ask(key: str, **options: Any) -> Any:
        client = server.client.with_options(api_key=key)
        return client.chat.completions.create(
            model="tiny", messages=long, temperature=0, max_tokens=8, logprobs=True, **options
        )

    first, again, other = ask(KEY), ask(KEY), ask(OTHER_KEY)
    assert first.usage.prompt_tokens > 300
    found = [done.usage.prompt_tokens_details.cached_tokens for done in (first, again, other)]
    assert found == [0, first.usage.prompt_tokens // 256 * 256, 0]
    assert first.choices == again.choices == other.choices, "a hit gives what a miss gives"
    *_, last = ask(OTHER_KEY, stream=True, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens_details.cached_tokens == found[1]
    assert server.gauge("dsv4_cache_pages_kept") > 0 and server.gauge("dsv4_prefix_cache_hits_total") > 0


SUM = {"sum": {"type": "integer", "minimum": 0, "maximum": 99}, "sure": {"type": "boolean"}}
ANSWER = {"type": "object", "properties": SUM, "required": ["sum", "sure"], "additionalProperties": False}


@pytest.mark.parametrize(("stream", "effort"), [(True, "high"), (False, "none")])
def test_json_schema_is_kept(server: Server, stream: bool, effort: str) -> None:
    options: dict[str, Any] = {"response_format": json_schema(ANSWER), "reasoning_effort": effort}
    done = server.chat(SHORT, stream=stream, max_tokens=150, **options)
    if stream:
        part = joined(list(done))[0]
        content, finish, reasoning = part["content"], part["finish"], part["reasoning"]
    else:
        (choice,) = done.choices
        content, finish = choice.message.content, choice.finish_reason
        reasoning = getattr(choice.message, "reasoning_content", "")
    assert finish == "stop" and (reasoning != "") == (effort == "high")
    value = json.loads(content)
    assert set(value) == {"sum", "sure"} and 0 <= value["sum"] <= 99


def test_calls_that_must_be_made(server: Server) -> None:
    color = {"type": "string", "enum": ["red", "dark blue"]}
    pick = {"type": "object", "properties": {"color": color, "sure": SUM["sure"]}, "required": ["color"]}
    tools = [{"type": "function", "function": {"name": "pick", "parameters": pick, "strict": True}}]
    options: dict[str, Any] = {"tools": tools, "reasoning_effort": "none", "max_tokens": 150}
    done = server.chat(SHORT, tool_choice="required", parallel_tool_calls=False, **options)
    assert done.choices[0].finish_reason == "tool_calls" and done.choices[0].message.content is None
    (call,) = done.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "pick" and arguments["color"] in color["enum"]
    assert arguments.keys() <= {"color", "sure"}
    named = {"type": "function", "function": {"name": "pick"}}
    chunks = server.chat(SHORT, tool_choice=named, stream=True, **options)
    parts = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [part.function.name for part in parts] == ["pick", *[None] * (len(parts) - 1)] and len(parts) > 2
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    most = done.usage.completion_tokens - 8
    cut = server.chat(SHORT, tool_choice=named, **{**options, "max_tokens": most}).choices[0]
    assert cut.finish_reason == "length"
    assert call.function.arguments.startswith(cut.message.tool_calls[0].function.arguments)


def test_key_is_needed_but_for_health(server: Server) -> None:
    assert server.raw("GET", "/health", key=None)[0] == 200
    for path in ("/v1/models", "/ready", "/metrics", "/nowhere"):
        for key in (None, "", "wrong", KEY[:-1], KEY + "x"):
            status, body, _ = server.raw("GET", path, key=key)
            assert status == 401 and body["error"]["code"] == "invalid_api_key", (path, key)
    assert server.client.models.list().data[0].id == "tiny"
    with pytest.raises(openai.AuthenticationError):
        server.client.with_options(api_key="wrong").models.list()


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "sub"}}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


CHAT = {"messages": QUESTION, "max_tokens": 4}


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({**CHAT, "frobnicate": 1}, 400, "Unrecognized request argument supplied: frobnicate"),
        ({"max_tokens": 4}, 400, "'messages'"),
        ({**CHAT, "messages": []}, 400, "messages"),
        (
            {**CHAT, "messages": [{"role": "king", "content": "x"}]},
            400,
            "invalid value 'king', expected 'system', 'developer', 'latest_reminder', 'user', 'tool' or 'ass",
        ),
        (
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "'messages[0].content[0].type': invalid value 'image_url', expected 'text'",
        ),
        ({**CHAT, "reasoning_effort": "huge"}, 400, "invalid enum value 'huge', expected 'high', 'low'"),
        ({**CHAT, "messages": [{"role": "user", "content": 5}]}, 400, "expected `str | array`"),
        ({**CHAT, "messages": QUESTION * 5000}, 400, "5000"),
        ({**CHAT, "model": "gpt-4"}, 404, "'gpt-4' does not exist"),
        ({**CHAT, "n": 17}, 400, "17"),
        ({**CHAT, "n": 0}, 400, "'n': expected `int` >= 1, found 0"),
        ({**CHAT, "temperature": 2.5}, 400, "2.5"),
        ({**CHAT, "temperature": "hot"}, 400, "temperature"),
        ({**CHAT, "top_p": 0}, 400, "top_p"),
        ({**CHAT, "max_tokens": 0}, 400, "max_tokens"),
        ({**CHAT, "max_tokens": 5000}, 400, "maximum context length is 1024"),
        ({**CHAT, "stop": [""]}, 400, "stop"),
        ({**CHAT, "stop": ["x"] * 17}, 400, "17"),
        ({**CHAT, "stop": "x" * 300}, 400, "300"),
        ({**CHAT, "top_logprobs": 3}, 400, "logprobs: true"),
        ({**CHAT, "logprobs": True, "top_logprobs": 21}, 400, "21"),
        ({**CHAT, "seed": 1 << 70}, 400, "seed"),
        ({**CHAT, "tool_choice": "required"}, 400, "tool_choice"),
        ({**CHAT, "tool_choice": NAMED}, 400, "only allowed when tools"),
        ({**CHAT, "tools": [ADD], "tool_choice": NAMED}, 400, "'sub', which is not among"),
        ({**CHAT, "tools": [nested(40)]}, 400, "levels"),
        ({**CHAT, "tools": [{**ADD, "function": {"name": "x" * 300_000}}]}, 400, "bytes as JSON"),
        ({**CHAT, "tools": [{"type": "function"}], "tool_choice": "required"}, 400, "tools[0].function"),
        ({**CHAT, "tools": [{"type": "function"}]}, 400, "tools[0].function"),
        ({**CHAT, "response_format": {"type": "xml"}}, 400, "response_format"),
        ({**CHAT, "response_format": json_schema({"type": "frog"})}, 400, "frog"),
        ({**CHAT, "response_format": json_schema({"$ref": "https://x.org/a.json"})}, 400, "grammar"),
        ({**CHAT, "response_format": json_schema({"type": "string", "pattern": "("})}, 400, "grammar"),
        ({**CHAT, "response_format": json_schema({"enum": ["x" * 70_000]})}, 400, "bytes as JSON"),
        ({**CHAT, "presence_penalty": "much"}, 400, "presence_penalty"),
        ({**CHAT, "thinking": {"type": "enabled"}, "reasoning_effort": "none"}, 400, "give one"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "JSON"),
        (b'{"messages": [{"role": ' + b"[" * 100_000, 400, "JSON"),
        (b"\xff\xfe", 400, "JSON"),
        (b"", 400, "JSON"),
        (b" " * (LEAST_BODY_BYTES + 1), 413, str(LEAST_BODY_BYTES)),
    ],
    ids=lambda value: str(value)[-60:] if isinstance(value, dict) else None,
)
def test_errors_have_openais_shape(server: Server, body: Any, status: int, says: str) -> None:
    found, answer, headers = server.post("/v1/chat/completions", body)
    assert (found, set(answer["error"])) == (status, {"message", "type", "param", "code"}), answer
    assert says in answer["error"]["message"], answer
    assert headers["x-request-id"].startswith("req_")


def test_other_refusals(server: Server) -> None:
    assert server.raw("POST", "/v1/chat/completions", CHAT, media="text/plain")[0] == 415
    assert server.raw("GET", "/v1/chat/completions")[0] == 405
    assert server.raw("GET", "/nowhere")[1]["error"]["code"] == "unknown_url"
    for bad in ([4096], [-1], [], [1 << 40], [[]], ["x", 1], [[1], "x"], [True], [1.5], [["x"]], {"a": 1}):
        assert server.post("/v1/completions", {"prompt": bad, "max_tokens": 1})[0] == 400, bad
    assert server.post("/detokenize", {"tokens": [99999]})[0] == 400
    with pytest.raises(openai.BadRequestError) as refused:
        server.chat([{"role": "user", "content": "word " * 3000}], stream=True)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_frees_its_pages(server: Server, stream: bool) -> None:
    connection = server.connection()
    body = f'{{"messages": {str(STORY).replace(chr(39), chr(34))}, "n": 2, "stream": {str(stream).lower()}}}'
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    wait(lambda: server.gauge("dsv4_num_requests_running") == 2, 10)
    assert not server.is_idle()
    # A reset, as from a client that was killed.
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.sock.close()
    wait(server.is_idle, 3)
    wait(lambda: "gone=yes" in server.log, 5)


def test_full_queue_is_429_and_running_requests_do_not_notice(server: Server) -> None:
    alone = server.chat(STORY, max_tokens=12)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.chat(STORY, max_tokens=12, n=6)))
    thread.start()
    wait(lambda: server.gauge("dsv4_num_requests_running") == 3, 10)
    status, body, headers = server.post("/v1/chat/completions", {**CHAT, "n": 2})
    assert status == 429 and body["error"]["code"] == "queue_full" and int(headers["retry-after"]) > 0
    with pytest.raises(openai.RateLimitError):
        server.chat()
    thread.join()
    assert [choice.message for choice in answers[0].choices] == [alone.choices[0].message] * 6
    wait(server.is_idle, 3)


def test_log_has_a_line_per_request_and_no_text(server: Server) -> None:
    secret = [{"role": "user", "content": "the zebra's password"}]
    done = server.chat(secret, max_tokens=3)
    wait(lambda: done.id.removeprefix("chatcmpl-") in server.log, 3)
    (line,) = [line for line in server.log.splitlines() if done.id.removeprefix("chatcmpl-") in line]
    assert "route=/v1/chat/completions status=200" in line and "completion=3 finish=length" in line
    assert "zebra" not in server.log
