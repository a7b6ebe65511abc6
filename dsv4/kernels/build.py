"""Compiles `.cu` files with nvcc, once per source and architecture, and calls what is in them."""

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dsv4.env import cache_folder
from dsv4.errors import DeviceError

HERE = Path(__file__).parent
SOURCES = ("matvec", "unpack", "mix", "choose", "sample", "ceiling")
FLAGS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "--diag-suppress=128")


def compiler() -> Path:
    """nvcc on the PATH or in CUDA's usual place."""
    for found in (shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"):
        if found and Path(found).exists():
            return Path(found)
    raise DeviceError(
        "the GPU kernels are compiled at first use and nvcc was not found on the PATH or in /usr/local/cuda; "
        "install the CUDA toolkit (12.8 or newer), or use --device cpu"
    )


def architecture(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}{minor}a" if major >= 9 else f"{major}{minor}"


def compile_source(name: str, arch: str) -> Path:
    """The shared library of `name`.cu for that architecture, from the cache where it is there already."""
    source = HERE / f"{name}.cu"
    texts = [path.read_text() for path in (source, *sorted(HERE.glob("*.cuh")))]
    key = hashlib.sha256("\n".join((*texts, arch, *FLAGS)).encode()).hexdigest()[:16]
    folder = cache_folder() / "kernels"
    target = folder / f"{name}-sm_{arch}-{key}.so"
    if target.exists():
        return target
    nvcc = compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        out = Path(temporary) / target.name
        command = [nvcc, *FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}", "-o", out, source]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise DeviceError(
                f"nvcc could not compile {source.name} for sm_{arch}: {lines[0] if lines else 'no message'}; "
                f"run it by hand to see all: {' '.join(str(part) for part in command)}"
            )
        out.replace(target)
    return target


@cache
def library(name: str, arch: str) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(compile_source(name, arch)))
    loaded.dsv4_error.restype = ctypes.c_char_p
    return loaded


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def call(name: str, function: str, device: torch.device, *arguments: Any) -> None:
    """Call `int dsv4_<function>(..., stream)` of `name`.cu on the current stream; an error code is raised."""
    loaded = library(name, architecture(device))
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    code = getattr(loaded, f"dsv4_{function}")(*arguments, stream)
    if code:
        raise DeviceError(f"the kernel {function} could not be launched: {loaded.dsv4_error(code).decode()}")


@cache
def keep_shared_memory(function: int) -> None:
    """Let a compiled kernel leave each multiprocessor's memory divided as the products of a step want it.

    Otherwise a small kernel's blocks turn shared memory into cache, and while one of them stays, no block of
    the product after it fits, however early that is launched.
    """
    carveout, all_of_it = 9, 100  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent
    code = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), carveout, all_of_it)
    if code:
        raise DeviceError(f"the driver refused a kernel's share of shared memory: CUDA error {code}")
