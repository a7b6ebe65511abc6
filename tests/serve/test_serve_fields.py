"""The rule for fields, without a server: nulls, values that ask for nothing, what comes back, the unknown."""

import json
from typing import Any

import msgspec
import pytest

from dsv4.serve.anthropic import CountBody, MessagesBody, error_shape
from dsv4.serve.describe import openapi
from dsv4.serve.fields import ANY, ROWS, SameAs, aliases, rows
from dsv4.serve.parse import Notes, parse
from dsv4.serve.responses import ResponsesBody
from dsv4.serve.schema import BadField, ChatBody, CompletionBody, TooLong
from dsv4.serve.wire import Ready, Status

USER: list[Any] = [{"role": "user", "content": "x"}]
BODIES: dict[type, dict[str, Any]] = {
    ChatBody: {"messages": USER},
    CompletionBody: {"prompt": "x"},
    ResponsesBody: {"input": "x"},
    MessagesBody: {"model": "m", "messages": USER, "max_tokens": 1},
    CountBody: {"model": "m", "messages": USER},
}


def read(kind: Any, body: Any, ignored: list[str] | None = None) -> Any:
    return parse(kind, json.dumps(body).encode(), ignored)


@pytest.mark.parametrize("kind", BODIES)
def test_null_says_nothing(kind: Any) -> None:
    plain = read(kind, BODIES[kind])
    names = (
        {field.encode_name for field in msgspec.structs.fields(kind)}
        | rows(kind).keys()
        | aliases(kind).keys()
    )
    assert len(names) > 12
    for name in names - BODIES[kind].keys():
        assert read(kind, {**BODIES[kind], name: None}) == plain, name
    for name in BODIES[kind]:
        with pytest.raises(BadField, match=f"you must provide a '{name}'"):
            read(kind, {**BODIES[kind], name: None})


@pytest.mark.parametrize("kind", BODIES)
def test_values_that_ask_for_nothing_pass_and_others_do_not(kind: Any) -> None:
    plain = read(kind, BODIES[kind])
    for name, row in rows(kind).items():
        values = [{"any": ["value"]}, 7] if row.nothing is ANY else row.nothing
        if isinstance(row.nothing, SameAs):
            continue
        for value in values:
            assert read(kind, {**BODIES[kind], name: value}) == plain, (name, value)
        if row.nothing is not ANY:
            with pytest.raises(BadField, match=f"'{name}': .*not supported; (expected|leave it out)"):
                read(kind, {**BODIES[kind], name: "a wish"})
    assert all(row.sent_by for row in ROWS)


def test_value_of_another_field() -> None:
    for kind in (ChatBody, CompletionBody):
        assert read(kind, {**BODIES[kind], "n": 2, "best_of": 2}).n == 2
        assert read(kind, {**BODIES[kind], "best_of": 1}).n is None
        with pytest.raises(BadField, match="'best_of': 2 is not supported; expected the value of n"):
            read(kind, {**BODIES[kind], "best_of": 2})


def test_old_names_are_ours() -> None:
    body = read(ChatBody, {**BODIES[ChatBody], "guided_regex": "a", "n_predict": 4})
    assert body.structured_outputs.regex == "a" and body.max_tokens == 4
    with pytest.raises(BadField, match="give n_predict or max_tokens, not both"):
        read(ChatBody, {**BODIES[ChatBody], "max_tokens": 3, "n_predict": 4})
    thought = {"role": "assistant", "content": "y", "reasoning": "hm"}
    assert read(ChatBody, {"messages": [*USER, thought, *USER]}).messages[1].reasoning_content == "hm"


def test_whole_floats_are_integers_and_others_are_not() -> None:
    body = read(ChatBody, {**BODIES[ChatBody], "max_tokens": 2.0, "temperature": 1, "logit_bias": {"5": 1}})
    assert body.max_tokens == 2 and body.temperature == 1.0 and body.logit_bias == {5: 1.0}
    for bad in (2.5, "2", True):
        with pytest.raises(BadField, match="'max_tokens': expected `int"):
            read(ChatBody, {**BODIES[ChatBody], "max_tokens": bad})


def test_what_comes_back_is_not_read_unless_known() -> None:
    odd = {"provider_specific_fields": {"a": 1}, "reasoning_details": [], "frobnicate": 5}
    part = {"type": "text", "text": "y", "frobnicate": 5}
    answer = {"role": "assistant", "content": [part], **odd}
    body = read(ChatBody, {"messages": [*USER, answer, *USER]})
    assert body.messages[1].plain() == {"role": "assistant", "content": [{"type": "text", "text": "y"}]}
    assert read(ChatBody, {"messages": [*USER, {"role": "assistant", "content": None}, *USER]})
    with pytest.raises(BadField, match=r"messages\[0\].frobnicate"):
        read(ChatBody, {"messages": [{**USER[0], "frobnicate": 1}]})
    assert read(MessagesBody, {**BODIES[MessagesBody], "messages": [*USER, answer, *USER]})
    items = [{"type": "reasoning", "id": "r", "frobnicate": 1, "encrypted_content": "Zm9yZWlnbg=="}, *USER]
    chat = read(ResponsesBody, {"input": items}).chat(items, {}, Notes())
    assert chat.messages[0].plain()["reasoning_content"] == "", "a thought that nobody can read is none"


def test_unknown_field_is_refused_with_the_nearest_name_or_named() -> None:
    with pytest.raises(BadField, match="supplied: temprature; did you mean 'temperature'\\?"):
        read(ChatBody, {**BODIES[ChatBody], "temprature": 1})
    ignored: list[str] = []
    tool = {"type": "function", "function": {"name": "f"}, "frob": 1}
    body = {**BODIES[ChatBody], "temprature": 1, "tools": [tool], "stream_options": {"x": 1}}
    assert read(ChatBody, body, ignored).temperature is None
    assert ignored == ["temprature", "tools[0].frob", "stream_options.x"]
    with pytest.raises(BadField, match="'best_of'"):
        read(ChatBody, {**BODIES[ChatBody], "best_of": 9}, ignored)


def test_description_is_made_from_the_table() -> None:
    class Routes:
        async def chat(self, request: Any, body: ChatBody) -> None:
            """Chat."""

        async def tokenize(self, request: Any, body: CompletionBody) -> None:
            """Text."""

    routes = Routes()
    ready = Ready(64, 1, 99, [], Status())
    made = openapi("m", ready, {"/chat": routes.chat, "/tokenize": routes.tokenize}, {})
    shown = made["components"]["schemas"]["ChatBody"]["properties"]
    assert shown["best_of"]["description"] == "expected the value of n; sent by LangChain"
    assert (
        shown["cache_prompt"]["enum"] == [True, None] and "llama.cpp" in shown["cache_prompt"]["description"]
    )
    assert shown["guided_regex"] == {"description": "as structured_outputs.regex"}
    assert shown["min_tokens"]["anyOf"], "beside what has an effect"


BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.327.514; cc_entry=1"}
SYSTEM = {"type": "text", "text": "You are an agent."}


def claude(**more: Any) -> ChatBody:
    return read(MessagesBody, {**BODIES[MessagesBody], **more}).chat(Notes())


def test_billing_header_does_not_part_conversations() -> None:
    other = {**BILLING, "text": BILLING["text"] + "9"}
    made = [claude(system=[header, SYSTEM]) for header in (BILLING, other)]
    assert (
        made[0] == made[1] == claude(system=[SYSTEM])
        and made[0].messages[0].content[0].text == SYSTEM["text"]
    )


def test_system_within_messages_is_a_reminder_in_the_users_turn() -> None:
    said = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    first, reminder = claude(messages=[*USER, said]).messages
    assert reminder.plain() == {
        "role": "user",
        "content": "<system-reminder>\nBe brief.\n</system-reminder>",
    }
    assert first.plain()["role"] == "user"


def test_deferred_tools_come_with_their_reference() -> None:
    tools = [{"name": "late", "input_schema": {}, "defer_loading": True}, {"name": "now", "input_schema": {}}]
    tools += [{"type": "web_search_20250305", "name": "web_search"}]
    notes = Notes()
    body = read(MessagesBody, {**BODIES[MessagesBody], "tools": tools})
    assert [tool.function["name"] for tool in body.chat(notes).tools] == ["now"]
    assert notes.dropped == ["web_search_20250305"]
    call = {"type": "tool_use", "id": "c", "name": "find", "input": {}}
    found = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": [{"type": "tool_reference", "tool_name": "late"}],
    }
    turns = [*USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [found]}]
    later = claude(tools=tools, messages=turns)
    assert [tool.function["name"] for tool in later.tools] == ["late", "now"]
    assert later.messages[-1].content == [{"type": "text", "text": "The tool late can be called now."}]


def test_older_thoughts_are_left_out_where_asked() -> None:
    def turns(keep: Any) -> list[Any]:
        thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
        messages = [*USER, {"role": "assistant", "content": [thought]}] * 3 + USER
        edits = [{"type": "clear_thinking_20251015", **keep}]
        made = claude(messages=messages, context_management={"edits": edits}).messages
        return [message.reasoning_content for message in made[1::2]]

    assert turns({"keep": "all"}) == ["hm"] * 3
    assert turns({"keep": {"type": "thinking_turns", "value": 2}}) == [None, "hm", "hm"]
    assert turns({}) == [None, None, "hm"]
    with pytest.raises(BadField, match="clear_tool_uses"):
        claude(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]})


def test_lengths_are_told_in_the_words_that_agents_act_on() -> None:
    told = [error_shape(TooLong(n, 20, 100, "messages"))["error"]["message"] for n in (90, 120)]
    assert told[0].startswith("input length and `max_tokens` exceed context limit: 90 + 20 > 100")
    assert told[1] == "prompt is too long: 120 tokens > 100 maximum"
