"""The target folder of `dsv4 quantize`: shards, interruptions, refusals, full disks, and what is printed."""

import fcntl
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
from checkpoints import read_file
from cli_support import ROOT, Terminal, dsv4, ok, refused

from dsv4.errors import CheckpointError, ConfigError
from dsv4.lab.quantize import run as running
from dsv4.lab.quantize.job import RECORD, WORK, Job, examine
from dsv4.lab.quantize.plan import Options
from dsv4.lab.quantize.run import Quantizer
from dsv4.weights.load import Checkpoint
from dsv4.weights.reader import INDEX

SHARD = 60_000


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def run(source: Path, target: Path, format: str = "nvfp4", **options: Any) -> tuple[dict[str, Any], bool]:
    quantizer = Quantizer.prepare(source, target, Options(format, **{"shard_bytes": SHARD, **options}), 2)
    quantizer.check()
    return quantizer.write()


def test_shards_and_index(made: Callable[[str], Path], tmp_path: Path) -> None:
    report, _ = run(made("official"), tmp_path / "new", mtp=True)
    files = sorted(tmp_path.glob("new/*.safetensors"))
    assert len(files) == report["shards"] > 10
    assert [f.name for f in files] == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    index = json.loads((tmp_path / "new" / INDEX).read_text())
    stored = {name: (file.name, len(t.data)) for file in files for name, t in read_file(file).items()}
    assert index["weight_map"] == {name: file for name, (file, _) in stored.items()}
    assert (
        index["metadata"]["total_size"] == sum(size for _, size in stored.values()) == report["bytes_after"]
    )
    for name, (file, _) in stored.items():
        if name.endswith(".weight_scale_2"):  # a pair that shares a scale, and a weight with its scales
            assert stored[name.replace(".w1.", ".w3.")][0] == file == stored[name.removesuffix("_scale_2")][0]
    whole, _ = run(made("official"), tmp_path / "whole", mtp=True, shard_bytes=10**9)
    assert [p.name for p in tmp_path.glob("whole/*.safetensors")] == ["model.safetensors"]
    assert not (tmp_path / "whole" / INDEX).exists()
    assert read_file(tmp_path / "whole" / "model.safetensors") == {
        name: t for file in files for name, t in read_file(file).items()
    }
    assert whole["tensors"] == report["tensors"] and whole["components"] == report["components"]
    Checkpoint.open(tmp_path / "new").load(dense=True)


def test_small_files_come_along(made: Callable[[str], Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(made("official"), source)
    for name in ("tokenizer.json", "LICENSE", "inference/model.py", "encoding/a/b.txt"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    for name in (".git/config", ".hidden", "hf_quant_config.json", "inference/__pycache__/x.pyc"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("{}")
    for name in ("expected.safetensors", "pytorch_model.bin"):
        (source / name).write_bytes(b"weights of something else")
    (source / "gone").symlink_to(tmp_path / "nowhere")
    (source / "linked.txt").symlink_to(source / "LICENSE")
    report, _ = run(source, tmp_path / "new", "fp8")
    copied = {"tokenizer.json", "LICENSE", "inference/model.py", "encoding/a/b.txt", "linked.txt"}
    written = set(contents(tmp_path / "new"))
    assert {n for n in written if not n.endswith(".safetensors")} == copied | {INDEX, "config.json", RECORD}
    assert (tmp_path / "new" / "inference" / "model.py").read_text() == "inference/model.py"
    assert report["notes"] == [
        "not copied, as they are no small files: expected.safetensors, gone, pytorch_model.bin"
    ]


class Stop(BaseException):
    """Ends a run the way nothing in it expects."""


def test_finished_shards_are_not_written_again(
    made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(made("bf16"), tmp_path / "whole")
    put = Job.put
    calls = []

    def stopping(self: Job, name: Path | str, content: bytes) -> None:
        calls.append(name)
        if len(calls) == 6:
            raise Stop
        put(self, name, content)

    monkeypatch.setattr(Job, "put", stopping)
    with pytest.raises(Stop):
        run(made("bf16"), tmp_path / "new")
    monkeypatch.undo()
    names = {path.name for path in (tmp_path / "new").iterdir()}
    shards = sorted(names - {WORK})
    assert len(shards) == 4 and not list((tmp_path / "new" / WORK).glob("*.part"))
    with pytest.raises((ConfigError, CheckpointError)):
        Checkpoint.open(tmp_path / "new")
    before = {name: (tmp_path / "new" / name).stat() for name in shards}
    total: list[int] = []
    quantizer = Quantizer.prepare(made("bf16"), tmp_path / "new", Options("nvfp4", shard_bytes=SHARD))
    report, is_new = quantizer.write(lambda done, all: total.append(all))
    for name, status in before.items():
        now = (tmp_path / "new" / name).stat()
        assert (now.st_ino, now.st_mtime_ns) == (status.st_ino, status.st_mtime_ns), name
    assert is_new and contents(tmp_path / "new") == contents(tmp_path / "whole")
    everything = sum(shard.source_bytes for shard in quantizer.plan.shards)
    assert set(total) == {everything - sum(s.source_bytes for s in quantizer.plan.shards[:4])}
    assert report == json.loads((tmp_path / "whole" / RECORD).read_text())["report"]
    # A third run finds nothing to do and says the same.
    again, is_new = run(made("bf16"), tmp_path / "new")
    assert again == report and not is_new
    (tmp_path / "new" / shards[0]).unlink()
    with pytest.raises(ConfigError, match=rf"{shards[0]} is missing or of another size"):
        run(made("bf16"), tmp_path / "new")


def test_a_shard_that_is_not_what_it_should_be_is_made_again(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    run(made("official"), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "new")
    job = Job(tmp_path / "new", json.loads((tmp_path / "new" / RECORD).read_text())["fingerprint"])
    with job:
        for name in ("config.json", RECORD):
            (tmp_path / "new" / name).unlink()
    shard = sorted(tmp_path.glob("new/*.safetensors"))[1]
    (tmp_path / "new" / WORK / f"{shard.name}.json").write_text("[]")
    shard.write_bytes(shard.read_bytes()[:-1])
    run(made("official"), tmp_path / "new")
    assert contents(tmp_path / "new") == contents(tmp_path / "whole")


def command(source: Path, target: Path) -> list[str]:
    arguments = ["quantize", source, target, "--format", "nvfp4", "--shard-gb", SHARD / 1e9, "--threads", 2]
    return [sys.executable, "-m", "dsv4", *map(str, arguments)]


@pytest.mark.parametrize("kills", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_killed_at_random_moments(made: Callable[[str], Path], tmp_path: Path, kills: int) -> None:
    """kill -9 after work has begun, again and again; then a whole run. As if nothing had happened."""
    source, target = made("bf16"), tmp_path / "new"
    run(source, tmp_path / "whole")
    chance = random.Random(20261115)
    kept: dict[str, os.stat_result] = {}

    def check_kept() -> None:
        for name, status in kept.items():
            now = (target / name).stat()
            assert (now.st_ino, now.st_mtime_ns) == (status.st_ino, status.st_mtime_ns), name

    for _ in range(kills):
        start, lock = time.time_ns(), target / WORK / "lock"
        victim = subprocess.Popen(command(source, target), cwd=ROOT, stderr=subprocess.PIPE)
        while victim.poll() is None and not (lock.exists() and lock.stat().st_mtime_ns >= start):
            time.sleep(0.001)
        time.sleep(chance.random() * 0.15)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        check_kept()
        kept = {p.name: p.stat() for p in target.glob("*.safetensors")}
        for name in kept:
            assert (target / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    run(source, target)
    check_kept()
    assert contents(target) == contents(tmp_path / "whole")


def test_a_lock_that_was_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run ends, and removes its work, as another has opened the lock and a third is yet to come."""
    first, locks = Job(tmp_path / "new", "same"), fcntl.flock
    first.__enter__()

    def end_and_lock(file: BinaryIO, how: int) -> None:
        monkeypatch.undo()
        first.__exit__(ValueError())
        locks(file, how)

    monkeypatch.setattr(fcntl, "flock", end_and_lock)
    with (
        Job(tmp_path / "new", "same"),
        pytest.raises(ConfigError, match="another run is writing"),
        Job(tmp_path / "new", "other"),
    ):
        pass


def test_only_one_run_at_a_time(made: Callable[[str], Path], tmp_path: Path) -> None:
    quantizer = Quantizer.prepare(made("official"), tmp_path / "new", Options("nvfp4"), 1)
    with (
        Job(tmp_path / "new", quantizer.fingerprint),
        pytest.raises(ConfigError, match="another run is writing"),
    ):
        quantizer.write()


def test_a_run_that_another_one_finished_meanwhile(
    made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked before the other was done and got the lock after: nothing is written twice."""
    report, _ = run(made("official"), tmp_path / "new")
    before = {path: path.stat() for path in (tmp_path / "new").iterdir()}
    looks = iter(["resumed"])
    monkeypatch.setattr(running, "examine", lambda *place: next(looks, None) or examine(*place))
    quantizer = Quantizer.prepare(made("official"), tmp_path / "new", Options("nvfp4", shard_bytes=SHARD), 2)
    assert quantizer.write() == (report, False)
    assert {path: path.stat().st_ino for path in (tmp_path / "new").iterdir()} == {
        path: status.st_ino for path, status in before.items()
    }


def test_a_disk_that_takes_no_more_changes(
    made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error that ended the run is told, not that clearing up failed too."""

    def fixed(*arguments: Any, **options: Any) -> None:
        raise OSError(30, "Read-only file system")

    source = made("official")  # before anything is limited
    monkeypatch.setattr(Path, "unlink", fixed)
    with limited_files(40_000):
        message = refused(dsv4("quantize", source, tmp_path / "new", "--format", "nvfp4"))
    assert "new/model.safetensors cannot be written: File too large" in message


def test_other_options_do_not_continue_a_run(made: Callable[[str], Path], tmp_path: Path) -> None:
    quantizer = Quantizer.prepare(made("official"), tmp_path / "new", Options("nvfp4"), 1)
    with Job(tmp_path / "new", quantizer.fingerprint):
        pass
    for source, options in ((made("official"), {"mtp": True}), (made("fp8"), {})):
        with pytest.raises(ConfigError, match="unfinished run with other options or another source"):
            run(source, tmp_path / "new", shard_bytes=5 * 10**9, **options)
    run(made("official"), tmp_path / "new", shard_bytes=5 * 10**9)
    with pytest.raises(ConfigError, match="is not empty; give a new folder"):
        run(made("official"), tmp_path / "new", shard_bytes=5 * 10**9, mtp=True)


def test_source_that_changed_meanwhile(made: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(made("official"), tmp_path / "source")
    quantizer = Quantizer.prepare(tmp_path / "source", tmp_path / "new", Options("nvfp4"), 1)
    with Job(tmp_path / "new", quantizer.fingerprint):
        pass
    os.utime(tmp_path / "source" / "model.safetensors", (1, 1))
    with pytest.raises(ConfigError, match="another source"):
        run(tmp_path / "source", tmp_path / "new", shard_bytes=5 * 10**9)


REFUSED = {
    "quantize": "Missing",
    "quantize {model}": "Missing argument 'DST'",
    "quantize {model} {new}": "Missing option '--format'",
    "quantize {model} {new} --format int4": "format is 'int4', expected one of nvfp4, mxfp4, fp8, bf16",
    "quantize {model} {new} --format nvfp4 --scope some": "scope is 'some', expected one of experts, linears",
    "quantize {model} {new} --format nvfp4 --recipe x": "recipe is 'x', expected one of auto, cast, requant",
    "quantize {model} {new} --format nvfp4 --rest x": "rest is 'x', expected one of keep, official",
    "quantize {model} {new} --format fp8 --least-squares": "while rounding to nvfp4 or mxfp4",
    "quantize {model} {new} --format nvfp4 --recipe cast --least-squares": "leave it out",
    "quantize {model} {new} --format nvfp4 --shard-gb 0": "shard-gb is 0.0, expected more than 0",
    "quantize {model} {new} --format nvfp4 --shard-gb nan": "shard-gb is nan",
    "quantize {model} {new} --format nvfp4 --threads 0": "threads is 0, expected 1 to 32",
    "quantize {model} {new} --format nvfp4 --report {desk}/none/x.html": "expected the name of a file in an",
    "quantize {model} {new} --format nvfp4 --report {desk}/x.txt": "expected a name that ends in .html",
    "quantize {desk}/missing {new} --format nvfp4": "/missing does not exist; give a model folder",
    "quantize {desk}/full {new} --format nvfp4": "config.json does not exist",
    "quantize {model} {model} --format nvfp4": "is the source itself; give a new folder",
    "quantize {model} {model}/below --format nvfp4": "lie inside each other",
    "quantize {model} {above} --format nvfp4": "lie inside each other",
    "quantize {model} {desk}/full --format nvfp4": "/full is not empty; give a new folder",
    "quantize {model} {desk}/file --format nvfp4": "/file is a file; give a new folder",
    "quantize {model} {desk}/file/below --format nvfp4": "/file is not a folder",
    "quantize {bf16} {new} --format nvfp4 --recipe cast": "would not be exact for layers.0.ffn.experts.0.w1",
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
def test_one_sentence_and_nothing_left(line: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    (tmp_path / "file").touch()
    model = made("official")
    places = {
        "model": model,
        "bf16": made("bf16"),
        "above": model.parent,
        "desk": tmp_path,
        "new": tmp_path / "new",
    }
    before = contents(tmp_path)
    message = refused(dsv4(*(part.format(**places) for part in line.split())))
    assert REFUSED[line] in message
    assert contents(tmp_path) == before and not (tmp_path / "new").exists()


def test_free_disk_is_checked_first(
    made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made("official")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10_000))
    message = refused(dsv4("quantize", source, tmp_path / "a" / "new", "--format", "nvfp4"))
    assert "of disk are free; make room or give a folder on another disk" in message
    assert not (tmp_path / "a").exists()


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """Inside, a file that grows further is an I/O error, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_fills_up(made: Callable[[str], Path], tmp_path: Path) -> None:
    """In the first shard nothing is left; later, finished shards stay, and the run can go on."""
    arguments = ["quantize", made("official"), tmp_path / "new", "--format", "nvfp4", "--threads", 2]
    with limited_files(40_000):
        message = refused(dsv4(*arguments))
    assert re.match(r"error: \S+/new/model.safetensors cannot be written: File too large\n", message)
    assert not (tmp_path / "new").exists()
    arguments += ["--shard-gb", 0.00002]
    with limited_files(40_000):
        message = refused(dsv4(*arguments))
    assert re.search(r"shard\(s\) are finished: make room and run the same command again", message)
    left = {p.name for p in (tmp_path / "new").iterdir()}
    assert left - {WORK} and all(name == WORK or name.endswith(".safetensors") for name in left)
    assert not list((tmp_path / "new" / WORK).glob("*.part"))
    ok(*arguments)
    Checkpoint.open(tmp_path / "new").load(dense=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_small_and_read_only_disks(made: Callable[[str], Path], tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let us mount")
    try:
        arguments = ["quantize", made("official"), disk / "new", "--format", "nvfp4"]
        assert "but 307.20 kB of disk are free; make room" in refused(dsv4(*arguments))
        with pytest.MonkeyPatch.context() as patch:  # somebody else fills it up after the check
            patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
            message = refused(dsv4(*arguments))
        assert message.endswith("cannot be written: No space left on device\n")
        assert list(disk.iterdir()) == []
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        message = refused(dsv4(*arguments))
        assert "cannot be made" in message and list(disk.iterdir()) == []
        assert "cannot be written" in refused(dsv4(*arguments[:2], disk, *arguments[3:]))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)
        assert not {"src", "href", "srcset", "onclick"} & {name for name, _ in attrs}

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_what_is_printed_and_the_page(made: Callable[[str], Path], tmp_path: Path) -> None:
    source = tmp_path / "<b>&source"
    shutil.copytree(made("bf16"), source)
    arguments = [
        "quantize",
        source,
        tmp_path / "new",
        "--format",
        "nvfp4",
        "--report",
        tmp_path / "page.html",
    ]
    text = ok(*arguments)
    assert re.search(
        r"^routed experts +27 +bf16 → nvfp4 +\S+ kB +0\.09\d+ +0\.99\d+ +0\.\d+ %$", text, re.MULTILINE
    )
    assert re.search(r"^attention +15 +kept +\S+ \S+ *$", text, re.MULTILINE)
    assert text.replace("\n", "").endswith("page.html: written")
    again = dsv4(*arguments, "--tensors")
    assert again.code == 0 and "was complete already; nothing was written" in again.err
    assert re.search(
        r"^layers\.0\.ffn\.experts\.0\.w1 +bf16 → nvfp4 +rounded +error 0\.09\d+$", again.out, re.MULTILINE
    )
    result = json.loads(ok(*arguments, "--json"))
    assert result["is_new"] is False and result["folder"] == str(tmp_path / "new")
    row = next(row for row in result["components"] if row["how"] == "rounded")
    assert row["component"] == "routed experts" and row["values"] == 3 * 3 * 3 * 128 * 128
    assert row["bytes_before"] == 2 * row["values"] and row["bytes_after"] == row["values"] * 9 // 16 + 27 * 8
    page = (tmp_path / "page.html").read_text()
    assert Page(page).tags.count("svg") == 4 and "http" not in page and "<b>&source" not in page
    assert "&lt;b&gt;&amp;source" in page
    ok(
        "quantize",
        made("official"),
        tmp_path / "cast",
        "--format",
        "nvfp4",
        "--report",
        tmp_path / "exact.html",
    )
    page = (tmp_path / "exact.html").read_text()
    assert Page(page).tags.count("svg") == 2 and "every value decodes to what it was" in page
    (tmp_path / "taken").mkdir()
    message = refused(dsv4(*arguments[:-1], tmp_path / "taken"))
    assert "expected the name of a file" in message


def test_help_has_examples() -> None:
    text = " ".join(ok("quantize", "--help").split())
    for words in (
        "--format nvfp4 --rest official",
        "--least-squares",
        "when the same command is given again",
    ):
        assert words in text


def test_progress_on_a_terminal_and_ctrl_c(made: Callable[[str], Path], tmp_path: Path) -> None:
    arguments = ("quantize", made("bf16"), tmp_path / "new", "--format", "nvfp4", "--shard-gb", 0.00002)
    with Terminal(*arguments) as terminal:
        terminal.expect("writing new")
        terminal.type("\x03")
        assert terminal.wait() != 0
    assert not list(tmp_path.glob("new/*.part")) and not (tmp_path / "new" / "config.json").exists()
    ok(*arguments)
    Checkpoint.open(tmp_path / "new").load(dense=False)
