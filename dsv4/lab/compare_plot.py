"""A picture of a comparison over depth."""

from pathlib import Path
from typing import Any

from dsv4.errors import ConfigError
from dsv4.lab.compare import Comparison, Layer
from dsv4.lab.files import check_writable, put
from dsv4.lab.plot import blank

# One colour per thing, the same in every panel; readable without colour by the order of the legend.
_SERIES = {"attn.out": "attention output", "ffn.out": "FFN output", "hc_ffn.streams": "streams"}
_COLOURS = ("#0072b2", "#d55e00", "#009e73")
_LEAST = 1e-9


def check_can_plot(path: Path) -> None:
    """Refuse before the work is done, not after."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {path}: expected a name that ends in .png, .svg or .pdf")
    check_writable(path, "--plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib; pip install matplotlib") from None


def draw(comparison: Comparison, title: str, path: Path) -> None:
    """Relative error, 1 - cosine, size of the streams, and agreement of choices, layer by layer."""
    layers = list(comparison.layers.values())
    figure = blank(9, 10)
    panels = figure.subplots(4, 1, sharex=True)
    depth = list(range(len(layers)))
    for (part, label), colour in zip(_SERIES.items(), _COLOURS, strict=True):
        style = {"color": colour, "marker": "o", "markersize": 3, "label": label}
        panels[0].semilogy(depth, [_error(layer, part) for layer in layers], **style)
        panels[1].semilogy(depth, [_angle(layer, part) for layer in layers], **style)
    for side, colour, line in (("A", "#0072b2", "-"), ("B", "#d55e00", "--")):
        sizes = [_rms(layer, side) for layer in layers]
        panels[2].semilogy(depth, sizes, color=colour, linestyle=line, marker="o", markersize=3, label=side)
    panels[3].plot(
        depth,
        [layer.routing.share for layer in layers],
        color="#0072b2",
        marker="o",
        markersize=3,
        label="experts",
    )
    chosen = [(at, layer.selection.share) for at, layer in enumerate(layers) if layer.selection.chosen]
    if chosen:
        panels[3].plot(
            *zip(*chosen, strict=True),
            color="#d55e00",
            marker="s",
            markersize=3,
            linestyle="--",
            label="index",
        )
    _finish(panels, layers, comparison)
    figure.suptitle(title)
    put(path, lambda part: figure.savefig(part, format=path.suffix[1:].lower(), dpi=120))


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


def _error(layer: Layer, part: str) -> float:
    return max(_LEAST, layer.parts[part].relative) if part in layer.parts else float("nan")


def _angle(layer: Layer, part: str) -> float:
    return max(_LEAST, 1 - layer.parts[part].cosine) if part in layer.parts else float("nan")


def _rms(layer: Layer, side: str) -> float:
    if "hc_ffn.streams" not in layer.parts:
        return float("nan")
    return layer.parts["hc_ffn.streams"].rms["AB".index(side)]
