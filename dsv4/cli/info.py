"""`dsv4 info`: this machine, what would be chosen on it, and why."""

import platform
from dataclasses import asdict
from typing import Annotated

import typer

from dsv4 import __version__
from dsv4.cli.show import out, print_json, size

EPILOG = """
[bold]Examples[/]
  dsv4 info
  dsv4 info --device cuda --json
"""


def info(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show the machine, the versions, and which backend each op gets."""
    import torch

    from dsv4.device import Device
    from dsv4.ops import IMPLEMENTATIONS, Ops

    chosen = Device.choose(device)
    ops = Ops.choose(chosen.kind).names()
    facts = {
        "dsv4": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": chosen.torch_name,
        "device_name": chosen.name,
        "why": chosen.why,
        "memory_bytes": chosen.memory_bytes,
        "threads": torch.get_num_threads(),
        "ops": ops,
    }
    if chosen.kind == "cuda":
        from dsv4.kernels.common.architectures import capability, standing

        facts["kernels"] = standing(capability(torch.device(chosen.torch_name)))
    exact = None
    if chosen.kind == "cpu":
        from dsv4.config import ModelConfig
        from dsv4.engine.memory import DEFAULT_CONTEXT
        from dsv4.lab.doctor.exact import rejections, summary
        from dsv4.model.exact import settle_exact
        from dsv4.models import embedded

        # The embedded model, which runs on one thread.
        torch.set_num_threads(1)
        exact = settle_exact(ModelConfig.load(embedded()), 1, DEFAULT_CONTEXT, torch.device("cpu"), 1)
        facts["exact"] = asdict(exact)
    if json:
        print_json(facts)
        return
    out.print(f"dsv4 {__version__}, Python {facts['python']}, torch {facts['torch']}")
    out.print(f"device   {chosen.torch_name} ({chosen.name}): {chosen.why}")
    out.print(f"memory   {size(chosen.memory_bytes)} free, {facts['threads']} threads")
    if "kernels" in facts:
        out.print(f"kernels  {facts['kernels']}")
    out.print("ops")
    for op, backend in ops.items():
        slow = (
            "  [yellow](slow: no kernel for this GPU yet)[/]"
            if chosen.kind != "cpu" and backend == "ref"
            else ""
        )
        out.print(f"  {op:<9} {backend:<6} of {', '.join(IMPLEMENTATIONS[op])}{slow}")

    if exact is not None:
        out.print("rows      (embedded model, 1 thread)")
        for line in (*summary(exact).split("; "), *rejections(exact.products), *exact.notes):
            out.print(f"  {line}")
