"""Kernels that are loaded in threads: each gets its own launcher."""

import importlib.util
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton

from dsv4.kernels.common.ahead import _one_importer, compile_ahead

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


@pytest.fixture
def impatient() -> Iterator[None]:
    """Threads change hands as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


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
