"""`dsv4 doctor`: is this machine, this build and this checkpoint right?"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsv4.cli.options import numbers
from dsv4.cli.show import count_bar, model_folder, out, print_json, print_words

if TYPE_CHECKING:
    from dsv4.lab.doctor.findings import Finding

EPILOG = """
[bold]Examples[/]
  dsv4 doctor
  dsv4 doctor ./DeepSeek-V4-Flash
  dsv4 doctor ./model --full --json
  dsv4 doctor --step --rows 1,32 --context 128,5120,140000   # a GPU that nobody has tried yet
"""
_STYLES = {"ok": "green", "note": "yellow", "fail": "bold red"}


def doctor(
    model: Annotated[Path | None, typer.Argument(help="model folder; default: the machine only")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="read every weight and run the model, however large")
    ] = False,
    step: Annotated[
        bool,
        typer.Option("--step", help="on a GPU: hold every launch of a decode step against what it means"),
    ] = False,
    rows: Annotated[str, typer.Option(help="of --step: rows of the step, of 1, 2, 4, 8, 16, 32")] = "1,8",
    context: Annotated[str, typer.Option(help="of --step: tokens before the step")] = "128,5120",
    activations: Annotated[str, typer.Option(help="of --step: a16, a8 or a4")] = "a16",
    verbose: Annotated[
        bool, typer.Option("--verbose", help="what was found for every part of the machine and every op")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Check the machine, every op, the engine and a checkpoint. Ends with PASS (exit code 0) or FAIL (1).

    With --step, check one decode step instead, launch by launch; without a model, with random weights."""
    from dsv4.lab.doctor.findings import passed

    start = time.monotonic()
    findings, shown = [], _Shown(verbose)
    with ExitStack() as stack:
        for finding in _findings(
            model and model_folder(model), full, step, rows, context, activations, stack
        ):
            # A bar that an unreadable file cut short must not stand among the findings.
            stack.close()
            findings.append(finding)
            if not json:
                shown.add(finding)
    shown.end()
    is_right = passed(findings)
    if json:
        print_json({"pass": is_right, "findings": [vars(finding) for finding in findings]})
    else:
        _conclude(findings, time.monotonic() - start)
    if not is_right:
        raise typer.Exit(1)


def _findings(
    model: Path | None, full: bool, step: bool, rows: str, context: str, activations: str, stack: ExitStack
) -> "Iterator[Finding]":
    if not step:
        from dsv4.lab.doctor.examine import examine

        yield from examine(model, full, _WeightsBar(stack).update)
        return
    from dsv4.config import EngineConfig
    from dsv4.lab.doctor.step import examine_steps

    yield from examine_steps(
        model,
        rows=numbers("rows", rows),
        contexts=numbers("context", context),
        activations=EngineConfig(activations=activations).activations,  # type: ignore[arg-type]
        reading=_WeightsBar(stack).update,
    )


class _WeightsBar:
    """A bar while weights are read, and only then: findings are printed as they are made."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.bar: Callable[[int, int], None] | None = None

    def update(self, done: int, total: int) -> None:
        if self.bar is None:
            self.bar = self.stack.enter_context(count_bar("reading weights"))
        self.bar(done, total)
        if done == total:
            self.stack.close()


class _Shown:
    """Findings as lines; unless verbose, what is right of machine and ops is a line for each of the two."""

    def __init__(self, verbose: bool) -> None:
        self._folded = () if verbose else ("machine", "ops")
        self._area, self._names = "", list[str]()

    def add(self, finding: "Finding") -> None:
        if finding.area != self._area:
            self.end()
        if finding.level == "ok" and finding.area in self._folded:
            self._area = finding.area
            self._names.append(finding.name)
        else:
            _show(finding.level, finding.area, f"{finding.name}: {finding.text}")

    def end(self) -> None:
        if self._names:
            _show("ok", self._area, ", ".join(self._names))
        self._names = []


def _show(level: str, area: str, words: str) -> None:
    print_words(f"[{_STYLES[level]}]{level:<4}[/]  {area:<10} ", words, 17)


def _conclude(findings: "list[Finding]", seconds: float) -> None:
    failed = [finding for finding in findings if finding.level == "fail"]
    notes = sum(finding.level == "note" for finding in findings)
    out.print()
    if not failed:
        out.print(f"[bold green]PASS[/]  {len(findings)} checks, {notes} notes, {seconds:.0f} s")
        return
    out.print(f"[bold red]FAIL[/]  {len(failed)} of {len(findings)} checks. What to do:")
    for number, finding in enumerate(failed, 1):
        print_words(f"  {number}. ", f"{finding.area}, {finding.name}: {finding.remedy}", 5)
