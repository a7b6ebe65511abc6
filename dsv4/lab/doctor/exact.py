"""Whether a row's bits depend on its neighbours here: the choices of a start, examined at length."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.lab.doctor.findings import Finding
from dsv4.model.exact import FUNCTIONS, Exact, settle_exact, weight_shapes
from dsv4.ops._memory import path_of
from dsv4.ops._product import Product, measure, row_product

# Weights with more values than this are not multiplied at length: minutes, not seconds.
LARGEST = 1 << 22
ROWS = 133
_CPU = torch.device("cpu")


def examine_exact(config: ModelConfig, num_mtp_layers: int, max_context: int) -> Iterator[Finding]:
    """The model's products with one thread, and with as many as torch would use."""
    before = torch.get_num_threads()
    try:
        for threads in sorted({1, before}):
            torch.set_num_threads(threads)
            yield _examine(config, num_mtp_layers, max_context, threads)
    finally:
        torch.set_num_threads(before)


def _examine(config: ModelConfig, num_mtp_layers: int, max_context: int, threads: int) -> Finding:
    name = f"rows on {threads} thread{'s' if threads > 1 else ''}"
    exact = settle_exact(config, num_mtp_layers, max_context, _CPU, threads)
    shapes = [shape for shape in weight_shapes(config, num_mtp_layers) if shape[0] * shape[1] <= LARGEST]
    remedy = f"delete {path_of(_CPU, threads)} and run dsv4 again; if it stays, report this line"
    for depth, width, form in sorted(shapes):
        chosen = exact.products[f"{depth}x{width}"]
        if measure(depth, width, form, _CPU).library != chosen.library:
            text = f"{depth}x{width}: {chosen.library} was remembered, but does not hold now"
            return Finding("machine", name, "fail", text, remedy)
        if (row := dependent_row(depth, width)) is not None:
            text = f"{depth}x{width} by {chosen.library}: row {row} depends on the others"
            return Finding("machine", name, "fail", text, remedy)
    return Finding("machine", name, "ok", f"independent of each other: {summary(exact)}")


def dependent_row(depth: int, width: int) -> int | None:
    """The first of many rows that has other bits alone, in a group, or beside rows that are no numbers."""
    generator = torch.Generator().manual_seed(depth + width)
    x = torch.randn(ROWS, depth, generator=generator)
    w = torch.randn(depth, width, generator=generator)
    alone = torch.cat([row_product(row, w) for row in x.split(1)])
    spoilt = x.clone()
    spoilt[::3] = torch.tensor((torch.nan, torch.inf)).repeat(depth)[:depth]
    for count in (2, 3, 5, 8, 13, 33, ROWS):
        for rows, wanted in ((x[-count:], alone[-count:]), (x[:count], alone[:count])):
            if (row := _first_difference(row_product(rows, w), wanted)) is not None:
                return row
    keep = torch.arange(ROWS) % 3 > 0
    return _first_difference(row_product(spoilt, w)[keep], alone[keep])


def _first_difference(got: Tensor, want: Tensor) -> int | None:
    differs = (got != want).any(1)
    return int(differs.nonzero()[0]) if bool(differs.any()) else None


def summary(exact: Exact) -> str:
    """Which library multiplies how many shapes in which tiles, what was rejected, what runs one by one."""
    kinds = Counter((p.library, p.heights) for p in exact.products.values())
    parts = [
        f"{library} multiplies {count} shapes in tiles of {', '.join(map(str, heights))} rows"
        for (library, heights), count in kinds.most_common()
    ]
    functions = ", ".join(f.__name__ for f in FUNCTIONS if f.__name__ not in exact.one_by_one)
    parts.append(f"all rows at once: {functions or 'nothing'}")
    if exact.one_by_one:
        parts.append(f"one by one: {', '.join(exact.one_by_one)}")
    return "; ".join(parts)


def rejections(products: dict[str, Product]) -> list[str]:
    """Shapes that the first library was not taken for, each with the reason."""
    return [f"{name}: {p.library}, because {p.why}" for name, p in products.items() if ";" in p.why]
