"""The compressor in any chunking against the streaming machine it must equal, token by token, in float64."""

import math
import random

import pytest
import torch
from ops_support import FUNCTION, ROUND, check_close, rand
from torch import Tensor

from dsv4.cache.layout import SPARE, CacheLayout
from dsv4.cache.store import Tail
from dsv4.config import LayerSpec, preset
from dsv4.model.bundle import Bundle, Numerics, Weights
from dsv4.model.compressor import Compressor
from dsv4.model.step import Step
from dsv4.ops import Ops
from dsv4.ops.attention import cpu

CSA, HCA = LayerSpec("csa", 4, False), LayerSpec("hca", 128, False)
WIDTH, CHANNELS, SLOTS = 5, 3, 4


class Machine:
    """Pushes one token at a time: an open block's rows, and the first halves of the block before."""

    def __init__(self, weights: dict[str, Tensor], spec: LayerSpec) -> None:
        self.weights, self.ratio, self.overlap = weights, spec.ratio, spec.kind == "csa"
        self.seen = 0
        self.current: list[tuple[list[float], list[float]]] = []
        self.previous: list[tuple[list[float], list[float]]] = []

    def push(self, x: list[float]) -> list[float] | None:
        value = [
            sum(a * b for a, b in zip(x, column, strict=True)) for column in self.weights["wkv"].t().tolist()
        ]
        score = [
            sum(a * b for a, b in zip(x, column, strict=True))
            for column in self.weights["wgate"].t().tolist()
        ]
        bias = self.weights["ape"][self.seen % self.ratio].tolist()
        self.current.append((value, [s + b for s, b in zip(score, bias, strict=True)]))
        self.seen += 1
        if self.seen % self.ratio:
            return None
        shift = CHANNELS if self.overlap else 0
        entry = []
        for i in range(CHANNELS):
            rows = [(v[i], s[i]) for v, s in self.previous]
            rows += [(v[shift + i], s[shift + i]) for v, s in self.current]
            peak = max(s for _, s in rows)
            total = sum(math.exp(s - peak) for _, s in rows)
            entry.append(sum(math.exp(s - peak) / total * v for v, s in rows))
        self.previous = self.current if self.overlap else []
        self.current = []
        return entry


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
    """Three sequences in random chunks, mixed: entries equal the machine's, and those of one pass bitwise."""
    compressor, weights = make(spec)
    rng = random.Random(seed)
    length = 3 * spec.ratio + 7
    texts = [rand(length, WIDTH, seed=10 + i) for i in range(3)]
    machines = [Machine(weights, spec) for _ in texts]
    want = [
        [e for row in text.tolist() if (e := m.push(row))] for m, text in zip(machines, texts, strict=True)
    ]

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
        entries = torch.stack(got[i])
        check_close(entries, torch.tensor(want[i]), bound(entries, spec.ratio), f"sequence {i}")
        step = Step.build([(0, 0, [0] * length)], "cpu")
        _, at_once = compressor_alone(text, step, poisoned_tail(spec))
        assert torch.equal(entries, at_once), "chunks and batch-mates change no bit"


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
