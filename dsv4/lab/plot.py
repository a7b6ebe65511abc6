"""How pictures begin and end, and the one of recall against distance. matplotlib is an extra: dsv4[plot]."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv4.disk import result
from dsv4.errors import ConfigError

SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = ("#1f5fa8", "#c4572e", "#3d8a5f", "#7a5195")
INK, PALE = "#2b2b2b", "#8a8a8a"


def check(path: Path) -> None:
    """Before hours of work: whether the picture could be drawn at all."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path}: expected a picture whose name ends in {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"a picture needs matplotlib ({error}); pip install 'dsv4[plot]'") from None


def blank(width: float, height: float) -> Any:
    """An empty figure. Not pyplot's: that keeps figures and a backend for the whole process."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def strip(axes: Any) -> None:
    """Horizontal lines and a baseline, nothing else."""
    axes.minorticks_off()
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(PALE)
    axes.tick_params(length=0, pad=6, colors=INK, labelsize=9)


def save(figure: Any, path: Path) -> None:
    """Whole or not at all."""
    options: dict[str, Any] = {"format": path.suffix[1:].lower(), "bbox_inches": "tight", "pad_inches": 0.15}
    with result(path) as part:
        figure.savefig(part, **options)


def draw_recall(
    path: Path, series: Mapping[str, Sequence[Mapping[str, Any]]], window: int, subtitle: str
) -> None:
    """series: name -> bins of distance as `evaluate.figures` gives them; bars are 95 % intervals."""
    check(path)
    figure = blank(7.2, 4.2)
    axes = figure.add_subplot()
    for number, (name, bins) in enumerate(series.items()):
        x, y = [one["mean"] for one in bins], [100 * one["share"] for one in bins]
        below = [100 * (one["share"] - one["low"]) for one in bins]
        above = [100 * (one["high"] - one["share"]) for one in bins]
        colour = _COLOURS[number % len(_COLOURS)]
        line: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 5, "linewidth": 1.8}
        axes.errorbar(x, y, yerr=(below, above), elinewidth=1, capsize=3, clip_on=False, zorder=3, **line)
        if len(series) > 1:
            axes.annotate(name, (x[-1], y[-1]), color=colour, **_beside((10, 0), "left"))
        for one in bins if len(series) == 1 else ():
            axes.annotate(f"n = {one['total']}", (one["mean"], 100), color=PALE, **_beside((0, 8), "center"))
    every = [one for bins in series.values() for one in bins]
    # The power of two that leaves the first point some room on its left.
    left = 1 << max(1, int(min(one["mean"] for one in every) / 1.5)).bit_length() - 1
    high = max(one["to"] for one in every)
    axes.set_xscale("log", base=2)
    axes.set_xlim(left, high)
    ticks = [1 << n for n in range(40) if left <= 1 << n <= high]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_ylim(0, 100)
    axes.set_yticks(range(0, 101, 20), [f"{value} %" for value in range(0, 101, 20)])
    strip(axes)
    if left < window < high:
        axes.axvspan(left, window, color="#f3f3f3", zorder=0, linewidth=0)
        axes.text(left * 1.04, 3, "inside the\nsliding window", color=PALE, fontsize=8)
    label = "tokens from the line with the answer to the end of the prompt"
    axes.set_xlabel(label, color=INK, fontsize=9.5, labelpad=8)
    axes.set_ylabel("answers found", color=INK, fontsize=9.5)
    at_top: dict[str, Any] = {"transform": axes.transAxes, "va": "bottom"}
    axes.text(0, 1.18, "Recall against distance", color=INK, fontsize=12, weight="bold", **at_top)
    axes.text(0, 1.11, subtitle, color=PALE, fontsize=8.5, **at_top)
    save(figure, path)


def _beside(points: tuple[int, int], align: str) -> dict[str, Any]:
    """A small text that many points away from what it belongs to, also outside the axes."""
    return {
        **{"xytext": points, "textcoords": "offset points", "annotation_clip": False},
        **{"ha": align, "va": "center", "fontsize": 8},
    }
