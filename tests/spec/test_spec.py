"""The specification against what the official computation gave, and against the engine in every mode."""

import re
import subprocess
import sys
from functools import cache
from inspect import isfunction
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4 import Engine, EngineConfig
from dsv4.lab.reference import open_model, reference_logits
from dsv4.lab.score import score_ids
from dsv4.spec import drafts, ops, rounding
from dsv4.spec.model import Model
from dsv4.spec.rounding import MODES
from dsv4.weights.load import Checkpoint
from tests.golden.test_golden import CASES, MARKS, STEP_MARKS, check, folder

ROOT = Path(__file__).parents[2]
# Distances seen: 2e-6 without rounding points, on every machine.
DRAFT_MARKS = STEP_MARKS


@cache
def run(format: str, mode: str, file: str = "") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the specification gives for a golden model, and what it should."""
    want = load_file(folder(file or format) / f"expected_{mode}.safetensors")
    checkpoint = Checkpoint.open(folder(format))
    with checkpoint.reader:
        model = open_model(checkpoint, MODES["off" if mode == "noqat" else mode])
        got = reference_logits(
            model=model,
            ids=want["ids"],
            prompt_len=300,
            drafts=bool(want.keys() & {"mtp_logits", "mtp_step_logits", "draft_base"}),
            anchors=want.get("anchors"),
            forced=want.get("forced_ids"),
        )
    return got, want


@pytest.mark.parametrize(("format", "mode"), CASES)
def test_golden_logits(format: str, mode: str) -> None:
    got, want = run(format, mode)
    assert want.keys() - {"ids"} == got.keys()
    for name in got:
        check(got[name], want[name], MARKS[mode], f"{format} {mode} {name}")


@pytest.mark.parametrize("mode", STEP_MARKS)
def test_mtp_fed_with_its_own_streams(mode: str) -> None:
    got, want = run("official", mode, "mtp_steps")
    name = "mtp_step_logits"
    check(got[name].flatten(0, 1), want[name].flatten(0, 1), STEP_MARKS[mode], f"mtp_steps {mode}")


@pytest.mark.parametrize("mode", DRAFT_MARKS)
def test_dspark_drafts(mode: str) -> None:
    got, want = run("dspark", mode)
    assert want.keys() - {"ids", "anchors", "forced_ids"} == got.keys()
    check(got["main_hidden"], want["main_hidden"], DRAFT_MARKS[mode], f"dspark {mode} taps")
    for name in ("draft_base", "forced_logits"):
        check(got[name].flatten(0, 1), want[name].flatten(0, 1), DRAFT_MARKS[mode], f"dspark {mode} {name}")
    if mode == "noqat":
        assert torch.equal(got["draft_ids"], want["draft_ids"])
        for name in ("confidence", "forced_confidence"):
            assert (got[name] - want[name]).abs().max() <= 1e-4, name


@pytest.mark.parametrize("mode", ["off", "a16", "a8", "a4"])
def test_engine_agrees(mode: str) -> None:
    """The engine's CPU path in the same mode: the only check of a4, which has no golden file."""
    ids = load_file(folder("official") / "expected_a16.safetensors")["ids"][:200]
    checkpoint = Checkpoint.open(folder("official"))
    with checkpoint.reader:
        want = reference_logits(open_model(checkpoint, MODES[mode]), ids, 150)
    config = EngineConfig(
        activations="a16" if mode == "off" else mode,  # type: ignore[arg-type]
        qat="off" if mode == "off" else "on",
        max_batch=1,
        max_context=200,
        chunk=64,
    )
    got = score_ids(Engine.load(folder("official"), config), ids.tolist(), 150)
    # a4 has the marks of a8: both round every input, and a value near a boundary may fall either way.
    mark = MARKS[{"off": "noqat", "a4": "a8"}.get(mode, mode)]
    for name in ("prefill_logits", "decode_logits"):
        check(got[name], want[name], mark, f"{mode} {name}")


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "dsv4.spec", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True)


def test_command(tmp_path: Path) -> None:
    want = load_file(folder("official") / "expected_noqat.safetensors")
    ids, out = tmp_path / "ids.safetensors", tmp_path / "out.safetensors"
    save_file({"ids": want["ids"][:80]}, ids)
    arguments = (folder("official"), "--ids", ids, "--logits", out, "--rounding", "off", "--drafts")
    done = command(*arguments)
    assert done.returncode == 0 and not done.stderr, done.stderr
    got = load_file(out)
    assert {name: list(value.shape[:1]) for name, value in got.items()} == {
        **{"prefill_logits": [80], "decode_logits": [0], "mtp_logits": [79]}
    }
    check(got["prefill_logits"], want["prefill_logits"][:80], MARKS["noqat"], "command")
    check(got["mtp_logits"], want["mtp_logits"][:79], MARKS["noqat"], "command, drafts")
    for changed, said in (
        ({"ids": torch.tensor([0, 999])}, "expected 1 to 2, and ids from 0 to 159"),
        ({"anchors": torch.tensor([1])}, "has no tensor 'ids'"),
        ({"ids": torch.arange(5), "anchors": torch.tensor([4])}, "anchor 4 has no token after it"),
    ):
        save_file(changed, ids)
        done = command(*arguments)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_the_tour_has_every_operation() -> None:
    """docs/model.md names functions that exist, and leaves out none of ops.py, drafts.py and rounding.py."""
    tour = (ROOT / "docs" / "model.md").read_text()
    places = {"Model": Model, "ops": ops, "rounding": rounding, "Rounding": rounding.Rounding}
    for place, name in re.findall(r"`(Model|ops|rounding|Rounding)\.(\w+)`", tour):
        assert name == "py" or callable(getattr(places[place], name, None)), f"{place}.{name}"
    for module in (ops, drafts, rounding):
        for name, value in vars(module).items():
            if isfunction(value) and value.__module__ == module.__name__ and name != "num_stages":
                assert re.search(rf"`(\w+\.)?{name}`", tour), f"{name} is not in docs/model.md"
    lines = tour.splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 120


def test_specification_is_short() -> None:
    files = sorted((ROOT / "dsv4" / "spec").glob("*.py"))
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert lines <= 500, f"{lines} lines in dsv4/spec, expected at most 500: it is read in one sitting"
