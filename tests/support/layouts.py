"""Layouts of tensor cores, there and back: what tests read, and no kernel of ours."""

import torch
from torch import Tensor

from dsv4.gpu.tiles import _MAGNITUDE, _SIGN, Tiled
from dsv4.quant.formats import NV_BLOCK, Format


def swizzle_32_4_4(scale: Tensor) -> Tensor:
    """Linear scales [M, Ks] -> the tensor cores' 512-byte tiles of 128 rows x 4 columns, flat, 0-padded."""
    rows, cols = scale.shape
    padded = torch.nn.functional.pad(scale, (0, -cols % 4, 0, -rows % 128))
    # row m = 128*tile + 32*quarter + lane; column k = 4*block + inner
    tiles = padded.reshape(-1, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().flatten()


def codes_of(weight: Tiled) -> tuple[Tensor, Tensor]:
    """The codes [count, halves, N, K/2] and scales [count, halves, N, K/16] that NVFP4 tiles were made of."""
    assert weight.format is Format.NVFP4
    (n, k), lead = weight.shape, (weight.count, weight.units, weight.slices, weight.halves)
    # sixty-four, g, t, four, pair of columns, row half
    shape = (*lead, 8, 8, 4, 4, 2, 2)
    if weight.is_plain:
        bytes_ = weight.data.view(shape)
    else:
        words = weight.data.contiguous().view(torch.int32).view(shape[:-2])
        bytes_ = torch.zeros(shape, dtype=torch.uint8, device=words.device)
        for pair in range(2):
            for half in range(2):
                for column in range(2):
                    register = half + 2 * pair
                    code = (words >> (_MAGNITUDE[register] + 16 * column)) & 7
                    code |= ((words >> (_SIGN[register] + 16 * column)) & 1) << 3
                    bytes_[..., pair, half] |= (code << (4 * column)).to(torch.uint8)
    # count, half of a pair, unit, row half, g, slice, sixty-four, sixteen, four, pair of columns
    codes = bytes_.permute(0, 3, 1, 9, 5, 2, 4, 6, 7, 8).reshape(
        weight.count, weight.halves, -1, weight.slices * 256
    )
    scales = weight.scale.view(*lead, 8, 4, 8, 2)  # g, t, load, row half
    scales = scales.permute(0, 3, 1, 7, 4, 2, 6, 5).reshape(
        weight.count, weight.halves, -1, weight.slices * 32
    )
    return codes[:, :, :n, : k // 2].contiguous(), scales[:, :, :n, : k // NV_BLOCK].contiguous()
