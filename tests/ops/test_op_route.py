"""The router: check values of its score, ties, what the bias does, what hash routing leaves to the gate."""

import math

import pytest
import torch
from ops_support import FUNCTION, ROUND, check_close, product_bound, rand
from torch import Tensor

from dsv4.ops.route import cpu

CHECK = {-5.0: 0.0819472, -1.0: 0.5596979, 0.0: 0.8325546, 1.0: 1.1459763, 5.0: 2.2375691}


def naive_score(x: list[float], gate: list[float]) -> float:
    z = sum(a * b for a, b in zip(x, gate, strict=True))
    return math.sqrt(max(z, 0.0) + math.log1p(math.exp(-abs(z))))


def naive_scores(x: Tensor, gate: Tensor) -> Tensor:
    """x [T, D], gate [D, E] -> [T, E] in float64."""
    columns = gate.t().tolist()
    return torch.tensor([[naive_score(row, c) for c in columns] for row in x.tolist()], dtype=torch.float64)


def test_check_values_of_the_score() -> None:
    z = torch.tensor([list(CHECK)])
    got = cpu.scores(torch.ones(1, 1), z)
    assert got.dtype == torch.float32
    check_close(got, torch.tensor([list(CHECK.values())]), 5e-8 + 3e-7 * got.abs(), "sqrt(softplus)")


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
def test_by_score_against_loops(tokens: int, width: int, experts: int, k: int) -> None:
    x, gate, bias = rand(tokens, width), rand(width, experts, seed=1), rand(experts, seed=2)
    ids, weights = cpu.by_score(x, gate, bias, k, 1.5)
    assert ids.shape == weights.shape == (tokens, k) and weights.dtype == torch.float32
    scores = naive_scores(x, gate).view(tokens, experts)
    for t in range(tokens):
        order = sorted(range(experts), key=lambda e: (-(float(scores[t, e]) + float(bias[e])), e))
        assert ids[t].tolist() == order[:k], t
        picked = [float(scores[t, e]) for e in order[:k]]
        want = torch.tensor([1.5 * p / sum(picked) for p in picked])
        bound = 4 * (float(product_bound(x, gate).max()) + 2 * FUNCTION + 8 * ROUND) * 1.5
        check_close(weights[t], want, bound, f"weights of token {t}")


def test_the_bias_chooses_and_does_not_weigh() -> None:
    """Expert 2 has the lowest score and is chosen by its bias; its weight is that of its score."""
    x, gate = torch.ones(1, 1), torch.tensor([[2.0, 1.0, -3.0, 0.0]])
    ids, weights = cpu.by_score(x, gate, torch.tensor([0.0, 0.0, 100.0, 0.0]), 2, 1.0)
    assert ids.tolist() == [[2, 0]]
    low, high = math.sqrt(math.log1p(math.exp(-3))), math.sqrt(2 + math.log1p(math.exp(-2)))
    check_close(weights[0], torch.tensor([low, high]) / (low + high), 3e-7, "weights")


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
    scores = naive_scores(x, gate)
    for t, row in enumerate(chosen.tolist()):
        picked = [float(scores[t, e]) for e in row]
        want = torch.tensor([2.5 * p / sum(picked) for p in picked])
        check_close(weights[t], want, 1e-5, f"weights of token {t}")
    assert not torch.equal(weights[0], weights[2]), "weights differ between tokens of equal choice"


def test_rows_are_independent() -> None:
    x, gate, bias = rand(21, 33), rand(33, 19, seed=1), rand(19, seed=2)
    ids, weights = cpu.by_score(x, gate, bias, 4, 1.5)
    for t in range(21):
        alone = cpu.by_score(x[t : t + 1], gate, bias, 4, 1.5)
        assert torch.equal(alone[0][0], ids[t]) and torch.equal(alone[1][0], weights[t]), t
