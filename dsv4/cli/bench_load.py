"""`dsv4 bench load`: how fast weights come from files."""

from pathlib import Path
from typing import Annotated

import typer

from dsv4.cli.clock import seconds_since_start
from dsv4.cli.show import model_folder, out, print_json

EPILOG = """
[bold]Examples[/]
  dsv4 bench load ./DeepSeek-V4-Flash
  dsv4 bench load ./DeepSeek-V4-Flash --spill 128 --rounds 5
  dsv4 bench load ./DeepSeek-V4-Flash --ready
reads: threads fill buffers. copies: the GPU's copy engine empties them. load: the GPU checks and tiles.
"""


def load(
    model: Annotated[Path | None, typer.Argument(help="model folder; default: the embedded model")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    spill: Annotated[int, typer.Option(help="experts of every layer that stay in pinned host memory")] = 0,
    rounds: Annotated[int, typer.Option(help="warm runs, of which the fastest counts")] = 3,
    ready: Annotated[
        bool, typer.Option("--ready", help="instead: seconds from the program's start to a ready engine")
    ] = False,
) -> None:
    """Time raw reads, copies to the GPU and the loader, cold and warm. Ends in one JSON line."""
    import torch

    from dsv4.config import EngineConfig
    from dsv4.device import Device, one_thread
    from dsv4.lab.bench.load import Phases, Result, measure, settings
    from dsv4.weights.load import Checkpoint

    folder = model_folder(model)
    checkpoint = Checkpoint.open(folder)
    if ready:
        phases = Phases(seconds_since_start)
        phases.run(checkpoint, EngineConfig(device=device))
        print_json({"bench": "load", "model": str(folder), "ready": phases.as_dict()})
        return
    target = torch.device(Device.choose(device).torch_name)

    def show(one: Result) -> None:
        state = "cold" if one.is_cold else "warm"
        out.print(f"{state}  {one.what:<7} {one.rate / 1e9:7.2f} GB/s  {one.seconds:8.2f} s", highlight=False)

    with one_thread():
        found = measure(checkpoint, target, spill, rounds, show)
    print_json(
        {
            **{"bench": "load", "model": str(folder), "device": str(target), "spill": spill, **settings()},
            "results": [{**vars(one), "gb_per_second": round(one.rate / 1e9, 3)} for one in found],
        }
    )
