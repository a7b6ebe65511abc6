"""The pictures of speed over context and over batch, and of first tokens over the prompt's length."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv4.lab.plot import INK, PALE, blank, check, save, strip

_BLUE = "#1f5fa8"
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


def draw_first_tokens(
    path: Path, before: Mapping[int, float], after: Mapping[int, float], title: str, subtitle: str
) -> None:
    """Milliseconds to the first token by the prompt's length."""
    check(path)
    figure = blank(7.2, 4.2)
    axes = figure.add_subplot()
    for points, name, colour, above in ((before, "before", PALE, True), (after, "now", _BLUE, False)):
        x, y = sorted(points), [points[length] for length in sorted(points)]
        axes.plot(x, y, color=colour, marker="o", markersize=5, linewidth=1.8, clip_on=False, zorder=3)
        for length, ms in zip(x, y, strict=True):
            axes.annotate(
                *(f"{ms:,.0f}", (length, ms)),
                **{"xytext": (0, 8 if above else -14), "textcoords": "offset points", "ha": "center"},
                **{"color": colour, "fontsize": 8},
            )
        axes.annotate(
            *(name, (x[-1], y[-1])),
            **{"xytext": (10, 0), "textcoords": "offset points", "ha": "left", "va": "center"},
            **{"color": colour, "fontsize": 9.5},
        )
    every = sorted({*before, *after})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(every, [_short(length) for length in every])
    axes.set_yticks([10, 30, 100, 300, 1000, 3000], ["10", "30", "100", "300", "1,000", "3,000"])
    axes.set_ylim(14, 1.3 * max(*before.values(), *after.values()))
    strip(axes)
    axes.set_xlabel("tokens of the prompt", color=INK, fontsize=9.5, labelpad=8)
    axes.set_ylabel("milliseconds to the first token", color=INK, fontsize=9.5)
    figure.text(0.01, 1.07, title, color=INK, fontsize=12, weight="bold", va="bottom")
    figure.text(0.01, 1.02, subtitle, color=PALE, fontsize=8.5, va="bottom")
    save(figure, path)


def _panel(axes: Any, points: Points, name: str, label: str) -> None:
    if not points:
        axes.set_axis_off()
        return
    x, y = [point[name] for point in points], [point["tokens_per_second"] for point in points]
    axes.plot(x, y, color=_BLUE, marker="o", markersize=5, linewidth=1.8, clip_on=False, zorder=3)
    for point in points:
        axes.annotate(
            *(f"{point['share']:.0%}", (point[name], point["tokens_per_second"])),
            **{"xytext": (0, 9), "textcoords": "offset points", "ha": "center", "color": PALE},
            fontsize=8,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [_short(value) for value in x])
    axes.set_ylim(0, 1.15 * max(y))
    strip(axes)
    axes.set_xlabel(label, color=INK, fontsize=9.5, labelpad=8)


def _short(value: int) -> str:
    """4096 -> 4k, 1048576 -> 1M."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if value >= size and value % size == 0:
            return f"{value // size}{unit}"
    return f"{value:,}"
