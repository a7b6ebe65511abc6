"""QuantTensor: bytes, scales and the format that gives them meaning. Arithmetic lives in codec.py."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

# Names of formats are needed where torch, which takes a second to import, is not.
if TYPE_CHECKING:
    import torch
    from torch import Tensor

FP8_TILE = 128
MX_BLOCK = 32
NV_BLOCK = 16
KV_BLOCK = 64


class Format(StrEnum):
    """How the values of a tensor are stored. Codes and 8-bit scales are always held as raw uint8."""

    F32 = "f32"
    BF16 = "bf16"
    FP8 = "fp8"  # E4M3 codes; one scale per 128x128 tile: E8M0 bytes or float32
    MXFP4 = "mxfp4"  # E2M1 pairs; one E8M0 byte per 32 columns
    NVFP4 = "nvfp4"  # E2M1 pairs; one E4M3 byte per 16 columns; one float32 for the tensor
    KV8 = "kv8"  # E4M3 codes with one E8M0 byte per 64 columns, then the rotary columns in full

    @property
    def is_plain(self) -> bool:
        return self in (Format.F32, Format.BF16)


@dataclass(frozen=True)
class QuantTensor:
    """A matrix [rows, cols] as stored. `rope_dim` counts the unquantised last columns of a KV8 row."""

    format: Format
    data: "Tensor"
    shape: tuple[int, int]
    scale: "Tensor | None" = None
    global_scale: float = 1.0
    rope_dim: int = 0

    @property
    def num_bytes(self) -> int:
        scales = 0 if self.scale is None else self.scale.numel() * self.scale.element_size()
        return self.data.numel() * self.data.element_size() + scales + 4 * (self.format is Format.NVFP4)

    def take(self, rows: "Tensor") -> "QuantTensor":
        """The given rows, in order. Not for FP8, whose scales are shared by 128 rows."""
        assert self.format is not Format.FP8
        # index_select and index_copy_ move whole rows; indexing by a tensor moves one byte at a time.
        data = self.data.index_select(0, rows)
        scale = None if self.scale is None else self.scale.index_select(0, rows)
        shape = (rows.shape[0], self.shape[1])
        return QuantTensor(self.format, data, shape, scale, self.global_scale, self.rope_dim)

    def span(self, start: int, stop: int) -> "QuantTensor":
        """Rows start .. stop-1, not copied. Not for FP8, as above."""
        assert self.format is not Format.FP8
        scale = None if self.scale is None else self.scale[start:stop]
        shape = (stop - start, self.shape[1])
        return QuantTensor(self.format, self.data[start:stop], shape, scale, self.global_scale, self.rope_dim)

    def put(self, rows: "Tensor", values: "QuantTensor") -> None:
        """Overwrite the given rows in place."""
        assert self.format is values.format and self.format is not Format.FP8
        self.data.index_copy_(0, rows, values.data)
        if self.scale is not None:
            assert values.scale is not None
            self.scale.index_copy_(0, rows, values.scale)


def join(parts: list[QuantTensor]) -> QuantTensor:
    """The rows of all parts, which are stored alike, one after the other."""
    import torch

    one = parts[0]
    data = torch.cat([part.data for part in parts])
    scale = None if one.scale is None else torch.cat([part.scale for part in parts if part.scale is not None])
    return QuantTensor(one.format, data, (data.shape[0], one.shape[1]), scale, one.global_scale, one.rope_dim)


def scale_bytes(nope_dim: int) -> int:
    """Scale bytes of one KV8 row: one per started block of 64, padded to a multiple of 8."""
    blocks = -(-nope_dim // KV_BLOCK)
    return -(-blocks // 8) * 8


def empty_rows(
    format: Format,
    num_rows: int,
    cols: int,
    rope_dim: int = 0,
    dtype: "torch.dtype | None" = None,
    device: "str | torch.device" = "cpu",
) -> QuantTensor:
    """A zeroed store of `num_rows` cache rows. KV8 keeps its rotary columns in `dtype` (bfloat16)."""
    import torch

    dtype = dtype or torch.bfloat16
    if format is Format.KV8:
        nope = cols - rope_dim
        data = torch.zeros(num_rows, nope + rope_dim * dtype.itemsize, dtype=torch.uint8, device=device)
        scale = torch.zeros(num_rows, scale_bytes(nope), dtype=torch.uint8, device=device)
        return QuantTensor(format, data, (num_rows, cols), scale, rope_dim=rope_dim)
    if format is Format.MXFP4:
        data = torch.zeros(num_rows, cols // 2, dtype=torch.uint8, device=device)
        scale = torch.zeros(num_rows, -(-cols // MX_BLOCK), dtype=torch.uint8, device=device)
        return QuantTensor(format, data, (num_rows, cols), scale)
    plain = {Format.BF16: torch.bfloat16, Format.F32: torch.float32}[format]
    return QuantTensor(format, torch.zeros(num_rows, cols, dtype=plain, device=device), (num_rows, cols))
