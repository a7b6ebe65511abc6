"""`dsv4 bench`: how fast a GPU decodes, reads prompts and runs single ops, beside what it could at best."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4.cli import bench_load, bench_show
from dsv4.cli.options import add_command, numbers, show_help
from dsv4.cli.show import bytes_bar, count_bar, err, model_folder, out, print_json, size

if TYPE_CHECKING:
    import torch

    from dsv4.engine.spill import Split
    from dsv4.lab.bench.decode import Wanted
    from dsv4.lab.bench.subject import Subject
    from dsv4.model.bundle import Bundle

DECODE_EPILOG = """
[bold]Examples[/]
  dsv4 bench decode --synthetic flash --experts 192 --layout nvfp4 --context 4096
  dsv4 bench decode --synthetic flash --batch 8 --profile --save bench/results/h200.jsonl
  dsv4 bench decode --synthetic flash --experts 256 --layout official --spill auto --routing uniform,zipf:1
  dsv4 bench decode ./DeepSeek-V4-Flash --plot speed.png
"""

PREFILL_EPILOG = """
[bold]Examples[/]
  dsv4 bench prefill --synthetic flash --tokens 8192
  dsv4 bench prefill ./DeepSeek-V4-Flash --tokens 32768 --chunk 8192
  dsv4 bench prefill --synthetic flash --experts 256 --layout official --spill auto
"""
OPS_EPILOG = """
[bold]Examples[/]
  dsv4 bench ops
  dsv4 bench ops --preset flash --op attention --op decode --tokens 8192
"""

PLOT_EPILOG = """
[bold]Example[/]
  dsv4 bench plot out.jsonl speed.png
"""
RANKS_EPILOG = """
[bold]Examples[/]
  dsv4 bench ranks flash --of 2 --layout nvfp4
  dsv4 bench ranks pro --of 8 --experts 384 --layout nvfp4
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
    str | None,
    typer.Option(
        help="of --synthetic: modelopt (FP8, experts NVFP4; default), official (FP8, experts MXFP4) or nvfp4"
    ),
]
Routing = Annotated[
    str | None,
    typer.Option(help="of --synthetic: experts by uniform, zipf:S or a file of counts; decode: several, a,b"),
]
Rounding = Annotated[str, typer.Option(help="inputs of quantised linears: a16, a8 or a4")]
Spill = Annotated[
    str, typer.Option(help="experts in host memory: off, auto (what does not fit) or N of every layer")
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
    batch: Annotated[
        str, typer.Option(help="sequences that decode together, 1 to 32; several measurements: 1,8")
    ] = "1",
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
    spill: Spill = "off",
    routing: Routing = None,
    bare: Annotated[bool, typer.Option("--bare", help="steps alone, nothing through the engine")] = False,
    activations: Rounding = "a16",
    save: Save = None,
) -> None:
    """Time decode steps, each one graph replay, then requests through the engine. Ends in one JSON line for
    each batch and routing."""
    from dsv4.config import EngineConfig, preset
    from dsv4.errors import ConfigError
    from dsv4.lab import plot as plots
    from dsv4.lab.bench import beside
    from dsv4.lab.bench.decode import Wanted
    from dsv4.lab.bench.record import check_target

    batches, laws = numbers("batch", batch), [None] if routing is None else routing.split(",")
    runs = [(law, Wanted(context, number, steps, max_context)) for law in laws for number in batches]
    if len(runs) > 1 and (sweep or plot is not None or beside_transformers):
        raise ConfigError("--sweep, --plot and --beside-transformers go with one --batch and one --routing")
    if beside_transformers:
        if synthetic is None:
            raise ConfigError("--beside-transformers compares random models; add --synthetic flash")
        layers = beside.LAYERS if layers is None else layers
        experts = min(beside.EXPERTS, preset(synthetic).num_experts) if experts is None else experts
        beside.check(context)
    EngineConfig(spill=spill)  # refuses other words
    for law in reversed(laws):  # each is refused if it is none
        subject = _subject(model, synthetic, experts, layers, layout, law, activations)
    for _, wanted in runs:
        wanted.layout(subject.config)  # refuses what the model's positions do not allow
    if save is not None:
        check_target(save, subject.is_whole)
    if plot is not None:
        plots.check(plot)
    lines = _decode(subject, runs, profile, sweep or plot is not None, spill, bare)
    if plot is not None:
        _draw(lines[0], plot)
    if beside_transformers:
        lines[0] |= _beside(subject, runs[0][1], lines[0])
    for line in lines:
        finish(line, save)


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


def _decode(
    subject: "Subject",
    runs: "list[tuple[str | None, Wanted]]",
    profiled: bool,
    swept: bool,
    spill: str,
    bare: bool,
) -> list[dict[str, Any]]:
    """A line for each law of routing and what is wanted of it; the weights are made once."""
    import torch

    from dsv4.lab.bench.ceiling import gpu, measure_host_read, measure_read
    from dsv4.lab.bench.engine import speeds
    from dsv4.lab.bench.spilled import divide
    from dsv4.lab.bench.subject import check_kernels

    device = gpu()
    check_kernels(subject.config, device, max(w.layout(subject.config).max_context for _, w in runs))
    free, _ = torch.cuda.mem_get_info(device)
    split = divide(subject, max((w for _, w in runs), key=lambda w: w.batch), spill, free)
    lines = []
    with torch.inference_mode():
        with err.status("measuring the read ceiling"):
            ceiling = measure_read(device)
            host_rate = measure_host_read(device) if split is not None else 0.0
        began = time.perf_counter()
        bundle = _load(subject, device, split)
        made = {"load_seconds": round(time.perf_counter() - began, 1)}
        for routing, wanted in runs:
            if routing is not None and routing != subject.routing:
                subject = subject.reroute(bundle.weights, split, routing)
            line = _one(subject, bundle, wanted, split, (ceiling, host_rate), profiled, device) | made
            if not bare:
                with err.status("decoding through the engine"):
                    line["engine"] = speeds(bundle, wanted, line["ms_per_token"])
                bench_show.engine(line["engine"])
            if swept:
                line |= _sweep(bundle, wanted, ceiling, device)
            lines.append(line)
    return lines


def _one(
    subject: "Subject",
    bundle: "Bundle",
    wanted: "Wanted",
    split: "Split | None",
    rates: tuple[float, float],
    profiled: bool,
    device: "torch.device",
) -> dict[str, Any]:
    """Bare steps. `rates`: bytes per second that a kernel reads of GPU and of host memory at best."""
    from dsv4.lab.bench.decode import Session, figures, release
    from dsv4.lab.bench.profile import profile
    from dsv4.lab.bench.spilled import spill_figures
    from dsv4.lab.bench.subject import Reads

    release()
    with err.status("compiling, filling the cache, recording the graph"):
        session = Session(bundle, wanted, device)
    with err.status("decoding"):
        timing = session.time()
    reads, layout = Reads.of(bundle.weights.tensors, subject.config.num_layers), wanted.layout(subject.config)
    line = {"bench": "decode", **subject.facts(), **figures(timing, wanted, layout, reads, rates[0])}
    if split is not None:
        line["spill"] = spill_figures(timing, reads, split, line["read_bytes"], rates)
    bench_show.decode(line)
    if profiled:
        found = profile(session)
        bench_show.profile(found)
        line["profile"] = found.as_dict()
    return {**line, **machine_of(device)}


def _sweep(bundle: "Bundle", wanted: "Wanted", ceiling: float, device: "torch.device") -> dict[str, Any]:
    from dsv4.lab.bench.sweep import points, series, sweep

    lines: list[dict[str, Any]] = []
    total = len(points(wanted, bundle.config.max_positions))
    with count_bar("decoding") as update:
        for one in sweep(bundle, wanted, ceiling, device):
            lines.append(one)
            update(len(lines), total)
    bench_show.sweep(lines)
    return series(lines, wanted)


def _draw(line: dict[str, Any], path: Path) -> None:
    from dsv4.lab.bench.plot import draw_speed

    when = f"{line['device_name']}, {line['date'][:10]}; written above: share of the read ceiling"
    title = f"Decoding {bench_show.title_of(line)}"
    draw_speed(path, line["over_context"], line["over_batch"], title, when)


def plot(
    line: Annotated[Path, typer.Argument(help="file whose last line dsv4 bench decode --sweep printed")],
    picture: Annotated[Path, typer.Argument(help="what to draw: .png, .svg or .pdf")],
) -> None:
    """Draw speed over context and over batch from a run on another machine."""
    from dsv4.lab.bench.record import read_sweep

    _draw(read_sweep(line), picture)


def _beside(subject: "Subject", wanted: "Wanted", line: dict[str, Any]) -> dict[str, Any]:
    """Theirs after ours, with nothing of ours left in the GPU's memory."""
    import torch

    from dsv4.lab.bench import beside
    from dsv4.lab.bench.ceiling import gpu
    from dsv4.lab.bench.decode import release

    release()
    device = gpu()
    beside.check_fits(subject.config, torch.cuda.mem_get_info(device)[0])
    with err.status("decoding with Transformers"):
        theirs = beside.measure(subject.config, wanted.context, wanted.batch, device)
    bench_show.beside(line, theirs)
    return {
        "transformers": theirs,
        "times_as_fast": round(theirs["ms_per_token"] / line["ms_per_token"], 2),
    }


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
    spill: Spill = "off",
    routing: Routing = None,
    activations: Rounding = "a16",
    save: Save = None,
) -> None:
    """Time a prompt through the ops' GPU backends. The last line is one JSON object."""
    import torch

    from dsv4.config import EngineConfig
    from dsv4.lab.bench.ceiling import gpu, measure_matmul
    from dsv4.lab.bench.prefill import Wanted, figures, measure
    from dsv4.lab.bench.record import check_target
    from dsv4.lab.bench.spilled import prompt_figures
    from dsv4.lab.bench.subject import check_fits, check_kernels

    wanted = Wanted(tokens, chunk, context, rounds)
    EngineConfig(spill=spill)  # refuses other words
    subject = _subject(model, synthetic, experts, layers, layout, routing, activations)
    others = wanted.other_bytes(subject.config)
    if save is not None:
        check_target(save, subject.is_whole)
    device = gpu()
    check_kernels(subject.config, device, wanted.layout(subject.config).max_context)
    free, _ = torch.cuda.mem_get_info(device)
    split = subject.split(spill, others, free)
    if split is None:
        check_fits(subject, others, free)
    with torch.inference_mode():
        with err.status("measuring a matrix product"):
            matmul = measure_matmul(device)
        bundle = _load(subject, device, split)
        with err.status("reading the prompt"):
            times, resident = measure(bundle, wanted, device)
    line = {"bench": "prefill", **subject.facts(), **figures(times, wanted, subject.config, matmul)}
    if split is not None:
        line["spill"] = prompt_figures(split, line["ms"] / 1e3, resident, -(-tokens // chunk))
    bench_show.prefill(line)
    finish({**line, **machine_of(device)}, save)


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
            bench_show.op(result)
    line = {
        **{"bench": "ops", "models": list(wished.presets), "tokens": tokens, "experts": experts},
        **{"context": context, "layout": layout, "ceiling_gb_per_second": round(read / 1e9, 1)},
        "matmul_tflops": round(matmul / 1e12, 1),
        "refused": sum(bool(result.refused) for result in results),
        "results": [result.as_dict() for result in results],
    }
    finish({**line, **machine_of(device)}, save)
    if line["refused"]:
        raise typer.Exit(1)


def ranks(
    name: Annotated[str, typer.Argument(help="flash, pro or tiny: random weights of these sizes")],
    of: Annotated[int, typer.Option(help="how many ranks there would be: 2, 4 or 8; 1: the whole model")],
    experts: Annotated[
        int | None, typer.Option(help="resident experts per layer; default: 192, or all if fewer")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="the first N layers only")] = None,
    layout: Annotated[str, typer.Option(help="modelopt, official or nvfp4")] = "modelopt",
    context: Annotated[int, typer.Option(help="tokens before the first")] = 4096,
    batch: Annotated[int, typer.Option(help="sequences that decode together, 1 to 32")] = 1,
    steps: Annotated[int, typer.Option(help="tokens of each sequence that are timed")] = 128,
) -> None:
    """Time the decode step of one rank: its share of the weights, every push and every wait, but its own
    memory answers in its peers' place; then the same step without its all-reduces. Ends in one JSON line."""
    import torch

    from dsv4.lab.bench.ceiling import gpu
    from dsv4.lab.bench.decode import Wanted
    from dsv4.lab.bench.ranks import measure
    from dsv4.lab.bench.subject import check_fits, check_kernels, other_bytes, synthetic

    wanted = Wanted(context, batch, steps)
    subject = synthetic(name, experts, layers, layout, ranks=of)
    layout_of_cache = wanted.layout(subject.config)
    device = gpu()
    check_kernels(subject.config, device, layout_of_cache.max_context, of)
    check_fits(subject, other_bytes(layout_of_cache, (wanted.rows,)), torch.cuda.mem_get_info(device)[0])
    with err.status(f"making {size(subject.weight_bytes)} of weights, compiling, decoding"):
        line = measure(subject, wanted, device)
    bench_show.ranks(line)
    finish({**line, **machine_of(device)}, None)


def _load(subject: "Subject", device: "torch.device", split: "Split | None" = None) -> "Bundle":
    if subject.checkpoint is None:
        with err.status(f"making {size(subject.weight_bytes)} of weights"):
            return subject.bundle(device, split=split)
    with bytes_bar(f"loading {subject.title}") as update:
        return subject.bundle(device, update, split)


def machine_of(device: "torch.device") -> dict[str, Any]:
    from dsv4.lab.bench.record import machine, run

    return {**machine(device), **run(sys.argv[1:])}


def finish(line: dict[str, Any], save: Path | None) -> None:
    """The machine, then the last line; kept where asked for."""
    from dsv4.lab.bench.record import append

    bench_show.machine(line)
    print_json(line)
    if save is not None:
        append(save, line)


group = typer.Typer(
    help="Measure speed on a GPU: decoding, prefill, single ops, one rank of several; loading anywhere.",
    callback=show_help,
    invoke_without_command=True,
    rich_markup_mode="rich",
)
add_command(group, decode, DECODE_EPILOG)
add_command(group, prefill, PREFILL_EPILOG)
add_command(group, ops, OPS_EPILOG)
add_command(group, plot, PLOT_EPILOG)
add_command(group, ranks, RANKS_EPILOG)
add_command(group, bench_load.load, bench_load.EPILOG)
