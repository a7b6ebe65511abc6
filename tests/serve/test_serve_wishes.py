"""What a request may wish for beside its text, each by its effect; bodies that real clients have sent."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_support import KEY, OTHER_KEY, SHORT, STORY, Server, wait

CLIENTS = Path(__file__).parents[1] / "data" / "clients"
OFF: dict[str, Any] = {"thinking": {"type": "disabled"}}
CHAT: dict[str, Any] = {"messages": SHORT, "temperature": 0, "max_tokens": 30, **OFF}
PICK = {"type": "object", "properties": {"c": {"type": "string", "enum": ["red", "blue"]}}, "required": ["c"]}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With room for an agent's tools."""
    with Server(tmp_path_factory.mktemp("wishes"), "--isolate-by-key", "--max-context", 4096) as running:
        yield running


def bodies() -> list[Any]:
    found: list[Any] = []
    for path in sorted(CLIENTS.glob("*.json")):
        seen = json.loads(path.read_text())
        found += seen if isinstance(seen, list) else [seen]
    return [pytest.param(one["path"], one["body"], id=one["client"]) for one in found]


@pytest.mark.parametrize(("path", "body"), bodies())
def test_what_clients_have_sent_is_answered(server: Server, path: str, body: Any) -> None:
    limit = "max_output_tokens" if "responses" in path else "max_tokens"
    status, answer, _ = server.post(path, {**body, limit: 2})
    assert status == 200, answer


def chat(server: Server, **wishes: Any) -> Any:
    status, body, _ = server.post("/v1/chat/completions", {**CHAT, **wishes})
    assert status == 200, body
    return body["choices"][0]


def test_where_answers_end(server: Server) -> None:
    plain = chat(server, return_token_ids=True)
    text, ids = plain["message"]["content"], plain["token_ids"]
    assert text == "2 + 3 = 5." and len(ids) == 9
    three = server.post("/tokenize", {"prompt": "3"})[1]["tokens"]
    assert three[0] in ids
    for name, value in (("stop_token_ids", three), ("stop", "3")):
        assert chat(server, **{name: value})["message"]["content"] == "2 + "
        told = chat(server, **{name: value}, include_stop_str_in_output=True)
        assert told["message"]["content"] == "2 + 3" and told["finish_reason"] == "stop"
    assert "3" not in chat(server, stop_token_ids=three, min_tokens=7)["message"]["content"]
    assert chat(server, stop="3", min_tokens=7)["message"]["content"] == text
    assert chat(server, min_tokens=20, stop="2 +")["message"]["content"].startswith(text)
    long = server.post("/v1/chat/completions", {**CHAT, "min_tokens": 20})[1]
    assert long["usage"]["completion_tokens"] >= 20
    status, body, _ = server.post("/v1/completions", {"prompt": "x", "max_tokens": 4, "min_tokens": 5})
    assert status == 400 and "at most max_tokens 4" in body["error"]["message"]
    form = {"guided_choice": ["a"], "min_tokens": 9}
    assert server.post("/v1/chat/completions", {**CHAT, **form})[0] == 400


def test_which_tokens_may_come(server: Server) -> None:
    plain = chat(server, return_token_ids=True)
    ids = plain["token_ids"]
    assert "5" in plain["message"]["content"]
    assert "5" not in chat(server, bad_words=["5"])["message"]["content"]
    assert " = 5" not in chat(server, bad_words=["= 5"])["message"]["content"]
    few = chat(server, allowed_token_ids=ids[:4], return_token_ids=True, max_tokens=8)
    assert set(few["token_ids"]) <= set(ids[:4]) and few["finish_reason"] == "length"
    both = chat(server, guided_regex="[ab]{4}", bad_words=["b"])
    assert both["message"]["content"] == "aaaa"
    none = {**CHAT, "guided_regex": "b", "bad_words": ["b"]}
    status, body, _ = server.post("/v1/chat/completions", none)
    assert status == 400 and "allow no token here" in body["error"]["message"]
    for name in ("allowed_token_ids", "stop_token_ids"):
        status, body, _ = server.post("/v1/chat/completions", {**CHAT, name: [4096]})
        assert status == 400 and f"{name}: id 4096" in body["error"]["message"]


def test_ids_and_scores_of_prompts(server: Server) -> None:
    ids = server.post("/tokenize", {"prompt": "Once upon"})[1]["tokens"]
    ask = {"prompt": ["Once upon", "The"], "max_tokens": 3, "prompt_logprobs": 1, "return_token_ids": True}
    status, body, _ = server.post("/v1/completions", {**ask, "temperature": 0})
    first, second = body["choices"]
    assert status == 200 and first["prompt_token_ids"] == [0, *ids] != second["prompt_token_ids"]
    assert len(first["prompt_logprobs"]) == len(ids) + 1 and first["prompt_logprobs"][0] is None
    assert first["prompt_logprobs"][2][str(ids[1])]["decoded_token"] == " upon"
    assert server.post("/detokenize", {"tokens": first["token_ids"]})[1]["prompt"] == first["text"]
    whole = server.post("/v1/chat/completions", {**CHAT, "prompt_logprobs": 0})[1]
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]


def test_answer_begun_goes_on_by_vllms_name_too(server: Server) -> None:
    begun = {"role": "assistant", "content": "2 + 3"}
    made = chat(server, messages=[*SHORT, begun], continue_final_message=True, add_generation_prompt=None)
    assert made["message"]["content"] == " = 5."
    status, body, _ = server.post("/v1/chat/completions", {**CHAT, "continue_final_message": True})
    assert status == 400 and "is not the assistant's" in body["error"]["message"]


def test_salt_keeps_prefixes_apart(server: Server) -> None:
    long = [{"role": "user", "content": "The fish is blue, the boat is not. " * 40}, *SHORT]

    def cached(**salt: Any) -> int:
        body = server.post("/v1/chat/completions", {**CHAT, "messages": long, "max_tokens": 1, **salt})[1]
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(cache_salt=salt) > 0 for salt in ("a", "a", "b", "a")] == [False, True, False, True]
    assert cached() == 0


def chunks(server: Server, path: str = "/v1/chat/completions", **body: Any) -> list[Any]:
    status, text, _ = server.post(path, {**CHAT, "stream": True, **body})
    assert status == 200, text
    return [json.loads(part) for part in re.findall(r"^data: (\{.*)$", text, re.MULTILINE)]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_progress_of_prompts_is_told(server: Server, path: str) -> None:
    text = "Progress is told in chunks. " * 60
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if path == "/v1/completions":
        ask = {"prompt": text, "messages": None, "thinking": None}
    for number in range(2):
        ask |= {"max_tokens": 2, "stream_options": {"include_usage": True}}
        made = chunks(server, path, **ask, return_progress=True)
        told = [chunk["prompt_progress"] for chunk in made if "prompt_progress" in chunk]
        usage = made[-1]["usage"]
        assert told[-1]["processed"] == told[-1]["total"] == usage["prompt_tokens"] > 512
        assert all(one.keys() == {"total", "cache", "processed", "time_ms"} for one in told)
        assert [one["cache"] for one in told] == [usage["prompt_tokens_details"]["cached_tokens"]] * len(told)
        assert bool(told[0]["cache"]) == bool(number)
        done = [one["processed"] for one in told]
        assert done == sorted(set(done)) and len(told) > (number == 0), "a chunk of the prompt is 512 tokens"
        places = [at for at, chunk in enumerate(made) if "prompt_progress" in chunk]
        texts = [at for at, chunk in enumerate(made) if any(chunk_text(c) for c in chunk["choices"])]
        assert max(places) < min(texts), "before the answer"
    two = [c for c in chunks(server, path, **ask, return_progress=True, n=2) if "prompt_progress" in c]
    assert two[-1]["prompt_progress"]["total"] == 2 * usage["prompt_tokens"]
    assert not any("prompt_progress" in chunk for chunk in chunks(server, path, **ask))
    status, body, _ = server.post(path, {**ask, "return_progress": True})
    assert status == 400 and "stream: true" in body["error"]["message"]


def chunk_text(choice: Any) -> str:
    return choice.get("text") or choice.get("delta", {}).get("content") or ""


def test_usage_in_every_chunk(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    made = chunks(server, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in made[1:]]
    assert counts == sorted(counts) and counts[-1] == counts[-2] == 9 and counts[0] == 1
    assert "usage" not in chunks(server, stream_options={"include_usage": True})[1]


def test_some_tools_are_allowed(server: Server) -> None:
    tools = [{"type": "function", "function": {"name": n, "parameters": NOTHING}} for n in ("f", "g")]
    named = [{"type": "function", "function": {"name": "g"}}]
    ask = {"tools": tools, "max_tokens": 90}
    for mode, calls in (("required", ["g"]), ("auto", [])):
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        made = chat(server, **ask, tool_choice=allowed)["message"].get("tool_calls", [])
        assert [call["function"]["name"] for call in made] == calls
    for name in (None, 5, ""):
        bad = {"tools": [{"type": "function", "function": {"name": name}}], "tool_choice": "required"}
        status, body, _ = server.post("/v1/chat/completions", {**CHAT, **bad})
        assert status == 400 and "tools[0]" in body["error"]["message"], body


def respond(server: Server, given: Any = SHORT, key: str = KEY, **more: Any) -> tuple[int, Any]:
    body = {
        "input": given,
        "max_output_tokens": 120,
        "temperature": 0,
        "reasoning": {"effort": "none"},
        **more,
    }
    status, answer, _ = server.raw("POST", "/v1/responses", body, key)
    return status, answer


def test_tools_of_codex(server: Server) -> None:
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "go " N\nN: /[0-9]{2}/'}
    tools = [
        {
            "type": "namespace",
            "name": "ns",
            "tools": [{"type": "function", "name": "g", "parameters": NOTHING}],
        },
        {"type": "custom", "name": "apply", "format": lark},
        {"type": "web_search"},
    ]
    one = {"type": "function", "name": "g", "namespace": "ns"}
    status, made = respond(server, tools=tools, tool_choice=one)
    assert status == 200
    wait(lambda: 'dropped="web_search"' in server.log, 5)
    (call,) = made["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "g", "ns")
    assert json.loads(call["arguments"]) == {}
    custom = {"tools": tools, "tool_choice": {"type": "custom", "name": "apply"}}
    (applied,) = respond(server, **custom)[1]["output"]
    assert applied["type"] == "custom_tool_call" and re.fullmatch("go [0-9]{2}", applied["input"])
    text = respond(server, **custom, stream=True)[1]
    events = [json.loads(part) for part in re.findall(r"^data: (\{.*)$", text, re.MULTILINE)]
    deltas = [event for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert [event["delta"] for event in deltas] == [applied["input"]]
    outputs = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "5"},
        {"type": "custom_tool_call_output", "call_id": applied["call_id"]},
    ]
    outputs[1]["output"] = [{"type": "input_text", "text": "y"}]
    status, made = respond(server, [*SHORT, call, applied, *outputs], tools=tools, tool_choice="none")
    assert status == 200 and made["output"][0]["type"] == "message"


def test_custom_tools_of_a_chat(server: Server) -> None:
    grammar = {"syntax": "regex", "definition": "go [0-9]{2}"}
    go = {"name": "go", "description": "Go.", "format": {"type": "grammar", "grammar": grammar}}
    pick = {"type": "function", "function": {"name": "pick", "parameters": PICK}}
    ask: dict[str, Any] = {
        "tools": [{"type": "custom", "custom": go}, pick],
        "tool_choice": {"type": "custom", "custom": {"name": "go"}},
        "max_tokens": 200,
    }
    (call,) = server.chat(SHORT, **ask).choices[0].message.tool_calls
    assert call.type == "custom" and call.custom.name == "go"
    assert re.fullmatch("go [0-9]{2}", call.custom.input)
    deltas = [chunk.choices[0].delta for chunk in server.chat(SHORT, stream=True, **ask)]
    told = [delta.tool_calls[0].custom for delta in deltas if delta.tool_calls]
    assert "".join(each.get("input", "") for each in told) == call.custom.input and told[0]["name"] == "go"
    turns = [*SHORT, {"role": "assistant", "tool_calls": [call.to_dict()]}]
    turns.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
    prompt = server.post("/tokenize", {"messages": turns})[1]["tokens"]
    shown = server.post("/detokenize", {"tokens": prompt})[1]["prompt"]
    assert f'name="input" string="true">{call.custom.input}</' in shown
    allowed = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "go"}}]}
    allowed = {"type": "allowed_tools", "allowed_tools": allowed}
    (again,) = server.chat(SHORT, **{**ask, "tool_choice": allowed}).choices[0].message.tool_calls
    assert again.custom == call.custom
    for tool in ({"type": "custom"}, {"type": "custom", "function": go}, {"type": "function", "custom": go}):
        status, body, _ = server.post("/v1/chat/completions", {**CHAT, "tools": [tool]})
        assert status == 400 and body["error"]["param"].startswith("tools"), body


def test_responses_are_kept_for_who_made_them(server: Server) -> None:
    status, first = respond(server)
    assert status == 200 and first["store"]
    (item,) = first["output"]
    assert server.raw("GET", f"/v1/responses/{first['id']}")[1] == first
    whole = respond(server, [*SHORT, item, *SHORT])[1]["usage"]["input_tokens"]
    reference = {"type": "item_reference", "id": item["id"]}
    assert respond(server, [*SHORT, reference, *SHORT])[1]["usage"]["input_tokens"] == whole
    goes_on = respond(server, SHORT, previous_response_id=first["id"])[1]
    assert goes_on["usage"]["input_tokens"] == whole and goes_on["previous_response_id"] == first["id"]
    for given, more in (([*SHORT, reference], {}), (SHORT, {"previous_response_id": first["id"]})):
        status, body = respond(server, given, OTHER_KEY, **more)
        assert status == 404 and "not found" in body["error"]["message"], "another key's"
    assert server.raw("DELETE", f"/v1/responses/{first['id']}")[1]["deleted"]
    assert server.raw("GET", f"/v1/responses/{first['id']}")[0] == 404
    status, unkept = respond(server, store=False)
    assert not unkept["store"] and respond(server, previous_response_id=unkept["id"])[0] == 404


def test_logprobs_of_responses(server: Server) -> None:
    include = ["message.output_text.logprobs"]
    part = respond(server, include=include, top_logprobs=2)[1]["output"][0]["content"][0]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    with server.client.responses.stream(
        model="tiny", input=SHORT, temperature=0, include=include, reasoning={"effort": "none"}
    ) as stream:
        deltas = [event for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    said = [entry.token for event in deltas for entry in event.logprobs]
    assert said == [entry.token for entry in final.output[0].content[0].logprobs] and said


def test_thoughts_that_are_not_shown_come_back(server: Server) -> None:
    ask = {"model": "tiny", "messages": SHORT, "max_tokens": 200, "temperature": 0}
    shown = server.post("/v1/messages", {**ask, "thinking": {"type": "adaptive"}})[1]
    omitted = {"thinking": {"type": "adaptive", "display": "omitted"}}
    hidden = server.post("/v1/messages", {**ask, **omitted})[1]
    assert hidden["content"][0]["thinking"] == "" != shown["content"][0]["thinking"]
    text = server.post("/v1/messages", {**ask, **omitted, "stream": True})[1]
    assert "thinking_delta" not in text and hidden["content"][0]["signature"] in text
    tools = [{"name": "f", "input_schema": NOTHING}]

    def size(turn: Any) -> int:
        messages = [*SHORT, {"role": "assistant", "content": turn["content"]}, *STORY]
        body = {"model": "tiny", "messages": messages, "tools": tools, "thinking": {"type": "adaptive"}}
        return server.post("/v1/messages/count_tokens", body)[1]["input_tokens"]

    assert size(hidden) == size(shown) > size({"content": shown["content"][1:]})


def test_threads_need_the_whole_conversation(server: Server) -> None:
    ask = {"model": "tiny", "messages": SHORT, "max_tokens": 2}
    assert server.post("/v1/messages", {**ask, "thread": {"type": "create"}})[0] == 200
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    status, body, _ = server.post("/v1/messages", {**ask, "thread": thread})
    assert status == 404 and body["error"]["details"] == {"error_code": "thread_not_found"}
