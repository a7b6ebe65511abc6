"""No model named: the embedded one is used, which is said once. How answers and their timing are shown."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_support import dsv4, ok, process, refused

from dsv4 import Engine, SamplingParams, models
from dsv4.cli import clock

ROOT = Path(__file__).parents[2]
GREEDY = ("--temperature", 0, "--max-tokens", 12, "--seed", 1)
NOTE = "no model named: using the embedded one\n"


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("modelopt")


@pytest.fixture
def embedded(model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random model in place of the shipped one."""
    monkeypatch.setattr(models, "EMBEDDED", model)
    return model


COMMANDS = {
    "generate": (["generate", "hi", "--json", *GREEDY], lambda model: ["--model", model]),
    "chat": (["chat", "--no-thinking", *GREEDY], lambda model: [model]),
    "score": (["score", "--text", ROOT / "tests/data/story.txt", "--json"], lambda model: [model]),
    "inspect": (["inspect", "--json"], lambda model: [model]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_default_is_the_embedded_model(command: str, embedded: Path) -> None:
    arguments, naming = COMMANDS[command]
    unnamed, named = (dsv4(*arguments, *more, stdin="hello\n") for more in ([], naming(embedded)))
    assert unnamed.code == named.code == 0 and unnamed.out == named.out != ""
    assert unnamed.err.count(NOTE) == 1 and NOTE not in named.err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_broken_installation_is_one_sentence(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(models, "EMBEDDED", tmp_path)
    message = refused(dsv4(*COMMANDS[command][0]))
    assert (
        f"{tmp_path} lacks model.safetensors, tokenizer.json" in message and "install dsv4 again" in message
    )


def test_engine_load_without_a_path(embedded: Path) -> None:
    params = SamplingParams(max_tokens=5, temperature=0)
    assert Engine.load().generate(["hi"], params)[0].ids == (
        Engine.load(embedded).generate(["hi"], params)[0].ids
    )


def test_a_prompt_may_be_any_text(embedded: Path, tmp_path: Path) -> None:
    """Only a folder with a config.json is taken for a forgotten --model; with --model nothing is."""
    for prompt in ("/", "x" * 600, str(tmp_path), "."):
        assert json.loads(ok("generate", prompt, "--json", *GREEDY))["prompt_tokens"] > 1
    assert "is a model folder: dsv4 generate -m" in refused(dsv4("generate", embedded, *GREEDY))
    assert json.loads(ok("generate", embedded, "--model", embedded, "--json", *GREEDY))["prompt_tokens"] > 1


@pytest.mark.parametrize("thinking", [True, False])
def test_generate_shows_a_chat_answer_as_chat_does(model: Path, thinking: bool) -> None:
    flags = ("--chat", "--thinking") if thinking else ("--chat",)
    shown = ok("generate", "hello", "--model", model, *flags, "--seed", 3, "--max-tokens", 40)
    talk = ("chat", model, "--seed", 3, "--max-tokens", 40, "--thinking" if thinking else "--no-thinking")
    assert shown == dsv4(*talk, stdin="hello\n").out != "\n"


STATS = (
    r"(\d+) prompt tokens, first token after ([\d.]+ m?s), ([\d.]+ m?s) after the program's start;"
    r" (\d+) tokens at ([\d.]+)/s"
)


def seconds(shown: str) -> float:
    number, unit = shown.split()
    return float(number) * {"s": 1, "ms": 1e-3}[unit]


def test_stats(model: Path) -> None:
    how = ("--model", model, "--ignore-eos", *GREEDY, "--stats", "--speculate", "off")
    one = dsv4("generate", "hi", *how)
    several = dsv4("generate", "a", "bcd", "--model", model, "--ignore-eos", *GREEDY, "--stats", "--json")
    talk = dsv4("chat", model, "--no-thinking", *GREEDY, "--stats", stdin="hi\n")
    for done, prompt_tokens in ((one, 3), (several, 6), (talk, 6)):
        assert done.code == 0
        found = re.match(STATS, done.err)
        assert found, done.err
        assert int(found[1]) == prompt_tokens and 0 < seconds(found[2]) <= seconds(found[3])
    assert re.match(STATS, several.err)[4] == "24", "all answers together"  # type: ignore[index]
    talk = dsv4("chat", "--speculate", 1, *GREEDY, "--stats", stdin="hi\nhi\n")
    first, second = (line for line in talk.err.splitlines() if "first token" in line)
    assert "after the program's start" in first and "program" not in second
    drafted = [int(re.search(r"of (\d+) drafts accepted", line)[1]) for line in (first, second)]  # type: ignore[index]
    assert max(drafted) <= 8, "of this answer, not of all so far"
    assert one.err.endswith("; ended by length\n") and "drafts" not in one.err


def test_drafts_change_nothing_but_the_number_of_steps() -> None:
    how = ("Once upon a time, there was", "--max-tokens", 30, "--temperature", 0.8, "--seed", 2, "--stats")
    plain, drafted = dsv4("generate", *how), dsv4("generate", *how, "--speculate", 2)
    assert plain.code == drafted.code == 0 and plain.out == drafted.out
    rates = r"\(\d+ %, \d+ % by position\), [\d.]+ tokens per step"
    found = re.search(rf"; (\d+) of (\d+) drafts accepted {rates}; ended by length\n$", drafted.err)
    assert found and 0 < int(found[1]) < int(found[2]), drafted.err


def test_the_programs_start_is_the_start_of_its_process() -> None:
    """Of a program that waited before it even imported us."""
    code = "import time; time.sleep(0.4); from dsv4.cli.clock import *; print(seconds_since_start())"
    began = time.perf_counter()
    shown = process(["-c", code], module=None).stdout
    assert 0.4 <= float(shown) <= time.perf_counter() - began + 0.02, "within a clock tick"


def test_where_the_system_tells_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (None, "", "1 (dsv4) S 1 2 3"):

        def read(path: Path, content: str | None = content) -> str:
            if content is None:
                raise FileNotFoundError(path)
            return content

        monkeypatch.setattr(Path, "read_text", read)
        passed = time.perf_counter() - clock._IMPORTED
        assert 0 <= clock.seconds_since_start() - passed < 1


def test_no_answer_has_no_speed() -> None:
    watch = clock.Stopwatch(7)
    watch.count(0)
    assert watch.since_start() == watch.since_prompt() == "7 prompt tokens, no answer"
    one = clock.Stopwatch(1)
    one.count()
    assert re.fullmatch(r"1 prompt token, first token after [\d.]+ ms; 1 token", one.since_prompt())
