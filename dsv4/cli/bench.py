"""`dsv4 bench`: how fast a GPU decodes, reads prompts and runs single ops, beside what it could at best."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from dsv4.cli.experts import spill_rows
from dsv4.cli.show import bytes_bar, count_bar, err, model_folder, out, print_json, say, size

if TYPE_CHECKING:
    import torch

    from dsv4.engine.spill import Split
    from dsv4.lab.bench.decode import Wanted
    from dsv4.lab.bench.ops import Result
    from dsv4.lab.bench.profile import Profile
    from dsv4.lab.bench.subject import Subject
    from dsv4.model.bundle import Bundle

DECODE_EPILOG = """
[bold]Examples[/]

  dsv4 bench decode --synthetic flash --experts 192 --layout nvfp4 --context 4096

  dsv4 bench decode --synthetic flash --batch 8 --profile --save bench/results/h200.jsonl

  dsv4 bench decode --synthetic flash --experts 256 --layout official --spill auto --routing zipf:1

  dsv4 bench decode ./DeepSeek-V4-Flash --plot speed.png
"""

PREFILL_EPILOG = """
[bold]Examples[/]

  dsv4 bench prefill --synthetic flash --tokens 8192

  dsv4 bench prefill ./DeepSeek-V4-Flash --tokens 32768 --chunk 8192
"""
OPS_EPILOG = """
[bold]Examples[/]

  dsv4 bench ops

  dsv4 bench ops --preset flash --op attend --op decode --tokens 8192
"""

PLOT_EPILOG = """
[bold]Example[/]

  dsv4 bench plot out.jsonl speed.png
"""

SPILLED_CHUNK = 512  # prompt tokens of a step where experts spill: what longer ones need would hold experts

Model = Annotated[Path | None, typer.Argument(help="model folder; default: the embedded model")]
Synthetic = Annotated[
    str | None, typer.Option(metavar="NAME", help="random weights of flash, pro or tiny instead of a folder")
]
Experts = Annotated[
    int | None, typer.Option(help="of --synthetic: resident experts per layer; default: 192, or all if fewer")
]
Layers = Annotated[int | None, typer.Option(help="of --synthetic: the first N layers only")]
Layout = Annotated[
    str | None,
    typer.Option(
        help="of --synthetic: modelopt (FP8, experts NVFP4; default), official (FP8, experts MXFP4) or nvfp4"
    ),
]
Rounding = Annotated[str, typer.Option(help="inputs of quantised linears: a16, a8 or a4")]
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
    sweep: Annotated[
        bool, typer.Option("--sweep", help="measure what --plot draws; dsv4 bench plot draws it elsewhere")
    ] = False,
    beside_transformers: Annotated[
        bool, typer.Option("--beside-transformers", help="also Hugging Face's: random, same sizes, 4 layers")
    ] = False,
    spill: Annotated[
        str, typer.Option(help="experts in host memory: off, auto (what does not fit) or N of every layer")
    ] = "off",
    routing: Annotated[
        str | None,
        typer.Option(help="of --synthetic: choices of experts by uniform, zipf:S or a file of counts"),
    ] = None,
    activations: Rounding = "a16",
    save: Save = None,
) -> None:
    """Time decode steps, each one graph replay, then requests through the engine. Ends in one JSON line."""
    from dsv4.config import EngineConfig, preset
    from dsv4.errors import ConfigError
    from dsv4.lab import plot as plots
    from dsv4.lab.bench import beside
    from dsv4.lab.bench.decode import Wanted
    from dsv4.lab.bench.record import check_target

    wanted = Wanted(context, batch, steps, max_context)
    if beside_transformers:
        if synthetic is None:
            raise ConfigError("--beside-transformers compares random models; add --synthetic flash")
        layers = beside.LAYERS if layers is None else layers
        experts = min(beside.EXPERTS, preset(synthetic).num_experts) if experts is None else experts
        beside.check(context)
    EngineConfig(spill=spill)  # refuses other words
    subject = _subject(model, synthetic, experts, layers, layout, routing, activations)
    wanted.layout(subject.config)  # refuses what the model's positions do not allow
    if save is not None:
        check_target(save, subject.is_whole)
    if plot is not None:
        plots.check(plot)
    line = _decode(subject, wanted, profile, sweep or plot is not None, spill)
    if plot is not None:
        _draw(line, plot)
    if beside_transformers:
        line |= _beside(subject, wanted, line)
    _finish(line, save)


def _subject(
    model: Path | None,
    name: str | None,
    experts: int | None,
    layers: int | None,
    layout: str | None,
    routing: str | None = None,
    activations: str = "a16",
) -> "Subject":
    from dsv4.config import EngineConfig
    from dsv4.lab.bench.subject import choose

    found = choose(model_folder(model) if name is None else model, name, experts, layers, layout, routing)
    return replace(found, activations=EngineConfig(activations=activations).activations)  # type: ignore[arg-type]


def _decode(subject: "Subject", wanted: "Wanted", profiled: bool, swept: bool, spill: str) -> dict[str, Any]:
    import torch

    from dsv4.engine.settings import GPU_CHUNK
    from dsv4.lab.bench.ceiling import gpu, measure_host_read, measure_read
    from dsv4.lab.bench.decode import Session, figures, spill_figures
    from dsv4.lab.bench.engine import speeds
    from dsv4.lab.bench.profile import profile
    from dsv4.lab.bench.subject import Reads, check_fits, other_bytes

    device = gpu()
    layout = wanted.layout(subject.config)
    free, _ = torch.cuda.mem_get_info(device)
    # An engine with its prompts comes after the bare steps, and experts that spill leave room for it.
    chunk = GPU_CHUNK if spill == "off" else SPILLED_CHUNK
    split = subject.split(spill, other_bytes(layout, wanted.rows, min(wanted.context, chunk)), free)
    if split is None:
        check_fits(subject, other_bytes(layout, wanted.rows), free)
    with torch.inference_mode():
        with err.status("measuring the read ceiling"):
            ceiling = measure_read(device)
            host_rate = measure_host_read(device) if split is not None else 0.0
        bundle = _load(subject, device, split)
        with err.status("compiling, filling the cache, recording the graph"):
            session = Session(bundle, wanted, device)
        with err.status("decoding"):
            timing = session.time()
        reads = Reads.of(bundle.weights.tensors, subject.config.num_layers)
        line = {"bench": "decode", **subject.facts(), **figures(timing, wanted, layout, reads, ceiling)}
        if split is not None:
            line["spill"] = spill_figures(timing, reads, split, line["read_bytes"], host_rate)
        _show_decode(line)
        if profiled:
            found = profile(session)
            _show_profile(found)
            line["profile"] = found.as_dict()
        line |= _machine(device)
        del session
        with err.status("decoding through the engine"):
            line["engine"] = speeds(bundle, wanted.batch, wanted.context, wanted.steps, timing.median, chunk)
        _show_engine(line["engine"])
        if swept:
            line |= _sweep(bundle, wanted, ceiling, device)
    return line


def _sweep(bundle: "Bundle", wanted: "Wanted", ceiling: float, device: "torch.device") -> dict[str, Any]:
    from dsv4.lab.bench.sweep import points, series, sweep

    lines: list[dict[str, Any]] = []
    total = len(points(wanted, bundle.config.max_positions))
    with count_bar("decoding") as update:
        for one in sweep(bundle, wanted, ceiling, device):
            lines.append(one)
            update(len(lines), total)
    out.print("\nover context and batch", style="bold")
    table = Table("context", "batch", "tokens/s", "ms per token", "share", box=None, pad_edge=False)
    for one in lines:
        if "left_out" in one:
            table.add_row(f"{one['context']:,}", str(one["batch"]), f"[yellow]left out: {one['left_out']}[/]")
        else:
            cells = (f"{one['tokens_per_second']:,.1f}", f"{one['ms_per_token']:.3f}", f"{one['share']:.1%}")
            table.add_row(f"{one['context']:,}", str(one["batch"]), *cells)
    out.print(table)
    return series(lines, wanted)


def _draw(line: dict[str, Any], path: Path) -> None:
    from dsv4.lab.bench.plot import draw_speed

    when = f"{line['device_name']}, {line['date'][:10]}; written above: share of the read ceiling"
    draw_speed(path, line["over_context"], line["over_batch"], f"Decoding {_title(line)}", when)


def plot(
    line: Annotated[Path, typer.Argument(help="file whose last line dsv4 bench decode --sweep printed")],
    picture: Annotated[Path, typer.Argument(help="what to draw: .png, .svg or .pdf")],
) -> None:
    """Draw speed over context and over batch from a run on another machine."""
    from dsv4.lab.bench.record import read_sweep

    _draw(read_sweep(line), picture)


def _beside(subject: "Subject", wanted: "Wanted", line: dict[str, Any]) -> dict[str, Any]:
    """Theirs after ours, with nothing of ours left in the GPU's memory."""
    import gc

    import torch

    from dsv4.lab.bench import beside
    from dsv4.lab.bench.ceiling import gpu

    gc.collect()
    torch.cuda.empty_cache()
    device = gpu()
    beside.check_fits(subject.config, torch.cuda.mem_get_info(device)[0])
    with err.status("decoding with Transformers"):
        theirs = beside.measure(subject.config, wanted.context, wanted.batch, device)
    times = theirs["ms_per_token"] / line["ms_per_token"]
    _table(
        f"\nbeside Transformers {theirs['version']}: {line['layers']} layers, {line['experts']} experts",
        [
            ("theirs", f"{theirs['ms_per_token']:.3f} ms", "per token, bfloat16, eager"),
            (
                "ours",
                f"{line['ms_per_token']:.3f} ms",
                f"per token, {line['layout']}: {times:.1f} times as fast",
            ),
        ],
    )
    return {"transformers": theirs, "times_as_fast": round(times, 2)}


def prefill(
    model: Model = None,
    synthetic: Synthetic = None,
    experts: Experts = None,
    layers: Layers = None,
    layout: Layout = None,
    tokens: Annotated[int, typer.Option(help="length of the prompt")] = 8192,
    chunk: Annotated[int, typer.Option(help="prompt tokens processed per step")] = 8192,
    context: Annotated[int, typer.Option(help="tokens before the prompt, filled synthetically")] = 0,
    rounds: Annotated[int, typer.Option(help="how often the prompt is timed")] = 3,
    activations: Rounding = "a16",
    save: Save = None,
) -> None:
    """Time a prompt through the ops' GPU backends. The last line is one JSON object."""
    import torch

    from dsv4.lab.bench.ceiling import gpu, measure_matmul
    from dsv4.lab.bench.prefill import Wanted, figures, measure
    from dsv4.lab.bench.record import check_target
    from dsv4.lab.bench.subject import check_fits

    wanted = Wanted(tokens, chunk, context, rounds)
    subject = _subject(model, synthetic, experts, layers, layout, activations=activations)
    others = wanted.other_bytes(subject.config)
    if save is not None:
        check_target(save, subject.is_whole)
    device = gpu()
    check_fits(subject, others, torch.cuda.mem_get_info(device)[0])
    with torch.inference_mode():
        with err.status("measuring a matrix product"):
            matmul = measure_matmul(device)
        bundle = _load(subject, device)
        with err.status("reading the prompt"):
            times = measure(bundle, wanted, device)
    line = {"bench": "prefill", **subject.facts(), **figures(times, wanted, subject.config, matmul)}
    _table(
        f"prefill: {_title(line)}, {tokens:,} tokens after {context:,}, chunks of {chunk:,}",
        [
            ("prompt", f"{line['ms']:,.1f} ms", f"median of {rounds}, slowest {line['ms_slowest']:,.1f} ms"),
            ("speed", f"{line['tokens_per_second']:,.0f} tokens/s", ""),
            ("arithmetic", f"{line['tflops']:,.1f} TFLOP/s", "of the products the prompt needs"),
            (
                *("share", f"{line['matmul_share']:.1%}"),
                f"of {line['matmul_tflops']:,.0f} TFLOP/s: a BF16 product of 8192 x 8192 x 8192, just now",
            ),
        ],
    )
    _finish({**line, **_machine(device)}, save)


def ops(
    preset: Annotated[
        list[str] | None, typer.Option(help="sizes of flash or pro; repeatable; default: both")
    ] = None,
    op: Annotated[
        list[str] | None, typer.Option(help="only this op, or decode (a step's launches); repeatable")
    ] = None,
    tokens: Annotated[int, typer.Option(help="rows of each call")] = 512,
    experts: Annotated[int, typer.Option(help="experts of a layer that are made")] = 16,
    context: Annotated[int, typer.Option(help="tokens that queries look back on")] = 8192,
    layout: Annotated[str, typer.Option(help="modelopt or nvfp4")] = "modelopt",
    save: Save = None,
) -> None:
    """Time every op's backends that agree with the reference on a few rows; exit code 1 if one does not."""
    import torch

    from dsv4.lab.bench.ceiling import gpu, measure_matmul, measure_read
    from dsv4.lab.bench.ops import PRESETS, Wished, check_memory, measure
    from dsv4.lab.bench.record import check_target

    wished = Wished(tuple(preset or PRESETS), tuple(op or ()), tokens, experts, context, layout)
    if save is not None:
        check_target(save, is_whole=True)
    device = gpu()
    check_memory(wished, torch.cuda.mem_get_info(device)[0])
    results = []
    with torch.inference_mode():
        with err.status("measuring the ceilings"):
            read, matmul = measure_read(device), measure_matmul(device)
        out.print(f"ops: {tokens} rows, context {context:,}, {experts} experts, {layout}", style="bold")
        out.print(f"{'model':6} {'op':24} {'backend':8} {'case':42} {'µs':>12} {'floor µs':>9} {'share':>6}")
        for result in measure(wished, read, matmul, device):
            results.append(result)
            _show_result(result)
    line = {
        **{"bench": "ops", "models": list(wished.presets), "tokens": tokens, "experts": experts},
        **{"context": context, "layout": layout, "ceiling_gb_per_second": round(read / 1e9, 1)},
        "matmul_tflops": round(matmul / 1e12, 1),
        "refused": sum(bool(result.refused) for result in results),
        "results": [result.as_dict() for result in results],
    }
    _finish({**line, **_machine(device)}, save)
    if line["refused"]:
        raise typer.Exit(1)


def _show_result(result: "Result") -> None:
    what = f"{result.model:6} {result.op:24} {result.backend:8} {result.name:42}"
    if result.refused or result.us is None:
        out.print(f"{what} [bold red]not timed[/]: {escape(result.refused)}")
        return
    floor = result.floor_us
    share = f"{floor:9.1f} {floor / result.us:6.1%} of {result.bound}" if floor else f"{'':16} {result.bound}"
    out.print(f"{what} {result.us:12,.1f} {share}", markup=False)


def _load(subject: "Subject", device: "torch.device", split: "Split | None" = None) -> "Bundle":
    if subject.checkpoint is None:
        with err.status(f"making {size(subject.weight_bytes)} of weights"):
            return subject.bundle(device, split=split)
    with bytes_bar(f"loading {subject.title}") as update:
        return subject.bundle(device, update, split)


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
    sizes = f"{line['layers']} layers, {line['experts']} experts"
    return f"{line['model']}, {line['layout']}, {line.get('activations', 'a16')}, {sizes}, {kind}"


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
            ("speed", f"{line['tokens_per_second']:,.1f} tokens/s", "the bare step, all sequences together"),
            ("read", size(line["read_bytes"]), f"per step: {parts}"),
            (
                "rate",
                f"{line['gb_per_second']:,.0f} GB/s",
                f"of {line['ceiling_gb_per_second']:,.0f} GB/s read at best, just now",
            ),
            ("share", f"{line['share']:.1%}", "of the read ceiling"),
            ("kernels", str(line["kernels_per_step"]), "per step"),
            *spill_rows(line.get("spill")),
        ],
    )


def _show_engine(found: dict[str, Any]) -> None:
    """What a user gets."""
    title = f"\nthrough the engine, {found['context']:,} tokens before"
    if "left_out" in found:
        say("note", "yellow", f"{title.strip()}: left out, {found['left_out']}")
        return
    kinds = [kind for kind in found if f"{kind}_share" in found]
    _table(
        title,
        [
            (kind, f"{found[kind]:,.1f} tokens/s", f"{found[f'{kind}_share']:.1%} of the bare step's")
            for kind in kinds
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
    rows += [("all of a kind", kind, share) for kind, share in found.kinds.items()]
    for name, kind, share in rows:
        both = share.busy_us + share.gap_us
        table.add_row(
            *(escape(name), kind, f"{share.count:g} x", f"{share.busy_us / share.count:.2f}"),
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
    group.command(epilog=PREFILL_EPILOG)(prefill)
    group.command(epilog=OPS_EPILOG)(ops)
    group.command(epilog=PLOT_EPILOG)(plot)
    app.add_typer(group, name="bench")
