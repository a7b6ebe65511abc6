"""Watches and forbids the compilation of kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dsv4.gpu import build

triton = pytest.importorskip("triton", reason="Triton is not installed")

# Triton keeps what it compiled by the number of the device: no other test has this one.
FAKE_DEVICE = 77


class FakeDriver:
    """A Hopper as far as Triton's launches ask before they compile; nothing can run on it."""

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return FAKE_DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def fake_hopper() -> Iterator[None]:
    """Inside, Triton launches as if there were a GPU; they get as far as compiling."""
    config = triton.runtime.driver
    before, config._active = config._active, FakeDriver()
    try:
        yield
    finally:
        config._active = before


@contextmanager
def no_compilation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, a kernel that is not compiled and loaded yet is an error, be it Triton's or CUDA C++."""

    def refuse(*, repr: str, **_: Any) -> bool:
        raise AssertionError(f"compiled after the engine was ready: {repr}")

    def refuse_load(module: Any, function: Any, name: str, *_: Any) -> None:
        raise AssertionError(f"loaded after the engine was ready: {name}")

    def refuse_source(name: str, *_: Any) -> Any:
        raise AssertionError(f"built after the engine was ready: {name}.cu")

    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "jit_cache_hook", refuse)
        patch.setattr(triton.knobs.runtime, "kernel_load_start_hook", refuse_load)
        patch.setattr(build, "compile_source", refuse_source)
        yield
