"""A kernel's own source compiled for the CPU: tests/kernels/NAME_twin.cpp on the emulator."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dsv4.gpu.build import INCLUDES, PACKAGE
from tests.support.once import folder_of_run, made_once

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on the PATH")
_HERE = Path(__file__).parents[1] / "kernels"
# The twin of each source, and the twins that take long to compile.
TWINS = {
    **{"linear/matvec": "matvec", "linear/prefill_pack": "pack", "linear/prefill_unpack": "unpack"},
    **{f"linear/prefill_sm90_{format}": "product_16" for format in ("nvfp4", "mxfp4", "fp8", "bf16")},
    **{f"linear/prefill_sm90_a8_{format}": "product_8" for format in ("mxfp4", "fp8")},
    **{"attention/decode": "attention", "attention/prefill_sm90": "attend"},
    **{"index/decode": "index", "index/decode_select": "choose", "index/prefill_queries": "queries"},
    **{"mhc/decode_open": "exchange", "mhc/decode_mix": "mix", "mhc/prefill_sm90": "streams"},
    **{"exchange/decode": "exchange", "route/decode": "route", "sample/decode": "sample"},
    **{"rows/quantize": "round"},
}
LEVELS = {"matvec": "-Og", "product_16": "-Og", "product_8": "-Og", "attend": "-Og"}


def of_source(source: str, folder: Path) -> ctypes.CDLL:
    """The twin of a source, named as build.py names it."""
    name = TWINS[source]
    loaded = build(name, LEVELS.get(name, "-O2"), folder)
    if hasattr(loaded, "launch"):
        loaded.launch.restype = ctypes.c_char_p
    return loaded


def twin_of(name: str, level: str = "-O2", **results: Any) -> Any:
    """A module's fixture: NAME_twin.cpp, loaded; and what its functions return, where that is no int. `level`
    of optimisation: where compiling takes longer than running, a low one."""

    @pytest.fixture(scope="module", name="twin")
    def twin(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
        loaded = build(name, level, folder_of_run(tmp_path_factory, "twins"))
        for function, result in results.items():
            getattr(loaded, function).restype = result
        return loaded

    return twin


@cache
def build(name: str, level: str, folder: Path) -> ctypes.CDLL:
    # Plain products and sums, as IEEE 754 has them; longjmp between stacks is what the emulator is about.
    flags = [
        "-std=c++17",
        "-ffp-contract=off",
        "-U_FORTIFY_SOURCE",
        "-fPIC",
        "-w",
        *INCLUDES,
        f"-I{PACKAGE / 'ops'}",
        f"-I{_HERE}",
    ]
    # Twins of one process each have the emulator's variables for themselves.
    flags.append("-fno-gnu-unique")
    # Every load and store calls a function: of races.cpp, not of a library.
    hooks = ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"]

    def make(out: Path) -> None:
        compiled = []
        for part, how in {f"{name}_twin": [level, *hooks], "races": ["-O2"]}.items():
            compiled.append(out.with_name(f"{name}{level}.{part}.o"))
            _run("g++", *how, *flags, "-c", _HERE / f"{part}.cpp", "-o", compiled[-1])
        # Functions call each other directly: a hook is called at every access.
        _run("g++", "-shared", "-Wl,-Bsymbolic", *compiled, "-o", out)

    return ctypes.CDLL(str(made_once(folder / f"{name}{level}.so", make)))


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def at(tensor: Tensor | None) -> ctypes.c_void_p:
    assert tensor is None or tensor.is_contiguous()
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@contextmanager
def unfinished(twin: ctypes.CDLL, *tensors: Tensor) -> Iterator[None]:
    """Inside, a launch finds noise in these until it has waited, as if earlier ones were still writing them,
    and may not write them before. Every thread has to wait, once."""
    for tensor in tensors:
        twin.expect(at(tensor), ctypes.c_size_t(tensor.nbytes))
    try:
        yield
    finally:
        twin.expect(None, ctypes.c_size_t(0))


def as_one(given: tuple[Any, ...]) -> Any:
    """A launch's arguments as a twin takes them: a structure, or one of several."""
    if len(given) == 1:
        return ctypes.byref(given[0])
    values = [ctypes.c_void_p(it.data_ptr()) if isinstance(it, Tensor) else it for it in given]
    fields = [(f"_{i}", type(value)) for i, value in enumerate(values)]
    return ctypes.byref(type("All", (ctypes.Structure,), {"_fields_": fields})(*values))
