"""GPUs that kernels are built for but were never measured on: whether ops were held against the reference.

`dsv4 doctor` does that, and so does a first start. What held is kept for this GPU, driver and version.
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import dsv4
from dsv4 import disk, identity
from dsv4.device import driver
from dsv4.env import cache_folder
from dsv4.errors import DeviceError
from dsv4.gpu.architectures import ARCHITECTURES, capability

MEASURED = frozenset(found for found, gpu in ARCHITECTURES.items() if gpu.was_measured)


@dataclass(frozen=True)
class Machine:
    """All that a kernel's results may depend on."""

    gpu: str
    capability: int
    driver: str
    dsv4: str
    torch: str
    triton: str
    code: str

    @property
    def path(self) -> Path:
        return cache_folder() / "proved" / f"{identity.digest(asdict(self))}.json"


def describe(device: torch.device) -> Machine:
    return Machine(
        gpu=torch.cuda.get_device_name(device),
        capability=capability(device),
        driver=driver(),
        dsv4=dsv4.__version__,
        torch=torch.__version__,
        triton=identity.version("triton"),
        code=identity.code(),
    )


def is_needed(machine: Machine, known: Collection[int] = MEASURED) -> bool:
    """Whether nothing is known of the kernels here. `known`: compute capabilities that were measured."""
    return machine.capability not in known and not machine.path.exists()


def remember(machine: Machine, held: list[str]) -> str:
    """Keep what was found right; a sentence where that was not possible."""
    text = json.dumps({"machine": asdict(machine), "held": held}, indent=1)
    return disk.keep(machine.path, text, "ops are examined again at the next start")


def check(device: torch.device, known: Collection[int] = MEASURED) -> None:
    """Refuse a GPU on which nobody has looked yet."""
    machine = describe(device)
    if is_needed(machine, known):
        raise DeviceError(
            f"{machine.gpu} (compute capability {machine.capability / 10}): kernels are built for it, and no "
            "op has been held against the reference on it yet; run dsv4 doctor once, or use --device cpu"
        )
