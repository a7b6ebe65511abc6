"""Decode step and prompts: the GPUs that kernels are built for, what a block may take there, and where a tile
differs from the usual.

Tiles stand in a table beside their kernel, chosen by measurement on Hopper. The exceptions of other GPUs are
all here; tests/kernels/test_architectures.py holds every kernel against every GPU's limits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from dsv4.errors import DeviceError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Architecture:
    """`fp4`: the tensor core's instruction that multiplies FP4 by FP4, "" where there is none. GPUs that have
    it convert E2M1 to FP16 by an instruction too."""

    capability: int  # 90 is compute capability 9.0
    block_shared: int  # bytes of shared memory that a block may have
    fp4: str = ""
    was_measured: bool = False

    @property
    def name(self) -> str:
        """As compilers call it: with the instructions of this very GPU."""
        return f"{self.capability}a"

    @property
    def converts_fp4(self) -> bool:
        return bool(self.fp4)


_TENSOR_MEMORY = "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X"
_REGISTERS = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X"
ARCHITECTURES = {
    a.capability: a
    for a in (
        Architecture(90, 227 << 10, was_measured=True),
        Architecture(100, 227 << 10, _TENSOR_MEMORY),
        Architecture(103, 227 << 10, _TENSOR_MEMORY),
        Architecture(120, 99 << 10, _REGISTERS),
        Architecture(121, 99 << 10, _REGISTERS),
    )
}
# (kernel, capability in tens) -> tile by bytes of the compute type, where the usual one does not fit into
# shared memory.
TILES: dict[tuple[str, int], Mapping[int, tuple[int, ...]]] = {
    # Triton keeps the scores of a tile in shared memory there, beside the keys.
    ("prefill attend", 100): {2: (64, 32, 8, 2)},
    ("prefill attend", 120): {2: (16, 32, 4, 2)},
}


@cache
def capability(device: "torch.device") -> int:
    """Of a GPU; elsewhere that of a Hopper, for which kernels are compiled where there is no GPU."""
    if device.type != "cuda":
        return 90
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def standing(found: int) -> str:
    """One line: what is known of the kernels on a GPU of this compute capability. Others are refused."""
    gpu = ARCHITECTURES.get(found)
    if gpu is None:
        known = ", ".join(str(c / 10) for c in ARCHITECTURES)
        raise DeviceError(
            f"compute capability {found / 10}: the kernels are built for {known}; use --device cpu"
        )
    if gpu.was_measured:
        return "kernels measured on such a GPU"
    return "kernels built for, not yet measured on, this GPU: run dsv4 doctor first"


def has_room(device: "torch.device") -> bool:
    """Whether a block may have as much shared memory as on a Hopper."""
    return ARCHITECTURES[capability(device)].block_shared == ARCHITECTURES[90].block_shared


def tile(
    kernel: str,
    usual: Mapping["torch.dtype", tuple[int, ...]],
    dtype: "torch.dtype",
    device: "torch.device",
) -> tuple[int, ...]:
    """`usual[dtype]`, or what TILES says for this device."""
    return TILES.get((kernel, capability(device) // 10 * 10), {}).get(dtype.itemsize, usual[dtype])
