"""Rows in FP8 and NVFP4 on the device are the reference's, bit for bit: on hostile rows, fused and plain."""

import pytest
import torch
from step_support import DTYPES, IS_INTERPRETED, blank, check, rand, runs, there
from torch import Tensor

from dsv4.ops.experts import cpu as experts_cpu
from dsv4.ops.linear.cpu import round_input
from dsv4.ops.rows.cpu import rms_norm
from dsv4.quant import codec
from tests.support.layouts import swizzle_32_4_4

pytest.importorskip("triton", reason="Triton is not installed")

from dsv4.ops.rows import quantize

pytestmark = runs
WIDTHS = [96, 512] if IS_INTERPRETED else [96, 512, 1536, 2048, 4096, 7168, 16384, 65536]


def hostile(width: int, dtype: torch.dtype) -> Tensor:
    """Rows of each kind that a quantiser can stumble over."""
    usual = rand(width, seed=1)
    ties = torch.tensor(codec._E2M1_LAST).repeat(width)[:width]
    rows = [
        usual,
        torch.zeros(width),
        usual * 700,  # the last layers' rows
        usual * 1e-3,
        torch.where(torch.arange(width) == 5, torch.tensor(3e4), usual * 1e-2),  # one huge value
        torch.where(torch.arange(width) % 16 == 3, torch.tensor(2.0**-8), usual * 0),
        usual * 2.0**-126,  # denormal global scales
        usual * 2.0**-134,  # denormal in themselves
        usual * 2.0**-140,  # the global scale of float32 rows underflows
        usual * 1e37,
        torch.where(torch.arange(width) == 7, torch.tensor(float("inf")), usual),
        torch.where(torch.arange(width) == 7, torch.tensor(-float("inf")), usual),
        torch.where(torch.arange(width) == width - 1, torch.tensor(float("nan")), usual),
        # Ties of codes: amax is 6 * 448, so the global scale is 1, and a block's largest value 6.
        torch.where(torch.arange(width) == 0, torch.tensor(2688.0), torch.where(
            torch.arange(width) % 16 == 0, torch.tensor(6.0), ties)),
        # Ties of block scales, between 16 and 18.
        torch.where(torch.arange(width) == 0, torch.tensor(2688.0), torch.full((width,), 6.0 * 17)),
        -(usual.abs()),
    ]  # fmt: skip
    x = torch.stack(rows).to(dtype)
    if IS_INTERPRETED and dtype == torch.bfloat16:
        # Triton's interpreter reads denormal bfloat16 numbers as others; a GPU does not.
        x = torch.where((x != 0) & (x.abs() < torch.finfo(dtype).tiny), 2.0**-100, x)
    return x


def check_same(got: Tensor, want: Tensor, what: str) -> None:
    """Bit for bit, but for the payload of NaN."""
    got = got.cpu()
    assert got.dtype == want.dtype and got.shape == want.shape, what
    same = (got == want) | (got.isnan() & want.isnan())
    assert bool(same.all()), f"{what}: {[(int(r), int(c)) for r, c in (~same).nonzero()[:4]]}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("activations", ["a16", "a8", "a4"])
def test_values(activations: str, width: int, dtype: torch.dtype) -> None:
    x = hostile(width, dtype)
    out = blank(*x.shape, dtype=dtype)
    quantize.round_values(there(x), out, activations)
    want = round_input(x, activations)
    check_same(out, want, activations)
    assert bool(want[12].isnan().any()) and not bool(want[:12].isnan().any()), "NaN is to be seen where it is"
    in_place = there(x)
    quantize.round_values(in_place, in_place, activations)
    check_same(in_place, want, f"{activations} in place")


@pytest.mark.parametrize("is_tiled", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_codes(width: int, is_tiled: bool) -> None:
    if is_tiled and IS_INTERPRETED and width > 96:
        pytest.skip("128 rows of scales, one after the other")
    x = hostile(width, torch.bfloat16)
    if is_tiled and not IS_INTERPRETED:
        x = torch.cat([x] * 9)[:130]  # more than one tile of scales
    packed = quantize.pack(there(x), is_tiled)
    factor = codec.nvfp4_global(x)
    codes, scales = codec.nvfp4_rows(x, factor)
    assert torch.equal(packed.factor.cpu(), factor.squeeze(1))
    assert torch.equal(packed.scales.cpu(), swizzle_32_4_4(scales) if is_tiled else scales)
    # What is times NaN does not matter, nor what is times zero: where one code is worth so little, 0 / 0 has
    # a code whose sign is the CPU's choice.
    unit = codec.e4m3_decode(scales) * factor
    is_number = (unit > 0).repeat_interleave(8, 1)[:, : width // 2]
    assert bool(is_number.any(1).all())
    assert torch.equal(packed.codes.cpu()[is_number], codec.pack_nibbles(codes)[is_number])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activations", ["a8", "a4"])
def test_norm(activations: str, dtype: torch.dtype) -> None:
    """The norm is the reference's but for the order of its sum; its rounding is that of what it gave."""
    x, weight = rand(5, 1000, dtype=dtype), 1 + 0.1 * rand(1000, seed=2)
    normed, out = blank(5, 1000, dtype=dtype), blank(5, 1000, dtype=dtype)
    quantize.round_values(there(x), out, activations, there(weight), 1e-6, normed)
    check(normed, rms_norm(x, weight, 1e-6), "norm")
    check_same(out, round_input(normed.cpu(), activations), "rounded")
    packed = quantize.pack(there(x), norm_weight=there(weight), eps=1e-6)
    codes, scales = codec.nvfp4_rows(normed.cpu(), codec.nvfp4_global(normed.cpu()))
    assert torch.equal(packed.codes.cpu(), codec.pack_nibbles(codes))
    assert torch.equal(packed.scales.cpu(), scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu(weighted: bool, dtype: torch.dtype) -> None:
    """Beyond the limit too. The reference's expert has products that change nothing."""
    width, limit = 192, 10.0
    x = 8 * rand(6, 2 * width, dtype=dtype)
    weights = rand(6, seed=3).abs() if weighted else None
    unit = torch.eye(2 * width)
    expert = (unit[:, :width].contiguous(), unit[:, width:].contiguous(), torch.eye(width))
    want = experts_cpu.ffn(x, expert, limit, "a16", weights).view(6, width).to(dtype)
    there_weights = None if weights is None else there(weights)
    got = quantize.swiglu_values(there(x), there_weights, limit, "a16")
    check(got, want, "swiglu")
    for activations in ("a8", "a4"):
        rounded = quantize.swiglu_values(there(x), there_weights, limit, activations)
        check_same(rounded, round_input(got.cpu(), activations), activations)
    packed = quantize.swiglu_pack(there(x), there_weights, limit)
    codes, scales = codec.nvfp4_rows(got.cpu(), codec.nvfp4_global(got.cpu()))
    assert torch.equal(packed.codes.cpu(), codec.pack_nibbles(codes))
    assert torch.equal(packed.scales.cpu(), scales)


@pytest.mark.parametrize("activations", ["a8", "a4"])
def test_a_row_does_not_see_its_company(activations: str) -> None:
    x = hostile(512, torch.bfloat16)
    out = blank(*x.shape, dtype=x.dtype)
    quantize.round_values(there(x), out, activations)
    for row in (0, 4, 12):
        alone = blank(1, 512, dtype=x.dtype)
        quantize.round_values(there(x[row : row + 1]), alone, activations)
        check_same(alone, out[row : row + 1].cpu(), f"row {row}")
    # Columns of a wider matrix, and no rows at all.
    wide = there(torch.cat((x, 1e6 * x), dim=1))
    quantize.round_values(wide[:, :512], wide[:, :512], activations)
    check_same(wide[:, :512], out.cpu(), "columns")
    quantize.round_values(out[:0], out[:0], activations)
