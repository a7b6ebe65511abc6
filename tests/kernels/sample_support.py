"""Rows of every kind for the sampler's tests: logits with ties and extremes, settings, masks."""

import math
import random

import torch
from torch import Tensor

from dsv4.ops.sample.cpu import HISTORY, pack, pack_penalties

LARGEST = 3.4028234663852886e38


def _logits(rng: random.Random, vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 40))
    normal = torch.randn(vocab, generator=generator)
    kind = rng.randrange(10)
    if kind < 3:
        z = normal * rng.choice((0.02, 1.0, 3.0, 8.0)) + rng.choice((0.0, 15.0, -40.0))
    elif kind == 3:  # many ties
        z = (normal * rng.choice((1, 4))).round()
    elif kind == 4:  # all alike, but for a few
        z = torch.full((vocab,), rng.choice((0.0, -0.0, 7.25)))
        z[torch.randint(vocab, (3,), generator=generator)] -= rng.choice((0.0, 1e-6, 1.0))
    elif kind == 5:  # all magnitudes, denormal numbers among them
        z = normal.sign() * torch.exp2(torch.rand(vocab, generator=generator) * 276 - 149)
    elif kind == 6:  # neighbours of one number
        z = (torch.randint(-20, 20, (vocab,), generator=generator).int() + 0x41A00000).view(torch.float32)
    elif kind == 7:  # one far above
        z = normal.clone()
        z[rng.randrange(vocab)] = 60.0
    elif kind == 8:  # most impossible
        z = torch.where(torch.rand(vocab, generator=generator) < 0.97, -torch.inf, normal)
    else:
        values = torch.tensor([LARGEST, -LARGEST, 0.0, -0.0, 1e-45, -math.inf, 1.0, -3.0])
        z = values[torch.randint(len(values), (vocab,), generator=generator)]
    if rng.random() < 0.05:
        z[rng.randrange(vocab)] = rng.choice((math.nan, math.inf, -math.nan))
    return z


def _settings(rng: random.Random, vocab: int) -> list[int]:
    usual = rng.random() < 0.6
    temperature = rng.choice((0.0, 0.7, 1.0, 0.3) if usual else (1.0, 5e-324, 1e-30, 1e30, 1e300, 25.0, 1e-3))
    return pack(
        temperature=temperature,
        top_k=rng.choice((0, 0, 0, 1, 2, 20, 50, 300, vocab - 1, vocab, 10**12)),
        top_p=rng.choice((1.0, 1.0, 0.95, 0.5, rng.random() + 1e-9, 1e-300, 1 - 2**-53)),
        min_p=rng.choice((0.0, 0.0, 0.0, 0.05, rng.random(), 1.0, 5e-324)),
        seed=rng.randrange(1 << 64),
        index=rng.choice((0, 1, rng.randrange(1 << 20))),
        num_top=rng.choice((-1, -1, -1, 0, 1, 5, 20)),
        forced=rng.randrange(vocab) if rng.random() < 0.1 else -1,
        has_mask=rng.random() < 0.3,
    )


def make(rows: int, vocab: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits, settings, masks of so many rows."""
    rng = random.Random(seed)
    logits = torch.stack([_logits(rng, vocab) for _ in range(rows)])
    settings = torch.tensor([_settings(rng, vocab) for _ in range(rows)])
    words = -(-vocab // 32)
    mask = torch.randint(-(1 << 31), 1 << 31, (rows, words), generator=torch.Generator().manual_seed(seed))
    sparse = torch.randint(
        -(1 << 31), 1 << 31, (rows, words), generator=torch.Generator().manual_seed(seed + 1)
    )
    for row in range(rows):
        if rng.random() < 0.5:
            mask[row] &= sparse[row]
        if rng.random() < 0.1:
            mask[row] = 0
    return logits, settings, mask.int()


def _penalties(rng: random.Random, vocab: int, context: int) -> tuple[list[int], int]:
    """A row of penalties and the index of the token to choose."""
    end = rng.randint(1, context)
    num_prompt = rng.randint(1, end)
    few = [rng.randrange(vocab) for _ in range(rng.choice((1, 3, 50)))]
    ids = [rng.choice(few) if rng.random() < 0.7 else rng.randrange(vocab) for _ in range(context)]
    biased = rng.sample(range(vocab), min(vocab, rng.choice((0, 0, 1, 5, 200, 1024))))
    row = pack_penalties(
        presence=rng.choice((0.0, 0.0, 0.5, -2.0, rng.uniform(-2, 2))),
        frequency=rng.choice((0.0, 0.0, 0.1, 2.0, rng.uniform(-2, 2))),
        repetition=rng.choice((1.0, 1.0, 1.1, 0.01, 100.0, rng.uniform(0.5, 2))),
        bias=[(id, rng.choice((-100.0, 100.0, 1.5, rng.uniform(-3, 3)))) for id in biased],
        num_prompt=num_prompt,
        ids=ids,
    )
    return row, end - num_prompt


def add_penalties(settings: Tensor, vocab: int, seed: int, context: int = 300) -> Tensor:
    """Penalties [rows, HISTORY + context] in another order than the rows, which are told which is theirs."""
    rng = random.Random(seed)
    table = torch.empty(len(settings), HISTORY + context, dtype=torch.int32)
    for row, slot in enumerate(rng.sample(range(len(settings)), len(settings))):
        packed, index = _penalties(rng, vocab, context)
        table[slot] = torch.tensor(packed, dtype=torch.int32)
        settings[row, 4] = index
        if rng.random() < 0.8:
            settings[row, 6] += (slot + 1) << 33
    return table
