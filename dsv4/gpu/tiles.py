"""Start: weights as GPU kernels want them, tiles of 16 rows in the order of tensor cores' registers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from dsv4.errors import CheckpointError
from dsv4.gpu import architectures, driver
from dsv4.gpu.shapes import BRICK, ROWS, SCALES, SLICE
from dsv4.quant.codec import NV_RANGE, e2m1_decode, e4m3_decode, e8m0_decode, encode_weight, unpack_nibbles
from dsv4.quant.formats import FP8_TILE, MX_BLOCK, NV_BLOCK, Format, QuantTensor

CODE = {Format.NVFP4: 0, Format.MXFP4: 1, Format.FP8: 2, Format.BF16: 3}
# linear/prefill_sm90_8.cuh: how far, in powers of two, a scale may lie below its row's largest, and the
# least of those.
FP8_SPAN, FP8_LEAST = 16, 30
# Where the three magnitude bits and the sign of a lane's four codes lie in each half of a word, for GPUs that
# have no instruction for E2M1. Others want the two codes of a register in one byte (Tiled.is_plain).
_MAGNITUDE, _SIGN = (9, 6, 3, 0), (15, 12, 14, 13)


@dataclass(frozen=True)
class Tiled:
    """`count` matrices [N, K], or pairs of them (gate and up), each multiplied by its float32 `factor`.

    They follow one another in `data` and `scale`; or, with `places`, each lies that many bytes from where
    `data` and `scale` begin, wherever that is (experts/placement.py). `is_plain`: FP4 codes lie two a byte,
    as GPUs want them whose tensor cores or conversions take FP4; of any other format nothing.
    """

    format: Format
    shape: tuple[int, int]
    data: Tensor  # uint8 [count, units, slices, halves, brick]
    scale: Tensor  # uint8 [count, units, slices, halves, scales of a brick]
    factor: Tensor  # float32 [count, halves]
    fits_bf16: bool = True
    fits_fp8: bool = True
    places: Tensor | None = None  # int64 [count]
    is_plain: bool = False

    @property
    def count(self) -> int:
        return self.factor.shape[0]

    @property
    def units(self) -> int:
        return self.data.shape[1]

    @property
    def slices(self) -> int:
        return self.data.shape[2]

    @property
    def halves(self) -> int:
        return self.data.shape[3]

    @property
    def num_bytes(self) -> int:
        """Of all matrices, wherever they lie."""
        _, *rest = self.data.shape
        one = math.prod(rest) + math.prod(self.scale.shape[1:])
        return self.count * one + 4 * self.factor.numel()

    def span(self, first: int, stop: int) -> "Tiled":
        """Matrices first .. stop-1, not copied."""
        if self.places is not None:
            return replace(self, factor=self.factor[first:stop], places=self.places[first:stop])
        data, scale, factor = self.data[first:stop], self.scale[first:stop], self.factor[first:stop]
        return replace(self, data=data, scale=scale, factor=factor)

    def rows(self, start: int, stop: int) -> "Tiled":
        """Rows start .. stop-1 of a single matrix, not copied; both on a tile's edge, or the end."""
        assert self.count == 1 and self.halves == 1 and self.places is None and start % ROWS == 0
        stop = min(stop, self.shape[0])
        units = slice(start // ROWS, -(-stop // ROWS))
        shape = (stop - start, self.shape[1])
        return replace(self, shape=shape, data=self.data[:, units], scale=self.scale[:, units])


@dataclass(frozen=True)
class Bank:
    """All experts of a layer (or the shared one alone): gate and up in pairs, and down."""

    w13: Tiled
    w2: Tiled


def is_plain_on(device: str | torch.device) -> bool:
    """Whether kernels for this device read FP4 codes two a byte: the one place that chooses the layout."""
    return architectures.ARCHITECTURES[architectures.capability(torch.device(device))].converts_fp4


def empty(
    format: Format,
    shape: tuple[int, int],
    count: int,
    halves: int,
    device: str | torch.device,
    is_plain: bool | None = None,
) -> Tiled:
    """`is_plain`: None for the layout of the device's kernels."""
    units, slices = -(-shape[0] // ROWS), -(-shape[1] // SLICE)
    lead = (count, units, slices, halves)
    return Tiled(
        format=format,
        shape=shape,
        data=torch.empty(*lead, BRICK[format], dtype=torch.uint8, device=device),
        scale=torch.empty(*lead, SCALES[format], dtype=torch.uint8, device=device),
        factor=torch.empty(count, halves, dtype=torch.float32, device=device),
        is_plain=is_plain_on(device) if is_plain is None else is_plain,
    )


def tile(weight: QuantTensor) -> Tiled:
    """One weight in its tiles, on the device where its bytes are."""
    out = empty(weight.format, weight.shape, 1, 1, weight.data.device)
    return put(out, 0, 0, weight).of(out)


def rough_copy(weight: Tiled, rows: int = 8192) -> Tiled:
    """A matrix in NVFP4, for drafts: they may be rough. A few rows at a time, for which there is memory."""
    if not weight.format.is_plain:
        return weight
    parts = [(first, min(first + rows, weight.shape[0])) for first in range(0, weight.shape[0], rows)]
    largest = max(float(values(weight.rows(*part)).abs().amax()) for part in parts)
    scale, out = largest / NV_RANGE or 1.0, empty(Format.NVFP4, weight.shape, 1, 1, weight.data.device)
    fits = [
        put(out.rows(*part), 0, 0, encode_weight(values(weight.rows(*part)), Format.NVFP4, scale))
        for part in parts
    ]
    return Fits(all(part.bf16 for part in fits), all(part.fp8 for part in fits)).of(out)


@dataclass(frozen=True)
class Fits:
    """In which types a product may hold a weight's codes times their scales (without the factor), exactly."""

    bf16: bool = True
    fp8: bool = True  # as linear/prefill_sm90_8.cuh does

    def of(self, weight: Tiled) -> Tiled:
        """The weight, with what one of its matrices says of all."""
        bf16, fp8 = weight.fits_bf16 and self.bf16, weight.fits_fp8 and self.fp8
        return replace(weight, fits_bf16=bf16, fits_fp8=fp8)


def put(to: Tiled, index: int, half: int, weight: QuantTensor) -> Fits:
    """Write `weight` as matrix `index` (and half) of a bank."""
    factor = torch.tensor([weight.global_scale], device=to.factor.device)
    bf16, fp8 = put_stack(to, [index], half, weight, factor).tolist()
    return Fits(bf16, fp8)


def can_stack(format: Format, rows: int) -> bool:
    """Whether matrices of so many rows, one below the other, are tiled as one matrix of all rows."""
    return rows % (FP8_TILE if format is Format.FP8 else ROWS) == 0


def put_stack(to: Tiled, at: Sequence[int], half: int, weight: QuantTensor, factor: Tensor) -> Tensor:
    """Write matrices that lie one below the other in `weight` as those `at` indices (and half) of a bank.

    factor: of each; `weight.global_scale` is not looked at. -> [2] bool on the device, as in Fits, for all.
    """
    count, units = len(factor), len(factor) * to.units
    assert weight.format is to.format and weight.shape == (count * to.shape[0], to.shape[1])
    assert count == 1 or can_stack(to.format, to.shape[0])
    if weight.shape[1] % 4:
        raise CheckpointError(f"a weight of {weight.shape[1]} columns: the GPU kernels need a multiple of 4")
    lead = (count, to.units, to.slices, -1)
    runs = list(_runs(at))
    data = _data(weight, units, to.slices, to.is_plain).view(lead)
    for here, there in runs:
        to.data[there, :, :, half] = data[here]
        to.factor[there, half] = factor[here]
    fits = torch.ones(2, dtype=torch.bool, device=factor.device)
    if weight.format is Format.BF16:
        return fits
    scale = _scales(weight, units, to.slices)
    for here, there in runs:
        to.scale[there, :, :, half] = scale.view(lead)[here]
    if weight.format is Format.FP8:
        mantissa, _ = torch.frexp(scale.view(torch.float32))
        fits[0] = ((mantissa.abs() == 0.5) | (mantissa == 0)).all()
    elif weight.format is Format.MXFP4:
        fits[1] = _fits_fp8(weight)
    return fits


def _runs(numbers: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Of numbers that follow one another: where they stand in the list, and they themselves."""
    first = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield slice(first, place), slice(numbers[first], numbers[place - 1] + 1)
            first = place


def _fits_fp8(weight: QuantTensor) -> Tensor:
    """MXFP4: whether the scales of each row, blocks of zeros apart, lie within FP8_SPAN of its largest."""
    assert weight.scale is not None
    codes = weight.scale.view(torch.uint8)
    tops = codes.amax(1, keepdim=True).clamp(min=FP8_LEAST)
    far = tops - codes.clamp(max=tops) > FP8_SPAN
    blocks = _padded(weight.data, weight.shape[0], codes.shape[1] * MX_BLOCK // 2).view(*codes.shape, -1)
    is_wrong = (tops == 255) | far & ((blocks & 0x77) != 0).any(-1)  # 255: NaN
    return ~is_wrong.any()


def _padded(x: Tensor, rows: int, cols: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, cols - x.shape[1], 0, rows - x.shape[0]))


def _data(weight: QuantTensor, units: int, slices: int, is_plain: bool) -> Tensor:
    """[units, slices, brick] bytes. A lane is (g, t): rows g and g+8, columns 4t .. 4t+3 of every 16."""
    if weight.format is Format.BF16:
        plain = _padded(weight.data.view(torch.int16), units * ROWS, slices * SLICE)
        # unit, half of the rows, g, slice, sixteen, t, pair of columns, column
        parts = plain.view(units, 2, 8, slices, 32, 4, 2, 2)
        ordered = parts.permute(0, 3, 4, 2, 5, 6, 1, 7).contiguous()
        return ordered.view(torch.uint8).view(units, slices, -1)
    if weight.format is Format.FP8:
        codes = _padded(weight.data.view(torch.uint8), units * ROWS, slices * SLICE)
        parts = codes.view(units, 2, 8, slices, 16, 2, 4, 2, 2)
        return parts.permute(0, 3, 4, 2, 6, 5, 7, 1, 8).contiguous().view(units, slices, -1)
    packed = _padded(weight.data, units * ROWS, slices * SLICE // 2)
    # unit, half, g, slice, sixty-four, sixteen, four, pair of columns (one byte). A lane has four columns of
    # each sixteen, or with NVFP4 one sixteen, which has one scale.
    lanes = (5, 6) if weight.format is Format.NVFP4 else (6, 5)
    parts = packed.view(units, 2, 8, slices, 8, 4, 4, 2).permute(0, 3, 4, 2, *lanes, 7, 1)
    if is_plain:
        return parts.contiguous().view(units, slices, -1)
    # A lane's four bytes in the order of its registers, whose bits in a word do not meet: a sum joins them.
    twos = parts.contiguous().view(torch.int16).flatten().int() & 0xFFFF
    words = _words(packed.device).index_select(0, (twos.view(-1, 2) + _halves(packed.device)).flatten())
    return words.view(-1, 2).sum(1, dtype=torch.int32).view(torch.uint8).view(units, slices, -1)


@cache
def _halves(device: torch.device) -> Tensor:
    return torch.tensor([0, 1 << 16], dtype=torch.int32, device=device)


@cache
def _words(device: torch.device) -> Tensor:
    """What the bytes of registers 0 and 1, then of 2 and 3, become in a word."""
    both = torch.arange(1 << 16, dtype=torch.int32).repeat(2).view(2, -1)
    words = torch.zeros_like(both)
    for register in range(4):
        for column in range(2):
            code = (both[register // 2] >> (8 * (register % 2) + 4 * column)) & 15
            words[register // 2] |= (code & 7) << (_MAGNITUDE[register] + 16 * column)
            words[register // 2] |= (code >> 3) << (_SIGN[register] + 16 * column)
    return words.flatten().to(device)


def _scales(weight: QuantTensor, units: int, slices: int) -> Tensor:
    """[units, slices, scales of a brick] bytes."""
    assert weight.scale is not None
    if weight.format is Format.FP8:
        raw = weight.scale
        scale = e8m0_decode(raw) if raw.dtype == torch.uint8 else raw.float()
        rows = torch.arange(units, device=scale.device) * ROWS // FP8_TILE
        wide = torch.nn.functional.pad(scale, (0, slices * 4 - scale.shape[1]))
        return wide[rows].contiguous().view(torch.uint8).view(units, slices, 16)
    block = NV_BLOCK if weight.format is Format.NVFP4 else MX_BLOCK
    codes = _padded(weight.scale.view(torch.uint8), units * ROWS, slices * SLICE // block)
    if weight.format is Format.NVFP4:  # unit, half, g, slice, load, t: a lane's own block of every load
        parts = codes.view(units, 2, 8, slices, 8, 4).permute(0, 3, 2, 5, 4, 1)
    else:  # unit, half, g, slice, t (the lane that keeps it), which of its two loads, block of that load
        parts = codes.view(units, 2, 8, slices, 4, 2, 2).permute(0, 3, 2, 4, 5, 1, 6)
    return parts.contiguous().view(units, slices, -1)


def values(weight: Tiled, index: int = 0, half: int = 0) -> Tensor:
    """One matrix as float32 [N, K] again: what kernels multiply with."""
    units, slices = weight.units, weight.slices
    data, scale = _stored(weight, index, weight.data), _stored(weight, index, weight.scale)
    codes = _codes(data[:, :, half].contiguous(), weight.format, weight.is_plain)
    if weight.format is not Format.BF16:
        codes = codes * _scale_values(scale[:, :, half].contiguous(), weight.format)
    rows, cols = weight.shape
    return codes.reshape(units * ROWS, slices * SLICE)[:rows, :cols] * weight.factor[index, half]


def _stored(weight: Tiled, index: int, part: Tensor) -> Tensor:
    """The bytes of one matrix, [units, slices, halves, ...], wherever they lie."""
    if weight.places is None:
        return part[index]
    out = torch.empty_like(part[0])
    driver.copy_bytes(out, part.data_ptr() + int(weight.places[index]))
    return out


def _codes(data: Tensor, format: Format, is_plain: bool) -> Tensor:
    """[units, slices, brick] bytes -> float32 [units, 16, slices, 512]: the inverse of `_data`."""
    units, slices, _ = data.shape
    if format is Format.BF16:
        parts = data.view(torch.bfloat16).view(units, slices, 32, 8, 4, 2, 2, 2)
        return parts.permute(0, 6, 3, 1, 2, 4, 5, 7).reshape(units, ROWS, slices, SLICE).float()
    if format is Format.FP8:
        parts = data.view(units, slices, 16, 8, 4, 2, 2, 2, 2).permute(0, 7, 3, 1, 2, 5, 4, 6, 8)
        return e4m3_decode(parts.reshape(units, ROWS, slices, SLICE))
    lanes = (4, 5) if format is Format.NVFP4 else (5, 4)
    if is_plain:
        parts = data.view(units, slices, 8, 8, 4, 4, 2, 2)
    else:
        words = data.view(torch.int32).view(units, slices, 8, 8, 4, 4)
        parts = torch.empty(*words.shape, 2, 2, dtype=torch.uint8, device=data.device)
        for register in range(4):
            code = torch.zeros_like(words)
            for column in range(2):
                magnitude = (words >> (_MAGNITUDE[register] + 16 * column)) & 7
                sign = (words >> (_SIGN[register] + 16 * column)) & 1
                code |= (magnitude | sign << 3) << (4 * column)
            parts[..., register // 2, register % 2] = code.to(torch.uint8)
    packed = parts.permute(0, 7, 3, 1, 2, *lanes, 6).reshape(units, ROWS, slices, SLICE // 2)
    return e2m1_decode(unpack_nibbles(packed))


def _scale_values(scale: Tensor, format: Format) -> Tensor:
    """[units, slices, scales of a brick] bytes -> float32, one for each column: the inverse of `_scales`."""
    units, slices, _ = scale.shape
    if format is Format.FP8:
        wide = scale.view(torch.float32).view(units, 1, slices, 4)
    elif format is Format.NVFP4:
        codes = scale.view(units, slices, 8, 4, 8, 2).permute(0, 5, 2, 1, 4, 3)
        wide = e4m3_decode(codes.reshape(units, ROWS, slices, 32))
    else:
        codes = scale.view(units, slices, 8, 4, 2, 2, 2).permute(0, 5, 2, 1, 3, 4, 6)
        wide = e8m0_decode(codes.reshape(units, ROWS, slices, 16))
    return wide.repeat_interleave(SLICE // wide.shape[-1], -1)
