"""Decoding over contexts and over batches with one set of weights, and the picture of it.

    python -m bench.sweep flash --experts 192 --layout nvfp4 --plot speed.png > line
    python -m bench.sweep --draw line speed.png      # on another machine

The last line is JSON.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench import arguments
from dsv4.cli.bench_show import title_of
from dsv4.errors import ConfigError
from dsv4.lab.bench.ceiling import gpu, measure_read
from dsv4.lab.bench.decode import Session, Wanted, figures, release
from dsv4.lab.bench.subject import Reads, check_fits, check_kernels, other_bytes
from dsv4.lab.draw import INK, PALE, blank, check, save, strip
from dsv4.model.bundle import Bundle
from dsv4.step.buffers import ROWS

CONTEXTS = (4096, 16384, 65536, 131072, 262144, 1048576)
STEPS = 64
DRAWN = {"over_context", "over_batch", "device_name", "date", "model", "layout", "is_synthetic"}
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


BLUE = "#1f5fa8"
Points = Sequence[Mapping[str, Any]]


def draw_speed(path: Path, over_context: Points, over_batch: Points, title: str, subtitle: str) -> None:
    """Points hold context or batch, tokens_per_second, and share (of the read ceiling), written above."""
    figure = blank(10.0, 4.2)
    left, right = figure.subplots(1, 2)
    _panel(left, over_context, "context", "tokens of context")
    _panel(right, over_batch, "batch", "sequences together")
    left.set_ylabel("tokens per second, all sequences together", color=INK, fontsize=9.5)
    # Texts of the figure, not of the axes, whose width they would take.
    figure.text(0.01, 1.07, title, color=INK, fontsize=12, weight="bold", va="bottom")
    figure.text(0.01, 1.02, subtitle, color=PALE, fontsize=8.5, va="bottom")
    save(figure, path)


def _panel(axes: Any, points: Points, name: str, label: str) -> None:
    if not points:
        axes.set_axis_off()
        return
    x, y = [point[name] for point in points], [point["tokens_per_second"] for point in points]
    axes.plot(x, y, color=BLUE, marker="o", markersize=5, linewidth=1.8, clip_on=False, zorder=3)
    for point in points:
        axes.annotate(
            *(f"{point['share']:.0%}", (point[name], point["tokens_per_second"])),
            **{"xytext": (0, 9), "textcoords": "offset points", "ha": "center", "color": PALE},
            fontsize=8,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [short(value) for value in x])
    axes.set_ylim(0, 1.15 * max(y))
    strip(axes)
    axes.set_xlabel(label, color=INK, fontsize=9.5, labelpad=8)


def short(value: int) -> str:
    """4096 -> 4k, 1048576 -> 1M."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if value >= size and value % size == 0:
            return f"{value // size}{unit}"
    return f"{value:,}"


def read_line(path: Path) -> dict[str, Any]:
    """The last line of a file that a sweep printed."""
    try:
        line = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{path}: its last line is no record ({error}); give a sweep's output") from None
    if not isinstance(line, dict) or not line.keys() >= DRAWN:
        raise ConfigError(f"{path}: its last line holds no sweep; run python -m bench.sweep")
    return line


def draw_line(line: Mapping[str, Any], path: Path) -> None:
    when = f"{line['device_name']}, {line['date'][:10]}; written above: share of the read ceiling"
    title = f"Decoding {title_of(dict(line))}"
    draw_speed(path, line["over_context"], line["over_batch"], title, when)


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("name", nargs="?", default="flash", help="flash, pro or tiny: random weights")
    parser.add_argument("--plot", type=Path, help="draw the result")
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("LINE", "PICTURE"))
    given = parser.parse_args()
    if given.draw is not None:
        return draw_line(read_line(given.draw[0]), given.draw[1])
    if given.plot is not None:
        check(given.plot)
    subject = arguments.subject_of(given, given.name)
    wanted, device = Wanted(given.context, given.batch[0], given.steps), gpu()
    layout = wanted.layout(subject.config)
    check_kernels(subject.config, device, layout.max_context)
    check_fits(subject, other_bytes(layout, (wanted.rows,)), torch.cuda.mem_get_info(device)[0])
    with torch.inference_mode():
        ceiling = measure_read(device)
        bundle = subject.bundle(device)
        lines = []
        for line in sweep(bundle, wanted, ceiling, device):
            print(json.dumps(line), flush=True)
            lines.append(line)
    made = arguments.finish({"bench": "sweep", **subject.facts(), **series(lines, wanted)}, given.save)
    if given.plot is not None:
        draw_line(made, given.plot)


if __name__ == "__main__":
    arguments.run(main)
