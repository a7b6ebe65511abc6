"""`dsv4 bench`: how fast a GPU decodes and reads prompts, beside what it could at best."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4.cli import bench_load, bench_show
from dsv4.cli.options import add_command, numbers, show_help
from dsv4.cli.show import bytes_bar, err, model_folder, print_json, size

if TYPE_CHECKING:
    import torch

    from dsv4.engine.spill import Split
    from dsv4.lab.bench.decode import Wanted
    from dsv4.lab.bench.subject import Subject
    from dsv4.model.bundle import Bundle

DECODE_EPILOG = """
[bold]Examples[/]
  dsv4 bench decode --synthetic flash --experts 192 --layout nvfp4 --context 4096
  dsv4 bench decode --synthetic flash --batch 8 --profile --save h200.jsonl
  dsv4 bench decode --synthetic flash --experts 256 --layout official --spill auto --routing uniform,zipf:1
  dsv4 bench decode ./DeepSeek-V4-Flash --batch 1,8
"""

PREFILL_EPILOG = """
[bold]Examples[/]
  dsv4 bench prefill --synthetic flash --tokens 8192
  dsv4 bench prefill ./DeepSeek-V4-Flash --tokens 32768 --chunk 8192
  dsv4 bench prefill --synthetic flash --experts 256 --layout official --spill auto
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
    spill: Spill = "off",
    routing: Routing = None,
    bare: Annotated[bool, typer.Option("--bare", help="steps alone, nothing through the engine")] = False,
    activations: Rounding = "a16",
    save: Save = None,
) -> None:
    """Time decode steps, each one graph replay, then requests through the engine. Ends in one JSON line for
    each batch and routing."""
    from dsv4.config import EngineConfig
    from dsv4.lab.bench.decode import Wanted
    from dsv4.lab.bench.record import check_target

    batches, laws = numbers("batch", batch), [None] if routing is None else routing.split(",")
    runs = [(law, Wanted(context, number, steps, max_context)) for law in laws for number in batches]
    EngineConfig(spill=spill)  # refuses other words
    for law in reversed(laws):  # each is refused if it is none
        subject = _subject(model, synthetic, experts, layers, layout, law, activations)
    for _, wanted in runs:
        wanted.layout(subject.config)  # refuses what the model's positions do not allow
    if save is not None:
        check_target(save, subject.is_whole)
    for line in _decode(subject, runs, profile, spill, bare):
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
    subject: "Subject", runs: "list[tuple[str | None, Wanted]]", profiled: bool, spill: str, bare: bool
) -> list[dict[str, Any]]:
    """A line for each law of routing and what is wanted of it; the weights are made once."""
    import torch

    from dsv4.lab.bench.ceiling import gpu, measure_read
    from dsv4.lab.bench.decode import divide
    from dsv4.lab.bench.engine import speeds
    from dsv4.lab.bench.subject import check_kernels

    device = gpu()
    check_kernels(subject.config, device, max(w.layout(subject.config).max_context for _, w in runs))
    free, _ = torch.cuda.mem_get_info(device)
    split = divide(subject, max((w for _, w in runs), key=lambda w: w.batch), spill, free)
    lines = []
    with torch.inference_mode():
        with err.status("measuring the read ceiling"):
            ceiling = measure_read(device)
        began = time.perf_counter()
        bundle = _load(subject, device, split)
        made = {"load_seconds": round(time.perf_counter() - began, 1)}
        for routing, wanted in runs:
            if routing is not None and routing != subject.routing:
                subject = subject.reroute(bundle.weights, split, routing)
            line = _one(subject, bundle, wanted, split, ceiling, profiled, device) | made
            if not bare:
                with err.status("decoding through the engine"):
                    line["engine"] = speeds(bundle, wanted, line["ms_per_token"])
                bench_show.engine(line["engine"])
            lines.append(line)
    return lines


def _one(
    subject: "Subject",
    bundle: "Bundle",
    wanted: "Wanted",
    split: "Split | None",
    ceiling: float,
    profiled: bool,
    device: "torch.device",
) -> dict[str, Any]:
    """Bare steps. `ceiling`: bytes per second that a kernel reads of GPU memory at best."""
    from dsv4.lab.bench.decode import Session, figures, release, spill_figures
    from dsv4.lab.bench.profile import profile
    from dsv4.lab.bench.subject import Reads

    release()
    with err.status("compiling, filling the cache, recording the graph"):
        session = Session(bundle, wanted, device)
    with err.status("decoding"):
        timing = session.time()
    reads, layout = Reads.of(bundle.weights.tensors, subject.config.num_layers), wanted.layout(subject.config)
    line = {"bench": "decode", **subject.facts(), **figures(timing, wanted, layout, reads, ceiling)}
    if split is not None:
        line["spill"] = spill_figures(timing, reads, split)
    bench_show.decode(line)
    if profiled:
        found = profile(session)
        bench_show.profile(found)
        line["profile"] = found.as_dict()
    return {**line, **machine_of(device)}


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
    from dsv4.lab.bench.prefill import Wanted, figures, reader, spill_figures
    from dsv4.lab.bench.record import check_target
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
            times = reader(bundle, wanted, device)()
    line = {"bench": "prefill", **subject.facts(), **figures(times, wanted, subject.config, matmul)}
    if split is not None:
        line["spill"] = spill_figures(split, line["ms"] / 1e3, -(-tokens // chunk))
    bench_show.prefill(line)
    finish({**line, **machine_of(device)}, save)


def _load(subject: "Subject", device: "torch.device", split: "Split | None" = None) -> "Bundle":
    if subject.checkpoint is None:
        with err.status(f"making {size(subject.weight_bytes)} of weights"):
            return subject.bundle(device, split=split)
    with bytes_bar(f"loading {subject.title}") as update:
        return subject.bundle(device, update, split)


def machine_of(device: "torch.device") -> dict[str, Any]:
    from dsv4.lab.bench.record import command, machine, run

    return {**machine(device), **run(command("dsv4", sys.argv[1:]))}


def finish(line: dict[str, Any], save: Path | None) -> None:
    """The machine, then the last line; kept where asked for."""
    from dsv4.lab.bench.record import append

    bench_show.machine(line)
    print_json(line)
    if save is not None:
        append(save, line)


group = typer.Typer(
    help="Measure speed: decoding and prefill on a GPU, loading anywhere.",
    callback=show_help,
    invoke_without_command=True,
    rich_markup_mode="rich",
)
add_command(group, decode, DECODE_EPILOG)
add_command(group, prefill, PREFILL_EPILOG)
add_command(group, bench_load.load, bench_load.EPILOG)
