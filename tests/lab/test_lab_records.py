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
from dsv4.lab.init import STYLES
from dsv4.lab.plan import describe
from dsv4.lab.records import SHIPPED, best, of_folder, published
from dsv4.lab.synthetic import layout_of


def line(**more: Any) -> dict[str, Any]:
    usual = {"bench": "decode", "model": "tiny", "layout": "modelopt", "batch": 1}
    return {**usual, "device_name": "NVIDIA H200", "share": 0.5, **more}


def write(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")


def share(folder: Path, gpu: str = "H200", model: str = "tiny", layout: str = "modelopt") -> float | None:
    found = best(folder, gpu, model, layout)
    return found and found.share


def test_a_line_is_of_this_model_and_gpu(tmp_path: Path) -> None:
    assert best(tmp_path / "missing", "H200", "tiny", "modelopt") is None
    write(
        tmp_path / "runs.jsonl",
        line(share=0.41),
        line(share=0.38),
        line(share=0.9, device_name="NVIDIA GeForce RTX 5090"),
        line(share=0.8, model="pro"),
        line(share=0.7, model="flash", layout="nvfp4"),
        {"what": "another benchmark"},
        {"device_name": "NVIDIA H200", "share": 0.99},
    )
    found = best(tmp_path, "H200", "tiny", "modelopt")
    assert found and found.share == 0.41 and found.where == f"{tmp_path}/runs.jsonl:1"
    assert share(tmp_path, "H100") is None and share(tmp_path, "RTX 5090") == 0.9
    assert share(tmp_path, model="pro") == 0.8 and share(tmp_path, model="mine") is None


def test_this_layout_goes_before_a_higher_share(tmp_path: Path) -> None:
    write(tmp_path / "runs.jsonl", line(share=0.6, layout="nvfp4"), line(share=0.4))
    assert share(tmp_path) == 0.4
    assert share(tmp_path, layout="official") == 0.6
    shown = ok("plan", "tiny", "--format", "official", "--gpus", "H200", "--records", tmp_path)
    assert "60% of the ceiling below" in shown and "runs.jsonl:1 of layout nvfp4, not official" in shown


@pytest.mark.parametrize(
    "more",
    [{"batch": 8}, {"activations": "a8"}, {"ranks": 2}, {"bench": "prefill"}, {"spill": {"hit_rate": 0.9}}],
    ids=str,
)
def test_what_says_nothing_about_one_sequence_is_passed_over(more: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / "runs.jsonl", line(share=0.9, **more), line(share=0.3))
    assert share(tmp_path) == 0.3


def test_a_spilled_run_counts_with_what_it_reached_resident(tmp_path: Path) -> None:
    """Its share is of a step that waits for host memory, which a plan adds by itself."""
    reached = {"spill": {"gpu_gb_per_second": 2000.0}, "ceiling_gb_per_second": 4000.0}
    write(tmp_path / "runs.jsonl", line(share=0.2, **reached))
    assert share(tmp_path) == 0.5
    write(tmp_path / "runs.jsonl", line(share=0.2, spill=None))
    assert share(tmp_path) == 0.2


@pytest.mark.parametrize("bad", ['{"share": 41}', '{"device_name": 1}', "{"])
def test_a_bad_line_is_named(bad: str, tmp_path: Path) -> None:
    text = bad if bad == "{" else json.dumps(line(**json.loads(bad)))
    (tmp_path / "runs.jsonl").write_text(text)
    assert "runs.jsonl:1" in refused(dsv4("plan", "tiny", "--gpus", "H200", "--records", tmp_path))


def test_a_plan_without_a_line_says_so(tmp_path: Path) -> None:
    write(tmp_path / "runs.jsonl", line(model="flash"), line(model="pro"))
    assert "no run of this model on H200 is recorded" in ok(
        "plan", "tiny", "--gpus", "H200", "--records", tmp_path
    )
    report = json.loads(ok("plan", "tiny", "--gpus", "2xH200", "--records", tmp_path, "--json"))
    assert report["recorded"] is None
    assert report["predicted"]["share_source"].endswith("; no run of tiny on H200 is recorded")


def test_a_bench_line_is_what_the_plan_reads(tmp_path: Path) -> None:
    target = tmp_path / "h200.jsonl"
    check_target(target, True)
    facts = {**subject.synthetic("tiny", None, None, "modelopt").facts(), "bench": "decode", "batch": 1}
    append(target, line(**facts))
    target.write_bytes(target.read_bytes().rstrip(b"\n"))  # edited by hand
    append(target, line(**facts, share=0.625))
    append(target, {"bench": "prefill", "device_name": "NVIDIA H200", "matmul_share": 0.9})
    assert len(target.read_text().splitlines()) == 3
    assert share(tmp_path) == 0.625
    shown = ok("plan", "tiny", "--gpus", "H200", "--records", tmp_path)
    assert "62%" in shown and "h200.jsonl:2)" in shown
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
        line(model="flash", published=None, share=0.7),
        line(model="x", published="tiny"),
    )
    assert share(tmp_path) == 0.5 and share(tmp_path, model="x") is None
    # A folder that happens to be called as a published model is not one.
    assert share(tmp_path, model="flash") is None
    assert share(tmp_path, model=of_folder("flash")) == 0.7


# ct holds its shared experts in NVFP4 too, the most beside the routed ones in FP8.
STORED = {
    **{"official": "official", "modelopt": "modelopt", "ct": "modelopt", "hfnvfp4": "nvfp4"},
    **{"bf16": "routed experts bf16, other bf16", "hf-bf16": "routed experts bf16, other bf16"},
    "fp8": "routed experts fp8, other fp8",
}


@pytest.mark.parametrize("format", STYLES)
def test_layouts_by_what_is_stored(format: str) -> None:
    assert layout_of(describe("tiny", format)[2]) == STORED[format]


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
    assert flash and pro and flash.where == "dsv4/lab/results/h200.jsonl:1"
    assert flash.share < 0.5 < pro.share
    shown = ok("plan", "flash", "--format", "hfnvfp4", "--gpus", "H200")
    assert f"{flash.share:.0%} as recorded in {flash.where}, PCIe" in shown
