"""`dsv4 bench`: how fast a GPU decodes, reads prompts and runs single ops, beside what it could at best."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dsv4.cli.show import bytes_bar, err, model_folder, out, print_json, say, size

if TYPE_CHECKING:
    import torch

    from dsv4.lab.bench.decode import Wanted
    from dsv4.lab.bench.profile import Profile
    from dsv4.lab.bench.subject import Subject
    from dsv4.model.bundle import Bundle

DECODE_EPILOG = """
[bold]Examples[/]

  dsv4 bench decode --synthetic flash --experts 192 --layout nvfp4 --context 4096

  dsv4 bench decode --synthetic flash --batch 8 --profile --save bench/results/h200.jsonl

  dsv4 bench decode ./DeepSeek-V4-Flash --plot speed.png
"""

Model = Annotated[Path | None, typer.Argument(help="model folder; default: the embedded model")]
Synthetic = Annotated[
    str | None, typer.Option(metavar="NAME", help="random weights of flash, pro or tiny instead of a folder")
]
Experts = Annotated[
    int | None, typer.Option(help="of --synthetic: resident experts per layer; default: 192, or all if fewer")
]
Layers = Annotated[int | None, typer.Option(help="of --synthetic: the first N layers only")]
Layout = Annotated[
    str | None, typer.Option(help="of --synthetic: modelopt (FP8 but for experts, default) or nvfp4")
]
Save = Annotated[
    Path | None, typer.Option(help="append the last line to this .jsonl file, for dsv4 plan --records")
]


def decode(
    model: Model = None,
    synthetic: Synthetic = None,
    experts: Experts = None,
    layers: Layers = None,
    layout: Layout = None,
    context: Annotated[
        int, typer.Option(help="tokens before the first; the cache is filled synthetically")
    ] = 4096,
    batch: Annotated[int, typer.Option(help="sequences that decode together, 1 to 32")] = 1,
    steps: Annotated[int, typer.Option(help="tokens of each sequence that are timed")] = 128,
    max_context: Annotated[
        int | None, typer.Option(help="tokens the cache is made for; default: as many as are needed")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="time per launch and layer kind, and gaps")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="draw speed over context (4k to 1M) and over batch (1 to 32)")
    ] = None,
    beside_transformers: Annotated[
        bool, typer.Option("--beside-transformers", help="also Hugging Face's, random, same sizes, 4 layers")
    ] = False,
    save: Save = None,
) -> None:
    """Time decode steps, each one graph replay. The last line is one JSON object."""
    from dsv4.lab.bench.decode import Wanted
    from dsv4.lab.bench.record import check_target
    from dsv4.lab.bench.subject import choose

    wanted = Wanted(context, batch, steps, max_context)
    folder = model_folder(model) if synthetic is None else model
    subject = choose(folder, synthetic, experts, layers, layout)
    wanted.layout(subject.config)  # refuses what the model's positions do not allow
    if save is not None:
        check_target(save, subject.is_whole)
    line = _decode(subject, wanted, profile)
    _finish(line, save)


def _decode(subject: "Subject", wanted: "Wanted", profiled: bool) -> dict[str, Any]:
    import torch

    from dsv4.lab.bench.ceiling import gpu, measure_read
    from dsv4.lab.bench.decode import Session, figures
    from dsv4.lab.bench.profile import profile
    from dsv4.lab.bench.subject import Reads, check_fits, other_bytes

    device = gpu()
    layout = wanted.layout(subject.config)
    free, _ = torch.cuda.mem_get_info(device)
    check_fits(subject, other_bytes(subject.config, layout, wanted.rows), free)
    with torch.inference_mode():
        with err.status("measuring the read ceiling"):
            ceiling = measure_read(device)
        bundle = _load(subject, device)
        with err.status("compiling, filling the cache, recording the graph"):
            session = Session(bundle, wanted, device)
        with err.status("decoding"):
            timing = session.time()
        reads = Reads.of(bundle.weights.tensors, subject.config.num_layers)
        line = {"bench": "decode", **subject.facts(), **figures(timing, wanted, layout, reads, ceiling)}
        _show_decode(line)
        if profiled:
            found = profile(session)
            _show_profile(found)
            line["profile"] = found.as_dict()
    return {**line, **_machine(device)}


def _load(subject: "Subject", device: "torch.device") -> "Bundle":
    if subject.checkpoint is None:
        with err.status(f"making {size(subject.weight_bytes)} of weights"):
            return subject.bundle(device)
    with bytes_bar(f"loading {subject.title}") as update:
        return subject.bundle(device, update)


def _machine(device: "torch.device") -> dict[str, Any]:
    from dsv4.lab.bench.record import machine, run

    return {**machine(device), **run(sys.argv[1:])}


def _finish(line: dict[str, Any], save: Path | None) -> None:
    """The machine, then the last line; kept where asked for."""
    from dsv4.lab.bench.record import append

    versions = f"torch {line['torch']}, triton {line['triton']}, CUDA {line['cuda']}, {line['driver']}"
    memory = f"{size(line['gpu_memory_bytes'])} of {size(line['gpu_memory_total_bytes'])} used"
    out.print(f"\n{line['device_name']}, {memory}; {versions}", markup=False)
    out.print(f"commit {line['commit'] or 'unknown'}, {line['date']}", markup=False)
    print_json(line)
    if save is not None:
        append(save, line)


def _title(line: dict[str, Any]) -> str:
    kind = "synthetic" if line["is_synthetic"] else "from its folder"
    return f"{line['model']}, {line['layout']}, {line['layers']} layers, {line['experts']} experts, {kind}"


def _table(title: str, rows: list[tuple[str, str, str]]) -> None:
    out.print(title, style="bold", markup=False)
    table = Table("", "", "", box=None, pad_edge=False, show_header=False)
    for name, value, note in rows:
        table.add_row(name, f"[bold]{value}[/]", f"[dim]{note}[/]")
    out.print(table)


def _show_decode(line: dict[str, Any]) -> None:
    experts = f"{line['distinct_experts']:g} distinct experts per layer"
    parts = f"weights {size(line['weight_bytes'])} ({experts}), cache {size(line['cache_bytes'])}"
    _table(
        f"decode: {_title(line)}, context {line['context']:,}, batch {line['batch']}",
        [
            (
                "per token",
                f"{line['ms_per_token']:.3f} ms",
                f"median of {line['steps']}, p99 {line['ms_per_token_p99']:.3f} ms",
            ),
            ("speed", f"{line['tokens_per_second']:,.1f} tokens/s", "all sequences together"),
            ("read", size(line["read_bytes"]), f"per step: {parts}"),
            (
                "rate",
                f"{line['gb_per_second']:,.0f} GB/s",
                f"of {line['ceiling_gb_per_second']:,.0f} GB/s read at best, just now",
            ),
            ("share", f"{line['share']:.1%}", "of the read ceiling"),
            ("kernels", str(line["kernels_per_step"]), "per step"),
        ],
    )


def _show_profile(found: "Profile") -> None:
    total = found.busy_us + found.gap_us
    if not found.is_named:
        say("note", "yellow", "there were more kernels than launches, so they are told by their own names")
    out.print(f"\nkernels {found.busy_us:,.0f} µs and gaps {found.gap_us:,.0f} µs per step", style="bold")
    table = Table(
        "launch", "layers", *("", "each µs", "gap µs", "ms per step", "share"), box=None, pad_edge=False
    )
    for column in table.columns[2:]:
        column.justify = "right"
    ordered = sorted(found.by_both.items(), key=lambda item: -item[1].busy_us - item[1].gap_us)
    rows = [(name, kind, share) for (name, kind), share in ordered]
    rows += [("[bold]all of a kind[/]", kind, share) for kind, share in found.kinds.items()]
    for name, kind, share in rows:
        both = share.busy_us + share.gap_us
        table.add_row(
            *(name, kind, f"{share.count:g} x", f"{share.busy_us / share.count:.2f}"),
            *(f"{share.gap_us / share.count:.2f}", f"{both / 1e3:.3f}", f"{both / total:.1%}"),
        )
    out.print(table)


def _help(context: typer.Context) -> None:
    """Measure speed on a GPU: decoding, prefill, single ops."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def register(app: typer.Typer) -> None:
    group = typer.Typer(rich_markup_mode="rich")
    group.callback(invoke_without_command=True)(_help)
    group.command(epilog=DECODE_EPILOG)(decode)
    app.add_typer(group, name="bench")
