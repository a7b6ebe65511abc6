"""Products of NVFP4 codes: the loop that decodes gives the reference's results from the very bytes that FP4
tensor cores would read; so does an emulation of these; and the PTX has their instruction."""

import re
from typing import Any

import pytest
import torch
from gpu_support import DEVICE, IS_GPU, IS_INTERPRETED, near, to
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from dsv4.kernels.common import architectures, quantize, tiles
from dsv4.kernels.common.architectures import ARCHITECTURES
from dsv4.kernels.prefill import experts, fp4
from dsv4.ops.experts import ref as experts_ref
from dsv4.ops.linear import ref as linear_ref
from dsv4.quant import codec
from dsv4.quant.codec import encode_weight
from dsv4.quant.formats import Format, QuantTensor
from tests.aot import check_fits, compiling

runs = [
    pytest.mark.skipif(
        not (IS_INTERPRETED or IS_GPU), reason="run by test_gpu_all, interpreted, or on a GPU"
    ),
    *([pytest.mark.gpu] if IS_GPU else []),
]
compiles = pytest.mark.skipif(IS_INTERPRETED, reason="compiles; nothing to interpret")


def marked(function: Any) -> Any:
    for mark in runs:
        function = mark(function)
    return function


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hostile(rows: int, width: int) -> Tensor:
    x = rand(rows, width, seed=1)
    x[0] *= 900
    x[1] = 0
    x[2, 3] = 3e4
    x[3] *= 1e-5
    return x.bfloat16()


def codes(groups: list[list[QuantTensor]]) -> fp4.Codes:
    """Matrices, or pairs of them, through their tiles, as a GPU holds them."""
    one = groups[0][0]
    bank = tiles.empty(one.format, one.shape, len(groups), len(groups[0]), "cpu")
    for index, group in enumerate(groups):
        for half, weight in enumerate(group):
            tiles.put(bank, index, half, weight)
    if IS_GPU:
        there = tiles.Tiled(bank.format, bank.shape, *to(bank.data, bank.scale, bank.factor))
        return fp4.codes_of(there)
    found = [part.flatten(1, 2) for part in tiles.codes_of(bank)]
    return fp4.Codes(*found, bank.factor)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_INTERPRETED:
        monkeypatch.setitem(fp4.TILE, 90, (16, 32, 64, 4, 1))


@marked
@pytest.mark.parametrize(("rows", "n", "k"), [(5, 40, 112), (20, 32, 256)])
def test_dense(rows: int, n: int, k: int) -> None:
    x, weight = hostile(rows, k), encode_weight(rand(n, k, seed=2), Format.NVFP4)
    for dtype in (torch.float32, torch.bfloat16):
        y = torch.full((rows, n), float("nan"), dtype=dtype, device=DEVICE)
        fp4.product(quantize.pack(*to(x)), codes([[weight]]), y)
        # Of the reference in float32: in BF16 it would round the inputs' global scales in.
        want = linear_ref.linear(x.float(), weight, "a4")
        near(y, want.to(dtype), dtype, "dense")
        for row in (0, 3):
            alone = torch.empty_like(y[:1])
            fp4.product(quantize.pack(*to(x[row : row + 1])), codes([[weight]]), alone)
            assert torch.equal(alone, y[row : row + 1]), "a row sees its company"


@marked
def test_experts() -> None:
    """Gate and up of chosen experts, SwiGLU and codes of the hidden rows, down to each pair's place."""
    tokens, d, inner, count, limit = 7, 128, 48, 4, 1.5
    x = hostile(tokens, d) * 0.05
    make = lambda n, k, seed: encode_weight(rand(n, k, seed=seed), Format.NVFP4)  # noqa: E731
    stored = [
        (make(inner, d, 3 * e), make(inner, d, 3 * e + 1), make(d, inner, 3 * e + 2)) for e in range(count)
    ]
    ids = torch.tensor([[0, 2], [2, 3], [0, 3], [2, 0], [3, 2], [2, 0], [0, 2]])  # nobody wants 1
    weights = rand(tokens, 2, seed=9).abs()
    want = experts_ref.routed(x.float(), ids, weights, stored, limit, "a4").squeeze(1)

    chosen = ids.flatten()
    order = chosen.argsort(stable=True)
    places = (order // 2 * 2 + (ids.argsort(1).argsort(1)).flatten()[order]).int()
    height = fp4.row_tile(torch.device(DEVICE))
    rows, first = [], 0
    for expert in range(count):
        stop = first + int((chosen == expert).sum())
        rows += [(expert, at, stop) for at in range(first, stop, height)]
        first = stop
    cut, token, place = to(torch.tensor(rows, dtype=torch.int32), (order // 2).int(), places)
    up = torch.empty(len(order), 2 * inner, dtype=torch.bfloat16, device=DEVICE)
    fp4.product(quantize.pack(*to(x)), codes([[w1, w3] for w1, w3, _ in stored]), up, cut, token)
    hidden = quantize.swiglu_pack(up, *to(weights.flatten()[order]), limit)
    y = torch.full((len(order), d), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    fp4.product(hidden, codes([[w2] for *_, w2 in stored]), y, cut, places=place)
    out = torch.empty(tokens, d, device=DEVICE)
    experts.sum_choices(y.view(tokens, 2, d), out)
    # What BF16 rounds between the products moves codes of the second: half a code's step of a few values.
    assert float((out.cpu() - want).norm() / want.norm()) <= 0.05


def swizzled_offset(row: int, block: int, blocks: int) -> int:
    """The 32_4_4 layout, from its description."""
    tile = row // 128 * -(-blocks // 4) + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


@pytest.mark.parametrize("is_tiled", [False, True])
def test_emulated_tensor_core(is_tiled: bool) -> None:
    """One tile's product byte by byte, as the instruction does it: blocks of 16 products of codes, each sum
    times both block scales, added up; then both global scales. From the bytes of tiles and of packed rows."""
    rows, n, k = 6, 16, 96
    x, weight = hostile(rows, k), encode_weight(rand(n, k, seed=2), Format.NVFP4)
    factor = codec.nvfp4_global(x)
    x_codes, x_scales = codec.nvfp4_rows(x, factor)
    x_bytes = codec.pack_nibbles(x_codes)
    w = codes([[weight]])
    w_bytes, w_scales = w.codes[0].cpu(), w.scales[0].cpu()
    scales = [codec.swizzle_32_4_4(s) if is_tiled else s.flatten() for s in (x_scales, w_scales)]

    def at(row: int, block: int) -> int:
        return swizzled_offset(row, block, k // 16) if is_tiled else row * (k // 16) + block

    value = codec.e2m1_decode(torch.arange(16, dtype=torch.uint8)).tolist()
    scale = codec.e4m3_decode(torch.arange(256, dtype=torch.uint8)).tolist()
    y = torch.zeros(rows, n, dtype=torch.float64)
    for r in range(rows):
        for c in range(n):
            for block in range(k // 16):
                part = 0.0
                for i in range(block * 8, block * 8 + 8):
                    a, b = int(x_bytes[r, i]), int(w_bytes[c, i])
                    part += value[a & 15] * value[b & 15] + value[a >> 4] * value[b >> 4]
                y[r, c] += part * scale[int(scales[0][at(r, block)])] * scale[int(scales[1][at(c, block)])]
    y *= factor.double() * weight.global_scale
    want = linear_ref.linear(x.float(), weight, "a4")
    error = (y - want.double()).abs().amax(1) / want.abs().amax(1).clamp(min=1e-30)
    assert float(error.max()) <= 1e-6


@compiles
@pytest.mark.parametrize(
    "capability", [90, 100, 120, *(pytest.param(c, marks=pytest.mark.slow) for c in (103, 121))]
)
def test_compiles(capability: int) -> None:
    meta = lambda *shape, dtype=torch.uint8: torch.empty(*shape, dtype=dtype, device="meta")  # noqa: E731
    ints, bf16, f32 = torch.int32, torch.bfloat16, torch.float32
    d, inner, t = 4096, 2048, 300
    found: list[Any] = []
    with compiling(lambda name, made: found.append(made), capability):
        x = quantize.Packed(meta(t, d // 2), meta(t, d // 16), meta(t, dtype=f32))
        w = fp4.Codes(meta(1, d, d // 2), meta(1, d, d // 16), meta(1, 1, dtype=f32))
        fp4.product(x, w, meta(t, d, dtype=bf16))
        w = fp4.Codes(meta(4, 2 * inner, d // 2), meta(4, 2 * inner, d // 16), meta(4, 2, dtype=f32))
        fp4.product(x, w, meta(t, 2 * inner, dtype=bf16), meta(9, 3, dtype=ints), meta(t, dtype=ints))
        x = quantize.Packed(meta(t, inner // 2), meta(t, inner // 16), meta(t, dtype=f32))
        w = fp4.Codes(meta(4, d, inner // 2), meta(4, d, inner // 16), meta(4, 1, dtype=f32))
        fp4.product(x, w, meta(t, d, dtype=bf16), meta(9, 3, dtype=ints), None, meta(t, dtype=ints))
    assert len(found) == 3
    is_scaled, why = fp4.uses_tensor_cores(capability)
    assert is_scaled == (capability in (100, 103, 120)), why
    for made in found:
        check_fits("fp4", made, capability)
        ptx = made.asm["ptx"]
        assert (ARCHITECTURES[capability].fp4 in ptx) if is_scaled else ("mxf4nvf4" not in ptx), why
        assert "cp.async" in ptx


def test_unknown_versions_decode_instead() -> None:
    assert fp4.uses_tensor_cores(100, "3.6.0")[0]
    for capability, version, why in (
        (90, "3.6.0", "multiplies no FP4"),
        (121, "3.6.0", r"Triton 3\.6\.0 is not known"),
        (100, "3.8.0", r"Triton 3\.8\.0 is not known .* 3\.6 for sm_100/103/120"),
    ):
        is_used, reason = fp4.uses_tensor_cores(capability, version)
        assert not is_used and re.search(why, reason)
    assert not fp4.serves([], torch.device("cpu")) and architectures.capability(torch.device("cpu")) == 90
