"""Small SVG plots as strings: bars, lines, histograms. Colours come from the page's style sheet."""

import math
from collections.abc import Sequence
from html import escape

from dsv4.lab.files import size

WIDTH = 860


def _svg(height: int, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label, quote=True)}">'
        + "".join(parts)
        + "</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="grid"/>'


def _rect(x: float, y: float, width: float, height: float, style: str, title: str) -> str:
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{max(height, 0):.1f}" rx="2"'
    return f'<rect {shape} class="{style}"><title>{escape(title)}</title></rect>'


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
    highest = max((max(before, after) for _, before, after in rows), default=1) or 1
    parts = []
    for index, (name, before, after) in enumerate(rows):
        top = index * pitch + 4
        scale = (WIDTH - left - right) / highest
        parts += [
            _text(left - 10, top + 17, name, "end"),
            _rect(left, top, before * scale, 11, "before", f"{name}, before: {size(before)}"),
            _rect(left, top + 13, after * scale, 11, "after", f"{name}, after: {size(after)}"),
            _text(left + max(before, after) * scale + 8, top + 17, f"{size(before)} → {size(after)}"),
        ]
    return _svg(len(rows) * pitch + 4, "bytes per component, before and after", parts)


def histogram(labels: Sequence[str], counts: Sequence[int], axis: str, every: int = 1) -> str:
    """One bar per label; the height is the share of all."""
    left, top, bottom, height = 56, 10, 46, 220
    total, width = sum(counts) or 1, (WIDTH - left) / max(len(counts), 1)
    marks = ticks(0, 100 * max(counts, default=0) / total)
    scale = (height - top - bottom) / marks[-1]
    base = height - bottom
    parts = []
    for mark in marks:
        parts += [
            _line(left, base - mark * scale, WIDTH, base - mark * scale),
            _text(left - 8, base - mark * scale + 4, f"{mark:g} %", "end", "small"),
        ]
    for index, (label, count) in enumerate(zip(labels, counts, strict=True)):
        x, tall = left + index * width, 100 * count / total * scale
        title = f"{label}: {count:,} ({100 * count / total:.3g} %)"
        parts.append(_rect(x + 1.5, base - tall, width - 3, tall, "after", title))
        if index % every == 0:
            parts.append(_text(x + width / 2, base + 17, label, "middle", "small"))
    parts.append(_text(left + (WIDTH - left) / 2, height - 4, axis, "middle", "small"))
    return _svg(height, axis, parts)


Point = tuple[int, float, float, float]  # x, mean, lowest, highest


def depth_lines(series: dict[str, list[Point]], axis: str) -> str:
    """One line per name over x, with a band from the lowest to the highest."""
    left, top, bottom, height = 56, 12, 74, 340
    points = [point for line in series.values() for point in line]
    last = max(x for x, *_ in points)
    lowest, highest = min(low for _, _, low, _ in points), max(high for *_, high in points)
    # From zero, unless all values lie so close together that nothing could be told apart.
    marks = ticks(0 if lowest < 0.5 * highest else lowest, highest)
    base = height - bottom
    scale = (base - top) / (marks[-1] - marks[0])

    def place(x: float, y: float) -> str:
        return f"{left + 8 + (WIDTH - left - 16) * x / max(last, 1):.1f},{base - (y - marks[0]) * scale:.1f}"

    parts = []
    for mark in marks:
        y = base - (mark - marks[0]) * scale
        parts += [_line(left, y, WIDTH, y), _text(left - 8, y + 4, f"{mark:g}", "end", "small")]
    for x in range(0, last + 1, max(1, math.ceil((last + 1) / 16))):
        parts.append(_text(float(place(x, marks[0]).split(",")[0]), base + 17, str(x), "middle", "small"))
    parts.append(_text(left + (WIDTH - left) / 2, base + 34, axis, "middle", "small"))
    for number, (name, line) in enumerate(series.items()):
        band = [place(x, high) for x, _, _, high in line] + [place(x, low) for x, _, low, _ in reversed(line)]
        style = f"line{number % 8}"
        parts.append(f'<polygon points="{" ".join(band)}" class="band {style}"/>')
        parts.append(f'<polyline points="{" ".join(place(x, y) for x, y, *_ in line)}" class="{style}"/>')
        for x, y, low, high in line:
            cx, cy = place(x, y).split(",")
            title = f"{name}, layer {x}: {y:.4g} ({low:.4g} to {high:.4g})"
            dot = f'<circle cx="{cx}" cy="{cy}" r="2.6" class="{style}">'
            parts.append(f"{dot}<title>{escape(title)}</title></circle>")
        column, row = number % 4, number // 4
        x0, y0 = left + column * 200, height - 14 + row * 18
        parts.append(f'<rect x="{x0}" y="{y0 - 9}" width="14" height="4" class="key {style}"/>')
        parts.append(_text(x0 + 20, y0 - 3, name, "start", "small"))
    return _svg(height + 18 * ((len(series) - 1) // 4), "relative error over depth", parts)
