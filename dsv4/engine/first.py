"""The first start on a GPU that the kernels were never measured on: every op against the reference, once."""

from collections.abc import Callable, Collection, Sequence

import torch

from dsv4.config import EngineConfig
from dsv4.device import Device
from dsv4.engine import proof
from dsv4.engine.build import rank_devices
from dsv4.errors import DeviceError
from dsv4.ops.agree import Verdict, compare_all

Say = Callable[[str], object]


def ensure(config: EngineConfig, say: Say, known: Collection[int] = proof.MEASURED) -> bool:
    """Before an engine is loaded: examine the ops if that is needed, and raise with what differs.

    `known`: compute capabilities that were measured; a test leaves out that of the GPU at hand.
    """
    device = Device.choose(rank_devices(config)[0])
    if device.kind != "cuda":
        return False
    machine = proof.describe(torch.device(device.torch_name))
    if not proof.is_needed(machine, known):
        return False
    say(f"first start on {machine.gpu}: comparing every op with the reference, once")
    if problem := conclude(machine, compare_all("cuda")):
        say(problem)
    return True


def conclude(machine: proof.Machine, verdicts: Sequence[Verdict]) -> str:
    """Remember that all is right, or refuse with what is not; a sentence where it could not be remembered."""
    wrong = "; ".join(f"{verdict.name}: {verdict.problem}" for verdict in verdicts if verdict.problem)
    if not wrong:
        return proof.remember(machine, [f"{verdict.name}: {verdict.text}" for verdict in verdicts])
    raise DeviceError(
        f"on {machine.gpu} (compute capability {machine.capability / 10}, {machine.driver}) kernels differ "
        f"from the reference: {wrong}; report this, and use --device cpu"
    )
