"""From logits to a token: uniform numbers, every filter at its edge, frequencies against exact ones."""

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from dsv4.ops.sample.ref import log_probs, sample, uniform

LAST = 1 - 2.0**-53  # the largest number uniform() can give
GRID = [0.0, 2.0**-53, *(i / 97 for i in range(1, 97)), 0.25, 0.5, 0.75, LAST]


def logits_of(*probs: float) -> Tensor:
    return torch.tensor([math.log(p) if p else -math.inf for p in probs])


def pick(
    logits: Tensor, u: float, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> int:
    return sample(logits, temperature, top_k, top_p, min_p, u)


def support(logits: Tensor, **filters: float) -> set[int]:
    """All ids that some u leads to."""
    return {pick(logits, u, **filters) for u in (i / 512 for i in range(512))} | {
        pick(logits, LAST, **filters)
    }


def test_uniform_is_a_function_of_seed_and_index() -> None:
    for seed in (0, 1, 2**63, 2**64 - 1):
        for index in (0, 1, 10**6):
            value = uniform(seed, index)
            assert isinstance(value, float) and 0 <= value < 1
            assert value == uniform(seed, index)
            assert value * 2**53 == int(value * 2**53), "53 bits"


def test_uniform_neighbours_do_not_collide() -> None:
    """300 seeds of 300 tokens: a stream that repeats another one's numbers, shifted or not, would show."""
    values = {uniform(seed, index) for seed in range(300) for index in range(300)}
    assert len(values) == 90_000


@pytest.mark.parametrize("along", ["index", "seed"])
def test_uniform_is_uniform(along: str) -> None:
    """Moments and 64 bins of 20,000 numbers within 5 standard deviations of what they should be."""
    n = 20_000
    values = [uniform(7, i) if along == "index" else uniform(i, 3) for i in range(n)]
    mean = sum(values) / n
    assert abs(mean - 0.5) < 5 * math.sqrt(1 / 12 / n)
    variance = sum((v - 0.5) ** 2 for v in values) / n
    assert abs(variance - 1 / 12) < 5 * math.sqrt(1 / 180 / n)  # Var (U - 1/2)^2 = 1/180
    bins = [0] * 64
    for v in values:
        bins[int(v * 64)] += 1
    chi_square = sum((count - n / 64) ** 2 / (n / 64) for count in bins)
    assert abs(chi_square - 63) < 5 * math.sqrt(2 * 63)
    lagged = sum((a - 0.5) * (b - 0.5) for a, b in itertools.pairwise(values)) / (n - 1)
    assert abs(lagged) < 5 / 12 / math.sqrt(n), "successive numbers are uncorrelated"


def test_greedy_takes_the_largest_and_of_ties_the_lower_id() -> None:
    for u in GRID:
        assert pick(torch.tensor([0.0, 3.0, 1.0, 3.0]), u, temperature=0) == 1
        assert pick(torch.zeros(1000), u, temperature=0) == 0
        assert pick(torch.tensor([-math.inf, -5.0, -math.inf]), u, temperature=0) == 1


def test_small_temperatures_approach_greedy() -> None:
    logits = torch.tensor([1.0, 1.5, 1.4999, -2.0])
    for temperature in (1e-6, 1e-30, 1e-308, 5e-324):
        assert all(pick(logits, u, temperature=temperature) == 1 for u in GRID), temperature
        assert all(pick(logits - 1e30, u, temperature=temperature) in (0, 1, 2, 3) for u in GRID)
        # Exact ties are still drawn, whatever the temperature.
        assert {pick(torch.tensor([2.0, 2.0]), u, temperature=temperature) for u in (0.1, 0.9)} == {0, 1}


def test_large_temperatures_approach_uniform() -> None:
    logits = torch.tensor([30.0, 0.0, -30.0, 5.0])
    counts = [0] * 4
    for i in range(4000):
        counts[pick(logits, i / 4000, temperature=1e9)] += 1
    assert all(abs(count - 1000) <= 1 for count in counts)


def test_u_runs_from_the_most_likely_token() -> None:
    """Probabilities 1/2, 1/3, 1/6, whatever the ids: the edges lie at 1/2 and 5/6."""
    logits = logits_of(1 / 6, 1 / 2, 1 / 3)
    near = 1e-6
    for u, want in (
        (0, 1),
        (0.5 - near, 1),
        (0.5 + near, 2),
        (5 / 6 - near, 2),
        (5 / 6 + near, 0),
        (LAST, 0),
    ):
        assert pick(logits, u) == want, u
    for u, want in ((0.0, 0), (0.25, 1), (0.5, 2), (0.75 - 2.0**-53, 2), (0.75, 3)):
        assert pick(torch.zeros(4), u) == want, "a token owns its lower edge, not its upper one"


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7, 100])
def test_top_k(k: int) -> None:
    logits = torch.tensor([0.1, 2.0, -1.0, 2.0, 1.0, 0.1, 0.1])
    order = sorted(range(7), key=lambda i: (-float(logits[i]), i))
    assert support(logits, top_k=k) == set(order[:k])


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.25, 1), (0.2500001, 2), (0.5, 2), (0.5000001, 3), (0.75, 3), (0.9999, 4), (1.0, 4), (1e-9, 1)],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    """Four equal tokens have exactly 1/4 each: a set of mass 1/2 reaches 0.5 and needs no third token."""
    assert support(torch.zeros(4), top_p=top_p) == set(range(kept))


def test_top_p_of_one_filters_nothing() -> None:
    """The sum of many probabilities passes 1 before the end; the last token must stay reachable."""
    logits = torch.cat((torch.zeros(618), torch.tensor([-26.0])))
    probs = logits.double().softmax(0)
    assert float(probs.cumsum(0)[-2]) >= 1, "rounding errors exceed the last token's probability"
    assert pick(logits, LAST) == 618
    assert pick(logits, LAST, top_p=1 - 2.0**-40) != 618


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 4), (0.1, 4), (0.1251, 3), (0.26, 2), (0.51, 1), (1.0, 1)])
def test_min_p_is_relative_to_the_best(min_p: float, kept: int) -> None:
    logits = logits_of(8 / 15, 4 / 15, 2 / 15, 1 / 15)
    assert support(logits, min_p=min_p) == set(range(kept))


def test_min_p_of_one_keeps_ties_of_the_best() -> None:
    assert support(torch.tensor([1.0, 2.0, 2.0, 0.0]), min_p=1.0) == {1, 2}


def test_order_of_the_filters() -> None:
    """Temperature before the rest; top-p counts mass within top-k; min-p comes last."""
    logits = logits_of(0.4, 0.3, 0.2, 0.1)
    # At temperature 1/2 the squares count: 0.16, 0.09, 0.04, 0.01 of 0.30.
    assert support(logits, temperature=0.5, top_p=0.84) == {0, 1, 2}
    assert support(logits, temperature=0.5, top_p=0.83) == {0, 1}
    assert support(logits, temperature=0.5, min_p=0.49) == {0, 1}
    assert support(logits, temperature=1.0, min_p=0.49) == {0, 1, 2}
    # Of the top 2, the first has 4/7 = 0.571: with top_p 0.55 it is alone, though it has only 0.4 of all.
    assert support(logits, top_k=2, top_p=0.55) == {0}
    assert support(logits, top_p=0.55) == {0, 1}
    # top-p first: min-p does not renormalise what top-p sees.
    assert support(logits, top_p=0.9, min_p=0.6) == {0, 1}


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.8, "top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_frequencies(filters: dict[str, float]) -> None:
    """6,000 draws with uniform(seed, i): each id within 5 standard deviations, excluded ones never."""
    rng = random.Random(3)
    logits = torch.tensor([rng.gauss(0, 1.5) for _ in range(11)])
    exact = exact_probs(logits, **filters)
    n, counts = 6_000, [0] * 11
    for index in range(n):
        counts[pick(logits, uniform(11, index), **filters)] += 1
    for id, probability in enumerate(exact):
        if probability == 0:
            assert counts[id] == 0, id
        deviation = math.sqrt(n * probability * (1 - probability))
        assert abs(counts[id] - n * probability) <= 5 * deviation + 1e-9, id


def exact_probs(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """The same rules in plain Python."""
    values = logits.tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[: top_k or None]
    weights = {i: math.exp((values[i] - values[order[0]]) / temperature) for i in order}
    mass = {i: w / sum(weights.values()) for i, w in weights.items()}
    kept, total = [], 0.0
    for i in order:
        if total < top_p:
            kept.append(i)
        total += mass[i]
    kept = [i for i in kept if mass[i] >= min_p * mass[order[0]]]
    rest = sum(mass[i] for i in kept)
    return [mass[i] / rest if i in kept else 0.0 for i in range(len(values))]


def test_impossible_tokens_are_never_sampled() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    assert support(logits) == {1, 3}
    assert support(logits, top_k=5) == {1, 3}
    assert {pick(logits, u, temperature=1e-300) for u in GRID} == {1, 3}
    underflow = torch.tensor([0.0, -800.0])  # exp(-800) is 0 in float64
    assert all(pick(underflow, u) == 0 for u in GRID)


def test_any_logits_and_filters_give_an_id() -> None:
    rng = random.Random(1)
    for _ in range(300):
        size = rng.choice((1, 2, 3, 50))
        logits = torch.tensor(
            [rng.choice((rng.gauss(0, 1), 0.0, -3e38, rng.gauss(0, 1e30))) for _ in range(size)]
        )
        filters = {
            "temperature": rng.choice((1e-310, 0.3, 1.0, 50.0, 1e300)),
            "top_k": rng.choice((0, 1, 2, 60)),
            "top_p": rng.choice((1e-300, 0.5, 1.0)),
            "min_p": rng.choice((0.0, 0.3, 1.0)),
        }
        for u in (0.0, 0.5, LAST):
            id = pick(logits, u, **filters)
            assert 0 <= id < size and exact_probs(logits, **filters)[id] > 0


def test_log_probs_are_the_models_own() -> None:
    logits = torch.tensor([3.0, -2.0, 0.5, -math.inf, 80.0, -200.0]).float()
    got = log_probs(logits)
    assert float(got.double().exp().sum()) == pytest.approx(1, abs=1e-6)
    total = sum(math.exp(v - 80) for v in logits.tolist())
    want = [v - 80 - math.log(total) for v in logits.tolist()]
    assert got.tolist() == pytest.approx(want, rel=1e-6, abs=1e-6)
    wide = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 4
    assert float(log_probs(wide).double().exp().sum()) == pytest.approx(1, abs=5000 * 2.0**-24)
    assert bool((log_probs(wide)[wide.argsort()].diff() >= 0).all()), "the logits' order"
