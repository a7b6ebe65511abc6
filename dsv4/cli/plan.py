"""`dsv4 plan`: does a model fit on a machine, and how fast could it be there."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dsv4.cli.show import err, model_folder, out, print_json, size
from dsv4.errors import ConfigError

if TYPE_CHECKING:
    from dsv4.lab.plan import Plan
    from dsv4.lab.records import Record

EPILOG = """
[bold]Examples[/]
  dsv4 plan flash --gpus 2xH200 --context 131072 --batch 8
  dsv4 plan pro --format official --gpus 8xB200 --tp 8 --ep 8
  dsv4 plan ./DeepSeek-V4-Flash --json | jq .per_gpu
"""


def plan(
    model: Annotated[str, typer.Argument(help="model folder, or flash, pro, tiny (./flash: a folder)")],
    gpus: Annotated[str | None, typer.Option(help="2xH200, RTX5090, ...; default: this machine")] = None,
    context: Annotated[int | None, typer.Option(help="tokens per sequence; default: as the engine's")] = None,
    batch: Annotated[int, typer.Option(help="sequences at the same time")] = 8,
    tp: Annotated[
        int | None, typer.Option(help="GPUs that share every layer, its experts' width too")
    ] = None,
    ep: Annotated[int | None, typer.Option(help="groups of GPUs that have whole experts each")] = None,
    format: Annotated[
        str | None, typer.Option(help="of flash, pro, tiny: modelopt (default), official, bf16, ...")
    ] = None,
    weights: Annotated[str, typer.Option(help="in memory: auto, dense or packed")] = "auto",
    cache: Annotated[str, typer.Option(help="key/value cache: fp8, bf16 or f32")] = "fp8",
    chunk: Annotated[
        int | None, typer.Option(help="prompt tokens processed per step; default: as the engine's")
    ] = None,
    snapshots: Annotated[int, typer.Option(help="kept for prompts that begin alike")] = 64,
    records: Annotated[
        Path | None, typer.Option(help="folder of recorded benchmark lines; default: the package's own")
    ] = None,
    counts: Annotated[
        Path | None, typer.Option(help="how often experts were chosen; default: the model's own, if any")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="also 1, 2, 4 and 8 of each GPU that models are planned for")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show what a model needs per GPU, whether it fits, what else would, and the speed of light."""
    from dsv4.engine.settings import default_context
    from dsv4.lab.gpus import parse, this_machine
    from dsv4.lab.plan import Demand, Plan, Wanted, describe
    from dsv4.lab.records import PRESETS, SHIPPED, best, of_folder, published
    from dsv4.lab.spilled import recorded, spill_figures
    from dsv4.lab.synthetic import layout_of

    if records is not None and not records.is_dir():
        raise ConfigError(
            f"--records {records} is not a folder; give one with *.jsonl files, or leave it out"
        )
    machine = parse(gpus) if gpus is not None else None
    model = model if model in PRESETS else str(model_folder(Path(model)))
    with err.status("reading headers"):
        title, config, inventory = describe(model, format)
        demand = Demand.of(config, inventory)
        asked = context if context is not None else default_context(config)
        wanted = Wanted(asked, batch, tp, ep, weights, cache, chunk, snapshots)
        made = Plan.make(demand, machine or this_machine(), wanted)
        layout, name = layout_of(inventory), published(config) or of_folder(title)
        record = best(records or SHIPPED, made.machine.name, name, layout)
        report = made.report()
        chosen, whose = recorded(model, counts, config)
        if made.today.spill is not None:
            at = record.share if record else 1.0
            report["spill"] = {**spill_figures(made.today, chosen, at), "counts": whose}
    share, source = _share(record, name, layout, made.machine.name)
    rank_ms = _rank_ms(made, name, layout)
    predicted = made.predicted(share, rank_ms) if made.machine.count > 1 else None
    measured = record.share * made.today.tokens_per_second(1) if record and made.today.runs else None
    report = {
        **{"model": title, "verdict": _verdict(made), **report},
        **{"layout": layout, "recorded": vars(record) if record else None},
        "measured_tokens_per_second": measured,
        "predicted": {
            **{"tokens_per_second": predicted, "rank_step_ms": rank_ms},
            **{"share": share, "share_source": source},
        },
    }
    if compare:
        report["sets"] = _sets(made, share, name, layout)
    if json:
        print_json(report)
        return
    _show(title, made, report, record, source)
    if made.machine.count > 1:
        _show_predicted(made, predicted, rank_ms, f"{share:.0%} of the bandwidth, {source}")
    if compare:
        _show_sets(report["sets"], share, source)


def _verdict(made: "Plan") -> str:
    """About this engine today, on one device; then whether it could share the model between several."""
    machine, today = made.machine, made.today
    one = f" on one {machine.name}" if machine.count > 1 else ""
    free = machine.memory_bytes - today.total_bytes
    if today.refusal is not None:
        found = f"does not run{one}: {today.refusal}"
    elif today.spill is not None:
        found = f"fits{one} with {size(today.spill.host_bytes)} of experts in pinned host memory"
    else:
        found = (
            f"fits{one}, {size(free)} free" if today.fits else f"does not fit{one}, {size(-free)} too much"
        )
    if machine.count == 1:
        return found
    several = f"{machine.count} GPUs (--gpus)"
    if made.refusal is not None and made.refusal != today.refusal:
        return f"{found}; {several} cannot share it: {made.refusal}"
    if not made.is_built:
        return f"{found}; {several} are not built"
    if not made.fits:
        return f"{found}; {several} do not hold it, {size(made.total_bytes)} on each"
    return f"{found}; {several} hold it, {size(made.total_bytes)} on each: built, and never run"


def _rank_ms(made: "Plan", model: str, layout: str) -> float | None:
    from dsv4.lab.links import rank_step_ms

    shares_widths = made.tp == made.machine.count and made.ep == 1
    return rank_step_ms(made.machine.name, model, layout, made.tp) if shares_widths else None


def _share(record: "Record | None", model: str, layout: str, gpu: str) -> tuple[float, str]:
    """Of the read bandwidth, what one GPU is taken to reach, and how that is known."""
    from dsv4.lab.links import SHARE, SHARE_SOURCE

    if record is None:
        return SHARE, f"{SHARE_SOURCE}; no run of {model} on {gpu} is recorded"
    other = "" if record.layout == layout else f" of layout {record.layout}, not {layout}"
    return record.share, f"as recorded in {record.where}{other}"


def _show(title: str, made: "Plan", report: dict[str, Any], record: "Record | None", source: str) -> None:
    """What this engine does today, on one device; what several could comes last."""
    machine, w, today = made.machine, made.wanted, made.today
    per_gpu = report["per_gpu"]
    speed = f"{size(machine.bandwidth)}/s {'each, ' if machine.count > 1 else ''}{machine.source}"
    out.print(f"model    {title}: {size(report['stored_bytes'])} stored", markup=False)
    mark = "" if machine.was_run_on else "; nothing was ever run on one: everything here is arithmetic"
    out.print(f"machine  {machine.label} ({speed}){mark}", markup=False)
    style = "bold" if report["fits"] else "bold red"
    out.print(f"verdict  {report['verdict']}\n", style=style, markup=False)
    slots = f"{today.slots} sequence{'s' if today.slots > 1 else ''}"
    whose = f"one {machine.name}" if machine.count > 1 else "memory"
    table = Table(whose, "bytes", "", box=None, pad_edge=False)
    for name, what in (
        ("weights", report["weights"]),
        ("cache", f"{slots} of {w.context:,} tokens, {w.cache}"),
        ("state", "windows and open blocks"),
        ("snapshots", f"{w.snapshots} of prompts' beginnings, as they are made"),
        ("tables", "rotations, penalties"),
        ("copies", "weights in a second form, for prompts"),
        ("buffers", "of decode steps"),
        ("workspace", f"estimate, {today.chunk} tokens per step"),
        ("reserved", "estimate, compiled kernels and graphs"),
    ):
        if per_gpu[name]:
            table.add_row(name, size(per_gpu[name]), what)
    table.add_row("[bold]total[/]", f"[bold]{size(per_gpu['total'])}[/]", f"of {size(machine.memory_bytes)}")
    if per_gpu["host"]:
        table.add_row("beside", size(per_gpu["host"]), "experts in pinned host memory")
    out.print(table)
    if not report["fits"]:
        _show_instead(report["instead"], w.context, w.batch, report["refused"] is not None)
    growth = report["cache_bytes_per_token"]
    out.print()
    _line("one sequence", f"{size(report['sequence_bytes'])} of cache, {growth:,.0f} B per further token")
    if record and today.runs:
        rate = _rate(report["measured_tokens_per_second"])
        _line("measured", f"{record.share:.0%} of the ceiling below ({source}): {rate} tokens/s")
    elif not record:
        _line("measured", f"no run of this model on {machine.name} is recorded")
    if today.spill is not None:
        _show_spill(today, record, source, report["spill"])
    if today.runs or machine.count == 1:
        _show_theory(today, "1 GPU, " if machine.count > 1 else "")
    if machine.count > 1:
        fits = "fits" if made.fits else "does not fit"
        each = f"{size(made.total_bytes)} on each GPU, {fits}"
        out.print()
        state = "never run" if made.is_built else "not built"
        _line(state, f"{machine.label}, tp {made.tp}, ep {made.ep}: {each}")
        _show_theory(made, f"{machine.count} GPUs, ")


def _show_spill(made: "Plan", record: "Record | None", source: str, found: dict[str, Any]) -> None:
    """Beside GPU memory at its recorded speed, or at best, what PCIe costs."""
    from dsv4.lab.gpus import HOST_BANDWIDTH, HOST_MEASURED_ON

    spill = made.spill
    assert spill is not None
    of = f"{record.share:.0%} {source}" if record else "at best"
    rates = {"uniform routing": "uniform", f"{100 * found['hit_rate_assumed']:g} % hits": "assumed"}
    if (hits := found["hit_rate_recorded"]) is not None:
        rates = {"uniform routing": "uniform", f"recorded routing ({hits:.1%} hits)": "recorded"}
    said = ", ".join(
        f"{name} {_rate(found[f'tokens_per_second_{key}']['one'])}" for name, key in rates.items()
    )
    where = f"PCIe {HOST_BANDWIDTH / 1e9:.0f} GB/s (measured on {HOST_MEASURED_ON})"
    _line("spilled", f"{spill.num_spilled:,} experts, {1 - spill.share:.1%} of all")
    _line("estimated", f"{said} tokens/s; GPU memory {of}, {where}")
    _line("routing", found["counts"])


def _show_theory(made: "Plan", which: str) -> None:
    """The speed of light."""
    for count in sorted({1, made.wanted.batch}):
        rate = made.tokens_per_second(count)
        each = f", {_rate(rate / count)} each" if count > 1 else ""
        read = f"reads {size(made.read_bytes(count))} per step"
        _line("in theory", f"{which}batch {count} {read}: at most {_rate(rate)} tokens/s{each}")


def _show_predicted(
    made: "Plan", predicted: tuple[float, float] | None, rank_ms: float | None, by_share: str
) -> None:
    """Not measured: what one GPU was measured to reach, and what others have published of their links."""
    from dsv4.lab.links import RANK_STEPS_SOURCE

    if not made.is_built:
        _line("predicted", "nothing: what such ranks would send each other is not built")
        return
    said = made.communication()
    if predicted is None or said["all_reduce_us"] is None:
        _line("predicted", f"nothing: no all-reduce of {made.machine.name} is published")
        return
    each = (
        f"{said['all_reduce_us']:.1f} us each ({said['source']}); each GPU sends {size(said['sent_bytes'])}"
    )
    _line("per token", f"{said['all_reduces']} all-reduces of {size(said['message_bytes'])}, {each}")
    used = by_share if rank_ms is None else f"a rank's step of {rank_ms} ms, {RANK_STEPS_SOURCE}"
    _line("predicted", f"batch 1: {_range(predicted)} tokens/s ({used})")


def _sets(made: "Plan", share: float, model: str, layout: str) -> list[dict[str, Any]]:
    """One GPU with experts in host memory, where they do not all fit: as its own plan says."""
    from dsv4.lab.gpus import known
    from dsv4.lab.plan import Plan, Wanted
    from dsv4.lab.spilled import HITS, rate

    w, rows = made.wanted, []
    free = Wanted(context=w.context, batch=w.batch, cache=w.cache, chunk=w.chunk, snapshots=w.snapshots)
    for name in ("H200", "B200", "RTX PRO 6000"):
        for count in (1, 2, 4, 8):
            plan = Plan.make(made.demand, known(name, count), free)
            rank_ms = _rank_ms(plan, model, layout)
            speed = plan.predicted(share, rank_ms)
            if plan.spill is not None:
                speed = (rate(plan, 1, share), rate(plan, 1, share, HITS))
            rows.append(
                {
                    **{"name": name, "was_run_on": plan.machine.was_run_on, "count": count},
                    **{"tp": plan.tp, "fits": plan.runs or plan.spill is not None, "refused": plan.refusal},
                    **{"total_bytes": plan.held.total, "host_bytes": plan.held.host},
                    **{"read_bytes": plan.read_bytes(1)},
                    **{"all_reduce_us": plan.communication()["all_reduce_us"]},
                    **{"tokens_per_second": speed, "rank_step_ms": rank_ms},
                }
            )
    return rows


def _show_sets(rows: list[dict[str, Any]], share: float, source: str) -> None:
    from dsv4.lab.links import RANK_STEPS_SOURCE
    from dsv4.lab.spilled import HITS

    table = Table(
        "GPUs", "each holds", "host memory", "reads", "all-reduce", "tokens/s", box=None, pad_edge=False
    )
    for row in rows:
        speed = "not built"
        if not row["fits"]:
            speed = "does not run" if row["refused"] else "does not fit"
        elif row["tokens_per_second"] is not None:
            mark = " +" if row["host_bytes"] else "" if row["rank_step_ms"] is None else " *"
            speed = _range(row["tokens_per_second"]) + mark
        table.add_row(
            f"{row['count']} x {row['name']}",
            size(row["total_bytes"]),
            size(row["host_bytes"]) if row["host_bytes"] else "",
            size(row["read_bytes"]),
            f"{row['all_reduce_us']:.1f} us" if row["count"] > 1 else "",
            speed,
        )
    out.print()
    out.print(table)
    never = " and ".join({row["name"]: 0 for row in rows if not row["was_run_on"]})
    out.print(
        f"batch 1, predicted: {share:.0%} of the bandwidth, {source}; several GPUs, {never} were never run",
        markup=False,
    )
    if any(row["host_bytes"] for row in rows):
        out.print(
            f"+ experts in host memory: uniform routing, and {100 * HITS:g} % of choices on the GPU",
            markup=False,
        )
    if any(row["rank_step_ms"] for row in rows):
        out.print(f"* by the step of one rank, {RANK_STEPS_SOURCE}", markup=False)


def _line(label: str, text: str) -> None:
    out.print(f"{label:<13} {text}", markup=False)


def _range(rates: tuple[float, float]) -> str:
    """`276 to 368`; one number where both are the same."""
    low, high = map(_rate, rates)
    return low if low == high else f"{low} to {high}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _show_instead(instead: dict[str, Any], context: int, batch: int, is_refused: bool) -> None:
    if instead["context"]:
        _line("would fit", f"a context of {instead['context']:,} with batch {batch}")
    if instead["batch"]:
        _line("would fit", f"a batch of {instead['batch']:,} with context {context:,}")
    if not is_refused and not instead["context"] and not instead["batch"]:
        _line("would fit", "nothing here: weights and workspace alone are too large")
    sets = ", ".join(f"{each['count']} x {each['name']}" for each in instead["gpus"])
    _line("in theory", f"would do: {sets or 'no set of known GPUs'} (several were never run)")
