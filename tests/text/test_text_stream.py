"""Reading the model's output: the protocol, its known deviations, and laws that hold for any output."""

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_support import joined, pushed, run, split_texts

from dsv4.errors import TextError
from dsv4.text.deltas import CallArguments, CallBroken, CallEnd, CallStart, Content, Delta, Reasoning
from dsv4.text.stops import StopStrings
from dsv4.text.stream import OutputParser, parse
from dsv4.text.tokenizer import ASSISTANT, BOS, DSML, END_THINK, EOS, THINK, USER, Segment, Special, Tokenizer

MARKS = re.compile(f"({'|'.join(map(re.escape, (THINK, END_THINK, DSML, EOS, USER, BOS, ASSISTANT)))})")


def segments(text: str) -> list[Segment]:
    return [Special(part) if i % 2 else part for i, part in enumerate(MARKS.split(text)) if part]


def tag(text: str) -> str:
    """`<invoke ...>` to `<｜DSML｜invoke ...>`, so that the cases can be read."""
    return re.sub(r"<(/?)(?=tool|invoke|parameter)", rf"<\1{DSML}", text)


def calls(text: str, **options: Any) -> list[tuple[str, str]]:
    message = parse(tag(text), thinking=False, **options)
    return [(call.name, call.arguments) for call in message.tool_calls]


SAY = '<invoke name="say">\n<parameter name="text" string="true">a\nb</parameter>\n</invoke>'
SAID = ("say", '{"text": "a\\nb"}')


def test_the_worked_example() -> None:
    text = (
        'think</think>pre\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="say">\n'
        '<｜DSML｜parameter name="text" string="true">a\nb</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">5</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>"
    )
    message = parse(text, thinking=True)
    assert (message.reasoning, message.content) == ("think", "pre")
    assert [(c.id, c.name, c.arguments) for c in message.tool_calls] == [
        ("call_0", "say", '{"text": "a\\nb", "n": 5}')
    ]
    assert message.finish_reason == "tool_calls"
    assert (message.problems, message.dropped) == ((), "")
    assert run(segments(text), thinking=True)[1] == [
        Reasoning("think"),
        Content("pre"),
        CallStart(0, "call_0", "say"),
        CallArguments(0, '{"text": "a\\nb", "n": 5}'),
        CallEnd(0),
    ]


def test_strings_stream_and_other_values_wait() -> None:
    parser = OutputParser(thinking=False, id_prefix="r1-")
    steps: list[tuple[str, list[Delta]]] = [
        ("Hi\n\n", [Content("Hi")]),
        (tag("<tool_calls>\n<invoke name="), []),
        ('"f">\n', []),
        (tag('<parameter name="n" string="false">1'), []),
        (tag("2</parameter>\n"), []),
        (
            tag('<parameter name="s" string="true">'),
            [CallStart(0, "r1-0", "f"), CallArguments(0, '{"n": 12, "s": "')],
        ),
        ('one "two"', [CallArguments(0, 'one \\"two\\"')]),
        ("\n<", [CallArguments(0, "\\n")]),
        ("/p>", [CallArguments(0, "</p>")]),
        (tag("</parameter>"), [CallArguments(0, '"')]),
        (tag("\n</invoke>"), [CallArguments(0, "}"), CallEnd(0)]),
    ]
    for text, expected in steps:
        found = joined([delta for segment in segments(text) for delta in pushed(parser, segment)])
        assert found == expected, text
    assert parser.finish() == ([], "tool_calls")
    assert parser.finish() == ([], "tool_calls")


def test_newlines_before_the_block() -> None:
    for content, lead in (("", "\n\n"), ("a\n", "\n\n"), ("a\n\n\n", "\n\n"), ("a", ""), ("a\n", "")):
        message = parse(content + lead + tag(f"<tool_calls>\n{SAY}\n</tool_calls>"), thinking=False)
        assert message.content == content
        assert message.finish_reason == "tool_calls"
    # Without a call block newlines are just text, at the very end too.
    for text in ("a\n", "a\n\n", "\n\n\n", "a\n\n<", "a\n\n</", f"a\n\n<{DSML}tool"):
        assert parse(text, thinking=False).content == text


def test_think_tags() -> None:
    def parts(text: str, thinking: bool) -> tuple[str, str, int]:
        message = parse(text, thinking=thinking)
        return message.reasoning, message.content, len(message.problems)

    assert parts("r</think>c", True) == ("r", "c", 0)
    assert parts("<think>r</think>c", True) == ("r", "c", 1)
    assert parts("r1<think>r2</think>c", True) == ("r1r2", "c", 1)
    assert parts("r</think>c1</think>c2", True) == ("r", "c1c2", 1)
    assert parts("c1</think>c2", False) == ("", "c1c2", 1)
    assert parts("c1<think>r</think>c2", False) == ("r", "c1c2", 0)
    assert parts("only reasoning", True) == ("only reasoning", "", 1)
    assert parts("a\n\n</think>\n\nb", True) == ("a\n\n", "\n\nb", 0)


def test_the_block_ends_unclosed_reasoning() -> None:
    message = parse("r\n\n" + tag(f"<tool_calls>\n{SAY}\n</tool_calls>"), thinking=True)
    assert (message.reasoning, message.content) == ("r", "")
    assert [(c.name, c.arguments) for c in message.tool_calls] == [SAID]
    assert message.problems == ("the reasoning was not closed before the call block",)


def test_lookalikes_made_of_ordinary_text_are_text() -> None:
    text = f"</think><think>\n\n<{DSML}tool_calls>\n{tag(SAY)}\n{EOS}{USER}"
    message, _ = run([text], thinking=True)
    assert (message.reasoning, message.content, message.tool_calls) == (text, "", ())
    value = f"</{DSML}parameter></{DSML}invoke>"
    output = segments(tag('<tool_calls>\n<invoke name="f">\n<parameter name="a" string="true">'))
    message, _ = run(
        [*output, value, *segments(tag("</parameter>\n</invoke>\n</tool_calls>"))], thinking=False
    )
    assert json.loads(message.tool_calls[0].arguments) == {"a": value}


def test_parallel_calls() -> None:
    two = f'<tool_calls>\n{SAY}\n<invoke name="f">\n\n</invoke>\n{SAY}\n</tool_calls>'
    assert calls(two) == [SAID, ("f", "{}"), SAID]
    message = parse(tag(two), thinking=False)
    assert [call.id for call in message.tool_calls] == ["call_0", "call_1", "call_2"]


def test_tolerated_spellings() -> None:
    for name in ("tool_calls", "toolcalls", "tool", " tool_calls "):
        assert calls(f"<tool_calls>\n{SAY}\n</tool_calls>".replace("tool_calls", name)) == [SAID]
    assert calls(SAY) == [SAID]
    assert calls(f"c\n\n{SAY}\n{SAY}\n</tool_calls>") == [SAID, SAID]
    assert parse("c\n\n" + tag(SAY), thinking=False).content == "c"
    assert calls(f"<tool_calls>{SAY}</tool_calls>".replace("\n<", "<")) == [SAID]
    body = '<tool_calls>\n<invoke name="f">\n {"a": [1, "x"]} \n</invoke>\n</tool_calls>'
    assert calls(body) == [("f", '{"a": [1, "x"]}')]


def test_bare_invoke_does_not_end_reasoning() -> None:
    message = parse("r " + tag(SAY) + END_THINK + "c", thinking=True)
    assert (message.reasoning, message.content, message.tool_calls) == ("r " + tag(SAY), "c", ())


def test_missing_string_attribute() -> None:
    text = '<tool_calls>\n<invoke name="f">\n<parameter name="a">VALUE</parameter>\n</invoke>\n</tool_calls>'
    for value, expected in (("5", "5"), ('["a"]', '["a"]'), ("a b", '"a b"'), ("", '""'), ("NaN", '"NaN"')):
        assert calls(text.replace("VALUE", value)) == [("f", f'{{"a": {expected}}}')]


def test_missing_closing_tags_at_the_end() -> None:
    whole = f"<tool_calls>\n{SAY}\n</tool_calls>"
    for end in ("</tool_calls>", "\n</tool_calls>", "</invoke>\n</tool_calls>", "\n</invoke>\n</tool_calls>"):
        message = parse(tag(whole.removesuffix(end)), thinking=False)
        assert [(c.name, c.arguments) for c in message.tool_calls] == [SAID]
        assert message.finish_reason == "tool_calls"
        assert message.problems == ("the call block was not closed",)
    cut = whole[: whole.index("\nb</parameter>")]
    assert calls(cut) == [("say", '{"text": "a"}')]
    assert calls('<tool_calls>\n<invoke name="f">\n<parameter name="n" string="false">7') == [
        ("f", '{"n": 7}')
    ]
    assert calls('<tool_calls>\n<invoke name="f">\n{"a": 1}') == [("f", '{"a": 1}')]
    assert calls(f'<tool_calls>\n<invoke name="f">\n{SAY}\n</tool_calls>') == [("f", "{}"), SAID]


def test_wrapped_arguments_are_unwrapped_only_when_the_schema_says_so() -> None:
    def declared(*names: str) -> list[dict[str, Any]]:
        properties: dict[str, Any] = {name: {} for name in names}
        return [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]

    def wrapped(value: str, kind: str = ' string="false"', name: str = "arguments", more: str = "") -> str:
        parameter = f'<parameter name="{name}"{kind}>{value}</parameter>{more}'
        return f'<tool_calls>\n<invoke name="f">\n{parameter}\n</invoke>\n</tool_calls>'

    inner = '{"a": 1, "b": "x"}'
    for name in ("arguments", "input"):
        for kind in (' string="false"', ' string="true"', ""):
            assert calls(wrapped(inner, kind, name), tools=declared("a", "b", "c")) == [("f", inner)]
    kept = [("f", f'{{"arguments": {inner}}}')]
    assert calls(wrapped(inner)) == kept
    assert calls(wrapped(inner), tools=declared("a")) == kept
    assert calls(wrapped(inner), tools=declared("a", "b", "arguments")) == kept
    assert calls(wrapped("{}"), tools=declared("a")) == [("f", '{"arguments": {}}')]
    assert calls(wrapped("x", ' string="true"'), tools=declared("a")) == [("f", '{"arguments": "x"}')]
    assert calls(wrapped(inner, name="other"), tools=declared("a", "b")) == [("f", f'{{"other": {inner}}}')]
    second = wrapped(inner).replace(
        "<parameter", '<parameter name="c" string="false">3</parameter><parameter'
    )
    assert calls(second, tools=declared("a", "b", "c")) == [("f", f'{{"c": 3, "arguments": {inner}}}')]
    more = '<parameter name="a" string="false">2</parameter>'
    assert calls(wrapped(inner, more=more), tools=declared("a", "b")) == [
        ("f", f'{{"arguments": {inner}, "a": 2}}')
    ]


@pytest.mark.parametrize(
    "bad", ["", "5x", "{", "'a'", "NaN", "-Infinity", '{"a": 1,}', '"a\nb"', "1 2", "[" * 100_000]
)
def test_a_value_that_is_not_json_becomes_content(bad: str) -> None:
    broken = f'<invoke name="f">\n<parameter name="n" string="false">{bad}</parameter>\n</invoke>'
    message = parse(tag(f"c\n\n<tool_calls>\n{broken}\n{SAY}\n</tool_calls>"), thinking=False)
    assert message.content == "c" + tag(broken)
    assert [(c.id, c.name, c.arguments) for c in message.tool_calls] == [("call_0", *SAID)]
    assert message.problems == (
        "call 'f' has a value for 'n' that is not valid JSON; its text is kept as content",
    )
    alone = parse(tag(f"<tool_calls>\n{broken}\n</tool_calls>"), thinking=False)
    assert (alone.content, alone.finish_reason) == (tag(broken), "stop")


def test_numbers_of_any_size_pass_unchanged() -> None:
    number = "9" * 5000
    text = (
        f'<tool_calls>\n<invoke name="f">\n<parameter name="n" string="false">{number}</parameter>\n</invoke>'
    )
    assert calls(text) == [("f", f'{{"n": {number}}}')]


def test_a_call_already_announced_is_taken_back() -> None:
    broken = SAY.replace("\n</invoke>", '\n<parameter name="n" string="false">x</parameter>\n</invoke>')
    message, deltas = run(segments(tag(f"<tool_calls>\n{broken}\n{SAY}\n</tool_calls>")), thinking=False)
    assert deltas == [
        CallStart(0, "call_0", "say"),
        CallArguments(0, '{"text": "a\\nb"'),
        CallBroken(0),
        Content(tag(broken)),
        CallStart(1, "call_1", "say"),
        CallArguments(1, SAID[1]),
        CallEnd(1),
    ]
    assert [(c.id, c.name, c.arguments) for c in message.tool_calls] == [("call_1", *SAID)]


def test_a_parameter_given_twice_breaks_the_call() -> None:
    twice = SAY.replace("\n</invoke>", '\n<parameter name="text" string="true">c</parameter>\n</invoke>')
    message = parse(tag(f"<tool_calls>\n{twice}\n</tool_calls>"), thinking=False)
    assert (message.content, message.tool_calls, message.finish_reason) == (tag(twice), (), "stop")
    assert message.problems == ("call 'say' gives parameter 'text' twice; its text is kept as content",)


def test_other_text_among_the_calls_is_content() -> None:
    message = parse(tag(f"<tool_calls>\nwell:\n{SAY}\n and {SAY}\n</tool_calls>"), thinking=False)
    assert message.content == "well:\nand "
    assert len(message.tool_calls) == 2 and message.finish_reason == "tool_calls"
    # Inside the block newlines belong to no opener, and only ASCII white space is layout.
    message = parse(tag(f"<tool_calls>\nwell:\n\n{SAY}\u3000{SAY}\n</tool_calls>"), thinking=False)
    assert (message.content, len(message.tool_calls)) == ("well:\n\n\u3000", 2)
    inside = SAY.replace("\n</invoke>", "\nwell\n</invoke>")
    message = parse(tag(f"<tool_calls>\n{inside}\n</tool_calls>"), thinking=False)
    assert (message.content, message.tool_calls) == (tag(inside), ())


def test_text_after_the_block_is_dropped_but_told() -> None:
    message = parse(tag(f"<tool_calls>\n{SAY}\n</tool_calls>\nBye{EOS}more"), thinking=False)
    assert (message.content, message.dropped) == ("", "\nByemore")
    assert message.problems == ("text after the calls or after the end of the turn was dropped",)
    assert parse(tag(f"<tool_calls>\n{SAY}\n</tool_calls>\n{EOS}"), thinking=False).problems == ()


def test_the_turn_ends_at_each_stop_token() -> None:
    for stop in (EOS, USER, BOS, ASSISTANT):
        parser = OutputParser(thinking=False)
        assert parser.push_text("a") == [Content("a")] and not parser.ended
        assert parser.push_special(stop) == [] and parser.ended
        assert parser.push_text("b") == [] and parser.push_special(stop) == []
        assert parser.finish("length") == ([], "stop")
        assert parser.dropped == "b" + stop
        assert (f"the turn was ended by {stop}" in parser.problems) == (stop != EOS)


def test_cut_by_the_token_limit() -> None:
    assert parse("some text\n\n", thinking=False, reason="length").finish_reason == "length"
    assert parse("r", thinking=True, reason="length").problems == ()
    whole = tag(f"<tool_calls>\n{SAY}\n{SAY}\n</tool_calls>")
    for count in range(whole.index(tag("</invoke>")) + len(tag("</invoke>")), whole.rindex(tag("</invoke>"))):
        parser = OutputParser(thinking=False)
        for segment in segments(whole[:count]):
            pushed(parser, segment)
        assert parser.finish("length")[1] == "length"
    cut = tag(SAY)[: tag(SAY).index("b")]
    message = parse(tag(f"<tool_calls>\n{SAY}\n") + cut, thinking=False, reason="length")
    assert [(c.name, c.arguments) for c in message.tool_calls] == [SAID]
    assert (message.content, message.finish_reason) == (cut, "length")
    assert message.problems == ("call 'say' was cut short; its text is kept as content",)


def test_stray_marks_stay_readable() -> None:
    for text in (
        DSML,
        f"a {DSML} b",
        f"<{DSML}foo>x",
        f"</{DSML}tool_calls>",
        f'<{DSML}invoke name="f>',
        f"<{DSML}",
    ):
        message = parse(text, thinking=False)
        assert (message.content, message.tool_calls) == (text, ())
    endless = f'<{DSML}invoke name="' + "x" * 5000
    parser = OutputParser(thinking=False)
    given_out = "".join(
        delta.text for s in segments(endless) for d in ([s] if isinstance(s, Special) else s)
        for delta in pushed(parser, d) if isinstance(delta, Content)
    )  # fmt: skip
    assert len(endless) - len(given_out) < 1100 and endless.startswith(given_out)


def test_ids(v4: Tokenizer) -> None:
    text = "é🙂</think>ü\n\n" + tag(f"<tool_calls>\n{SAY}\n</tool_calls>") + EOS
    ids = v4.encode_prompt(segments(text))
    assert ids.count(v4.dsml_id) == tag(f"<tool_calls>{SAY}</tool_calls>").count(DSML) == 6
    assert parse(ids, thinking=True, tokenizer=v4) == parse(text, thinking=True)
    byte = next(id for id in range(300) if v4.bytes_of(id) == b"\xf0")
    message = parse([byte, v4.end_think_id, byte], thinking=True, tokenizer=v4)
    assert (message.reasoning, message.content) == ("\ufffd", "\ufffd")
    with pytest.raises(TextError, match="no tokenizer"):
        parse([1], thinking=True)


def test_random_ids_equal_their_text(v4: Tokenizer) -> None:
    rng = random.Random(9)
    special = [
        v4.dsml_id,
        v4.dsml_id,
        v4.special_ids["<think>"],
        v4.end_think_id,
        v4.special_ids["<｜title｜>"],
    ]
    common = [
        id for text in ("<", "</", "tool_calls>\n", 'invoke name="f">', "\n\n") for id in v4.encode_text(text)
    ]
    for _ in range(300):
        ids = [
            rng.choice(special)
            if rng.random() < 0.2
            else rng.choice((rng.choice(common), rng.randrange(v4.vocab_size)))
            for _ in range(rng.randrange(30))
        ]
        output: list[Segment] = []
        plain: list[int] = []
        for id in [*ids, -1]:
            if id in v4.special_texts or id == -1:
                output.append(v4.decode(plain))
                plain = []
            else:
                plain.append(id)
            if id in v4.special_texts:
                output.append(Special(v4.special_texts[id]))
        for thinking in (False, True):
            assert parse(ids, thinking=thinking, tokenizer=v4) == run(output, thinking=thinking)[0]


# Laws. An output is drawn as fragments of the protocol, each `@` a character that occurs nowhere else.

FRAGMENTS = [
    "@", "@ @", " ", "\n", "\n\n", "<", "</", ">", '"', "{", "}", '{"@": "@"}', "5", '"@"', "\\", "name=",
    "true", "invoke", "parameter", "tool_calls>", "x</think>", "\u3000", "\ud9ff", "🙂",
    DSML, THINK, END_THINK, "<｜title｜>",
    tag("<tool_calls>\n"), tag("\n\n<tool_calls>\n"), tag("</tool_calls>"), tag("<toolcalls>"), tag("<tool>"),
    tag('<invoke name="@">\n'), tag('<invoke name="f">'), tag("</invoke>"), tag("\n</invoke>\n"),
    tag('<parameter name="@" string="true">'), tag('<parameter name="a" string="true">'),
    tag('<parameter name="@" string="false">'), tag('<parameter name="@">'),
    tag('<parameter name="arguments" string="false">{"a": "@"}'), tag('<parameter name="input">'),
    tag("</parameter>"), tag("</parameter>\n"), tag(SAY),
]  # fmt: skip
F = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}, "b": {}}}}}]


@st.composite
def outputs(draw: st.DrawFn) -> list[Segment]:
    text = "".join(draw(st.lists(st.sampled_from(FRAGMENTS), max_size=25)))
    if draw(st.booleans()):
        text = tag("<tool_calls>\n") + text
    count = 0
    while "@" in text:
        text = text.replace("@", chr(0x4E00 + count), 1)
        count += 1
    return segments(text + draw(st.sampled_from(["", "", EOS, EOS + "x", USER])))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    outputs(),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_laws(output: list[Segment], thinking: bool, reason: str, declared: bool, rng: random.Random) -> None:
    tools = F if declared else []
    message, deltas = run(output, thinking=thinking, reason=reason, tools=tools)
    letters: list[Segment] = [
        piece for segment in output for piece in ([segment] if isinstance(segment, Special) else segment)
    ]
    # However it is cut, the result is the same: message, problems, dropped text, and the order of the deltas.
    for pieces in (letters, split_texts(rng, output)):
        assert run(pieces, thinking=thinking, reason=reason, tools=tools) == (message, deltas)

    # Nothing is lost or told twice.
    text = "".join(s.text if isinstance(s, Special) else s for s in output)
    payload = re.findall("[\u4e00-\u4fff]", text)
    told = message.reasoning + message.content + message.dropped
    told += "".join(call.name + call.arguments for call in message.tool_calls)
    assert sorted(re.findall("[\u4e00-\u4fff]", told)) == payload
    for channel in (message.reasoning, message.content, message.dropped):
        assert sorted(found := re.findall("[\u4e00-\u4fff]", channel)) == found

    # Calls are usable, and the finish reason follows from them.
    for call in message.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
    ended = reason == "stop" or any(isinstance(s, Special) and s.text in (EOS, USER) for s in output)
    assert message.finish_reason == (("tool_calls" if message.tool_calls else "stop") if ended else "length")
    assert not any("\ud800" <= letter <= "\udfff" for letter in told)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.text(), st.sampled_from([Special(THINK), Special(END_THINK)]))), st.booleans())
def test_without_call_marks_every_character_is_told(output: list[Segment], thinking: bool) -> None:
    message, deltas = run(output, thinking=thinking)
    assert "".join(d.text for d in deltas if isinstance(d, Reasoning | Content)) == "".join(
        s for s in output if isinstance(s, str)
    )
    expected = {True: "", False: ""}
    for segment in output:
        if isinstance(segment, Special):
            thinking = segment.text == THINK
        else:
            expected[thinking] += segment
    assert (message.reasoning, message.content) == (expected[True], expected[False])
    assert (message.tool_calls, message.dropped, message.finish_reason) == ((), "", "stop")


def cut_at_stop(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Letter by letter: the first moment at which the text ends in a stop string; the longest one counts."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    st.lists(st.text("abc", max_size=6), max_size=8),
)
def test_stop_strings(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    expected, is_hit = cut_at_stop(text, tuple(stops))
    for cut in (pieces, list(text), [text]):
        watcher = StopStrings(tuple(stops))
        told = ""
        hit = False
        for piece in cut:
            out, hit = watcher.push(piece)
            told += out
            assert expected.startswith(told)
        assert hit == (is_hit and bool(cut))
        if not hit:
            # Held back is at most what could still begin a stop string.
            assert len(text) - len(told) < max(map(len, stops), default=1)
        assert told + watcher.finish() == expected


def test_stop_strings_by_hand() -> None:
    watcher = StopStrings(("\n\nUser:", "END"))
    assert watcher.push("Hello\n") == ("Hello", False)
    assert watcher.push("\nUs") == ("", False)
    assert watcher.push("e me") == ("\n\nUse me", False)
    assert watcher.push(" EN") == (" ", False)
    assert watcher.push("D of it END") == ("", True)
    assert watcher.push("more") == ("", True)
    assert watcher.finish() == ""
    assert StopStrings(()).push("abc") == ("abc", False)
    with pytest.raises(TextError, match="a stop string is empty"):
        StopStrings(("a", ""))
