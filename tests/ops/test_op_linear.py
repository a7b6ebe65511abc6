"""Linears: every stored format against float64, and rounded inputs against an independent quantiser."""

import numpy as np
import oracle
import pytest
import torch
from ops_support import ROUND, check_close, one_more_rounding, product_bound, rand
from torch import Tensor

from dsv4.ops.linear import cpu
from dsv4.quant.codec import decode, encode_weight
from dsv4.quant.formats import Format, QuantTensor

FORMATS = [Format.F32, Format.BF16, Format.FP8, Format.MXFP4, Format.NVFP4]


def naive(x: Tensor, w: Tensor) -> Tensor:
    """y[t, n] = sum over k of x[t, k] w[n, k], in float64."""
    return torch.tensor(
        [
            [sum(a * b for a, b in zip(row, column, strict=True)) for column in w.tolist()]
            for row in x.tolist()
        ],
        dtype=torch.float64,
    ).view(x.shape[0], w.shape[0])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("t", "n", "k"), [(0, 3, 32), (1, 1, 2), (3, 5, 34), (9, 7, 160), (17, 130, 258)])
def test_every_format_against_loops(format: Format, t: int, n: int, k: int) -> None:
    x, weight = rand(t, k), encode_weight(rand(n, k, seed=1), format)
    values = decode(weight)
    want, bound = naive(x, values), product_bound(x, values.t())
    got = cpu.linear(x, weight)
    check_close(got, want, bound, f"{format} {(t, n, k)}")
    assert torch.equal(cpu.linear(x, cpu.dense(weight)), got), "decoded once or at each use: the same bits"
    rounded = cpu.linear(x.bfloat16(), weight)
    assert rounded.dtype == torch.bfloat16
    want = naive(x.bfloat16().float(), values)
    bound = product_bound(x.bfloat16().float(), values.t())
    check_close(rounded, want, bound + one_more_rounding(want, torch.bfloat16), "bfloat16")
    check_close(
        cpu.linear(x.bfloat16(), weight, out_dtype=torch.float32), want, bound, "float32 from bfloat16"
    )


def fp8_rounded(x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    for row in range(len(x)):
        codes, scales = oracle.fp8_row(x[row], 128)
        out[row] = oracle.E4M3[codes] * np.repeat(oracle.E8M0[scales], 128)[: x.shape[1]]
    return out


def nvfp4_rounded(x: np.ndarray) -> np.ndarray:
    """Per row: global scale amax / (6*448), blocks of 16 with an E4M3 scale, E2M1 codes; float32 steps."""
    out = np.zeros_like(x)
    for row, values in enumerate(x):
        amax = np.abs(values).max()
        g = np.float32(amax) / np.float32(2688) if amax > 0 else np.float32(1)
        for start in range(0, len(values), 16):
            block = values[start : start + 16]
            wanted = np.abs(block).max() / (np.float32(6) * g)
            scale = oracle.E4M3[oracle.e4m3_encode(np.clip(wanted, 2.0**-9, 448))].astype(np.float32)
            codes = oracle.e2m1_encode(block / (scale * g))
            out[row, start : start + 16] = (oracle.E2M1[codes].astype(np.float32) * (scale * g)).astype(
                np.float32
            )
    return out


@pytest.mark.parametrize("k", [16, 33, 128, 130, 300])
@pytest.mark.parametrize(("activations", "rounded"), [("a8", fp8_rounded), ("a4", nvfp4_rounded)])
def test_rounded_inputs(activations: str, rounded: object, k: int) -> None:
    """linear(x, a8) is linear of the quantised-and-dequantised x, bit for bit; huge, tiny and zero rows."""
    x = rand(7, k) * torch.tensor([1.0, 100.0, 1e-6, 0.0, 1e4, 1e-3, 1e30]).unsqueeze(1)
    x[1, k // 2] = 1e5  # an outlier in its block
    x[4, 64:] *= 100  # half a block louder than the other half
    want_x = torch.from_numpy(rounded(x.numpy()))  # type: ignore[operator]
    assert torch.equal(cpu.round_input(x, activations), want_x)
    weight = encode_weight(rand(5, k, seed=1), Format.BF16)
    assert torch.equal(cpu.linear(x, weight, activations), cpu.linear(want_x, weight))
    assert not torch.equal(cpu.linear(x, weight, activations), cpu.linear(x, weight)), "it does round"


def test_a16_leaves_the_input_alone() -> None:
    x = rand(3, 40)
    assert cpu.round_input(x, "a16") is x


def test_infinite_inputs_are_clamped_not_nan() -> None:
    x = rand(2, 128)
    x[0, 3] = float("inf")
    for activations in ("a8", "a4"):
        rounded = cpu.round_input(x, activations)
        assert torch.isfinite(rounded[1]).all() and not torch.isnan(rounded).any()


def test_rows_and_views() -> None:
    x, weight = rand(19, 66), encode_weight(rand(11, 66, seed=1), Format.NVFP4)
    for activations in ("a16", "a8", "a4"):
        whole = cpu.linear(x, weight, activations)
        for t in range(19):
            assert torch.equal(cpu.linear(x[t : t + 1], weight, activations)[0], whole[t]), (activations, t)
        view = rand(66, 19, seed=2).t()
        assert torch.equal(
            cpu.linear(view, weight, activations), cpu.linear(view.contiguous(), weight, activations)
        )


def test_grouped_keeps_groups_apart() -> None:
    """Group g sees x[:, g] only, and its outputs are neighbours: [T, G*N], group-major."""
    t, groups, n, k = 3, 4, 5, 6
    x = rand(t, groups, k)
    weights = [encode_weight(rand(n, k, seed=g + 1), Format.F32) for g in range(groups)]
    got = cpu.grouped(x, weights)
    want = torch.zeros(t, groups * n, dtype=torch.float64)
    for token in range(t):
        for g in range(groups):
            for j in range(n):
                want[token, g * n + j] = sum(
                    float(x[token, g, i]) * float(weights[g].data[j, i]) for i in range(k)
                )
    check_close(got, want, 8 * ROUND * 6 * 9, "grouped")
    assert cpu.grouped(x[:0], weights).shape == (0, groups * n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embed(dtype: torch.dtype) -> None:
    rows = rand(9, 5).bfloat16()
    table = QuantTensor(Format.BF16, rows, (9, 5))
    ids = torch.tensor([8, 0, 3, 3])
    got = cpu.embed(ids, table, dtype)
    assert got.dtype == dtype and got.tolist() == [rows[i].tolist() for i in ids.tolist()]
    assert cpu.embed(ids[:0], table, dtype).shape == (0, 5)
