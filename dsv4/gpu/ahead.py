"""Start: compiles Triton kernels before they are needed.

`compile_ahead` walks through the given work once without launching a Triton kernel, notes what it would have
launched, and compiles and loads all of that in threads. Knows nothing of models.
"""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import triton

from dsv4.errors import DeviceError

# Kernels compiled so far, all of them, and the name of the last one.
Compiled = Callable[[int, int, str], None]
# Triton's passes and ptxas run without the interpreter's lock; the rest does not, so more threads are idle.
MAX_THREADS = 16
# What is replaced in Triton and torch meanwhile is the process's: engines of several threads take turns.
_turn = threading.Lock()


def check_triton() -> None:
    """Refuse, before anything is loaded, a machine on which Triton cannot launch."""
    try:
        triton.runtime.driver.active.get_current_device()
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        raise DeviceError(
            f"Triton {triton.__version__} cannot launch kernels here ({error}); besides the GPU it needs a C "
            "compiler (gcc or clang) and Python's headers; see dsv4 doctor, or use --device cpu"
        ) from error


@contextmanager
def _zeros() -> Iterator[None]:
    """New tensors hold zeros: what an unlaunched kernel should have written is then at least in range.

    By replacing functions: a TorchDispatchMode would import all of torch's compiler, 5 s at every start.
    """
    before = (torch.empty, torch.empty_like, torch.Tensor.new_empty)

    def zeroed(make: Any) -> Any:
        return lambda *args, **kwargs: make(*args, **kwargs).zero_()

    torch.empty, torch.empty_like, torch.Tensor.new_empty = map(zeroed, before)  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.empty, torch.empty_like, torch.Tensor.new_empty = before  # type: ignore[method-assign]


@contextmanager
def noting(note: Callable[[Any, str, str], None]) -> Iterator[None]:
    """Inside, a launch of a kernel that is not compiled yet calls `note` instead, with the Triton function,
    the key of the variant and all that its `preload` wants to know. Other threads launch as before."""
    runtime, ours = triton.knobs.runtime, threading.get_ident()
    before = runtime.jit_cache_hook

    def hook(*, key: str, fn: Any, compile: dict[str, Any], **more: Any) -> bool:
        if threading.get_ident() != ours:
            return bool(before and before(key=key, fn=fn, compile=compile, **more))
        note(fn.jit_function, key, compile["specialization_data"])
        return True

    runtime.jit_cache_hook = hook
    try:
        with _zeros():
            yield
    finally:
        runtime.jit_cache_hook = before


@contextmanager
def _one_parser() -> Iterator[None]:
    """Inside, Triton parses the source of one function at a time: CPython 3.11 and 3.12 count the depth of a
    syntax tree for all threads together, and one of two that parse at once raises a SystemError."""
    kind, lock = triton.runtime.jit.JITCallable, threading.Lock()
    before = kind.parse

    def parse(function: Any) -> Any:
        with lock:
            return before(function)

    kind.parse = parse
    try:
        yield
    finally:
        kind.parse = before


@contextmanager
def _one_importer() -> Iterator[None]:
    """Inside, Triton imports one launcher at a time, and each is a copy of its own.

    Launchers are extension modules that all have one name. When one is imported a second time, CPython
    writes it over the module of that name that came last, and returns that. Of two threads that did so at
    once, one got the other's launcher, and called its kernel with arguments in another kernel's form.
    """
    build, lock = triton.runtime.build, threading.Lock()
    before = build._load_module_from_path

    def load(name: str, path: str) -> SimpleNamespace:
        with lock:
            return SimpleNamespace(**vars(before(name, path)))

    build._load_module_from_path = load
    try:
        yield
    finally:
        build._load_module_from_path = before


def compile_ahead(run: Callable[[], None], progress: Compiled | None = None) -> int:
    """Compile and load the Triton kernels that `run` launches; -> how many variants were new here.

    `run` is called once, with zeros for results. It must launch the same variants whatever the values.
    """
    with _turn:
        return _compile_ahead(run, progress)


def _compile_ahead(run: Callable[[], None], progress: Compiled | None) -> int:
    found: dict[tuple[Any, str], str] = {}
    with noting(lambda function, key, data: found.__setitem__((function, key), data)):
        run()
    if not found:
        return 0
    on_gpu = torch.cuda.is_available()
    threads = min(MAX_THREADS, os.cpu_count() or 1, len(found))
    device = torch.cuda.current_device() if on_gpu else None

    def begin() -> None:
        if device is not None:
            torch.cuda.set_device(device)  # a thread starts with device 0

    with _one_parser(), _one_importer(), ThreadPoolExecutor(threads, "compile", begin) as pool:
        jobs = {pool.submit(_make, fn, data, on_gpu): fn.__name__ for (fn, _), data in found.items()}
        try:
            for done, job in enumerate(as_completed(jobs), 1):
                try:
                    job.result()
                # Triton raises errors of many kinds, ptxas and the C compiler among their sources.
                except Exception as error:
                    raise DeviceError(f"Triton could not compile {jobs[job]}: {error}") from error
                if progress is not None:
                    progress(done, len(jobs), jobs[job])
        finally:
            pool.shutdown(cancel_futures=True)
    return len(jobs)


def _make(function: Any, data: str, load: bool) -> None:
    compiled = function.preload(data)
    if load:
        assert compiled.run is not None  # asking for it loads the kernel and builds its launcher
