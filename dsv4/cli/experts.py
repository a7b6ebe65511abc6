"""`dsv4 experts`: how often each expert of a model was chosen, and what a given memory would hit."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from dsv4.cli.show import model_folder, out, print_json, size

EPILOG = """
[bold]Examples[/]
  dsv4 experts ./DeepSeek-V4-Flash
  dsv4 experts ./DeepSeek-V4-Flash --json | jq .coverage
"""
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.78, 0.9, 0.92, 0.95, 1.0)
WIDTH = 40  # of a bar, in characters


def experts(
    model: Annotated[Path | None, typer.Argument(help="model folder; default: the embedded model")] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show how often experts were chosen during GPU decoding. No text is stored."""
    model = model_folder(model)
    from dsv4.engine.frequency import checksum, counts_path, coverage, read_counts
    from dsv4.errors import ConfigError
    from dsv4.weights.load import Checkpoint
    from dsv4.weights.tiled import expert_form

    checkpoint = Checkpoint.open(model)
    form, names = expert_form(checkpoint)
    key = checksum(checkpoint)
    path = counts_path(key)
    if not path.exists():
        raise ConfigError(
            f"nothing was counted yet ({path}): counts are kept when the model decodes on a GPU"
        )
    counts = read_counts(path, key)
    total = len(names) * checkpoint.config.num_experts
    rows = [
        {
            "resident_share": share,
            "bytes": round(share * total) * form.num_bytes,
            "hit_rate": round(coverage(counts, round(share * total)), 5),
        }
        for share in SHARES
    ]
    unused = sum(count == 0 for row in counts for count in row)
    report = {
        **{"file": str(path), "layers": len(names), "experts": checkpoint.config.num_experts},
        **{"choices": sum(map(sum, counts)), "never_chosen": unused, "coverage": rows},
    }
    if json:
        print_json(report)
        return
    out.print(
        f"counted  {report['choices']:,.0f} choices, {unused:,} of {total:,} experts never", markup=False
    )
    table = Table("resident", "GPU memory", "hits", "", box=None, pad_edge=False)
    for row in rows:
        bar = "█" * round(WIDTH * row["hit_rate"])
        table.add_row(f"{row['resident_share']:.0%}", size(int(row["bytes"])), f"{row['hit_rate']:.2%}", bar)
    out.print(table)
