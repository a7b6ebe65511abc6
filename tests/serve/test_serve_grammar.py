"""Grammars without a server: what the encoder writes is allowed, and whatever is allowed can be read."""

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4.engine.grammar import MAX_KNOWN_CHARACTERS, Grammars, Matcher, _own_failure
from dsv4.engine.request import Delta, Token
from dsv4.errors import RequestError
from dsv4.models import EMBEDDED
from dsv4.serve.answer import ChatAnswer, Piece, join_calls
from dsv4.serve.grammar import Form
from dsv4.serve.schema import BadField
from dsv4.text.chat import encode
from dsv4.text.tokenizer import Tokenizer

VOCAB = 4096
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"type": "string", "enum": ["C", "F", 'a "quoted" one']},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "note": {"type": ["string", "null"]},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
CLOSED = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b", 3, None]},
        "list": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 5}, "maxItems": 4},
        "word": {"type": "string", "maxLength": 6},
    },
    "required": ["kind", "list", "word"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(EMBEDDED)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB)


def allowed(matcher: Matcher) -> list[int]:
    bits = np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")
    assert len(bits) == VOCAB
    return bits.nonzero()[0].tolist()


def follow(matcher: Matcher, ids: list[int]) -> int:
    """How many of the ids are allowed, one after the other."""
    for count, id in enumerate(ids):
        if id not in allowed(matcher):
            return count
        matcher.accept(id)
    return len(ids)


def turn(tokenizer: Tokenizer, reasoning: str, content: str, calls: list[tuple[str, Any]]) -> list[int]:
    """An answer as the encoder writes it into a prompt."""
    asked = {"role": "user", "content": "x"}
    made = [{"id": "c", "function": {"name": n, "arguments": json.dumps(a)}} for n, a in calls]
    answer = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": made}
    options: dict[str, Any] = {"thinking": True, "tools": TOOLS}
    with_answer = tokenizer.encode_prompt(encode([asked, answer], **options))
    return with_answer[len(tokenizer.encode_prompt(encode([asked], **options))) :]


CALLS: list[tuple[str, Any]] = [
    ("weather", {"city": "Rome", "days": 3}),
    ("weather", {"city": 'a </b> "c"\n\n< d', "days": 1, "unit": 'a "quoted" one', "flags": [True, False]}),
    ("weather", {"city": "", "days": 9, "note": None, "place": {"x": -4}}),
    ("weather", {"city": "é🦊", "days": 2, "note": "as it is"}),
    ("now", {}),
]


def test_what_the_encoder_writes_is_allowed(tokenizer: Tokenizer, grammars: Grammars) -> None:
    must = Form(None, TOOLS, must_call=True).grammar(tokenizer, True)
    may = Form(None, TOOLS).grammar(tokenizer, True)
    either = Form(CLOSED, TOOLS).grammar(tokenizer, True)
    for calls in [[call] for call in CALLS] + [CALLS]:
        ids = turn(tokenizer, "I think.\n<hm>", "", calls)
        for grammar in (must, may, either):
            assert follow(grammars.matcher(grammar), ids) == len(ids), tokenizer.decode(ids)
        ids = turn(tokenizer, "", "I look < there.", calls)
        assert follow(grammars.matcher(may), ids) == len(ids)
    ids = turn(tokenizer, "hm", "no call < at all <", [])
    assert follow(grammars.matcher(may), ids) == len(ids)
    assert follow(grammars.matcher(must), ids) < len(ids)


FORBIDDEN: list[tuple[str, Any]] = [
    ("other", {}),
    ("weather", {"city": "Rome"}),
    ("weather", {"days": 3}),
    ("weather", {"city": "Rome", "days": 10}),
    ("weather", {"city": "Rome", "days": 3, "unit": "K"}),
    ("weather", {"city": "Rome", "days": 3, "more": 1}),
    ("weather", {"city": 5, "days": 3}),
    ("now", {"a": 1}),
]


@pytest.mark.parametrize("call", FORBIDDEN, ids=str)
def test_what_the_schema_forbids_is_not(
    tokenizer: Tokenizer, grammars: Grammars, call: tuple[str, Any]
) -> None:
    ids = turn(tokenizer, "hm", "", [call])
    for must in (True, False):
        matcher = grammars.matcher(Form(None, TOOLS, must_call=must).grammar(tokenizer, True))
        assert follow(matcher, ids) < len(ids)


def walk(
    matcher: Matcher, tokenizer: Tokenizer, chance: random.Random, answer: ChatAnswer
) -> tuple[str, list[Any]]:
    """Random allowed tokens to the end; -> content and calls. Texts without an end get one soon."""
    pieces: list[Piece] = []
    for step in range(3000):
        ids = allowed(matcher)
        special = [id for id in ids if id in tokenizer.special_texts]
        id = chance.choice(special if special and (step > 20 or chance.random() < 0.2) else ids)
        if not special and len(ids) > 1000:
            closing = [i for i in ids if tokenizer.bytes_of(i) in (b"</", b"<", b"/", b'"')]
            id = chance.choice(closing or ids) if chance.random() < 0.5 else id
        matcher.accept(id)
        is_last = id == tokenizer.eos_id
        pieces.append(answer.push(Delta("s", Token(id), "", "stop" if is_last else None)))
        if is_last:
            return "".join(piece.content for piece in pieces), join_calls(pieces)
    raise AssertionError("no end")


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_allowed_can_be_read(tokenizer: Tokenizer, grammars: Grammars, seed: int) -> None:
    chance, thinking = random.Random(seed), bool(seed % 2)
    options: dict[str, Any] = {"thinking": thinking, "stops": (), "id_prefix": ""}
    matcher = grammars.matcher(Form(CLOSED).grammar(tokenizer, thinking))
    content, calls = walk(matcher, tokenizer, chance, ChatAnswer(tokenizer, tools=None, **options))
    value = json.loads(content)
    assert list(value) == ["kind", "list", "word"] and value["kind"] in ("a", "b", 3, None) and not calls
    assert len(value["list"]) <= 4 and all(-5 <= n <= 5 for n in value["list"]) and len(value["word"]) <= 6

    form = Form(None, TOOLS, must_call=True, many_calls=False)
    matcher = grammars.matcher(form.grammar(tokenizer, thinking))
    answer = ChatAnswer(tokenizer, tools=TOOLS, **options)
    content, calls = walk(matcher, tokenizer, chance, answer)
    assert content == "" and len(calls) == 1 and answer.finish_reason == "tool_calls" and not answer.problems
    function = calls[0]["function"]
    arguments = json.loads(function["arguments"])
    if function["name"] == "weather":
        assert isinstance(arguments["city"], str) and 1 <= arguments["days"] <= 9
        assert arguments.get("unit", "C") in ("C", "F", 'a "quoted" one')


def test_names_and_rules_that_calls_cannot_have(tokenizer: Tokenizer) -> None:
    def form(properties: Any, **more: Any) -> Form:
        function = {"name": "f", "parameters": {"type": "object", "properties": properties}, **more}
        return Form(None, [{"type": "function", "function": function}], must_call=True)

    for bad in (form({'a"b': {}}), form({}, name="<"), form({"a": 5}), form(7)):
        with pytest.raises(BadField):
            bad.grammar(tokenizer, False)
    for format in ("frog", ["date"]):
        odd = {"a": {"type": "string", "format": format}}
        assert form(odd).grammar(tokenizer, False)
        with pytest.raises(BadField, match=r"format .* cannot be enforced, expected one of date, time"):
            form(odd, strict=True).grammar(tokenizer, False)


X, Y = {"x": {"type": "integer"}}, {"y": {"type": "string"}}
NEEDS_X: dict[str, Any] = {"type": "object", "properties": X, "required": ["x"]}
NEEDS_Y: dict[str, Any] = {"type": "object", "properties": Y, "required": ["y"]}
ROOTS: list[tuple[Any, list[Any], list[Any]]] = [
    ({"$ref": "#/$defs/a", "$defs": {"a": NEEDS_X}}, [{"x": 1}], [{}, {"y": "1"}]),
    ({"anyOf": [NEEDS_X, NEEDS_Y]}, [{"x": 1}, {"y": "b"}], [{}, {"z": 1}]),
    ({"oneOf": [NEEDS_X, {"$ref": "#/$defs/b"}], "$defs": {"b": NEEDS_Y}}, [{"x": 1}, {"y": ""}], [{}]),
    ({"allOf": [NEEDS_X, NEEDS_Y]}, [{"x": 1, "y": "b"}], [{}, {"x": 1}, {"y": "b"}]),
    ({"properties": {}, "required": ["q"]}, [{"q": [1, "a"]}, {"q": "b"}], [{}]),
]
LOOSE: list[Any] = [
    {"type": "object", "additionalProperties": True},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
    {"type": "object", "properties": X, "not": {"required": ["x"]}},
]


def call_of(parameters: Any, strict: bool = False) -> Form:
    function = {"name": "f", "parameters": parameters, "strict": strict}
    return Form(None, [{"type": "function", "function": function}], must_call=True)


@pytest.mark.parametrize("strict", [False, True])
def test_roots_of_schemas_are_honoured(tokenizer: Tokenizer, grammars: Grammars, strict: bool) -> None:
    for schema, good, bad in ROOTS:
        grammar = call_of(schema, strict).grammar(tokenizer, True)
        for arguments in good:
            ids = turn(tokenizer, "hm", "", [("f", arguments)])
            assert follow(grammars.matcher(grammar), ids) == len(ids), (schema, arguments)
        for arguments in bad:
            ids = turn(tokenizer, "hm", "", [("f", arguments)])
            assert follow(grammars.matcher(grammar), ids) < len(ids), (schema, arguments)
    for schema in LOOSE:
        if strict:
            with pytest.raises(BadField, match="cannot be enforced"):
                call_of(schema, strict).grammar(tokenizer, True)
        else:
            ids = turn(tokenizer, "hm", "", [("f", {"x": 1, "two words": 2})])
            grammar = call_of(schema).grammar(tokenizer, True)
            assert follow(grammars.matcher(grammar), ids) == len(ids), schema
    for nonsense in ({"required": 5}, {"required": [1]}, {"anyOf": []}, {"$ref": "#/nowhere"}, {"allOf": 3}):
        with pytest.raises(BadField):
            call_of(nonsense, strict).grammar(tokenizer, True)


def test_limits_of_strings_in_calls(tokenizer: Tokenizer, grammars: Grammars) -> None:
    word = {"type": "string", "minLength": 2, "maxLength": 4, "pattern": "^[a-z/]+$"}
    schema = {"type": "object", "properties": {"a": word}, "required": ["a"]}
    grammar = call_of(schema, True).grammar(tokenizer, True)
    for text, is_allowed in (("ab", True), ("a/bc", True), ("a", False), ("abcde", False), ("AB", False)):
        ids = turn(tokenizer, "hm", "", [("f", {"a": text})])
        assert (follow(grammars.matcher(grammar), ids) == len(ids)) == is_allowed, text


FORMATS = {
    "date": (["2026-02-28", "0001-12-31"], ["2026-2-28", "2026-13-01", "2026-01-32", "28.2.2026"]),
    "time": (["23:59:59Z", "00:00:00.5+01:00"], ["24:00:00Z", "12:00Z", "12:00:00"]),
    "date-time": (["2026-02-28T12:30:00Z"], ["2026-02-28", "2026-02-28 12:30:00Z"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000", "123e4567-e89b"]),
    "email": (["a.b+c@x-y.example.org"], ["a@b", "@x.org", "a b@x.org", "a@-x.org"]),
    "ipv4": (["0.0.0.0", "255.10.99.1"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
}


@pytest.mark.parametrize("format", FORMATS)
def test_formats_of_strings_in_strict_calls(tokenizer: Tokenizer, grammars: Grammars, format: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": format}}, "required": ["a"]}
    tool = {"function": {"name": "f", "parameters": schema, "strict": True}}
    grammar = Form(tools=[tool], must_call=True).grammar(tokenizer, True)
    good, bad = FORMATS[format]
    for text in (*good, *bad):
        ids = turn(tokenizer, "hm", "", [("f", {"a": text})])
        assert (follow(grammars.matcher(grammar), ids) == len(ids)) is (text in good), text


def test_contents_of_other_forms(tokenizer: Tokenizer, grammars: Grammars) -> None:
    forms = {"regex": r"[0-9]{2}/[ab]", "choice": ["12/a", 'x"y'], "lark": 'start: "12/" X\nX: /[ab]/'}
    for name, value in forms.items():
        matcher = grammars.matcher(Form(**{name: value}).grammar(tokenizer, False))
        ids = [*tokenizer.encode_text("12/a"), tokenizer.eos_id]
        assert follow(matcher, ids) == len(ids), name
        matcher = grammars.matcher(Form(**{name: value}).grammar(tokenizer, False))
        assert follow(matcher, tokenizer.encode_text("12 a")) < 4, name


def test_thought_is_closed_and_the_answer_is_free(tokenizer: Tokenizer, grammars: Grammars) -> None:
    form = Form(max_thinking=5, is_free=True)
    thought, close = tokenizer.encode_text("x x x x x x x x x"), [tokenizer.end_think_id]
    answer = turn(tokenizer, "", "so < be it", [("other", {"free": 1})])[1:]
    for length in range(6):
        matcher = grammars.matcher(form.grammar(tokenizer, True))
        ids = [*thought[:length], *close, *answer]
        assert follow(matcher, ids) == len(ids), length
    matcher = grammars.matcher(form.grammar(tokenizer, True))
    assert follow(matcher, thought) == 5 and allowed(matcher) == close


NINE = range(9)
HARD: dict[str, dict[str, Any]] = {
    "powers": {"type": "string", "pattern": "(a{1,999}){1,999}(b{1,999}){1,999}"},
    "stars": {"type": "string", "pattern": "(?:(?:a|aa|aaa)*b){200}" * 20},
    "products": {
        "allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {"const": i}}} for j in NINE]} for i in NINE]
    },
    "keys": {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(3000)}},
    "values": {"enum": [f"value {i}" for i in range(5000)]},
    "literal": {"const": "x" * 60_000},
}
BOMB = "((((%s{99}){99}){99}){99})"  # text that is forced, 96 MB of it
DOUBLING = "\n".join(["start: a0", *(f"a{i}: a{i + 1} a{i + 1} |" for i in range(40)), 'a40: "x"'])
AUTOMATON = "start: A\nA: /.*a.{15}/ & /.*b.{16}/ & /.*c.{17}/ & ~/.*d.{18}/"
HOSTILE: dict[str, dict[str, Any]] = {
    **{name: {"schema": schema} for name, schema in HARD.items()},
    "bomb": {"regex": BOMB % "a"},
    "bomb of a pattern": {"schema": {"type": "string", "pattern": f"^{BOMB % 'b'}$"}},
    "bomb within": {"lark": '%llguidance {"no_forcing": false}\nstart: ' + f"/{BOMB % 'c'}/"},
    "letters": {"regex": "a{260000}"},
    "states": {"regex": "(.*[ab].{30}){3}"},
    "intersection": {"lark": AUTOMATON},
    "ambiguous": {"lark": 'start: s\ns: s s | "a" | s s s'},
    "doubling": {"lark": DOUBLING},
    "choices": {"choice": [f"choice {i * 7919}" for i in range(3000)]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_cost_little_or_are_refused(
    tokenizer: Tokenizer, grammars: Grammars, name: str
) -> None:
    began, memory = time.process_time(), resident_mb()
    try:
        matcher = grammars.matcher(Form(**HOSTILE[name]).grammar(tokenizer, False))
        for _ in range(10):
            step = time.process_time()
            matcher.accept(allowed(matcher)[0])
            assert time.process_time() - step < 0.1, "every stream waits for a step"
    except RequestError as error:
        assert "grammar" in str(error) and "unwrap" not in str(error)
    assert time.process_time() - began < 2 and resident_mb() - memory < 50


def resident_mb() -> int:
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) >> 10  # type: ignore[index]


def test_known_grammars_are_few_bytes(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, VOCAB)
    for number in range(8):
        grammars.matcher(f'start: "{number}"\n// {"-" * 900_000}')
    assert sum(map(len, grammars._known)) <= MAX_KNOWN_CHARACTERS


def test_panic_is_told_without_its_place(grammars: Grammars) -> None:
    with pytest.raises(RequestError, match="gave up on it") as refusal, _own_failure():
        raise type("PanicException", (BaseException,), {})("called unwrap at /home/user/lib.rs:5")
    assert "lib.rs" not in str(refusal.value)


def test_mask_is_of_the_grammar(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher('start: "yes" | "no"')
    ids = allowed(matcher)
    assert {tokenizer.bytes_of(id)[:1] for id in ids} == {b"y", b"n"}
    matcher.accept(ids[0])
    with pytest.raises(RequestError, match="grammar"):
        matcher.accept(tokenizer.encode_text("q")[0])
    with pytest.raises(RequestError, match="grammar cannot be used"):
        grammars.matcher("start: nowhere")
