"""`dsv4 plan`: does a model fit on a machine, what would, and how fast is it there."""

import re
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dsv4.cli.options import complete_model
from dsv4.cli.show import model_folder, out, print_json, size
from dsv4.errors import ConfigError

if TYPE_CHECKING:
    from dsv4.lab.plan import Plan

EPILOG = """
[bold]Examples[/]
  dsv4 plan flash --gpus 2xH200 --context 128k --batch 8
  dsv4 plan pro --format official --gpus 8xB200
  dsv4 plan ./DeepSeek-V4-Flash --compare
  dsv4 plan ./DeepSeek-V4-Flash --json | jq .per_gpu
Exit code 3: it does not fit.
"""
NO_FIT = 3
COMPARED = ("H200", "B200", "RTX PRO 6000")
# Of the table: its rows and the parts of memory that each adds up; --verbose shows every part.
_ROWS = {
    "weights": ("weights",),
    "cache": ("cache", "state", "snapshots"),
    "prompts": ("workspace",),
    "other": ("tables", "copies", "buffers", "reserved"),
}
_PARTS = {
    "weights": "as the kernels hold them",
    "cache": "entries and index keys",
    "state": "windows and open blocks",
    "snapshots": "of the prefix cache, at most",
    "tables": "rotations, penalties",
    "copies": "weights in a second form, for prompts",
    "buffers": "of decode steps, at most",
    "workspace": "of a prompt's step, at most",
    "reserved": "compiled kernels and graphs, estimated",
}


def count_of(text: str) -> int:
    """`4096`, `128k` (131,072), `1M` (1,048,576)."""
    match = re.fullmatch(r"(\d{1,12})\s*([kKmM]?)", text.strip())
    if match is None:
        raise ConfigError(f"context {text[:40]!r}: expected a number of tokens, as in 32768, 128k or 1M")
    return int(match[1]) << {"": 0, "k": 10, "m": 20}[match[2].lower()]


def _names(incomplete: str) -> list[str]:
    return list(dict.fromkeys(["flash", "pro", "tiny", *complete_model(incomplete)]))


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="model folder, or flash, pro, tiny (./flash: a folder)",
            autocompletion=_names,
        ),
    ],
    gpus: Annotated[
        str | None, typer.Option(help="2xH200, RTX5090, or 2 of this machine's; default: this machine")
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="tokens per sequence: 32768, 128k, 1M; default: as the engine's")
    ] = None,
    batch: Annotated[int, typer.Option(help="sequences at the same time")] = 8,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="each GPU has whole experts, as dsv4 serve's option")
    ] = False,
    format: Annotated[
        str | None, typer.Option(help="of flash, pro, tiny: modelopt (default), official, bf16, ...")
    ] = None,
    weights: Annotated[str, typer.Option(help="on a CPU: auto, dense or packed")] = "auto",
    cache: Annotated[str, typer.Option(help="key/value cache: fp8, bf16 or f32")] = "fp8",
    chunk: Annotated[
        int | None, typer.Option(help="prompt tokens processed per step; default: as the engine's")
    ] = None,
    snapshots: Annotated[int, typer.Option(help="saved states of the prefix cache; 0 turns it off")] = 64,
    speculate: Annotated[str, typer.Option(help="off: without the drafter, as dsv4 serve's option")] = "auto",
    records: Annotated[
        Path | None, typer.Option(help="folder of measurements (dsv4 bench --save); default: the package's")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="also 1, 2, 4 and 8 of each GPU that models are planned for")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="every part of memory, and what is read")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show whether a model fits, what would fit, and how fast it is."""
    from dsv4.engine.memory import default_context
    from dsv4.lab.gpus import known, parse, this_machine
    from dsv4.lab.plan import Plan, Wanted, describe
    from dsv4.lab.records import PRESETS, SHIPPED

    if records is not None and not records.is_dir():
        raise ConfigError(
            f"--records {records} is not a folder; give one with *.jsonl files, or leave it out"
        )
    machine = parse(gpus) if gpus is not None else this_machine()
    demand = describe(model if model in PRESETS else str(model_folder(Path(model))), format)
    asked = default_context(demand.config) if context is None else count_of(context)
    wanted = Wanted(asked, batch, expert_parallel, weights, cache, chunk, snapshots, speculate)
    made, folder = Plan.make(demand, machine, wanted), records or SHIPPED
    report = made.report(folder)
    if compare:
        free = Wanted(asked, batch, cache=cache, chunk=chunk, snapshots=snapshots, speculate=speculate)
        sets = [(name, count) for name in COMPARED for count in (1, 2, 4, 8) if count <= made.most_ranks]
        report["sets"] = [Plan.make(demand, known(*each), free).summary(folder) for each in sets]
    if json:
        print_json(report)
    else:
        _show(made, report, verbose)
        if compare:
            _show_sets(report["sets"])
    if not made.fits:
        raise typer.Exit(NO_FIT)


def _show(made: "Plan", report: dict[str, Any], verbose: bool) -> None:
    w, machine = made.wanted, made.machine
    _print(fill(report["verdict"], width=80), "bold" if made.fits else "bold red")
    if report["per_gpu"] is not None:
        out.print()
        out.print(_table(made, report["per_gpu"], verbose))
    out.print()
    if made.fits:
        speed = report["speed"]
        rate = f"{_rate(speed['tokens_per_second'])} tokens/s for one user"
        _line("speed", f"{rate}, {speed['kind']} ({speed['how']})")
        if report["advice"]:
            _line("drafter", report["advice"])
    else:
        if report["advice"]:
            _line("would fit", report["advice"])
        _show_instead(report["instead"], w.context, w.batch, made.refusal is not None)
    if verbose:
        _line(
            "stored",
            f"{size(report['stored_bytes'])}, {size(report['active_bytes_per_token'])} read per token",
        )
        growth = f"{report['cache_bytes_per_token']:,.0f} B per further token"
        _line("one sequence", f"{size(report['sequence_bytes'])} of cache, {growth}")
        _line("bandwidth", f"{size(machine.bandwidth)}/s on each, {machine.source}")
        if report["read_bytes"]:
            read, most = size(report["read_bytes"]["batch"]), report["at_most_tokens_per_second"]["batch"]
            _line(f"batch {w.batch}", f"reads {read} per step: at most {_rate(most)} tokens/s together")


def _table(made: "Plan", held: dict[str, Any], verbose: bool) -> Table:
    w, machine = made.wanted, made.machine
    slots = f"{w.batch} sequence{'s' if w.batch > 1 else ''} of {w.context:,} tokens, {w.cache}"
    notes = {"weights": made.weights, "cache": slots, "prompts": f"steps of {made.chunk:,} tokens, at most"}
    if made.drafter_bytes:
        notes["weights"] += f", {size(made.drafter_bytes)} of them the drafter"
    notes["other"] = "tables, buffers, compiled kernels" if not machine.is_cpu else "tables"
    table = Table("per GPU" if machine.count > 1 else "memory", "", "", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    if verbose:
        rows = [(name, held[name], _PARTS[name]) for name in _PARTS]
    else:
        rows = [(name, sum(held[part] for part in parts), notes[name]) for name, parts in _ROWS.items()]
    for name, num_bytes, note in rows:
        if num_bytes:
            table.add_row(name, size(num_bytes), note)
    table.add_row("[bold]total[/]", f"[bold]{size(held['total'])}[/]", f"of {size(machine.memory_bytes)}")
    if held["host"]:
        there = (
            f"{size(machine.host_memory)} assumed" if machine.is_named else f"of {size(machine.host_memory)}"
        )
        table.add_row("host memory", size(held["host"]), f"experts, pinned; {there}")
    return table


def _show_instead(instead: dict[str, Any], context: int, batch: int, is_refused: bool) -> None:
    if instead["context"]:
        _line("would fit", f"a context of {instead['context']:,} with batch {batch}")
    if instead["batch"]:
        _line("would fit", f"a batch of {instead['batch']:,} with context {context:,}")
    if not is_refused and not instead["context"] and not instead["batch"]:
        _line("would fit", "no setting fits here")
    sets = [
        f"{each['count']} x {each['name']}"
        + (f" (and {size(host)} of host memory)" if (host := each["per_gpu"]["host"]) else "")
        for each in instead["gpus"]
    ]
    _line("enough memory", ", ".join(sets) or "no set of known GPUs")


def _show_sets(rows: list[dict[str, Any]]) -> None:
    table = Table("GPUs", "each holds", "host memory", "tokens/s", "", box=None, pad_edge=False)
    for column in table.columns[1:4]:
        column.justify = "right"
    for row in rows:
        rate, mark = "", "does not run" if row["refused"] else "does not fit"
        if (speed := row["speed"]) is not None:
            rate = _rate(speed["tokens_per_second"])
            mark = speed["kind"] + (", at most" if speed["how"].startswith("at most") else "")
        held = row["per_gpu"] or {"total": 0, "host": 0}
        total, host = (size(held[name]) if held[name] else "" for name in ("total", "host"))
        table.add_row(f"{row['count']} x {row['name']}", total, host, rate, mark)
    out.print()
    out.print(table)
    never = " and ".join({row["name"]: 0 for row in rows if not row["was_run_on"]})
    _print(fill(f"One user. Never tested: several GPUs, {never}. A plan of each says how it is known.", 80))


def _line(label: str, text: str) -> None:
    _print(fill(f"{label:<13} {text}", width=80, subsequent_indent=" " * 14))


def _print(text: str, style: str | None = None) -> None:
    out.print(text, style=style, markup=False, highlight=False)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
