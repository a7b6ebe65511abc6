"""Prompts: rows of x as the products read them (prefill_packed.cuh). Launches nothing."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.gpu.tiles import SLICE, Tiled
from dsv4.quant.formats import Format

ROW_GROUP = 16  # prefill_packed.cuh's


@dataclass(frozen=True)
class Mode:
    """How x is held, and so multiplied: in 16 bits (prefill_sm90_16.cuh) or FP8 (prefill_sm90_8.cuh)."""

    number: int | None  # prefill_packed.cuh's, of those in 16 bits
    blocks: int  # of columns, in a slice
    group_bytes: int  # of a group of rows in one of them
    undo_bytes: int  # of a group of rows: what undoes scaling, where a slice has it apart
    slice_bytes: int  # of a group of rows, in all

    @property
    def is_fp8(self) -> bool:
        return self.number is None

    @property
    def packing(self) -> str:
        """Its kernel of prefill_pack.cu."""
        return "pack_8_kernel" if self.is_fp8 else f"pack_kernel<{self.number}>"


def _in_16_bits(number: int) -> Mode:
    return Mode(number=number, blocks=4, group_bytes=4096, undo_bytes=64, slice_bytes=16512)


FP8_CODES = Mode(number=None, blocks=2, group_bytes=4224, undo_bytes=0, slice_bytes=8448)
IN_16_BITS = {
    Format.NVFP4: _in_16_bits(0),
    Format.FP8: _in_16_bits(1),
    Format.MXFP4: _in_16_bits(2),
    Format.BF16: _in_16_bits(2),
}
# Weights whose a8 products run on FP8 tensor cores, if Tiled.fits_fp8. Others take rounded values in 16 bits.
IN_FP8 = (Format.FP8, Format.MXFP4)


def mode_of(weight: Tiled, activations: str) -> Mode:
    """One for all numbers of rows: it decides the bits."""
    if activations == "a8" and weight.format in IN_FP8 and weight.fits_fp8:
        return FP8_CODES
    return IN_16_BITS[weight.format]


def padded(rows: int) -> int:
    return -(-rows // ROW_GROUP) * ROW_GROUP


@dataclass(frozen=True)
class Packed:
    """Rows of x as the products of one mode read them: [matrices] times `rows`, each padded to groups."""

    data: Tensor  # uint8 [groups, slices, bytes]
    mode: Mode
    matrices: int
    rows: int
    k: int

    @property
    def rows_padded(self) -> int:
        return padded(self.rows)


@dataclass(frozen=True)
class Codes:
    """Rows in FP8, one after the other, from which `gather` packs those that experts want."""

    data: Tensor  # uint8 [T, K]
    scale: Tensor  # float32 [T, K / 128], as packed rows have them

    @classmethod
    def empty(cls, rows: int, k: int, device: torch.device) -> "Codes":
        data = torch.empty(rows, k, dtype=torch.uint8, device=device)
        return cls(data, torch.empty(rows, k // 128, device=device))


def empty_packed(mode: Mode, rows: int, k: int, device: torch.device, matrices: int = 1) -> Packed:
    shape = (matrices * padded(rows) // ROW_GROUP, -(-k // SLICE), mode.slice_bytes)
    data = torch.empty(shape, dtype=torch.uint8, device=device)
    return Packed(data=data, mode=mode, matrices=matrices, rows=rows, k=k)
