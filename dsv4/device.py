"""What this machine is and what was chosen on it, each choice with its reason. No weights, no model."""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4.errors import DeviceError

# Importing torch takes a second, which `dsv4 info --brief` and `dsv4 plan` should not wait.
if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Device:
    """`torch_name` is what tensors are placed on; `kind` selects backends in the kernel table."""

    kind: str
    torch_name: str
    name: str
    memory_bytes: int
    why: str

    @classmethod
    def choose(cls, wanted: str) -> "Device":
        import torch

        why_cpu = {"cpu": "asked for", "auto": _why_cpu()}.get(wanted)
        if why_cpu is not None:
            return cls("cpu", "cpu", cpu_name(), available_memory(), why_cpu)
        why = "the kernels run on it" if wanted == "auto" else "asked for"
        wanted = "cuda" if wanted == "auto" else wanted
        if not (wanted == "cuda" or wanted.startswith("cuda:")):
            raise DeviceError(f"device {wanted!r} is unknown; use auto, cpu, cuda or cuda:N")
        if not torch.cuda.is_available():
            raise DeviceError(
                f"device {wanted!r}: torch {torch.__version__} sees no CUDA GPU; use --device cpu"
            )
        index = int(wanted[5:] or 0) if wanted[5:].isdigit() or wanted == "cuda" else -1
        if not 0 <= index < torch.cuda.device_count():
            raise DeviceError(f"device {wanted!r}: found {torch.cuda.device_count()} GPUs, numbered from 0")
        free, _ = torch.cuda.mem_get_info(index)
        return cls("cuda", f"cuda:{index}", torch.cuda.get_device_name(index), free, why)


# Compute capability that the kernels need: Hopper.
OLDEST = (9, 0)


def _why_cpu() -> str | None:
    """Why `auto` does not take a GPU, None where it does."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA GPU is visible"
    found = torch.cuda.get_device_capability(0)
    if found < OLDEST:
        return f"{torch.cuda.get_device_name(0)} {too_old(found)}"
    return None


def too_old(found: tuple[int, int]) -> str:
    need = f"{OLDEST[0]}.{OLDEST[1]} (Hopper) or newer"
    return f"has compute capability {found[0]}.{found[1]}, the kernels need {need}"


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux: the platform module's name is all there is
    return platform.processor() or platform.machine()


def gpu_names() -> list[str]:
    """As NVIDIA's driver has them, without asking torch."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def driver() -> str:
    """NVIDIA's, as the system has it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return "driver unknown"
    versions = [word for word in words if "." in word and word.replace(".", "").isdigit()]
    return f"driver {versions[0]}" if versions else "driver unknown"


def machine_id(device: "torch.device") -> str:
    """All that a library may choose its algorithms by; a CPU's name alone says little."""
    if device.type == "cuda":
        import torch

        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    wanted = ("vendor_id", "cpu family", "model", "stepping", "cache size", "flags", "Features")
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []  # not Linux: the platform module's name is all there is
    facts = [line for line in lines if line.split("\t")[0].split(":")[0].strip() in wanted]
    return "\n".join([platform.machine(), cpu_name(), str(os.cpu_count()), *facts])


class GpuMemory(ctypes.Structure):
    """Bytes, as NVIDIA's management library has them."""

    total: int
    free: int
    used: int
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@cache
def _gpus() -> "tuple[ctypes.CDLL, tuple[ctypes.c_void_p, ...]] | None":
    """NVIDIA's management library, which the driver brings (torch takes a second to import), and its GPUs."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count, found = ctypes.c_uint(), []
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    for index in range(count.value):
        device = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
            found.append(device)
    return library, tuple(found)


def gpu_memory() -> list[GpuMemory]:
    """Of every GPU of the machine, by all processes."""
    if (known := _gpus()) is None:
        return []
    library, devices = known
    memories = [GpuMemory() for _ in devices]
    is_read = [
        library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
        for device, memory in zip(devices, memories, strict=True)
    ]
    return [memory for memory, holds in zip(memories, is_read, strict=True) if holds]


def total_memory() -> int:
    """Bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory() -> int:
    """Bytes of memory that can be taken without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: fall through to the total
    return total_memory()


def usable_cores() -> int:
    """That this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # not Linux


@contextmanager
def one_thread() -> Iterator[None]:
    """Each of torch's functions runs in the calling thread: blocks of rows are decoded before a second one
    has woken up (measured: docs/log.md), and threads of our own would wait for each other's."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
