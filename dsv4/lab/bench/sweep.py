"""Decoding over contexts and over batches with one set of weights: the figures of a speed plot."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from dsv4.errors import ConfigError
from dsv4.lab.bench.decode import Session, Wanted, figures, release
from dsv4.lab.bench.subject import Reads, check_kernels, other_bytes
from dsv4.model.bundle import Bundle
from dsv4.step.buffers import ROWS

CONTEXTS = (4096, 16384, 65536, 131072, 262144, 1048576)
STEPS = 64
KEPT = ("context", "batch", "tokens_per_second", "ms_per_token", "share")


def points(wanted: Wanted, max_positions: int) -> list[Wanted]:
    """Contexts at the wanted batch, then batches at the wanted context; each once."""
    few = replace(wanted, steps=min(STEPS, wanted.steps), max_context=None)
    of_context = [replace(few, context=context) for context in CONTEXTS if context <= max_positions]
    return [*dict.fromkeys(of_context + [replace(few, batch=batch) for batch in ROWS])]


def sweep(bundle: Bundle, wanted: Wanted, ceiling: float, device: torch.device) -> Iterator[dict[str, Any]]:
    """One line per point, with `left_out` and the reason where it does not fit, or no kernel takes it."""
    c = bundle.config
    reads = Reads.of(bundle.weights.tensors, c.num_layers)
    for point in points(wanted, c.max_positions):
        release()
        yield _line(bundle, point, reads, ceiling, device)


def _line(
    bundle: Bundle, point: Wanted, reads: Reads, ceiling: float, device: torch.device
) -> dict[str, Any]:
    line: dict[str, Any] = {"context": point.context, "batch": point.batch}
    try:
        layout = point.layout(bundle.config)
        check_kernels(bundle.config, device, layout.max_context, bundle.mesh.size)
    except ConfigError as error:
        return {**line, "left_out": str(error)}
    need, (free, _) = other_bytes(layout, (point.rows,)), torch.cuda.mem_get_info(device)
    if need > free:
        return {**line, "left_out": f"takes {need / 1e9:.1f} GB of {free / 1e9:.1f} GB free"}
    timing = Session(bundle, point, device).time()
    found = figures(timing, point, layout, reads, ceiling)
    return {name: found[name] for name in KEPT}


def series(lines: list[dict[str, Any]], wanted: Wanted) -> dict[str, list[dict[str, Any]]]:
    """The points measured, as the two curves they belong to."""
    measured = [line for line in lines if "left_out" not in line]
    return {
        "over_context": [x for x in measured if x["batch"] == wanted.batch and x["context"] in CONTEXTS],
        "over_batch": [x for x in measured if x["context"] == wanted.context],
        "left_out": [line for line in lines if "left_out" in line],
    }
