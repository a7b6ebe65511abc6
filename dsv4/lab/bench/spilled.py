"""Experts in host memory: what they cost, beside the same work with all of them in GPU memory."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dsv4.engine.settings import GPU_CHUNK
from dsv4.engine.spill import Split
from dsv4.lab.bench.subject import Reads, Subject, check_fits, other_bytes
from dsv4.ops.experts.placement import Placement
from dsv4.step.buffers import graph_rows

COPY_RATE = 55e9  # bytes per second of a copy engine over PCIe 5.0 x16, measured on an H200

if TYPE_CHECKING:
    from dsv4.lab.bench.decode import Timing, Wanted


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


def divide(subject: Subject, wanted: "Wanted", spill: str, free: int) -> Split | None:
    """Experts between GPU and host memory as an engine divides them, which comes after the bare steps."""
    layout, rows = wanted.layout(subject.config), graph_rows(wanted.batch)
    split = subject.split(spill, other_bytes(layout, rows, GPU_CHUNK), free)
    if split is None:
        check_fits(subject, other_bytes(layout, (wanted.rows,)), free)
        return None
    return subject.split(spill, other_bytes(layout, rows, GPU_CHUNK, spills=True), free)


def spill_figures(
    timing: "Timing", reads: Reads, split: Split, gpu_bytes: float, rates: tuple[float, float]
) -> dict[str, Any]:
    """What lies in host memory and what reading it costs. `gpu_bytes`: that a step reads in all; `rates`:
    bytes per second that a kernel reads of GPU and of pinned host memory at best.

    Explained: what the step takes with everything resident, and host memory at its best, less what a launch
    reads of GPU memory meanwhile, and no longer reads there.
    """
    gpu_rate, host_rate = rates
    pcie, beside = (
        sum(n * each for n, each in zip(counts, reads.per_expert, strict=True))
        for counts in (timing.spilled, timing.beside)
    )
    out: dict[str, Any] = {
        **{"spilled_experts": split.num_spilled, "host_bytes": split.host_bytes},
        **{"resident_share": round(split.share, 4), "hit_rate": round(timing.hit_rate, 5)},
        "pcie_bytes_per_step": round(pcie),
        "host_ceiling_gb_per_second": round(host_rate / 1e9, 1),
    }
    if timing.resident_ms is not None:
        extra = timing.median - timing.resident_ms
        explained = timing.resident_ms + (pcie / host_rate - (pcie + beside) / gpu_rate) * 1e3
        out |= {
            "ms_all_resident": round(timing.resident_ms, 4),
            "gpu_gb_per_second": round(gpu_bytes / timing.resident_ms / 1e6, 1),
            "pcie_gb_per_second": round(pcie / extra / 1e6, 1) if extra > 0 else None,
            "explained_ms": round(explained, 4),
            "explained_share": round(explained / timing.median, 4),
        }
    return out


def prompt_figures(split: Split, seconds: float, resident: float | None, chunks: int) -> dict[str, Any]:
    """Of a prompt that was read in `seconds`, and in `resident` with every expert in GPU memory. Each of its
    chunks copies all spilled experts, while it computes: the longer of both is what it should take."""
    copied = chunks * split.num_spilled * split.form.num_bytes
    out: dict[str, Any] = {
        **{"spilled_experts": split.num_spilled, "host_bytes": split.host_bytes},
        **{"resident_share": round(split.share, 4), "staged_slots": split.num_staged},
        **{"pcie_bytes": copied, "pcie_gb_per_second": round(copied / seconds / 1e9, 1)},
    }
    if resident is not None:
        out |= {
            "ms_all_resident": round(1e3 * resident, 2),
            "explained_ms": round(1e3 * max(resident, copied / COPY_RATE), 2),
            "share_of_all_resident": round(resident / seconds, 4),
        }
    return out
