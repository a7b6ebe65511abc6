"""From logits to a token: the arithmetic, every filter at its edge, frequencies, a slow sampler in Python."""

import ctypes
import math
import random
import struct
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4.ops.sample.cpu import (
    CHOSEN,
    NONE_ALLOWED,
    NOT_FINITE,
    RESULT,
    Choice,
    _log,
    choose,
    gumbel,
    log_probs,
    pack,
    uniform,
    unpack,
    weight_of,
)

ONE = 1 << 44


def noise(seed: Tensor, index: Tensor, vocab: int) -> Tensor:
    return gumbel(uniform(seed, index, torch.arange(vocab)))


def logits_of(*probs: float) -> Tensor:
    return torch.tensor([math.log(p) if p else -math.inf for p in probs])


def bits_of(allowed: list[bool]) -> list[int]:
    """The mask of one row."""
    words = [0] * -(-len(allowed) // 32)
    for i, is_allowed in enumerate(allowed):
        words[i // 32] |= int(is_allowed) << i % 32
    return [word - (word >> 31 << 32) for word in words]


def one(logits: Tensor, allowed: list[bool] | None = None, **how: float) -> Choice:
    mask = None if allowed is None else torch.tensor([bits_of(allowed)], dtype=torch.int32)
    row = pack(**how, has_mask=allowed is not None)  # type: ignore[arg-type]
    return unpack(choose(logits.unsqueeze(0), torch.tensor([row]), mask)[0].tolist())


def draw(logits: Tensor, n: int, first: int = 0, **how: float) -> Tensor:
    """The ids chosen at n indices, one after the other."""
    rows = torch.tensor([pack(**how)]).repeat(n, 1)  # type: ignore[arg-type]
    rows[:, 4] = torch.arange(first, first + n)
    return choose(logits.expand(n, -1), rows, None)[:, 0].long()


def support(logits: Tensor, **filters: float) -> set[int]:
    return set(draw(logits, 2000, **{"temperature": 1.0, **filters}).tolist())


def test_weights_are_exp_cut_to_integers() -> None:
    x = -torch.rand(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 31
    want = x.exp() * ONE
    assert bool(((weight_of(x) - want).abs() <= 1 + want * 2.0**-51).all()), (
        "cut, and 2 units in the last place"
    )
    edges = torch.tensor([0.0, -0.0, -5e-324, -31 - 1e-14, -40.0, -1e300, -math.inf], dtype=torch.float64)
    assert weight_of(edges).tolist() == [ONE, ONE, ONE, 0, 0, 0, 0]


def test_logarithms_are_accurate_relative_to_themselves() -> None:
    generator = torch.Generator().manual_seed(2)
    near, far = torch.rand(2, 200_000, dtype=torch.float64, generator=generator)
    for y in (
        1 - near * 1e-9,
        near * 40 + 2.0**-53,
        (far * 60 - 53).exp2(),
        1 - 2.0 ** -torch.arange(1.0, 54.0),
    ):
        y = y.double()
        want = y.log()
        assert bool(((_log(y) - want).abs() <= 4 * 2.0**-52 * want.abs()).all())
    assert _log(torch.ones(1, dtype=torch.float64)).tolist() == [0.0]


def test_noise_is_gumbel_and_independent_over_token_index_and_seed() -> None:
    """Mean, variance and 64 bins of 250,000 numbers, and correlation with each neighbour: 5 deviations."""
    index = torch.arange(500)
    for g in (noise(torch.full((500,), 7), index, 500), noise(index, torch.full((500,), 3), 500)):
        n = g.numel()
        assert abs(float(g.mean()) - 0.5772156649) < 5 * math.sqrt(math.pi**2 / 6 / n)
        assert abs(float(g.var()) - math.pi**2 / 6) < 5 * math.sqrt(22 / 5 * math.pi**4 / 36 / n)
        u = torch.exp(-torch.exp(-g))
        bins = torch.bincount((u * 64).long().flatten(), minlength=64).double()
        assert abs(float(((bins - n / 64) ** 2 / (n / 64)).sum()) - 63) < 5 * math.sqrt(2 * 63)
        v = u - 0.5
        for a, b in ((v[1:], v[:-1]), (v[:, 1:], v[:, :-1]), (v[1:, :-1], v[:-1, 1:])):
            assert abs(float((a * b).mean())) < 5 / 12 / math.sqrt(a.numel())
        assert len(set(g.flatten().tolist())) == n, "53 bits: no two alike"


def test_noise_of_all_seeds_and_indices_is_finite() -> None:
    seeds = torch.tensor([0, -1, 1 << 62, -(1 << 63)])
    assert bool(torch.isfinite(noise(seeds, torch.tensor([0, 10**6, 1 << 40, -1]), 1000)).all())


def test_greedy_takes_the_largest_and_of_ties_the_lower_id() -> None:
    assert one(torch.tensor([0.0, 3.0, 1.0, 3.0])).id == 1
    assert one(torch.zeros(1000)).id == 0
    assert one(torch.tensor([-0.0, 0.0])).id == one(torch.tensor([0.0, -0.0])).id == 0
    assert one(torch.tensor([-math.inf, -5.0, -math.inf])).id == 1
    assert one(torch.tensor([5.0, 4.0, 4.0]), allowed=[False, True, True]).id == 1


def test_small_temperatures_approach_greedy() -> None:
    logits = torch.tensor([1.0, 1.5, 1.4999, -2.0])
    for temperature in (1e-6, 1e-30, 1e-308, 5e-324):
        assert support(logits, temperature=temperature) == {1}, temperature
        # Exact ties are still drawn, whatever the temperature.
        assert support(torch.tensor([2.0, 2.0, 1.0]), temperature=temperature) == {0, 1}


def test_large_temperatures_approach_uniform() -> None:
    counts = torch.bincount(draw(torch.tensor([30.0, 0.0, -30.0, 5.0]), 4000, temperature=1e9), minlength=4)
    assert bool(((counts - 1000).abs() < 5 * math.sqrt(750)).all())


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7, 100])
def test_top_k(k: int) -> None:
    logits = torch.tensor([0.1, 2.0, -1.0, 2.0, 1.0, 0.1, 0.1])
    order = sorted(range(7), key=lambda i: (-float(logits[i]), i))
    assert support(logits, top_k=k) == set(order[:k])


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.25, 1), (0.2500001, 2), (0.5, 2), (0.5000001, 3), (0.75, 3), (0.9999, 4), (1.0, 4), (1e-300, 1)],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    """Four equal tokens have exactly 1/4 each: a set of mass 1/2 reaches 0.5 and needs no third token."""
    assert support(torch.zeros(4), top_p=top_p) == set(range(kept))


def test_top_p_of_one_filters_nothing() -> None:
    """The least likely token comes as often as it should: about 11 times in 250,000 at probability e**-10."""
    logits = torch.tensor([0.0, -10.0])
    n = 250_000
    expected = n * math.exp(-10)
    assert abs(int(draw(logits, n, temperature=1.0).sum()) - expected) < 5 * math.sqrt(expected)
    assert not draw(logits, n, temperature=1.0, top_p=0.9999).any()


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 4), (0.1, 4), (0.1251, 3), (0.26, 2), (0.51, 1), (1.0, 1)])
def test_min_p_is_relative_to_the_best(min_p: float, kept: int) -> None:
    assert support(logits_of(8 / 15, 4 / 15, 2 / 15, 1 / 15), min_p=min_p) == set(range(kept))


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


FILTERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.8, "top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"top_k": 6, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_frequencies(filters: dict[str, float]) -> None:
    """Chi-square of 100,000 draws within 5 standard deviations; excluded tokens never come."""
    rng = random.Random(3)
    logits = torch.tensor([rng.gauss(0, 1.5) for _ in range(11)])
    exact = torch.tensor(exact_probs(logits.tolist(), **filters), dtype=torch.float64)
    n = 100_000
    counts = torch.bincount(
        draw(logits, n, **{"temperature": 1.0, "seed": 11, **filters}), minlength=11
    ).double()
    assert float(counts[exact == 0].sum()) == 0
    expected = (exact * n)[exact > 0]
    chi_square = float(((counts[exact > 0] - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom), chi_square


def exact_probs(
    values: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """The distribution by plain softmax: no integers, no noise."""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[: top_k or None]
    weights = {i: math.exp((values[i] - values[order[0]]) / temperature) for i in order}
    mass = {i: w / sum(weights.values()) for i, w in weights.items()}
    before = dict(zip(order, accumulate((mass[i] for i in order), initial=0.0), strict=False))
    kept = [i for i in order if before[i] < top_p and mass[i] >= min_p * mass[order[0]]]
    rest = sum(mass[i] for i in kept)
    return [mass[i] / rest if i in kept else 0.0 for i in range(len(values))]


def test_a_row_does_not_depend_on_others_or_on_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 77, generator=generator) * 3
    rows = torch.tensor(
        [pack(i % 4 * 0.5, i % 5 * 3, 1 - i % 3 * 0.1, i % 2 * 0.01, i, i * 7, i % 22 - 1) for i in range(40)]
    )
    whole = choose(logits, rows, None)
    padded = choose(torch.cat((logits, torch.full((40, 23), -math.inf)), dim=1), rows, None)
    assert torch.equal(whole, padded)
    for i in range(40):
        assert torch.equal(choose(logits[i : i + 1], rows[i : i + 1], None)[0], whole[i])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_without_a_distribution_say_so(temperature: float) -> None:
    for bad in (math.nan, math.inf, -math.nan):
        for at in (0, 2):
            logits = torch.tensor([1.0, 2.0, 3.0])
            logits[at] = bad
            row = one(logits, allowed=[False, True, False], temperature=temperature, num_top=2)
            assert (row.id, row.status, row.top) == (-1, NOT_FINITE, ()) and math.isnan(row.logprob)
    none = one(torch.full((40,), -math.inf), temperature=temperature, num_top=2)
    assert (none.id, none.status, none.top) == (-1, NONE_ALLOWED, ())
    for logits in (torch.zeros(40), torch.tensor([-math.inf, *[1.0] * 39])):
        allowed = [i == 0 and logits[0] < 0 for i in range(40)]
        assert one(logits, allowed=allowed, temperature=temperature).status == NONE_ALLOWED
    row = torch.tensor([pack(has_mask=True)])
    assert choose(torch.zeros(1, 4), row, None)[0, 2] == NONE_ALLOWED, "a mask was promised and is not there"


def test_logprobs_are_the_models_own() -> None:
    """Before temperature, filters and mask; listed by logit, ties to the lower id, -inf never."""
    logits = torch.tensor([3.0, -2.0, 80.0, -math.inf, 80.0, 79.0, -200.0])
    total = sum(math.exp(v - 80) for v in logits.tolist())
    want = [v - 80 - math.log(total) for v in logits.tolist()]
    allowed = [True] * 2 + [False] * 5
    row = one(logits, allowed, temperature=3.0, top_k=1, num_top=20)
    assert row.id == 0 and row.logprob == pytest.approx(want[0], rel=1e-7)
    assert [id for id, _ in row.top] == [2, 4, 5, 0, 1, 6]
    assert [p for _, p in row.top] == pytest.approx([want[id] for id, _ in row.top], rel=1e-7)
    assert one(logits, num_top=2).top == row.top[:2]
    assert one(logits, num_top=0).top == () and not math.isnan(one(logits, num_top=0).logprob)
    assert math.isnan(one(logits).logprob)
    wide = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 4
    ids = range(0, 5000, 50)
    got = [one(wide, num_top=0, forced=id) for id in ids]
    assert [row.id for row in got] == list(ids)
    want = wide.double().log_softmax(0)[list(ids)].tolist()
    assert [row.logprob for row in got] == pytest.approx(want, rel=2.0**-23)


def test_forced_tokens_need_no_permission() -> None:
    row = one(torch.tensor([1.0, -math.inf]), allowed=[True, False], num_top=1, forced=1, temperature=1.0)
    assert (row.id, row.logprob, row.status, row.top[0][0]) == (1, -math.inf, CHOSEN, 0)


# The same definition once more, one number at a time.
MASK64 = (1 << 64) - 1


def slow_exp(x: float) -> int:
    if not x >= -31:
        return 0
    k = float(round(x * 1.4426950408889634))
    r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10
    value = 1 / math.factorial(12)
    for n in range(11, -1, -1):
        value = value * r + 1 / math.factorial(n)
    return int(math.ldexp(value, int(k) + 44))


def slow_log(y: float) -> float:
    m, e = math.frexp(y)
    m, e = m * 2, e - 1
    if m > math.sqrt(2):
        m, e = m / 2, e + 1
    s = (m - 1) / (m + 1)
    value = 2 / 21
    for n in range(19, 0, -2):
        value = value * (s * s) + 2 / n
    return e * 6.93147180369123816490e-01 + (s * value + e * 1.90821492927058770002e-10)


def slow_mix(z: int) -> int:
    z &= MASK64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK64
    return z ^ z >> 31


def slow_noise(seed: int, index: int, id: int) -> float:
    golden = 0x9E3779B97F4A7C15
    base = slow_mix(slow_mix(seed + golden) + index * 0xD1B54A32D192ED03)
    n = max(slow_mix(base + (id + 1) * golden) >> 11, 1)
    return -slow_log(-slow_log(1 - n / 2**53))


def slow_choose(values: list[float], allowed: list[bool], how: dict[str, float]) -> list[int]:
    """The result's first 3 columns and the listed ids and logprobs."""
    nothing = [-1] * (RESULT - 4)
    if any(math.isnan(v) or v == math.inf for v in values):
        return [-1, -1, NOT_FINITE, 0, *nothing]
    order = sorted((i for i in range(len(values)) if values[i] > -math.inf), key=lambda i: (-values[i], i))
    ids = [i for i in order if allowed[i]]
    if not ids:
        return [-1, -1, NONE_ALLOWED, 0, *nothing]
    chosen = ids[0]
    if temperature := how["temperature"]:
        x = {i: (values[i] - values[ids[0]]) / temperature for i in ids}
        weight = {i: slow_exp(x[i]) for i in ids}
        if how["top_k"]:
            ids = ids[: int(how["top_k"])]
        if how["top_p"] < 1:
            total = sum(weight[i] for i in ids)
            needed = min(max(math.ceil(float(total) * how["top_p"]), 1), total)
            before = dict(zip(ids, accumulate((weight[i] for i in ids), initial=0), strict=False))
            ids = [i for i in ids if before[i] < needed]
        ids = [i for i in ids if weight[i] >= how["min_p"] * weight[ids[0]]]
        keys = {i: x[i] + slow_noise(int(how["seed"]), int(how["index"]), i) for i in ids}
        chosen = min(ids, key=lambda i: (-keys[i], i))
    if how["num_top"] < 0:
        return [chosen, -1, CHOSEN, 0, *nothing]
    total = sum(slow_exp(values[i] - values[order[0]]) for i in order)
    top = order[: int(how["num_top"])]
    logprobs = [values[i] - values[order[0]] - slow_log(total / ONE) for i in (chosen, *top)]
    bits = [struct.unpack("<i", bytes(ctypes.c_float(p)))[0] for p in logprobs]
    rest = [-1] * (20 - len(top))
    return [chosen, bits[0], CHOSEN, 0, *top, *rest, *bits[1:], *rest]


FLOATS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 1.5, -math.inf, 3.4028234663852886e38, -3.4028234663852886e38, 1e-45]),
    st.floats(-40, 40, width=32),
    st.integers(-6, 2).map(float),
    st.floats(width=32, allow_nan=False, max_value=3.4028234663852886e38),
)
HOW = st.fixed_dictionaries(
    {
        "temperature": st.one_of(
            st.sampled_from([0.0, 1.0, 5e-324, 1e-30, 1e30, 1e300, 0.7]), st.floats(1e-3, 50)
        ),
        "top_k": st.sampled_from([0, 0, 1, 2, 3, 7, 40, 10**12]),
        "top_p": st.one_of(st.sampled_from([1.0, 1e-300, 0.5, 0.95, 1 - 2**-53]), st.floats(1e-9, 1)),
        "min_p": st.one_of(st.sampled_from([0.0, 1.0, 0.5, 5e-324]), st.floats(0, 1)),
        "seed": st.integers(0, MASK64),
        "index": st.integers(0, 1 << 40),
        "num_top": st.integers(-1, 20),
    }
)


@settings(max_examples=300, deadline=None)
@given(values=st.lists(FLOATS, min_size=1, max_size=70), how=HOW, data=st.data())
def test_the_slow_sampler_agrees(values: list[float], how: dict[str, float], data: st.DataObject) -> None:
    everything = [True] * len(values)
    size = len(values)
    allowed = data.draw(st.none() | st.lists(st.booleans(), min_size=size, max_size=size))
    if data.draw(st.sampled_from([False] * 9 + [True])):
        values[data.draw(st.integers(0, size - 1))] = data.draw(st.sampled_from([math.nan, math.inf]))
    logits = torch.tensor([values], dtype=torch.float32)
    mask = None if allowed is None else torch.tensor([bits_of(allowed)], dtype=torch.int32)
    row = pack(**how, has_mask=allowed is not None)  # type: ignore[arg-type]
    got = choose(logits, torch.tensor([row]), mask)[0].tolist()
    assert got == slow_choose(logits[0].tolist(), allowed or everything, how)


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


ROWS = [
    [1.0, 3.0, 3.0, -2.0],
    [-0.0, 0.0, -1.0],
    [math.inf, 1.0],
    [0.0, math.nan, 9.0],
    [-math.inf] * 3,
    [-math.inf, -5.0],
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_short_way_of_greedy_rows_gives_what_the_long_one_does(row: list[float]) -> None:
    """A mask that allows everything takes the long way."""
    logits, settings = torch.tensor([row, row[::-1]]), torch.tensor([pack(), pack()])
    everything = torch.full((2, 1), -1, dtype=torch.int32)
    assert torch.equal(choose(logits, settings, None), choose(logits, settings, everything))
