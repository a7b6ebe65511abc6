"""Every CUDA source compiles for Hopper on a machine without a GPU, so that a broken kernel cannot land."""

import shutil

import pytest

from dsv4.errors import DeviceError
from dsv4.kernels import build

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")


@needs_nvcc
@pytest.mark.parametrize("name", build.SOURCES)
def test_compiles_for_hopper(name: str) -> None:
    path = build.compile_source(name, "90a")
    assert path.stat().st_size > 10_000
    assert build.compile_source(name, "90a") == path, "the second time it comes from the cache"


def test_every_source_is_listed() -> None:
    assert {path.stem for path in build.HERE.glob("*.cu")} == set(build.SOURCES)


@needs_nvcc
def test_a_broken_source_is_one_sentence(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "broken.cu").write_text("__global__ void f() { this is not C++; }\n")
    monkeypatch.setattr(build, "HERE", tmp_path)
    with pytest.raises(DeviceError, match=r"nvcc could not compile broken\.cu for sm_90a: .*error"):
        build.compile_source("broken", "90a")


def test_a_missing_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build.Path, "exists", lambda self: False)
    with pytest.raises(DeviceError, match=r"nvcc was not found .*use --device cpu"):
        build.compiler()
