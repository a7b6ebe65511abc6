"""The compressor in any chunking against the specification over whole sequences, in float64."""

import math
import random

import pytest
import torch
from ops_support import FUNCTION, ROUND, check_close, exactly, in_float64, rand, spec_model
from torch import Tensor

from dsv4.cache.layout import SPARE, CacheLayout
from dsv4.cache.store import Tail
from dsv4.config import LayerSpec, preset
from dsv4.model.bundle import Bundle, Numerics, Weights
from dsv4.model.compressor import Compressor
from dsv4.model.step import Step
from dsv4.ops import Ops
from dsv4.ops.attention import cpu
from dsv4.spec import ops as spec_ops

CSA, HCA = LayerSpec("csa", 4, False), LayerSpec("hca", 128, False)
WIDTH, CHANNELS, SLOTS = 5, 3, 4


def entries(weights: dict[str, Tensor], spec: LayerSpec, text: Tensor) -> Tensor:
    """The specification's entries of a whole sequence [T, D], before their norm."""
    model = spec_model({"c.ape": weights["ape"], "c.wgate": weights["wgate"].t()})
    with in_float64():
        values = model.product(text, weights["wkv"].t())
        scores = model.pool_scores(text, "c", spec)
        return spec_ops.compress(values, scores, spec.ratio, spec.kind == "csa")


def make(spec: LayerSpec, seed: int = 0) -> tuple[Compressor, dict[str, Tensor]]:
    columns = CHANNELS * (2 if spec.kind == "csa" else 1)
    weights = {
        "wkv": rand(WIDTH, columns, seed=seed),
        "wgate": rand(WIDTH, columns, seed=seed + 1),
        "ape": 3 * rand(spec.ratio, columns, seed=seed + 2),
        "norm": torch.ones(CHANNELS),
    }
    held = Weights({f"c.{name}": tensor for name, tensor in weights.items()}, frozenset(), 0)
    bundle = Bundle(preset("tiny"), held, Ops.choose("cpu"), Numerics(torch.float32, "a16", True))
    return Compressor(bundle, "c", spec), weights


def poisoned_tail(spec: LayerSpec) -> Tail:
    """Rows nobody wrote are NaN: reading one of them, even with weight 0, would show."""
    columns = CHANNELS * (2 if spec.kind == "csa" else 1)
    shape = (SLOTS, CacheLayout.tail_rows(spec), columns)
    return Tail(torch.full(shape, math.nan), torch.full(shape, math.nan))


def bound(want: Tensor, ratio: int) -> Tensor:
    """Scores of a few units off by WIDTH roundings, exp, and sums of up to 2 * ratio terms of size 10."""
    return (20 * WIDTH * ROUND + FUNCTION + 3 * ratio * ROUND) * 20 * torch.ones_like(want)


@pytest.mark.parametrize("spec", [CSA, HCA], ids=["csa", "hca"])
@pytest.mark.parametrize("seed", range(4))
def test_any_chunking_of_several_sequences(spec: LayerSpec, seed: int) -> None:
    """Three sequences in random chunks, mixed: the specification's entries, and bitwise those of one pass."""
    compressor, weights = make(spec)
    rng = random.Random(seed)
    length = 3 * spec.ratio + 7
    texts = [rand(length, WIDTH, seed=10 + i) for i in range(3)]
    want = [entries(weights, spec, text) for text in texts]

    tail, done = poisoned_tail(spec), [0, 0, 0]
    got: list[list[Tensor]] = [[], [], []]
    slots = rng.sample(range(SLOTS), 3)
    sizes = (1, 1, 2, 3, 4, 5, 7, 131) if spec is HCA else (1, 1, 2, 3, 4, 5, 9)
    while min(done) < length:
        spans, rows = [], []
        for i in rng.sample(range(3), rng.randrange(1, 4)):
            count = min(rng.choice(sizes), length - done[i])
            if count:
                spans.append((i, done[i], count))
                rows.append(texts[i][done[i] : done[i] + count])
        if not spans:
            continue
        step = Step.build([(slots[i], start, [0] * count) for i, start, count in spans], "cpu")
        closing, pooled = compressor(torch.cat(rows), step, tail)
        assert closing.tolist() == [
            t for t, p in enumerate(step.positions.tolist()) if (p + 1) % spec.ratio == 0
        ]
        for token, entry in zip(closing.tolist(), pooled, strict=True):
            got[slots.index(int(step.slots[token]))].append(entry)
        for i, start, count in spans:
            done[i] = start + count
    compressor_alone, _ = make(spec)
    for i, text in enumerate(texts):
        assert len(got[i]) == len(want[i]) == length // spec.ratio
        found = torch.stack(got[i])
        check_close(found, want[i], bound(found, spec.ratio), f"sequence {i}")
        step = Step.build([(0, 0, [0] * length)], "cpu")
        _, at_once = compressor_alone(text, step, poisoned_tail(spec))
        assert torch.equal(found, at_once), "chunks and batch-mates change no bit"


def test_the_position_bias_is_on_the_score_only() -> None:
    """Equal values in a block: whatever the bias, the entry is that value."""
    compressor, weights = make(HCA)
    x = rand(1, WIDTH).expand(128, WIDTH).contiguous()
    _, entry = compressor(x, Step.build([(0, 0, [0] * 128)], "cpu"), poisoned_tail(HCA))
    check_close(entry[0], (x[0] @ weights["wkv"]).double(), 1e-5, "entry of equal values")


def test_overlap_takes_first_halves_of_the_previous_block() -> None:
    """Values 1..8 in the first half and 101..108 in the second; equal scores make the entry their mean."""
    values = torch.cat((torch.arange(1.0, 9).view(8, 1), 100 + torch.arange(1.0, 9).view(8, 1)), dim=1)
    scores, tail = torch.zeros(8, 2), torch.full((1, 16, 2), math.nan)
    where = (torch.zeros(8, dtype=torch.long), torch.arange(8), torch.zeros(8, dtype=torch.long))
    got = cpu.pool(values, scores, tail, tail, torch.tensor([3, 7]), *where, 4, True)
    first = (101 + 102 + 103 + 104) / 4  # no previous block: weight 0, not score 0
    second = (1 + 2 + 3 + 4 + 105 + 106 + 107 + 108) / 8
    assert got.tolist() == [[first], [second]]


@pytest.mark.parametrize("overlaps", [True, False])
def test_rows_that_are_not_finite(overlaps: bool) -> None:
    """NaN and infinity in values and scores give what the specification gives, channel by channel."""
    values, scores = rand(8, 6), rand(8, 6, seed=1)
    values[1, 0], values[6, 4], values[5, 5] = math.nan, math.inf, -math.inf
    scores[2, 1], scores[3, 3], scores[7, 2], scores[4:, 5] = math.nan, math.inf, -math.inf, -math.inf
    at, tail = torch.arange(8), torch.full((1, 16, 6), math.nan)
    zeros = torch.zeros(8, dtype=torch.long)
    got = cpu.pool(
        values, scores, tail, tail, torch.tensor([3, 7]), zeros, at, zeros, ratio=4, overlap=overlaps
    )
    want = exactly(spec_ops.compress, values, scores, 4, overlaps)
    check_close(got, want, bound(got, 4), "entries")
    assert torch.isnan(got).any() and torch.isfinite(got).any()
    views = (values.t().contiguous().t(), scores.t().contiguous().t(), tail, tail, torch.tensor([3, 7]))
    again = cpu.pool(*views, zeros, at, zeros, ratio=4, overlap=overlaps)
    assert torch.equal(again.nan_to_num(7), got.nan_to_num(7))


def test_far_scores_and_no_closing_block() -> None:
    values, scores = (
        torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
        torch.tensor([[-1e30], [0.0], [-1e30], [1e30]]),
    )
    tail = torch.zeros(1, 4 + SPARE, 1)
    zeros = torch.zeros(4, dtype=torch.long)
    got = cpu.pool(values, scores, tail, tail, torch.tensor([3]), zeros, torch.arange(4), zeros, 4, False)
    assert got.tolist() == [[4.0]]
    none = torch.tensor([], dtype=torch.long)
    assert cpu.pool(values, scores, tail, tail, none, zeros, torch.arange(4), zeros, 4, False).shape == (0, 1)
    both = torch.zeros(4, 6)
    wide = torch.zeros(1, 4 + SPARE, 6)
    assert cpu.pool(both, both, wide, wide, none, zeros, torch.arange(4), zeros, 4, True).shape == (0, 3)
