"""Decode: launches choose.cu. Which experts, which entries. `select` serves prompts."""

import ctypes

from torch import Tensor

from dsv4.kernels.build import call, pointer
from dsv4.kernels.matvec import COLUMNS, FLOAT_COLUMNS, Tasks
from dsv4.kernels.overlap import launcher


@launcher(
    reads=("logits",),
    reads_early=("bias", "table", "ids"),
    writes=("chosen", "tasks"),
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
    overlap: bool = True,
) -> None:
    """logits [T, E] float32; bias [E], or a table [V, K] by token id. -> chosen int32 [T, K] by rising
    expert, and tasks with the weights. `is_float` says how many pairs a task may hold."""
    rows, experts = logits.shape
    assert experts <= 512 and rows * tasks.choices <= 1024, (rows, experts)
    call(
        "choose",
        "route",
        logits.device,
        pointer(logits),
        pointer(bias),
        pointer(table),
        pointer(ids),
        rows,
        experts,
        tasks.choices,
        ctypes.c_float(scale),
        FLOAT_COLUMNS if is_float else COLUMNS,
        pointer(chosen),
        pointer(tasks.weights),
        pointer(tasks.expert),
        pointer(tasks.pairs),
        int(overlap),
    )


def select(scores: Tensor, counts: Tensor, out: Tensor) -> None:
    """Prefill: scores [T, cap] float32, counts [T] int32 -> out [T, topk] int32: the best, rising; -1s."""
    _select(
        scores=scores,
        counts=counts,
        positions=None,
        ratio=1,
        page_table=None,
        slots=None,
        page_entries=1,
        out=out,
        overlap=False,
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
) -> None:
    """The same for the entries visible at each row's position, as places in the pool."""
    _select(
        scores=scores,
        counts=None,
        positions=positions,
        ratio=ratio,
        page_table=page_table,
        slots=slots,
        page_entries=page_entries,
        out=out,
        overlap=overlap,
    )


def _select(
    scores: Tensor,
    counts: Tensor | None,
    positions: Tensor | None,
    ratio: int,
    page_table: Tensor | None,
    slots: Tensor | None,
    page_entries: int,
    out: Tensor,
    overlap: bool,
) -> None:
    pages = 1 if page_table is None else page_table.shape[1]
    call(
        "choose",
        "select",
        scores.device,
        pointer(scores),
        ctypes.c_int64(scores.stride(0)),
        scores.shape[1],
        pointer(counts),
        pointer(positions),
        ratio,
        pointer(page_table),
        pointer(slots),
        pages,
        page_entries,
        out.shape[0],
        out.shape[1],
        pointer(out),
        int(overlap),
    )
