"""`dsv4 chat`: what people type and see on a terminal, its commands, a full context, a pipe."""

import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import read_file, write_file
from cli_support import Done, Terminal, dsv4
from rich.console import Console

from dsv4.cli import show
from dsv4.cli.answer import MarkdownAnswer
from dsv4.cli.commands import COMMANDS
from dsv4.engine.chat import ChatDelta

END = r"\d+ tokens, [\d.]+/s[^\n]*\n"  # the line after an answer
PROMPT = r"tokens ·.* think (on|off)"  # the line below the prompt
GREEDY = ("--temperature", 0, "--max-tokens", 6)


@pytest.fixture
def state(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


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


def messages(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["messages"]


def test_a_conversation(endless: Path, tmp_path: Path) -> None:
    saves = [tmp_path / f"{number}.json" for number in range(4)]
    typed = f"hello\nhello\n/save {saves[0]}\n/new\nhello\n/save {saves[1]}\n/think off\n/new\nhello\n"
    typed += f"/save {saves[2]}\n/system Be brief.\n/retry\n/save {saves[3]}\n"
    assert dsv4("chat", endless, *GREEDY, stdin=typed).code == 0
    two, after_new, without_thinking, with_system = map(messages, saves)
    assert [message["role"] for message in two] == ["user", "assistant"] * 2
    assert two[1] == after_new[1] != two[3], "the second answer sees the first one, /new forgets"
    assert "reasoning_content" in two[1] and "reasoning_content" not in without_thinking[1]
    assert with_system[0] == {"role": "system", "content": "Be brief."} and len(with_system) == 3


def test_lines_that_belong_together(endless: Path, tmp_path: Path, state: dict[str, str]) -> None:
    """Pasted, by Alt-Enter, between triple quotes; history on the next run; completion; both by name."""
    with Terminal("chat", endless, *GREEDY, **state) as terminal:
        terminal.expect(PROMPT)
        for typed in ("\x1b[200~a\r\nb\nc\x1b[201~\r", "d\x1b\re\r", '"""f\rg"""\r', "//h\r"):
            terminal.type(typed)
            assert "cut by the token limit" in terminal.expect(END)
            terminal.expect(PROMPT)
        terminal.type("/ret")
        terminal.expect("answer the last question again")
        terminal.type("\t")
        terminal.expect("y")  # of /retry
        terminal.type("\r")
        terminal.expect(END)
        terminal.expect(PROMPT)
        terminal.type(f"/save {tmp_path}/x.json\r")
        terminal.expect("8 messages")
        terminal.expect(PROMPT)
        terminal.type("\x04")
        assert terminal.wait() == 0
    said = [message["content"] for message in messages(tmp_path / "x.json")]
    assert said[::2] == ["a\nb\nc", "d\ne", "f\ng", "/h"]
    history = tmp_path / "state" / "dsv4" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600 and history.parent.stat().st_mode & 0o777 == 0o700
    with Terminal("chat", endless, *GREEDY, **state) as terminal:
        terminal.expect(PROMPT)
        terminal.type("\x1b[A" * 3)
        terminal.expect("//h")
        terminal.type("\x03/quit\r")
        assert terminal.wait() == 0


def test_ctrl_c_stops_the_answer_and_the_next_question_is_answered(
    endless: Path, state: dict[str, str]
) -> None:
    with Terminal("chat", endless, "--temperature", 0, "--no-thinking", **state) as terminal:
        terminal.expect(PROMPT)
        terminal.type("a half-typed line")
        terminal.expect("half-typed line")
        terminal.type("\x03")
        terminal.expect(PROMPT)
        for question in ("tell me everything", "and the rest"):
            terminal.type(question + "\r")
            terminal.expect(re.escape(question))
            terminal.expect("(?s)[^\r\n].{200}")  # the answer is under way
            time.sleep(0.5)
            terminal.type("\x03")
            shown = terminal.expect(END, 20)
            assert int(re.search(r"(\d+) tokens, ", shown)[1]) > 0 and "; stopped" in shown  # type: ignore[index]
            terminal.expect(PROMPT)
        terminal.type("/exit\r")
        assert terminal.wait() == 0


def test_ctrl_c_stops_a_long_prompt(endless: Path, state: dict[str, str]) -> None:
    """2000 bytes at one token a step take half a minute; the prompt comes back in a fraction of that."""
    with Terminal("chat", endless, "--chunk", 1, **state) as terminal:
        terminal.expect(PROMPT)
        terminal.type("\x1b[200~" + "word " * 400 + "\x1b[201~\r")
        time.sleep(2)
        start = time.monotonic()
        terminal.type("\x03")
        assert "0 tokens" in terminal.expect(END, 10)
        assert time.monotonic() - start < 5
        terminal.expect(PROMPT)
        terminal.type("\x04")
        assert terminal.wait() == 0


def test_questions_from_a_pipe(endless: Path) -> None:
    given = ("chat", endless, "--temperature", 0, "--max-tokens", 5, "--seed", 1)
    done = dsv4(*given, stdin='hello\n\n/think maybe\n"""hello\nagain"""\n')
    assert done.code == 0 and not done.out.startswith("> ")
    assert len(re.findall("5 tokens, .*cut by the token limit", done.err)) == 2
    assert "usage: /think on|off|N" in done.err
    alone = dsv4(*given, stdin="hello\n")
    assert done.out.startswith(alone.out) and len(done.out) > len(alone.out)


def test_questions_that_are_not_utf8(endless: Path) -> None:
    done = dsv4("chat", endless, "--temperature", 0, "--max-tokens", 5, stdin=b"Gr\xfc\xdfe\n")
    assert done.code == 0 and "5 tokens, " in done.err


def talk(endless: Path, *lines: str, options: tuple[object, ...] = GREEDY) -> Done:
    done = dsv4("chat", endless, *options, stdin="\n".join(lines) + "\n")
    assert done.code == 0
    return done


def test_commands(endless: Path, tmp_path: Path) -> None:
    notes, path, other = tmp_path / "notes.txt", tmp_path / "talk.json", tmp_path / "other.json"
    notes.write_text("a ``` b")
    lines = ["/help", "one", "two", "/undo", f"/save {path}", f"/file {notes}", "three", f"/save {other}"]
    lines += [f"/load {path}", "/stats", "/set temperature 0.5", "/set", "/quit", "never"]
    done = talk(endless, *lines)
    assert all(name in done.err and words in done.err for name, (_, words) in COMMANDS.items())
    assert "taken back: two" in done.err and "notes.txt: 7 characters go with the next question" in done.err
    assert messages(path)[0]["content"] == "one" and len(messages(path)) == 2
    assert messages(other)[2]["content"] == "notes.txt:\n````\na ``` b\n````\n\nthree"
    assert "2 messages" in done.err and "temperature is 0.5" in done.err and "\ntemperature 0.5\n" in done.err
    assert path.stat().st_mode & 0o777 == 0o600
    assert "prompt tokens, first token after" in done.err and "never" not in done.err


REFUSED = {
    "/nope": "/nope is no command; /help lists them, // begins a message with a slash",
    "/retry": "there is no question yet", "/undo": "there is no question yet",
    "/edit": "/edit needs a terminal", "/save": "usage: /save FILE", "/new x": "usage: /new",
    "/set top_p 7": "top_p is 7, expected a number above 0",
    "/set nope 1": "usage: /set NAME VALUE; names: max_tokens", "/set temperature": "usage: /set NAME",
    "/think 0": "usage: /think on|off|N", "/file /nowhere/x": "/nowhere/x cannot be read: No such file",
    "/load /nowhere/x": "/nowhere/x cannot be read", "/save /nowhere/x": "/nowhere/x cannot be written",
    "/copy": "/copy needs a terminal",
}  # fmt: skip


def test_commands_that_are_refused(endless: Path, tmp_path: Path) -> None:
    bad = {"[1]": "message 0 is of type int", '{"a": 1}': "holds no conversation", "x": "no conversation"}
    for number, content in enumerate(bad):
        (tmp_path / str(number)).write_text(content)
    loads = {f"/load {tmp_path / str(number)}": says for number, says in enumerate(bad.values())}
    done = talk(endless, *REFUSED, *loads, "/bye")
    errors = re.findall("error: (.*)", done.err)
    for says, error in zip([*REFUSED.values(), *loads.values(), "/bye is no command"], errors, strict=True):
        assert says in error


def test_a_thought_has_a_budget() -> None:
    pytest.importorskip("llguidance")
    done = dsv4("chat", "--temperature", 0, stdin="What is 27 + 58?\n/think 3\nWhat is 27 + 58?\n")
    first, second = re.findall(r"(\d+) tokens, ", done.err)
    assert done.code == 0 and int(second) < int(first), done.err


def test_a_full_context_from_a_pipe(endless: Path) -> None:
    small = ("--temperature", 0, "--max-tokens", 30, "--max-context", 64, "--no-thinking")
    done = talk(endless, "x" * 60, "hello", "hello", "/reset", "hello", "/quit", "never", options=small)
    assert len(re.findall(r"30 tokens, ", done.err)) == 2
    assert "this message makes a prompt of 64 tokens, of at most 34" in done.err
    assert "the conversation fills the context (64 tokens); /new starts a new one" in done.err
    cut = talk(endless, "hello", options=("--temperature", 0, "--max-context", 64, "--no-thinking"))
    assert "; cut: the context of 64 tokens is full, see /new\n" in cut.err


def test_a_full_context_on_a_terminal(endless: Path, tmp_path: Path, state: dict[str, str]) -> None:
    given = ("chat", endless, "--temperature", 0, "--max-tokens", 20, "--max-context", 100, "--no-thinking")
    with Terminal(*given, **state) as terminal:
        terminal.expect(PROMPT)
        asked = 0
        for choice, says in (("d", r"dropped: \d+, kept: \d"), ("n", r"dropped: \d+, kept: 0"), ("c", "")):
            while True:
                terminal.type(f"question {asked}\r")
                asked += 1
                if "fills the context" in terminal.expect(rf"fills the context \(100 tokens\)|{END}"):
                    break
                terminal.expect(PROMPT)
            terminal.expect(r"\[c\]ancel\? ")
            terminal.type(f"{choice}\r")
            if says:
                terminal.expect(says)
                terminal.expect(END)
            terminal.expect(PROMPT)
        terminal.type("\x04")
        assert terminal.wait() == 0


def shown(pieces: list[ChatDelta], width: int = 40) -> str:
    """What stands on a terminal at the end, with its sequences."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=10, color_system=None)
    answer = MarkdownAnswer(console)
    for piece in pieces:
        answer.push(piece)
    answer.finish()
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_markdown_is_the_same_however_it_comes() -> None:
    markup = "# Title\n\nA *word* and <tag> [x](http://y).\n\n1. one\n\n2. two\n\n"
    markup += "```python\na = 1\n\nb = 2\n```\n\n🙂 שלום end"
    lines = []
    for size in (1, 7, len(markup)):
        text = shown([ChatDelta(text=markup[i : i + size]) for i in range(0, len(markup), size)])
        bare = re.sub(r"\x1b\[[\d;?]*\w|\r", "", text).splitlines()
        lines.append([line.strip() for line in bare if line.strip()])
    for found in lines:
        assert [line for line in lines[-1] if line not in found] == []
    whole = "\n".join(lines[-1])
    assert "<tag>" in whole and "http://y" in whole and "b = 2" in whole and "🙂 שלום end" in whole
    assert "*" not in whole and "#" not in whole and "2 two" in whole


def test_thinking_is_folded() -> None:
    deltas = [ChatDelta(reasoning="Let me \x1b[31msee"), ChatDelta(reasoning=" it"), ChatDelta(text="Done.")]
    text = shown(deltas)
    assert re.search(r"▸ thought for \d\.\d s, 2 tokens", text) and "Done." in text and "\x1b[31m" not in text


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
