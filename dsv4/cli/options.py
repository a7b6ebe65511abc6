"""Options shared by commands: every field of EngineConfig becomes a flag; a command gets the config."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo

from dsv4.cli.help import CONTEXT, Command, show_everything
from dsv4.config import EngineConfig
from dsv4.engine.request import SamplingParams
from dsv4.errors import ConfigError, RequestError
from dsv4.hub import cache
from dsv4.hub.names import resolve, short_name
from dsv4.models import embedded
from dsv4.text.generation import SamplingDefaults

# Rarer options of the commands themselves, which only --help-all shows.
_RARE = {
    "Output": "ids logprobs stats",
    "Server limits": "max_queue queue_seconds request_seconds drain_seconds stall_seconds max_connections",
    "Server security": "cors_origins tls_cert tls_key log_texts isolate_by_key",
    "Replicas on Ray": "ray replicas max_replicas gpus_per_replica",
}
_PANELS = {name: title for title, names in _RARE.items() for name in names.split()}
# Fields whose flag has another form: its name, its type, and the field's value from it.
_FORMS: dict[str, tuple[str, Any, Callable[[Any], Any]]] = {
    "ops": ("--op", list[str], lambda given: tuple(_split(text) for text in given)),
    "logit_bias": ("--logit-bias", list[str], lambda given: _biases(given)),
    "stop": ("--stop", list[str], tuple),
    "stop_ids": ("--stop-id", list[int], tuple),
    "activations": ("--activations", str, str),  # which words are allowed is EngineConfig's to say
}
_HIDDEN = ("prompt_logprobs", "grammar", "bad_words", "allowed_ids")  # of the API only
_OF_MODEL = tuple(field.name for field in fields(SamplingDefaults) if field.name != "stop_ids")
_SUFFIXES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_METAVARS = {float: "X", str: "TEXT", Path: "PATH"}


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
    """Folders that hold a model, and models of the hub's cache; of paths, the shell itself has the rest."""
    from dsv4.hub.here import is_model

    begin = "./" if incomplete.startswith("./") else ""
    found = [begin + path.parent.name for path in sorted(Path().glob("*/config.json"))]
    for repository, revision, folder in cache.snapshots():
        at = "" if revision == "main" else f"@{revision}"
        found += [f"{short_name(repository)}{at}"] if is_model(folder) else []
    return found


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
    bare = kind if get_origin(kind) is list else next(iter(get_args(kind)), kind)  # of X | None
    bare = get_args(bare)[0] if get_origin(bare) is list else bare
    if bare is int and info.parser is None:
        info.parser, info.metavar = count, info.metavar or "N"
    info.metavar = info.metavar or _METAVARS.get(bare)
    info.rich_help_panel = info.rich_help_panel or _PANELS.get(parameter.name)
    if parameter.name == "model":
        info.autocompletion, info.metavar = info.autocompletion or complete_model, "MODEL"
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


def _flags(made: type, defaults: dict[str, Any]) -> Iterator[inspect.Parameter]:
    """A flag for every field that the class's docstring describes, under the docstring's titles."""
    types, title = get_type_hints(made), None
    known = {field.name: field for field in fields(made)}
    for line in inspect.cleandoc(made.__doc__ or "").splitlines()[1:]:
        name, colon, words = line.partition(": ")
        if not colon:
            title = line.strip() or title
        elif name not in _HIDDEN:
            flag, kind, _ = _FORMS.get(name, (f"--{name.replace('_', '-')}", types[name], None))
            default = [] if get_origin(kind) is list else defaults.get(name, known[name].default)
            if made is SamplingParams and name in _OF_MODEL:
                words += f" (default: the model's, else {default:g})"
                kind, default = kind | None, None
            names = (flag,) if name in _FORMS or known[name].default is False else ()
            words += "; repeatable" if get_origin(kind) is list else ""
            option = typer.Option(*names, help=words, rich_help_panel=title)
            yield _flag(name, Annotated[kind, option], default)


def engine_options(command: Callable[..., None], **defaults: Any) -> Callable[..., None]:
    """Give a command a flag for every field of its EngineConfig, and of its SamplingParams if it has some."""
    own, made = [], {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.annotation in (EngineConfig, SamplingParams):
            made[parameter.name] = (parameter.annotation, list(_flags(parameter.annotation, defaults)))
        else:
            own.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def wrapper(**given: Any) -> None:
        for name, (kind, flags) in made.items():
            values = {flag.name: given.pop(flag.name) for flag in flags}
            values |= {field: _FORMS[field][2](value) for field, value in values.items() if field in _FORMS}
            if kind is SamplingParams:
                values |= _of_model(given["model"], values)
            given[name] = kind(**values)
        command(**given)

    parameters = own + [flag for _, flags in made.values() for flag in flags]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return wrapper


def _of_model(model: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """What the model's generation_config.json says where no flag was given."""
    usual = SamplingDefaults.load(resolve(model or embedded()))
    silent = {name: getattr(usual, name) for name in _OF_MODEL if given[name] is None}
    return {**silent, "stop_ids": usual.stop_ids + given["stop_ids"]}


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


def _biases(texts: list[str]) -> dict[int, float]:
    found: dict[int, float] = {}
    for given in texts:
        id, _, bias = given.partition("=")
        try:
            number, value = int(id), float(bias)
        except ValueError:
            raise RequestError(
                f"--logit-bias {given!r}: expected a token id and a number, e.g. 17=-100"
            ) from None
        if number in found:
            raise RequestError(
                f"--logit-bias {given!r}: token {number} has a bias already; give one for each"
            )
        found[number] = value
    return found
