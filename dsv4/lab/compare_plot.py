"""A picture of a comparison over depth."""

import math
from pathlib import Path
from typing import Any

from dsv4.disk import result
from dsv4.errors import ConfigError
from dsv4.lab.compare import Comparison, Layer
from dsv4.lab.files import check_writable
from dsv4.lab.plot import blank

# One colour per thing, the same in every panel; readable without colour by the order of the legend.
_SERIES = {"attn.out": "attention output", "ffn.out": "FFN output", "hc_ffn.streams": "streams"}
_COLOURS = ("#0072b2", "#d55e00", "#009e73")
_DOTS: dict[str, Any] = {"marker": "o", "markersize": 3}
_LEAST = 1e-9


def check_can_plot(path: Path) -> None:
    """Refuse before the work is done, not after."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {path}: expected a name that ends in .png, .svg or .pdf")
    check_writable(path, "--plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'dsv4[plot]'") from None


def draw(comparison: Comparison, title: str, path: Path) -> None:
    """Relative error, 1 - cosine, size of the streams, and agreement of choices, layer by layer."""
    layers = list(comparison.layers.values())
    figure = blank(9, 10)
    panels = figure.subplots(4, 1, sharex=True)
    depth = list(range(len(layers)))
    for (part, label), colour in zip(_SERIES.items(), _COLOURS, strict=True):
        found = [layer.parts.get(part) for layer in layers]
        errors = [max(_LEAST, one.relative) if one else math.nan for one in found]
        angles = [max(_LEAST, 1 - one.cosine) if one else math.nan for one in found]
        panels[0].semilogy(depth, errors, color=colour, label=label, **_DOTS)
        panels[1].semilogy(depth, angles, color=colour, label=label, **_DOTS)
    first, second = {"color": _COLOURS[0], **_DOTS}, {"color": _COLOURS[1], "linestyle": "--", **_DOTS}
    streams = [layer.parts.get("hc_ffn.streams") for layer in layers]
    for side, label, style in ((0, "A", first), (1, "B", second)):
        sizes = [one.rms[side] if one else math.nan for one in streams]
        panels[2].semilogy(depth, sizes, label=label, **style)
    panels[3].plot(depth, [layer.routing.share for layer in layers], label="experts", **first)
    chosen = [(at, layer.selection.share) for at, layer in enumerate(layers) if layer.selection.chosen]
    if chosen:
        panels[3].plot(*zip(*chosen, strict=True), label="index", **{**second, "marker": "s"})
    _finish(panels, layers, comparison)
    figure.suptitle(title)
    with result(path) as unfinished:
        figure.savefig(unfinished, format=path.suffix[1:].lower(), dpi=120)


def _finish(panels: Any, layers: list[Layer], comparison: Comparison) -> None:
    for panel, label in zip(
        panels, ("relative error", "1 - cosine", "rms of streams", "same choices"), strict=True
    ):
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
        panel.legend(loc="best", fontsize="small")
        if comparison.departure and comparison.departure.layer in comparison.layers:
            at = list(comparison.layers).index(comparison.departure.layer)
            panel.axvline(at, color="#999999", linestyle=":")
    panels[3].set_ylim(-0.05, 1.05)
    step = max(1, len(layers) // 24)
    panels[3].set_xticks(range(0, len(layers), step))
    names = [layer.name.removeprefix("layers.") for layer in layers[::step]]
    panels[3].set_xticklabels(names, rotation=90 if len(layers) > 12 else 0)
    panels[3].set_xlabel("layer")
