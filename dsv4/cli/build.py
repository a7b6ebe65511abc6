"""`dsv4 build`: compile the CUDA kernels ahead of the first start."""

import time
from typing import Annotated

import typer

from dsv4.cli.show import count_bar, out, print_json, size
from dsv4.env import cache_folder
from dsv4.errors import ConfigError

EPILOG = """
[bold]Examples[/]
  dsv4 build
  dsv4 build --for h200 --for rtx-pro-6000
  XDG_CACHE_HOME=/cache dsv4 build --for sm_100a --json
No GPU is needed. Copy the folder that is printed to machines with the same dsv4 and torch: their first start
then compiles Triton's kernels only.
"""


def build(
    gpus: Annotated[
        list[str] | None,
        typer.Option("--for", help="h200, b200, rtx-pro-6000, sm_90a, ...; repeatable; default: this GPU"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Compile all CUDA kernels into the cache folder, for GPUs that need not be here."""
    import torch

    from dsv4.gpu.architectures import ARCHITECTURES, capability
    from dsv4.gpu.build import compile_all, compiler
    from dsv4.lab.gpus import capability_of

    if not gpus and not torch.cuda.is_available():
        raise ConfigError("no GPU is here; name the GPUs to compile for, as in dsv4 build --for h200")
    found = [capability_of(gpu) for gpu in gpus] if gpus else [capability(torch.device("cuda"))]
    using, start, files = compiler(), time.monotonic(), []
    for one in dict.fromkeys(found):
        name = ARCHITECTURES[one].name
        with count_bar(f"compiling for sm_{name}") as update:
            files += compile_all(name, update)
    num_bytes, seconds = sum(file.stat().st_size for file in files), time.monotonic() - start
    folder = cache_folder() / "kernels"
    if json:
        print_json(
            {
                **{"folder": str(folder), "files": [file.name for file in files], "bytes": num_bytes},
                **{"seconds": round(seconds, 2), "compiler": f"{using.name} {using.version}"},
            }
        )
        return
    by = f"{using.name} {using.version}, {seconds:.1f} s"
    out.print(f"{folder}: {len(files)} files, {size(num_bytes)} ({by})", markup=False)
