"""The step of one rank of several, as `dsv4 bench ranks` times it, model after model in one process.

    python -m tests.bench.decode_ranks flash:1 flash:2 flash:2e pro:8 --layout nvfp4 --batch 1,8

flash:2 is one rank of two that share experts' width, flash:2e one that has half of the experts.
With --exchange: an all-reduce of Flash's and Pro's sizes, between ranks that are streams of one process. The
last line is JSON.
"""

import argparse
import gc
import json

import torch

from dsv4.gpu import build
from dsv4.gpu.shapes import MIX_WIDTH, mix_chunks
from dsv4.lab.bench.decode import Wanted
from dsv4.lab.bench.ranks import measure
from dsv4.lab.bench.subject import synthetic
from dsv4.ops.exchange.decode import Peers, inbox_places
from dsv4.ops.mhc import decode as mhc

CHAIN = 50  # exchanges of a graph


def step(
    name: str, ranks: int, whole_experts: bool, batch: int, arguments: argparse.Namespace
) -> dict[str, object]:
    subject = synthetic(
        name=name,
        experts=arguments.experts,
        layers=arguments.layers,
        layout=arguments.layout,
        ranks=ranks,
        whole_experts=whole_experts,
    )
    wanted = Wanted(arguments.context, batch, arguments.steps)
    line = measure(subject, wanted, torch.device("cuda"))
    print(json.dumps(line), flush=True)
    return line


def chained(size: int, d: int, rows: int) -> float:
    """Microseconds of one sum among `size` streams; size 1: the same without one."""
    n, m = 4, 24
    inboxes = [
        torch.zeros(size, inbox_places(rows, d, 8), dtype=torch.int64, device="cuda") for _ in range(size)
    ]
    graphs, kept = [], []
    for rank in range(size):
        streams = torch.zeros(rows, n, d, dtype=torch.bfloat16, device="cuda")
        partial = torch.zeros(rows, mix_chunks(d), MIX_WIDTH, device="cuda")
        y, fn = torch.randn(rows, 1, d, device="cuda"), torch.randn(m, n * d, device="cuda")
        gate, comb = torch.ones(rows, n, device="cuda"), torch.zeros(rows, n, n, device="cuda")
        peers = None
        if size > 1:
            peers = Peers(
                rank=rank,
                rows=rows,
                hidden=d,
                vocab=8,
                inbox=inboxes[rank],
                addresses=tuple(inbox[rank].data_ptr() for inbox in inboxes),
                ended=torch.zeros(1, dtype=torch.int32, pin_memory=True),
                seconds=5.0,
            )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(CHAIN):
                mhc.mix_open(
                    y=y,
                    gate=gate,
                    comb=comb,
                    streams=streams,
                    fn=fn,
                    partial=partial,
                    peers=peers,
                    number=number,
                    overlap=False,
                )
        graphs.append((graph, torch.cuda.Stream()))
        kept.append((streams, partial, y, fn, gate, comb, peers))
    times = []
    for _ in range(6):
        events = []
        torch.cuda.synchronize()
        for graph, stream in graphs:
            with torch.cuda.stream(stream):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                events.append((begin, end))
        torch.cuda.synchronize()
        # The last stream's: the others were already there.
        times.append(1e3 * events[-1][0].elapsed_time(events[-1][1]) / CHAIN)
    assert not any(peers is not None and int(peers.ended) for *_, peers in kept), "a push did not arrive"
    return round(sorted(times)[len(times) // 2], 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", help="flash:2, flash:2e and so on")
    parser.add_argument("--layout", default="nvfp4")
    parser.add_argument("--experts", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", default="1")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--exchange", action="store_true")
    arguments = parser.parse_args()
    build.load_all(torch.device("cuda"))
    lines: list[dict[str, object]] = []
    if arguments.exchange:
        # All ranks' blocks must find room on the one GPU, so their launches do not overlap either.
        for size in (1, 2, 4):
            for d in (4096, 7168)[: 1 if size == 4 else 2]:
                for rows in (1, 8) if size <= 2 else (1,):
                    us = chained(size, d, rows)
                    print(f"{size} ranks, {rows} x {d} float32: {us} us", flush=True)
                    lines.append({"ranks": size, "rows": rows, "channels": d, "us": us})
    for item in arguments.what:
        name, _, ranks = item.partition(":")
        for batch in map(int, arguments.batch.split(",")):
            lines.append(step(name, int(ranks.rstrip("e")), ranks.endswith("e"), batch, arguments))
            gc.collect()
            torch.cuda.empty_cache()
    print(json.dumps(lines))


if __name__ == "__main__":
    main()
