"""Rounding of BF16 activations in CUDA, by its own source on the CPU: it is the codec's, bit for bit."""

import ctypes
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.ops.experts import cpu as experts_cpu
from dsv4.ops.linear.cpu import round_input
from dsv4.ops.rows.cpu import rms_norm
from dsv4.quant import codec
from tests.support.layouts import swizzle_32_4_4
from tests.support.twin import at, needs_compiler, twin_of

pytestmark = needs_compiler
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


twin = twin_of("round", launch=ctypes.c_char_p)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


def check_codes(twin: ctypes.CDLL, x: Tensor, units: Tensor) -> None:
    """x [N] BF16 in blocks of these units [N], none of them zero."""
    x, units = x.contiguous(), units.contiguous()
    got, want = torch.empty(x.shape, dtype=torch.uint8), codec.e2m1_encode(x.float() / units)
    twin.codes(at(x), at(units), ctypes.c_int64(x.numel()), at(got))
    wrong = (got != want).nonzero().flatten()[:4]
    assert not len(wrong), [
        (float(x[i]), units[i].item().hex(), int(got[i]), int(want[i])) for i in wrong.tolist()
    ]


def check_halves(twin: ctypes.CDLL, x: Tensor, units: Tensor, over: float) -> int:
    """The same of what a product reads, where rows have a scale of unit / `over`. -> how many were usual."""
    scales = units / over
    top = 2688 * scales
    is_usual = (top >= 2.0**-48) & (top < 2.0**127) & (x.float().abs() < 9 * units)
    x, units, scales = (t[is_usual].contiguous() for t in (x, units, scales))
    got, want = torch.empty(len(x)), codec.e2m1_decode(codec.e2m1_encode(x.float() / units)) * units
    twin.halves(*(at(t) for t in (x, units, scales)), ctypes.c_int64(len(x)), at(got))
    assert torch.equal(got, want.bfloat16().float())
    return len(x)


@pytest.mark.parametrize("exponent", [-148, -140, -133, -126, -125, -100, -61, -60, -59, 0, 60, 120])
def test_every_number_beside_every_tie(twin: ctypes.CDLL, exponent: int) -> None:
    """Every mantissa of BF16, with all float32 units for which x / unit is within 20 ulps of a tie: elsewhere
    no rounding of x / unit can matter."""
    x = torch.arange(128, 256).float() * 2.0**-7
    near = x[:, None] / torch.tensor(TIES)  # units, in the middle
    around = (near.view(torch.int32)[:, :, None] + torch.arange(-20, 21)).view(torch.float32)
    units = torch.ldexp(around.double(), torch.tensor(exponent)).float()  # rounded where it is denormal
    wide = torch.ldexp(x.double(), torch.tensor(exponent)).bfloat16()[:, None, None].expand(units.shape)
    inside = (units > 0) & (wide > 0) & torch.isfinite(wide)
    for sign in (1, -1):
        check_codes(twin, (sign * wide)[inside], units[inside])
    for over in (2.0**-9, 1.0, 1.125, 448.0):
        count = check_halves(twin, wide[inside], units[inside], over)
        assert count > 20_000 or exponent < 0 or exponent == 120, "some rows are not usual"


def test_every_number_in_some_blocks(twin: ctypes.CDLL) -> None:
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite()]
    random = torch.Generator().manual_seed(0)
    exponents = torch.arange(-149, 126, 11).double()
    units = (2**exponents * (1 + torch.rand(len(exponents), generator=random).double())).float()
    for unit in units[units > 0].tolist():
        check_codes(twin, numbers, torch.full(numbers.shape, unit))
        check_halves(twin, numbers, torch.full(numbers.shape, unit), 3.0)


def test_rows(twin: ctypes.CDLL) -> None:
    """Scales too, of rows of every size; with infinity, NaN, zeros, denormals."""
    width, random = 1024, torch.Generator().manual_seed(1)
    usual = torch.randn(width, generator=random)
    sizes = 2.0 ** torch.arange(-140, 127).double()
    x = (usual.double() * sizes[:, None]).clamp(-3.3e38, 3.3e38).bfloat16()
    # Blocks of all sizes in a row; and values that are alike but for a block's largest.
    x[::3] *= (
        (2.0 ** -torch.randint(0, 20, (width // 16,), generator=random)).repeat_interleave(16).bfloat16()
    )
    x[1::7, ::16] *= 30
    x[5], x[6, 7], x[9, 3], x[9, 40], x[12, 100] = 0, float("inf"), -float("inf"), 2.0, float("nan")
    blocks = width // 16
    codes = torch.empty(len(x), width // 2, dtype=torch.uint8)
    scales, factor = torch.empty(len(x), blocks, dtype=torch.uint8), torch.empty(len(x))
    values = torch.empty_like(x)
    sizes_of = (ctypes.c_int64(n) for n in x.shape)
    assert twin.rows(at(x), *sizes_of, *(at(t) for t in (codes, scales, factor, values))) == 0
    want_factor = codec.nvfp4_global(x)
    want_codes, want_scales = codec.nvfp4_rows(x, want_factor)
    assert torch.equal(factor, want_factor.squeeze(1)) and torch.equal(scales, want_scales)
    want = codec.nvfp4_round(x)
    same = (bits(values) == bits(want)) | (values.isnan() & want.isnan())
    # What one is worth: of NaN nothing has a code, and where it underflows to zero 0 / 0 has none.
    unit = (codec.e4m3_decode(scales) * want_factor).repeat_interleave(16, 1)
    assert bool((same | (unit == 0)).all()) and bool((values[unit == 0] == 0).all())
    is_number = unit > 0
    assert bool(is_number.any(1)[: len(x) // 2].any()) and bool(values[12].isnan().any())
    got = codec.unpack_nibbles(codes)
    assert torch.equal(got[is_number], want_codes[is_number])


@pytest.fixture
def quantize(twin: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The launchers, with the kernel's twin."""
    module = pytest.importorskip("dsv4.ops.rows.quantize", reason="Triton is not installed")
    if module.triton.knobs.runtime.interpret:
        pytest.skip("there Triton's kernels run")
    threads_of: set[int] = set()

    def call(
        source: str, kernel: str, device: Any, rows: Any, blocks: int, threads: int, overlap: bool
    ) -> None:
        words, makes_codes, made_by = re.findall(r"\w+", kernel)[1:]
        threads_of.add(threads)
        how = (blocks, threads, int(words), makes_codes == "true", int(made_by), blocks)
        assert twin.launch(ctypes.byref(rows), *how) == b""

    monkeypatch.setattr(module, "call", call)
    monkeypatch.setattr(module, "threads_of", threads_of, raising=False)
    return module


def hostile(width: int) -> Tensor:
    """Rows of every kind: usual, huge, tiny, zeros, one large value, infinity, NaN in the last place."""
    usual = torch.randn(width, generator=torch.Generator().manual_seed(2))
    x = torch.stack([usual, usual * 700, usual * 2.0**-134, usual * 0, usual * 1e-3, usual, usual])
    x[4, 5], x[5, 7], x[6, -1] = 3e4, -float("inf"), float("nan")
    return x.bfloat16()


def same(got: Tensor, want: Tensor) -> bool:
    return bool(((got == want) | (got.isnan() & want.isnan())).all())


@pytest.mark.parametrize("width", [8, 96, 520, 1032, 2056, 8192])
def test_the_whole_kernel(quantize: Any, width: int) -> None:
    """Values in FP8 and NVFP4, also in place and in columns of a matrix; codes; scales in either layout."""
    x = hostile(width)
    for activations in ("a16", "a8", "a4"):
        out, want = torch.full_like(x, torch.nan), round_input(x, activations)
        quantize.round_values(x, out, activations)
        assert same(out, want), activations
        wide = torch.cat((x, 5 * x), dim=1)
        quantize.round_values(wide[:, :width], wide[:, :width], activations)
        assert same(wide[:, :width], want) and same(wide[:, width:], 5 * x), activations
    factor = codec.nvfp4_global(x)
    codes, scales = codec.nvfp4_rows(x, factor)
    is_number = (codec.e4m3_decode(scales) * factor > 0).repeat_interleave(8, 1)[:, : width // 2]
    for is_tiled in (False, True):
        packed = quantize.pack(x, is_tiled)
        assert torch.equal(packed.factor, factor.squeeze(1))
        assert torch.equal(packed.scales, swizzle_32_4_4(scales) if is_tiled else scales)
        assert torch.equal(packed.codes[is_number], codec.pack_nibbles(codes)[is_number])
    assert quantize.threads_of == {{8: 128, 96: 128, 520: 128, 1032: 128, 2056: 96, 8192: 256}[width]}


@pytest.mark.parametrize("width", [1000, 4096])  # one warp a row, and several
def test_what_makes_the_row(quantize: Any, width: int) -> None:
    """The norm, and SwiGLU, are the reference's; what is made of them is made of what they gave."""
    random = torch.Generator().manual_seed(3)
    x, weight = torch.randn(5, width, generator=random).bfloat16(), torch.rand(width, generator=random) + 0.5
    normed, out = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    quantize.round_values(x, out, "a4", weight, 1e-6, normed)
    want = rms_norm(x, weight, 1e-6)
    assert bool(((normed - want).abs() <= 2**-7 * want.abs()).all())
    assert float((normed != want).float().mean()) < 1e-3 and same(out, round_input(normed, "a4"))
    packed = quantize.pack(x, norm_weight=weight, eps=1e-6)
    codes, scales = codec.nvfp4_rows(normed, codec.nvfp4_global(normed))
    assert torch.equal(packed.codes, codec.pack_nibbles(codes)) and torch.equal(packed.scales, scales)
    x[2, 3] = float("inf")
    quantize.round_values(x, out, "a16", weight, 1e-6)
    assert bool(out[2, 3].isnan()) and bool((out[2, 4:] == 0).all()), "as a division by infinity"

    both, unit = 8 * torch.randn(6, 2 * 192, generator=random).bfloat16(), torch.eye(2 * 192)
    expert = (unit[:, :192].contiguous(), unit[:, 192:].contiguous(), torch.eye(192))
    for weights in (None, torch.rand(6, generator=random)):
        want = experts_cpu.ffn(both, expert, 10.0, "a16", weights).view(6, 192).bfloat16()
        got = quantize.swiglu_values(both, weights, 10.0, "a16")
        assert bool(((got - want).abs() <= 2**-7 * want.abs()).all())
        assert same(quantize.swiglu_values(both, weights, 10.0, "a8"), round_input(got, "a8"))
        packed = quantize.swiglu_pack(both, weights, 10.0)
        codes, scales = codec.nvfp4_rows(got, codec.nvfp4_global(got))
        assert torch.equal(packed.codes, codec.pack_nibbles(codes)) and torch.equal(packed.scales, scales)
