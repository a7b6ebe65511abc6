"""The exchange kernels' own source on the CPU, all ranks at once: right in every order of events that is
tried, and stuck where places are not taken in turn."""

import ctypes
import math

import pytest
import torch
from torch import Tensor

from dsv4.kernels.common.shapes import MIX_WIDTH, mix_chunks
from dsv4.kernels.decode.exchange import TURNS
from dsv4.ops.mhc import ref
from dsv4.parallel.comm import tree_sum
from tests.support.twin import at, needs_compiler, twin_of

pytestmark = needs_compiler
N, M = 4, 24


twin = twin_of("exchange", ranks=ctypes.c_char_p)


class World:
    """All ranks' numbers, and what they have after some steps."""

    def __init__(
        self, size: int, rows: int, d: int, steps: int, turns: int = TURNS, choices: int = 0
    ) -> None:
        """`choices`: a rank's numbers are those of so many experts, two of which it has, and one more."""
        generator = torch.Generator().manual_seed(size)
        self.size, self.rows, self.d, self.steps, self.turns, self.vocab = size, rows, d, steps, turns, 37

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.parts, self.own = choices + 1, 2
        self.chosen = torch.randint(0, self.own * size, (rows, choices), generator=generator).int()
        self.y, self.fn = random(size, 2 * steps, rows, self.parts, d), random(M, N * d)
        self.gate, self.comb = random(rows, N), random(rows, N, N) / 2
        self.start, self.share = random(rows, N, d), random(size, steps, rows, self.vocab)

    def run(self, twin: ctypes.CDLL, seed: int) -> str:
        size, rows, d, steps = self.size, self.rows, self.d, self.steps
        self.streams = self.start.repeat(size, 1, 1, 1)
        self.partial = torch.zeros(size, rows, mix_chunks(d), MIX_WIDTH)
        self.logits = torch.zeros(size, steps, rows, size * self.vocab)
        places = rows * (self.turns * d + self.vocab)
        self.inboxes = torch.zeros(size, size, places, dtype=torch.int64)
        self.ended = torch.zeros(size, dtype=torch.int32)
        problem = twin.ranks(
            *(size, rows, d, self.vocab, steps, self.turns, self.parts, self.own),
            *(at(self.chosen) if self.parts > 1 else None, at(self.y), at(self.fn), at(self.gate)),
            *(at(self.comb), at(self.streams), at(self.partial), at(self.share), at(self.logits)),
            *(at(self.inboxes), at(self.ended), seed),
        )
        return bytes(problem).decode()

    def check(self) -> None:
        want = self.start
        for i in range(2 * self.steps):
            y = self.y[:, i].transpose(0, 1)  # [T, ranks, parts, D]
            for rank in range(self.size):
                y[:, rank, :-1][self.chosen // self.own != rank] = 0
            want = ref.post(tree_sum(y.sum(2)), want, self.gate, self.comb)
        torch.testing.assert_close(self.streams[0], want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
        assert all(torch.equal(streams, self.streams[0]) for streams in self.streams), "ranks differ"
        assert all(torch.equal(partial, self.partial[0]) for partial in self.partial), "ranks differ"
        made = self.streams[0].double().flatten(1)
        sums = self.partial[0].double().sum(1)
        torch.testing.assert_close(
            sums[:, [m + (m >= N) for m in range(M)]], made @ self.fn.double().t(), rtol=1e-4, atol=1e-2
        )
        torch.testing.assert_close(sums[:, N], made.square().sum(1), rtol=1e-5, atol=1e-5)
        whole = self.share.permute(1, 2, 0, 3).flatten(2)
        assert all(torch.equal(logits, whole) for logits in self.logits)
        assert not self.inboxes.any() and not self.ended.any(), "a place was not emptied"


@pytest.mark.parametrize(("size", "rows", "d"), [(2, 1, 64), (2, 3, 40), (4, 1, 32), (8, 1, 33)])
def test_ranks(twin: ctypes.CDLL, size: int, rows: int, d: int) -> None:
    world = World(size, rows, d, steps=2)
    for seed in range(4):
        assert world.run(twin, seed) == ""
        world.check()


@pytest.mark.parametrize(("size", "choices"), [(2, 6), (4, 9)])
def test_ranks_with_whole_experts(twin: ctypes.CDLL, size: int, choices: int) -> None:
    """What lies where another rank's expert was chosen is never added, be it NaN."""
    world = World(size, 3, 40, steps=1, choices=choices)
    is_own = world.chosen.unsqueeze(0) // world.own == torch.arange(size).view(-1, 1, 1)
    assert bool(is_own.any()) and not bool(is_own.all())
    world.y[:, :, :, :-1] = world.y[:, :, :, :-1].masked_fill(~is_own.unsqueeze(1).unsqueeze(-1), math.nan)
    for seed in range(3):
        assert world.run(twin, seed) == ""
    world.check()


def test_one_place_is_not_enough(twin: ctypes.CDLL) -> None:
    """A rank that is ahead overwrites what another has not taken yet: it then waits for ever."""
    world = World(2, 1, 64, steps=40, turns=1)  # about one order of events in five shows it
    found = [world.run(twin, seed) for seed in range(6)]
    assert any("wait for ones that never come" in problem for problem in found), found
