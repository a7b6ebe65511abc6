"""Linears: every stored format against the specification in float64, and inputs rounded as it says."""

import pytest
import torch
from ops_support import ROUND, check_close, exactly, one_more_rounding, product_bound, rand, spec_model

from dsv4.config import Activations
from dsv4.ops.linear import cpu
from dsv4.quant.codec import decode, encode_weight
from dsv4.quant.formats import Format, QuantTensor
from dsv4.spec.rounding import linear_input

FORMATS = [Format.F32, Format.BF16, Format.FP8, Format.MXFP4, Format.NVFP4]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("t", "n", "k"), [(0, 3, 32), (1, 1, 2), (3, 5, 34), (9, 7, 160), (17, 130, 258)])
def test_every_format_against_the_specification(format: Format, t: int, n: int, k: int) -> None:
    x, weight = rand(t, k), encode_weight(rand(n, k, seed=1), format)
    values = decode(weight)
    model = spec_model({"w": values})
    want, bound = exactly(model.linear, x, "w"), product_bound(x, values.t())
    got = cpu.linear(x, weight)
    check_close(got, want, bound, f"{format} {(t, n, k)}")
    assert torch.equal(cpu.linear(x, cpu.dense(weight)), got), "decoded once or at each use: the same bits"
    rounded = cpu.linear(x.bfloat16(), weight)
    assert rounded.dtype == torch.bfloat16
    want = exactly(model.linear, x.bfloat16(), "w")
    bound = product_bound(x.bfloat16().float(), values.t())
    check_close(rounded, want, bound + one_more_rounding(want, torch.bfloat16), "bfloat16")
    check_close(
        cpu.linear(x.bfloat16(), weight, out_dtype=torch.float32), want, bound, "float32 from bfloat16"
    )


@pytest.mark.parametrize("k", [16, 33, 128, 130, 300])
@pytest.mark.parametrize("activations", ["a8", "a4"])
def test_rounded_inputs(activations: Activations, k: int) -> None:
    """linear(x, a8) is linear of the rounded x, bit for bit; huge, tiny and zero rows."""
    x = rand(7, k) * torch.tensor([1.0, 100.0, 1e-6, 0.0, 1e4, 1e-3, 1e30]).unsqueeze(1)
    x[1, k // 2] = 1e5  # an outlier in its block
    x[4, 64:] *= 100  # half a block louder than the other half
    want_x = linear_input(x, activations)
    weight = encode_weight(rand(5, k, seed=1), Format.BF16)
    assert torch.equal(cpu.linear(x, weight, activations), cpu.linear(want_x, weight))
    for parts in (1, 4):
        whole = cpu.partial(x, weight, activations, parts, False) if k % (16 * parts) == 0 else None
        assert whole is None or torch.equal(whole, cpu.partial(want_x, weight, "a16", parts, False))
    assert not torch.equal(cpu.linear(x, weight, activations), cpu.linear(x, weight)), "it does round"


def test_infinite_and_nan_inputs() -> None:
    """Infinity makes no NaN in a rounded input; NaN stays in its row. Both as in the specification."""
    x, weight = rand(3, 128), encode_weight(rand(5, 128, seed=1), Format.BF16)
    x[0, 3], x[2, 7] = float("inf"), float("nan")
    for activations in ("a8", "a4"):
        model = spec_model({"w": decode(weight)}, activations)
        got, want = cpu.linear(x, weight, activations), model.linear(x, "w")
        assert torch.isfinite(got[1]).all() and torch.isnan(got[2]).all()
        assert torch.equal(torch.isnan(got), torch.isnan(want)) and not torch.isnan(got[0]).any()


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
    products = [exactly(spec_model({}).product, x[:, g], weights[g].data) for g in range(groups)]
    want = torch.cat(products, 1)
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
