"""Kernels that are loaded in threads: each gets its own launcher."""

import importlib.util
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton

from dsv4.gpu.ahead import _one_importer, compile_ahead, noting
from tests.support.compiling import fake_hopper

NAME = "launcher_of_a_test"
# As Triton's launchers: a module of the old kind, which cannot be made twice.
SOURCE = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* none) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "launcher_of_a_test", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launcher_of_a_test(void) { return PyModule_Create(&definition); }
"""
COUNT = 8


def test_threads_get_their_own_launchers(tmp_path: Path, impatient: None) -> None:
    paths = []
    for number in range(COUNT):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "launcher.c").write_text(SOURCE.replace("NUMBER", str(number)))
        built = (str(folder / "launcher.c"), str(folder), [], [], [], [])
        paths.append(triton.runtime.build._build(NAME, *built))

    def load(number: int) -> bool:
        return bool(triton.runtime.build._load_module_from_path(NAME, paths[number]).launch() == number)

    try:
        with _one_importer(), ThreadPoolExecutor(COUNT) as pool:
            for _ in range(50):
                assert all(pool.map(load, list(range(COUNT)) * 8))
            kept = [triton.runtime.build._load_module_from_path(NAME, path) for path in (*paths, *paths)]
            assert [module.launch() for module in kept] == [*range(COUNT), *range(COUNT)]
    finally:
        sys.modules.pop(NAME, None)


def many_kernels(folder: Path) -> ModuleType:
    """add_1 .. add_16, each with as many numbers."""
    lines = ["import triton", "import triton.language as tl"]
    for n in range(1, 17):
        names = [f"a{i}" for i in range(n)]
        lines += [
            "",
            "",
            f"@triton.jit(do_not_specialize={names})",
            f"def add_{n}(out, {', '.join(names)}, X: tl.constexpr):",
        ]
        lines += [f"    tl.store(out, X + {' + '.join(names)})"]
    (folder / "many.py").write_text("\n".join(lines) + "\n")
    spec = importlib.util.spec_from_file_location("many", folder / "many.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("triton.knobs.cache.dir", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with fake_hopper():
        yield


def test_two_engines_that_start_at_once_compile_their_own(tmp_path: Path, no_gpu: None) -> None:
    """The second begins while the first walks through its work."""
    many, out = many_kernels(tmp_path), torch.zeros(1, dtype=torch.int32)
    empty, is_second_under_way, has_first_launched = torch.empty, threading.Event(), threading.Event()
    seen: dict[str, list[str]] = {"first": [], "second": []}

    def first() -> None:
        second.start()
        is_second_under_way.wait(0.5)
        for n in (1, 2, 3):
            getattr(many, f"add_{n}")[(1,)](out, *range(n), X=0)
        has_first_launched.set()

    def begin_second() -> None:
        def run() -> None:
            is_second_under_way.set()
            has_first_launched.wait(0.5)
            for n in (4, 5):
                getattr(many, f"add_{n}")[(1,)](out, *range(n), X=0)

        compile_ahead(run, lambda done, total, name: seen["second"].append(name))

    second = threading.Thread(target=begin_second)
    compile_ahead(first, lambda done, total, name: seen["first"].append(name))
    second.join()
    assert {who: sorted(names) for who, names in seen.items()} == {
        "first": ["add_1", "add_2", "add_3"],
        "second": ["add_4", "add_5"],
    }
    assert torch.empty is empty and triton.knobs.runtime.jit_cache_hook is None


def test_an_engine_that_runs_launches_while_another_starts(tmp_path: Path, no_gpu: None) -> None:
    many, out = many_kernels(tmp_path), torch.zeros(1, dtype=torch.int32)
    noted: list[str] = []
    with noting(lambda function, key, data: noted.append(function.__name__)), ThreadPoolExecutor(1) as other:
        many.add_1[(1,)](out, 0, X=0)
        assert other.submit(lambda: many.add_2.warmup(out, 0, 1, X=0, grid=(1,))).result() is not None
    assert noted == ["add_1"]


@pytest.mark.gpu
def test_kernels_loaded_in_threads_run_with_their_own_arguments(tmp_path: Path, impatient: None) -> None:
    """Variants of one kernel share a launcher, so all but the first are imports of a module that is there."""
    many = many_kernels(tmp_path)
    outs: dict[tuple[int, int], Any] = {}

    def run(x: int) -> None:
        for n in range(1, 17):
            outs[n, x] = torch.zeros(1, dtype=torch.int32, device="cuda")
            getattr(many, f"add_{n}")[(1,)](outs[n, x], *range(n), X=x)

    run(0)
    compile_ahead(lambda: [run(x) for x in range(1, 9)])
    for x in range(9):
        run(x)
    assert {key: out.item() for key, out in outs.items()} == {(n, x): x + sum(range(n)) for n, x in outs}
