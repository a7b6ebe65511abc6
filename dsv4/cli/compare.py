"""`dsv4 compare`: the same tokens through two models or two settings, layer by layer."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsv4.cli.show import err, load_engine, model_folder, out, print_json
from dsv4.errors import RequestError
from dsv4.hub.cache import title

if TYPE_CHECKING:
    from dsv4.config import ModelConfig
    from dsv4.lab.compare import Comparison, Layer

EPILOG = """
[bold]Examples[/]
  dsv4 compare ./official ./nvfp4
  dsv4 compare ./model --a activations=a16 --b activations=a4 --plot depth.png
  dsv4 compare ./model --a device=cpu --b device=cuda,compute_dtype=float32 --limit 0.001 --decode 8
"""


def compare(
    model_a: Annotated[Path, typer.Argument(metavar="A", help="model folder: the reference")],
    model_b: Annotated[Path | None, typer.Argument(metavar="B", help="model folder; default: A")] = None,
    a: Annotated[str, typer.Option("--a", help="settings of A: activations=a16,op.attention=cpu,...")] = "",
    b: Annotated[str, typer.Option("--b", help="settings of B")] = "",
    text: Annotated[Path | None, typer.Option(help="text file (UTF-8) to run")] = None,
    ids: Annotated[Path | None, typer.Option(help="safetensors file with a tensor `ids` [T] to run")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="how many tokens to run at most; default: enough for every layer kind")
    ] = None,
    decode: Annotated[int, typer.Option(help="run the last N tokens one by one")] = 0,
    limit: Annotated[
        float | None, typer.Option(help="end at the first layer whose relative error is larger")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="draw a picture over depth: .png, .svg or .pdf")] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Run the same tokens twice: errors, routing, selection layer by layer, then KL and top-1 of logits."""
    model_a, model_b = model_folder(model_a), model_folder(model_b or model_a)
    from dsv4.lab.compare import check_alike, parse_settings, record
    from dsv4.lab.compare import compare as compare_with
    from dsv4.lab.draw import check, draw_comparison
    from dsv4.weights.load import Checkpoint

    settings = [parse_settings(a), parse_settings(b)]
    if limit is not None and not limit >= 0:
        raise RequestError(f"limit is {limit}, expected a number from 0")
    if plot is not None:
        check(plot)
    config = Checkpoint.open(model_a).config
    check_alike(config, Checkpoint.open(model_b).config)
    chosen = _tokens(model_a, config, text, ids, tokens, decode)
    settings = [replace(s, max_batch=1, max_context=len(chosen)) for s in settings]
    engine = load_engine(model_a, settings[0])
    with err.status("running A"):
        recording = record(engine, chosen, decode)
    # Only one of them is in memory at a time.
    del engine
    engine = load_engine(model_b, settings[1])
    with err.status("running B"):
        comparison = compare_with(recording, engine, chosen, decode, limit)
    count = len(chosen) - (decode == 0)
    source = (text or ids or Path("made up")).name
    title = f"A: {_label(model_a, a)}   B: {_label(model_b, b)}   {count} tokens ({source})"
    if plot is not None:
        draw_comparison(comparison, title, plot)
    if json:
        print_json({"tokens": count, **comparison.report()})
        return
    out.print(title + "\n", markup=False)
    _show(comparison)
    if plot is not None:
        out.print(f"\n{plot}: drawn", markup=False)


def _label(model: Path, settings: str) -> str:
    return title(model) + (f" ({settings})" if settings else "")


def _tokens(
    model: Path, config: "ModelConfig", text: Path | None, ids: Path | None, limit: int | None, decode: int
) -> list[int]:
    """The ids to run: given, from a text, or made up."""
    from dsv4.disk import read_text
    from dsv4.lab.compare import check_ids, default_tokens, random_ids
    from dsv4.lab.score import read_ids
    from dsv4.text.tokenizer import Tokenizer

    if text is not None and ids is not None:
        raise RequestError("give either --text or --ids, not both")
    count = default_tokens(config) if limit is None else limit
    if count < 2:
        raise RequestError(f"tokens is {count}, expected at least 2")
    if ids is not None:
        chosen = read_ids(ids)
        count = len(chosen) if limit is None else limit
    elif text is not None:
        tokenizer = Tokenizer.load(model if model.is_dir() else model.parent)
        chosen = [tokenizer.bos_id, *tokenizer.encode_text(read_text(text))]
    else:
        chosen = random_ids(config, count)
    chosen = chosen[:count]
    check_ids(chosen, decode, config)
    return chosen


# Plain lines, not a table: a table would cut numbers to fit the width it thinks it has.
_LINE = "{:<6}{:<8}{:>9}{:>7}{:>8}{:>7}{:>8}{:>7}{:>7}{:>7}{:>8}{:>7}"
_HEADER = ["layer", "kind", "attention", "cos", "FFN", "cos", "streams", "cos"]
_HEADER += ["|X| A", "|X| B", "experts", "index"]


def _show(comparison: "Comparison") -> None:
    for cells in (_HEADER, *map(_row, comparison.layers.values())):
        out.print(_LINE.format(*cells), markup=False)
    legend = "relative error and cosine; |X|: rms of the streams; experts, index: same choices (-: no choice)"
    out.print(f"[dim]{legend}[/]\n")
    departure, jump = comparison.departure, comparison.largest_jump()
    if departure:
        error = "" if departure.relative is None else f": relative error {departure.relative:.2e}"
        detail = f"; {departure.detail}" if departure.detail else ""
        where = f"{departure.layer} in {departure.op}, {departure.what}"
        out.print(f"[bold red]parts at[/]  {where}{error}, worst at token {departure.token}{detail}")
    elif jump:
        out.print(
            f"grows most  at {jump.layer} in {jump.op}, {jump.what}: {jump.before:.2e} to {jump.after:.2e}"
        )
    else:
        out.print("the same  bit for bit, in every layer")
    if comparison.logits.divergences:
        found = comparison.logits.as_dict()
        kl = f"KL {found['kl_mean']:.3e} mean, {found['kl_max']:.3e} most"
        out.print(
            f"logits    {kl}; top-1 equal at {found['top1_agreement']:.1%} of {found['positions']} positions"
        )


def _row(layer: "Layer") -> list[str]:
    cells = [layer.name.removeprefix("layers."), layer.kind]
    for part in ("attn.out", "ffn.out", "hc_ffn.streams"):
        found = layer.parts.get(part)
        cells += [f"{found.relative:.1e}", f"{found.cosine:.4f}"] if found else ["-", "-"]
    streams = layer.parts.get("hc_ffn.streams")
    cells += [f"{rms:.3g}" for rms in streams.rms] if streams else ["-", "-"]
    cells.append(f"{layer.routing.share:.1%}" if layer.routing.chosen else "-")
    cells.append(f"{layer.selection.share:.1%}" if layer.selection.chosen else "-")
    return cells
