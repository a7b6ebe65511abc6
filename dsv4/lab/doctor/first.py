"""The first start on a GPU that the kernels were never measured on: every op against the reference, once."""

from collections.abc import Callable, Collection

import torch

from dsv4.config import EngineConfig
from dsv4.device import Device
from dsv4.engine import proof
from dsv4.engine.build import rank_devices
from dsv4.errors import DeviceError
from dsv4.lab.doctor.findings import Finding, passed

Say = Callable[[str], object]


def ensure(config: EngineConfig, say: Say, known: Collection[int] = proof.MEASURED) -> bool:
    """Before an engine is loaded: whether ops had to be examined. Raises with what differed.

    `known`: compute capabilities that were measured; a test leaves out that of the GPU at hand.
    """
    device = Device.choose(rank_devices(config)[0])
    if device.kind != "cuda":
        return False
    machine = proof.describe(torch.device(device.torch_name))
    if not proof.is_needed(machine, known):
        return False
    from dsv4.lab.doctor.ops import examine_gpu  # seldom needed, and it imports every op

    say(f"first start on {machine.gpu}: every op is held against the reference, once")
    if said := conclude(machine, examine_gpu()):
        say(said)
    return True


def conclude(machine: proof.Machine, findings: list[Finding]) -> str:
    """Remember that all is right, or refuse with what is not; a sentence where it could not be remembered."""
    if passed(findings):
        return proof.remember(machine, [f"{finding.name}: {finding.text}" for finding in findings])
    wrong = "; ".join(f"{finding.name}: {finding.text}" for finding in findings if finding.level == "fail")
    raise DeviceError(
        f"on {machine.gpu} (compute capability {machine.capability / 10}, {machine.driver}) kernels differ "
        f"from the reference: {wrong}; report this, and use --device cpu"
    )
