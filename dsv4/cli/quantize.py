"""`dsv4 quantize`: a checkpoint in another number format."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dsv4.cli.show import bytes_bar, model_folder, out, print_json, say_note, size, text
from dsv4.errors import ConfigError

EPILOG = """
[bold]Examples[/]
  dsv4 quantize ./DeepSeek-V4-Flash ./Flash-NVFP4 --format nvfp4
  dsv4 quantize ./bf16 ./nvfp4 --format nvfp4 --rest official --least-squares --report report.html
  dsv4 quantize ./DeepSeek-V4-Flash ./Flash-BF16 --format bf16 --mtp --recipe cast
An interrupted run goes on where it stopped when the same command is given again.
"""


def quantize(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="model folder, in any format that loads")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="new folder")],
    format: Annotated[str, typer.Option(help="nvfp4, mxfp4, fp8 or bf16")],
    scope: Annotated[
        str | None,
        typer.Option(
            help="experts (routed); linears: also shared experts, attention, indexer queries; all: also the "
            "head, compressors, indexers. Default: experts for nvfp4 and mxfp4, linears for fp8, all for bf16"
        ),
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(
            help="auto: exact where the values allow it, else rounded; cast: exact or refused; "
            "requant: rounded by the target's own rule, even MXFP4 to NVFP4"
        ),
    ] = "auto",
    rest: Annotated[
        str,
        typer.Option(
            help="linears outside the scope: keep them as stored, or official: FP8, draft experts MXFP4"
        ),
    ] = "keep",
    mtp: Annotated[bool, typer.Option("--mtp", help="the draft block too; else it stays as it is")] = False,
    least_squares: Annotated[
        bool, typer.Option("--least-squares", help="search each block's scale for the least squared error")
    ] = False,
    shard_gb: Annotated[float, typer.Option(help="size of a shard in GB")] = 5.0,
    threads: Annotated[int | None, typer.Option(help="default: all cores")] = None,
    report: Annotated[Path | None, typer.Option(help="write a page with plots to this .html file")] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="list every parameter, also in JSON")] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Write a checkpoint in another number format. Needs under 2 GiB of memory for any model."""
    source = model_folder(source)
    from dsv4.lab.files import check_writable
    from dsv4.lab.quantize.page import write_page
    from dsv4.lab.quantize.plan import Options
    from dsv4.lab.quantize.run import Quantizer

    if not 0 < shard_gb <= 1000:
        raise ConfigError(f"shard-gb is {shard_gb}, expected more than 0 and at most 1000")
    if report is not None:
        check_writable(report, "--report")
        if report.suffix.lower() not in (".html", ".htm"):
            raise ConfigError(f"--report {report}: expected a name that ends in .html; it is a web page")
    options = Options(format, scope, recipe, rest, mtp, least_squares, max(1, round(shard_gb * 1e9)))
    quantizer = Quantizer.prepare(source, target, options, threads)
    with bytes_bar(f"checking {source.resolve().name}") as update:
        quantizer.check(update)
    with bytes_bar(f"writing {target.resolve().name}") as update:
        result, is_new = quantizer.write(update)
    if report is not None:
        write_page(report, result)
    if json:
        shown = {name: value for name, value in result.items() if tensors or name != "tensors"}
        print_json({"folder": str(target), "is_new": is_new, **shown})
        return
    for note in result["notes"]:
        say_note(note)
    if not is_new:
        say_note(f"{target} was complete already; nothing was written")
    if tensors:
        _show_tensors(result)
    _show(result)
    if report is not None:
        out.print(f"\n{report}: written", markup=False)


def _show_tensors(result: dict[str, Any]) -> None:
    # Plain lines, not a table: a table would cut names to fit the width it thinks it has.
    for name, tensor in result["tensors"].items():
        change = tensor["from"] if tensor["how"] == "kept" else f"{tensor['from']} → {tensor['to']}"
        error = f"  error {tensor['relative_error']:.4g}" if tensor["how"] == "rounded" else ""
        text(f"{name:<44} {change:<24} {tensor['how']:<8}{error}\n")


def _show(result: dict[str, Any]) -> None:
    table = Table(
        "component", "tensors", "format", "bytes", "error", "cosine", "exact", box=None, pad_edge=False
    )
    for column in (table.columns[1], *table.columns[3:]):
        column.justify = "right"
    for row in result["components"]:
        cells = [row["component"], f"{row['tensors']:,}", "kept", size(row["bytes_after"])]
        if row["how"] != "kept":
            cells[2] = f"{row['from']} → {row['to']}"
            error = "exact" if row["how"] == "exact" else f"{row['relative_error']:.4g}"
            cells += [error, f"{row['cosine']:.6g}", f"{100 * row['exact_share']:.4g} %"]
        table.add_row(*cells)
    total = f"[bold]{size(result['bytes_after'])}[/]"
    table.add_row(
        "[bold]total[/]", f"{len(result['tensors']):,}", f"was {size(result['bytes_before'])}", total
    )
    out.print(table)
