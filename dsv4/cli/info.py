"""`dsv4 info`: this machine, what would be chosen on it, and why."""

import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated, Any

import typer

from dsv4 import __version__
from dsv4.cli.show import out, print_json, size
from dsv4.device import Device, available_memory, cpu_name, driver, gpu_names, usable_cores

EPILOG = """
[bold]Examples[/]
  dsv4 info
  dsv4 info --brief
  dsv4 info --device cuda --json
"""


def info(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    brief: Annotated[bool, typer.Option("--brief", help="versions and the machine only, at once")] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show the machine, the versions, and which backend each op gets."""
    facts: dict[str, Any] = {
        **{"dsv4": __version__, "python": platform.python_version(), "torch": version("torch")},
        **{"cpu": cpu_name(), "cores": usable_cores(), "gpus": gpu_names(), "driver": driver()},
        "memory_bytes": available_memory(),
    }
    if brief and json:
        print_json(facts)
    elif brief:
        gpus = f"{', '.join(facts['gpus'])} ({facts['driver']})" if facts["gpus"] else "none"
        _show_versions(facts)
        out.print(f"CPU      {facts['cpu']}, {facts['cores']} cores, {size(facts['memory_bytes'])} free")
        out.print(f"GPUs     {gpus}")
    if brief:
        return
    import torch

    from dsv4.ops import IMPLEMENTATIONS, Ops

    chosen = Device.choose(device)
    ops = Ops.choose(chosen.kind).names()
    facts |= {
        "torch": torch.__version__,
        "device": chosen.torch_name,
        "device_name": chosen.name,
        "why": chosen.why,
        "memory_bytes": chosen.memory_bytes,
        "threads": torch.get_num_threads(),
        "ops": ops,
    }
    if chosen.kind == "cuda":
        from dsv4.gpu.architectures import capability, standing

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
    _show_versions(facts)
    out.print(f"device   {chosen.torch_name} ({chosen.name}): {chosen.why}")
    out.print(f"memory   {size(chosen.memory_bytes)} free, {facts['threads']} threads")
    if "kernels" in facts:
        out.print(f"kernels  {facts['kernels']}")
    out.print("ops")
    for op, backend in ops.items():
        slow = (
            "  [yellow](slow: no kernel for this GPU yet)[/]"
            if chosen.kind != "cpu" and backend == "cpu"
            else ""
        )
        out.print(f"  {op:<9} {backend:<6} of {', '.join(IMPLEMENTATIONS[op])}{slow}")

    if exact is not None:
        out.print("rows      (embedded model, 1 thread)")
        for line in (*summary(exact).split("; "), *rejections(exact.products), *exact.notes):
            out.print(f"  {line}")


def _show_versions(facts: dict[str, Any]) -> None:
    out.print(f"dsv4 {__version__}, Python {facts['python']}, torch {facts['torch']}")
