"""Options shared by commands: every field of EngineConfig becomes a flag; a command gets the config."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from dsv4.config import EngineConfig
from dsv4.errors import ConfigError

# In `--help`, below the command's own options: most users need none of these.
PANEL = "Engine options"
_HELP = {
    "device": "auto, cpu, cuda or cuda:N",
    "activations": "inputs of quantised linears: a16 (unrounded), a8 (FP8, as the official code), a4 (NVFP4)",
    "compute_dtype": "auto, float32 or bfloat16",
    "qat": "on: the rounding points the model was trained with; off: none of them",
    "cache": "key/value cache: auto, fp8 (lossless with qat on), bf16 or f32",
    "weights": "in memory: auto, dense (decoded once) or packed (as stored, slower on a CPU)",
    "head": "output matrix: stored, or nvfp4 (rounded at load: a third of the bytes, other probabilities)",
    "max_context": "tokens one sequence may reach; sizes the cache",
    "max_batch": "sequences that run at the same time",
    "chunk": "prompt tokens processed per step; default: 512 on a CPU, 4096 on a GPU",
    "max_stall_ms": "how long a step may take that reads a prompt while others wait for a token, if it can",
    "threads": "CPU threads; default: what suits the model's size",
    "gpus": "several GPUs that share the model: how many, or which, e.g. 2 or 0,1",
    "ranks": "processes on a CPU that share the model: to try what several GPUs do",
    "expert_parallel": "ranks have whole experts each, not a part of each",
    "rank_seconds": "how long ranks wait for one another before all of them are ended",
    "no_graph": "on a GPU, launch a step's kernels one by one: the same tokens, slower, for debugging",
    "no_overlap": "on a GPU, overlap no kernels of a step (no PDL): the same tokens, slower, for debugging",
    "prefix_snapshots": "places from which a prompt with a known beginning can go on; 0: no prefix cache",
    "spill": "experts in pinned host memory: off, auto (what does not fit on the GPU) or N of every layer",
    "swap_share": "of PCIe's bandwidth, for experts that change places as they become hot or cold; 0: none",
    "expert_memory": "bytes of GPU memory that experts may take; default: all that is left",
    "prefix_dir": "a folder for the prefix cache, which then survives restarts; it holds traces of prompts",
    "prefix_dir_bytes": "what that folder may take; the least recently used files go first",
    "drafts": "tokens the draft block proposes for each step, 0 to 3 (try 1): the same answer, on a CPU only",
    "cache_pages": "pages of the cache, one per 256 tokens; default: enough for max-batch x max-context",
}


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Around imports of what an extra of the package installs."""
    try:
        yield
    except ModuleNotFoundError as error:
        why = f"{error.name} is not installed; {what} needs it: pip install 'dsv4[{extra}]'"
        raise ConfigError(why) from None


def check_positive(**options: int | None) -> None:
    """Numbers that were given, by the names of their options."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, expected 1 or more")


def check_ray(is_asked: bool, **options: float | None) -> None:
    """Numbers that only replicas on Ray have, by the names of their options."""
    for name, value in options.items():
        if value and not is_asked:
            raise ConfigError(f"--{name.replace('_', '-')} goes with --ray; give both, or leave it out")


def show_help(context: typer.Context) -> None:
    """What a group does that is called without a command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def add_command(group: typer.Typer, command: Callable[..., None], epilog: str) -> None:
    """`epilog`: what --help ends with, a paragraph per line; one that ends in a backslash goes on."""
    group.command(epilog=epilog.replace("\n", "\n\n").replace("\\\n\n", "\n"))(command)


def engine_options(command: Callable[..., None], **defaults: Any) -> Callable[..., None]:
    """Give a command all engine flags; its parameter `config` becomes the EngineConfig made from them."""
    # Which words a field allows is EngineConfig's to say, not the parser's.
    types = get_type_hints(EngineConfig) | {"activations": str}
    flags = []
    for field in fields(EngineConfig):
        if field.name == "ops":
            option = typer.Option(
                "--op",
                metavar="OP=BACKEND",
                help="backend of an op, or a module with its functions; repeatable",
                rich_help_panel=PANEL,
            )
            kind, default = Annotated[list[str], option], field.default
        else:
            # A switch that is off by default needs no opposite.
            names = (f"--{field.name.replace('_', '-')}",) if field.default is False else ()
            option = typer.Option(*names, help=_HELP[field.name], rich_help_panel=PANEL)
            kind = Annotated[types[field.name], option]
            default = defaults.get(field.name, field.default)
        flags.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        )
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "config"]

    @wraps(command)
    def wrapper(**given: Any) -> None:
        values = {flag.name: given.pop(flag.name) for flag in flags}
        values["ops"] = tuple(_split(text) for text in values["ops"])
        command(config=EngineConfig(**values), **given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + flags
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return wrapper


def _split(text: str) -> tuple[str, str]:
    name, equals, backend = text.partition("=")
    if not (name and equals and backend):
        raise ConfigError(f"--op {text!r}: expected OP=BACKEND, for example --op attention=cpu")
    return name, backend


def numbers(name: str, text: str) -> list[int]:
    """An option that takes several numbers: `1,8`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 9 for part in parts):
        raise ConfigError(f"{name} is {text!r}, expected a number, or several as in 1,8")
    return [int(part) for part in parts]
