"""`dsv4 build`: kernels compiled without a GPU are those that a start looks for."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4.errors import ConfigError, DeviceError
from dsv4.gpu import build
from dsv4.lab.gpus import capability_of

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from cli_support import dsv4 as run
from cli_support import ok, refused

needs_compiler = pytest.mark.skipif(
    build._nvrtc() is None and build._nvcc() is None, reason="neither NVRTC nor nvcc was found"
)
FEW = {name: build.SOURCES[name] for name in ("gpu/ceiling", "exchange/decode")}


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sources stand for all, which take minutes (test_cuda_compiles.py compiles each)."""
    monkeypatch.setattr(build, "SOURCES", FEW)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dsv4" / "kernels"


@needs_compiler
def test_the_first_start_finds_what_was_built(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.loads(ok("build", "--for", "h200", "--for", "rtx-pro-6000", "--for", "sm_90a", "--json"))
    assert said["folder"] == str(few) and len(said["files"]) == 4
    assert sorted(file.split("-")[-2] for file in said["files"]) == ["sm_120a", "sm_120a", "sm_90a", "sm_90a"]
    for file in said["files"]:
        assert (few / file).read_bytes().startswith(b"\x7fELF")

    def refuse(source: Path, arch: str) -> bytes:
        raise AssertionError(f"{source.name} is compiled a second time")

    found = build.compiler()
    monkeypatch.setattr(build, "compiler", lambda: replace(found, compile=refuse))
    for arch in ("90a", "120a"):
        assert {path.name for path in build.compile_all(arch)} < set(said["files"])


@needs_compiler
def test_a_source_that_does_not_compile_ends_it(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, arch: str) -> bytes:
        raise DeviceError(f"{source.name} is wrong")

    found = build.compiler()
    monkeypatch.setattr(build, "compiler", lambda: replace(found, compile=fail))
    assert "is wrong" in run("build", "--for", "h200").err
    assert not few.exists()


def test_without_a_gpu_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "dsv4 build --for h200" in refused(run("build"))
    built = "kernels are built for h100, h200, b200, b300, rtx-pro-6000, rtx-5090"
    assert built in refused(run("build", "--for", "a100"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("H200", 90),
        ("h-100", 90),
        ("sm_90a", 90),
        ("100a", 100),
        ("b300", 103),
        ("RTX PRO 6000", 120),
        ("sm_121a", 121),
    ],
)
def test_names_of_gpus(text: str, found: int) -> None:
    assert capability_of(text) == found


@pytest.mark.parametrize("text", ["", "sm_80", "a100", "sm_900000000000", "hopper"])
def test_what_is_not_built_for(text: str) -> None:
    with pytest.raises(ConfigError, match="kernels are built for"):
        capability_of(text)
