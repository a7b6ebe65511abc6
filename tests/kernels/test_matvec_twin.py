"""matvec.cu's own source on the CPU, warps in shuffled orders, copies as late as they may come, against exact
sums of whole numbers."""

import ctypes
import math
from dataclasses import replace

import pytest
import torch
from matvec_support import BF16, F32, FORMATS, bank, launch, tiled, wanted, weight, whole
from torch import Tensor

from dsv4.kernels.common.tiles import tile
from dsv4.kernels.decode.matvec import COLUMNS, FLOAT_COLUMNS, MatVec, Mixing, Product, Tasks, splits
from dsv4.ops.linear.ref import round_input
from dsv4.ops.mhc.ref import sinkhorn
from dsv4.quant.codec import encode_weight
from dsv4.quant.formats import Format, QuantTensor
from tests.support.twin import needs_compiler, twin_of

pytestmark = needs_compiler
QUANTISED = [format for format in FORMATS if format is not Format.BF16]
WIDE = 4612  # columns: ten slices, in two passes of five


twin = twin_of("matvec", level="-O1", launch=ctypes.c_char_p)


def rows_of_x(rows: int, k: int, act: torch.dtype) -> Tensor:
    """Rows of different sizes."""
    sizes = 2.0 ** (torch.arange(rows) % 4).view(-1, 1)
    return (whole(rows, k, most=2, seed=rows) * sizes).to(act)


def check_product(
    twin: ctypes.CDLL, format: Format, act: torch.dtype, n: int, k: int, rows: int, blocks: int, seed: int
) -> None:
    """Rows lie further apart than they are long: nothing there is read or written."""
    tiles, w = tiled(format, n, k, seed)
    x, pad = rows_of_x(rows, k, act), 4 if rows % 2 else 8  # copied by 8 bytes or by 16
    apart = torch.nn.functional.pad(x, (0, pad), value=math.nan)
    out = torch.full((rows, n + 3), 7.0, dtype=act if seed % 2 else F32)
    carry = torch.full((rows * n,), math.nan)
    one = Product(tiles, apart, out, x_stride=k + pad, y_stride=n + 3)
    launch(twin, MatVec([one], rows, blocks=blocks, carry=carry), seed)
    assert torch.equal(out[:, :n], wanted(x, w).to(out.dtype)), (rows, n, k)
    assert out[:, n:].eq(7.0).all()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_single_row(twin: ctypes.CDLL, format: Format) -> None:
    """Blocks with one unit and with many, with idle warps, in one pass and in two, of the same length or not."""
    cases = [(16, 64, 1), (200, 500, 1), (333, 1028, 2), (100, 1540, 1), (100, 4096, 2), (90, WIDE, 1)]
    for seed, (n, k, blocks) in enumerate([*cases, (45, 4100, 3), (40, 8192, 1)]):
        check_product(twin, format, BF16, n, k, 1, blocks, seed)


@pytest.mark.parametrize("act", [BF16, F32], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_batches(twin: ctypes.CDLL, format: Format, act: torch.dtype) -> None:
    """Groups of eight rows, of float32 two; every number of warps that share a sum, up to sixteen groups."""
    cases = [(600, 64, 2, 1), (300, 1028, 8, 2), (100, 1540, 9, 2), (72, 4096, 3, 1), (90, WIDE, 9, 3)]
    for seed, (n, k, rows, blocks) in enumerate([*cases, (200, 4100, 7, 1), (40, 2600, 20, 4)]):
        check_product(twin, format, act, n, k, 1 + rows if act == F32 else rows, blocks, seed)
