"""Decode step: launches matvec.cu. Several weights in one grid, each with its input and output."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from dsv4.gpu.architectures import has_room
from dsv4.gpu.build import call
from dsv4.gpu.meaning import Claim
from dsv4.gpu.pdl import Touches, tensors_of
from dsv4.gpu.shapes import HOW
from dsv4.gpu.structs import Struct, mirror
from dsv4.gpu.tiles import CODE, SLICE, Tiled
from dsv4.ops.linear.meaning import matvec
from dsv4.quant.formats import Format

MAX_SLICES, MAX_PASSES, MAX_SEGMENTS, STAGES = 8, 2, 16, 2
COLUMNS, FEW_COLUMNS, FLOAT_COLUMNS = 8, 4, 2  # of x, which a block multiplies at once
MAX_FEW = 8  # rows whose experts are multiplied FEW_COLUMNS at once: more rarely meet in an expert
MAX_SHARES = 2  # products of a routed batch
MAX_DEPTH = MAX_PASSES * MAX_SLICES * SLICE  # columns of a weight whose product is one sum
MAX_MIXED = 256  # rows that a block mixes, one per thread
# Warps of a block, bytes of its shared memory but for the weights, and those of a warp's chunk; matvec.cu
# holds them against its layout. A batch's block has half the warps where the GPU has less shared memory. Two
# blocks for few rows fit on a multiprocessor, as do a single row's, with one pass, and with more:
BATCH = {True: (16, 100864, 4096), False: (8, 84352, 1024)}
FEW = (8, 42368, 4096)
SINGLE = {False: (8, 11008, 4096), True: (8, 19712, 4096)}
MAX_UNITS = 4096  # of a block, many times what it usually has: so far Segment's shares divide rightly

_Segment = mirror("linear/matvec.cu", "Segment")

_Mixing = mirror("linear/matvec.cu", "Mixing")

_Share = mirror("linear/matvec.cu", "Share")

_Params = mirror("linear/matvec.cu", "Params")


# rows: x and y are rows of the batch. up: a bank's experts, x by token, y by pair (token, choice).
# down: x by pair, y by token and choice, with one place more per token (the shared expert's).
Who = Literal["rows", "up", "down"]


@dataclass(frozen=True)
class Product:
    """y = x Wt, rounded to y's type. `splits` > 1 (split-K): y [splits, ...] float32, to be summed.

    `activations`: x is rounded on the way, where `can_round` says that this is possible. NVFP4's scale is
    that of a whole row: where blocks have parts of it, `x_top` [rows of x] has its largest magnitude,
    float32's bits. Who makes the row, a single one, lets `y_top` [rows of y], cleared before, grow to that.
    """

    weight: Tiled
    x: Tensor
    y: Tensor
    who: Who = "rows"
    x_stride: int = 0  # values from row to row; 0: the columns of the weight
    y_stride: int = 0
    splits: int = 1
    activations: str = "a16"
    x_top: Tensor | None = None
    y_top: Tensor | None = None

    @property
    def passes(self) -> int:
        """How often a block walks its units, each time over a part of K."""
        return -(-self._span // MAX_SLICES)

    @property
    def can_round(self) -> bool:
        """For a single row in BF16, of which a lane has 16 channels."""
        wide = (self.weight.shape[1] | self.x_stride) % 8 == 0
        return self.x.dtype == torch.bfloat16 and self.who != "up" and self.passes == 1 and wide

    @property
    def _span(self) -> int:
        """Slices of one sum."""
        return -(-self.weight.slices // self.splits)

    @property
    def carry_row(self) -> int:
        """float32 numbers that a row of y keeps between two passes, elsewhere than in y."""
        in_y = self.y.dtype == torch.float32 and self.weight.halves == 1
        return 0 if self.passes == 1 or in_y else self.weight.halves * self.weight.shape[0]


@dataclass(frozen=True)
class Tasks:
    """Which expert meets which pairs: written by the router, at most one task per pair."""

    expert: Tensor  # int32 [pairs]
    pairs: Tensor  # int32 [pairs, 8], of which `pairs_of_task` are used
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
class Mixing:
    """Sinkhorn's rounds on what mhc.mix_close left in `comb` [T, 4, 4], in place, beside the products."""

    comb: Tensor
    iters: int
    eps: float


def splits(k: int) -> int:
    """Split-K: into how many separately stored sums a product over K columns is cut, so that none takes more
    than one pass."""
    slices = -(-k // SLICE)
    return -(-slices // MAX_SLICES)


def pairs_of_task(rows: int, is_float: bool, device: torch.device) -> int:
    """How many pairs a task holds at most, in a step of so many rows."""
    if is_float:
        return FLOAT_COLUMNS
    return FEW_COLUMNS if rows <= MAX_FEW and has_room(device) else COLUMNS


class MatVec:
    """One launch, planned once: `rows` of the batch, products that run together, their share of the GPU."""

    def __init__(
        self,
        products: list[Product],
        rows: int,
        tasks: Tasks | None = None,
        limit: float = 0.0,
        blocks: int | None = None,
        prefetch: Tensor | None = None,
        mixing: Mixing | None = None,
        clears: Tensor | None = None,
        carry: Tensor | None = None,
        triggers_late: bool = False,
        early_stages: int = STAGES,
        paced: bool = False,
        spread: bool = False,
        beside: bool = False,
        overlap: bool = True,
    ) -> None:
        """`prefetch`: a few megabytes that the next kernel reads, brought to L2 meanwhile.

        `clears`: magnitudes (`y_top`) of a later launch, set to zero here; a single row's launch, not "up".

        `carry`: float32 scratch for products that take more than one pass (`Product.carry_row`).

        `triggers_late`: launch_dependents comes after the wait. A "down" reads its tasks early, so "up"
        always triggers late.

        For a single row: `early_stages`, how many chunks of 4 KiB each warp fetches before the wait (fewer
        where blocks start only when their input is about to be there: it would queue behind them), or
        `paced`: all, but not at once, for a launch that small kernels precede. `spread`: one block per
        multiprocessor, with twice the chunks. `beside`: one as well, which fits beside that of a spread
        launch before it, so that its weights come while the other computes.
        """
        device = products[0].x.device
        self.device, self.is_float = device, products[0].x.dtype == torch.float32
        self.overlap, self.rows, self.is_single = overlap, rows, rows == 1 and not self.is_float
        self.keep = (products, tasks, prefetch, mixing, clears)  # the launch holds raw pointers into these
        self.is_wide = any(product.passes > 1 for product in products)
        rounding = [product for product in products if product.activations != "a16"]
        if rounding:
            assert self.is_single and all(product.can_round for product in products), products
            assert all(product.weight.format is not Format.BF16 for product in rounding), rounding
            assert all(p.splits == 1 or p.x_top is not None for p in rounding if p.activations == "a4"), (
                products
            )
        tops = [*(p.x_top for p in products), *(p.y_top for p in products), clears]
        assert all(top is None or (top.dtype == torch.int32 and top.is_contiguous()) for top in tops)
        assert self.is_single or all(top is None for top in tops[len(products) :]), "several rows"
        assert all(p.y_top is None or p.weight.halves == 1 for p in products), "pairs have no y_top"
        self.carry = carry if any(product.carry_row for product in products) else None
        triggers_late |= any(product.who == "up" for product in products)
        choices = tasks.choices if tasks else 1
        assert early_stages == STAGES or not paced, "a paced launch fetches all chunks early"
        columns = FLOAT_COLUMNS if self.is_float else COLUMNS
        if tasks:
            columns = pairs_of_task(rows, self.is_float, device)
        self.is_few = columns == FEW_COLUMNS and not self.is_single
        self.warps, shared, chunk = FEW if self.is_few else BATCH[has_room(device)]
        if self.is_single:
            self.warps, shared, chunk = SINGLE[self.is_wide]
        spread = spread and self.is_single and has_room(device) and not self.is_wide
        stages = 2 * STAGES if spread else STAGES
        self.shared = shared + stages * self.warps * chunk
        if clears is not None:
            assert clears.numel() <= 32 * self.warps and all(p.who != "up" for p in products), clears.shape
        segments: list[tuple[Struct, Product]] = []
        carried = 0
        for product in products:
            found = _segments(product)
            segments += [(segment, product) for segment in found]
            if product.carry_row:
                assert carry is not None and carry.dtype == torch.float32, "no carry for two passes"
                found[0].carry = carry.data_ptr() + 4 * carried
                carried += product.carry_row * (rows if product.who == "rows" else rows * choices)
        assert carry is None or carried <= carry.numel(), (carried, carry.shape)
        assert len(segments) <= MAX_SEGMENTS, len(segments)
        all_segments = [segment for segment, _ in segments]
        for segment in all_segments:
            segment.per_warp = -(-65536 // segment.warps)
            segment.per_group = -(-65536 // (self.warps // segment.warps))
        if blocks is None:
            blocks = torch.cuda.get_device_properties(device).multi_processor_count
            if self.is_few or (self.is_single and has_room(device) and not (spread or beside)):
                blocks *= 2  # that a multiprocessor holds
        blocks -= mixing is not None
        shares: list[Struct] = []
        if tasks and rows > 1:
            assert all(product.who != "up" for product in products[1:]), "the first says when tasks are read"
            shares = _shares(all_segments, rows, columns, self.warps, len(tasks.expert))
            work = [(0, block, blocks, 0) for block in range(blocks)]
            longest = max(segment.units for segment in all_segments)
        else:
            work = _work(all_segments, rows, columns, tasks, blocks)
            longest = max(units for _, _, units, _ in work)
        assert longest <= MAX_UNITS, longest
        if mixing is not None:
            assert mixing.comb.is_contiguous() and rows <= MAX_MIXED, (mixing.comb.shape, rows)
            work.insert(0, (-1, 0, 0, 0))
        self.work, self.blocks = torch.tensor(work, dtype=torch.int32, device=device), len(work)
        self.params = _Params(
            segments=all_segments,
            work=self.work,
            shares=shares,
            num_shares=len(shares),
            max_tasks=len(tasks.expert) if tasks and shares else 0,
            task_expert=tasks and tasks.expert,
            task_pairs=tasks and tasks.pairs,
            weights=tasks and tasks.weights,
            choices=choices,
            rows=rows,
            limit=limit,
            triggers_late=triggers_late,
            stages=stages,
            early_stages=0 if not self.is_single else stages if early_stages == STAGES else early_stages,
            paced=paced and self.is_single,
            mixing=_mixing(mixing),
            cleared=clears,
            clears=0 if clears is None else clears.numel(),
            prefetch=prefetch,
            prefetch_bytes=0 if prefetch is None else prefetch.nbytes,
        )

    def launch(self) -> None:
        flags = (self.is_wide,) if self.is_single else (self.is_float, self.is_few, self.is_wide)
        kinds = ", ".join(str(flag).lower() for flag in flags)
        call(
            "linear/matvec",
            f"{'single' if self.is_single else 'batch'}_kernel<{kinds}>",
            self.device,
            self.params,
            blocks=self.blocks,
            threads=32 * self.warps,
            shared=self.shared,
            overlap=self.overlap,
        )

    def claims(self) -> list[Claim]:
        products, tasks, _, mixing, clears = self.keep
        return matvec(products, self.rows, tasks, self.params.limit, mixing, clears)

    @property
    def touches(self) -> Touches:
        products, tasks, prefetch, mixing, clears = self.keep
        reads: list[Tensor] = []
        early: list[Tensor] = [self.work]
        for product in products:
            weights = tensors_of(product.weight)
            if product.who == "up":
                reads += [*weights, *tensors_of(tasks)]
                (early if self.is_single else reads).append(product.x)
            else:
                early += weights
                reads += tensors_of([product.x, product.x_top])
            if product.who == "down":
                assert tasks is not None
                early += [tasks.expert, tasks.pairs]
        tops = tensors_of([product.y_top for product in products])
        own = (*tensors_of((mixing and mixing.comb, self.carry)), *tops)
        return Touches(
            reads=(*reads, *own),
            reads_early=tuple(early),
            writes=(*(product.y for product in products), *own, *tensors_of(clears)),
            prefetches=() if prefetch is None else (prefetch,),
            triggers_late=bool(self.params.triggers_late),
        )


def fits_beside(product: Product, others: list[Product]) -> bool:
    """Whether one block per multiprocessor can fetch all weights of a single row's product while the others'
    launch, which is spread, still runs."""
    device, (warps, _, chunk) = product.x.device, SINGLE[False]
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    enough = product.weight.data.nbytes <= blocks * warps * STAGES * chunk
    return enough and has_room(device) and all(p.passes == 1 for p in (product, *others))


def _mixing(given: Mixing | None) -> Struct:
    return _Mixing.blank() if given is None else _Mixing(comb=given.comb, iters=given.iters, eps=given.eps)


def segment_of(weight: Tiled) -> Struct:
    """Without what it is multiplied with."""
    n, k = weight.shape
    return _Segment.blank(
        data=weight.data,
        scale=weight.scale,
        places=weight.places,
        factor=weight.factor,
        format=CODE[weight.format],
        halves=weight.halves,
        units=weight.units,
        slices=weight.slices,
        n=n,
        k=k,
    )


def _segments(product: Product) -> list[Struct]:
    """One per separately stored sum over K."""
    weight, count = product.weight, product.splits
    span, is_float = product._span, product.y.dtype == torch.float32
    assert count == 1 or (is_float and product.y.shape[0] == count and weight.halves == 1), product.y.shape
    assert product.passes <= MAX_PASSES, f"{weight.shape[1]} columns in {count} sums"
    aligned = product.x.storage_offset() * product.x.element_size() % 16 == 0
    assert aligned and (product.x_stride or weight.shape[1]) % 4 == 0 and weight.shape[1] % 4 == 0
    out = []
    for split in range(count):
        segment = segment_of(weight)
        segment.first_slice = split * span
        segment.span = min(span, weight.slices - split * span)
        segment.warps = -(-segment.span // product.passes)
        segment.x = product.x.data_ptr()
        segment.y = (product.y[split] if count > 1 else product.y).data_ptr()
        segment.x_top = None if product.x_top is None else product.x_top.data_ptr()
        segment.y_top = None if product.y_top is None else product.y_top.data_ptr()
        segment.x_stride = product.x_stride or weight.shape[1]
        segment.y_stride = product.y_stride or weight.shape[0]
        segment.epilogue = int(is_float)
        segment.routed = {"rows": 0, "up": 1, "down": 2}[product.who]
        segment.how = HOW[product.activations]
        out.append(segment)
    return out


def _cost(segment: Struct, units: int) -> int:
    """Of so many units with their scales: bytes over 256."""
    return units * segment.halves * segment.span * (18, 17, 32, 64)[segment.format]


def _work(
    segments: list[Struct], rows: int, columns: int, tasks: Tasks | None, blocks: int
) -> list[tuple[int, int, int, int]]:
    """Cut all units into runs, one per block: (segment, first unit, units, task or group of rows). The runs
    have about equal bytes and all are resident at once."""
    repeats = [len(tasks.expert) if s.routed and tasks else -(-rows // columns) for s in segments]
    cost = [_cost(s, s.units) for s in segments]
    # Each repeat of a segment gets a block, or as many as its units need; the rest go where a run is longest.
    runs = [-(-s.units // MAX_UNITS) for s in segments]
    while True:
        left = blocks - sum(n * r for n, r in zip(runs, repeats, strict=True))
        fits = [i for i, r in enumerate(repeats) if r <= left and runs[i] < segments[i].units]
        if not fits:
            break
        longest = max(fits, key=lambda i: cost[i] / runs[i])
        runs[longest] += 1
    out = []
    for index, (s, n) in enumerate(zip(segments, runs, strict=True)):
        cuts = [s.units * i // n for i in range(n + 1)]
        for task in range(repeats[index]):
            out += [(index, a, b - a, task) for a, b in pairwise(cuts) if b > a]
    return out


def _shares(segments: list[Struct], rows: int, columns: int, warps: int, max_tasks: int) -> list[Struct]:
    """Experts of a batch, and what runs beside them: how many tasks there will be is not known here, so
    blocks share them when they run (share.cuh)."""
    assert len(segments) <= MAX_SHARES, len(segments)
    out = []
    for segment in segments:
        # Of a turn, in which a warp multiplies two bricks.
        units = warps // segment.warps * (2 // segment.halves)
        turns, repeats = -(-segment.units // units), 0 if segment.routed else -(-rows // columns)
        out.append(_Share(repeats=repeats, turns=turns, units=units, cost=_cost(segment, units)))
    total = sum((share.repeats or max_tasks) * share.turns * share.cost for share in out)
    assert total < 2**31 - 2**16, total
    return out
