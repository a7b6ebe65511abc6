"""Draws pictures of recall and comparisons (matplotlib, the extra dsv4[plot]), and plots of a page (SVG)."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4.disk import result
from dsv4.errors import ConfigError
from dsv4.lab.files import check_writable, size

if TYPE_CHECKING:
    from dsv4.lab.compare import Comparison

SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = ("#1f5fa8", "#c4572e", "#3d8a5f", "#7a5195")
INK, PALE = "#2b2b2b", "#8a8a8a"
_DOTS: dict[str, Any] = {"marker": "o", "markersize": 3}
_LEAST = 1e-9


def check(path: Path, option: str = "--plot") -> None:
    """Refuse before hours of work: another kind of picture, a folder that takes none, no matplotlib."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{option} {path}: expected a name that ends in {', '.join(SUFFIXES)}")
    check_writable(path, option)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{option} needs matplotlib ({error}); pip install 'dsv4[plot]'") from None


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
    figure = blank(7.2, 4.2)
    axes = figure.add_subplot()
    for number, (name, bins) in enumerate(series.items()):
        x, y = [one["mean"] for one in bins], [100 * one["share"] for one in bins]
        bars = [[100 * abs(one["share"] - one[end]) for one in bins] for end in ("low", "high")]
        colour = _COLOURS[number % len(_COLOURS)]
        line: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 5, "linewidth": 1.8}
        axes.errorbar(x, y, yerr=bars, elinewidth=1, capsize=3, clip_on=False, zorder=3, **line)
        if len(series) > 1:
            axes.annotate(name, (x[-1], y[-1]), color=colour, **_beside((10, 0), "left"))
        for one in bins if len(series) == 1 else ():
            axes.annotate(f"n = {one['total']}", (one["mean"], 100), color=PALE, **_beside((0, 8), "center"))
    every = [one for bins in series.values() for one in bins]
    # The power of two that leaves the first point some room on its left.
    left = 1 << max(1, int(min(one["mean"] for one in every) / 1.5)).bit_length() - 1
    high = max(one["to"] for one in every)
    marks = [1 << n for n in range(40) if left <= 1 << n <= high]
    axes.set_xscale("log", base=2)
    axes.set_xlim(left, high)
    axes.set_xticks(marks, [f"{mark:,}" for mark in marks])
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


def draw_comparison(comparison: "Comparison", title: str, path: Path) -> None:
    """Relative error, 1 - cosine, size of the streams, and agreement of choices, layer by layer."""
    layers = list(comparison.layers.values())
    figure, depth = blank(9, 10), range(len(layers))
    panels = figure.subplots(4, 1, sharex=True)
    a, b, c = ({"color": colour, **_DOTS} for colour in _COLOURS[:3])
    b["linestyle"] = "--"
    for part, label, style in (
        ("attn.out", "attention output", a),
        ("ffn.out", "FFN output", b),
        ("hc_ffn.streams", "streams", c),
    ):
        found = [layer.parts.get(part) for layer in layers]
        panels[0].semilogy(
            depth, [max(_LEAST, o.relative) if o else math.nan for o in found], label=label, **style
        )
        panels[1].semilogy(
            depth, [max(_LEAST, 1 - o.cosine) if o else math.nan for o in found], label=label, **style
        )
    for side, label, style in ((0, "A", a), (1, "B", b)):
        sizes = [one.rms[side] if one else math.nan for one in found]
        panels[2].semilogy(depth, sizes, label=label, **style)
    panels[3].plot(depth, [layer.routing.share for layer in layers], label="experts", **a)
    chosen = [(at, layer.selection.share) for at, layer in enumerate(layers) if layer.selection.chosen]
    if chosen:
        panels[3].plot(*zip(*chosen, strict=True), label="index", **b)
    labels = ("relative error", "1 - cosine", "rms of streams", "same choices")
    for panel, label in zip(panels, labels, strict=True):
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
        panel.legend(loc="best", fontsize="small")
        if comparison.departure and comparison.departure.layer in comparison.layers:
            at = list(comparison.layers).index(comparison.departure.layer)
            panel.axvline(at, color=PALE, linestyle=":")
    panels[3].set_ylim(-0.05, 1.05)
    step = max(1, len(layers) // 24)
    names = [layer.name.removeprefix("layers.") for layer in layers[::step]]
    panels[3].set_xticks(range(0, len(layers), step), names, rotation=90 if len(layers) > 12 else 0)
    panels[3].set_xlabel("layer")
    figure.suptitle(title)
    save(figure, path)


# Plots of a page: SVG as strings, whose colours come from the page's style sheet.
WIDTH, _LEFT = 860, 56
Point = tuple[int, float, float, float]  # x, mean, lowest, highest


def _svg(height: int, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label, quote=True)}">'
        + "".join(parts)
        + "</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", style: str = "small") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, style: str, title: str) -> str:
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{max(height, 0):.1f}" rx="2"'
    return f'<rect {shape} class="{style}"><title>{escape(title)}</title></rect>'


def _grid(marks: Sequence[float], base: float, scale: float, unit: str, axis: str) -> list[str]:
    """Horizontal lines at the marks, their numbers, and the axis below."""
    parts = [_text(_LEFT + (WIDTH - _LEFT) / 2, base + 36, axis, "middle")]
    for mark in marks:
        y = base - (mark - marks[0]) * scale
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH}" y2="{y:.1f}" class="grid"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{mark:g}{unit}", "end"))
    return parts


def ticks(lowest: float, highest: float, count: int = 4) -> list[float]:
    """Round numbers from at most `lowest` to at least `highest`."""
    raw = (highest - lowest) / count
    if not 0 < raw < math.inf:
        return [lowest, lowest + 1.0]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw * (1 - 1e-9))
    first, last = math.floor(lowest / step + 1e-9), math.ceil(highest / step - 1e-9)
    return [step * i for i in range(first, last + 1)]


def byte_bars(rows: Sequence[tuple[str, float, float]]) -> str:
    """name, bytes before, bytes after: two bars each, to one scale."""
    left, right, pitch = 130, 190, 34
    scale = (WIDTH - left - right) / (max((max(both) for _, *both in rows), default=1) or 1)
    parts = []
    for index, (name, before, after) in enumerate(rows):
        top = index * pitch + 4
        end = left + max(before, after) * scale + 8
        parts += [
            _text(left - 10, top + 17, name, "end", ""),
            _rect(left, top, before * scale, 11, "before", f"{name}, before: {size(before)}"),
            _rect(left, top + 13, after * scale, 11, "after", f"{name}, after: {size(after)}"),
            _text(end, top + 17, f"{size(before)} → {size(after)}", style=""),
        ]
    return _svg(len(rows) * pitch + 4, "bytes per component, before and after", parts)


def histogram(labels: Sequence[str], counts: Sequence[int], axis: str, every: int = 1) -> str:
    """One bar per label; the height is the share of all."""
    height, base, top = 220, 174, 10
    total, width = sum(counts) or 1, (WIDTH - _LEFT) / max(len(counts), 1)
    marks = ticks(0, 100 * max(counts, default=0) / total)
    scale = (base - top) / marks[-1]
    parts = _grid(marks, base, scale, " %", axis)
    for index, (label, count) in enumerate(zip(labels, counts, strict=True)):
        x, tall = _LEFT + index * width, 100 * count / total * scale
        title = f"{label}: {count:,} ({100 * count / total:.3g} %)"
        parts.append(_rect(x + 1.5, base - tall, width - 3, tall, "after", title))
        if index % every == 0:
            parts.append(_text(x + width / 2, base + 17, label, "middle"))
    return _svg(height, axis, parts)


def depth_lines(series: dict[str, list[Point]], axis: str) -> str:
    """One line per name over x, with a band from the lowest to the highest."""
    height, base, top = 340, 266, 12
    points = [point for line in series.values() for point in line]
    last = max(x for x, *_ in points)
    lowest, highest = min(low for _, _, low, _ in points), max(high for *_, high in points)
    # From zero, unless all values lie so close together that nothing could be told apart.
    marks = ticks(0 if lowest < 0.5 * highest else lowest, highest)
    scale = (base - top) / (marks[-1] - marks[0])

    def across(x: float) -> float:
        return _LEFT + 8 + (WIDTH - _LEFT - 16) * x / max(last, 1)

    def place(x: float, y: float) -> str:
        return f"{across(x):.1f},{base - (y - marks[0]) * scale:.1f}"

    parts = _grid(marks, base, scale, "", axis)
    for x in range(0, last + 1, max(1, math.ceil((last + 1) / 16))):
        parts.append(_text(across(x), base + 17, str(x), "middle"))
    for number, (name, line) in enumerate(series.items()):
        band = [place(x, high) for x, _, _, high in line] + [place(x, low) for x, _, low, _ in reversed(line)]
        style = f"line{number % 8}"
        parts.append(f'<polygon points="{" ".join(band)}" class="band {style}"/>')
        parts.append(f'<polyline points="{" ".join(place(x, y) for x, y, *_ in line)}" class="{style}"/>')
        for x, y, low, high in line:
            cx, cy = place(x, y).split(",")
            title = escape(f"{name}, layer {x}: {y:.4g} ({low:.4g} to {high:.4g})")
            parts.append(
                f'<circle cx="{cx}" cy="{cy}" r="2.6" class="{style}"><title>{title}</title></circle>'
            )
        x0, y0 = _LEFT + number % 4 * 200, height - 14 + number // 4 * 18
        parts.append(f'<rect x="{x0}" y="{y0 - 9}" width="14" height="4" class="key {style}"/>')
        parts.append(_text(x0 + 20, y0 - 3, name))
    return _svg(height + 18 * ((len(series) - 1) // 4), "relative error over depth", parts)
