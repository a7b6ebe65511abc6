"""The endpoints that coding agents speak, with the real clients: Anthropic's Messages, OpenAI's Responses."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serve_support import KEY, SHORT, Server

COLOR = {"type": "string", "enum": ["red", "dark blue"]}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}
PICK: dict[str, Any] = {
    "type": "object",
    "properties": {"color": COLOR, "n": NUMBER},
    "required": ["color", "n"],
    "additionalProperties": False,
}
SHADE: dict[str, Any] = {**PICK, "properties": {"color": COLOR}, "required": ["color"]}
THINK: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
# A call is eighty tokens. In all but the last turn one is made: whole in one loop, streamed in the other.
TURNS = pytest.mark.parametrize("turns", [2, pytest.param(3, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    client = anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{server.port}", api_key=KEY, max_retries=0, timeout=60
    )
    client.errors = anthropic
    with client:
        yield client


def ask(client: Any, messages: Any = SHORT, **options: Any) -> Any:
    options = {"model": "tiny", "max_tokens": 200, "extra_body": {"temperature": 0}, **options}
    return client.messages.create(messages=messages, **options)


def streamed(client: Any, messages: Any = SHORT, **options: Any) -> Any:
    options = {"model": "tiny", "max_tokens": 200, "extra_body": {"temperature": 0}, **options}
    with client.messages.stream(messages=messages, **options) as stream:
        kinds = [event.type for event in stream]
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
        return stream.get_final_message()


def test_message_and_stream_are_the_same(server: Server, claude: Any) -> None:
    want = server.chat(SHORT).choices[0].message
    for extra in (THINK, {"thinking": {"type": "adaptive"}}, {}, {"thinking": {"type": "disabled"}}):
        kind = extra.get("thinking", {}).get("type")
        whole = ask(claude, **extra)
        if kind in ("enabled", "disabled"):
            stream = streamed(claude, **extra)
            assert whole.usage.output_tokens == stream.usage.output_tokens > 0
            assert [block.model_dump() for block in whole.content] == [
                block.model_dump() for block in stream.content
            ]
        kinds = [block.type for block in whole.content]
        if kind in ("enabled", "adaptive"):
            assert kinds == ["thinking", "text"] and whole.stop_reason == "end_turn"
            assert whole.content[0].thinking == want.reasoning_content
            assert whole.content[0].signature != "" and whole.content[1].text == want.content
        else:
            assert kinds == ["text"], "who does not ask for thinking gets none"
    assert ask(claude, max_tokens=2).stop_reason == "max_tokens"
    stopped = ask(claude, stop_sequences=["3 ="], **THINK)
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == "3 ="
    assert stopped.content[-1].text == "2 + "


def test_budget_closes_the_thought_and_not_the_answer(server: Server, claude: Any) -> None:
    short = ask(claude, thinking={"type": "enabled", "budget_tokens": 3})
    assert short.content[0].type == "thinking" and short.content[-1].text and short.stop_reason == "end_turn"
    three: Any = {"thinking": {"type": "enabled", "budget_tokens": 3}}
    done = server.chat(SHORT, extra_body=three)
    assert done.usage.completion_tokens_details.reasoning_tokens == 4, "three, and the one that closes it"
    assert done.choices[0].finish_reason == "stop" and done.choices[0].message.content
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": PICK}}
    done = server.chat(SHORT, response_format=form, max_tokens=200, extra_body=three)
    assert json.loads(done.choices[0].message.content)["color"] in COLOR["enum"]
    assert done.usage.completion_tokens_details.reasoning_tokens == 4


@TURNS
def test_agent_loop_with_thoughts_that_come_back(server: Server, claude: Any, turns: int) -> None:
    tools = [{"name": "pick", "description": "Picks.", "input_schema": SHADE, "strict": True}]
    brief = {"type": "enabled", "budget_tokens": 8}
    options: dict[str, Any] = {
        "tools": tools,
        "system": [{"type": "text", "text": "Add."}],
        "thinking": brief,
    }
    messages: list[Any] = list(SHORT)
    count = claude.messages.count_tokens
    alone = count(model="tiny", messages=messages, tool_choice={"type": "none"}, **options).input_tokens
    for turn in range(turns):
        is_last = turn == turns - 1
        choice = {"type": "none"} if is_last else {"type": "any", "disable_parallel_tool_use": True}
        enough = 16 if is_last else 200
        done = (streamed if turn % 2 else ask)(
            claude, messages, tool_choice=choice, max_tokens=enough, **options
        )
        counted = count(model="tiny", messages=messages, tool_choice=choice, **options)
        assert counted.input_tokens == done.usage.input_tokens + done.usage.cache_read_input_tokens
        messages.append({"role": "assistant", "content": [block.model_dump() for block in done.content]})
        calls = [block for block in done.content if block.type == "tool_use"]
        assert bool(calls) != is_last and (done.stop_reason == "tool_use") == bool(calls)
        for call in calls:
            assert call.name == "pick" and call.input["color"] in COLOR["enum"]
        results = [
            {"type": "tool_result", "tool_use_id": c.id, "content": [{"type": "text", "text": "5"}]}
            for c in calls
        ]
        if results:
            messages.append({"role": "user", "content": results})
    assert counted.input_tokens > alone + 60, "the thought and the call have come back"
    thought = next(block for block in messages[1]["content"] if block["type"] == "thinking")
    thought["thinking"] += " Not mine."
    foreign = {"type": "redacted_thinking", "data": "of another server"}
    messages[1]["content"] += [foreign, {"type": "thinking", "thinking": "Theirs.", "signature": "x"}]
    assert ask(claude, [*messages, *SHORT], **{**options, "max_tokens": 4}).content, (
        "it is the client's history"
    )


def test_models_in_anthropics_shape(server: Server, claude: Any) -> None:
    (model,) = claude.models.list().data
    assert model == claude.models.retrieve("tiny")
    assert (model.id, model.type, model.display_name, model.lifecycle) == ("tiny", "model", "tiny", "active")
    assert model.max_input_tokens == 1024 and model.created_at.year > 2000


def test_errors_have_anthropics_shape(server: Server, claude: Any) -> None:
    with pytest.raises(claude.errors.AuthenticationError):
        ask(claude.with_options(api_key="wrong"))
    with pytest.raises(claude.errors.NotFoundError):
        ask(claude, model="other")
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x"}}
    for body in (
        {"messages": [{"role": "user", "content": [image]}]},
        {"frobnicate": 1},
        {"max_tokens": 10**6},
    ):
        status, answer, headers = server.post(
            "/v1/messages", {"model": "tiny", "messages": SHORT, "max_tokens": 4, **body}
        )
        assert status == 400 and answer["type"] == "error", answer
        assert answer["error"]["type"] == "invalid_request_error" and headers["x-request-id"]
    prefilled = ask(claude, [*SHORT, {"role": "assistant", "content": "2 + 3"}])
    assert prefilled.content[0].text.startswith(" ="), "an answer that was begun goes on"


def respond(server: Server, given: Any = SHORT, **options: Any) -> Any:
    options = {"max_output_tokens": 200, "temperature": 0, **options}
    return server.client.responses.create(model="tiny", input=given, **options)


def test_response_and_stream_are_the_same(server: Server) -> None:
    want = server.chat(SHORT).choices[0].message
    whole = respond(server)
    assert [item.type for item in whole.output] == ["reasoning", "message"] and whole.status == "completed"
    assert whole.output_text == want.content
    assert whole.output[0].content[0].text == want.reasoning_content
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    with server.client.responses.stream(
        model="tiny", input=SHORT, temperature=0, max_output_tokens=200
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == want.content and final.usage == whole.usage
    deltas = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert deltas == want.reasoning_content
    cut = respond(server, "What is 2 + 3?", max_output_tokens=2, reasoning={"effort": "none"})
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    assert [item.type for item in cut.output] == ["message"]


@TURNS
def test_agent_loop_of_items(server: Server, turns: int) -> None:
    tools: Any = [{"type": "function", "name": "pick", "parameters": SHADE, "strict": True}]
    given: list[Any] = [{"role": "developer", "content": "Add."}, *SHORT]
    include: Any = ["reasoning.encrypted_content"]
    for turn in range(turns):
        is_last = turn == turns - 1
        options: dict[str, Any] = {"tools": tools, "include": include, "parallel_tool_calls": False}
        named = {"type": "function", "name": "pick"}
        options["tool_choice"] = "none" if is_last else "required" if turn else named
        enough = 16 if is_last else 200
        if turn == 0:
            with server.client.responses.stream(
                model="tiny", input=given, temperature=0, max_output_tokens=enough, **options
            ) as stream:
                for _ in stream:
                    pass
                done = stream.get_final_response()
        else:
            done = respond(server, given, max_output_tokens=enough, **options)
        calls = [item for item in done.output if item.type == "function_call"]
        assert bool(calls) != is_last
        for item in done.output:
            shown = item.model_dump(exclude_none=True)
            if item.type == "reasoning":
                shown.pop("content")  # as clients that keep the sealed form only
            given.append({key: value for key, value in shown.items() if key != "parsed_arguments"})
        for call in calls:
            assert json.loads(call.arguments)["color"] in COLOR["enum"]
            given.append({"type": "function_call_output", "call_id": call.call_id, "output": "5"})
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": PICK, "strict": True}}
    assert json.loads(respond(server, text=form).output_text)["color"] in COLOR["enum"]


PICKER: dict[str, Any] = {"type": "function", "name": "pick", "parameters": SHADE}


def test_responses_that_cannot_be_made(server: Server) -> None:
    for options, says in (
        ({"given": [{"type": "computer_call"}]}, "computer_call"),
        (
            {"given": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input\\[0\\]",
        ),
        ({"tools": [{"type": "computer"}]}, "tools"),
        (
            {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]},
            "definition is missing",
        ),
        ({"tools": [PICKER], "tool_choice": {"type": "function", "name": "other"}}, "not among"),
    ):
        with pytest.raises(openai.BadRequestError, match=says):
            respond(server, **options)
