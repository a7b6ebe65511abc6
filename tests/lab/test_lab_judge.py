"""What counts as a right answer, and what an evaluation set may hold."""

import json
from decimal import Decimal
from pathlib import Path

import pytest

from dsv4.errors import ConfigError
from dsv4.lab.evalset import SUITES, Item, choose, read_set
from dsv4.lab.judge import Rate, admits, as_number, last_number, same_calls, same_json, says, uses
from dsv4.models import EMBEDDED

LAST = {
    "27 + 58 = 85.": "85",
    "It is 85": "85",
    "85": "85",
    "The answer is 1,623!": "1623",
    "12,345,678": "12345678",
    "5, 6": "6",
    "5,6": "6",
    "3-5": "5",
    "3 - 5 = -2": "-2",
    "3 − 5 = −2.": "-2",
    "half of 5 is 2.5.": "2.5",
    "007": "7",
    "85 apples, not v2": "85",
    "none at all": None,
    "": None,
}


@pytest.mark.parametrize("text", LAST)
def test_last_number(text: str) -> None:
    want = LAST[text]
    assert last_number(text) == (None if want is None else Decimal(want))


def test_as_number() -> None:
    assert as_number(" 1,024 ") == 1024 and as_number("−3") == -3 and as_number("120.0") == as_number("120")
    assert all(as_number(text) is None for text in ("", "x", "NaN", "Infinity", "1 2", "12 apples"))


def test_says_whole_words_in_any_case_and_spacing() -> None:
    for text, expected in (
        ("The code is 4216.", "4216"),
        ("It is in the Park", "park"),
        ('"Park!"', "park"),
        ("Your hobby\nis  gardening.", "your hobby is gardening"),
        ("It’s mine", "it's"),
        ("sleeping: s-l-e-e-p", "s-l-e-e-p"),
        ("a (small) one", "(small)"),
    ):
        assert says(text, expected), (text, expected)
    for text, expected in (
        ("The code is 42160.", "4216"),
        ("It is in the parking lot", "park"),
        ("the parks", "park"),
        ("", "park"),
        ("Your gardening is hobby", "your hobby is gardening"),
        ("a.b", "axb"),
        ("ab", "a.b"),
    ):
        assert not says(text, expected), (text, expected)


def test_uses_allows_a_plural_s_only() -> None:
    for text in ("a cat.", "Two Cats ran", "the cat's hat", "CAT"):
        assert uses(text, "cat"), text
    for text in ("catch", "concat", "catss", "cates", "caterpillar", ""):
        assert not uses(text, "cat"), text


def test_calls_are_compared_by_name_and_arguments() -> None:
    want = [{"name": "f", "arguments": {"a": 1, "b": "x"}}, {"name": "g", "arguments": {}}]
    assert same_calls([("g", "{}"), ("f", '{"b": "x", "a": 1}')], want)
    for got in (
        [],
        [("g", "{}")],
        [("g", "{}"), ("f", '{"b": "x", "a": 2}')],
        [("g", "{}"), ("f", '{"b": "x", "a": 1}'), ("g", "{}")],
        [("g", "{"), ("f", '{"b": "x", "a": 1}')],
    ):
        assert not same_calls(got, want), got
    assert same_calls([], []) and not same_calls([("g", "{}")], [])


def test_json_and_honesty() -> None:
    assert same_json('{"a": [1, "x"], "b": false}', {"b": False, "a": [1, "x"]})
    assert not same_json('{"a": 1} or so', {"a": 1}) and not same_json('{"a": "1"}', {"a": 1})
    for text in (
        "I do not know that.",
        "Sorry, I don\u2019t know.",
        "I cannot do that.",
        "I have no tool for it.",
    ):
        assert admits(text), text
    for text in ("Paris.", "I know that.", "It can be done.", "There is a tool."):
        assert not admits(text), text


def test_wilson_interval() -> None:
    """Values of the closed form, as in textbooks; never outside 0 to 1, and never empty."""
    for hits, total, low, high in (
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (1, 1, 0.2065, 1.0),
        (81, 263, 0.2553, 0.3662),
    ):
        rate = Rate(hits, total)
        assert rate.interval == pytest.approx((low, high), abs=1e-4)
        assert rate.as_dict() == {
            **{"share": hits / total, "hits": hits, "total": total},
            **dict(zip(("low", "high"), rate.interval, strict=True)),
        }
    for total in range(1, 200):
        for rate in (Rate(0, total), Rate(total, total), Rate(total // 2, total)):
            low, high = rate.interval
            assert 0 <= low <= rate.share <= high <= 1, rate
    assert Rate.of([True, False, True]) == Rate(2, 3)


ASK = [{"role": "user", "content": "hi"}]
GOOD: list[dict[str, object]] = [
    {"suite": "stories", "kind": "story", "messages": ASK, "thinking": True, "expected": ["cat", "hat"]},
    {"suite": "sums", "kind": "+", "messages": ASK, "thinking": False, "expected": "1,024"},
    {
        **{"suite": "recall", "kind": "one step", "messages": ASK, "thinking": True, "expected": "park"},
        **{"distance_tokens": 5, "context_tokens": 9},
    },
    {"suite": "chat", "kind": "talk", "messages": ASK, "thinking": True, "expected": None},
    {"suite": "chat", "kind": "copy", "messages": ASK, "thinking": True, "expected": "8 4 5"},
    {"suite": "text", "kind": "book", "messages": [], "thinking": False, "expected": None, "text": "Once."},
    {
        **{
            "suite": "tools",
            "kind": "call",
            "messages": ASK,
            "thinking": True,
            "tools": [{"type": "function"}],
        },
        "expected": [{"calls": [{"name": "f", "arguments": {}}], "results": ["3"]}, {"says": ["3"]}],
    },
    {
        **{"suite": "json", "kind": "one", "messages": ASK, "thinking": False, "expected": {"a": 1}},
        "schema": {"type": "object"},
    },
    {"suite": "unknown", "kind": "open", "messages": ASK, "thinking": False, "expected": None},
]


def write(path: Path, lines: list[object]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_set_is_read(tmp_path: Path) -> None:
    items = read_set(write(tmp_path / "set.jsonl", [GOOD[0], "", *GOOD[1:]]))
    assert [item.suite for item in items] == [line["suite"] for line in GOOD]
    assert items[0] == Item("stories", "story", tuple(ASK), True, ["cat", "hat"])
    assert (items[2].distance_tokens, items[2].context_tokens) == (5, 9)
    assert items[5].text == "Once." and items[5].messages == ()
    assert items[6].tools == ({"type": "function"},) and items[7].schema == {"type": "object"}


BAD = {
    "{": "is not JSON",
    "[" * 100_000: "is not JSON",
    "[1]": "holds a list, expected a JSON object",
    '{"suite": "sums", "answer": 1}': "unknown keys ['answer']",
    '{"suite": "poems", "kind": ""}': "suite is 'poems', expected one of stories, sums",
    '{"kind": "x"}': "suite is None",
    '{"suite": ["sums"], "kind": "x"}': "suite is ['sums']",
}
CHANGES = [
    (0, "kind", 3, "a text"),
    (0, "expected", [], "a list of words"),
    (0, "expected", ["cat", ""], "a list of words"),
    (0, "expected", "cat", "a list of words"),
    (0, "messages", [], "a list of messages"),
    (0, "messages", ["hi"], "a list of messages"),
    (0, "thinking", "yes", "true or false"),
    (1, "expected", "many", "a number as text"),
    (1, "expected", 7, "a number as text"),
    (2, "expected", None, "a text"),
    (2, "distance_tokens", None, "a positive number"),
    (2, "context_tokens", 2.5, "a positive number"),
    (2, "context_tokens", True, "a positive number"),
    (3, "expected", 3, "a text or null"),
    (5, "text", "", "a text that is not empty"),
    (6, "tools", [], "a list of tools"),
    (6, "expected", [], "a list of steps"),
    (6, "expected", [{"calls": [], "results": ["3"]}], "a list of steps"),
    (6, "expected", [{"calls": [{}], "results": []}, {"says": []}], "a list of steps"),
    (6, "expected", [{"calls": [{}], "results": ["1", "2"]}, {"says": []}], "a list of steps"),
    (6, "expected", [{"shouts": []}], "a list of steps"),
    (7, "expected", "{}", "an object"),
    (7, "schema", "{}", "an object or null"),
    (8, "expected", "no", "null"),
]


def test_what_is_wrong_with_a_set_is_said_with_its_line(tmp_path: Path) -> None:
    for line, why in BAD.items():
        with pytest.raises(ConfigError, match=r"set\.jsonl, line 2") as error:
            read_set(write(tmp_path / "set.jsonl", [GOOD[1], line]))
        assert why in str(error.value) and len(str(error.value)) < 500
    for index, key, value, why in CHANGES:
        with pytest.raises(ConfigError, match=rf"set\.jsonl, line 1: {key} is .*expected {why}"):
            read_set(write(tmp_path / "set.jsonl", [{**GOOD[index], key: value}]))


def test_a_file_that_is_no_set(tmp_path: Path) -> None:
    for content, why in ((b"", "is empty"), (b"\n \n", "is empty"), (b"\xff\xfe", "not UTF-8 text")):
        (tmp_path / "set").write_bytes(content)
        with pytest.raises(ConfigError, match=why):
            read_set(tmp_path / "set")
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_set(path)


def test_choice_of_suites_and_a_limit() -> None:
    items = [Item(suite, f"{number % 12}") for suite in (*SUITES, "text") for number in range(48)]
    assert choose(items, "all", None) == items
    assert {item.suite for item in choose(items, "stories", None)} == {"stories", "text"}
    assert {item.suite for item in choose(items, "recall", None)} == {"recall"}
    few = choose(items, "all", 6)
    assert len(few) == 48 and few == choose(items, "all", 6), "the same every time"
    assert all(len({item.kind for item in few if item.suite == suite}) >= 4 for suite in SUITES)
    assert choose(items, "sums", 100) == choose(items, "sums", None)
    assert choose(items[:48], "sums", 3) == []


def test_the_shipped_set_is_read() -> None:
    """Of the suites that the shipped model was made for: tools, JSON and honesty come with the next one."""
    found = {item.suite for item in read_set(EMBEDDED / "evalset.jsonl")}
    assert found == {*SUITES, "text"} - {"tools", "json", "unknown"}
