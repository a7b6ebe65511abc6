"""The router against the specification: ties, what the bias does, what hash routing leaves to the gate."""

import math

import pytest
import torch
from ops_support import FUNCTION, ROUND, check_close, exactly, product_bound, rand
from torch import Tensor

from dsv4.ops.route import cpu
from dsv4.spec import ops as spec


def spec_scores(x: Tensor, gate: Tensor) -> Tensor:
    """x [T, D], gate [D, E] -> [T, E] in float64."""
    return exactly(spec.route_scores, x.double() @ gate.double())


def test_scores() -> None:
    z = torch.cat((torch.linspace(-60, 60, 997), torch.tensor([0.0, -0.0, 1e-30]))).unsqueeze(0)
    got = cpu.scores(torch.ones(1, 1), z)
    assert got.dtype == torch.float32
    want = spec_scores(torch.ones(1, 1), z)
    check_close(got, want, (2 * FUNCTION + 2 * ROUND) * want, "sqrt(softplus)")


def test_extreme_logits() -> None:
    z = torch.tensor([[-math.inf, -120.0, -80.0, 80.0, 1e30, math.inf, math.nan]])
    got = cpu.scores(torch.ones(1, 1), z)[0]
    assert got[[0, 1]].tolist() == [0.0, 0.0] and math.isinf(float(got[5])) and math.isnan(float(got[6]))
    check_close(
        got[2:5], torch.tensor([math.exp(-40), 80**0.5, 1e15]).double(), got[2:5] * 4e-7, "far logits"
    )


@pytest.mark.parametrize(
    ("tokens", "width", "experts", "k"), [(0, 4, 3, 2), (1, 1, 1, 1), (9, 33, 7, 3), (5, 8, 40, 6)]
)
def test_by_score_against_the_specification(tokens: int, width: int, experts: int, k: int) -> None:
    x, gate, bias = rand(tokens, width), rand(width, experts, seed=1), rand(experts, seed=2)
    ids, weights = cpu.by_score(x, gate, bias, k, 1.5)
    assert ids.shape == weights.shape == (tokens, k) and weights.dtype == torch.float32
    scores = spec_scores(x, gate)
    chosen = spec.top_k(scores + bias, k)
    want = exactly(spec.route_weights, scores, chosen, 1.5)
    bound = 4 * (float(product_bound(x, gate).max()) + 2 * FUNCTION + 8 * ROUND) * 1.5 if tokens else 0.0
    assert torch.equal(ids, chosen)
    check_close(weights, want, bound, "weights")


def test_tokens_that_are_not_finite_and_views() -> None:
    """NaN and infinity choose and weigh as in the specification, in their token alone."""
    x, gate, bias = rand(4, 6), rand(6, 5, seed=1), rand(5, seed=2)
    x[1, 0], x[2, 3] = math.nan, math.inf
    ids, weights = cpu.by_score(x, gate, bias, 3, 1.5)
    scores = spec_scores(x, gate)
    chosen = spec.top_k(scores + bias, 3)
    assert torch.equal(ids, chosen)
    check_close(weights, exactly(spec.route_weights, scores, chosen, 1.5), 1e-5, "weights")
    assert torch.isnan(weights[1]).all() and torch.isfinite(weights[[0, 3]]).all()
    again = cpu.by_score(x.t().contiguous().t(), gate, bias, 3, 1.5)
    assert torch.equal(again[0], ids) and torch.equal(again[1].nan_to_num(7), weights.nan_to_num(7))


def test_the_bias_chooses_and_does_not_weigh() -> None:
    """Expert 2 has the lowest score and is chosen by its bias; its weight is that of its score."""
    x, gate = torch.ones(1, 1), torch.tensor([[2.0, 1.0, -3.0, 0.0]])
    ids, weights = cpu.by_score(x, gate, torch.tensor([0.0, 0.0, 100.0, 0.0]), 2, 1.0)
    assert ids.tolist() == [[2, 0]]
    want = exactly(spec.route_weights, spec_scores(x, gate), ids, 1.0)
    check_close(weights, want, 3e-7, "weights")


def test_ties_go_to_the_lower_index() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [0.0, -0.0, 0.0, -1.0, 0.0]])
    assert cpu.top_indices(values, 3).tolist() == [[1, 2, 4], [0, 1, 2]]
    many = torch.zeros(1, 4096)
    assert cpu.top_indices(many, 100).tolist() == [list(range(100))]
    ids, _ = cpu.by_score(torch.zeros(3, 4), rand(4, 9), torch.zeros(9), 4, 1.0)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    assert cpu.top_indices(torch.tensor([2.0, 9.0]), 5).tolist() == [1, 0], "fewer than k: all of them"


def test_hash_routing_weighs_with_the_gate() -> None:
    x, gate = rand(5, 12), rand(12, 7, seed=1)
    chosen = torch.tensor([[6, 0], [1, 2], [0, 6], [3, 5], [4, 4]])
    ids, weights = cpu.by_hash(x, gate, chosen, 2.5)
    assert torch.equal(ids, chosen), "the table's choice and order"
    want = exactly(spec.route_weights, spec_scores(x, gate), chosen, 2.5)
    check_close(weights, want, 1e-5, "weights")
    assert not torch.equal(weights[0], weights[2]), "weights differ between tokens of equal choice"


def test_rows_are_independent() -> None:
    x, gate, bias = rand(21, 33), rand(33, 19, seed=1), rand(19, seed=2)
    ids, weights = cpu.by_score(x, gate, bias, 4, 1.5)
    for t in range(21):
        alone = cpu.by_score(x[t : t + 1], gate, bias, 4, 1.5)
        assert torch.equal(alone[0][0], ids[t]) and torch.equal(alone[1][0], weights[t]), t
