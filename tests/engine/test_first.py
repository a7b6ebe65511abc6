"""The first start on a GPU that nobody has measured: ops are examined once, and what differed is refused."""

import errno
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from dsv4 import identity
from dsv4.config import EngineConfig
from dsv4.device import Device
from dsv4.engine import first, proof
from dsv4.errors import DeviceError
from dsv4.ops.agree import Verdict

B200 = proof.Machine("NVIDIA B200", 100, "driver 580.1", "0.1.0", "2.11.0", "3.6.0", "a digest")
RIGHT = Verdict("linear.gpu on cuda", text="18 cases, relative error at most 3.0e-03")
WRONG = Verdict("experts.gpu on cuda", "routed (two of five): relative error 1.0e+00")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_what_held_is_remembered_for_this_machine_alone() -> None:
    assert proof.is_needed(B200)
    assert first.conclude(B200, [RIGHT]) == ""
    assert not proof.is_needed(B200)
    others = ({"gpu": "NVIDIA B100"}, {"driver": "driver 590.1"}, {"dsv4": "0.2.0"}, {"triton": "3.7.0"})
    for other in (*others, {"code": "another digest"}):
        assert proof.is_needed(replace(B200, **other)), other
    assert "linear.gpu" in B200.path.read_text()


def test_other_kernels_of_the_same_version_are_proved_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: B200.gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    there, code = tmp_path / "dsv4", identity.code()
    assert proof.describe(torch.device("cuda", 77)).code == code
    shutil.copytree(identity.PACKAGE, there, ignore=shutil.ignore_patterns("__pycache__", "models"))
    compute = partial(identity.code.__wrapped__, root=there)
    assert compute() == code
    (there / "cli" / "main.py").unlink()
    assert compute() == code, "no result depends on the commands"
    for path in (*there.rglob("*.cu"), *there.rglob("tiles.py"), *there.glob("ops/*/prefill.py")):
        before = compute()
        with path.open("a") as file:
            file.write("\n")
        assert compute() != before, path


def test_what_differs_is_refused_and_not_remembered() -> None:
    with pytest.raises(DeviceError, match=r"NVIDIA B200 .*10\.0, driver 580.* experts\.gpu .*1\.0e\+00"):
        first.conclude(B200, [RIGHT, WRONG])
    assert proof.is_needed(B200)


def test_a_measured_gpu_needs_no_proof() -> None:
    hopper = replace(B200, gpu="NVIDIA H200", capability=90)
    assert not proof.is_needed(hopper) and proof.is_needed(hopper, known=())


def test_a_folder_that_cannot_be_written_is_said(cache: Path) -> None:
    cache.joinpath("dsv4").write_text("in the way")
    assert "cannot be written" in first.conclude(B200, [RIGHT])


def test_a_full_disk_keeps_no_part_of_a_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert "cannot be written (No space left on device)" in first.conclude(B200, [RIGHT])
    assert [*cache.glob("dsv4/proved/*")] == []


def test_a_cpu_is_not_asked() -> None:
    def never(what: str) -> None:
        raise AssertionError(what)

    assert not first.ensure(EngineConfig(device="cpu"), never, known=())


def test_an_engine_refuses_what_nobody_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is a stub: there is no Blackwell here."""
    monkeypatch.setattr(proof, "describe", lambda device: B200)
    with pytest.raises(DeviceError, match=r"NVIDIA B200 .* no op has been held .* run dsv4 doctor once"):
        proof.check(torch.device("cuda"))
    first.conclude(B200, [RIGHT])
    proof.check(torch.device("cuda"))


def test_the_first_start_examines_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is run there is compare_all; here it is a stub, as is the GPU."""
    found, said = [[RIGHT, WRONG], [RIGHT]], []
    monkeypatch.setattr(proof, "describe", lambda device: B200)
    monkeypatch.setattr(first, "compare_all", lambda device: found.pop(0))
    there = Device("cuda", "cuda:0", B200.gpu, memory_bytes=0, why="a stub")
    monkeypatch.setattr(Device, "choose", lambda wanted: there)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = EngineConfig(gpus="1")
    with pytest.raises(DeviceError, match="differ from the reference"):
        first.ensure(config, said.append)
    assert first.ensure(config, said.append) and not first.ensure(config, said.append)
    assert not found and [what[:28] for what in said] == ["first start on NVIDIA B200: "] * 2


@pytest.mark.gpu
def test_on_this_gpu_as_if_it_were_new() -> None:
    """The very path: this GPU's compute capability is forgotten."""
    said: list[str] = []
    config = EngineConfig(device="cuda")
    assert first.ensure(config, said.append, known=()) and len(said) == 1
    assert not first.ensure(config, said.append, known=()) and len(said) == 1
    proof.check(torch.device("cuda"), known=())
