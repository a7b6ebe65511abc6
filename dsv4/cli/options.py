"""Options shared by commands: every field of EngineConfig becomes a flag; a command gets the config."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.models import ArgumentInfo

from dsv4.cli.help import CONTEXT, Command, show_everything
from dsv4.config import EngineConfig
from dsv4.errors import ConfigError

# The engine's options. --help shows those without a title; --help-all shows all, by title.
_ENGINE = {
    "": {
        "max_context": "tokens one sequence may have, prompt and answer together, e.g. 32k",
        "gpus": "GPUs that share the model: how many, or which, e.g. 2 or 0,1",
    },
    "Engine: size and memory": {
        "device": "auto, cpu, cuda or cuda:N",
        "max_batch": "sequences that run at the same time",
        "chunk": "prompt tokens processed per step; default: 512 on a CPU, 4096 on a GPU",
        "max_stall_ms": "longest step that processes a prompt while others wait for a token (best effort)",
        "threads": "CPU threads; default: what suits the model's size",
        "cache_pages": "pages of the cache, one per 256 tokens; default: enough for max-batch x max-context",
        "spill": "experts in pinned host memory: off, auto (those that do not fit on the GPU) or N per layer",
        "expert_memory": "bytes of GPU memory for experts; default: all that is left",
        "swap_share": "share of PCIe's bandwidth for moving experts that become hot or cold; 0: none",
    },
    "Engine: prefix cache": {
        "prefix_snapshots": "saved states of the prefix cache; 0 turns it off",
        "prefix_dir": "keep the prefix cache in this folder over restarts; it holds traces of prompts",
        "prefix_dir_bytes": "size limit of that folder; the least recently used files go first",
    },
    "Engine: precision": {
        "activations": "inputs of quantised linears: a16 (unrounded), a8 (FP8, as the official code) or a4",
        "compute_dtype": "auto, float32 or bfloat16",
        "qat": "on: the rounding the model was trained with; off: none",
        "cache": "key/value cache: auto, fp8 (lossless with qat on), bf16 or f32",
        "weights": "in memory: auto, dense (decoded once) or packed (as stored, slower on a CPU)",
        "head": "output matrix: stored, or nvfp4 (rounded at load: a third of the bytes, less exact)",
    },
    "Engine: several processes": {
        "ranks": "CPU processes that share the model, to try what several GPUs do",
        "expert_parallel": "give each rank whole experts, not a part of each",
        "rank_seconds": "how long ranks wait for one another before all of them end",
    },
    "Engine: drafts and debugging": {
        "drafts": "tokens the draft block proposes per step, 0 to 3 (try 1): the same answer; CPU only",
        "no_graph": "on a GPU, launch kernels one by one: the same tokens, slower",
        "no_overlap": "on a GPU, do not overlap kernels (no PDL): the same tokens, slower",
        "ops": "backend of an op, or a module with its functions; repeatable",
    },
}
# Rarer options of the commands themselves, which only --help-all shows.
_RARE = {
    "Sampling": "top_k top_p min_p presence_penalty frequency_penalty repetition_penalty logit_bias",
    "Where an answer ends": "stop stop_id ignore_eos",
    "Token ids and timing": "ids logprobs stats",
    "Server limits": "max_queue queue_seconds request_seconds drain_seconds stall_seconds max_connections",
    "Server security": "cors_origins tls_cert tls_key log_texts isolate_by_key",
    "Replicas on Ray": "ray replicas max_replicas gpus_per_replica",
}
_PANELS = {name: title for title, names in _RARE.items() for name in names.split()}
_SUFFIXES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_METAVARS: dict[Any, str] = {float: "X", str: "TEXT", Path: "PATH", bool: ""}


def count(text: str | int) -> int:
    """An integer, which may end in k, M or G (of 1024)."""
    digits, suffix = (text[:-1], text[-1:].lower()) if isinstance(text, str) else (text, "")
    try:
        return int(digits) * _SUFFIXES[suffix] if suffix in _SUFFIXES else int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not an integer, e.g. 4096 or 4k") from None


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


def complete_model(incomplete: str) -> list[str]:
    """Folders that hold a model; of paths, the shell itself has the rest."""
    begin = "./" if incomplete.startswith("./") else ""
    return [begin + path.parent.name for path in sorted(Path().glob("*/config.json"))]


def add_command(group: typer.Typer, command: Callable[..., None], epilog: str) -> None:
    """`epilog`: what --help ends with.

    A positional model can also be given as -m/--model, and integers with k, M or G.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters = []
    for parameter in signature.parameters.values():
        parameters.append(_described(parameter))
        if parameter.name == "model" and "model_option" not in signature.parameters:
            parameters += _model_option(parameters)
    everything = typer.Option(
        *("--help-all",),
        is_eager=True,
        expose_value=False,
        callback=show_everything,
        help="show every option",
    )
    if any(_info(parameter).rich_help_panel for parameter in parameters):
        parameters.append(_flag("help_all", Annotated[bool, everything], False))

    @wraps(command)
    def wrapper(help_all: bool = False, model_option: Any = None, **given: Any) -> None:
        if model_option is not None:
            if given.get("model") is not None:
                raise ConfigError(f"two models are named, {given['model']} and {model_option}; name one")
            given["model"] = model_option
        command(**given)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    group.command(epilog=epilog, cls=Command, context_settings=CONTEXT)(wrapper)


def _flag(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _info(parameter: inspect.Parameter) -> Any:
    return get_args(parameter.annotation)[1]


def _described(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter with what all of its kind have: a name for the value, a panel, suffixes, completion."""
    kind, info = get_args(parameter.annotation)[0], copy(_info(parameter))
    bare = next((part for part in get_args(kind) if part is not NoneType), kind)
    if bare is int and info.parser is None:
        info.parser, info.metavar = count, info.metavar or "N"
    info.metavar = info.metavar or _METAVARS.get(bare)
    info.rich_help_panel = info.rich_help_panel or _PANELS.get(parameter.name)
    if parameter.name == "model":
        info.autocompletion, info.metavar = complete_model, "MODEL"
    return parameter.replace(annotation=Annotated[kind, info], kind=inspect.Parameter.KEYWORD_ONLY)


def _model_option(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """-m/--model beside the positional argument that came last."""
    position = parameters[-1]
    if not isinstance(_info(position), ArgumentInfo) or position.default is inspect.Parameter.empty:
        return []
    option = typer.Option(
        *("--model", "-m"), metavar="MODEL", help="the same, as an option", autocompletion=complete_model
    )
    return [_flag("model_option", Annotated[get_args(position.annotation)[0], option], None)]


def engine_options(command: Callable[..., None], **defaults: Any) -> Callable[..., None]:
    """Give a command all engine flags; its parameter `config` becomes the EngineConfig made from them."""
    # Which words a field allows is EngineConfig's to say, not the parser's.
    types = get_type_hints(EngineConfig) | {"activations": str, "ops": list[str]}
    known = {field.name: field for field in fields(EngineConfig)}
    flags = []
    for title, words in _ENGINE.items():
        for name, help in words.items():
            # A switch that is off by default needs no opposite.
            names = (f"--{name.replace('_', '-')}",) if known[name].default is False else ()
            names, metavar = (("--op",), "OP=BACKEND") if name == "ops" else (names, None)
            option = typer.Option(*names, help=help, metavar=metavar, rich_help_panel=title or None)
            flags.append(_flag(name, Annotated[types[name], option], defaults.get(name, known[name].default)))
    assert len(flags) == len(known), "every field of EngineConfig has its words here"
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
        raise ConfigError(f"--op {text!r}: expected OP=BACKEND, for example --op attend=ref")
    return name, backend
