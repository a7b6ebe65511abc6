"""`dsv4 eval`: the table, the JSON line, the picture, the answers, Ctrl-C, and what a user can get wrong."""

import builtins
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_support import Terminal, dsv4, ok, refused

from dsv4 import models
from dsv4.lab.draw import draw_recall
from dsv4.lab.judge import Rate

ASK = [{"role": "user", "content": "Where is Ann?"}]
LINES: list[dict[str, Any]] = [
    {"suite": "stories", "kind": "story", "messages": ASK, "thinking": True, "expected": ["cat", "hat"]},
    {"suite": "sums", "kind": "+ of [red] digits", "messages": ASK, "thinking": False, "expected": "2"},
    *(
        {
            **{"suite": "recall", "kind": "one step", "messages": ASK, "thinking": False, "expected": "park"},
            **{"distance_tokens": distance, "context_tokens": distance + 9},
        }
        for distance in (20, 200, 900)
    ),
    {"suite": "chat", "kind": "talk", "messages": ASK, "thinking": False, "expected": "in the park"},
    {"suite": "text", "kind": "book", "text": "Once upon a time."},
]
FAST = ("--max-tokens", 4, "--max-context", 128)


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("modelopt")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eval") / "set.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_json_holds_figures_and_settings(model: Path, prompts: Path, tmp_path: Path) -> None:
    given = ("eval", model, "--set", prompts, *FAST, "--activations", "a8", "--answers", tmp_path / "answers")
    shown = ok(*given, "--json")
    found = json.loads(shown.splitlines()[-1])
    assert found["model"] == str(model) and found["set"] == str(prompts) and found["complete"] is True
    assert found["settings"]["activations"] == "a8" and found["settings"]["max_context"] == 128
    for path, total in (
        (("stories", "words_used"), 2),
        (("sums", "exact"), 1),
        (("sums", "by_kind", "+ of [red] digits"), 1),
        (("recall", "found"), 3),
        (("chat", "matches"), 1),
        (("ended",), 6),
        (("mtp_acceptance",), 3),
    ):
        part = found
        for key in path:
            part = part[key]
        assert part["total"] == total and 0 <= part["low"] <= part["share"] <= part["high"] <= 1, path
    assert [one["to"] for one in found["recall"]["by_distance"]] == [128, 256, 1024]
    assert found["text"]["bytes"] == 17 and found["text"]["bits_per_byte"] > 0
    answers = [json.loads(line) for line in (tmp_path / "answers").read_text().splitlines()]
    assert [answer["suite"] for answer in answers] == [line["suite"] for line in LINES[:-1]]
    assert sum(answer["ended"] for answer in answers) == found["ended"]["hits"]
    assert answers[2]["distance_tokens"] == 20 and answers[0]["reasoning"]


def test_the_table_shows_the_same(model: Path, prompts: Path) -> None:
    given = ("eval", model, "--set", prompts, *FAST)
    found, lines = json.loads(ok(*given, "--json")), ok(*given).splitlines()
    for name, value in (
        ("bits per byte, held-out text", f"{found['text']['bits_per_byte']:.4f}"),
        ("stories: requested words used", f"{100 * found['stories']['words_used']['share']:.1f} %"),
        ("  drafts accepted (MTP)", f"{100 * found['mtp_acceptance']['share']:.1f} %"),
        ("sums: exact", "0.0 %"),
        ("  + of [red] digits", "0.0 %"),
        ("  distance 513 to 1,024", "0.0 %"),
        ("  context 129 to 256", "0.0 %"),
        ("answers that end by themselves", f"{100 * found['ended']['share']:.1f} %"),
    ):
        (line,) = [line for line in lines if line.startswith(name + " ")]
        assert value in line, name


@pytest.mark.parametrize(
    ("suite", "parts"),
    [
        ("stories", {"text", "stories", "ended", "mtp_acceptance"}),
        ("sums", {"sums", "ended"}),
        ("recall", {"recall", "ended"}),
        ("chat", {"chat", "ended"}),
    ],
)
def test_suites(model: Path, prompts: Path, suite: str, parts: set[str]) -> None:
    given = ("eval", model, "--set", prompts, *FAST, "--suite", suite, "--limit", 1, "--json")
    found = json.loads(ok(*given))
    every = {"text", "stories", "sums", "recall", "chat", "ended", "mtp_acceptance"}
    assert found.keys() & every == parts and found["suite"] == suite
    assert found["ended"]["total"] == 1, "the limit is of each suite"


def test_model_and_set_are_the_embedded_ones(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.setattr(models, "EMBEDDED", tmp_path)
    message = refused(dsv4("eval", model))
    assert "the evaluation set is missing" in message and "name one with --set" in message
    (tmp_path / "evalset.jsonl").symlink_to(prompts)
    done = dsv4("eval", "--suite", "sums", *FAST, "--json")
    assert json.loads(done.out)["sums"]["exact"]["total"] == 1 and json.loads(done.out)["model"] == "embedded"
    assert done.err == "no model named: using the embedded one\n"
    (tmp_path / "tokenizer.json").unlink()
    assert "the embedded model is missing" in refused(dsv4("eval", *FAST))
    assert "no tokenizer.json" in refused(dsv4("eval", tmp_path, *FAST))


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_the_picture(model: Path, prompts: Path, tmp_path: Path) -> None:
    given = ("eval", model, "--set", prompts, *FAST, "--suite", "recall", "--plot")
    ok(*given, tmp_path / "recall.png")
    width, height = png_size(tmp_path / "recall.png")
    assert 1000 < width < 1400 and 500 < height < 900
    ok(*given, tmp_path / "recall.svg", "--op", "index=recipes.ablations.index_random")
    assert "<svg" in (tmp_path / "recall.svg").read_text()


def test_pictures_of_odd_figures(tmp_path: Path) -> None:
    """One bin; the shortest and the longest distances; several series."""
    bins = [
        {"from": low, "to": high, "mean": mean, **Rate(hits, 9).as_dict()}
        for low, high, mean, hits in ((1, 128, 1, 0), (129, 256, 256, 9), (1 << 19, 1 << 20, 1e6, 4))
    ]
    for series in ({"": bins[:1]}, {"": bins[2:]}, {"": bins}, {"learned": bins, "by lot": bins[:2]}):
        draw_recall(tmp_path / "x.png", series, 128, "subtitle")
        png_size(tmp_path / "x.png")
        (tmp_path / "x.png").unlink()


def test_without_matplotlib(model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before the work, with the command that helps; without --plot nothing asks for it."""
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    message = refused(dsv4("eval", "no such model", "--set", prompts, "--plot", "x.png"))
    assert "--plot needs matplotlib" in message and "pip install 'dsv4[plot]'" in message
    ok("eval", model, "--set", prompts, *FAST, "--suite", "sums")


REFUSED = {
    "eval {model} --suite poems": "suite is 'poems', expected one of stories, sums, recall, chat, tools, "
    "json, unknown, all",
    "eval {model} --set {set} --limit 0": "--limit is 0, expected 1 or more",
    "eval {model} --set {set} --max-tokens 0": "--max-tokens is 0, expected 1 or more",
    "eval {model} --set {tmp}/missing": "/missing cannot be read: No such file",
    "eval {model} --set {model}/config.json": "config.json, line 1",
    "eval {tmp}/missing --set {set}": "/missing does not exist",
    "eval {model} --set {set} --suite sums --plot {tmp}/x.png": "--plot shows recall",
    "eval {model} --set {set} --plot {tmp}/x.gif": "expected a name that ends in .png",
    "eval {model} --set {set} --plot {tmp}/none/x.png": "/none/x.png: expected the name of a file",
    "eval {model} --set {set} --answers {tmp}": "expected the name of a file in an existing folder",
    "eval {model} --set {set} --op index=nothing.here": "'nothing.here' cannot be imported",
    "eval {model} --set {tmp}/sums --suite chat": "holds nothing of this suite",
}


@pytest.mark.parametrize("command", REFUSED)
def test_one_sentence(command: str, model: Path, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "sums").write_text(json.dumps(LINES[1]))
    message = refused(dsv4(*command.format(model=model, set=prompts, tmp=tmp_path).split()))
    assert REFUSED[command] in message
    assert [path.name for path in tmp_path.iterdir()] == ["sums"]


def test_what_is_missing_is_noted(checkpoint: Callable[..., Path], prompts: Path) -> None:
    done = dsv4("eval", checkpoint("hf-bf16"), "--set", prompts, *FAST, "--suite", "stories", "--json")
    found = json.loads(done.out)
    assert done.code == 0 and "mtp_acceptance" not in found
    assert done.err == f"note: {found['notes'][0]}\n" and "no draft block" in done.err


def test_ctrl_c_shows_what_is_done(model: Path, tmp_path: Path) -> None:
    """Two short prompts are answered; the third, long one is stopped."""
    long = {**LINES[1], "messages": [{"role": "user", "content": "word " * 700}]}
    sums = [LINES[1], LINES[1], long]
    (tmp_path / "set").write_text("".join(json.dumps(line) + "\n" for line in sums))
    given = ("eval", model, "--set", tmp_path / "set", "--max-tokens", 4, "--chunk", 2, "--suite", "sums")
    with Terminal(*given, "--max-batch", 2) as terminal:
        terminal.expect("2/3")
        terminal.type("\x03")
        shown = terminal.expect(r"answers that end by themselves[^\n]*\n", 20)
        assert "stopped after 2 of 3 prompts and texts" in shown and "sums: exact" in shown
        assert terminal.wait() == 130
