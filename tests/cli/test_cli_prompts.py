"""Prompts of `dsv4 generate`: from stdin and files, several of them, reasoning apart, Ctrl-C."""

import json
import re
from pathlib import Path

import pytest
from cli_support import Terminal, dsv4, ok, refused

GREEDY = ("--temperature", 0, "--max-tokens", 60)


def test_a_prompt_from_stdin_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("Once upon a time\n")
    want = ok("generate", "Once upon a time", *GREEDY)
    for arguments, stdin in ((["-"], "Once upon a time\n"), ([], "Once upon a time\n")):
        assert dsv4("generate", *arguments, *GREEDY, stdin=stdin).out == want
    assert ok("generate", "--prompt-file", tmp_path / "prompt", *GREEDY) == want
    two = dsv4("generate", "The dog", "-", *GREEDY, "--json", stdin="Once upon a time")
    assert [json.loads(line)["index"] for line in two.out.splitlines()] == [0, 1]
    assert json.loads(two.out.splitlines()[1])["text"] + "\n" == want
    assert "stdin is not UTF-8 text (byte 0)" in refused(dsv4("generate", "-", stdin=b"\xff"))


def test_reasoning_and_text_are_apart(tmp_path: Path) -> None:
    chat = ("--chat", "--thinking", *GREEDY)
    lines = ok("generate", "What is 27 + 58?", "What is 1 + 2?", *chat, "--json").splitlines()
    for line, result in zip(lines, ("85", "3"), strict=True):
        answer = json.loads(line)
        assert result in answer["text"] and answer["reasoning"] and "think" not in line
    shown = ok("generate", "What is 27 + 58?", "What is 1 + 2?", *chat)
    want = [f"{answer['reasoning']}\n{answer['text']}\n\n" for answer in map(json.loads, lines)]
    assert shown == f"1. What is 27 + 58?\n{want[0]}2. What is 1 + 2?\n{want[1]}"
    stopped = ok("generate", "What is 27 + 58?", *chat, "--stop", "=")
    assert "</think>" not in stopped and stopped.endswith("27 + 58 \n")


@pytest.mark.parametrize("json_flag", [(), ("--json",)])
def test_ctrl_c_shows_what_is_there(json_flag: tuple[str, ...]) -> None:
    given = ("generate", "Once upon a time", "The dog", "--ignore-eos", "--temperature", 0, *json_flag)
    with Terminal(*given) as terminal:
        terminal.expect(r"0/2")
        terminal.expect("0:0|-:--:--")
        terminal.type("\x03")
        assert terminal.wait() == 130
        shown = terminal.expect(r"(?s).+(\"index\": 1.*|2\. The dog\r\n.*)", 5)
        assert "Traceback" not in shown
        assert len(re.findall("cancelled", shown)) == (2 if json_flag else 0)


def test_ctrl_c_stops_a_single_answer() -> None:
    with Terminal("generate", "Once upon a time", "--ignore-eos", "--temperature", 0) as terminal:
        terminal.expect("there was")
        terminal.type("\x03")
        assert terminal.wait() == 130
        assert "Traceback" not in terminal.expect("ended by Ctrl-C", 5)
