"""What a user can get wrong ends in one sentence and exit code 2, and leaves nothing half-written behind."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import read_file, write_file
from cli_support import ROOT, Done, dsv4, process, refused
from safetensors.torch import save_file

from dsv4.errors import ConfigError
from dsv4.lab.score import write_logits


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("modelopt")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, model: Path, checkpoint: Callable[..., Path]) -> Path:
    """A folder full of mistakes."""
    desk = tmp_path_factory.mktemp("desk")
    save_file({"ids": torch.tensor([5, 6, 7, 8])}, desk / "ids")
    save_file({"ids": torch.tensor([5, 300])}, desk / "foreign")
    save_file({"ids": torch.tensor([], dtype=torch.long)}, desk / "none")
    save_file({"ids": torch.tensor([0.5])}, desk / "floats")
    save_file({"ids": torch.zeros(2, 2, dtype=torch.long)}, desk / "square")
    save_file({"other": torch.tensor([1])}, desk / "other")
    (desk / "noise").write_bytes(b"\xff\xfe\x00 not text, not safetensors")
    (desk / "empty").touch()
    (desk / "story").write_text("a story")
    (desk / "folder").mkdir()
    (desk / "nothing").mkdir()
    for name, config in (("bad json", "{"), ("bad config", '{"hidden_size": 1}')):
        (desk / name).mkdir()
        (desk / name / "config.json").write_text(config)
    for name in ("bare", "truncated", "nan", "lacking"):
        (desk / name).mkdir()
        shutil.copy(model / "config.json", desk / name)
    (desk / "bare" / "model.safetensors").symlink_to(model / "model.safetensors")
    (desk / "truncated" / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-5])
    tensors = read_file(model / "model.safetensors")
    tensors["norm.weight"].data[:2] = b"\xc0\x7f"
    write_file(desk / "nan" / "model.safetensors", tensors)
    del tensors["norm.weight"]
    write_file(desk / "lacking" / "model.safetensors", tensors)
    (desk / "hf").symlink_to(checkpoint("hf-bf16"))
    (desk / "model").symlink_to(model)
    return desk


SCORE = "score {model} --logits {desk}/out --ids"
# command (split at spaces, after which {} are filled in) -> part of the sentence
REFUSED = {
    "--nope": "No such option: --nope",
    "nope": "No such command 'nope'; see dsv4 --help",
    "generate": "no prompt given",
    "generate {model} hi": ' is a model folder: dsv4 generate -m {model} "hi"',
    "generate {model} --ids 5": ' is a model folder: dsv4 generate -m {model} "your prompt"',
    "generate {desk}/story": "/story' is a file; to use its text as a prompt: --prompt-file ",
    "generate @{desk}/story": "/story' is a file; to use its text as a prompt: --prompt-file ",
    "generate -": "no prompt given",
    "generate - -": "stdin can be one prompt; give - once",
    "generate --prompt-file {desk}/missing": "/missing cannot be read: No such file",
    "generate --prompt-file {desk}/noise": "/noise is not UTF-8 text (byte 0)",
    "generate --chat --ids 5": "--chat makes a message of a text; give token ids without it",
    "generate --model {model} hi --top-k many": "'--top-k'",
    "generate --model {model} hi --max-tokens": "--max-tokens",
    "generate --model {model}": "no prompt given",
    "generate --model {desk}/missing hi": "/missing does not exist; give a model folder",
    "generate --model {desk}/nothing hi": "/nothing/config.json does not exist; give a model folder",
    "generate --model {desk}/story hi": "/story is a file; give a model folder",
    "generate --model {desk}/[bold]x[/] hi": "/[bold]x[/] does not exist",
    "generate --model {model} hi --max-tokens 0": "max_tokens is 0, expected a positive integer",
    "generate --model {model} hi --temperature -1": "temperature is -1.0",
    "generate --model {model} hi --top-p 0": "top_p is 0.0",
    "generate --model {model} hi --min-p 2": "min_p is 2.0",
    "generate --model {model} hi --seed -1": "seed is -1",
    "generate --model {model} hi --logprobs 400": "logprobs asks for 400 alternatives of a vocabulary of 300",
    "generate --model {model} hi --stop-id 300": "stop id 300 is outside the vocabulary of 300",
    "generate --model {model} hi --max-tokens 5000": "exceeds max_context 4096",
    "generate --model {model} hi --thinking": "--thinking goes with --chat",
    "generate --model {model} --ids 1,x": "--ids '1,x': expected numbers separated by commas",
    "generate --model {model} --ids 1 --logit-bias 5": "--logit-bias '5': expected a token id and a number",
    "generate --model {model} --ids 1 --logit-bias 5=1 --logit-bias 5=2": "token 5 has a bias already",
    "generate --model {model} --ids 1 --device cpu --no-graph": "no_graph and no_overlap are about",
    "generate --model {model} --ids 1 --logit-bias 5=101": "logit_bias has 5: 101.0, expected token ids and",
    "generate --model {model} --ids 1 --presence-penalty 3": "presence_penalty is 3.0, expected a number",
    "generate --model {model} --ids 300": "prompt id 300 is outside the vocabulary of 300",
    "generate --model {model} --ids ,": "--ids ',': expected numbers separated by commas",
    # Known without the model, so said before it is loaded.
    "generate --model {desk}/lacking --ids 1,x": "--ids '1,x': expected numbers separated by commas",
    "generate --model {model} hi --activations a5": "activations is 'a5', expected one of a16, a8, a4",
    "generate --model {model} hi --max-context 9999": "max_context 9999 exceeds the model's 4096 positions",
    "generate --model {model} hi --gpus 0,0": "gpus '0,0': expected how many, or which ones: 2 or 0,1",
    "generate --model {model} hi --gpus 99": "device 'cuda:" if torch.cuda.is_available() else "gpus '99'",
    "generate --model {model} hi --device tpu": "device 'tpu' is unknown; use auto, cpu, cuda or cuda:N",
    "generate --model {model} hi --op attention": "--op 'attention': expected OP=BACKEND",
    "generate --model {model} hi --op machine=x": "unknown ops ['machine']",
    "generate --model {model} hi --op attention=cpu --op attention=cpu": "names an op twice",
    "generate --model {model} hi --threads 99999999999": "threads is 99999999999",
    "generate --model {model} hi --max-batch 9999999": "lower max_batch, max_context or chunk",
    "generate --model {desk}/bare hi": "no tokenizer.json; give token ids instead of text",
    "generate --model {desk}/bare hi --chat": "no tokenizer.json, which a conversation needs",
    "generate --model {desk}/bare --ids 5 --stop x": "stop strings need a tokenizer.json",
    "chat {desk}/bare": "no tokenizer.json; chat needs one",
    "chat {desk}/missing": "does not exist",
    "generate --model {desk}/truncated hi": "model.safetensors",
    "generate --model {desk}/nan hi": "norm.weight in model.safetensors holds NaN or infinity",
    "generate --model {desk}/lacking hi": "norm",
    "inspect {desk}/truncated": "model.safetensors",
    "inspect {desk}/lacking": "norm",
    "inspect {desk}/missing": "does not exist",
    "inspect {model}/config.json": "/config.json is a file; give a model folder",
    "inspect {desk}/bad?json": "bad json/config.json is not JSON",
    "inspect {desk}/bad?config": "bad config/config.json",
    "info --device cuda:x": "device 'cuda:x'",
    "info extra": "extra",
    "serve {model} --replicas 2": "--replicas goes with --ray; give both, or leave it out",
    "serve {model} --max-replicas 2": "--max-replicas goes with --ray",
    "serve {model} --gpus-per-replica 0.5": "--gpus-per-replica goes with --ray",
    "batch {desk}/story {desk}/new --gpus-per-replica 1": "--gpus-per-replica goes with --ray",
    "init {desk}/new --preset huge": "unknown preset 'huge'; use one of flash, pro, tiny",
    "init {desk}/new --format gguf": "unknown format 'gguf'; use one of bf16",
    "init {desk}/new --seed -1": "seed is -1, expected 0 to",
    "init {desk}/new --seed 99999999999999999999": "seed is 99999999999999999999",
    "init {desk}": "is not empty; give a new folder",
    "init {desk}/story": "/story cannot be made: File exists",
    "init {desk}/story/below": "/story/below cannot be made: Not a directory",
    "score {model}": "give either --ids with --prompt-len and --logits, or --text",
    "score {model} --text {desk}/story --ids {desk}/ids": "give either --ids",
    "score {model} --text {desk}/story --mtp": "go with --ids, not with --text",
    "score {model} --text {desk}/missing": "/missing cannot be read: No such file",
    "score {model} --text {desk}/folder": "/folder cannot be read: Is a directory",
    "score {model} --text {desk}/noise": "/noise is not UTF-8 text (byte 0)",
    "score {model} --text {desk}/empty": "the text is empty",
    "score {desk}/bare --text {desk}/story": "no tokenizer.json",
    "score {model} --ids {desk}/ids": "--ids needs --prompt-len N and --logits",
    f"{SCORE} {{desk}}/missing --prompt-len 2": "/missing does not exist",
    f"{SCORE} {{desk}}/noise --prompt-len 2": "/noise",
    f"{SCORE} {{desk}}/other --prompt-len 2": "has no tensor 'ids'; found ['other']",
    f"{SCORE} {{desk}}/floats --prompt-len 2": "ids is F32 [1], expected I64 or I32 [T]",
    f"{SCORE} {{desk}}/square --prompt-len 2": "ids is I64 [2, 2], expected",
    f"{SCORE} {{desk}}/none --prompt-len 1": "ids is empty",
    f"{SCORE} {{desk}}/foreign --prompt-len 1": "id 300 is outside the vocabulary",
    f"{SCORE} {{desk}}/ids --prompt-len 5": "prompt-len is 5, expected 1 to 4",
    f"{SCORE} {{desk}}/ids --prompt-len 0": "prompt-len is 0, expected 1 to 4",
    f"{SCORE} {{desk}}/ids --prompt-len 4 --mtp": "MTP logits of 4 prompt positions need 5",
    "score {desk}/hf --ids {desk}/ids --prompt-len 2 --logits {desk}/out --mtp": "no draft block (mtp.*)",
    f"{SCORE} {{desk}}/ids --prompt-len 2 --max-context 3": "4 ids exceed max_context 3",
    "score {model} --ids {desk}/ids --prompt-len 2 --logits {desk}/missing/out": "/missing/out: expected the",
    "score {model} --ids {desk}/ids --prompt-len 2 --logits {desk}/folder": "/folder: expected the name of a",
}  # fmt: skip


@pytest.mark.parametrize("command", REFUSED)
def test_one_sentence_and_exit_code_2(command: str, model: Path, desk: Path) -> None:
    before = sorted(desk.iterdir())
    arguments = [part.format(model=model, desk=desk).replace("?", " ") for part in command.split()]
    message = refused(dsv4(*arguments))
    assert REFUSED[command].replace("{model}", str(model)) in message
    after = sorted(path for path in desk.iterdir() if path != desk / "new")
    assert after == before, "nothing is left, under the final name or another"
    assert not (desk / "new").exists()


def test_init_asks_for_no_more_than_the_disk_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    message = refused(dsv4("init", tmp_path / "new", "--preset", "flash", "--format", "official"))
    assert re.search(r"needs 1\d\d\.\d\d GB, but 1\.00 GB of disk are free", message)
    assert not (tmp_path / "new").exists()


@contextmanager
def small_files() -> Iterator[None]:
    """Inside, a file that grows over 16 kB is an I/O error, as on a full disk: Python ignores the signal."""
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(model: Path, desk: Path, tmp_path: Path) -> None:
    save_file({"ids": torch.arange(60)}, tmp_path / "ids")
    out = tmp_path / "out.safetensors"
    with small_files():
        done = dsv4("score", model, "--ids", tmp_path / "ids", "--prompt-len", 50, "--logits", out)
    assert refused(done).startswith(f"error: {out} cannot be written: ")
    assert [p.name for p in tmp_path.iterdir()] == ["ids"]
    with small_files():
        done = dsv4("init", tmp_path / "model")
    assert "cannot be written: File too large" in refused(done)
    assert not (tmp_path / "model").exists()


TOO_LONG = "x" * 300


@pytest.mark.parametrize(
    "line",
    [
        "inspect {long}", "generate --model {long} hi", "doctor {long}",
        "plan {long}", "plan tiny --gpus H200 --records {long}",
        "compare {long}", "compare {model} --plot {long}.png", "compare {model} --ids {long}",
        "quantize {long} {new} --format bf16", "quantize {model} {long} --format bf16",
        "quantize {model} {new} --format bf16 --report {long}",
    ],
)  # fmt: skip
def test_a_name_that_no_disk_takes(line: str, model: Path, tmp_path: Path) -> None:
    places = {"long": tmp_path / TOO_LONG, "new": tmp_path / "new", "model": model}
    message = refused(dsv4(*(word.format(**places) for word in line.split())))
    assert "File name too long" in message and list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
@pytest.mark.parametrize("command", ["plan tiny --gpus H200", "plan --help"])
def test_a_full_disk_behind_the_output(command: str) -> None:
    shell = f'"{sys.executable}" -m dsv4 {command} > /dev/full'
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: cannot write output: no space left on device\n"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own with 16 kB of room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let us mount")
    try:
        (disk / "old").write_bytes(bytes(48 << 10))
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_init_on_a_full_disk_leaves_nothing(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the weights alone: config.json comes last."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    (disk / "empty").mkdir()
    for name in ("new", "empty"):
        assert "cannot be written" in refused(dsv4("init", disk / name))
    assert sorted(path.name for path in disk.iterdir()) == ["empty", "old"]
    assert list((disk / "empty").iterdir()) == []


def test_pictures_and_pages_on_full_and_read_only_disks(model: Path, disk: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = ("compare", model, "--tokens", 5, "--plot", disk / "x.png")
    page = ("quantize", model, tmp_path / "new", "--format", "bf16", "--report", disk / "x.html")
    for command in (picture, page):
        message = refused(dsv4(*command))
        assert re.search(r"x\.\w+ cannot be written: No space left on device", message), message
        assert [path.name for path in disk.iterdir()] == ["old"]
    assert (tmp_path / "new" / "config.json").exists(), "the model itself is complete"
    shutil.rmtree(tmp_path / "new")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for command in (picture, page):
        assert f"{disk} cannot be written to; give another folder" in refused(dsv4(*command))
    assert not (tmp_path / "new").exists(), "refused before the work"


def test_a_doctor_without_room_for_its_test(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(disk))
    monkeypatch.setattr(tempfile, "tempdir", None)  # it is asked for again
    done = dsv4("doctor")
    assert done.code == 1 and done.err == ""
    assert re.search(r"fail  machine    disk: 0\.0 GB free at", done.out)
    said = " ".join(done.out.split())
    assert re.search(r"fail engine .*did not run: .*needs 6\.5\d MB, but 16\.38 kB of disk are free", said)
    assert re.search(r"\n  1\. machine, disk: free 50 MB, or set TMPDIR\n", done.out)
    assert [path.name for path in disk.iterdir()] == ["old"]


def test_a_result_that_cannot_take_its_name_leaves_no_part_of_itself(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match=r"taken cannot be written: .*Is a directory"):
        write_logits(tmp_path / "taken", {"prefill_logits": torch.zeros(2, 3)})
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_an_old_result_survives_a_failed_run(model: Path, desk: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")
    refused(dsv4("score", model, "--ids", desk / "foreign", "--prompt-len", 1, "--logits", tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_reader_that_goes_away_is_no_error(model: Path) -> None:
    shell = f'"{sys.executable}" -m dsv4 inspect "{model}" --tensors | head -n 1'
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("layers") and done.stderr == ""


def test_traceback_on_demand(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_TRACEBACK", "1")
    with pytest.raises(ConfigError, match="missing does not exist"):
        dsv4("inspect", desk / "missing")


def test_control_characters_of_a_file_name_stay_out_of_the_terminal(desk: Path) -> None:
    message = refused(dsv4("inspect", f"{desk}/\x1b[31mred\x9b"))
    assert "\x1b" not in message and "\x9b" not in message and "␛[31mred" in message


def test_damage_that_only_shows_while_computing(model: Path, tmp_path: Path) -> None:
    """Finite weights whose product overflows: an error, not a token and not a nan in a table."""
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).symlink_to(model / file)
    tensors = read_file(model / "model.safetensors")
    tensors["norm.weight"].data[:] = b"\x7f\x7f" * (len(tensors["norm.weight"].data) // 2)  # 3.4e38
    write_file(tmp_path / "model.safetensors", tensors)
    (tmp_path / "story").write_text("a story")
    assert "hold NaN or infinity" in refused(
        dsv4("generate", "--model", tmp_path, "hi", "--json", "--max-tokens", 3)
    )
    assert "the text's log-likelihood is" in refused(dsv4("score", tmp_path, "--text", tmp_path / "story"))
    assert json.loads(dsv4("inspect", tmp_path, "--json").out)["bytes"] > 0


def test_bench_without_triton() -> None:
    """As `make demo` installs it on a machine without a GPU: there the GPU is what is missing."""
    code = "import sys, torch; sys.modules['triton'] = None; torch.cuda.is_available = lambda: {has_gpu}; "
    code += "sys.argv = ['dsv4', 'bench', 'decode', '--synthetic', 'flash']; "
    code += "from dsv4.cli.main import main; main()"
    for has_gpu, says in ((False, "sees no CUDA GPU; run it on a machine"), (True, "pip install triton")):
        done = process(["-c", code.format(has_gpu=has_gpu)], module=None)
        assert says in refused(Done(done.returncode, done.stdout, done.stderr))
