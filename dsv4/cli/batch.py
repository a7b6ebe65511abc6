"""`dsv4 batch`: a file of requests in OpenAI's batch format, answered line by line."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from dsv4.cli.options import check_positive, check_ray, engine_options, needs_extra
from dsv4.cli.show import count_bar, ctrl_c_cancels, model_folder, out, print_json, say_note
from dsv4.config import EngineConfig
from dsv4.errors import ConfigError

EPILOG = """
[bold]Examples[/]
  dsv4 batch in.jsonl out.jsonl
  dsv4 batch in.jsonl out.jsonl --model ./model --max-batch 32 --json
  dsv4 batch in.jsonl out.jsonl --ray --replicas 4 --gpus-per-replica 1
[bold]A line of the input[/]
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": \\[...]}}
Killed at any time, the same command goes on where it was, and the output is the same to the byte.
[bold]Exit codes[/]
  0: every line is answered. 4: the output is complete, and some of its lines are errors.
"""
# Nobody waits for a token of a batch, so prompts are read in whole chunks.
MAX_STALL_MS = 600_000


@partial(engine_options, max_stall_ms=MAX_STALL_MS)
def batch(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="requests, one per line")],
    target: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="answers, in the same order")],
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="model folder; default: the embedded model")
    ] = None,
    name: Annotated[str, typer.Option("--served-model-name", help="as in the requests' `model`")] = "",
    parallel: Annotated[int | None, typer.Option(help="requests under way; default: 4 x --max-batch")] = None,
    thinking: Annotated[
        bool, typer.Option(help="let the model think first, unless a request says otherwise")
    ] = True,
    max_thinking: Annotated[
        int | None, typer.Option(help="thinking tokens at most; then the answer begins")
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="over Ray Data, on the cluster RAY_ADDRESS names")
    ] = False,
    replicas: Annotated[int, typer.Option(help="with --ray: engines at the same time")] = 1,
    gpus_per_replica: Annotated[float, typer.Option(help="with --ray: 0 on machines without one")] = 0,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object at the end")] = False,
    *,
    config: EngineConfig,
) -> None:
    """Answer a file of requests. A bad line becomes an error line; the rest are unaffected.

    Seeds and ids are made from the lines, so a run that was killed and started again gives the same file.
    """
    with needs_extra("a batch", "serve"):
        from dsv4.serve.batch import Job, Output, count_requests, read_lines, run, state_of
    check_positive(parallel=parallel, replicas=replicas, max_thinking=max_thinking)
    check_ray(ray, replicas=replicas - 1, gpus_per_replica=gpus_per_replica)
    before = state_of(source)
    total = count_requests(source)
    if target.exists() and target.samefile(source):
        raise ConfigError(f"{target} is the input too; name another file for the answers")
    job = Job(
        folder=model_folder(model).resolve(),
        engine=config,
        name=name,
        thinking=thinking,
        max_thinking=max_thinking,
        created=int(source.stat().st_mtime),
    )
    with Output(target) as output:
        tally = output.resume(read_lines(source), job.fingerprint())
        # As the lines so far have it: the input may have been copied since.
        job = replace(job, created=tally.created or job.created)
        if tally.before:
            rest_is = "going on" if tally.before < total else "nothing is left to do"
            say_note(f"{tally.before} of {total} lines are there already; {rest_is}")

        def rest() -> Iterator[tuple[int, bytes]]:
            return islice(enumerate(read_lines(source)), tally.before, None)

        try:
            with count_bar("answering") as update:

                def take(line: bytes) -> None:
                    output.write(line)
                    tally.count(line)
                    update(tally.done, total)

                many = parallel or 4 * config.max_batch
                if tally.done == total:
                    pass
                elif ray:
                    with needs_extra("--ray", "ray"):
                        from dsv4.serve.ray_batch import run_on_ray
                    run_on_ray(
                        job=job,
                        items=rest(),
                        parallel=many,
                        replicas=replicas,
                        gpus_per_replica=gpus_per_replica,
                        take=take,
                    )
                else:
                    with ctrl_c_cancels():
                        asyncio.run(run(job, rest(), many, take, say_note, lambda done, total: None))
        except KeyboardInterrupt:
            done = f"stopped after {tally.done} of {total} lines"
            say_note(f"{done}; the same command goes on from there")
            raise
    if state_of(source) != before:
        raise ConfigError(
            f"{source} was changed while it was answered: {total} lines were asked for, {tally.done} answers "
            "are there; the same command checks them line by line and goes on"
        )
    _show(tally, total, source, target, json)
    if tally.failed:
        raise typer.Exit(4)


def _show(tally: Any, total: int, source: Path, target: Path, json: bool) -> None:
    seconds = time.monotonic() - tally.began
    found = {
        "input": str(source),
        "output": str(target),
        "lines": total,
        "answered_before": tally.before,
        "failed": tally.failed,
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
        "seconds": round(seconds, 2),
    }
    if json:
        print_json(found)
    else:
        out.print(
            f"{total} lines, {tally.failed} of them with an error; {tally.prompt_tokens:,} tokens in prompts "
            f"and {tally.completion_tokens:,} generated; {seconds:.1f} s"
        )
