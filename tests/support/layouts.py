"""Layouts of tensor cores, there and back: what tests read, and no kernel of ours."""

import torch
from torch import Tensor

from dsv4.gpu.tiles import _MAGNITUDE, _SIGN, Tiled
from dsv4.ops.linear.prefill_packed import IN_16_BITS, Packed
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


def plain_rows(packed: Packed) -> Tensor:
    """[rows, K] of one matrix in BF16, as it was before it was packed."""
    assert packed.mode == IN_16_BITS[Format.BF16] and packed.matrices == 1, packed.mode
    groups, slices = packed.data.shape[:2]
    pairs = packed.data[..., : packed.mode.blocks * packed.mode.group_bytes].contiguous().view(torch.int32)
    pairs = pairs.view(groups, slices, 4, 2, 2, 8, 8, 4)  # 128 columns, 8 rows, 64 columns, row, chunk
    # Chunk c of row r is at c ^ r; of sixteen columns, every other pair is in one, the rest in the next.
    each = torch.arange(8, device=pairs.device)
    pairs = pairs.take_along_dim((each.unsqueeze(1) ^ each).view(1, 1, 1, 1, 1, 8, 8, 1), dim=6)
    by_row = pairs.view(groups, slices, 4, 2, 2, 8, 4, 2, 4).permute(0, 3, 5, 1, 2, 4, 6, 8, 7)
    by_row = by_row.reshape(16 * groups, -1).view(torch.bfloat16)
    return by_row[: packed.rows, : packed.k].contiguous()
