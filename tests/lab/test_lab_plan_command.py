"""`dsv4 plan`: the verdict is what the engine would do, text and JSON agree, errors are one sentence."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_model
from cli_support import dsv4, ok, refused

from dsv4.cli.plan import COMPARED, count_of
from dsv4.config import preset
from dsv4.errors import ConfigError
from dsv4.models import embedded
from dsv4.weights.load import Checkpoint


def words(*command: Any, code: int = 0) -> str:
    """What is shown, without line breaks."""
    done = dsv4(*command)
    assert done.code == code, done
    return " ".join(done.out.split())


def test_the_command(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "official", preset("tiny"))
    given = ("plan", folder, "--gpus", "H200", "--context", 512, "--batch", 2)
    shown = ok(*given)
    assert shown.startswith("model fits on 1 x H200, ") and "2 sequences of 512 tokens, fp8" in shown
    report = json.loads(ok(*given, "--json"))
    assert report["fits"] and report["model"] == "model" and "instead" not in report
    parts = report["per_gpu"]
    assert parts["total"] == sum(value for name, value in parts.items() if name not in ("total", "host"))
    assert report["stored_bytes"] == Checkpoint.open(folder).inventory.num_bytes
    here = json.loads(ok("plan", folder, "--json"))
    assert here["context"] == 32768 and here["machine"]["source"] == "measured"


def test_the_verdict_is_about_what_was_asked() -> None:
    two = words("plan", "flash", "--gpus", "2xH200")
    assert two.startswith("flash (modelopt) fits on 2 x H200, 60.9") and "per GPU" in two
    assert "never tested, all figures are calculated" in two
    given = ("plan", "tiny", "--gpus", "RTX5090", "--context", "64k", "--batch", 65536, "--format", "bf16")
    shown = words(*given, code=3)
    assert shown.startswith("tiny (bf16) does not fit on 1 x RTX 5090: needs ")
    assert "would fit a batch of " in shown and "no set of known GPUs" in shown


def test_a_cpu_names_the_gpus_that_would_do() -> None:
    """README's first claim is among them: one H200, with experts in host memory."""
    done = dsv4("plan", "flash")
    if done.code == 0:
        pytest.skip("this machine holds Flash")
    shown = " ".join(done.out.split())
    assert done.code == 3 and "no setting fits here" in shown
    assert "1 x H200 (and 23.57 GB of host memory)" in shown


def test_contexts_with_suffixes() -> None:
    assert [count_of(text) for text in ("4096", "128k", " 1M ", "2 K")] == [4096, 131072, 1 << 20, 2048]
    for bad in ("", "k", "1.5k", "-1", "128q", "1kk", "9" * 40):
        with pytest.raises(ConfigError, match="expected a number of tokens, as in 32768, 128k or 1M"):
            count_of(bad)
    assert (
        json.loads(ok("plan", "flash", "--gpus", "B200", "--context", "128k", "--json"))["context"] == 131072
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--gpus A100", "no kernel is built for compute capability 8.0, which A100 has"),
        ("--gpus H200 --cache bf16", "the kernels have no cache bf16; use fp8"),
        (
            "--gpus RTX5090 --context 1048576",
            "cannot run a model of 262144 compressed entries to select from",
        ),
        ("--gpus 2xH200", "fp8 shares a scale among 128"),
    ],
)
def test_what_the_engine_would_refuse_does_not_fit(
    arguments: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict about memory alone would be another one: the model is small."""
    long = replace(preset("tiny"), max_positions=1 << 20)
    monkeypatch.setattr("dsv4.lab.plan.preset", lambda name: long)
    command = ("plan", "tiny", *arguments.split(), "--batch", 1)
    report = json.loads(dsv4(*command, "--json").out)
    assert " does not run on " in report["verdict"] and why in report["refused"] and not report["fits"]
    assert report["per_gpu"] is None or report["per_gpu"]["total"] < report["machine"]["memory_bytes"]
    shown = words(*command, code=3)
    assert shown.startswith(report["verdict"]) and "no setting fits here" not in shown


def test_text_and_json_say_the_same() -> None:
    report = json.loads(ok("plan", "flash", "--gpus", "H200", "--json"))
    shown = words("plan", "flash", "--gpus", "H200", "--verbose")
    assert shown.startswith(report["verdict"])
    speed = report["speed"]
    assert f"{speed['tokens_per_second']:,.0f} tokens/s for one user, predicted (at most" in shown
    assert "host memory 23.57 GB experts, pinned; 137.44 GB assumed" in shown
    assert shown.count("tokens/s") == 2, "one figure for one user; the other is of the batch"


def test_the_comparison_is_what_each_plan_says() -> None:
    given = ("plan", "flash", "--format", "hfnvfp4", "--gpus", "H200")
    report, shown = json.loads(ok(*given, "--compare", "--json")), ok(*given, "--compare")
    rows = {(row["name"], row["count"]): row for row in report["sets"]}
    assert {name for name, _ in rows} == set(COMPARED) and len(rows) == 12
    own = json.loads(ok(*given, "--json"))
    assert rows["H200", 1] == {
        key: own[key] if key in own else own["machine"][key] for key in rows["H200", 1]
    }
    assert round(rows["H200", 2]["speed"]["tokens_per_second"]) == 304
    lines = {line[:16].strip(): line for line in shown.splitlines() if " x " in line[:16]}
    assert "304  predicted" in lines["2 x H200"] and "at most" not in lines["2 x H200"]
    assert "17.50 GB" in lines["1 x H200"] and "at most" in lines["8 x B200"]
    assert max(map(len, shown.splitlines())) <= 80


def test_a_plan_needs_no_torch() -> None:
    """And so starts at once."""
    code = "import sys; from dsv4.cli.main import app; app(sys.argv[1:], standalone_mode=False); "
    code += "sys.exit(sorted({'torch', 'numpy'} & {*sys.modules}))"
    for arguments in ("flash --gpus 8xH200 --compare", "tiny", "pro --gpus H200"):
        command = [sys.executable, "-c", code, "plan", *arguments.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.stderr.strip() in ("", "[]"), done.stderr


REFUSED = {
    "": "Missing argument 'MODEL'",
    "{folder}/missing": "/missing does not exist",
    "{folder}": "config.json does not exist",
    "huge": "huge does not exist; give a model folder",
    "tiny --gpus 2xH900": "gpus '2xH900': expected 2xH200, or 2 for this machine's own; known GPUs: A100",
    "tiny --gpus 0xH200": "gpus '0xH200': expected 1 to 1024 of them",
    f"tiny --gpus {'9' * 5000}xH200": "expected 1 to 1024 of them",
    "tiny --gpus 900": "gpus 900: this machine has ",
    "tiny --gpus H200 --records {folder}/missing": "/missing is not a folder; give one with *.jsonl files",
    "tiny --gpus 3xH200": "3 ranks cannot share this model; use 1 or 2",
    "tiny --gpus 4xH200": "o_groups 2 do not split over 4 ranks; use 1 or 2",
    "flash --gpus 8xH200 --format gguf": "unknown format 'gguf'",
    "tiny --gpus H200 --context 0": "context is 0, expected at least 1",
    "tiny --gpus H200 --context 9999999": "exceeds the model's 65536 positions; lower --context",
    "tiny --gpus H200 --batch 99999999": "batch is 99999999, expected at most",
    "tiny --gpus H200 --weights none": "weights is 'none'",
    "tiny --gpus H200 --cache fp4": "cache is 'fp4'",
    "{embedded} --format bf16": "--format goes with flash, pro, tiny",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=lambda text: text[:60])
def test_one_sentence_and_exit_code_2(arguments: str, tmp_path: Path) -> None:
    done = dsv4("plan", *(part.format(folder=tmp_path, embedded=embedded()) for part in arguments.split()))
    assert REFUSED[arguments] in refused(done)
