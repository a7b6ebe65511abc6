"""Experts against the specification: the clamp, the routing weight's place, sums that ignore the batch."""

import math

import pytest
import torch
from ops_support import ROUND, check_close, exactly, rand, spec_model
from torch import Tensor

from dsv4.ops.experts import cpu
from dsv4.ops.linear.cpu import dense
from dsv4.quant.codec import decode, encode_weight
from dsv4.quant.formats import Format, QuantTensor
from dsv4.spec import ops as spec
from dsv4.spec.model import Model


def spec_expert(expert: tuple[QuantTensor, ...], rounding: str = "off") -> Model:
    """The specification over one expert's values, as "e"."""
    tensors = {f"e.{name}": value for name, value in named(expert).items()}
    return spec_model(tensors, rounding, swiglu_limit=10.0)


def named(expert: tuple[QuantTensor, ...]) -> dict[str, Tensor]:
    return dict(zip(("w1", "w3", "w2"), map(decode, expert), strict=True))


def make_expert(width: int, inner: int, seed: int, format: Format = Format.F32) -> tuple[QuantTensor, ...]:
    shapes = ((inner, width), (inner, width), (width, inner))
    return tuple(encode_weight(rand(*shape, seed=seed + i), format) for i, shape in enumerate(shapes))


def values(expert: tuple[QuantTensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    w1, w3, w2 = expert
    return decode(w1), decode(w3), decode(w2)


def bound(x: Tensor, expert: tuple[Tensor, Tensor, Tensor], limit: float) -> float:
    """Sums of D and of I terms whose factors are at most limit**2, with slopes of about 1."""
    w1, w3, w2 = expert
    size = float(x.abs().sum() * max(w1.abs().max(), w3.abs().max()))
    inner = min(size, limit) ** 2 + 1
    return (w1.shape[0] + w1.shape[1] + 10) * ROUND * float(w2.abs().sum(1).max()) * inner * (1 + size)


@pytest.mark.parametrize("format", [Format.F32, Format.NVFP4, Format.MXFP4, Format.FP8])
@pytest.mark.parametrize(("tokens", "width", "inner"), [(0, 4, 2), (1, 2, 2), (5, 34, 18), (9, 16, 64)])
def test_ffn_against_the_specification(tokens: int, width: int, inner: int, format: Format) -> None:
    x, expert = rand(tokens, width), make_expert(width, inner, 1, format)
    routing = rand(tokens, seed=9).abs()
    plain, weighted = cpu.ffn(x, expert, 10.0, "a16")[:, 0], cpu.ffn(x, expert, 10.0, "a16", routing)[:, 0]
    held = tuple(dense(w) for w in expert)
    assert torch.equal(cpu.ffn(x, held, 10.0, "a16")[:, 0], plain), (
        "decoded once or at each use: the same bits"
    )
    run = spec_expert(expert).expert
    want, want_weighted = exactly(run, x, "e"), exactly(run, x, "e", routing.unsqueeze(1))
    for t in range(tokens):
        near = bound(x[t], values(expert), 10.0)
        check_close(plain[t], want[t], near, f"token {t}")
        check_close(weighted[t], want_weighted[t], near * (1 + float(routing[t])), f"weighted token {t}")


@pytest.mark.parametrize(
    ("gate", "up", "want_gate", "want_up"),
    [
        (25.0, 1.0, 10.0, 1.0),  # the gate is clamped from above
        (-25.0, 1.0, -25.0, 1.0),  # and only from above
        (2.0, 25.0, 2.0, 10.0),  # up on both sides
        (2.0, -25.0, 2.0, -10.0),
        (10.0, -10.0, 10.0, -10.0),
        (1e30, -1e30, 10.0, -10.0),
        (-1e30, 1e30, -math.inf, 10.0),  # silu of far below is zero
    ],
)
def test_clamp(gate: float, up: float, want_gate: float, want_up: float) -> None:
    one = torch.ones(1, 1)
    got = cpu.ffn(one, (gate * one, up * one, one), 10.0, "a16")[:, 0]
    silu = 0.0 if want_gate == -math.inf else want_gate / (1 + math.exp(-want_gate))
    check_close(
        got, torch.tensor([[silu * want_up]], dtype=torch.float64), 4e-7 * abs(silu * want_up), "clamp"
    )


def test_the_routing_weight_enters_before_the_down_projection() -> None:
    """With FP8 inputs it matters: w2 sees the rounding of weight * hidden, not of hidden."""
    x, expert = rand(3, 32), make_expert(32, 48, 1)
    weight = torch.tensor([0.3, 0.77, 1.9])
    got = cpu.ffn(x, expert, 10.0, "a8", weight)[:, 0]
    run = spec_expert(expert, "a8").expert
    before, after = run(x, "e", weight.unsqueeze(1)), weight.unsqueeze(1) * run(x, "e")
    size = float(before.abs().max())
    # A value at a rounding edge may fall to either side; nearly all must agree, and not with `after`.
    assert float((got - before).abs().median()) < 1e-5 * size
    assert float((got - after).abs().median()) > 1e-3 * size


def test_hidden_is_rounded_to_the_compute_type() -> None:
    x, expert = rand(2, 16).bfloat16(), make_expert(16, 8, 1)
    model = spec_expert(expert, "a16")
    hidden = spec.swiglu(model.linear(x, "e.w1"), model.linear(x, "e.w3"), 10.0)
    want = model.product(hidden, model["e.w2"])
    got = cpu.ffn(x, expert, 10.0, "a16")[:, 0]
    assert got.dtype == torch.float32, "ranks add up what they get; only the sum is rounded"
    check_close(got, want, 2.0**-8 * want.abs() + 2.0**-7 * float(hidden.abs().max()) * 2**-8, "bfloat16")


@pytest.mark.parametrize(("tokens", "experts", "k"), [(0, 3, 2), (1, 5, 5), (11, 7, 3)])
def test_routed_sums_the_chosen(tokens: int, experts: int, k: int) -> None:
    x = rand(tokens, 12)
    all_experts = [make_expert(12, 10, 10 * e) for e in range(experts)]
    ids = rand(tokens, experts, seed=3).argsort(1)[:, :k]
    weights = rand(tokens, k, seed=4).abs()
    got = cpu.routed(x, ids, weights, all_experts, 10.0, "a16")[:, 0]
    assert got.dtype == torch.float32 and got.shape == x.shape
    held = {f"e.{e}.{name}": v for e in range(experts) for name, v in named(all_experts[e]).items()}
    want = exactly(spec_model(held).experts, x, ids, weights, "e")
    for t in range(tokens):
        chosen = zip(ids[t].tolist(), weights[t].tolist(), strict=True)
        near = sum(bound(x[t], values(all_experts[e]), 10.0) * (1 + w) for e, w in chosen)
        check_close(got[t], want[t], near, f"token {t}")
    shuffled = torch.arange(k - 1, -1, -1)
    again = cpu.routed(x, ids[:, shuffled], weights[:, shuffled], all_experts, 10.0, "a16")[:, 0]
    assert torch.equal(again, got), "summed by expert id: the order of choice changes no bit"
    shared = rand(tokens, 2, 12, seed=5)
    parts = cpu.routed(x, ids, weights, all_experts, 10.0, "a16", parts=2)
    given = (x, ids, weights, all_experts, 10.0, "a16", 2, shared)
    both = cpu.routed(*given)
    assert torch.equal(both, parts + shared), "the shared expert's part by part, added last"
    assert torch.equal(cpu.routed(*given, torch.bfloat16), both.bfloat16()), "and rounded once"
    for t in range(tokens):
        alone = cpu.routed(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], all_experts, 10.0, "a16")[:, 0]
        assert torch.equal(alone[0], got[t]), "batch-mates at the same expert change no bit"


def test_choices_of_none_and_of_other_ranks() -> None:
    """-1 and experts that are not here add nothing, huge ids included; NaN stays in its token."""
    x = rand(5, 12)
    x[3, 2] = math.nan
    experts = [make_expert(12, 10, 10 * e) for e in range(3)]
    ids = torch.tensor([[4, -1], [6, 5], [-1, -1], [5, 4], [2**31 - 1, 3]])
    weights = rand(5, 2, seed=4).abs()
    got = cpu.routed(x, ids, weights, experts, 10.0, "a16", first=4, ranks=2)[:, 0]
    held = {f"e.{e}.{name}": v for e in range(3) for name, v in named(experts[e]).items()}
    is_here = (ids >= 4) & (ids < 7)
    chosen = torch.where(is_here, ids - 4, torch.tensor([[0, 1]]))  # another expert, by weight 0
    chosen[1] = torch.tensor([2, 1])
    want = exactly(spec_model(held).experts, x, chosen, weights * is_here, "e")
    near = sum(bound(x.nan_to_num().abs().amax(0), values(e), 10.0) for e in experts)
    check_close(got, want, 4 * near, "routed")
    assert torch.isnan(got[3]).all() and not got[2].any() and not got[4].any() and got[:2].abs().amin() > 0
    view = x.t().contiguous().t()
    again = cpu.routed(view, ids, weights, experts, 10.0, "a16", first=4, ranks=2)[:, 0]
    assert torch.equal(again.nan_to_num(7), got.nan_to_num(7)), "a strided view"
