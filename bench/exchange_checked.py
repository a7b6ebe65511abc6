"""The exchange of two ranks, small and without Triton, to be run under compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m bench.exchange_checked

Without torch's cache every tensor is an allocation of its own, so a byte too far is found. A tool may run one
kernel at a time, and ranks wait for each other. So there are three parts. *One by one*: the host plays the
rank that has not come yet, by putting its packets into the inbox; every push, take and sum runs, and every
packet is compared. *Nobody*: a rank that waits in vain, which is the polling loop up to its end. *At once*:
both ranks on streams of their own; if the tool lets only one run, that is said and is no error.
"""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.gpu.shapes import MIX_WIDTH, mix_chunks
from dsv4.ops.exchange import decode as exchange
from dsv4.ops.exchange.decode import Peers, inbox_places
from dsv4.ops.mhc import cpu
from dsv4.ops.mhc import decode as mhc

RANKS, N, MIXES, PARTS, VOCAB = 2, 4, 24, 7, 1024
CHANNELS, ROWS = (4096, 7168), (1, 8)
EMBED, SUMS, LOGITS = 0, (1, 2), 3  # exchanges of a step


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Rank:
    """What a rank's launches read and write. All but the kernels happens on the host."""

    peers: Peers
    y: dict[int, Tensor]  # by exchange: [T, PARTS, D]
    table: Tensor
    ids: Tensor
    logits_share: Tensor
    fn: Tensor
    gate: Tensor
    comb: Tensor
    streams: Tensor
    partial: Tensor
    logits: Tensor

    @classmethod
    def make(cls, peers: Peers, rows: int) -> "Rank":
        d, rank = peers.hidden, peers.rank
        return cls(
            peers=peers,
            y={number: rand(rows, PARTS, d, seed=10 * rank + number).cuda() for number in SUMS},
            table=rand(VOCAB, d, seed=90 + rank).to(torch.bfloat16).cuda(),
            ids=torch.arange(rows).mul(911).add(5).remainder(RANKS * VOCAB).cuda(),
            logits_share=rand(rows, VOCAB, seed=80 + rank).cuda(),
            fn=(rand(MIXES, N * d, seed=1) * d**-0.5).cuda(),
            gate=rand(rows, N, seed=2).cuda(),
            comb=(rand(rows, N, N, seed=3) / 2).cuda(),
            streams=torch.full((rows, N, d), float("nan"), dtype=torch.bfloat16).cuda(),
            partial=torch.full((rows, mix_chunks(d), MIX_WIDTH), float("nan")).cuda(),
            logits=torch.full((rows, RANKS * VOCAB), float("nan")).cuda(),
        )

    def launch(self, number: int) -> None:
        into = {"streams": self.streams, "fn": self.fn, "partial": self.partial}
        which = {"peers": self.peers, "number": number, "overlap": False}
        if number == EMBED:
            mhc.embed_open(ids=self.ids, table=self.table, **into, **which)
        elif number == LOGITS:
            exchange.gather(share=self.logits_share, logits=self.logits, **which)
        else:
            mhc.mix_open(y=self.y[number], gate=self.gate, comb=self.comb, **into, **which)

    def share(self, number: int) -> Tensor:
        """float32 [T, count]: what this rank pushes in that exchange."""
        if number == LOGITS:
            return self.logits_share.cpu()
        if number == EMBED:
            at = self.ids.cpu() - self.peers.rank * VOCAB
            found = self.table.cpu()[at.clamp(0, VOCAB - 1)].float()
            return torch.where(((at >= 0) & (at < VOCAB)).unsqueeze(1), found, torch.zeros(()))
        total = torch.zeros(self.streams.shape[0], self.peers.hidden)
        for part in self.y[number].cpu().unbind(1):
            total = total + part
        return total

    def packets(self, number: int) -> Tensor:
        """int64 [T * count]: number and tag."""
        rows = self.streams.shape[0]
        bits = self.share(number).flatten().view(torch.int32).long() & 0xFFFFFFFF
        return bits | exchange.tag(number, rows) << 32

    def place(self, sender: int, number: int) -> Tensor:
        """Of this rank's inbox, where that rank's packets of the exchange go."""
        count = self.share(number).numel()
        first = self.peers.logits_place if number == LOGITS else self.peers.first_place(number)
        return self.peers.inbox[sender, first : first + count]


def world(d: int, rows: int, seconds: float) -> list[Rank]:
    inboxes = [
        torch.zeros(RANKS, inbox_places(rows, d, VOCAB), dtype=torch.int64).cuda() for _ in range(RANKS)
    ]
    ranks = [
        Peers(
            rank=rank,
            rows=rows,
            hidden=d,
            vocab=VOCAB,
            inbox=inboxes[rank],
            addresses=tuple(inbox[rank].data_ptr() for inbox in inboxes),
            ended=torch.zeros(1, dtype=torch.int32, pin_memory=True),
            seconds=seconds,
        )
        for rank in range(RANKS)
    ]
    return [Rank.make(peers, rows) for peers in ranks]


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"exchange: {what}")


def is_empty(rank: Rank) -> bool:
    return not bool(rank.peers.inbox.cpu().any())


def check_results(ranks: list[Rank], what: str) -> None:
    """Equal on both, and what the reference makes of the sums."""
    first, second = ranks
    for name in ("streams", "partial", "logits"):
        a, b = (getattr(rank, name).cpu() for rank in ranks)
        expect(torch.equal(a.nan_to_num(7), b.nan_to_num(7)), f"{what}: the ranks' {name} differ")
    want = (first.share(EMBED) + second.share(EMBED)).to(torch.bfloat16).unsqueeze(1).expand(-1, N, -1)
    for number in SUMS:
        y = first.share(number) + second.share(number)
        want = cpu.post(y.to(torch.bfloat16), want, first.gate.cpu(), first.comb.cpu())
    error = float((first.streams.cpu().float() - want.float()).abs().max())
    expect(error <= 2.0**-7 * float(want.abs().max()), f"{what}: streams are off by {error:.2e}")
    whole = torch.cat([rank.logits_share.cpu() for rank in ranks], dim=1)
    expect(torch.equal(first.logits.cpu(), whole), f"{what}: logits differ")


def one_by_one(d: int, rows: int) -> None:
    """Rank 1 finds what the host put there for rank 0; rank 0 finds what rank 1 pushed."""
    ranks = first, second = world(d, rows, seconds=20.0)
    for number in (EMBED, *SUMS, LOGITS):
        what = f"{rows} x {d}, exchange {number}"
        second.place(0, number).copy_(first.packets(number))
        torch.cuda.synchronize()
        second.launch(number)
        torch.cuda.synchronize()
        expect(is_empty(second), f"{what}: rank 1 left a packet")
        found = first.place(1, number).cpu()
        expect(torch.equal(found, second.packets(number)), f"{what}: rank 1 pushed something else")
        first.launch(number)
        torch.cuda.synchronize()
        expect(is_empty(first), f"{what}: rank 0 left a packet")
        found = second.place(0, number).cpu()
        expect(torch.equal(found, first.packets(number)), f"{what}: rank 0 pushed something else")
        second.place(0, number).copy_(torch.zeros_like(found))
        expect(is_empty(second), f"{what}: rank 0 pushed beyond its places")
    check_results(ranks, f"{rows} x {d} one by one")
    expect(not any(int(rank.peers.ended) for rank in ranks), "a rank waited for what was there")


def nobody(d: int, rows: int) -> None:
    rank, _gone = world(d, rows, seconds=0.02)  # whose inbox is written to all the same
    for number in (EMBED, *SUMS, LOGITS):
        rank.launch(number)
    torch.cuda.synchronize()
    expect(int(rank.peers.ended) == 2, f"{rows} x {d}: rank 1 was not missed")
    expect(bool(rank.streams.cpu().isnan().all()), f"{rows} x {d}: a result of one rank alone")


def at_once(d: int, rows: int, seconds: float) -> bool:
    """Whether both could run."""
    ranks = world(d, rows, seconds)
    torch.cuda.synchronize()
    for rank in reversed(ranks):
        with torch.cuda.stream(torch.cuda.Stream()):
            for number in (EMBED, *SUMS, LOGITS) * 3:
                rank.launch(number)
    torch.cuda.synchronize()
    if any(int(rank.peers.ended) for rank in ranks):
        return False
    expect(all(map(is_empty, ranks)), f"{rows} x {d} at once: a packet was left")
    check_results(ranks, f"{rows} x {d} at once")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="that ranks at once wait for each other")
    arguments = parser.parse_args()
    sizes = [(d, rows) for d in CHANNELS for rows in ROWS]
    for d, rows in sizes:
        one_by_one(d, rows)
    print(f"exchange: one by one, {len(sizes)} sizes, 4 exchanges each: every packet as expected", flush=True)
    for d, rows in sizes:
        nobody(d, rows)
    print("exchange: nobody answered, and that was said", flush=True)
    for d, rows in sizes:
        found = at_once(d, rows, arguments.seconds)
        said = "12 exchanges, the same bits on both ranks" if found else "only one rank could run"
        print(f"exchange: at once, {rows} x {d}: {said}", flush=True)


if __name__ == "__main__":
    main()
