"""The report as one HTML page: self-contained, nothing is fetched, light or dark as the reader prefers."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dsv4.disk import result
from dsv4.lab.draw import Point, byte_bars, depth_lines, histogram
from dsv4.lab.files import size

WORST = 20
_BINS = 40
_STYLE = """
:root { --ink: #1d2330; --soft: #667085; --line: #e4e7ec; --page: #fbfbfa; --card: #fff; --accent: #2563eb;
  --before: #c3c9d4; --c0: #2563eb; --c1: #d9480f; --c2: #0f9960; --c3: #9333ea; --c4: #b7791f; --c5: #0891b2;
  --c6: #be185d; --c7: #4d7c0f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ec; --soft: #98a2b3; --line: #2a303c;
  --page: #12151b; --card: #1a1f28; --accent: #6ea0ff; --before: #4a5261; --c0: #6ea0ff; --c1: #ff9466;
  --c2: #4cd29b; --c3: #c792ff; --c4: #f0c05a; --c5: #4fd0e8; --c6: #ff7eb3; --c7: #a3d65c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.55 system-ui, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 40px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 17px; margin: 0 0 4px; }
p { margin: 0 0 12px; color: var(--soft); max-width: 46em; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 20px 24px;
  margin-top: 20px; overflow-x: auto; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin-top: 20px; }
.facts div { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 16px; }
.facts b { display: block; font-size: 21px; font-weight: 600; letter-spacing: -0.01em; }
.facts span { color: var(--soft); font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; border-bottom: 1px solid var(--line); }
th, td { padding: 5px 14px 5px 0; white-space: nowrap; }
tr + tr td { border-top: 1px solid var(--line); }
.n { text-align: right; }
code { font: 13px ui-monospace, monospace; }
svg { width: 100%; min-width: 560px; height: auto; display: block; margin-top: 8px; }
svg text { fill: var(--ink); font-size: 13px; } svg text.small { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--line); } .before { fill: var(--before); } .after { fill: var(--accent); }
polyline { fill: none; stroke-width: 1.8; } polygon.band { stroke: none; opacity: 0.16; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin: 0 5px 0 12px; }
""" + "".join(
    f"polyline.line{i} {{ stroke: var(--c{i}); }} :not(polyline).line{i} {{ fill: var(--c{i}); }}\n"
    for i in range(8)
)


def write_page(path: Path, report: dict[str, Any]) -> None:
    with result(path) as part:
        part.write_text(page(report), encoding="utf-8")


def page(report: dict[str, Any]) -> str:
    options = report["options"]
    title = f"{report['source']} → {options['format'].upper()}"
    sections = [
        _facts(report),
        _section("Components", _components_text(report), _components(report)),
        _section("Bytes", _LEGEND, _bytes(report)),
        *_errors(report),
        *_scales(report),
        _section("How it was made", "", _made(report)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>"
        f"<h1>{escape(title)}</h1><p>Report of <code>dsv4 quantize</code></p>\n"
        + "\n".join(sections)
        + "\n</main></body></html>\n"
    )


_LEGEND = (
    '<span class="swatch" style="background:var(--before);margin-left:0"></span>before'
    '<span class="swatch" style="background:var(--accent)"></span>after'
)


def _section(title: str, text: str, content: str) -> str:
    lead = f"<p>{text}</p>" if text else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{content}</section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: set[int]) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        marks = (' class="n"' if index in numbers else "" for index in range(len(row)))
        return "".join(f"<{tag}{m}>{escape(cell)}</{tag}>" for m, cell in zip(marks, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', head)}</tr>{body}</table>"


def _percent(share: float) -> str:
    # Not "100 %" of what is nearly all.
    return "100 %" if share == 1 else f"{min(100 * share, 99.9999):.4f} %"


def _facts(report: dict[str, Any]) -> str:
    before, after = report["bytes_before"], report["bytes_after"]
    rows = report["components"]
    values = sum(row["values"] for row in rows) or 1
    exact = sum(row["values"] * row["exact_share"] for row in rows) / values
    is_rounded = any(row["how"] == "rounded" for row in rows)
    worst = max((row["relative_error"] for row in rows), default=0.0)
    facts = [
        (size(after), f"from {size(before)}, {100 * after / max(before, 1):.1f} %"),
        (f"{len(report['tensors']):,}", f"parameters in {report['shards']} shard(s)"),
        (_percent(exact) if is_rounded else "100 %", "of all values unchanged"),
        (f"{worst:.4g}" if is_rounded else "0", "relative error, worst component"),
    ]
    cards = "".join(f"<div><b>{escape(big)}</b><span>{escape(small)}</span></div>" for big, small in facts)
    return f'<div class="facts">{cards}</div>'


def _components_text(report: dict[str, Any]) -> str:
    if any(row["how"] == "rounded" for row in report["components"]):
        return (
            "Error is ‖new − old‖ / ‖old‖ over all values of the row; exact is the share of values unchanged."
        )
    return "Nothing was rounded: every value decodes to what it was."


def _components(report: dict[str, Any]) -> str:
    rows = []
    for row in report["components"]:
        is_kept = row["how"] == "kept"
        rows.append(
            (
                row["component"],
                f"{row['tensors']:,}",
                "as stored" if is_kept else f"{row['from']} → {row['to']}",
                row["how"],
                size(row["bytes_before"]),
                size(row["bytes_after"]),
                "" if is_kept else f"{row['relative_error']:.4g}",
                "" if is_kept else f"{row['cosine']:.6g}",
                "" if is_kept else _percent(row["exact_share"]),
            )
        )
    head = ("component", "tensors", "format", "how", "before", "after", "error", "cosine", "exact")
    return _table(head, rows, {1, 4, 5, 6, 7, 8})


def _bytes(report: dict[str, Any]) -> str:
    totals: dict[str, list[float]] = {}
    for row in report["components"]:
        total = totals.setdefault(row["component"], [0, 0])
        total[0] += row["bytes_before"]
        total[1] += row["bytes_after"]
    rows = [(name, before, after) for name, (before, after) in totals.items()]
    return byte_bars(sorted(rows, key=lambda row: -row[2]))


def _errors(report: dict[str, Any]) -> list[str]:
    """Sections about what was rounded; none if nothing was."""
    rounded = {name: t for name, t in report["tensors"].items() if t["how"] == "rounded"}
    if not rounded:
        return []
    series: dict[str, list[Point]] = {}
    for row in report["depth"]:
        point = (row["layer"], row["relative_error"], row["lowest"], row["highest"])
        series.setdefault(row["kind"], []).append(point)
    out = []
    if series:
        lead = (
            "Relative error of the rounded tensors of each layer; bands reach from the best to the worst. "
            "The axis need not begin at 0."
        )
        out.append(_section("Error over depth", lead, depth_lines(series, "layer")))
    errors = [tensor["relative_error"] for tensor in rounded.values()]
    low, high = min(errors), max(errors)
    step = (high - low) / _BINS or 1e-9
    counts = [0] * _BINS
    for error in errors:
        counts[min(_BINS - 1, int((error - low) / step))] += 1
    labels = [f"{low + (index + 0.5) * step:.4g}" for index in range(_BINS)]
    plot = histogram(labels, counts, "relative error of a tensor", every=8)
    out.append(_section("Errors of tensors", f"{len(rounded):,} tensors were rounded.", plot))
    worst = sorted(rounded.items(), key=lambda pair: (-pair[1]["relative_error"], pair[0]))[:WORST]
    rows = [
        (name, f"{t['from']} → {t['to']}", f"{t['relative_error']:.4g}", f"{t['cosine']:.6g}")
        for name, t in worst
    ]
    table = _table(("parameter", "format", "error", "cosine"), rows, {2, 3})
    out.append(_section(f"The {len(rows)} largest errors", "", table))
    return out


def _scales(report: dict[str, Any]) -> list[str]:
    counts = report["scale_exponents"]
    if not counts:
        return []
    labels = ["< 2⁻⁶", *(f"2{_superscript(exponent)}" for exponent in range(-6, 9))]
    lead = (
        "How the block scales of NVFP4 tensors use E4M3’s range. The largest block of a tensor lies at the "
        "right end; blocks at the left end begin to lose precision."
    )
    return [_section("Block scales", lead, histogram(labels, counts, "block scale, power of two"))]


def _superscript(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _made(report: dict[str, Any]) -> str:
    rows = [(name.replace("_", " "), str(value)) for name, value in report["options"].items()]
    notes = "".join(f"<p>{escape(note)}</p>" for note in report["notes"])
    return _table(("option", "value"), rows, set()) + notes
