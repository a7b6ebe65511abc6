"""The machine: Python, libraries, driver, GPU, compiler, memory, disk."""

import platform
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from dsv4.device import available_memory, driver
from dsv4.errors import DeviceError
from dsv4.gpu.build import compiler
from dsv4.lab.doctor.findings import Finding

PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
# As in pyproject.toml: first version that is known to work, first that is not.
LIBRARIES = {
    "torch": ("2.11", "2.14"),
    "safetensors": ("0.7", None),
    "tokenizers": ("0.22", None),
    "numpy": ("2.0", None),
    "typer": ("0.16", None),
    "rich": ("14", None),
}
LITTLE_MEMORY = 2_000_000_000
LITTLE_DISK = 1_000_000_000
# The self-test writes a checkpoint of 7 MB into the folder for temporary files.
NEEDED_DISK = 50_000_000


def examine_machine(folder: Path | None) -> list[Finding]:
    """`folder`: where a model lies, so that its disk is looked at too."""
    out = [_python(), *(_library(name, *bounds) for name, bounds in LIBRARIES.items())]
    out += [_gpu(), _triton(), _compiler(), _c_compiler(), _memory()]
    return [*out, _temporary(), *([_disk("model disk", folder)] if folder else [])]


def _finding(name: str, level: str, text: str, remedy: str = "") -> Finding:
    return Finding("machine", name, level, text, remedy)  # type: ignore[arg-type]


def _python() -> Finding:
    known = ", ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    if sys.version_info[:2] in PYTHONS:
        return _finding("python", "ok", platform.python_version())
    text = f"{platform.python_version()}, expected one of {known}"
    return _finding("python", "fail", text, f"run dsv4 with Python {known}")


def _numbers(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0)."""
    parts = text.split("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdigit())


def _library(name: str, least: str, below: str | None) -> Finding:
    wanted = f"{name}>={least}" + (f",<{below}" if below else "")
    try:
        found = version(name)
    except PackageNotFoundError:
        return _finding(name, "fail", f"not installed, expected {wanted}", f"pip install '{wanted}'")
    if _numbers(found) < _numbers(least) or (below and _numbers(found) >= _numbers(below)):
        return _finding(name, "fail", f"{found}, expected {wanted}", f"pip install '{wanted}'")
    return _finding(name, "ok", found)


def _gpu() -> Finding:
    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        major, minor = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        count = torch.cuda.device_count()
        name = f"{count} x {torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
        memory = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        return _finding("gpu", "ok", f"{name}, {memory}, {driver()}, CUDA {torch.version.cuda}")
    if shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists():
        text = f"there is an NVIDIA GPU ({driver()}), but torch {torch.__version__} sees none"
        remedy = "install a torch built for CUDA, and a driver at least as new as that CUDA"
        return _finding("gpu", "fail", text, remedy)
    return _finding("gpu", "note", "none is visible: everything runs on the CPU, with the reference")


def _triton() -> Finding:
    try:
        return _finding("triton", "ok", version("triton"))
    except PackageNotFoundError:
        if torch.cuda.is_available():
            remedy = "pip install the triton that belongs to your torch"
            return _finding("triton", "fail", "not installed, but there is a GPU", remedy)
        return _finding("triton", "note", "not installed; only GPUs need it")


def _compiler() -> Finding:
    """What builds the kernels in CUDA C++."""
    try:
        found = compiler()
    except DeviceError as error:
        if torch.cuda.is_available():
            return _finding("compiler", "fail", "neither NVRTC nor nvcc was found", str(error))
        return _finding("compiler", "note", "neither NVRTC nor nvcc was found; only GPUs need one")
    return _finding("compiler", "ok", f"{found.name} {found.version} ({found.path})")


def _c_compiler() -> Finding:
    """Triton builds a small launcher in C for every signature of a kernel."""
    if found := shutil.which("gcc") or shutil.which("clang"):
        return _finding("C compiler", "ok", found)
    if torch.cuda.is_available():
        text = "neither gcc nor clang was found, and Triton builds its launchers in C"
        return _finding("C compiler", "fail", text, "install gcc and Python's headers")
    return _finding("C compiler", "note", "none was found; only GPUs need one")


def _memory() -> Finding:
    free = available_memory()
    level = "note" if free < LITTLE_MEMORY else "ok"
    return _finding("memory", level, f"{free / 1e9:.1f} GB free")


def _temporary() -> Finding:
    try:
        return _disk("disk", Path(tempfile.gettempdir()))
    except OSError:
        text = "no folder for temporary files can be written to"
        return _finding("disk", "fail", text, "set TMPDIR to a folder that can be written to")


def _disk(name: str, place: Path) -> Finding:
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return _finding(name, "fail", f"{place}: {error.strerror}", "make the folder readable")
    text = f"{free / 1e9:.1f} GB free at {place}"
    if name == "disk" and free < NEEDED_DISK:
        return _finding(name, "fail", text, f"free {NEEDED_DISK / 1e6:.0f} MB, or set TMPDIR")
    return _finding(name, "note" if free < LITTLE_DISK else "ok", text)
