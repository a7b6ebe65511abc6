"""Weights in tiles, read back lane by lane as the tensor core's registers would hold them; on the CPU."""

import itertools

import pytest
import torch

from dsv4.gpu.shapes import BRICK, SCALES, tile_bytes
from dsv4.gpu.tiles import empty, put, rough_copy, tile
from dsv4.quant.codec import decode, e2m1_decode, e4m3_decode, e8m0_decode, encode_weight
from dsv4.quant.formats import Format, QuantTensor
from tests.support.layouts import codes_of

FORMATS = [Format.NVFP4, Format.MXFP4, Format.FP8, Format.BF16]
MAGNITUDE, SIGN = (9, 6, 3, 0), (15, 12, 14, 13)


def read_back(weight: QuantTensor) -> torch.Tensor:
    """[units*16, slices*512] values, by the rules of matvec.cu: which lane and register holds what."""
    tiled, format = tile(weight), weight.format
    out = torch.zeros(tiled.units * 16, tiled.slices * 512)
    width = {Format.NVFP4: 64, Format.MXFP4: 64, Format.FP8: 32, Format.BF16: 16}[format]
    for unit in range(tiled.units):
        for slice_ in range(tiled.slices):
            data = tiled.data[0, unit, slice_, 0].view(-1, 32, 16)  # load, lane, bytes
            scale = tiled.scale[0, unit, slice_, 0]
            for load in range(data.shape[0]):
                for lane in range(32):
                    g, t = lane // 4, lane % 4
                    for step in range(width // 16):
                        for register in range(4):
                            half, pair = register % 2, register // 2
                            for column in range(2):
                                first = 16 * t + 4 * step if format is Format.NVFP4 else 16 * step + 4 * t
                                k = load * width + first + 2 * pair + column
                                value = value_of(format, data[load, lane], step, register, column)
                                value *= scale_of(format, scale, load, lane, step, half, k)
                                out[unit * 16 + g + 8 * half, slice_ * 512 + k] = value
    return out


def value_of(format: Format, lane: torch.Tensor, step: int, register: int, column: int) -> float:
    if format is Format.BF16:
        return float(lane.view(torch.bfloat16)[2 * register + column])
    if format is Format.FP8:
        place = step * 8 + (register // 2) * 4 + (register % 2) * 2 + column
        return float(e4m3_decode(lane[place : place + 1]))
    word = int(lane.view(torch.int32)[step]) & 0xFFFFFFFF
    half = (word >> (16 * column)) & 0xFFFF
    code = (half >> MAGNITUDE[register]) & 7 | ((half >> SIGN[register]) & 1) << 3
    return float(e2m1_decode(torch.tensor([code], dtype=torch.uint8)))


def scale_of(
    format: Format, scale: torch.Tensor, load: int, lane: int, step: int, half: int, k: int
) -> float:
    if format is Format.BF16:
        return 1.0
    if format is Format.FP8:
        return float(scale.view(torch.float32)[k // 128])
    if format is Format.NVFP4:
        return float(e4m3_decode(scale.view(32, 16)[lane, 2 * load + half].reshape(1)))
    keeper = (lane & ~3) | (load >> 1)
    return float(e8m0_decode(scale.view(32, 8)[keeper, (load & 1) * 4 + half * 2 + step // 2].reshape(1)))


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_weight_is_where_the_kernel_looks(format: Format) -> None:
    torch.manual_seed(3)
    weight = encode_weight(torch.randn(20, 68) * torch.rand(20, 1) * 8, format)
    plain = QuantTensor(weight.format, weight.data, weight.shape, weight.scale, 1.0)
    back = read_back(weight)
    assert torch.equal(back[:20, :68], decode(plain))
    assert not back[20:].any() and not back[:, 68:].any()


@pytest.mark.parametrize("format", FORMATS[:2], ids=str)
def test_plain_codes_lie_where_the_conversion_looks(format: Format) -> None:
    """GPUs that convert E2M1: byte i of a lane's word is register i, its columns from the low half on."""
    torch.manual_seed(3)
    weight = encode_weight(torch.randn(20, 132), format)
    spread, plain = (
        empty(format, weight.shape, 1, 1, "cpu", is_plain=is_plain) for is_plain in (False, True)
    )
    assert put(spread, 0, 0, weight).bf16 and put(plain, 0, 0, weight).bf16
    assert torch.equal(spread.scale, plain.scale) and spread.data.shape == plain.data.shape
    lanes, others = (t.data.view(-1, 32, 16) for t in (spread, plain))
    for load, lane in itertools.product(range(len(lanes)), (0, 6, 31)):
        for step, register, column in itertools.product(range(4), range(4), range(2)):
            byte = int(others[load, lane, 4 * step + register])
            got = float(e2m1_decode(torch.tensor([byte >> 4 * column & 15], dtype=torch.uint8)))
            assert got == value_of(format, lanes[load, lane], step, register, column)
    if format is Format.NVFP4:
        for held in (spread, plain):
            codes, scales = codes_of(held)
            assert torch.equal(codes[0, 0], weight.data[:, :66])
            assert torch.equal(scales[0, 0], weight.scale.view(torch.uint8)[:, :8])


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_sizes(format: Format) -> None:
    tiled = tile(encode_weight(torch.randn(33, 1028), format))
    assert (tiled.units, tiled.slices) == (3, 3)
    assert tiled.num_bytes == tile_bytes(format, (33, 1028)) == 9 * (BRICK[format] + SCALES[format]) + 4


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_a_rough_copy_is_the_whole_matrix_in_fp4(scale: float) -> None:
    """Made of a few rows at a time, of which the last are fewer."""
    plain = torch.randn(150, 600, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16) * scale
    found = rough_copy(tile(encode_weight(plain, Format.BF16)), rows=64)
    wanted = tile(encode_weight(plain.float(), Format.NVFP4))
    for part in ("data", "scale", "factor", "fits_bf16", "fits_fp8"):
        ours, theirs = getattr(found, part), getattr(wanted, part)
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs, part
    assert rough_copy(found) is found
