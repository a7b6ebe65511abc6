"""`dsv4 info`: this machine, what would be chosen on it, and why."""

import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from dsv4 import __version__
from dsv4.cli.show import model_folder, out, print_json, print_words, size
from dsv4.device import Device, available_memory, cpu_name, driver, gpu_names, usable_cores
from dsv4.models import embedded
from dsv4.text.generation import SamplingDefaults

EPILOG = """
[bold]Examples[/]
  dsv4 info
  dsv4 info ./DeepSeek-V4-Flash --verbose
  dsv4 info --brief
  dsv4 info --device cuda --json
"""
INDENT = 10


def info(
    model: Annotated[
        Path | None, typer.Argument(help="whose sampling defaults are shown; default: the embedded model")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    brief: Annotated[bool, typer.Option("--brief", help="versions and the machine only, at once")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="also every op's choices, and how a CPU multiplies rows")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show the machine, the versions, which backend each op gets, and a model's sampling defaults."""
    facts: dict[str, Any] = {
        **{"dsv4": __version__, "python": platform.python_version(), "torch": version("torch")},
        **{"cpu": cpu_name(), "cores": usable_cores(), "gpus": gpu_names(), "driver": driver()},
        "memory_bytes": available_memory(),
    }
    folder = embedded() if model is None else model_folder(model)
    facts["sampling_defaults"] = SamplingDefaults.load(folder).shown()
    if brief and json:
        print_json(facts)
    elif brief:
        gpus = f"{', '.join(facts['gpus'])} ({facts['driver']})" if facts["gpus"] else "none"
        _show_versions(facts)
        _show("CPU", f"{facts['cpu']}, {facts['cores']} cores, {size(facts['memory_bytes'])} free")
        _show("GPUs", gpus)
    if brief:
        return
    import torch

    from dsv4.ops import Ops

    chosen = Device.choose(device)
    facts |= {
        "torch": torch.__version__,
        "device": chosen.torch_name,
        "device_name": chosen.name,
        "why": chosen.why,
        "memory_bytes": chosen.memory_bytes,
        "threads": torch.get_num_threads(),
        "ops": Ops.choose(chosen.kind).names(),
    }
    if chosen.kind == "cuda":
        from dsv4.gpu.architectures import capability, standing

        facts["kernels"] = standing(capability(torch.device(chosen.torch_name)))
    exact = _exact() if chosen.kind == "cpu" and (json or verbose) else None
    if json:
        print_json(facts | ({"exact": asdict(exact)} if exact else {}))
        return
    _show_versions(facts)
    _show("device", f"{chosen.torch_name} ({chosen.name}): {chosen.why}")
    _show("memory", f"{size(chosen.memory_bytes)} free, {facts['threads']} threads")
    if "kernels" in facts:
        _show("kernels", facts["kernels"])
    _show_ops(facts["ops"], chosen.kind, verbose)
    usual = {name: value for name, value in facts["sampling_defaults"].items() if value not in (0, ())}
    words = ", ".join(f"{name} {value}" for name, value in usual.items() if name != "stop_ids")
    _show("sampling", f"{words} ({'embedded model' if model is None else folder.name})")
    if exact is not None:
        from dsv4.lab.doctor.exact import rejections, summary

        out.print("rows      (embedded model, 1 thread)")
        for line in (*summary(exact).split("; "), *rejections(exact.products), *exact.notes):
            print_words("  ", line, 2)


def _show(name: str, words: str) -> None:
    print_words(f"{name:<{INDENT}}", words, INDENT)


def _show_versions(facts: dict[str, Any]) -> None:
    out.print(f"dsv4 {__version__}, Python {facts['python']}, torch {facts['torch']}")


def _show_ops(chosen: dict[str, str], kind: str, verbose: bool) -> None:
    from dsv4.ops import IMPLEMENTATIONS

    slow = " (slow: no kernel for this GPU yet)"
    for backend in dict.fromkeys(chosen.values()):
        ops = [op for op, name in chosen.items() if name == backend]
        note = slow if kind != "cpu" and backend == "cpu" else ""
        if not verbose:
            _show("ops", f"{backend}{note}: {', '.join(ops)}")
        for op in ops if verbose else ():
            _show("ops", f"{op:<9} {backend:<6} of {', '.join(IMPLEMENTATIONS[op])}{note}")


def _exact() -> Any:
    """How the embedded model's rows are multiplied here, on one thread."""
    import torch

    from dsv4.config import ModelConfig
    from dsv4.engine.memory import DEFAULT_CONTEXT
    from dsv4.model.exact import settle_exact

    torch.set_num_threads(1)
    return settle_exact(ModelConfig.load(embedded()), 1, DEFAULT_CONTEXT, torch.device("cpu"), 1)
