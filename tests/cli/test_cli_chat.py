"""`dsv4 chat` on a pseudo-terminal: answers stream, Ctrl-C stops an answer, not the program; Ctrl-D ends."""

import io
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import read_file, write_file
from cli_support import Terminal, dsv4
from rich.console import Console

from dsv4.cli import show

END = r"\d+ tokens, [\d.]+/s[^\n]*\n"  # the line after an answer
PROMPT = "> $"


@pytest.fixture(scope="module")
def endless(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits for the ends of a turn are 0: chosen greedily, it never ends by itself."""
    model, folder = checkpoint("modelopt"), tmp_path_factory.mktemp("endless")
    for file in ("config.json", "tokenizer.json"):
        (folder / file).symlink_to(model / file)
    tensors = read_file(model / "model.safetensors")
    head = tensors["head.weight"]
    row = len(head.data) // head.shape[0]
    for id in (0, 1, 3, 4):
        head.data[id * row : (id + 1) * row] = bytes(row)
    write_file(folder / "model.safetensors", tensors)
    return folder


def answer(shown: str) -> str:
    """What lies between the echoed question and the line with the speed."""
    return re.split(r"\r\n(?:\x1b\[2m)?" + END, shown.split("\n", 1)[1])[0]


def test_a_conversation(endless: Path) -> None:
    with Terminal("chat", endless, "--temperature", 0, "--max-tokens", 6) as terminal:
        terminal.expect("Ctrl-C stops an answer")
        terminal.expect(PROMPT)
        answers = []
        for question in ("hello", "hello", "/reset", "hello", "/think off", "/reset", "hello"):
            terminal.type(question + "\n")
            if question.startswith("/"):
                terminal.expect("a new conversation" if question == "/reset" else "thinking is off")
            else:
                shown = terminal.expect(END)
                assert "6 tokens" in shown and "cut by the token limit" in shown
                answers.append(answer(shown))
            terminal.expect(PROMPT)
        first, second, after_reset, without_thinking = answers
        assert second != first, "the second answer sees the first one"
        assert after_reset == first, "/reset forgets"
        assert "\x1b[2m" in first and "\x1b[2m" not in without_thinking, "reasoning is dimmed"
        assert re.sub(r"\x1b\[\dm", "", first) != without_thinking, "/think off changes the prompt too"
        terminal.type("\x04")
        assert terminal.wait() == 0


def test_ctrl_c_stops_the_answer_and_the_next_question_is_answered(endless: Path) -> None:
    with Terminal("chat", endless, "--temperature", 0, "--no-thinking") as terminal:
        terminal.expect(PROMPT)
        terminal.type("a half-typed line")
        terminal.expect("half-typed line")
        # A signal that comes before the next read would wait for one more key.
        time.sleep(0.3)
        terminal.type("\x03")
        terminal.expect(PROMPT)
        for question in ("tell me everything", "and the rest"):
            terminal.type(question + "\n")
            terminal.expect(re.escape(question) + r"\r\n")
            terminal.expect("(?s)[^\r\n].{20}")  # the answer is under way
            terminal.type("\x03")
            count = int(re.search(r"(\d+) tokens", terminal.expect(END, 20))[1])  # type: ignore[index]
            assert count > 0
            terminal.expect(PROMPT)
        terminal.type("/exit\n")
        assert terminal.wait() == 0


def test_ctrl_c_stops_a_long_prompt(endless: Path) -> None:
    """2000 bytes at one token a step take half a minute; the prompt comes back in a fraction of that."""
    with Terminal("chat", endless, "--chunk", 1) as terminal:
        terminal.expect(PROMPT)
        terminal.type("word " * 400 + "\n")
        time.sleep(1)
        start = time.monotonic()
        terminal.type("\x03")
        assert "0 tokens" in terminal.expect(END, 10)
        assert time.monotonic() - start < 5
        terminal.expect(PROMPT)
        terminal.type("\x04")
        assert terminal.wait() == 0


def test_questions_from_a_pipe(endless: Path) -> None:
    given = ("chat", endless, "--temperature", 0, "--max-tokens", 5, "--seed", 1)
    done = dsv4(*given, stdin="hello\n\n/think maybe\nhello again\n")
    assert done.code == 0 and not done.out.startswith("> ")
    assert len(re.findall("5 tokens, .*cut by the token limit", done.err)) == 2
    assert "/reset forgets the conversation" in done.err, "an unknown command shows the help"
    alone = dsv4(*given, stdin="hello\n")
    assert done.out.startswith(alone.out) and len(done.out) > len(alone.out)


def test_questions_that_are_not_utf8(endless: Path) -> None:
    done = dsv4("chat", endless, "--temperature", 0, "--max-tokens", 5, stdin=b"Gr\xfc\xdfe\n")
    assert done.code == 0 and "5 tokens, " in done.err


def test_a_conversation_too_long_is_refused_and_goes_on(endless: Path) -> None:
    given = ("chat", endless, "--temperature", 0, "--max-tokens", 30, "--max-context", 64, "--no-thinking")
    done = dsv4(*given, stdin="x" * 60 + "\nhello\nhello\n/reset\nhello\n/quit\nnever\n")
    assert done.code == 0 and len(re.findall(r"\d+ tokens, ", done.err)) == 2
    refusals = re.findall(r"error: .*exceeds max_context 64;.*\(/reset forgets the conversation\)", done.err)
    assert len(refusals) == 2, "the long question, and the second one after a full answer"


def test_a_full_context_is_said(endless: Path) -> None:
    """Nobody set a limit of tokens here."""
    given = ("chat", endless, "--temperature", 0, "--max-context", 64, "--no-thinking")
    done = dsv4(*given, stdin="hello\n")
    assert "; cut: the context of 64 tokens is full, see /reset\n" in done.err


def test_model_text_cannot_command_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = "a\x1b[31mred\x07\x08\r\x7f\x9b5m\x00\tb\n[bold]c[/] {d}"
    for terminal, want in (
        (True, "a␛[31mred␇␈␍␡\ufffd5m␀\tb\n[bold]c[/] {d}"),
        (False, hostile),
    ):
        file = io.StringIO()
        console = Console(file=file, force_terminal=terminal, highlight=False, soft_wrap=True, width=20)
        monkeypatch.setattr(show, "out", console)
        show.text(hostile)
        show.text("x" * 50)
        assert file.getvalue() == want + "x" * 50, "no markup, no wrapping, no expanded tabs"
    file = io.StringIO()
    monkeypatch.setattr(show, "out", Console(file=file, force_terminal=True, color_system="standard"))
    show.text("\x1b[31m", "dim")
    assert file.getvalue() == "\x1b[2m␛[31m\x1b[0m", "only the style's own sequences"


def test_sizes_for_people() -> None:
    for count, want in (
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1234567, "1.23 MB"),
        (5e13, "50.00 TB"),
    ):
        assert show.size(count) == want


def test_generate_says_how_many_prompts_are_done(endless: Path) -> None:
    """Several prompts, and JSON, are printed at the end only."""
    given = ("generate", "one", "two", "--model", endless, "--max-tokens", 40, "--chunk", 1)
    with Terminal(*given) as terminal:
        terminal.expect("generating")
        terminal.expect("2/2")
        assert terminal.wait() == 0
