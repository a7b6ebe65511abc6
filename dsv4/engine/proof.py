"""GPUs that kernels are built for but were never measured on: whether ops were held against the reference.

`dsv4 doctor` does that, and so does a first start. What held is kept for this GPU, driver and version.
"""

import hashlib
import json
import tempfile
from collections.abc import Collection
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import dsv4
from dsv4.device import driver
from dsv4.env import cache_folder
from dsv4.errors import DeviceError
from dsv4.kernels.common.architectures import ARCHITECTURES, capability

# What launches kernels and what they are: it changes more often than the version's name.
_SOURCES = ("kernels", "ops", "quant")
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
        key = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]
        return cache_folder() / "proved" / f"{key}.json"


def describe(device: torch.device) -> Machine:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return Machine(
        gpu=torch.cuda.get_device_name(device),
        capability=capability(device),
        driver=driver(),
        dsv4=dsv4.__version__,
        torch=torch.__version__,
        triton=triton,
        code=code_of(Path(dsv4.__file__).parent),
    )


def code_of(root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for package in _SOURCES for path in (root / package).rglob("*.*")):
        if path.suffix in (".py", ".cu", ".cuh"):
            digest.update(f"\n{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def is_needed(machine: Machine, known: Collection[int] = MEASURED) -> bool:
    """Whether nothing is known of the kernels here. `known`: compute capabilities that were measured."""
    return machine.capability not in known and not machine.path.exists()


def remember(machine: Machine, held: list[str]) -> str:
    """Keep what was found right; a sentence where that was not possible."""
    path = machine.path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False) as file:
            try:
                json.dump({"machine": asdict(machine), "held": held}, file, indent=1)
                file.flush()
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        return f"{path} cannot be written ({error.strerror}); ops are examined again at the next start"
    return ""


def check(device: torch.device, known: Collection[int] = MEASURED) -> None:
    """Refuse a GPU on which nobody has looked yet."""
    machine = describe(device)
    if is_needed(machine, known):
        raise DeviceError(
            f"{machine.gpu} (compute capability {machine.capability / 10}): kernels are built for it, and no "
            "op has been held against the reference on it yet; run dsv4 doctor once, or use --device cpu"
        )
