"""`dsv4 eval`: what a model can do, in figures."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from dsv4 import __version__
from dsv4.cli.options import check_positive, engine_options
from dsv4.cli.show import count_bar, ctrl_c, load_engine, out, print_json, say_note
from dsv4.config import EngineConfig
from dsv4.errors import ConfigError
from dsv4.models import evaluation_set

EPILOG = """
[bold]Examples[/]
  dsv4 eval
  dsv4 eval --suite recall --plot recall.png
  dsv4 eval ./model --suite sums --limit 20 --activations a8 --json
[bold]What the indexer has learnt[/] (in a checkout): against entries chosen at random, and against all
  python -m dsv4 eval --suite recall --op index=recipes.ablations.index_random
  python -m dsv4 eval --suite recall --op index=recipes.ablations.index_dense
"""


@engine_options
def eval(
    model: Annotated[Path | None, typer.Argument(help="model folder; default: the embedded model")] = None,
    suite: Annotated[
        str, typer.Option(help="stories, sums, recall, chat, tools, json, unknown or all")
    ] = "all",
    set_: Annotated[
        Path | None, typer.Option("--set", help="evaluation set (JSON lines); default: the embedded model's")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="at most so many of each suite, always the same")] = None,
    max_tokens: Annotated[int, typer.Option(help="per answer")] = 600,
    answers: Annotated[
        Path | None, typer.Option(help="write every answer to this file, as JSON lines")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="write a picture (.png) of recall against distance")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    *,
    config: EngineConfig,
) -> None:
    """Measure a model: bits per byte, sums, recall, tool calls, JSON, honesty, stories, endings, drafts.

    Answers are greedy. Ctrl-C ends early and shows the figures of what is done.
    """
    from dsv4.lab.draw import check, draw_recall
    from dsv4.lab.evalset import SUITES, choose, read_set
    from dsv4.lab.evaluate import evaluate, figures, settings, write_answers
    from dsv4.lab.files import check_writable

    if suite not in (*SUITES, "all"):
        raise ConfigError(f"suite is {suite!r}, expected one of {', '.join((*SUITES, 'all'))}")
    check_positive(limit=limit, max_tokens=max_tokens)
    if plot is not None and suite not in ("recall", "all"):
        raise ConfigError(f"--plot shows recall; use --suite recall or all, not {suite}")
    for name, path in (("answers", answers), ("plot", plot)):
        if path is not None:
            check_writable(path, f"--{name}")
    if plot is not None:
        check(plot)
    source = set_ or evaluation_set()
    items = choose(read_set(source), suite, limit)

    engine, began = load_engine(model, config), time.perf_counter()
    with count_bar("evaluating") as update, ctrl_c() as pressed:
        outcome = evaluate(engine, items, max_tokens, update, lambda: bool(pressed))
    found = figures(outcome)
    if answers is not None:
        write_answers(answers, outcome.answers)
    if plot is not None and "recall" in found:
        total, changed = found["recall"]["found"]["total"], [f"{op}={name}" for op, name in config.ops]
        made_with = ", ".join(
            [model.resolve().name if model else "embedded model", config.activations, *changed]
        )
        subtitle = f"{made_with}; {total} prompts, greedy; bars are 95 % intervals"
        draw_recall(plot, {"": found["recall"]["by_distance"]}, engine.model_config.window, subtitle)
    elif plot is not None:
        outcome.notes.append(f"{plot} was not drawn: there is no recall to show")
    for note in outcome.notes:
        say_note(note)
    if json:
        about = {
            **{"model": str(model or "embedded"), "set": str(source), "suite": suite, "limit": limit},
            **{"max_tokens": max_tokens, "complete": outcome.is_complete, "notes": outcome.notes},
            **{"seconds": round(time.perf_counter() - began, 1), "dsv4": __version__},
        }
        print_json({**found, **about, "settings": settings(engine)})
    else:
        _show(found)
    if not outcome.is_complete:
        raise typer.Exit(130)


def _show(found: dict[str, Any]) -> None:
    table = Table("figure", "value", "95 % interval", "of", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, value, interval, total in _rows(found):
        table.add_row(escape(name), value, interval, total, style="" if name.startswith(" ") else "bold")
    out.print(table)


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    if text := found.get("text"):
        for name, part in [("bits per byte, held-out text", text), *_indented(text["by_kind"])]:
            yield name, f"{part['bits_per_byte']:.4f}", "", f"{part['bytes']:,} bytes"
    if stories := found.get("stories"):
        yield _rate("stories: requested words used", stories["words_used"])
        yield _rate("  stories with all of them", stories["all_words"])
    if "mtp_acceptance" in found:
        yield _rate("  drafts accepted (MTP)", found["mtp_acceptance"])
    for suite, title, key in (
        ("sums", "sums: exact", "exact"),
        ("recall", "recall: found", "found"),
        ("tools", "tools: right calls and answers", "right"),
        ("json", "JSON: right", "right"),
        ("unknown", "what it does not know: says so", "right"),
        ("chat", "chat: as expected", "matches"),
    ):
        if part := found.get(suite):
            yield _rate(title, part[key])
            for how, label in (("by_distance", "distance"), ("by_context", "context")):
                for group in part.get(how, ()):
                    yield _rate(f"  {label} {group['from']:,} to {group['to']:,}", group)
            for name, rate in _indented(part["by_kind"]):
                yield _rate(name, rate)
    if ended := found.get("ended"):
        yield _rate("answers that end by themselves", ended)
        for name, rate in _indented(ended["by_suite"]):
            yield _rate(name, rate)


def _indented(parts: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(f"  {name}", part) for name, part in parts.items()]


def _rate(name: str, rate: dict[str, Any]) -> tuple[str, str, str, str]:
    interval = f"{100 * rate['low']:.0f} to {100 * rate['high']:.0f} %"
    return name, f"{100 * rate['share']:.1f} %", interval, str(rate["total"])
