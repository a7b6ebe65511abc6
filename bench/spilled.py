"""Experts in host memory: what they cost, beside the same work with all of them in GPU memory.

    python -m bench.spilled decode flash --layout official --experts 256 --routing uniform --batch 1,8
    python -m bench.spilled prefill flash --layout official --experts 256 --tokens 8192

The time is explained by the same work with every expert resident and by PCIe at its best. One JSON line each.
"""

import itertools
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench import arguments
from dsv4.errors import ConfigError
from dsv4.lab.bench import decode, prefill
from dsv4.lab.bench.ceiling import gpu, measure_host_read, measure_matmul, measure_read
from dsv4.lab.bench.subject import Reads, Subject, check_kernels
from dsv4.ops.experts.placement import Placement

COPY_RATE = 55e9  # bytes per second of a copy engine over PCIe 5.0 x16, measured on an H200


@contextmanager
def all_resident(placement: Placement) -> Iterator[bool]:
    """Every spilled expert's place is borrowed from a resident one: wrong numbers, at the speed of GPU memory
    alone. False where none is resident."""
    slots, kept = placement.slots, placement.slot_of
    here = [slot for layer in kept for slot in layer if slots.is_resident(slot)]
    if not here:
        yield False
        return
    lent = itertools.cycle(here)
    placement.slot_of = [
        [slot if slots.is_resident(slot) else next(lent) for slot in layer] for layer in kept
    ]
    placement.publish()
    try:
        yield True
    finally:
        placement.slot_of = kept
        placement.publish()


def explain_step(
    timing: decode.Timing,
    resident_ms: float,
    reads: Reads,
    gpu_bytes: float,
    rates: tuple[float, float],
) -> dict[str, Any]:
    """`gpu_bytes`: what a step reads in all. `rates`: bytes per second that a kernel reads of GPU memory and
    of pinned host memory at best.

    Explained: the step with everything resident, and host memory at its best, less what a launch reads of GPU
    memory meanwhile, and no longer reads there.
    """
    gpu_rate, host_rate = rates
    pcie, beside = (
        sum(n * each for n, each in zip(counts, reads.per_expert, strict=True))
        for counts in (timing.spilled, timing.beside)
    )
    extra = timing.median - resident_ms
    explained = resident_ms + (pcie / host_rate - (pcie + beside) / gpu_rate) * 1e3
    return {
        "host_ceiling_gb_per_second": round(host_rate / 1e9, 1),
        "ms_all_resident": round(resident_ms, 4),
        "gpu_gb_per_second": round(gpu_bytes / resident_ms / 1e6, 1),
        "pcie_gb_per_second": round(pcie / extra / 1e6, 1) if extra > 0 else None,
        "explained_ms": round(explained, 4),
        "explained_share": round(explained / timing.median, 4),
    }


def explain_prompt(copied: int, seconds: float, resident: float) -> dict[str, Any]:
    """A prompt read in `seconds`, and in `resident` with every expert in GPU memory.
    It should take the longer of that and its copies."""
    return {
        "ms_all_resident": round(1e3 * resident, 2),
        "explained_ms": round(1e3 * max(resident, copied / COPY_RATE), 2),
        "share_of_all_resident": round(resident / seconds, 4),
    }


def measure_steps(subject: Subject, wanted: decode.Wanted, spill: str) -> dict[str, Any]:
    device, layout = gpu(), wanted.layout(subject.config)
    check_kernels(subject.config, device, layout.max_context)
    split = decode.divide(subject, wanted, spill, torch.cuda.mem_get_info(device)[0])
    if split is None:
        raise ConfigError("all experts fit in GPU memory; use --spill N, or more --experts")
    rates = measure_read(device), measure_host_read(device)
    bundle = subject.bundle(device, split=split)
    session = decode.Session(bundle, wanted, device)
    timing = session.time()
    placement = bundle.weights.placement
    assert placement is not None
    reads = Reads.of(bundle.weights.tensors, subject.config.num_layers)
    line = {"bench": "spilled decode", **subject.facts()}
    line |= decode.figures(timing, wanted, layout, reads, rates[0])
    line["spill"] = decode.spill_figures(timing, reads, split)
    with all_resident(placement) as is_so:
        if is_so:
            session.place()  # sequences begin anew
            resident = statistics.median(session.times(wanted.steps))
            line["spill"] |= explain_step(timing, resident, reads, line["read_bytes"], rates)
    return line


def measure_prompt(subject: Subject, wanted: prefill.Wanted, spill: str) -> dict[str, Any]:
    device = gpu()
    check_kernels(subject.config, device, wanted.layout(subject.config).max_context)
    split = subject.split(spill, wanted.other_bytes(subject.config), torch.cuda.mem_get_info(device)[0])
    if split is None:
        raise ConfigError("all experts fit in GPU memory; use --spill N, or more --experts")
    matmul = measure_matmul(device)
    bundle = subject.bundle(device, split=split)
    read, placement = prefill.reader(bundle, wanted, device), bundle.weights.placement
    assert placement is not None
    times = read()
    seconds, chunks = statistics.median(times), -(-wanted.tokens // wanted.chunk)
    line = {"bench": "spilled prefill", **subject.facts()}
    line |= prefill.figures(times, wanted, subject.config, matmul)
    line["spill"] = prefill.spill_figures(split, seconds, chunks)
    with all_resident(placement) as is_so:
        if is_so:
            line["spill"] |= explain_prompt(line["spill"]["pcie_bytes"], seconds, statistics.median(read()))
    return line


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("what", choices=("decode", "prefill"))
    parser.add_argument("name", help="flash or pro: random weights of these sizes")
    parser.add_argument("--spill", default="auto", help="auto (what does not fit) or N of every layer")
    parser.add_argument("--routing", default="uniform", help="uniform, zipf:S or a file of counts")
    parser.add_argument("--tokens", type=int, default=8192, help="length of the prompt")
    given = parser.parse_args()
    subject = arguments.subject_of(given, given.name, routing=given.routing)
    with torch.inference_mode():
        if given.what == "prefill":
            arguments.finish(measure_prompt(subject, prefill.Wanted(given.tokens), given.spill), given.save)
            return
        for batch in given.batch:
            wanted = decode.Wanted(given.context, batch, given.steps)
            arguments.finish(measure_steps(subject, wanted, given.spill), given.save)
            decode.release()


if __name__ == "__main__":
    arguments.run(main)
