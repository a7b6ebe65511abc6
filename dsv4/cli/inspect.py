"""`dsv4 inspect`: what a checkpoint is, from its headers alone."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from dsv4.cli.show import model_folder, out, print_json, say_note, size, text
from dsv4.config import ModelConfig

EPILOG = """
[bold]Examples[/]
  dsv4 inspect ./DeepSeek-V4-Flash
  dsv4 inspect ./model --tensors
  dsv4 inspect ./model --json | jq .active_bytes_per_token
"""


def inspect(
    model: Annotated[Path | None, typer.Argument(help="model folder; default: the embedded model")] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="list every parameter")] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show config, formats, bytes per component and bytes read per token. Reads headers only."""
    from dsv4.lab.inspect import components, report, storage_name
    from dsv4.weights.detect import read_headers

    config, _, inventory = read_headers(model_folder(model))
    if json:
        print_json(report(inventory, config))
        return
    _show_config(config, inventory.family, inventory.num_mtp_layers)
    table = Table("component", "stored as", "bytes", "read per token", box=None, pad_edge=False)
    parts = components(inventory, config)
    for part in parts:
        formats = ", ".join(f"{count} {name}" for name, count in part.formats.items())
        table.add_row(part.name, formats, size(part.total_bytes), size(part.active_bytes))
    total, active = sum(p.total_bytes for p in parts), sum(p.active_bytes for p in parts)
    table.add_row("[bold]total[/]", "", f"[bold]{size(total)}[/]", f"[bold]{size(active)}[/]")
    out.print(table)
    if tensors:
        # Plain lines, not a table: a table would cut names to fit the width it thinks it has.
        for source in inventory.sources:
            name, shape = source.param.name, str(list(source.param.shape))
            text(f"{name:<44} {shape:<16} {storage_name(source):<20} {source.num_bytes:>15,}\n")
    for note in inventory.notes:
        say_note(note)


def _show_config(c: ModelConfig, family: str, num_mtp: int) -> None:
    kinds = {kind: sum(layer.kind == kind for layer in c.layers) for kind in ("sliding", "csa", "hca")}
    schedule = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    out.print(f"layers      {c.num_layers} ({schedule}), {c.drafter(num_mtp)}, {family} names")
    out.print(f"width       {c.hidden_size}, {c.num_streams} streams, vocabulary {c.vocab_size}")
    out.print(
        f"attention   {c.num_heads} heads of {c.head_dim}, window {c.window}, top-{c.index_topk} entries"
    )
    out.print(f"experts     {c.experts_per_token} of {c.num_experts}, width {c.expert_width}, 1 shared")
    out.print(f"positions   {c.max_positions:,}")
    eras = {"april": "the previews of April 2026", "0731": "the releases since 31 July 2026"}
    out.print(f"prompts     by the rules of {eras[c.release]}")
    out.print()
