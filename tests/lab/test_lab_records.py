"""Recorded speeds: which line `dsv4 plan` takes for which model, and what the package's own lines say."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import SMALL, write_model
from cli_support import dsv4, ok, refused

from dsv4.config import preset
from dsv4.errors import ConfigError
from dsv4.lab.bench import subject
from dsv4.lab.bench.record import append, check_target, command
from dsv4.lab.plan import describe
from dsv4.lab.records import SHIPPED, best, of_folder, published
from dsv4.lab.styles import STYLES


def line(**more: Any) -> dict[str, Any]:
    usual = {"bench": "decode", "model": "tiny", "layout": "modelopt", "batch": 1}
    return {**usual, "device_name": "NVIDIA H200", "tokens_per_second": 50, **more}


def write(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")


def rate(folder: Path, gpu: str = "H200", model: str = "tiny", layout: str = "modelopt") -> float | None:
    found = best(folder, gpu, model, layout)
    return found and found.tokens_per_second


def test_a_line_is_of_this_model_layout_and_gpu(tmp_path: Path) -> None:
    assert best(tmp_path / "missing", "H200", "tiny", "modelopt") is None
    write(
        tmp_path / "runs.jsonl",
        line(tokens_per_second=41, context=4096, date="2026-11-16T14:00:00"),
        line(tokens_per_second=38),
        line(tokens_per_second=90, device_name="NVIDIA GeForce RTX 5090"),
        line(tokens_per_second=80, model="pro"),
        line(tokens_per_second=70, model="flash", layout="nvfp4"),
        {"what": "another benchmark"},
        {"device_name": "NVIDIA H200", "tokens_per_second": 99},
    )
    found = best(tmp_path, "H200", "tiny", "modelopt")
    assert found and (found.tokens_per_second, found.kind) == (41, "measured")
    assert found.how == "bare steps at 4k, 2026-11-16"
    assert rate(tmp_path, "H100") is None and rate(tmp_path, "RTX 5090") == 90
    assert rate(tmp_path, model="pro") == 80 and rate(tmp_path, model="mine") is None
    assert rate(tmp_path, layout="nvfp4") is None and rate(tmp_path, layout="official") is None
    shown = ok("plan", "tiny", "--gpus", "H200", "--records", tmp_path)
    assert "41 tokens/s for one user, measured (bare steps at 4k" in shown
    shown = ok("plan", "tiny", "--format", "official", "--gpus", "H200", "--records", tmp_path)
    assert "predicted" in shown and "measured" not in shown


@pytest.mark.parametrize(
    "more",
    [{"batch": 8}, {"activations": "a8"}, {"ranks": 2}, {"bench": "prefill"}, {"spill": {"host_bytes": 1}}],
    ids=str,
)
def test_what_says_nothing_about_one_sequence_is_passed_over(more: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / "runs.jsonl", line(tokens_per_second=90, **more), line(tokens_per_second=30))
    assert rate(tmp_path) == 30


def test_a_plan_that_spills_takes_lines_that_do(tmp_path: Path) -> None:
    spilled = line(tokens_per_second=20, spill={"host_bytes": 12_460_000_000}, routing="uniform")
    write(tmp_path / "runs.jsonl", spilled, line())
    found = best(tmp_path, "H200", "tiny", "modelopt", spills=True)
    assert found and found.tokens_per_second == 20
    assert "12.5 GB of experts in host memory, uniform routing" in found.how
    assert rate(tmp_path) == 50


@pytest.mark.parametrize("bad", ['{"tokens_per_second": -1}', '{"device_name": 1}', "{"])
def test_a_bad_line_is_named(bad: str, tmp_path: Path) -> None:
    text = bad if bad == "{" else json.dumps(line(**json.loads(bad)))
    (tmp_path / "runs.jsonl").write_text(text)
    assert "runs.jsonl:1" in refused(dsv4("plan", "tiny", "--gpus", "H200", "--records", tmp_path))


def test_a_bench_line_is_what_the_plan_reads(tmp_path: Path) -> None:
    target = tmp_path / "h200.jsonl"
    check_target(target, True)
    facts = {**subject.synthetic("tiny", None, None, "modelopt").facts(), "bench": "decode", "batch": 1}
    append(target, line(**facts))
    target.write_bytes(target.read_bytes().rstrip(b"\n"))  # edited by hand
    append(target, line(**facts, tokens_per_second=62, share=0.5))
    append(target, {"bench": "prefill", "device_name": "NVIDIA H200", "matmul_share": 0.9})
    assert len(target.read_text().splitlines()) == 3
    assert rate(tmp_path) == 62
    before = target.read_bytes()
    with pytest.raises(ConfigError, match=r"share of the read ceiling is 1\.25"):
        append(target, line(share=1.25))
    assert target.read_bytes() == before


def test_a_folder_is_known_by_its_sizes(tmp_path: Path) -> None:
    """Whatever it is called, and however many experts it has; another is known by its name alone."""
    for name in ("flash", "pro", "tiny"):
        config = preset(name)
        assert published(config) == published(replace(config, num_experts=7, max_positions=999)) == name
        assert published(replace(config, hidden_size=64)) is None
        assert published(replace(config, layers=config.layers[:2])) is None
    facts = subject.of_folder(write_model(tmp_path / "flash", "official", SMALL)).facts()
    assert facts["published"] is None and facts["model"] == "flash" and facts["layout"] == "official"
    write(
        tmp_path / "runs.jsonl",
        line(model="flash", layout="modelopt", published=None, tokens_per_second=70),
        line(model="x", published="tiny"),
    )
    assert rate(tmp_path) == 50 and rate(tmp_path, model="x") is None
    # A folder that happens to be called as a published model is not one.
    assert rate(tmp_path, model="flash") is None
    assert rate(tmp_path, model=of_folder("flash")) == 70


# ct holds its shared experts in NVFP4 too, the most beside the routed ones in FP8.
STORED = {
    **{"official": "official", "modelopt": "modelopt", "ct": "modelopt", "hfnvfp4": "nvfp4"},
    **{"bf16": "routed experts bf16, other bf16", "hf-bf16": "routed experts bf16, other bf16"},
    "fp8": "routed experts fp8, other fp8",
}


@pytest.mark.parametrize("format", STYLES)
def test_layouts_by_what_is_stored(format: str) -> None:
    assert describe("tiny", format).layout == STORED[format]


def test_the_command_is_without_its_target() -> None:
    typed = ["bench", "decode", "--save", "/there/x.jsonl", "--synthetic", "flash"]
    assert command("dsv4", typed) == command("dsv4", ["bench", "decode", "--save=x.jsonl", *typed[4:]])
    assert command("dsv4", typed) == "dsv4 bench decode --synthetic flash"


def test_the_packages_own_lines() -> None:
    lines = [json.loads(text) for path in SHIPPED.glob("*.jsonl") for text in path.read_text().splitlines()]
    assert {each["model"] for each in lines} == {"flash", "pro"}
    for each in lines:
        assert re.fullmatch("[0-9a-f]{40}", each["commit"]), "a line is of a commit, not of an edited tree"
        typed = shlex.split(each["command"])
        assert typed[:3] == ["dsv4", "bench", each["bench"]] and not any("/" in word for word in typed)
        assert typed[typed.index("--synthetic") + 1] == each["model"]
    flash, pro = (best(SHIPPED, "H200", model, "nvfp4") for model in ("flash", "pro"))
    assert flash and pro and pro.tokens_per_second < 100 < 240 < flash.tokens_per_second
    spilled = best(SHIPPED, "H200", "flash", "official", spills=True)
    assert spilled and spilled.tokens_per_second < 100
    shown = " ".join(ok("plan", "flash", "--format", "official", "--gpus", "H200").split())
    assert "97 tokens/s for one user, measured (bare steps at 4k, 12.5 GB of experts in host memory" in shown
