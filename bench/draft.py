"""Times DSpark's draft: the context of a step's rows, and a block of every sequence.

    python -m bench.draft flash --experts 192 --sequences 1 2 4 8 --profile

Prints milliseconds (median): of committing R * (1 + B) rows, of drafting R blocks, of both in one graph; and
the distinct experts of a stage. Weights, taps and entries are random.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dsv4.cache.store import Cache
from dsv4.gpu.pdl import Launch
from dsv4.gpu.tiles import rough_copy
from dsv4.lab.bench.ceiling import gpu, timed
from dsv4.lab.bench.decode import Wanted, fill, release
from dsv4.lab.bench.profile import Span, summarise
from dsv4.lab.bench.subject import DTYPE, synthetic
from dsv4.lab.doctor.step import place_drafts
from dsv4.model.bundle import Bundle
from dsv4.model.model import Model
from dsv4.step.buffers import Buffers
from dsv4.step.draft import Draft

PROFILED = 16


def replayed(launches: Sequence[Launch]) -> Callable[[], Any]:
    """As one CUDA graph; each launch has run once before."""
    for launch in launches:
        launch.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch.run()
    return graph.replay


def median(run: Callable[[], Any], rounds: int) -> float:
    times = sorted(timed(run, rounds, warm=8))
    return times[len(times) // 2]


def experts(draft: Draft) -> float:
    """Distinct ones of a stage, on average."""
    found = []
    for launch in draft.launches:
        launch.run()
        if launch.name == "route":
            found.append(len(draft.buffers.chosen.unique()))
    return sum(found) / len(found)


def profile(draft: Draft, run: Callable[[], Any]) -> dict[str, tuple[float, float]]:
    """Count launches by name, and their microseconds with gaps."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            run()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    events = [event for event in seen.events() if event.device_type == cuda]
    spans = [Span(event.name, event.time_range.start, event.time_range.end) for event in events]
    names = [launch.name for launch in draft.launches]
    kinds = [launch.layer or "ends" for launch in draft.launches]
    found = summarise(sorted(spans, key=lambda span: span.start), names, kinds, PROFILED)
    return {name: (share.count, share.busy_us + share.gap_us) for name, share in found.launches.items()}


def measure(bundle: Bundle, sequences: int, args: argparse.Namespace) -> None:
    device = bundle.plain("norm").device
    layout = Wanted(args.context, sequences).layout(bundle.config)
    cache = Cache(layout, device, DTYPE)
    fill(cache)
    model = Model(bundle, layout.max_context, device, copies_ahead=False)
    assert bundle.config.dspark is not None
    block = bundle.config.dspark.block_size
    rows, activations = sequences * (1 + block), bundle.numerics.activations
    step = Buffers(bundle.config, rows, layout.max_context, DTYPE, device, activations, taps=True)
    head = rough_copy(bundle.tiled("head")) if args.head == "nvfp4" else None
    draft = Draft(bundle, model, cache, sequences, step, head=head, drafts=args.drafts)
    place_drafts(draft, args.context)
    run = replayed(draft.launches)
    times = [median(replayed(part), args.rounds) for part in (draft.commit, draft.block)]
    times.append(median(run, args.rounds))
    base = draft.buffers.logits
    assert bool(base.isfinite().all()), "logits that are no numbers: the time means nothing"
    figures = " ".join(f"{time:8.3f}" for time in times)
    print(f"{sequences:9} {len(draft.launches):8} {figures} {experts(draft):8.1f}", flush=True)
    if args.profile:
        for name, (count, us) in profile(draft, run).items():
            print(f"    {name:20} {count:4.0f} {us:8.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", choices=("flash", "pro", "tiny"))
    parser.add_argument("--experts", type=int)
    parser.add_argument("--layout", default="nvfp4")
    parser.add_argument("--activations", choices=("a16", "a8", "a4"), default="a16")
    parser.add_argument("--head", choices=("bf16", "nvfp4"), default="nvfp4", help="of drafts alone")
    parser.add_argument("--drafts", type=int, help="slots that are chosen (default: all)")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="microseconds of each launch")
    args = parser.parse_args()
    # The trunk is not run: three of its layers are enough.
    subject = synthetic(args.name, args.experts, 3, args.layout, drafts=True)
    subject, device = replace(subject, activations=args.activations), gpu()
    print(
        f"{'sequences':>9} {'launches':>8} {'commit':>8} {'block':>8} {'both':>8} {'experts':>8}", flush=True
    )
    with torch.inference_mode():
        bundle = subject.bundle(device)
        for sequences in args.sequences:
            release()
            measure(bundle, sequences, args)


if __name__ == "__main__":
    main()
