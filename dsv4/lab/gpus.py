"""Machines a model may be planned for: known GPUs as data, and this machine. Without torch on a CPU."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

from dsv4.device import OLDEST, available_memory, cpu_name, gpu_names
from dsv4.errors import ConfigError
from dsv4.gpu.architectures import ARCHITECTURES

MIB = 1 << 20
# Left to the driver and to torch's context on each GPU.
RESERVED = 1 << 30
MAX_GPUS = 1024
# Bytes per second that a kernel reads of pinned host memory over PCIe 5.0 x16, measured on an H200.
HOST_BANDWIDTH = 52e9
# Host memory that the machine around a named GPU is assumed to have for experts.
HOST_MEMORY = 128 << 30
RUN_ON = ("H200",)
_GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")  # one of these is there where a GPU can be used


@dataclass(frozen=True)
class Machine:
    """`memory_bytes` is what an engine can take of one of them; `bandwidth` what one can read per second."""

    name: str
    count: int
    memory_bytes: int
    bandwidth: float
    source: str  # of the bandwidth
    is_cpu: bool = False
    capability: tuple[int, int] = OLDEST
    host_memory: int = HOST_MEMORY

    @property
    def was_run_on(self) -> bool:
        return self.is_cpu or any(f" {name} " in f" {self.name} " for name in RUN_ON)

    @property
    def is_named(self) -> bool:
        """Not the machine at hand, so its host memory is an assumption."""
        return self.name in NAMES and self.host_memory == HOST_MEMORY

    @property
    def label(self) -> str:
        return self.name if self.is_cpu else f"{self.count} x {self.name}"


# name -> memory (MiB), bytes per second, whose figure that is, compute capability.
# Memory: what nvidia-smi reports for the board, which differs from the round figure it is sold with.
# Bandwidth: NVIDIA's data sheets of the SXM boards and cards. Except H200: a pure read of 8 GiB, measured in
# November 2026 (data sheet 4.8e12); B200: 7680 bits x 2 x 3996 MHz, as its driver reports (data sheet 8e12;
# github.com/pytorch/ao pull 4002); B300: NVIDIA's planning tool aiconfigurator (data sheet 8e12).
_KNOWN: dict[str, tuple[int, float, str, tuple[int, int]]] = {
    "A100": (81920, 2.039e12, "data sheet", (8, 0)),
    "H100": (81559, 3.35e12, "data sheet", (9, 0)),
    "H200": (143771, 4.63e12, "measured", (9, 0)),
    "B200": (183359, 7.67e12, "bus width and clock", (10, 0)),
    "B300": (275040, 7.75e12, "vendor's tool", (10, 3)),
    "RTX PRO 6000": (97887, 1.792e12, "data sheet", (12, 0)),
    "RTX 5090": (32607, 1.792e12, "data sheet", (12, 0)),
}
NAMES = tuple(_KNOWN)


def known(name: str, count: int) -> Machine:
    memory_mib, bandwidth, source, capability = _KNOWN[name]
    return Machine(name, count, memory_mib * MIB - RESERVED, bandwidth, source, False, capability)


def capability_of(text: str) -> int:
    """`h200`, `rtx-pro-6000`, `sm_90a` or `90a` -> 90, of GPUs that kernels are built for."""
    names = {_plain(name): 10 * major + minor for name, (*_, (major, minor)) in _KNOWN.items()}
    number = re.fullmatch(r"(?:sm)?(\d+)a?", _plain(text))
    found = int(number[1]) if number and len(number[1]) < 5 else names.get(_plain(text))
    if found not in ARCHITECTURES:
        gpus = ", ".join(
            name.replace(" ", "-").lower() for name in NAMES if names[_plain(name)] in ARCHITECTURES
        )
        built = ", ".join(f"sm_{gpu.name}" for gpu in ARCHITECTURES.values())
        raise ConfigError(f"--for {text!r}: kernels are built for {gpus}; or {built}")
    return found


def parse(text: str) -> Machine:
    """`2xH200`, `H200`, `8 x rtx-5090`; `2`: so many of this machine's."""
    text = text.strip()
    match = re.fullmatch(r"(?:(\d+)\s*[x×*]\s*)?(.+)", text, flags=re.IGNORECASE)
    plain = {_plain(name): name for name in NAMES}
    is_count = text.isdecimal()
    if not is_count and (match is None or _plain(match[2]) not in plain):
        names = ", ".join(name.replace(" ", "") for name in NAMES)
        raise ConfigError(
            f"gpus {text[:40]!r}: expected 2xH200, or 2 for this machine's own; known GPUs: {names}"
        )
    digits = (text if is_count else match[1] or "1" if match else "").lstrip("0")
    # Python refuses to read numbers of thousands of digits.
    if not digits or len(digits) > 9 or int(digits) > MAX_GPUS:
        raise ConfigError(f"gpus {text[:40]!r}: expected 1 to {MAX_GPUS} of them")
    if not is_count:
        assert match is not None
        return known(plain[_plain(match[2])], int(digits))
    found = this_machine(int(digits))
    if found.is_cpu:
        raise ConfigError(f"gpus {digits}: this machine has no GPU; name them, as in {digits}xH200")
    return found


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def this_machine(count: int | None = None) -> Machine:
    """Its GPUs if it has any (or so many of them), else its CPU: free memory, and bandwidth measured now."""
    if not gpu_names() and not any(Path(file).exists() for file in _GPU_FILES):
        memory = available_memory()
        return Machine(cpu_name(), 1, memory, copy_bandwidth(), "measured", is_cpu=True, host_memory=0)
    import torch

    from dsv4.device import Device

    device, there = Device.choose("cuda"), torch.cuda.device_count()
    if count is not None and count > there:
        raise ConfigError(f"gpus {count}: this machine has {there}; name others, as in {count}xH200")
    speed = read_bandwidth("cuda", min(8 << 30, device.memory_bytes // 4))
    found, name = torch.cuda.get_device_capability(), device.name.removeprefix("NVIDIA ")
    memory = device.memory_bytes
    return Machine(name, count or there, memory, speed, "measured", False, found, available_memory())


def copy_bandwidth(num_bytes: int = 64 * MIB, rounds: int = 3) -> float:
    """Bytes per second that this CPU reads and writes in the fastest of several copies."""
    source, target, best = bytearray(num_bytes), bytearray(num_bytes), float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - start)
    return 2 * num_bytes / best


def read_bandwidth(device: str, num_bytes: int, rounds: int = 5) -> float:
    """Bytes per second of the fastest of several passes that read and add up `num_bytes`."""
    import torch

    values = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        float(values.sum())  # the number is waited for, so the pass is over
        best = min(best, time.perf_counter() - start)
    return values.numel() * 4 / best
