"""Machines a model may be planned for: known GPUs as data, and what this machine is, measured."""

import re
import time
from dataclasses import dataclass

import torch

from dsv4.device import OLDEST, Device
from dsv4.errors import ConfigError
from dsv4.gpu.architectures import ARCHITECTURES

MIB = 1 << 20
# Left to the driver and to torch's context on each GPU.
RESERVED = 1 << 30
MAX_GPUS = 1024


@dataclass(frozen=True)
class Machine:
    """`memory_bytes` is what an engine can take of one of them; `bandwidth` what one can read per second."""

    name: str
    count: int
    memory_bytes: int
    bandwidth: float
    source: str
    is_cpu: bool = False
    capability: tuple[int, int] = OLDEST

    @property
    def was_run_on(self) -> bool:
        """Whether this engine ever ran on such a machine; of the others everything is arithmetic."""
        return self.is_cpu or any(f" {name} " in f" {self.name} " for name in RUN_ON)

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
# Bytes per second that a kernel reads of pinned host memory over PCIe 5.0 x16, and where that was measured.
HOST_BANDWIDTH, HOST_MEASURED_ON = 52e9, "H200"
# Host memory that the machine around a GPU is taken to have for experts; an engine looks what there is.
HOST_MEMORY = 128 << 30
RUN_ON = ("H200",)


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
    """`2xH200`, `H200`, `8 x rtx-5090`."""
    match = re.fullmatch(r"(?:(\d+)\s*[x×*]\s*)?(.+)", text.strip(), flags=re.IGNORECASE)
    plain = {_plain(name): name for name in NAMES}
    if match is None or _plain(match[2]) not in plain:
        names = ", ".join(name.replace(" ", "") for name in NAMES)
        raise ConfigError(f"gpus {text!r}: expected a number and a known GPU, as in 2xH200; known: {names}")
    digits = (match[1] or "1").lstrip("0")
    # Python refuses to read numbers of thousands of digits.
    if not digits or len(digits) > 9 or int(digits) > MAX_GPUS:
        raise ConfigError(f"gpus {text[:40]!r}: expected 1 to {MAX_GPUS} of them")
    return known(plain[_plain(match[2])], int(digits))


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def this_machine() -> Machine:
    """Its GPUs if it has any, else its CPU; free memory, and the read bandwidth measured now."""
    if not torch.cuda.is_available():
        device = Device.choose("cpu")
        speed = measure_bandwidth("cpu", 256 * MIB)
        return Machine(device.name, 1, device.memory_bytes, speed, "measured", is_cpu=True)
    device, count = Device.choose("cuda"), torch.cuda.device_count()
    speed = measure_bandwidth("cuda", min(8 << 30, device.memory_bytes // 4))
    found, name = torch.cuda.get_device_capability(), device.name.removeprefix("NVIDIA ")
    return Machine(name, count, device.memory_bytes, speed, "measured", False, found)


def measure_bandwidth(device: str, num_bytes: int, rounds: int = 5) -> float:
    """Bytes per second of the fastest of several passes that read and add up `num_bytes`."""
    values = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        float(values.sum())  # the number is waited for, so the pass is over
        best = min(best, time.perf_counter() - start)
    return values.numel() * 4 / best
