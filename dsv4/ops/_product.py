"""x [T, K] times w [K, N] such that a row's bits never depend on the other rows: proved here, not assumed.

A BLAS picks its algorithm from the whole shape, and on some CPUs a row's bits even depend on its place in the
tile. So rows are multiplied in tiles of a few heights. Which library, and which heights, is measured on this
machine for every shape: each row in each place, among other rows, must have the bits it has anywhere else.
"""

from collections.abc import Callable
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
PART = 1 << 22
BUDGET = 1 << 29
ALIGNMENT = 64


def _onednn(x: Tensor, w: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, w.t(), None, "none", [], "")


# Best first. A call of oneDNN costs 25 us more than one of the BLAS, which a small model's step cannot hide.
LIBRARIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"blas": torch.mm}
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
    depth, width = w.shape
    if not x.shape[0]:
        return x.new_empty(0, width)
    x, w = _aligned(x), _aligned(w)
    if depth * width <= PART:
        return _multiply(x, w)
    return torch.cat([_multiply(x, part) for part in w.split(_columns(depth), dim=1)], dim=1)


def _multiply(x: Tensor, w: Tensor) -> Tensor:
    rows, depth = x.shape
    product = choose(depth, w.shape[1], w.stride(0), x.device, torch.get_num_threads())
    multiply, tiles = LIBRARIES[product.library], _cut(rows, product.heights)
    padding = sum(tiles) - rows
    if padding:
        x = torch.cat((x, _zeros(padding, depth, x.device)))
    if len(tiles) == 1:
        return multiply(x, w)[:rows] if padding else multiply(x, w)
    parts = x.split(tiles)
    if depth % (ALIGNMENT // 4):
        parts = [part.clone() for part in parts]
    return torch.cat([multiply(part, w) for part in parts])[:rows]


def _columns(depth: int) -> int:
    """How many columns of a large weight are multiplied at once."""
    return max(256, PART // depth // 256 * 256)


def _aligned(x: Tensor) -> Tensor:
    """Row-major, beginning where an allocation begins: a library may look at strides and addresses."""
    if x.is_contiguous() and x.stride(0) == x.shape[1] and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


@cache
def _zeros(count: int, width: int, device: torch.device) -> Tensor:
    return torch.zeros(count, width, device=device)


@lru_cache(maxsize=4096)
def _cut(rows: int, heights: tuple[int, ...]) -> list[int]:
    """Tile heights for so many rows: the highest that fits, or one that is less than half empty."""
    tiles = []
    while rows > 0:
        above = next((height for height in heights if height >= rows), None)
        fits = max((height for height in heights if height <= rows), default=None)
        tiles.append(above if above and (fits is None or above < 2 * rows) else fits or heights[0])
        rows -= tiles[-1]
    return tiles


@cache
def choose(depth: int, width: int, stride: int, device: torch.device, threads: int) -> Product:
    """The first library whose tiles pass the proof; one row at a time where none does."""
    known = _memory.recall(device, threads)[0].get(_name(depth, width, stride))
    if known is not None:
        return Product(known[0], tuple(known[1]), known[2])
    return measure(depth, width, stride, device)


def measure(depth: int, width: int, stride: int, device: torch.device) -> Product:
    rejected = ""
    for library in LIBRARIES if device.type == "cpu" else ("blas",):
        heights, dependent = prove(library, depth, width, stride, device)
        if heights and heights[-1] >= USEFUL:
            return Product(library, heights, f"{rejected}tiles of {_list(heights)} rows agree in every place")
        what = f"a row's place shows at {_list(dependent)} rows" if dependent else "heights disagree"
        rejected += f"{library}: {what}; "
    return Product("blas", (1,), f"{rejected}one row at a time")


def prove(
    library: str, depth: int, width: int, stride: int, device: torch.device
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """-> heights whose tiles give a row the same bits in every place; heights at which the place shows."""
    rows, w = _hard_rows(depth, width, stride, device)
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


def _hard_rows(depth: int, width: int, stride: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and a weight, in memory as the model's, whose products cancel: then a sum's order shows."""
    generator = torch.Generator(device).manual_seed(depth * 65537 + width)
    half, least = depth // 2, 2 if width >= 256 else 4
    rows = torch.randn(
        max(least, min(64, 4096 // (depth * width))), depth, generator=generator, device=device
    )
    few = torch.randn(
        61, width, generator=generator, device=device
    )  # rows of w repeat: random ones take long
    w = torch.empty(depth, stride, device=device)[:, :width]
    w[: depth - half] = few[torch.arange(depth - half, device=device) % 61]
    order = torch.randperm(half, generator=generator, device=device)
    w[depth - half :] = -w[order]
    rows[:, depth - half :] = rows[:, order]
    rows[:, half : depth - half] *= 1e-3  # the one that has no counterpart
    return rows, w


def _name(depth: int, width: int, stride: int) -> str:
    return f"{depth}x{width}" if stride == width else f"{depth}x{width} of {stride}"


def _list(heights: tuple[int, ...]) -> str:
    return ", ".join(map(str, heights))


def settle(shapes: set[tuple[int, int]], device: torch.device, threads: int) -> dict[str, Product]:
    """The products of a model's shapes [K, N], by name."""
    chosen = {}
    for depth, width in sorted(shapes):
        most = width if depth * width <= PART else _columns(depth)
        for part in {min(width, most), (width - 1) % most + 1}:
            chosen[_name(depth, part, width)] = choose(depth, part, width, device, threads)
    return chosen
