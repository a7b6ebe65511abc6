"""Start: builds `.cu` files, once per source, architecture and compiler, and launches what is in them.

The compiler is NVRTC, which torch's CUDA wheels bring along, else nvcc. Either gives a cubin, which the
driver loads. Sources hold device code alone and need no headers but their own: no CUDA toolkit is needed.
"""

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from ctypes.util import find_library
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4 import disk, identity
from dsv4.device import usable_cores
from dsv4.env import cache_folder
from dsv4.errors import DeviceError
from dsv4.gpu import driver

PACKAGE = Path(__file__).parents[1]
FOLDERS = (PACKAGE / "gpu", *sorted(path for path in (PACKAGE / "ops").iterdir() if path.is_dir()))
# Every source by its room and name, such as attention/decode; those for one architecture end in its name.
SOURCES = {f"{path.parent.name}/{path.stem}": path for room in FOLDERS for path in sorted(room.glob("*.cu"))}
HEADERS = tuple(path for room in FOLDERS for path in sorted(room.glob("*.cuh")))
ONLY = {name: f"{found[1]}a" for name in SOURCES if (found := re.search(r"_sm(\d+)(?=_|$)", name))}
HOPPER = "90a"
FLAGS = ("-std=c++17", "--diag-suppress=128")
INCLUDES = tuple(f"-I{folder}" for folder in sorted({path.parent for path in HEADERS}))
TOOLKIT = Path("/usr/local/cuda")


@dataclass(frozen=True)
class Compiler:
    """`compile(source, arch)` gives a cubin, or raises a DeviceError with the first line of what is wrong."""

    name: str  # NVRTC or nvcc
    version: str
    path: Path
    compile: Callable[[Path, str], bytes]


@cache
def compiler() -> Compiler:
    """NVRTC where it can be found, else nvcc."""
    found = _nvrtc() or _nvcc()
    if found is None:
        raise DeviceError(
            "the GPU kernels are compiled at first use, and neither NVRTC (beside torch or among the "
            f"system's libraries) nor nvcc (on the PATH or in {TOOLKIT}) was found; install the wheel "
            "nvidia-cuda-nvrtc of torch's CUDA version (12.8 or newer), or use --device cpu"
        )
    return found


def _nvrtc() -> Compiler | None:
    """Of the copies beside torch the newest, else the system's."""
    packages = Path(torch.__file__).parents[1]
    wheels = [p for pattern in ("nvidia/*/lib", "torch/lib") for p in packages.glob(pattern)]
    beside = [p for folder in wheels for p in folder.glob("libnvrtc.so*")]
    # By name alone: as the loader finds it, or has it already.
    of_torch = (torch.version.cuda or "").split(".")[0]
    names = [f"libnvrtc.so.{of_torch}" if of_torch else None, find_library("nvrtc")]
    system = [Path(name) for name in names if name]
    system += sorted((TOOLKIT / "lib64").glob("libnvrtc.so.*"), key=_version_of, reverse=True)
    for path in [*sorted(beside, key=_version_of, reverse=True), *system]:
        try:
            # It looks for its second half under its name alone, which finds what is loaded already.
            for half in path.parent.glob("libnvrtc-builtins.so*") if path.is_absolute() else ():
                ctypes.CDLL(str(half))
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        name = f"{major.value}.{minor.value}"
        return Compiler("NVRTC", name, path, partial(_run_nvrtc, library))
    return None


def _version_of(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", path.name.partition(".so")[2]))


def _run_nvrtc(library: Any, source: Path, arch: str) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text, name = source.read_text().encode(), source.name.encode()
    # There is no host here: a constexpr function without a word of where it runs is the device's.
    flags = (*FLAGS, *INCLUDES, f"--gpu-architecture=sm_{arch}", "-default-device")
    options = [flag.encode() for flag in flags]

    def check(code: int, what: str) -> None:
        if code:
            raise _failed("NVRTC", source, arch, f"{what}: {library.nvrtcGetErrorString(code).decode()}")

    def fetch(what: str) -> bytes:
        check(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
        held = ctypes.create_string_buffer(size.value)
        check(getattr(library, f"nvrtcGet{what}")(program, held), what)
        return held.raw

    check(library.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None), "create")
    try:
        code = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if code:
            message = fetch("ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise _failed("NVRTC", source, arch, message or library.nvrtcGetErrorString(code).decode())
        return fetch("CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _nvcc() -> Compiler | None:
    path = shutil.which("nvcc") or shutil.which("nvcc", path=str(TOOLKIT / "bin"))
    if path is None:
        return None
    said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release ([\d.]+)", said)
    nvcc = Path(path)
    return Compiler("nvcc", release[1] if release else "unknown", nvcc, partial(_run_nvcc, nvcc))


def _run_nvcc(nvcc: Path, source: Path, arch: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.cubin"
        command = [str(nvcc), "-O3", *FLAGS, *INCLUDES, "-cubin", f"-arch=sm_{arch}", "-o", str(out)]
        done = subprocess.run([*command, str(source)], capture_output=True, text=True)
        if done.returncode:
            raise _failed("nvcc", source, arch, done.stderr or done.stdout)
        return out.read_bytes()


def _failed(compiler: str, source: Path, arch: str, output: str) -> DeviceError:
    """The first line that names an error stands for all."""
    lines = [line for line in output.strip().splitlines() if line.strip()] or ["no message"]
    first = next((line for line in lines if "error" in line), lines[0])
    return DeviceError(
        f"{compiler} could not compile {source.parent.name}/{source.name} for sm_{arch}: {first.strip()}"
    )


def architecture(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}{minor}a" if major >= 9 else f"{major}{minor}"


def source_path(name: str) -> Path:
    return SOURCES[name]


def sources(arch: str) -> list[str]:
    return [name for name in SOURCES if ONLY.get(name, arch) == arch]


def compile_source(name: str, arch: str) -> Path:
    """The cubin of the source `name` for that architecture, from the cache where it is there already."""
    source, using = source_path(name), compiler()
    texts = [path.read_text() for path in (source, *HEADERS)]
    known = (*texts, arch, *FLAGS, using.name, using.version)
    key = identity.digest(known)
    folder = cache_folder() / "kernels"
    target = folder / f"{name.replace('/', '-')}-sm_{arch}-{key}.cubin"
    if not target.exists() or not target.stat().st_size:
        cubin = using.compile(source, arch)
        folder.mkdir(parents=True, exist_ok=True)
        with disk.whole(target) as part:
            part.write_bytes(cubin)
    return target


def compile_all(arch: str, compiled: Callable[[int, int], object] | None = None) -> list[Path]:
    """Every source, one per core at a time. `compiled`: told how many of them are done."""
    names = sources(arch)
    with ThreadPoolExecutor(min(usable_cores(), len(names))) as pool:
        jobs = [pool.submit(compile_source, name, arch) for name in names]
        try:
            for done, job in enumerate(as_completed(jobs), 1):
                job.result()
                if compiled is not None:
                    compiled(done, len(jobs))
        finally:
            pool.shutdown(cancel_futures=True)
    return [job.result() for job in jobs]


def mangled(kernel: str) -> str:
    """How the symbol of a kernel begins: `f<8, true, float>` -> `_Z1fILi8ELb1EfE`, `f` -> `_Z1f`."""
    name, _, arguments = kernel.partition("<")
    codes = {"true": "Lb1E", "false": "Lb0E", "float": "f"}
    parts = [part.strip() for part in arguments.rstrip(">").split(",")] if arguments else []
    of = [codes.get(p) or (f"Li{p}E" if p.isdigit() else f"{len(p)}{p}") for p in parts]
    return f"_Z{len(name)}{name}" + (f"I{''.join(of)}E" if of else "")


def symbols(cubin: bytes) -> list[str]:
    """Its kernels: the names in its table of strings that have a section of parameters."""
    names = set(re.findall(rb"\0(_Z\w+)(?=\0)", cubin))
    return sorted(name.decode() for name in names if b".nv.constant0." + name + b"\0" in cubin)


def find(kernel: str, names: Iterable[str]) -> str:
    """The symbol among `names` of a kernel such as `f<8, true>`."""
    begin = mangled(kernel)
    # A name without template arguments also begins those with them.
    found = [n for n in names if n.startswith(begin) and ("<" in kernel or not n.startswith(f"{begin}I"))]
    assert len(found) == 1, f"{kernel} is not instantiated in its source: {found}"
    return found[0]


@cache
def _module(source: str, device: torch.device) -> dict[str, driver.Kernel]:
    cubin = compile_source(source, architecture(device)).read_bytes()
    return driver.load(cubin, symbols(cubin), device)


@cache
def _kernel(source: str, kernel: str, device: torch.device) -> driver.Kernel:
    module = _module(source, device)
    return module[find(kernel, module)]


def load_all(device: torch.device) -> None:
    """Build and load every kernel, so that no later launch has to."""
    compile_all(architecture(device))
    if device.index is None:  # tensors' devices have one, and are what launches ask for
        device = torch.device(device.type, torch.cuda.current_device())
    for source in sources(architecture(device)):
        _module(source, device)


def call(
    source: str,
    kernel: str,
    device: torch.device,
    *arguments: Tensor | float | ctypes.Structure | ctypes.c_int64 | None,
    blocks: int,
    threads: int,
    shared: int = 0,
    cluster: int = 1,
    overlap: bool = True,
) -> None:
    """Launch a kernel of `source` (ROOM/NAME), such as `f<8, true>`, on the current stream.

    Arguments: a tensor's pointer (None: null), a structure by value, an int and a float of 32 bits. `shared`:
    bytes of dynamic shared memory. `overlap`: it may start while the launch before it still runs (PDL).
    """
    _kernel(source, kernel, device).launch(device, arguments, blocks, threads, shared, cluster, overlap)


def keep_shared_memory(function: int) -> None:
    """Let a compiled Triton kernel leave shared memory as it is (driver.py)."""
    driver.keep_shared_memory(function)
