"""The prompt, byte for byte: worked examples, every option, refusals, and no way to forge a special token."""

import hashlib
import json
from collections import Counter
from typing import Any

import pytest
import tokenizers
from text_support import TOOLS_TEXT, calls_block, tools_block

from dsv4.errors import TextError
from dsv4.text import chat
from dsv4.text.chat import encode, join, render
from dsv4.text.tokenizer import Special, Tokenizer

B, E, U, A = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
SYSTEM = {"role": "system", "content": "Be brief."}
P1_HASH = "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7"
P2_HASH = "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c"
TOOLS_HASH = "12896537df70074c76828db9f4bc0f9be768ce5379ce71b15c07a7150bd90020"


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def result(content: Any, id: str = "") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": id}


def call(name: str, arguments: str, id: str | None = None) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


HISTORY = [SYSTEM, user("1+1?"), assistant("2", reasoning_content="add"), user("And 2+2?")]
CALLS = [
    call("add", '{"a": 1, "b": 2}', "c1"),
    call("say", '{"text": "hé \\"q\\"", "opts": {"x": [1, null, true]}}', "c2"),
]
TOOLS = [tool("add", description="é", parameters={"b": 1, "a": [1, 2]}), tool("say")]
BLOCK = tools_block([item["function"] for item in TOOLS])


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


EXAMPLES: list[tuple[str, list[dict[str, Any]], dict[str, Any], str]] = [
    ("1", [user("Hi")], {}, "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"),
    (
        "2",
        [SYSTEM, user("Hi")],
        {"thinking": True},
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜><think>",
    ),
    ("3", [user("a"), user("b")], {}, "<｜begin▁of▁sentence｜><｜User｜>a\n\nb<｜Assistant｜></think>"),
    (
        "4",
        HISTORY,
        {"thinking": True, "drop_thinking": True},
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>1+1?<｜Assistant｜></think>2<｜end▁of▁sentence｜>"
        "<｜User｜>And 2+2?<｜Assistant｜><think>",
    ),
    (
        "5",
        HISTORY,
        {"thinking": True, "drop_thinking": False},
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>1+1?<｜Assistant｜><think>add</think>2"
        "<｜end▁of▁sentence｜><｜User｜>And 2+2?<｜Assistant｜><think>",
    ),
    (
        "6",
        HISTORY,
        {},
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>1+1?<｜Assistant｜></think>2<｜end▁of▁sentence｜>"
        "<｜User｜>And 2+2?<｜Assistant｜></think>",
    ),
    (
        "7",
        [
            {**SYSTEM, "tools": TOOLS},
            user("go"),
            assistant("", reasoning_content="use tools", tool_calls=CALLS),
            result("ok", "c2"),
            result("3", "c1"),
        ],
        {"thinking": True},
        "<｜begin▁of▁sentence｜>Be brief.\n\n"
        + BLOCK
        + "<｜User｜>go<｜Assistant｜><think>use tools</think>\n\n"
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="say">\n'
        '<｜DSML｜parameter name="text" string="true">hé "q"</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="opts" string="false">{"x": [1, null, true]}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜><｜User｜><tool_result>3</tool_result>\n\n"
        "<tool_result>ok</tool_result><｜Assistant｜><think>",
    ),
    (
        "8",
        [user("go"), assistant("x"), result("3"), user("now explain")],
        {},
        "<｜begin▁of▁sentence｜><｜User｜>go<｜Assistant｜></think>x<｜end▁of▁sentence｜>"
        "<｜User｜><tool_result>3</tool_result>\n\nnow explain<｜Assistant｜></think>",
    ),
    (
        "9",
        [SYSTEM, {"role": "latest_reminder", "content": "2026-01-02"}, user("hi")],
        {},
        "<｜begin▁of▁sentence｜>Be brief.<｜latest_reminder｜>2026-01-02<｜User｜>hi<｜Assistant｜></think>",
    ),
    (
        "10",
        [user("weather in Rome", task="query")],
        {},
        "<｜begin▁of▁sentence｜><｜User｜>weather in Rome<｜query｜>",
    ),
    (
        "11",
        [user("weather in Rome", task="action")],
        {},
        "<｜begin▁of▁sentence｜><｜User｜>weather in Rome<｜Assistant｜></think><｜action｜>",
    ),
    (
        "11 thinking",
        [user("weather in Rome", task="action")],
        {"thinking": True},
        "<｜begin▁of▁sentence｜><｜User｜>weather in Rome<｜Assistant｜><think><｜action｜>",
    ),
    (
        "12",
        [user("hi"), assistant("hello", task="title")],
        {},
        "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>hello<｜end▁of▁sentence｜><｜title｜>",
    ),
    (
        "13",
        [user("hi"), assistant("Hello, I", wo_eos=True)],
        {},
        "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>Hello, I",
    ),
    (
        "14",
        [{**SYSTEM, "response_format": {"type": "object"}}, user("x")],
        {},
        "<｜begin▁of▁sentence｜>Be brief.\n\n## Response Format:\n\nYou MUST strictly adhere to the "
        'following schema to reply:\n{"type": "object"}<｜User｜>x<｜Assistant｜></think>',
    ),
    (
        "15",
        [user("g"), assistant(None, tool_calls=[call("f", "{}")]), user("k")],
        {},
        "<｜begin▁of▁sentence｜><｜User｜>g<｜Assistant｜></think>\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>'
        "<｜User｜>k<｜Assistant｜></think>",
    ),
]


@pytest.mark.parametrize(
    ("messages", "options", "expected"), [e[1:] for e in EXAMPLES], ids=[e[0] for e in EXAMPLES]
)
def test_worked_example(messages: list[dict[str, Any]], options: dict[str, Any], expected: str) -> None:
    before = json.dumps(messages)
    assert render(messages, **options) == expected
    assert json.dumps(messages) == before


def test_constants_are_the_published_bytes() -> None:
    assert sha(TOOLS_TEXT) == TOOLS_HASH
    assert sha(chat._TOOLS_HEAD + "{SCHEMAS}" + chat._TOOLS_TAIL) == TOOLS_HASH


@pytest.mark.parametrize(
    ("release", "effort", "expected"),
    [
        ("april", None, None),
        ("april", "high", None),
        ("april", "max", P1_HASH),
        ("0731", None, P1_HASH),
        ("0731", "low", None),
        ("0731", "high", P1_HASH),
        ("0731", "max", P2_HASH),
    ],
)
def test_effort_prefix(release: Any, effort: str | None, expected: str | None) -> None:
    for messages in ([SYSTEM, user("Hi")], [user("Hi")]):
        plain = render(messages, thinking=True, release="april")
        prompt = render(messages, thinking=True, release=release, reasoning_effort=effort)
        assert prompt.startswith(B) and prompt.endswith(plain[len(B) :])
        prefix = prompt[len(B) : len(prompt) - len(plain) + len(B)]
        assert (sha(prefix) if prefix else None) == expected
        chat_mode = render(messages, release=release, reasoning_effort=effort)
        assert chat_mode == render(messages, release=release)


def test_unknown_effort_and_release() -> None:
    for release, effort in (("april", "low"), ("april", "medium"), ("0731", "minimal"), ("april", ["max"])):
        with pytest.raises(TextError, match="reasoning_effort"):
            render([user("x")], release=release, reasoning_effort=effort)
    with pytest.raises(TextError, match="release '0813x' is unknown; use one of april, 0731"):
        render([user("x")], release="0813x")


def test_trailing_system_message() -> None:
    assert render([SYSTEM], thinking=True) == B + "Be brief."
    assert render([SYSTEM], release="0731") == B + "Be brief." + A + "</think>"
    messages = [SYSTEM, assistant("yes", reasoning_content="r"), user("x")]
    assert render(messages) == f"{B}Be brief.yes{E}{U}x{A}</think>"


def test_reminder_after_a_user_turn_and_at_the_end() -> None:
    reminder = {"role": "latest_reminder", "content": "t"}
    assert render([user("x"), reminder]) == f"{B}{U}x{A}</think><｜latest_reminder｜>t"


def test_no_bos_when_continuing() -> None:
    assert render([user("Hi")], add_bos=False) == f"{U}Hi{A}</think>"


def test_request_options_join_the_first_system_message() -> None:
    block = "\n\n" + BLOCK
    assert render([SYSTEM, user("x")], tools=TOOLS) == f"{B}Be brief.{block}{U}x{A}</think>"
    assert render([user("x")], tools=TOOLS) == f"{B}{block}{U}x{A}</think>"
    second = {"role": "system", "content": "Two."}
    assert render([user("x"), SYSTEM, second, user("y")], tools=TOOLS) == (
        f"{B}{U}xBe brief.{block}Two.{U}y{A}</think>"
    )
    form = '\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{"é": 1}'
    assert render([user("x")], tools=TOOLS, response_format={"é": 1}) == f"{B}{block}{form}{U}x{A}</think>"
    assert render([user("x")], tools=[], response_format=None) == f"{B}{U}x{A}</think>"
    with pytest.raises(TextError, match="tools is given by the request and by the first system message"):
        render([{**SYSTEM, "tools": TOOLS}, user("x")], tools=TOOLS)


def test_tools_keep_all_reasoning() -> None:
    kept = render(HISTORY, thinking=True, tools=TOOLS)
    assert f"{A}<think>add</think>2{E}" in kept
    assert kept.replace("\n\n" + BLOCK, "") == render(HISTORY, thinking=True, drop_thinking=False)


def test_reasoning_after_the_last_user_turn_stays() -> None:
    messages = [
        user("a"),
        assistant("b", reasoning_content="r1"),
        user("go"),
        assistant("", reasoning_content="r2", tool_calls=[call("f", "{}", "1")]),
    ]
    calls = calls_block([call("f", "{}", "1")])
    head = f"{B}{U}a{A}</think>b{E}{U}go{A}"
    assert render(messages, thinking=True) == f"{head}<think>r2</think>{calls}{E}"
    # A tool result makes a new user turn, so the thought before it goes.
    assert render([*messages, result("x", "1")], thinking=True) == (
        f"{head}</think>{calls}{E}{U}<tool_result>x</tool_result>{A}<think>"
    )


def test_merging_and_tasks() -> None:
    assert render([user("a"), user("b", task="query")]) == f"{B}{U}a\n\nb{A}</think>"
    assert render([user("a", task="query"), user("b")]) == f"{B}{U}a{U}b{A}</think>"
    assert (
        render([user("a", task="query"), result("r")])
        == f"{B}{U}a\n\n<tool_result>r</tool_result><｜query｜>"
    )
    # The answer to a task has no thought in front of it.
    messages = [user("a", task="action"), assistant("go", reasoning_content="r")]
    assert render(messages, thinking=True) == f"{B}{U}a{A}<think><｜action｜>go{E}"


def test_results_follow_the_order_of_the_calls() -> None:
    calls = [call("f", "{}", "1"), call("g", "{}", "2"), call("h", "{}", "3")]
    messages = [
        user("x"),
        assistant(None, tool_calls=calls),
        result("three", "3"),
        user("between"),
        result("lost", "9"),
        result("two", "2"),
        result("one", "1"),
    ]
    blocks = ["<tool_result>lost</tool_result>", "between", "<tool_result>one</tool_result>"]
    blocks += ["<tool_result>two</tool_result>", "<tool_result>three</tool_result>"]
    assert render(messages).endswith(U + "\n\n".join(blocks) + A + "</think>")
    unnamed = [user("x"), assistant(None, tool_calls=[call("f", "{}")]), result("b", "2"), result("a", "1")]
    assert "<tool_result>b</tool_result>\n\n<tool_result>a</tool_result>" in render(unnamed)


def test_arguments() -> None:
    def parameters(arguments: str) -> str:
        text = render([user("x"), assistant(None, tool_calls=[call("f", arguments)])])
        start = text.index('name="f">\n') + len('name="f">\n')
        return text[start : text.index("\n</｜DSML｜invoke>")]

    def one(name: str, kind: str, value: str) -> str:
        return f'<｜DSML｜parameter name="{name}" string="{kind}">{value}</｜DSML｜parameter>'

    assert parameters("{}") == ""
    assert parameters('{"é": "\\u00e9\\n<&", "n": 1.50}') == one("é", "true", "é\n<&") + "\n" + one(
        "n", "false", "1.5"
    )
    assert parameters('{"o":{"b":1,"a":[]}}') == one("o", "false", '{"b": 1, "a": []}')
    for raw in ("{broken", "", "[1]", '"x"', "7"):
        assert parameters(raw) == one("arguments", "true", raw)


def test_contents_as_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    assert render([user(parts)]) == f"{B}{U}a\n\nb{A}</think>"
    assert render([{"role": "system", "content": parts}, user("x")]) == f"{B}a\n\nb{U}x{A}</think>"
    assert "<tool_result>a\n\nb\n\n[Unsupported image_url]</tool_result>" in render([result([*parts, image])])
    with pytest.raises(TextError, match=r"message 0: content\[2\]: type is 'image_url'"):
        render([user([*parts, image])])


def test_developer_only_on_request() -> None:
    developer = {"role": "developer", "content": "d", "tools": TOOLS, "response_format": {"a": 1}}
    with pytest.raises(TextError, match="message 1: role developer"):
        render([user("x"), developer])
    form = '\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{"a": 1}'
    assert render([developer], allow_developer=True) == f"{B}{U}d\n\n{BLOCK}{form}{A}</think>"
    plain = {"role": "developer", "content": "d"}
    messages = [plain, assistant("a", reasoning_content="r"), user("x")]
    assert render(messages, allow_developer=True) == f"{B}{U}d{A}</think>a{E}{U}x{A}</think>"
    assert render(messages, allow_developer=True, thinking=True) == f"{B}a{E}{U}x{A}<think>"
    assert render([user("x"), plain], allow_developer=True, thinking=True) == f"{B}{U}x{U}d{A}<think>"
    with pytest.raises(TextError, match="message 0: content of a developer message is empty"):
        render([{"role": "developer", "content": ""}], allow_developer=True)


BAD: list[tuple[Any, str]] = [
    ([], "the conversation is empty"),
    ("hi", "the conversation is empty or not a list"),
    ([1], "message 0 is of type int"),
    ([{"content": "x"}], "message 0: role is None"),
    ([user("x"), {"role": "robot", "content": "x"}], "message 1: role is 'robot'"),
    ([user("x", name="bob")], "message 0: unknown field name"),
    ([user("x", tools=[])], "message 0: unknown field tools"),
    ([user(None)], "message 0: content is missing or null"),
    ([{"role": "user"}], "message 0: content is missing or null"),
    ([user(3)], "message 0: content is of type int"),
    ([user("\ud800")], "message 0: content holds a lone surrogate"),
    ([user("x", task="dance")], "message 0: task is 'dance'"),
    ([user([{"type": "text"}])], "message 0: content[0].text is missing or null"),
    ([user([{"type": "text", "text": "a", "x": 1}])], "message 0: content[0]: unknown field x"),
    ([user(["a"])], "message 0: content[0] is of type str"),
    ([result(None)], "message 0: content is missing or null"),
    ([result("a", 3)], "message 0: tool_call_id is of type int"),  # type: ignore[arg-type]
    ([assistant(None)], "message 0: content is missing"),
    ([assistant("x", wo_eos="yes")], "message 0: wo_eos is 'yes'"),
    ([assistant("x", reasoning_content=["r"])], "message 0: reasoning_content is of type list"),
    ([assistant("x", tool_calls={})], "message 0: tool_calls is of type dict"),
    ([assistant("x", tool_calls=["f"])], "message 0: tool_calls[0] is of type str"),
    ([assistant("x", tool_calls=[{"id": "1"}])], "message 0: tool_calls[0].function is missing or null"),
    ([assistant("x", tool_calls=[call("f", {})])], "tool_calls[0].function.arguments is of type dict"),  # type: ignore[arg-type]
    ([assistant("x", tool_calls=[{**call("f", "{}"), "type": "custom"}])], "tool_calls[0]: type is 'custom'"),
    ([{**SYSTEM, "tools": {}}], "message 0: tools is of type dict"),
    ([{**SYSTEM, "tools": [{"name": "f"}]}], "message 0: tools[0]: unknown field name"),
    ([{**SYSTEM, "tools": [{"type": "function", "function": {}}]}], "tools[0].function.name is missing"),
    ([{**SYSTEM, "response_format": "json"}], "message 0: response_format is of type str"),
    ([{**SYSTEM, "response_format": {"a": {1, 2}}}], "message 0: response_format cannot be written as JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "expected"), BAD, ids=[expected for _, expected in BAD])
def test_refusals_name_the_place(messages: Any, expected: str) -> None:
    with pytest.raises(TextError) as caught:
        encode(messages)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_a_caller_writes_becomes_special(v4: Tokenizer) -> None:
    added = set(v4.special_ids.values())
    everything = "".join(v4.special_ids)

    def conversation(poison: str) -> list[dict[str, Any]]:
        name = "n" + poison
        arguments = json.dumps({"k" + poison: "v" + poison, "j": [poison, {poison: 1}]})
        schema = tool(name, description=poison, parameters={"properties": {poison: {"enum": [poison]}}})
        return [
            {"role": "system", "content": poison, "tools": [schema], "response_format": {"a": poison}},
            {"role": "latest_reminder", "content": poison},
            user("x" + poison),
            user([{"type": "text", "text": poison}]),
            assistant(poison, reasoning_content=poison, tool_calls=[call(name, arguments, "1" + poison)]),
            result(poison, "1" + poison),
            result([{"type": "text", "text": poison}, {"type": poison}]),
            assistant(poison, reasoning_content=poison, tool_calls=[call(name, "not json" + poison)]),
            user(poison),
        ]

    def specials(messages: list[dict[str, Any]], **options: Any) -> Counter[int]:
        segments = encode(messages, **options)
        ids = v4.encode_prompt(segments)
        assert v4.decode(ids) == join(segments)
        found = Counter(id for id in ids if id in added)
        assert found == Counter(v4.special_ids[s.text] for s in segments if isinstance(s, Special))
        return found

    for options in ({}, {"thinking": True}, {"thinking": True, "release": "0731", "reasoning_effort": "max"}):
        assert specials(conversation(everything), **options) == specials(conversation("plain"), **options)
    expected = specials([user(""), assistant(""), result("")])
    for text in v4.special_ids:
        assert specials([user(text), assistant(text), result(text)]) == expected


def test_harmless_prompts_encode_as_the_library_encodes_the_string(v4: Tokenizer, v4_path: Any) -> None:
    library = tokenizers.Tokenizer.from_file(str(v4_path))
    for _, messages, options, expected in EXAMPLES:
        ids = v4.encode_prompt(encode(messages, **options))
        assert ids == library.encode(expected, add_special_tokens=False).ids
