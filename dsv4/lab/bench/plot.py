"""The picture of speed over context and over batch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv4.lab.plot import INK, PALE, blank, check, save, strip

BLUE = "#1f5fa8"
Points = Sequence[Mapping[str, Any]]


def draw_speed(path: Path, over_context: Points, over_batch: Points, title: str, subtitle: str) -> None:
    """Points hold context or batch, tokens_per_second, and share (of the read ceiling), written above."""
    check(path)
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
