"""The decode step of one rank of several, its own memory in its peers' place; and what several would reach.

    python -m bench.ranks flash:1 flash:2 flash:2e pro:8 --layout nvfp4 --batch 1,8

flash:2 is one rank of two that share experts' width, flash:2e one that has half of the experts; flash:1 the
whole model. After each the same step without its all-reduces. With --exchange: an all-reduce of Flash's and
Pro's sizes, between ranks that are streams of one process. One JSON line each.
"""

import argparse
from typing import Any

import torch

from bench import arguments
from bench.echo import Echo, echo_peers
from bench.links import LINKS
from dsv4.cli.bench_show import show_rows, title_of
from dsv4.cli.show import size
from dsv4.gpu import build
from dsv4.gpu.shapes import MIX_WIDTH, mix_chunks
from dsv4.lab.bench.ceiling import gpu
from dsv4.lab.bench.decode import Session, Timing, Wanted, release
from dsv4.lab.bench.subject import Subject, check_fits, check_kernels, other_bytes
from dsv4.lab.records import ALL_REDUCE_US, num_all_reduces
from dsv4.model.bundle import Bundle
from dsv4.ops.exchange.decode import Peers, inbox_places
from dsv4.ops.mhc import decode as mhc
from dsv4.parallel.mesh import Mesh

CHAIN = 50  # exchanges of a graph

# Every all-reduce is added whole: to the step with this rank's part in them, and to the step without.
ADDED = (
    "the measured step, which has this rank's pushes and its waits answered by its own memory, and beside it "
    "the whole latency of every all-reduce: what both have is counted twice; ranks that come late are not "
    "counted"
)
ADDED_ONCE = (
    "the step measured without this rank's all-reduces, its share in each sum's place and no gather of the "
    "logits, and beside it the whole latency of every all-reduce: each is counted once; ranks that come late "
    "are not counted"
)


def predicted(subject: Subject, wanted: Wanted, ms: float, each_us: float) -> float:
    """Tokens/s of all GPUs together, if each all-reduce takes so long beside a step of `ms`."""
    return 1e3 * wanted.batch / (ms + num_all_reduces(subject.config, subject.ranks) * each_us / 1e3)


def measure(subject: Subject, wanted: Wanted, device: torch.device) -> dict[str, Any]:
    with torch.inference_mode():
        bundle = subject.bundle(device, mesh=mesh_of(subject))
        timing = _time(bundle, wanted, device)
        rest = _time(bundle, wanted, device, sums=False) if subject.ranks > 1 else timing
    return {
        **{"bench": "ranks", **subject.facts(), "ranks": subject.ranks, "weight_bytes": subject.weight_bytes},
        "whole_experts": subject.whole_experts,
        **{"context": wanted.context, "batch": wanted.batch, "steps": wanted.steps},
        **{"ms_per_token": round(timing.median, 4), "ms_per_token_p99": round(timing.p99, 4)},
        "kernels_per_step": timing.kernels,
        **predictions(subject, wanted, timing.median, rest.median),
    }


def mesh_of(subject: Subject) -> Mesh:
    """Of the first rank."""
    return Mesh(0, subject.ranks, Echo(subject.ranks), subject.whole_experts) if subject.ranks > 1 else Mesh()


def _time(bundle: Bundle, wanted: Wanted, device: torch.device, sums: bool = True) -> Timing:
    has_peers = sums and bundle.mesh.size > 1
    peers = echo_peers(bundle.config, bundle.mesh.size, wanted.rows, device) if has_peers else None
    timing = Session(bundle, wanted, device, peers).time()
    release()
    return timing


def predictions(subject: Subject, wanted: Wanted, ms: float, ms_without: float) -> dict[str, Any]:
    """What several GPUs would reach, by an all-reduce as assumed and as published; and what is in it.
    `ms_without`: of the step without its all-reduces."""
    vector = 4 * subject.config.hidden_size * wanted.batch
    published = LINKS["H200"].all_reduce_us(subject.ranks, vector)
    count = num_all_reduces(subject.config, subject.ranks)
    return {
        **{"all_reduces": count, "all_reduce_us": ALL_REDUCE_US},
        "ms_added": round(count * ALL_REDUCE_US / 1e3, 4),
        "predicted_tokens_per_second": round(predicted(subject, wanted, ms, ALL_REDUCE_US), 1),
        "ms_without_all_reduces": round(ms_without, 4),
        "predicted_counted_once": round(predicted(subject, wanted, ms_without, ALL_REDUCE_US), 1),
        **{"published_all_reduce_us": round(published, 2), "published_source": LINKS["H200"].source},
        "ms_added_at_published": round(count * published / 1e3, 4),
        "predicted_at_published": round(predicted(subject, wanted, ms, published), 1),
        **{"predicted_is": ADDED, "predicted_counted_once_is": ADDED_ONCE},
    }


def predicted_rows(line: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What several GPUs would reach."""
    rows = []
    at_published = "ms_added_at_published"
    without = f"the step without them, {line['ms_without_all_reduces']:.3f} ms,"
    for rate, step, each, added, why in (
        ("predicted_tokens_per_second", "the step", "all_reduce_us", "ms_added", "assumed"),
        ("predicted_counted_once", without, "all_reduce_us", "ms_added", "assumed"),
        ("predicted_at_published", "the step", "published_all_reduce_us", at_published, "published"),
    ):
        waits = f"{line['all_reduces']} all-reduces of {line[each]:.1f} us, {why}"
        what = f"{line['ranks']} GPUs: {step} + {line[added]:.3f} ms for {waits}"
        rows.append(("predicted", f"{line[rate]:,.1f} tokens/s", what))
    step = "the step has its own pushes and waits already, so what both have is counted twice; without, once"
    return [*rows, ("", "", f"{step}; ranks that come late are not counted")]


def show(line: dict[str, Any]) -> None:
    show_rows(
        f"one rank of {line['ranks']}: {title_of(line)}, context {line['context']:,}, batch {line['batch']}",
        [
            ("weights", size(line["weight_bytes"]), "of this rank"),
            ("per token", f"{line['ms_per_token']:.3f} ms", f"median of {line['steps']}, measured"),
            *(predicted_rows(line) if line["ranks"] > 1 else ()),
        ],
    )


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


def step(given: argparse.Namespace, what: str, batch: int) -> None:
    """`what`: flash:2, or flash:2e."""
    name, _, ranks = what.partition(":")
    options = {"ranks": int(ranks.rstrip("e") or 1), "whole_experts": ranks.endswith("e")}
    subject, wanted = arguments.subject_of(given, name, **options), Wanted(given.context, batch, given.steps)
    layout = wanted.layout(subject.config)
    device = gpu()
    check_kernels(subject.config, device, layout.max_context, subject.ranks)
    check_fits(subject, other_bytes(layout, (wanted.rows,)), torch.cuda.mem_get_info(device)[0])
    line = measure(subject, wanted, device)
    show(line)
    arguments.finish(line, given.save)
    release()


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("what", nargs="*", help="flash:2, flash:2e and so on")
    parser.add_argument("--exchange", action="store_true")
    given = parser.parse_args()
    for what in given.what:
        for batch in given.batch:
            step(given, what, batch)
    if given.exchange:
        build.load_all(gpu())
        # All ranks' blocks must find room on the one GPU, so their launches do not overlap either.
        for ranks in (1, 2, 4):
            for d in (4096, 7168)[: 1 if ranks == 4 else 2]:
                for rows in (1, 8) if ranks <= 2 else (1,):
                    line = {"bench": "exchange", "ranks": ranks, "rows": rows, "channels": d}
                    arguments.finish({**line, "us": chained(ranks, d, rows)})


if __name__ == "__main__":
    arguments.run(main)
