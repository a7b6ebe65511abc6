"""Decode step: launches route.cu (which experts) and choose.cu (which entries; for prompts too)."""

import ctypes

from torch import Tensor

from dsv4.kernels.common import architectures
from dsv4.kernels.common.architectures import ARCHITECTURES
from dsv4.kernels.common.build import address, call
from dsv4.kernels.common.overlap import launcher
from dsv4.kernels.decode.matvec import COLUMNS, FLOAT_COLUMNS, Tasks

# Warps of a block, and keys of a lane: rows of as many entries are chosen from in registers.
FEW = ((16, 4), (32, 8))
MAX_TOPK = FEW[-1][0] * FEW[-1][1] * 32
CLUSTER = 8  # blocks that share a longer row, or the rows to be routed
# Of route.cu, by experts of a lane, for a single row and for a batch: warps of a block, its shared memory.
SINGLE = {8: (8, 2344), 16: (16, 2344)}
BATCH = {8: (8, 21544), 16: (8, 38952)}
FEW_SHARED, MANY_SHARED = 4496, 5464  # bytes of choose.cu's blocks; a longer row's beside what is chosen from
MAX_EXPERTS, MAX_CHOICES, MAX_PAIRS = 512, 32, 1024  # pairs: rows times choices


def max_entries(capability: int) -> int:
    """Of a row: what a cluster's blocks hold in shared memory."""
    return CLUSTER * (ARCHITECTURES[capability].block_shared - MANY_SHARED) // 4


class _Routing(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "bias", "table", "ids", "positions", "counts")),
        *((name, ctypes.c_void_p) for name in ("chosen", "weights", "task_expert", "task_pairs")),
        *((name, ctypes.c_int) for name in ("rows", "experts", "choices", "task_bits", "first_own", "own")),
        ("route_scale", ctypes.c_float),
    )


class _Choice(ctypes.Structure):
    _fields_ = (
        ("scores", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("positions", ctypes.c_void_p),
        ("ratio", ctypes.c_int),
        ("page_table", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("pages", "page_entries", "topk", "fewest", "most", "warms")),
        ("page_share", ctypes.c_uint64),
        ("out", ctypes.c_void_p),
    )


@launcher(
    reads=("logits", "positions", "counts"),
    reads_early=("bias", "table", "ids"),
    writes=("chosen", "tasks", "counts"),
)
def route(
    logits: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    ids: Tensor,
    scale: float,
    is_float: bool,
    chosen: Tensor,
    tasks: Tasks,
    positions: Tensor | None = None,
    counts: Tensor | None = None,
    own: range | None = None,
    overlap: bool = True,
) -> None:
    """logits [T, E] float32; bias [E], or a table [V, K] by token id. -> chosen int32 [T, K] by rising
    expert, and tasks with the weights. `is_float` says how many pairs a task may hold. `counts` int32 [E]
    grow by the choices of rows whose `positions` are not negative. `own`: the experts that this rank has, all
    if None; tasks are theirs alone, by their number here."""
    rows, experts = logits.shape
    assert experts <= MAX_EXPERTS and tasks.choices <= MAX_CHOICES, (experts, tasks.choices)
    assert rows * tasks.choices <= MAX_PAIRS, (rows, tasks.choices)
    assert counts is None or (positions is not None and counts.shape == (experts,)), "whose choices count"
    own = range(experts) if own is None else own
    assert 0 <= own.start < own.stop <= experts, (own, experts)
    is_single, many = rows == 1, 8 if experts <= 256 else 16
    warps, shared = (SINGLE if is_single else BATCH)[many]
    routing = _Routing(
        logits=logits.data_ptr(),
        bias=address(bias),
        table=address(table),
        ids=ids.data_ptr(),
        positions=address(positions),
        counts=address(counts),
        chosen=chosen.data_ptr(),
        weights=tasks.weights.data_ptr(),
        task_expert=tasks.expert.data_ptr(),
        task_pairs=tasks.pairs.data_ptr(),
        rows=rows,
        experts=experts,
        choices=tasks.choices,
        task_bits=(FLOAT_COLUMNS if is_float else COLUMNS).bit_length() - 1,
        first_own=own.start,
        own=len(own),
        route_scale=scale,
    )
    call(
        "route",
        f"route_kernel<{many}, {str(is_single).lower()}>",
        logits.device,
        routing,
        blocks=1 if is_single else CLUSTER,
        threads=32 * warps,
        shared=shared,
        cluster=1 if is_single else CLUSTER,
        overlap=overlap,
    )


@launcher(
    reads=("scores", "page_table"),
    reads_early=("positions", "slots", "page_table"),
    writes=("out",),
)
def select_rows(
    scores: Tensor,
    positions: Tensor,
    ratio: int,
    page_table: Tensor,
    slots: Tensor,
    page_entries: int,
    out: Tensor,
    overlap: bool = True,
    mixed: bool = False,
) -> None:
    """scores [T, cap] float32 of the entries visible at a row's position -> out [T, topk] int32: the places
    of the best in the pool, by rising entry; -1s. `mixed`: where some rows have few entries and others many,
    each kind has a launch of its own."""
    rows, capacity = out.shape[0], scores.shape[1]
    choice = _Choice(
        scores=scores.data_ptr(),
        stride=scores.stride(0),
        positions=positions.data_ptr(),
        ratio=ratio,
        page_table=page_table.data_ptr(),
        slots=slots.data_ptr(),
        pages=page_table.shape[1],
        page_entries=page_entries,
        topk=out.shape[1],
        fewest=0,
        most=capacity,
        warms=overlap,
        page_share=-(-(1 << 42) // page_entries),
        out=out.data_ptr(),
    )
    assert capacity <= max_entries(architectures.capability(scores.device)), capacity
    assert choice.topk <= MAX_TOPK, choice.topk
    few = next((size for size in FEW if capacity <= size[0] * size[1] * 32), None)
    if few is None and mixed:
        few = FEW[-1]
        choice.most = few[0] * few[1] * 32
    if few is not None:
        call(
            "choose",
            f"select_few_kernel<{few[0]}, {few[1]}>",
            scores.device,
            choice,
            blocks=rows,
            threads=32 * few[0],
            shared=FEW_SHARED,
            overlap=overlap,
        )
        if choice.most >= capacity:
            return
        choice.fewest, choice.most = choice.most + 1, capacity
    call(
        "choose",
        f"select_many_kernel<{str(choice.fewest == 0).lower()}>",
        scores.device,
        choice,
        blocks=rows * CLUSTER,
        threads=1024,
        shared=MANY_SHARED + -(-capacity // CLUSTER) * 4,
        cluster=CLUSTER,
        overlap=overlap,
    )
