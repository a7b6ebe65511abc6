"""`dsv4 bench ranks`: one GPU as one rank of several, and what several would reach."""

from typing import Annotated, Any

import typer

from dsv4.cli.bench_show import show_rows, title_of
from dsv4.cli.show import err, size

EPILOG = """
[bold]Examples[/]

  dsv4 bench ranks flash --of 2 --layout nvfp4

  dsv4 bench ranks pro --of 8 --experts 384 --layout nvfp4
"""


def ranks(
    name: Annotated[str, typer.Argument(help="flash, pro or tiny: random weights of these sizes")],
    of: Annotated[int, typer.Option(help="how many ranks there would be: 2, 4 or 8; 1: the whole model")],
    experts: Annotated[
        int | None, typer.Option(help="resident experts per layer; default: 192, or all if fewer")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="the first N layers only")] = None,
    layout: Annotated[str, typer.Option(help="modelopt, official or nvfp4")] = "modelopt",
    context: Annotated[int, typer.Option(help="tokens before the first")] = 4096,
    batch: Annotated[int, typer.Option(help="sequences that decode together, 1 to 32")] = 1,
    steps: Annotated[int, typer.Option(help="tokens of each sequence that are timed")] = 128,
) -> None:
    """Time the decode step of one rank: its share of the weights, every push and every wait, but its own
    memory answers in its peers' place; then the same step without its all-reduces. Ends in one JSON line."""
    import torch

    from dsv4.cli.bench import finish, machine_of
    from dsv4.lab.bench.ceiling import gpu
    from dsv4.lab.bench.decode import Wanted
    from dsv4.lab.bench.ranks import measure
    from dsv4.lab.bench.subject import check_fits, check_kernels, other_bytes, synthetic

    wanted = Wanted(context, batch, steps)
    subject = synthetic(name, experts, layers, layout, ranks=of)
    layout_of_cache = wanted.layout(subject.config)
    device = gpu()
    check_kernels(subject.config, device, layout_of_cache.max_context, of)
    check_fits(subject, other_bytes(layout_of_cache, (wanted.rows,)), torch.cuda.mem_get_info(device)[0])
    with err.status(f"making {size(subject.weight_bytes)} of weights, compiling, decoding"):
        line = measure(subject, wanted, device)
    show_rows(
        f"one rank of {of}: {title_of(line)}, context {context:,}, batch {batch}",
        [
            ("weights", size(line["weight_bytes"]), "of this rank"),
            ("per token", f"{line['ms_per_token']:.3f} ms", f"median of {steps}, measured"),
            *(predicted_rows(line) if of > 1 else ()),
        ],
    )
    finish({**line, **machine_of(device)}, None)


def predicted_rows(line: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    at_published = "ms_added_at_published"
    without = f"the step without them, {line['ms_without_all_reduces']:.3f} ms,"
    for rate, step, each, added, why in (
        ("predicted_tokens_per_second", "the step", "all_reduce_us", "ms_added", "assumed"),
        ("predicted_counted_once", without, "all_reduce_us", "ms_added", "assumed"),
        ("predicted_at_published", "the step", "published_all_reduce_us", at_published, "published"),
    ):
        waits = f"{line['all_reduces']} all-reduces of {line[each]:.1f} us, {why}"
        what = f"{line['ranks']} GPUs: {step} + {line[added]:.3f} ms for {waits}"
        rows.append(("predicted", f"{line[rate]:,.1f} tokens/s", what))
    step = "the step has its own pushes and waits already, so what both have is counted twice; without, once"
    return [*rows, ("", "", f"{step}; ranks that come late are not counted")]
