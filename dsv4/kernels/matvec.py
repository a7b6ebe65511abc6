"""Launches matvec.cu: several weights in one grid, each with its input and output; and unpacks tiles."""

import ctypes
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from dsv4.kernels.build import call, pointer
from dsv4.kernels.tiles import CODE, SLICE, Tiled

MAX_SLICES, MAX_SEGMENTS, MAX_NORM, COLUMNS, FLOAT_COLUMNS = 8, 16, 4, 8, 2
MAX_EXPERTS = 512


class _Segment(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "scale", "factor", "x", "y", "norm")),
        *((name, ctypes.c_int) for name in ("format", "halves", "units", "slices", "first_slice", "warps")),
        *((name, ctypes.c_int) for name in ("n", "k", "x_stride", "y_stride", "epilogue", "routed")),
        ("norm_eps", ctypes.c_float),
    )


class _Params(ctypes.Structure):
    _fields_ = (
        ("segments", _Segment * MAX_SEGMENTS),
        *((name, ctypes.c_void_p) for name in ("work", "task_expert", "task_pairs", "weights", "logits")),
        *((name, ctypes.c_void_p) for name in ("bias", "table", "id", "chosen")),
        ("experts", ctypes.c_int),
        ("route_scale", ctypes.c_float),
        ("choices", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("limit", ctypes.c_float),
        ("ahead", ctypes.c_void_p),
        ("ahead_bytes", ctypes.c_int64),
    )


# rows: x and y are rows of the batch. up: a bank's experts, x by token, y by pair (token, choice).
# down: x by pair, y by token and choice, with one place more per token (the shared expert's).
Who = Literal["rows", "up", "down"]


@dataclass(frozen=True)
class Product:
    """y = x Wt. y float32 keeps the sums; more than 8 slices of K give y [splits, ...], to be summed.

    `norm`: x goes through rms_norm with this weight [K] first, and is rounded.
    """

    weight: Tiled
    x: Tensor
    y: Tensor
    who: Who = "rows"
    x_stride: int = 0  # values from row to row; 0: the columns of the weight
    y_stride: int = 0
    norm: Tensor | None = None
    norm_eps: float = 0.0


@dataclass(frozen=True)
class Tasks:
    """Which expert meets which pairs: written by the router, at most one task per pair."""

    expert: Tensor  # int32 [pairs]
    pairs: Tensor  # int32 [pairs, 8]
    weights: Tensor  # float32 [pairs]
    choices: int

    @classmethod
    def empty(cls, rows: int, choices: int, device: str | torch.device) -> "Tasks":
        pairs = rows * choices
        integers = {"dtype": torch.int32, "device": device}
        return cls(
            torch.full((pairs,), -1, **integers),  # type: ignore[call-overload]
            torch.full((pairs, COLUMNS), -1, **integers),  # type: ignore[call-overload]
            torch.zeros(pairs, device=device),
            choices,
        )


@dataclass(frozen=True)
class Routing:
    """How a single row finds its experts: by logits with a bias, or by a table of token ids."""

    logits: Tensor  # float32 [1, E]
    bias: Tensor | None  # float32 [E]
    table: Tensor | None  # int64 [V, K]
    ids: Tensor  # int64 [1]
    scale: float
    chosen: Tensor  # int32 [1, K], written by the bank's first product


def splits(k: int) -> int:
    """Into how many separately stored sums a product over K columns is cut."""
    slices = -(-k // SLICE)
    return -(-slices // MAX_SLICES)


class MatVec:
    """One launch, planned once: `rows` of the batch, products that run together, their share of the GPU."""

    def __init__(
        self,
        products: list[Product],
        rows: int,
        tasks: Tasks | None = None,
        limit: float = 0.0,
        ahead: Tensor | None = None,
        routing: Routing | None = None,
    ) -> None:
        """`ahead`: a few megabytes that the next kernel reads, brought to the L2 cache meanwhile.

        `routing`: of one row. Its experts are found in the launch, and `tasks` is written, not read.
        A "down" reads what says its experts before it waits for the launch before it: that must be its "up".
        """
        device = products[0].x.device
        self.device, self.is_float = device, products[0].x.dtype == torch.float32
        self.keep = (products, tasks, ahead, routing)  # the launch holds raw pointers into these
        params = _Params(rows=rows, limit=limit, choices=tasks.choices if tasks else 1)
        if tasks:
            params.task_expert, params.task_pairs = tasks.expert.data_ptr(), tasks.pairs.data_ptr()
            params.weights = tasks.weights.data_ptr()
        if routing is not None:
            experts = routing.logits.shape[1]
            assert tasks and rows == 1 and experts <= MAX_EXPERTS and tasks.choices <= 32, (rows, experts)
            params.logits, params.id = routing.logits.data_ptr(), routing.ids.data_ptr()
            params.bias = None if routing.bias is None else routing.bias.data_ptr()
            params.table = None if routing.table is None else routing.table.data_ptr()
            params.chosen, params.experts = routing.chosen.data_ptr(), experts
            params.route_scale = routing.scale
        if ahead is not None:
            params.ahead, params.ahead_bytes = ahead.data_ptr(), ahead.nbytes
        segments: list[tuple[_Segment, Product]] = []
        for product in products:
            segments += [(segment, product) for segment in _segments(product)]
        assert len(segments) <= MAX_SEGMENTS, len(segments)
        for i, (segment, _) in enumerate(segments):
            params.segments[i] = segment
        columns = FLOAT_COLUMNS if self.is_float else COLUMNS
        count = torch.cuda.get_device_properties(device).multi_processor_count
        grid = _Grid(count, 2, 8) if rows == 1 and not self.is_float else _Grid(count)
        work = _share([s for s, _ in segments], rows, columns, tasks, grid)
        self.work = torch.tensor(work, dtype=torch.int32, device=device)
        params.work = self.work.data_ptr()
        self.params, self.blocks = params, len(work)

    def launch(self) -> None:
        arguments = (ctypes.byref(self.params), self.blocks, int(self.is_float))
        call("matvec", "matvec", self.device, *arguments)


def _segment(weight: Tiled) -> _Segment:
    n, k = weight.shape
    return _Segment(
        *(weight.data.data_ptr(), weight.scale.data_ptr(), weight.factor.data_ptr(), None, None, None),
        *(CODE[weight.format], weight.halves, weight.units, weight.slices, 0, 0, n, k, 0, 0, 0, 0, 0.0),
    )


def _segments(product: Product) -> list[_Segment]:
    """One per separately stored sum over K."""
    weight, count = product.weight, splits(product.weight.shape[1])
    out, per = [], -(-weight.slices // count)
    is_float = product.y.dtype == torch.float32
    assert count == 1 or (is_float and product.y.shape[0] == count and weight.halves == 1)
    assert product.x.data_ptr() % 16 == 0 and (product.x_stride or weight.shape[1]) % 4 == 0
    for split in range(count):
        segment = _segment(weight)
        segment.first_slice = split * per
        segment.warps = min(per, weight.slices - split * per)
        segment.x, segment.y = product.x.data_ptr(), product.y.data_ptr()
        if count > 1:
            segment.y = product.y[split].data_ptr()
        segment.x_stride = product.x_stride or weight.shape[1]
        segment.y_stride = product.y_stride or weight.shape[0]
        if product.norm is not None:
            assert product.norm.shape == (weight.shape[1],) and product.norm.dtype == torch.float32
            assert weight.slices <= MAX_NORM and product.norm.data_ptr() % 16 == 0, weight.shape
            segment.norm, segment.norm_eps = product.norm.data_ptr(), product.norm_eps
        segment.epilogue = int(is_float)
        segment.routed = {"rows": 0, "up": 1, "down": 2}[product.who]
        out.append(segment)
    return out


@dataclass(frozen=True)
class _Grid:
    """What is resident at once: `each` blocks of `warps` on every multiprocessor, as matvec.cu has it."""

    multiprocessors: int
    each: int = 1
    warps: int = 16


def _share(
    segments: list[_Segment], rows: int, columns: int, tasks: Tasks | None, grid: _Grid
) -> list[tuple[int, int, int, int]]:
    """Cut all units into runs, one per block: (segment, first unit, units, task or group of rows).

    The runs have about equal bytes and all are resident at once. Experts of a batch are the exception: how
    many tasks there will be is not known here, so each is cut alike and the hardware queues them.
    """
    per_load = (9, 8.5, 16, 32)  # bytes of a brick over 512, with its scales
    repeats = [len(tasks.expert) if s.routed and tasks else -(-rows // columns) for s in segments]
    together = [max(1, grid.warps // s.warps) for s in segments]  # units that a block takes at a time
    rounds = [-(-s.units // t) for s, t in zip(segments, together, strict=True)]
    cost = [t * s.halves * s.warps * per_load[s.format] for s, t in zip(segments, together, strict=True)]
    if rows > 1 and any(s.routed for s in segments):
        runs = [min(16, n) for n in rounds]
    else:
        # Each repeat of a segment gets a block; the rest go where a run is longest.
        runs = [1] * len(segments)
        while True:
            left = grid.multiprocessors * grid.each - sum(n * r for n, r in zip(runs, repeats, strict=True))
            fits = [i for i, r in enumerate(repeats) if r <= left and runs[i] < rounds[i]]
            if not fits:
                break
            longest = max(fits, key=lambda i: cost[i] * rounds[i] / runs[i])
            runs[longest] += 1
    out = []
    for i, (s, n) in enumerate(zip(segments, runs, strict=True)):
        cuts = [min(s.units, rounds[i] * k // n * together[i]) for k in range(n + 1)]
        for task in range(repeats[i]):
            out += [(i, a, b - a, task) for a, b in pairwise(cuts) if b > a]
    if grid.each == 1:
        return out
    # A multiprocessor gets blocks i and i + multiprocessors: the shortest of the first go with the longest of
    # the rest, so that each has about as much to do.
    out.sort(key=lambda run: -(-run[2] // together[run[0]]) * cost[run[0]], reverse=True)
    return out[: grid.multiprocessors][::-1] + out[grid.multiprocessors :]


def unpack(weight: Tiled, out: Tensor) -> None:
    """The values without factor, row-major: out [count * halves * N, K] BF16 or float32, w1 before w3."""
    assert (
        out.is_contiguous()
        and out.numel() == weight.count * weight.halves * weight.shape[0] * weight.shape[1]
    )
    assert weight.data.is_contiguous() and weight.scale.is_contiguous()
    segment = _segment(weight)
    is_float = int(out.dtype == torch.float32)
    call("unpack", "unpack", out.device, ctypes.byref(segment), weight.count, pointer(out), is_float)
