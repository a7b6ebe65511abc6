"""Decode step: launches decode.cu: which experts a row meets, and their tasks."""

from torch import Tensor

from dsv4.gpu.build import call
from dsv4.gpu.pdl import launcher
from dsv4.gpu.structs import mirror
from dsv4.ops.linear.decode import COLUMNS, FLOAT_COLUMNS, Tasks
from dsv4.ops.route import meaning

CLUSTER = 8  # blocks that share a batch's rows
# By experts of a lane, for a single row and for a batch: warps of a block, its shared memory.
SINGLE = {8: (8, 2344), 16: (16, 2344)}
BATCH = {8: (8, 21544), 16: (8, 38952)}
MAX_EXPERTS, MAX_CHOICES, MAX_PAIRS = 512, 32, 1024  # pairs: rows times choices

_Routing = mirror("route/decode.cu", "Routing")


@launcher(
    reads=("logits", "positions", "counts"),
    reads_early=("bias", "table", "ids"),
    writes=("chosen", "tasks", "counts"),
    means=meaning.route,
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
    expert, and tasks with the weights. `is_float` says how many pairs a task may hold. A row at position -1
    is padding: in a batch it has no tasks, so nobody reads its experts. `counts` int32 [E] grow by the
    choices of the others. `own`: the experts that this rank has, all if None; tasks are theirs alone, by
    their number here."""
    rows, experts = logits.shape
    assert experts <= MAX_EXPERTS and tasks.choices <= MAX_CHOICES, (experts, tasks.choices)
    assert rows * tasks.choices <= MAX_PAIRS, (rows, tasks.choices)
    assert counts is None or (positions is not None and counts.shape == (experts,)), "whose choices count"
    own = range(experts) if own is None else own
    assert 0 <= own.start < own.stop <= experts, (own, experts)
    is_single, many = rows == 1, 8 if experts <= 256 else 16
    warps, shared = (SINGLE if is_single else BATCH)[many]
    routing = _Routing(
        logits=logits,
        bias=bias,
        table=table,
        ids=ids,
        positions=positions,
        counts=counts,
        chosen=chosen,
        weights=tasks.weights,
        task_expert=tasks.expert,
        task_pairs=tasks.pairs,
        rows=rows,
        experts=experts,
        choices=tasks.choices,
        task_bits=(FLOAT_COLUMNS if is_float else COLUMNS).bit_length() - 1,
        first_own=own.start,
        own=len(own),
        route_scale=scale,
    )
    call(
        "route/decode",
        f"route_kernel<{many}, {str(is_single).lower()}>",
        logits.device,
        routing,
        blocks=1 if is_single else CLUSTER,
        threads=32 * warps,
        shared=shared,
        cluster=1 if is_single else CLUSTER,
        overlap=overlap,
    )
