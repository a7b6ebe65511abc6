"""Tokens chosen from shares of the vocabulary: the bits of one process, and how few bytes that takes."""

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.model.choice import MAX_OFFERS, Choice
from dsv4.ops.sample import ref
from dsv4.parallel.mesh import Mesh

VOCAB = 1040  # 130 a rank of eight: more than it may offer, and no whole words of a mask


class Threads:
    """Ranks as threads; counts what each has sent."""

    def __init__(self, size: int) -> None:
        self.size, self.sent, self.rounds = size, 0, 0
        self._held: list[Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def gather(self, rank: int, own: Tensor) -> Tensor:
        self._held[rank] = own
        self._barrier.wait()
        if rank == 0:
            self.sent += own.numel() * own.element_size()
            self.rounds += 1
        whole = torch.cat(self._held, dim=1)
        self._barrier.wait()
        return whole


class Rank:
    def __init__(self, rank: int, threads: Threads) -> None:
        self.gather_columns: Callable[[Tensor], Tensor] = lambda own: threads.gather(rank, own)


def over_ranks(
    size: int, logits: Tensor, settings: Tensor, mask: Tensor | None = None, penalties: Tensor | None = None
) -> tuple[Tensor, Threads]:
    threads, found = Threads(size), [torch.empty(0)] * size

    def run(rank: int) -> None:
        comm: Any = Rank(rank, threads)
        choice = Choice(ref, Mesh(rank, size, comm))
        found[rank] = choice(logits.chunk(size, dim=1)[rank], settings, mask, penalties)

    workers = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for rank in range(1, size):
        assert torch.equal(found[rank], found[0]), rank
    return found[0], threads


def rows_of(chance: random.Random, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits with ties, -inf, NaN; every setting; masks; penalties."""
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    spread = torch.tensor([chance.choice([0.0, 0.3, 3.0, 20.0]) for _ in range(count)]).unsqueeze(1)
    logits = torch.randn(count, VOCAB, generator=generator) * spread
    settings, slots = [], []
    mask = torch.full((count, -(-VOCAB // 32)), -1, dtype=torch.int32)
    for row in range(count):
        kind = chance.choice(["", "", "", "ties", "-inf", "few", "none", "nan", "inf"])
        if kind == "ties":
            logits[row] = (logits[row] * 2).round()
        elif kind in ("-inf", "few", "none"):
            kept = {"-inf": VOCAB // 2, "few": 3, "none": 0}[kind]
            order = torch.randperm(VOCAB, generator=generator)
            logits[row, order[kept:]] = -torch.inf
        elif kind:
            logits[row, chance.randrange(VOCAB)] = {"nan": torch.nan, "inf": torch.inf}[kind]
        has_mask = chance.random() < 0.3
        if has_mask:
            density = chance.choice([0.0, 0.01, 0.5])
            bits = torch.rand(mask.shape[1] * 32, generator=generator) < density
            words = (bits.long().view(-1, 32) << torch.arange(32)).sum(1)
            mask[row] = words.to(torch.int32)
        ids = [chance.randrange(VOCAB) for _ in range(30)]
        slots.append(
            ref.pack_penalties(
                presence=chance.choice([0.0, 0.9]),
                frequency=chance.choice([0.0, -0.4]),
                repetition=chance.choice([1.0, 1.4]),
                bias=[
                    (id, chance.choice([-100.0, 4.5])) for id in {chance.randrange(VOCAB) for _ in range(9)}
                ],
                num_prompt=20,
                ids=ids,
            )
        )
        settings.append(
            ref.pack(
                temperature=chance.choice([0.0, 0.7, 1.0, 3.0]),
                top_k=chance.choice([0, 0, 1, 7, 50, MAX_OFFERS, MAX_OFFERS + 1, VOCAB, VOCAB + 9]),
                top_p=chance.choice([1.0, 1.0, 0.1, 0.9, 0.999]),
                min_p=chance.choice([0.0, 0.0, 0.05, 1.0]),
                seed=chance.randrange(1 << 64),
                index=chance.randrange(10),
                num_top=chance.choice([-1, -1, 0, 3, 20]),
                forced=chance.randrange(VOCAB) if chance.random() < 0.1 else -1,
                has_mask=has_mask,
                penalties=row if chance.random() < 0.4 else -1,
            )
        )
    return logits, torch.tensor(settings), mask, torch.tensor(slots, dtype=torch.int32)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_setting(size: int) -> None:
    chance, chosen = random.Random(size), 0
    for _ in range(6):
        given = rows_of(chance, 24)
        want = ref.choose(*given)
        got, _ = over_ranks(size, *given)
        wrong = (got != want).any(1).nonzero().flatten().tolist()
        assert not wrong, (wrong, given[1][wrong], got[wrong], want[wrong])
        chosen += int((want[:, 2] == ref.CHOSEN).sum())
    assert chosen > 60, "most rows have a distribution"


def test_near_ties_between_ranks() -> None:
    """The best and its like on different ranks: the lower id wins, in the order of sampling too."""
    logits = torch.full((3, VOCAB), -9.0)
    logits[:, [900, 130, 131, 1039]] = 2.0
    rows = [ref.pack(), ref.pack(temperature=1.0, top_k=2), ref.pack(temperature=1.0, top_p=0.5, num_top=4)]
    settings = torch.tensor(rows)
    want = ref.choose(logits, settings, None)
    assert want[0, 0] == 130 and want[1, 0] in (130, 131)
    for size in (2, 4, 8):
        assert torch.equal(over_ranks(size, logits, settings)[0], want)


@pytest.mark.parametrize(
    ("how", "rounds", "most_bytes"),
    [
        ({}, 1, 16),  # greedy: its best, and whether all are numbers
        ({"temperature": 1.0}, 2, 56),
        ({"temperature": 1.0, "min_p": 0.1}, 2, 56),
        ({"temperature": 1.0, "top_k": 40, "top_p": 0.9}, 1, 8 * 41),
        ({"temperature": 1.0, "top_p": 0.9}, 2, 8 * (1 + MAX_OFFERS + 5)),
        ({"num_top": 20}, 2, 8 * (1 + 1 + 1 + 20 + 1 + 5)),
        ({"num_top": 0, "forced": 5}, 2, 8 * (1 + 1 + 1 + 1 + 1 + 5)),
    ],
)
def test_bytes_of_a_row(how: dict[str, Any], rounds: int, most_bytes: int) -> None:
    logits = torch.randn(1, 8192, generator=torch.Generator().manual_seed(3)) * 4
    settings = torch.tensor([ref.pack(**how)])
    got, threads = over_ranks(4, logits, settings)
    assert torch.equal(got, ref.choose(logits, settings, None))
    assert (threads.rounds, threads.sent) == (rounds, most_bytes), "of a share of 8,192 bytes"


@pytest.mark.parametrize("how", [{"top_k": MAX_OFFERS + 1}, {"top_p": 0.99}])
def test_rows_that_need_all_logits(how: dict[str, Any]) -> None:
    """More than the ranks offer is kept: that row's logits are gathered, no other's."""
    logits = torch.randn(3, 8192, generator=torch.Generator().manual_seed(4)) * 0.1
    settings = torch.tensor([ref.pack(), ref.pack(temperature=1.0, **how), ref.pack(temperature=1.0)])
    got, threads = over_ranks(4, logits, settings)
    assert torch.equal(got, ref.choose(logits, settings, None))
    share = logits.shape[1] // 4 * 4
    assert share < threads.sent < 2 * share
