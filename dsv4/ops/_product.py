"""x [T, K] times w [K, N] such that a row's bits never depend on the other rows: proved here, not assumed.

A BLAS picks its algorithm from the whole shape, and on some CPUs a row's bits even depend on its place in the
tile. So rows are multiplied in tiles of a few heights. Which library, and which heights, is measured on this
machine for every shape: each row in each place, among other rows, must have the bits it has anywhere else.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from dsv4.ops import _memory

# Rows of a tile. Large ones carry prompts, small ones generated tokens.
HEIGHTS = (1, 4, 8, 32, 128)
# A library that has no tile of this height or a higher one is worse than the next.
USEFUL = 8
# Values of a weight that are multiplied at once, and multiplications per height: they bound a proof's cost.
PART = 1 << 21
BUDGET = 1 << 28
# Multiplications up to which products are worth a batch: larger ones take longer than their calls.
SMALL = 1 << 20
# Heights at which the parts of a sum are multiplied in one batch: a generated token, an expert's few rows.
BATCHED = (1, 4)
ALIGNMENT = 64


Multiply = Callable[[Tensor, Tensor], Tensor]
# How w [K, N] lies in memory: its strides. Row-major, perhaps a part of the columns, or (1, K): turned.
Form = tuple[int, ...]
Shape = tuple[int, int, Form]  # K, N and how w lies


def _onednn(x: Tensor, w: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, w.t(), None, "none", [], "")


# Best first. A call of oneDNN costs 25 us more than one of the BLAS, which a small model's step cannot hide.
LIBRARIES: dict[str, Multiply] = {"blas": torch.mm}
if torch.backends.mkldnn.is_available():
    LIBRARIES["onednn"] = _onednn


@dataclass(frozen=True)
class Product:
    """Which library multiplies a shape, in tiles of which heights; `why` names what was rejected before."""

    library: str
    heights: tuple[int, ...]
    why: str


def row_product(x: Tensor, w: Tensor) -> Tensor:
    """x [T, K] float32 times w [K, N] float32 -> [T, N]; a row's bits depend on that row and w alone."""
    rows, depth = x.shape
    width, form = w.shape[1], w.stride()
    if w.data_ptr() % ALIGNMENT or (form != (1, depth) and (form[1] != 1 or form[0] < width)):
        w = w.clone(memory_format=torch.contiguous_format)
        form = w.stride()
    cut = _cut(rows, depth, width, form, x.device, torch.get_num_threads())
    if cut is None:
        return torch.cat([row_product(x, part) for part in w.split(_columns(depth), dim=1)], dim=1)
    multiply, tiles, padding = cut
    if padding is not None:
        x = torch.cat((x, padding))
    elif x.data_ptr() % ALIGNMENT or x.stride() != (depth, 1):
        x = x.clone(memory_format=torch.contiguous_format)
    if len(tiles) == 1:
        y = multiply(x, w)
        return y if padding is None else y[:rows]
    if not tiles:
        return x.new_empty(0, width)
    parts: Iterable[Tensor] = x.split(tiles)
    if depth % (ALIGNMENT // 4):
        parts = (part.clone() for part in parts)
    y = torch.cat([multiply(part, w) for part in parts])
    return y if padding is None else y[:rows]


@lru_cache(maxsize=1024)
def zeros(rows: int, width: int, device: torch.device) -> Tensor:
    """Rows that are read only: padding. Few of one width have memory of their own, since they stay."""
    return _zeros(1 << max(0, rows - 1).bit_length(), width, device)[:rows]


@cache
def _zeros(rows: int, width: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, width, device=device)


@lru_cache(maxsize=4096)
def _cut(
    rows: int, depth: int, width: int, form: Form, device: torch.device, threads: int
) -> tuple[Multiply, list[int], Tensor | None] | None:
    """How so many rows are multiplied: by what, in tiles of which heights, with which rows of zeros behind.

    None: the weight is so large that its columns are multiplied in parts. A tile is the highest that fits, or
    the next higher one if that is less than half empty.
    """
    if depth * width > PART and width > _columns(depth):
        return None
    product = choose(depth, width, form, device, threads)
    tiles, left = [], rows
    while left > 0:
        above = next((height for height in product.heights if height >= left), None)
        fits = max((height for height in product.heights if height <= left), default=None)
        tiles.append(above if above and (fits is None or above < 2 * left) else fits or product.heights[0])
        left -= tiles[-1]
    padding = zeros(-left, depth, device) if left else None
    return LIBRARIES[product.library], tiles, padding


def batch_product(x: Tensor, w: Tensor) -> Tensor:
    """x [B, H, K] times w [B, K, N], or w [1, K, N] for all -> [B, H, N], with the bits of row_product."""
    batch, height, depth = x.shape
    if w.shape[0] == 1:
        return row_product(x.flatten(0, 1), w[0]).view(batch, height, -1)
    is_turned = w.stride(1) == 1
    if is_one_call(height, depth, w.shape[2], is_turned, x.device, torch.get_num_threads()):
        return torch.bmm(x.contiguous(), w)
    return torch.stack([row_product(rows, part) for rows, part in zip(x, w, strict=True)])


@cache
def is_one_call(
    height: int, depth: int, width: int, is_turned: bool, device: torch.device, threads: int
) -> bool:
    """Whether a batch in one call, w row-major or turned, has the bits of the same products one by one."""
    if height * depth * width > SMALL:
        return False
    known = _memory.recall(device, threads)[0].get(batch_name(height, depth, width, is_turned))
    return measure_batch(height, depth, width, is_turned, device) if known is None else known


def batch_name(height: int, depth: int, width: int, is_turned: bool) -> str:
    return f"batches of {height}x{depth}x{width}{' turned' if is_turned else ''}"


def measure_batch(height: int, depth: int, width: int, is_turned: bool, device: torch.device) -> bool:
    rows, part = _hard_rows(depth, width, (1, depth) if is_turned else (width, 1), device)
    order = torch.arange(32 * height, device=device) % len(rows)
    x = rows[order].view(32, height, depth)
    w = torch.empty_strided((32, depth, width), (depth * width, *part.stride()), device=device).copy_(part)
    want = row_product(rows, part)[order].view(32, height, width)
    return all(torch.equal(torch.bmm(x[:batch], w[:batch]), want[:batch]) for batch in (1, 2, 3, 8, 17, 32))


def column_product(x: Tensor, w: Tensor, parts: int) -> Tensor:
    """As row_product, with the bits of products with each of `parts` equal runs of w's columns.

    So a rank that holds some of the runs gives their columns the bits that one with all of them gives.
    """
    depth, width = w.shape
    if parts == 1 or has_free_columns(depth, width, width // parts, x.device, torch.get_num_threads()):
        return row_product(x, w)
    return torch.cat([row_product(x, part) for part in w.split(width // parts, dim=1)], dim=1)


def split_product(x: Tensor, w: Tensor, parts: int) -> Tensor:
    """x [T, K] times w [K, N], each of `parts` equal runs of K by itself -> [T, parts, N]."""
    rows, (depth, width) = x.shape[0], w.shape
    if parts == 1:
        return row_product(x, w).unsqueeze(1)
    x, w = x.reshape(rows, parts, depth // parts), w.view(parts, depth // parts, width)
    if rows in BATCHED:
        return batch_product(x.transpose(0, 1), w).transpose(0, 1)
    return torch.stack([row_product(x[:, part], w[part]) for part in range(parts)], dim=1)


@cache
def has_free_columns(depth: int, width: int, run: int, device: torch.device, threads: int) -> bool:
    """Whether a product with all columns has the bits of products with runs of so many of them."""
    known = _memory.recall(device, threads)[0].get(columns_name(depth, width, run))
    return measure_columns(depth, width, run, device) if known is None else known


def columns_name(depth: int, width: int, run: int) -> str:
    return f"columns of {depth}x{width} by {run}"


def measure_columns(depth: int, width: int, run: int, device: torch.device) -> bool:
    """Columns are multiplied in pieces of a few widths: each, in several places of the widest."""
    most = _columns(depth) if depth * width > PART else width
    pieces = {min(size, most) for size in (width, run)} | {(size - 1) % most + 1 for size in (width, run)}
    widest = max(pieces)
    rows, w = _hard_rows(depth, widest, (widest, 1), device)
    whole = row_product(rows, w)
    for size in pieces - {widest}:
        last = widest - size
        for first in {0, min(run, last), last // 2 // size * size, last}:
            part = slice(first, first + size)
            if not torch.equal(row_product(rows, w[:, part].contiguous()), whole[:, part]):
                return False
    return True


def _columns(depth: int) -> int:
    """How many columns of a large weight are multiplied at once."""
    return max(256, PART // depth // 256 * 256)


@cache
def choose(depth: int, width: int, form: Form, device: torch.device, threads: int) -> Product:
    """The first library whose tiles pass the proof; one row at a time where none does."""
    known = _memory.recall(device, threads)[0].get(name_of(depth, width, form))
    if known is not None and known[0] in LIBRARIES:
        return Product(known[0], tuple(known[1]), known[2])
    return measure(depth, width, form, device)


def measure(depth: int, width: int, form: Form, device: torch.device) -> Product:
    rejected = ""
    for library in LIBRARIES if device.type == "cpu" else ("blas",):
        heights, dependent = prove(library, depth, width, form, device)
        if heights and heights[-1] >= USEFUL:
            return Product(library, heights, f"{rejected}tiles of {_list(heights)} rows agree in every place")
        what = f"a row's place shows at {_list(dependent)} rows" if dependent else "heights disagree"
        rejected += f"{library}: {what}; "
    return Product("blas", (1,), f"{rejected}one row at a time")


def prove(
    library: str, depth: int, width: int, form: Form, device: torch.device
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """-> heights whose tiles give a row the same bits in every place; heights at which the place shows."""
    rows, w = _hard_rows(depth, width, form, device)
    count = rows.shape[0]
    agreeing: list[tuple[Tensor, list[int]]] = []
    dependent = []
    for height in HEIGHTS:
        if height > USEFUL and height * count * depth * width > BUDGET:
            break
        # Row (i + shift) mod count lies at place i: each row in each place, among the others.
        order = torch.arange(height, device=device) % count
        tiles = [LIBRARIES[library](rows[(order + shift) % count], w) for shift in range(count)]
        want = torch.stack([tile[0] for tile in tiles])
        if not all(torch.equal(tile, want[(order + shift) % count]) for shift, tile in enumerate(tiles)):
            dependent.append(height)
            continue
        group = next((heights for bits, heights in agreeing if torch.equal(bits, want)), None)
        if group is None:
            agreeing.append((want, group := []))
        group.append(height)
    best = max((heights for _, heights in agreeing), key=lambda found: (len(found), found[-1]), default=[])
    return tuple(best), tuple(dependent)


def _hard_rows(depth: int, width: int, form: Form, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and a weight, in memory as the model's, whose products cancel: then a sum's order shows."""
    generator = torch.Generator(device).manual_seed(depth * 65537 + width)
    half, least = depth // 2, 2 if width >= 256 else 4
    count = max(least, min(64, 4096 // (depth * width)))
    rows = torch.randn(count, depth, generator=generator, device=device)
    few = torch.randn(
        61, width, generator=generator, device=device
    )  # rows of w repeat: random ones take long
    w = torch.empty_strided((depth, width), form, device=device)
    w[: depth - half] = few.index_select(0, torch.arange(depth - half, device=device) % 61)
    order = torch.randperm(half, generator=generator, device=device)
    w[depth - half :] = w.index_select(0, order).neg_()
    rows[:, depth - half :] = rows[:, order]
    rows[:, half : depth - half] *= 1e-3  # the one that has no counterpart
    return rows, w


def name_of(depth: int, width: int, form: Form) -> str:
    if form == (width, 1):
        return f"{depth}x{width}"
    return f"{depth}x{width} turned" if form == (1, depth) else f"{depth}x{width} of {form[0]}"


def _list(heights: tuple[int, ...]) -> str:
    return ", ".join(map(str, heights))


def settle(shapes: set[Shape], device: torch.device, threads: int) -> dict[str, Product]:
    """The products of those shapes, by name."""
    chosen = {}
    for depth, width, form in sorted(shapes):
        most = _columns(depth) if depth * width > PART else width
        for part in {min(width, most), (width - 1) % most + 1}:
            chosen[name_of(depth, part, form)] = choose(depth, part, form, device, threads)
    return chosen
