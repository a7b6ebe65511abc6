"""Ranks as streams of one process, each with its inbox: sums, embeddings and logits are right on all of them,
step after step, and whoever never comes is named when the time is up."""

from collections.abc import Callable

import pytest
import torch
from step_support import rand

pytest.importorskip("triton", reason="Triton is not installed")

from dsv4.gpu import build
from dsv4.gpu.shapes import MIX_WIDTH, mix_chunks
from dsv4.ops.exchange import decode as exchange
from dsv4.ops.exchange.decode import Peers, inbox_places
from dsv4.ops.mhc import cpu
from dsv4.ops.mhc import decode as mhc
from dsv4.parallel.comm import tree_sum
from dsv4.parallel.inbox import GONE

pytestmark = pytest.mark.gpu
N, M = 4, 24
STEPS = 20
# Ranks, rows, channels. All ranks' blocks must find room on the one GPU, so their launches do not overlap.
SIZES = [(2, 1, 4096), (2, 1, 7168), (2, 5, 100), (4, 3, 1024), (8, 2, 992), (8, 1, 2048)]
ALONE = {"overlap": False}


@pytest.fixture(autouse=True)
def loaded() -> None:
    """Loading a kernel waits for those that run, and they may wait for the one that is loaded."""
    build.load_all(torch.device("cuda"))


def world(size: int, rows: int, d: int, vocab: int, seconds: float = 20.0) -> list[Peers]:
    """All ranks' inboxes in this process."""
    places = inbox_places(rows, d, vocab)
    inboxes = [torch.zeros(size, places, dtype=torch.int64, device="cuda") for _ in range(size)]
    return [
        Peers(
            rank=rank,
            rows=rows,
            hidden=d,
            vocab=vocab,
            inbox=inboxes[rank],
            addresses=tuple(inbox[rank].data_ptr() for inbox in inboxes),
            ended=torch.zeros(1, dtype=torch.int32, pin_memory=True),
            seconds=seconds,
        )
        for rank in range(size)
    ]


def at_once(ranks: list[Peers], run: Callable[[Peers], None]) -> None:
    """Each on a stream of its own; the last rank first."""
    torch.cuda.synchronize()
    for peers in reversed(ranks):
        with torch.cuda.stream(torch.cuda.Stream()):
            run(peers)
    torch.cuda.synchronize()


class Rank:
    """What a rank's launches read and write, for every step of its own."""

    def __init__(self, peers: Peers, rows: int, dtype: torch.dtype) -> None:
        d, rank = peers.hidden, peers.rank
        self.ids = torch.arange(3, 3 + rows).mul(7).remainder(peers.size * peers.vocab).cuda()
        whole = rand(peers.size * peers.vocab, d, seed=99, dtype=torch.bfloat16)
        self.table = whole[rank * peers.vocab : (rank + 1) * peers.vocab].cuda()
        self.embedded = whole[self.ids.cpu()]
        self.y = [rand(rows, 3, d, seed=100 * rank + i).cuda() for i in range(STEPS)]
        self.gate, self.comb = rand(rows, N, seed=6).cuda(), rand(rows, N, N, seed=7).cuda() / 2
        self.fn = (rand(M, N * d, seed=1) * d**-0.5).cuda()
        self.streams = torch.full((rows, N, d), float("nan"), dtype=dtype, device="cuda")
        self.partial = torch.full((rows, mix_chunks(d), MIX_WIDTH), float("nan"), device="cuda")
        self.share = [rand(rows, peers.vocab, seed=1000 * rank + i).cuda() for i in range(STEPS)]
        self.logits = [
            torch.full((rows, peers.size * peers.vocab), float("nan")).cuda() for _ in range(STEPS)
        ]

    def run(self, peers: Peers) -> None:
        """An embedding, two sums, logits; and again."""
        into = {"streams": self.streams, "fn": self.fn, "partial": self.partial}
        for i in range(0, STEPS, 2):
            mhc.embed_open(ids=self.ids, table=self.table, **into, peers=peers, number=0, **ALONE)
            for number in (1, 2):
                which = {"peers": peers, "number": number, **ALONE}
                mhc.mix_open(y=self.y[i + number - 1], gate=self.gate, comb=self.comb, **into, **which)
            exchange.gather(peers, 3, share=self.share[i], logits=self.logits[i], **ALONE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("size", "rows", "d"), SIZES)
def test_sums(size: int, rows: int, d: int, dtype: torch.dtype) -> None:
    ranks = world(size, rows, d, vocab=33)
    held = [Rank(peers, rows, dtype) for peers in ranks]
    at_once(ranks, lambda peers: held[peers.rank].run(peers))
    first = held[0]
    want = first.embedded.to(dtype).unsqueeze(1).expand(-1, N, -1)
    for i in (STEPS - 2, STEPS - 1):
        parts = torch.stack([rank.y[i].cpu().sum(1) for rank in held], dim=1)
        want = cpu.post(tree_sum(parts).to(dtype), want, first.gate.cpu(), first.comb.cpu())
    bound = (2.0**-7 if dtype == torch.bfloat16 else 1e-5) * want.abs().max()
    assert float((first.streams.cpu().float() - want.float()).abs().max()) <= bound
    made = first.streams.cpu().double().flatten(1)
    sums = first.partial[..., : M + 1].cpu().double().sum(1)
    columns = [m + (m >= N) for m in range(M)]
    torch.testing.assert_close(sums[:, columns], made @ first.fn.cpu().double().t(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums[:, N], made.square().sum(1), rtol=1e-5, atol=1e-5)
    for rank in held[1:]:
        assert torch.equal(rank.streams, first.streams), "ranks differ"
        assert torch.equal(rank.partial.nan_to_num(7), first.partial.nan_to_num(7)), "ranks differ"
    for i in range(0, STEPS, 2):
        whole = torch.cat([rank.share[i] for rank in held], dim=1)
        assert all(torch.equal(rank.logits[i], whole) for rank in held), i
    for peers in ranks:
        assert not peers.inbox.any() and not int(peers.ended), "a place was not emptied"


@pytest.mark.parametrize("rows", [1, 5])
def test_ranks_with_whole_experts(rows: int) -> None:
    """What a rank's own experts gave is added up in order; where others' were chosen nothing is read."""
    size, d, choices, share = 2, 1024, 6, 4
    ranks = world(size, rows, d, vocab=33)
    chosen = (rand(rows, size * share, seed=3).argsort(1)[:, :choices]).sort(1).values.int()
    whole = [rand(rows, choices + 1, d, seed=20 + rank) for rank in range(size)]
    gate, comb, fn = torch.ones(rows, N).cuda(), torch.zeros(rows, N, N).cuda(), rand(M, N * d).cuda()
    made = [torch.zeros(rows, N, d, device="cuda") for _ in range(size)]
    partial, there = torch.zeros(size, rows, mix_chunks(d), MIX_WIDTH).cuda(), chosen.cuda()
    want, given = [], []
    for rank, y in enumerate(whole):
        own = chosen // share == rank
        total = torch.zeros(rows, d)
        for choice in range(choices):
            total = torch.where(own[:, choice : choice + 1], total + y[:, choice], total)
        want.append(total + y[:, choices])
        y[:, :choices][~own] = float("nan")
        given.append(y.cuda())

    def run(peers: Peers) -> None:
        mhc.mix_open(
            peers=peers,
            number=1,
            y=given[peers.rank],
            gate=gate,
            comb=comb,
            streams=made[peers.rank],
            fn=fn,
            partial=partial[peers.rank],
            chosen=there,
            own=range(peers.rank * share, (peers.rank + 1) * share),
            **ALONE,
        )

    at_once(ranks, run)
    both = (want[0] + want[1]).unsqueeze(1).expand(-1, N, -1)
    assert all(torch.equal(streams.cpu(), both) for streams in made)


def test_replayed(size: int = 4) -> None:
    """As graphs, at whatever pace each stream has: the bits of launches one by one."""
    rows, d = 2, 1024
    ranks = world(size, rows, d, vocab=65)
    want = [Rank(peers, rows, torch.bfloat16) for peers in ranks]
    at_once(ranks, lambda peers: want[peers.rank].run(peers))
    held = [Rank(peers, rows, torch.bfloat16) for peers in ranks]
    graphs = []
    for peers in ranks:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            held[peers.rank].run(peers)

    def replay(peers: Peers) -> None:
        for _ in range(20):
            graphs[peers.rank].replay()

    at_once(ranks, replay)
    for rank in held:
        assert torch.equal(rank.streams, want[0].streams)
        assert torch.equal(rank.logits[-2], want[0].logits[-2])


def alone(ranks: list[Peers]) -> Rank:
    """The first rank's step, which nobody answers."""
    held = Rank(ranks[0], 1, torch.bfloat16)
    with torch.cuda.stream(torch.cuda.Stream()):
        held.run(ranks[0])
    return held


def test_a_rank_that_never_comes() -> None:
    """The step ends soon after its time, with the rank's number and nothing that looks like a result."""
    ranks = world(2, 1, 1024, vocab=64, seconds=0.2)
    held = alone(ranks)
    torch.cuda.synchronize()
    assert int(ranks[0].ended) == 2
    assert bool(held.streams.isnan().all()) and bool(held.logits[-2][:, 64:].isnan().all())


def test_the_host_ends_the_wait() -> None:
    ranks = world(4, 1, 1024, vocab=64, seconds=3600.0)
    held = alone(ranks)
    ranks[0].ended.fill_(GONE)
    torch.cuda.synchronize()
    assert int(ranks[0].ended) == GONE and bool(held.streams.isnan().all())


def test_another_step_does_not_match() -> None:
    """Ranks whose steps have different numbers of rows never add what does not belong together."""
    ranks = world(2, 4, 512, vocab=64, seconds=0.2)
    held = [Rank(peers, rows, torch.bfloat16) for peers, rows in zip(ranks, (1, 2), strict=True)]
    at_once(ranks, lambda peers: held[peers.rank].run(peers))
    assert [int(peers.ended) for peers in ranks] == [2, 1]


def test_echo_is_one_rank_of_several() -> None:
    """What the bench times: a rank whose own memory answers."""
    from bench.echo import echo_peers
    from dsv4.config import preset

    config = preset("flash")
    for size in (2, 8):
        peers = echo_peers(config, size, 1, torch.device("cuda"))
        d = config.hidden_size
        streams = torch.zeros(1, N, d, dtype=torch.bfloat16, device="cuda")
        partial = torch.zeros(1, mix_chunks(d), MIX_WIDTH, device="cuda")
        y, fn = rand(1, 1, d).cuda(), rand(M, N * d).cuda()
        gate, comb = torch.ones(1, N, device="cuda"), torch.zeros(1, N, N, device="cuda")
        mhc.mix_open(y, gate, comb, streams, fn, partial, peers=peers, number=1)
        assert torch.equal(streams[0, 2].float(), (size * y[0, 0]).to(torch.bfloat16).float())
        assert not int(peers.ended)
