"""Token ids, injection-proof encoding and exact, incremental decoding."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.errors import TextError
from dsv4.models import EMBEDDED
from dsv4.text import tokenizer as module
from dsv4.text import words
from dsv4.text.tokenizer import (
    ASSISTANT,
    BOS,
    CHAT_TOKENS,
    DSML,
    END_THINK,
    EOS,
    THINK,
    USER,
    Special,
    TextStream,
    Tokenizer,
    _byte_symbols,
)

SELF_TEST = "<｜User｜>你好<｜Assistant｜><think>推理</think>答案<｜end▁of▁sentence｜>"
SELF_TEST_IDS = [128803, 30594, 128804, 128821, 36101, 128822, 7624, 1]
TABLE = {
    "<｜begin▁of▁sentence｜>": 0,
    "<｜end▁of▁sentence｜>": 1,
    "<｜▁pad▁｜>": 2,
    "<｜fim▁hole｜>": 128800,
    "<｜fim▁begin｜>": 128801,
    "<｜fim▁end｜>": 128802,
    "<｜User｜>": 128803,
    "<｜Assistant｜>": 128804,
    "<think>": 128821,
    "</think>": 128822,
    "｜DSML｜": 128825,
    "<｜latest_reminder｜>": 128828,
    "<｜action｜>": 128829,
    "<｜query｜>": 128830,
    "<｜authority｜>": 128831,
    "<｜domain｜>": 128832,
    "<｜title｜>": 128836,
    "<｜extracted_url｜>": 128844,
    "<｜read_url｜>": 128845,
}


@pytest.fixture(scope="session")
def library(v4_path: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(v4_path))


def tiny(extra: tuple[str, ...] = CHAT_TOKENS, **changes: Any) -> dict[str, Any]:
    """A tokenizer.json of 256 bytes, one merge, and special tokens at ids of its own."""
    vocab = {symbol: 3 + i for i, symbol in enumerate(_byte_symbols())}
    vocab["th"] = 300
    added = [
        {
            "id": id,
            "content": text,
            "special": False,
            "normalized": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
        }
        for id, text in zip([0, 1, *range(301, 400)], extra, strict=False)
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": vocab,
        "merges": ["t h"],
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    return {**content, **changes}


def test_v4_ids_match_the_table(v4: Tokenizer) -> None:
    assert {text: v4.special_ids[text] for text in TABLE} == TABLE
    assert v4.check_v4_ids() == []
    assert v4.vocab_size == 129280
    assert len(v4.special_ids) == 1283
    assert (v4.bos_id, v4.eos_id, v4.end_think_id, v4.dsml_id) == (0, 1, 128822, 128825)
    assert [v4.special_ids[text] for text in (USER, ASSISTANT, THINK)] == [128803, 128804, 128821]
    assert v4.stop_ids == (1, 128803, 0, 128804)


def test_self_test_sequence(v4: Tokenizer, library: tokenizers.Tokenizer) -> None:
    thought = [Special(THINK), "推理", Special(END_THINK)]
    segments = [Special(USER), "你好", Special(ASSISTANT), *thought, "答案", Special(EOS)]
    assert v4.encode_prompt(segments) == SELF_TEST_IDS
    assert library.encode(SELF_TEST, add_special_tokens=False).ids == SELF_TEST_IDS
    assert v4.decode(SELF_TEST_IDS) == SELF_TEST
    assert v4.decode(SELF_TEST_IDS, keep_special=False) == "你好推理答案"


def test_no_added_token_can_come_from_text(v4: Tokenizer) -> None:
    added = set(v4.special_ids.values())
    for text in v4.special_ids:
        for around in (text, f"a{text}b", f" {text}\n", f"<{text}>", text * 2):
            ids = v4.encode_text(around)
            assert not added & set(ids), around
            assert v4.decode(ids) == around


def test_text_without_added_tokens_encodes_as_the_library_does(
    v4: Tokenizer, library: tokenizers.Tokenizer
) -> None:
    rng = random.Random(4)
    pool = "aZ é中文かな🙂\n\r\t 0123456789.,;<>/\"'{}|｜▁́​ſß\u2028"
    for _ in range(2000):
        text = "".join(rng.choice(pool) for _ in range(rng.randrange(60)))
        if any(special in text for special in v4.special_ids):
            continue
        assert v4.encode_text(text) == library.encode(text, add_special_tokens=False).ids
    text = "def f(x):\n    return x ** 2  # 平方\n\n\nprint(f(12345))\n"
    assert v4.encode_text(text) == library.encode(text, add_special_tokens=False).ids


ASCII = "".join(map(chr, range(32, 127))) + "\t\r\n"
ASCII_PARTS = (
    " ",
    "  ",
    "\t",
    "\n",
    "\r\n",
    "7",
    "1234",
    "a",
    "Bc",
    " the",
    "'s",
    "!",
    "_",
    "**",
    "\x00",
    "\x0b",
    "\x1c",
)


def test_words_are_those_of_the_library(v4: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen before or not, and whatever is forgotten in between."""
    monkeypatch.setattr(words, "_MAX_KNOWN", 500)
    chance = random.Random(0)
    for tokenizer in (v4, Tokenizer.load(EMBEDDED)):
        assert tokenizer._words is not None
        for number in range(5000):
            pool = (ASCII, " \t\r\n0a.", ASCII_PARTS)[number % 3]
            text = "".join(chance.choice(pool) for _ in range(chance.randrange(50)))
            found, want = (
                tokenizer._words.ids(text),
                tokenizer._bpe.encode(text, add_special_tokens=False).ids,
            )
            assert found == (want if set(text) <= set(ASCII) else None), repr(text)
            assert tokenizer.encode_text(text) == want, repr(text)
        tokenizer.encode_text("x" * 1000)
        assert len(tokenizer._words._known) <= 500
        assert max(map(len, tokenizer._words._known)) <= 32


def test_words_are_left_to_the_library_where_they_are_split_otherwise() -> None:
    content = json.loads((EMBEDDED / "tokenizer.json").read_bytes())
    steps = content["pre_tokenizer"]["pretokenizers"]
    others: list[Any] = [None, steps[3], {"type": "Sequence", "pretokenizers": steps[:2] + steps[3:]}]
    for number, change in (
        (0, {"behavior": "Removed"}),
        (2, {"pattern": {"Regex": "x"}}),
        (3, {"use_regex": True}),
    ):
        changed = [*steps]
        changed[number] = {**steps[number], **change}
        others.append({"type": "Sequence", "pretokenizers": changed})
    for other in others:
        assert Tokenizer({**content, "pre_tokenizer": other}, "changed")._words is None
    assert TINY._words is None


def test_touching_texts_are_one_piece(v4: Tokenizer) -> None:
    assert v4.encode_prompt(["hel", "lo wor", "ld"]) == v4.encode_text("hello world")
    assert v4.encode_prompt(["hel", "lo wor", "ld"]) != [
        id for part in ("hel", "lo wor", "ld") for id in v4.encode_text(part)
    ]
    assert v4.encode_prompt(["a", Special(BOS), "", "b"]) == [*v4.encode_text("a"), 0, *v4.encode_text("b")]
    assert v4.encode_prompt([]) == []


def test_byte_alphabet_is_the_librarys() -> None:
    assert sorted(_byte_symbols()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(_byte_symbols().values()) == list(range(256))
    assert (_byte_symbols()["Ġ"], _byte_symbols()["Ċ"], _byte_symbols()["a"]) == (32, 10, 97)


def test_stream_joins_to_decode_and_to_the_library(v4: Tokenizer, library: tokenizers.Tokenizer) -> None:
    rng = random.Random(5)
    byte_ids = [id for id in range(300) if len(v4.bytes_of(id)) == 1 and v4.bytes_of(id)[0] >= 0x80]
    assert len(byte_ids) > 60
    num_broken = 0
    for _ in range(3000):
        ids = [
            rng.choice(byte_ids) if rng.random() < 0.4 else rng.randrange(v4.vocab_size)
            for _ in range(rng.randrange(12))
        ]
        stream = TextStream(v4)
        pieces = [stream.push(id) for id in ids]
        whole = "".join(pieces) + stream.finish()
        raw = b"".join(v4.bytes_of(id) for id in ids)
        assert whole == raw.decode("utf-8", "replace")
        assert whole == v4.decode(ids)
        assert whole == library.decode(ids, skip_special_tokens=False)
        num_broken += "\ufffd" in whole
        # What is given out never has to be taken back: it is a prefix of what any continuation decodes to.
        told = 0
        for count, piece in enumerate(pieces):
            told += len(piece)
            seen = b"".join(v4.bytes_of(id) for id in ids[: count + 1])
            assert (seen + b"a").decode("utf-8", "replace").startswith(whole[:told])
            assert seen.decode("utf-8", "ignore").replace("\ufffd", "") == whole[:told].replace("\ufffd", "")
    assert num_broken > 500


def test_a_character_in_pieces_is_not_shown_broken(v4: Tokenizer) -> None:
    by_bytes = {v4.bytes_of(id): id for id in range(300)}
    ids = [by_bytes[bytes([byte])] for byte in "🙂é".encode()]
    stream = TextStream(v4)
    assert [stream.push(id) for id in ids] == ["", "", "", "🙂", "", "é"]
    assert stream.finish() == ""
    assert stream.push(ids[0]) == "" and stream.finish() == "\ufffd"
    assert stream.push(ids[0]) == "" and stream.push(v4.special_ids[THINK]) == "\ufffd<think>"
    assert v4.decode([ids[0], v4.special_ids[THINK], *ids[1:4]], keep_special=False) == "\ufffd" * 4


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text())
def test_encoding_loses_nothing(text: str) -> None:
    tokenizer = TINY
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_encoding_loses_nothing_with_the_full_vocabulary(v4: Tokenizer) -> None:
    rng = random.Random(6)
    for _ in range(500):
        text = "".join(chr(rng.choice((rng.randrange(0x300), rng.randrange(0xD800)))) for _ in range(20))
        assert v4.decode(v4.encode_text(text)) == text


TINY = Tokenizer(tiny(), "tiny")


def test_roles_are_found_by_text_not_by_id() -> None:
    assert TINY.special_ids[USER] == 301 and TINY.special_ids[ASSISTANT] == 302
    assert (TINY.bos_id, TINY.eos_id, TINY.dsml_id) == (0, 1, 305)
    assert TINY.stop_ids == (1, 301, 0, 302)
    assert TINY.vocab_size == 307
    assert TINY.encode_prompt([Special(USER), "th", Special(DSML)]) == [301, 300, 305]
    assert not set(TINY.special_ids.values()) & set(TINY.encode_text("".join(CHAT_TOKENS)))
    assert TINY.decode(TINY.encode_text("".join(CHAT_TOKENS))) == "".join(CHAT_TOKENS)
    found = TINY.check_v4_ids()
    assert "<｜User｜> has id 301, expected 128803" in found
    assert "<｜title｜> has id none, expected 128836" in found
    assert not any("begin▁of▁sentence" in sentence for sentence in found)


def test_an_added_token_in_the_bpe_vocabulary_is_not_reachable() -> None:
    content = tiny()
    content["model"]["ignore_merges"] = True
    content["model"]["vocab"]["think"] = 306
    content["added_tokens"][7] = {**content["added_tokens"][7], "content": "think", "id": 306}
    content["added_tokens"].append(
        {**content["added_tokens"][7], "content": "<｜latest_reminder｜>", "id": 307}
    )
    tokenizer = Tokenizer(content, "tiny")
    assert tokenizer.special_ids["think"] == 306
    assert 306 not in tokenizer.encode_text("think")
    assert tokenizer.decode(tokenizer.encode_text("think")) == "think"


@pytest.mark.parametrize("id", [-1, 307, 10**9])
def test_ids_outside_the_vocabulary_are_refused(id: int) -> None:
    with pytest.raises(
        TextError, match=f"token id {id} is not in the tokenizer.s vocabulary, whose ids end at 306"
    ):
        TINY.decode([id])
    with pytest.raises(TextError, match="token id 2 is not"):
        TextStream(TINY).push(2)


def test_load_takes_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tiny()))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert Tokenizer.load(path).encode_text("the") == TINY.encode_text("the")


def test_bad_files_are_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    with pytest.raises(TextError, match=r"cannot read .*tokenizer.json.*No such file"):
        Tokenizer.load(tmp_path)
    cases: list[tuple[str, str]] = [
        ("{", "is not valid JSON"),
        ("[]", "holds no BPE model"),
        ('{"model": {"type": "Unigram", "vocab": {}}}', "holds no BPE model"),
        (json.dumps(tiny(added_tokens={})), "added_tokens is not a list"),
        (json.dumps(tiny(normalizer={"type": "NFC"})), "normalises text"),
        (json.dumps(tiny(extra=CHAT_TOKENS[:5])), f"has {USER} but not {END_THINK}, {DSML}"),
        (json.dumps(tiny(extra=("xx", "yy"))), f"has no token {BOS}"),
        (json.dumps(tiny(pre_tokenizer={"type": "Nonsense"})), "not a usable byte-level BPE"),
    ]
    lossy = tiny()
    del lossy["model"]["vocab"]["a"]
    cases.append((json.dumps(lossy), "no token for 1 of 256 bytes"))
    twice = tiny()
    twice["added_tokens"][2]["id"] = 300
    cases.append((json.dumps(twice), "gives id 300 to two tokens"))
    foreign = tiny()
    foreign["model"]["vocab"]["中"] = 308
    cases.append((json.dumps(foreign), "not written in byte-level symbols"))
    for text, expected in cases:
        file.write_text(text)
        with pytest.raises(TextError) as caught:
            Tokenizer.load(file)
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value) and str(file) in str(caught.value)


def test_full_vocabulary_must_be_complete(v4_path: Path) -> None:
    content = json.loads(v4_path.read_bytes())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != "<｜title｜>"]
    with pytest.raises(TextError, match="but not <｜title｜>"):
        Tokenizer(content, "cut")


def test_unknown_special_and_surrogates_are_refused() -> None:
    with pytest.raises(TextError, match="has no token <｜title｜>"):
        TINY.encode_prompt([Special("<｜title｜>")])
    with pytest.raises(TextError, match="lone surrogate at character 1"):
        TINY.encode_text("a\ud800")


PARTS = [
    "a",
    "B",
    "é",
    "你",
    "カ",
    "1",
    "9",
    "٣",
    " ",
    "\n",
    "\r\n",
    "\t",
    "\u3000",
    "\x1c",
    "\u0085",
    ".",
    "!!",
]
PARTS += ["，", "$", "\u0301", "🦊", "<", "'s", "_", "foo", "bar ", "\u200b", "\u2028"]


@pytest.mark.parametrize("size", [4, 9, 32])
def test_pieces_are_those_of_the_whole(v4: Tokenizer, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(module, "PIECE_CHARACTERS", size)
    chance = random.Random(size)
    for tokenizer in (v4, Tokenizer.load(EMBEDDED)):
        for _ in range(600):
            some = chance.sample(PARTS, chance.choice((3, 6, len(PARTS))))
            text = "".join(
                chance.choice(some) * chance.choice((1, 1, 2, 7)) for _ in range(chance.randint(0, 99))
            )
            want = tokenizer._bpe.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode_text(text) == want, text
            assert tokenizer.fewest_tokens([text]) <= len(want)


def test_pieces_are_small_and_words_may_be_long(v4: Tokenizer) -> None:
    for text in ("0123456789" * 20_000, "The boat is blue.\n" * 10_000, "x" * 200_000):
        pieces = list(v4.text_pieces(text))
        assert max(map(len, pieces)) <= module.PIECE_CHARACTERS or " " not in text
        assert v4.decode(id for piece in pieces for id in piece) == text
    with pytest.raises(TextError, match="from character 3 on"):
        v4.encode_text("The boat" + " " * 3_000_000)


def test_panic_of_the_library_is_an_error_like_others(v4: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its regular expressions give up on ten million spaces, with an exception that is no Exception."""
    monkeypatch.setattr(module, "MAX_WORD_CHARACTERS", 1 << 24)
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 1 << 24)
    with pytest.raises(TextError, match="cannot be tokenised"):
        v4.encode_text(" " * 10_000_001)
