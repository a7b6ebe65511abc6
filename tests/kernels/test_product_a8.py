"""Products of prompts on FP8 tensor cores: the codec's codes, exact sums, float64, and no bit that depends on
company."""

import math

import pytest
import torch
from test_product import FORMATS, HEIGHTS, SHAPES, Experts, apart, choices, encoded, heights
from torch import Tensor

from dsv4.gpu.tiles import FP8_SPAN, Tiled, tile
from dsv4.ops.experts import prefill as experts_prefill
from dsv4.ops.linear import prefill_product as prompts
from dsv4.ops.linear.prefill_packed import mode_of
from dsv4.quant.codec import decode, e4m3_decode, encode_weight, fp8_round, fp8_rows
from dsv4.quant.formats import Format, QuantTensor

gpu = pytest.mark.gpu
KINDS = ["mxfp4", "fp8", "fp8f"]
# The tensor core cuts each product at 2^-13 of the largest it adds, or nearby: far under BF16's 2^-9.
CLOSE = 2.0**-11


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(12)


def mxfp4(scales: Tensor, codes: int = 0x22) -> QuantTensor:
    """Rows of blocks of 32 with these E8M0 scales, all codes alike."""
    n, blocks = scales.shape
    data = torch.full((n, blocks * 16), codes, dtype=torch.uint8)
    return QuantTensor(Format.MXFP4, data, (n, blocks * 32), scales.to(torch.uint8))


def test_scales_that_lie_too_far_apart_keep_to_16_bits() -> None:
    scales = torch.full((40, 16), 120)
    assert tile(mxfp4(scales)).fits_fp8
    scales[7, 3], scales[8] = 120 - FP8_SPAN, 90  # what counts is the row
    assert tile(mxfp4(scales)).fits_fp8
    scales[7, 3] -= 1
    far = mxfp4(scales)
    assert not tile(far).fits_fp8
    far.data[7, 48:64] &= 0x88  # zeros, of either sign
    assert tile(far).fits_fp8
    scales[7, 3] = 255
    assert not tile(mxfp4(scales)).fits_fp8, "NaN must show"
    low = torch.full((16, 16), 30)
    low[0, 0] = 13
    assert not tile(mxfp4(low)).fits_fp8, "as far below the least top"


def test_which_weights_are_multiplied_in_fp8() -> None:
    for kind, format in FORMATS.items():
        weight = tile(encoded(torch.randn(32, 256), kind))
        want = format in (Format.FP8, Format.MXFP4)
        assert mode_of(weight, "a8").is_fp8 == want
        assert not mode_of(weight, "a16").is_fp8 and not mode_of(weight, "a4").is_fp8


def multiplied(x: Tensor, w: Tiled, dtype: torch.dtype = torch.float32) -> Tensor:
    y = torch.full((x.shape[0], 1, w.shape[0]), float("nan"), dtype=dtype, device="cuda")
    packed = prompts.pack(x.unsqueeze(1), w, "a8")
    assert packed.mode.is_fp8 == w.fits_fp8
    prompts.product(packed, w, y)
    return y.flatten(1)


def wanted(x: Tensor, q: QuantTensor) -> Tensor:
    return fp8_round(x, 128).double() @ decode(q).double().t()


def hostile(rows: int, k: int) -> Tensor:
    x = torch.randn(rows, k, device="cuda").bfloat16()
    x[4], x[5], x[6], x[7, ::2] = 0, x[5] * 1e-6, x[6] * 1e30, 0
    x[8] *= 1e-39  # subnormal
    x[9, : k // 2] *= 1e20
    x[10, k // 2 :] = 1e34
    return x


@gpu
@pytest.mark.parametrize("k", [68, 512, 1056, 4096])
def test_packed_rows_are_the_codecs(k: int) -> None:
    x = hostile(70, k)
    x[11, 3], x[12, 3], x[13, k - 1] = float("inf"), -float("inf"), float("nan")
    packed = prompts.pack(x.unsqueeze(1), tile(encoded(torch.randn(16, k, device="cuda"), "fp8")), "a8")
    raw = packed.data.view(-1, packed.data.shape[1], 2, 2, 2112)  # group, slice, half of it, eight rows
    codes = raw[..., :2048].reshape(*raw.shape[:4], 16, 8, 16).permute(0, 3, 5, 1, 2, 4, 6).reshape(80, -1)
    scales = raw[..., 2048:].contiguous().view(torch.float32).view(*raw.shape[:4], 2, 8)
    scales = scales.permute(0, 3, 5, 1, 2, 4).reshape(80, -1)
    want, its_scales = fp8_rows(x, 128)
    rows = [row for row in range(70) if row != 13]
    assert torch.equal(codes[rows, :k], want.view(torch.uint8)[rows])
    blocks = its_scales.shape[1]
    assert torch.equal(scales[rows, :blocks], torch.exp2(its_scales[rows].float() - 127 - 24))
    assert scales[13, (k - 1) // 128].isnan()
    assert not codes[:70, k:].any() and not codes[70:].any()


@gpu
@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
@pytest.mark.parametrize("n,k", SHAPES)
def test_sums_of_integers_are_exact(kind: str, n: int, k: int) -> None:
    """Any wrong place of a code, row or scale shows."""
    values = torch.randint(-3, 4, (n, k), device="cuda").float()
    values *= torch.exp2(torch.randint(0, 4, (n, 1), device="cuda").float())
    q = encode_weight(values, FORMATS[kind])
    x = torch.randint(-4, 5, (300, k), device="cuda").bfloat16()
    assert torch.equal(multiplied(x, tile(q)).double(), x.double() @ decode(q).double().t())


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n,k", SHAPES)
def test_a_row_is_the_same_bits_in_any_company(kind: str, n: int, k: int) -> None:
    q = encoded(torch.randn(n, k, device="cuda"), kind)
    w, x = tile(q), hostile(300, k)
    whole = multiplied(x, w)
    assert apart(whole, wanted(x, q)) < CLOSE
    assert torch.equal(multiplied(x, w, torch.bfloat16), whole.bfloat16())
    for rows in HEIGHTS:
        assert torch.equal(multiplied(x[:rows], w), whole[:rows]), rows
    for start in (3, 100, 250):
        assert torch.equal(multiplied(x[start : start + 40], w), whole[start : start + 40]), start


@gpu
@pytest.mark.parametrize("span", [4, FP8_SPAN, FP8_SPAN + 4])
def test_scales_of_a_row_far_apart(span: int) -> None:
    """Even rows' scales grow from slice to slice, odd rows' fall. Beyond FP8_SPAN 16 bits take over."""
    n, k = 80, 2048
    down = torch.linspace(-span, 0, k // 32, device="cuda").round()
    down = torch.where(torch.arange(n, device="cuda")[:, None] % 2 == 0, down, down.flip(0))
    by = torch.exp2(down).repeat_interleave(32, 1)
    values = torch.randn(n, k, device="cuda").sign() * by  # a block's largest is its scale times 4
    q = encode_weight(values, Format.MXFP4)
    w = tile(q)
    assert w.fits_fp8 == (span <= FP8_SPAN)
    x = torch.zeros(40, k, device="cuda").bfloat16()
    for row in range(40):  # one block of columns each: nothing large hides what is small
        at = row % 16 * 128
        x[row, at : at + 128] = torch.randn(128, device="cuda").bfloat16()
    x[33:] = torch.randn(7, k, device="cuda").bfloat16()
    got, want = multiplied(x, w), wanted(x, q)
    size = fp8_round(x, 128).double().abs() @ decode(q).double().abs().t()
    assert ((got.double() - want).abs() <= CLOSE * size).all()


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_stay_in_their_row(kind: str) -> None:
    q = encoded(torch.randn(80, 1024, device="cuda"), kind)
    w, x = tile(q), torch.randn(40, 1024, device="cuda").bfloat16()
    clean = multiplied(x, w)
    x[3, 700], x[20, 5] = float("nan"), float("inf")
    got = multiplied(x, w)
    others = [row for row in range(40) if row not in (3, 20)]
    assert torch.equal(got[others], clean[others])
    assert got[3].isnan().all()
    # Infinity counts as the largest float, which rounds to 2^128: its product may be a number again.
    codes, scale = fp8_rows(x[20:21], 128)
    values = e4m3_decode(codes).double() * torch.exp2(scale.double() - 127).repeat_interleave(128, 1)
    want = (values @ decode(q).double().t())[0]
    fits = want.abs() < 1e38
    assert fits.any() and ((got[20].double() - want).abs()[fits] <= CLOSE * want.abs()[fits]).all()


@gpu
def test_groups_and_strides() -> None:
    q, x = (
        encoded(torch.randn(96, 512, device="cuda"), "fp8"),
        torch.randn(70, 3, 512, device="cuda").bfloat16(),
    )
    want = torch.einsum("tgk,gnk->tgn", fp8_round(x, 128).double(), decode(q).double().view(3, 32, 512))
    y = torch.full((70, 3, 40), float("nan"), device="cuda")
    prompts.product(prompts.pack(x, tile(q), "a8"), tile(q), y[:, :, :32])
    assert apart(y[:, :, :32].flatten(1), want.flatten(1)) < CLOSE and y[:, :, 32:].isnan().all()


@gpu
@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_experts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    e = Experts(kind)

    def routed(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return experts_prefill.routed(x, ids, weights, e.bank, 1.5, "a8")[:, 0]  # type: ignore[arg-type]

    for tokens in (1, 16, 70, 700):
        x, ids = torch.randn(tokens, 512, device="cuda").bfloat16(), choices(tokens, e.count)
        weights, at = torch.rand(tokens, 6, device="cuda"), tokens // 2
        got, want = routed(x, ids, weights), torch.zeros(x.shape, dtype=torch.float64, device="cuda")
        for expert, (w1, w3, w2) in enumerate(e.values):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            rows = fp8_round(x[token], 128).double()
            gate = (rows @ w1.t()).bfloat16().double().clamp(max=1.5)
            up = (rows @ w3.t()).bfloat16().double().clamp(-1.5, 1.5)
            hidden = gate * torch.sigmoid(gate) * up * weights[token, choice, None].double()
            hidden = fp8_round(hidden.bfloat16(), 128).double()
            want.index_add_(0, token, (hidden @ w2.t()).bfloat16().double())
        # A few hidden values fall to the other side of an FP8 step, 2^-4 of them.
        assert apart(got, want) < 2**-6, tokens
        alone = routed(x[at : at + 1], ids[at : at + 1], weights[at : at + 1])
        assert torch.equal(alone[0], got[at]), tokens
        for cap in heights(e.bank.w13, "a8"):
            with monkeypatch.context() as patch:
                patch.setattr(prompts, "max_cap", lambda weight, mode, cap=cap: cap)
                assert torch.equal(routed(x, ids, weights), got), (tokens, cap)


@gpu
def test_shared_expert_and_a_graph() -> None:
    e = Experts("fp8", count=1)
    x = torch.randn(90, 512, device="cuda").bfloat16()
    got = experts_prefill.ffn(x, e.bank, math.inf, "a8")[:, 0]  # type: ignore[arg-type]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts_prefill.ffn(x, e.bank, math.inf, "a8")  # type: ignore[arg-type]
    graph.replay()
    assert torch.equal(out[:, 0], got)
    for rows in (1, 7, 64):
        part = experts_prefill.ffn(x[:rows], e.bank, math.inf, "a8")[:, 0]  # type: ignore[arg-type]
        assert torch.equal(part, got[:rows])
