"""The kernels that open a hyper-connection and gather logits, their source on the CPU: one rank, and all of
them at once. Right in every order of events that is tried, stuck where places are not taken in turn."""

import ctypes
import math

import pytest
import torch
from torch import Tensor

from dsv4.gpu.shapes import MIX_WIDTH, mix_chunks
from dsv4.ops.exchange.decode import TURNS
from dsv4.ops.mhc import cpu
from dsv4.parallel.comm import tree_sum
from tests.support.twin import at, needs_compiler, twin_of

pytestmark = needs_compiler
N, M = 4, 24


twin = twin_of("exchange", ranks=ctypes.c_char_p, open_alone=ctypes.c_char_p)


class World:
    """All ranks' numbers, and what they have after some steps."""

    def __init__(
        self,
        size: int,
        rows: int,
        d: int,
        steps: int,
        turns: int = TURNS,
        choices: int = 0,
        embeds: bool = False,
    ) -> None:
        """`choices`: a rank's numbers are those of so many experts, two of which it has, and one more.
        `embeds`: a step begins with its tokens, one of which is unknown."""
        generator = torch.Generator().manual_seed(size)
        self.size, self.rows, self.d, self.steps, self.turns, self.vocab = size, rows, d, steps, turns, 37

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.parts, self.own = choices + 1, 2
        self.chosen = torch.randint(0, self.own * size, (rows, choices), generator=generator).int()
        self.y, self.fn = random(size, 2 * steps, rows, self.parts, d), random(M, N * d)
        self.gate, self.comb = random(rows, N), random(rows, N, N) / 2
        self.ids = torch.randint(0, size * self.vocab, (rows,), generator=generator) if embeds else None
        if self.ids is not None:
            self.ids[rows // 2] = -1
        self.table = random(size * self.vocab, d)
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
            *(at(self.chosen) if self.parts > 1 else None, at(self.ids), at(self.table), at(self.y)),
            *(
                at(self.fn),
                at(self.gate),
                at(self.comb),
                at(self.streams),
                at(self.partial),
                at(self.share),
                at(self.logits),
            ),
            *(at(self.inboxes), at(self.ended), seed),
        )
        return bytes(problem).decode()

    def check(self) -> None:
        want = self.start
        if self.ids is not None:
            want = self.table[self.ids.clamp(min=0)].unsqueeze(1).expand(-1, N, -1)
        for i in range(2 * self.steps)[0 if self.ids is None else -2 :]:
            y = self.y[:, i].transpose(0, 1)  # [T, ranks, parts, D]
            for rank in range(self.size):
                y[:, rank, :-1][self.chosen // self.own != rank] = 0
            want = cpu.post(tree_sum(y.sum(2)), want, self.gate, self.comb)
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


def test_ranks_embed(twin: ctypes.CDLL) -> None:
    """The rank that has a token's row gives it to all; a token that is not known is the first."""
    world = World(4, 5, 40, steps=2, embeds=True)
    for seed in range(3):
        assert world.run(twin, seed) == ""
        world.check()


class Site:
    """What one rank opens: an output, or the step's tokens."""

    def __init__(self, rows: int, d: int, parts: int, dtype: torch.dtype, y_dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(d)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.rows, self.d, self.parts, self.vocab = rows, d, parts, 11
        self.start, self.y = random(rows, N, d).to(dtype), random(rows, parts, d).to(y_dtype)
        self.gate, self.comb, self.fn = random(rows, N), random(rows, N, N), random(M, N * d) * d**-0.5
        self.ids = torch.randint(0, self.vocab, (rows,), generator=generator)
        self.table = random(self.vocab, d)
        self.chosen: Tensor | None = None
        self.own = 0

    def run(
        self,
        twin: ctypes.CDLL,
        seed: int = 0,
        programs: int = 1,
        part: slice = slice(None),
        mixes: int = M,
        embeds: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """streams and partial, of those rows alone."""
        streams, y, ids = (t[part].clone() for t in (self.start, self.y, self.ids))
        gate, comb, rows = self.gate[part].clone(), self.comb[part].clone(), len(streams)
        partial = torch.full((rows, mix_chunks(self.d), MIX_WIDTH), math.nan)
        chosen = None if self.chosen is None else self.chosen[part].clone()
        problem = twin.open_alone(
            *(streams.dtype == torch.float32, y.dtype == torch.float32, rows, min(programs, rows), self.d),
            *(self.vocab, self.parts, mixes, self.own, self.table.dtype == torch.float32, at(chosen)),
            *(at(ids), at(self.table), at(self.fn), at(gate), at(comb), None if embeds else at(y)),
            *(at(streams), at(partial), seed),
        )
        assert bytes(problem).decode() == ""
        return streams, partial

    def check(self, streams: Tensor, partial: Tensor, want: Tensor, mixes: int = M) -> None:
        eps = torch.finfo(streams.dtype).eps
        excess = (streams.double() - want.double()).abs() - 2 * eps * want.double().abs()
        assert float(excess.max()) <= 1e-6, float(excess.max())
        made, sums = streams.double().flatten(1), partial[..., : mixes + 1].double().sum(1)
        columns = [m + (m >= N) for m in range(mixes)]
        wanted = made @ self.fn[:mixes].double().t()
        torch.testing.assert_close(sums[:, columns], wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sums[:, N], made.square().sum(1), rtol=1e-5, atol=1e-5)
        assert bool(partial[..., mixes + 1 :].isnan().all()), "columns that nobody reads"


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(("dtype", "y_dtype"), [(F32, F32), (BF16, F32), (BF16, BF16)])
@pytest.mark.parametrize(("rows", "d", "parts"), [(1, 96, 7), (5, 40, 2), (9, 33, 9)])
def test_alone(
    twin: ctypes.CDLL, rows: int, d: int, parts: int, dtype: torch.dtype, y_dtype: torch.dtype
) -> None:
    """One rank: no push, no take; however many blocks share the rows."""
    site = Site(rows, d, parts, dtype, y_dtype)
    total = torch.zeros(rows, d)
    for i in range(parts):
        total = total + site.y[:, i].float()
    want = cpu.post(total.to(dtype), site.start, site.gate, site.comb)
    first = site.run(twin)
    site.check(*first, want)
    for seed, programs in ((1, 2), (2, 4), (3, 9)):
        streams, partial = site.run(twin, seed, programs)
        assert torch.equal(streams, first[0]) and torch.equal(partial.nan_to_num(7), first[1].nan_to_num(7))
    for row in range(rows):
        streams, partial = site.run(twin, part=slice(row, row + 1))
        assert torch.equal(streams[0], first[0][row]), "a row alone has other bits"
        assert torch.equal(partial[0].nan_to_num(7), first[1][row].nan_to_num(7)), (
            "a row alone has other bits"
        )
    streams, partial = site.run(twin, mixes=N)
    assert torch.equal(streams, first[0])
    site.check(streams, partial, want, mixes=N)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("table", [F32, BF16])
def test_alone_embeds(twin: ctypes.CDLL, dtype: torch.dtype, table: torch.dtype) -> None:
    """Whatever lies in the streams; ids that are unknown are the first, beyond the table nothing."""
    site = Site(5, 72, 1, dtype, F32)
    site.table, site.start = site.table.to(table), torch.full_like(site.start, math.nan)
    site.ids[1] = -1
    streams, partial = site.run(twin, seed=1, programs=2, embeds=True)
    want = site.table[site.ids.clamp(min=0)].to(dtype).unsqueeze(1).expand(-1, N, -1)
    assert torch.equal(streams, want)
    site.check(streams, partial, want)
    site.ids[2] = site.vocab
    streams, _ = site.run(twin, embeds=True)
    assert not streams[2].any() and torch.equal(streams[3:], want[3:])


def test_alone_with_some_experts(twin: ctypes.CDLL) -> None:
    """A rank's own share without the others: where their experts were chosen nothing is added."""
    site = Site(3, 40, 10, F32, F32)
    generator = torch.Generator().manual_seed(1)
    site.chosen, site.own = torch.randint(0, 4, (3, 9), generator=generator).int(), 2
    is_other = site.chosen >= 2
    assert bool(is_other.any()) and not bool(is_other.all())
    site.y[:, :-1][is_other] = 0
    want = cpu.post(site.y.sum(1), site.start, site.gate, site.comb)
    site.y[:, :-1][is_other] = math.nan
    site.check(*site.run(twin, seed=3, programs=2), want)


@pytest.mark.parametrize("where", ["y", "gate", "comb", "streams", "fn"])
def test_alone_not_finite(twin: ctypes.CDLL, where: str) -> None:
    """What is not finite stays in its row; `fn` spoils its own mix alone."""
    site = Site(3, 40, 2, BF16, BF16)
    want = site.run(twin)
    spoilt = {"y": site.y, "gate": site.gate, "comb": site.comb, "streams": site.start, "fn": site.fn}[where]
    spoilt[(1, *[1] * (spoilt.dim() - 1))] = math.nan
    streams, partial = site.run(twin, seed=1, programs=2)
    for row in (0, 2) if where != "fn" else ():
        assert torch.equal(streams[row], want[0][row]) and torch.equal(
            partial[row, :, : M + 1], want[1][row, :, : M + 1]
        )
    column = 1 if where == "fn" else N
    assert bool(partial[1, :, column].isnan().any()) and bool(streams.isnan().any()) == (where != "fn")


def test_one_place_is_not_enough(twin: ctypes.CDLL) -> None:
    """A rank that is ahead overwrites what another has not taken yet: it then waits for ever."""
    world = World(2, 1, 64, steps=40, turns=1)  # about one order of events in five shows it
    found = [world.run(twin, seed) for seed in range(6)]
    assert any("wait for ones that never come" in problem for problem in found), found
