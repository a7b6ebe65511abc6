"""`dsv4 plan`: the verdict is what the engine would do, text and JSON agree, errors are one sentence."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import write_model
from cli_support import dsv4, ok, refused

from dsv4.config import preset
from dsv4.weights.load import Checkpoint


def test_the_command(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "official", preset("tiny"))
    shown = ok("plan", folder, "--gpus", "H200", "--context", 512, "--batch", 2)
    assert "fits, " in shown and "2 sequences of 512 tokens, fp8" in shown
    report = json.loads(ok("plan", folder, "--gpus", "H200", "--context", 512, "--batch", 2, "--json"))
    assert report["fits"] and report["model"] == "model" and "instead" not in report
    parts = report["per_gpu"]
    assert parts["total"] == sum(value for name, value in parts.items() if name != "total")
    assert report["stored_bytes"] == Checkpoint.open(folder).inventory.num_bytes
    here = json.loads(ok("plan", folder, "--json"))
    assert here["context"] == 32768 and here["machine"]["bandwidth_source"] == "measured"
    too_much = dsv4(
        "plan", "tiny", "--gpus", "2xRTX5090", "--context", 65536, "--batch", 65536, "--format", "bf16"
    )
    assert too_much.code == 0 and "does not fit" in too_much.out and "would do" in too_much.out
    assert "; 2 GPUs (--gpus) do not hold it, " in too_much.out
    two = ok("plan", "flash", "--gpus", "2xH200")
    assert re.search(r"; 2 GPUs \(--gpus\) hold it, \d+\.\d\d GB on each: built, and never run", two)
    assert "one H200  " in two, "the table is not of two"
    assert "2 x RTX 5090 (1.79 TB/s each, data sheet); nothing was ever run on one" in too_much.out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--gpus A100", "no kernel is built for compute capability 8.0, which A100 has"),
        ("--gpus H200 --cache bf16", "the kernels have no cache bf16; use fp8"),
        (
            "--gpus RTX5090 --context 1048576",
            "cannot run a model of 262144 compressed entries to select from",
        ),
    ],
)
def test_what_the_engine_would_refuse_does_not_fit(
    arguments: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict about memory alone would be another one: the model is small."""
    long = replace(preset("tiny"), max_positions=1 << 20)
    monkeypatch.setattr("dsv4.lab.plan.preset", lambda name: long)
    command = ("plan", "tiny", *arguments.split(), "--batch", 1)
    report = json.loads(ok(*command, "--json"))
    assert report["verdict"].startswith("does not run: ") and why in report["refused"]
    assert not report["fits"] and report["per_gpu"]["total"] < report["machine"]["memory_bytes"]
    shown = ok(*command)
    assert (
        f"verdict  {report['verdict']}" in shown.replace("\n", " ") and "would fit     nothing" not in shown
    )


def test_text_and_json_say_the_same() -> None:
    """The figures of experts in host memory, too, which depend on what was recorded."""
    report = json.loads(ok("plan", "flash", "--gpus", "3xH200", "--json"))
    shown = ok("plan", "flash", "--gpus", "3xH200")
    assert report["verdict"].endswith("; 3 GPUs (--gpus) are not built") and report["verdict"] in shown
    spill = report["spill"]
    rates = [round(spill[f"tokens_per_second_{how}"]["one"]) for how in ("uniform", "assumed")]
    assert f"uniform routing {rates[0]}, 98.5 % hits {rates[1]} tokens/s" in shown
    # Of two ranks each would have half of an FP8 scale's rows.
    tiny = json.loads(ok("plan", "tiny", "--gpus", "2xH200", "--json"))
    assert tiny["fits"] and "; 2 GPUs (--gpus) cannot share it: layers.0." in tiny["verdict"]
    assert not tiny["in_theory"]["built"] and "fp8 shares a scale among 128" in tiny["in_theory"]["refused"]
    assert spill["gpu_memory_share"] == report["recorded"]["share"] < 1
    assert "tokens_per_second" not in report, "the speed of light is not what a user gets"


def test_a_measured_rank_goes_before_shares_of_bandwidth() -> None:
    """Where one was measured: this GPU, model, layout and number of ranks, and widths that ranks share."""
    shown = ok("plan", "flash", "--format", "hfnvfp4", "--gpus", "2xH200", "--context", 4096, "--compare")
    assert "predicted     batch 1: 311 tokens/s (a rank's step of 2.845 ms, measured on one H200" in shown
    rows = {line[:16].strip(): line.rstrip() for line in shown.splitlines() if " x " in line[:16]}
    assert rows["2 x H200"].endswith("311 *") and " to " not in rows["8 x H200"]
    assert " to " in rows["2 x B200"] and "*" not in rows["2 x B200"]
    assert "several GPUs, B200 and RTX PRO 6000 were never run" in shown
    for other in ("hfnvfp4 --gpus 2xH200 --ep 2", "hfnvfp4 --gpus 2xB200", "modelopt --gpus 2xH200"):
        report = json.loads(ok("plan", "flash", "--json", "--format", *other.split()))
        assert report["predicted"]["rank_step_ms"] is None, other


def test_one_gpu_of_the_comparison_is_what_its_own_plan_says() -> None:
    """A GPU that holds the model with experts in host memory was called too small there."""
    own = json.loads(ok("plan", "flash", "--gpus", "H200", "--json"))
    report = json.loads(ok("plan", "flash", "--gpus", "H200", "--compare", "--json"))
    (one,) = (row for row in report["sets"] if row["name"] == "H200" and row["count"] == 1)
    assert one["fits"] and own["fits"]
    assert one["host_bytes"] == own["per_gpu"]["host"] and one["total_bytes"] == own["per_gpu"]["total"]
    rates = [own["spill"][f"tokens_per_second_{how}"]["one"] for how in ("uniform", "assumed")]
    assert one["tokens_per_second"] == pytest.approx(rates)
    shown = ok("plan", "flash", "--gpus", "H200", "--compare")
    assert f"{rates[0]:.0f} to {rates[1]:.0f} +" in shown and "+ experts in host memory" in shown


REFUSED = {
    "": "Missing argument 'model'",
    "{folder}/missing": "/missing does not exist",
    "{folder}": "config.json does not exist",
    "huge": "huge does not exist; give a model folder, or one of flash, pro, tiny",
    "tiny --gpus 2xH900": "gpus '2xH900': expected a number and a known GPU",
    "tiny --gpus 0xH200": "gpus '0xH200': expected 1 to 1024 of them",
    f"tiny --gpus {'9' * 5000}xH200": "expected 1 to 1024 of them",
    "tiny --gpus H200 --records {folder}/missing": "/missing is not a folder; give one with *.jsonl files",
    "tiny --gpus 2xH200 --tp 3": "tp 3 does not divide the 2 GPUs",
    "tiny --gpus 4xH200 --tp 4": "o_groups 2 do not split over 4 ranks; use 1 or 2",
    "tiny --gpus 4xH200 --ep 3": "ep 3 does not divide the 4 GPUs",
    "tiny --gpus H200 --ep 0": "ep is 0, expected at least 1",
    "tiny --gpus H200 --context 0": "context is 0, expected at least 1",
    "tiny --gpus H200 --context 9999999": "exceeds the model's 65536 positions; lower --context",
    "tiny --gpus H200 --batch 99999999": "batch is 99999999, expected at most",
    "tiny --gpus H200 --format gguf": "unknown format 'gguf'",
    "tiny --gpus H200 --weights none": "weights is 'none'",
    "tiny --gpus H200 --cache fp4": "cache is 'fp4'",
    "{folder}/missing --format bf16": "--format goes with flash, pro, tiny",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=lambda text: text[:60])
def test_one_sentence_and_exit_code_2(arguments: str, tmp_path: Path) -> None:
    done = dsv4("plan", *(part.format(folder=tmp_path) for part in arguments.split()))
    assert REFUSED[arguments] in refused(done)
