"""Decode step: launches decode_select.cu, which entries a query attends to. Serves prompts too."""

from torch import Tensor

from dsv4.gpu import architectures
from dsv4.gpu.architectures import ARCHITECTURES
from dsv4.gpu.build import call
from dsv4.gpu.pdl import launcher
from dsv4.gpu.structs import mirror
from dsv4.ops.index import meaning

# Warps of a block, and keys of a lane: rows of as many entries are chosen from in registers.
FEW = ((16, 4), (32, 8))
MAX_TOPK = FEW[-1][0] * FEW[-1][1] * 32
CLUSTER = 8  # blocks that share a longer row
FEW_SHARED, MANY_SHARED = (
    4496,
    5464,
)  # bytes of the kernels' blocks; a longer row's beside what is chosen from


def max_entries(capability: int) -> int:
    """Of a row: what a cluster's blocks hold in shared memory."""
    return CLUSTER * (ARCHITECTURES[capability].block_shared - MANY_SHARED) // 4


_Choice = mirror("index/decode_select.cu", "Choice")


@launcher(
    reads=("scores", "page_table"),
    reads_early=("positions", "slots", "page_table"),
    writes=("out",),
    means=meaning.select_rows,
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
        scores=scores,
        stride=scores.stride(0),
        positions=positions,
        ratio=ratio,
        page_table=page_table,
        slots=slots,
        pages=page_table.shape[1],
        page_entries=page_entries,
        topk=out.shape[1],
        fewest=0,
        most=capacity,
        warms=overlap,
        page_share=-(-(1 << 42) // page_entries),
        out=out,
    )
    assert capacity <= max_entries(architectures.capability(scores.device)), capacity
    assert choice.topk <= MAX_TOPK, choice.topk
    few = next((size for size in FEW if capacity <= size[0] * size[1] * 32), None)
    if few is None and mixed:
        few = FEW[-1]
        choice.most = few[0] * few[1] * 32
    if few is not None:
        call(
            "index/decode_select",
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
        "index/decode_select",
        f"select_many_kernel<{str(choice.fewest == 0).lower()}>",
        scores.device,
        choice,
        blocks=rows * CLUSTER,
        threads=1024,
        shared=MANY_SHARED + -(-capacity // CLUSTER) * 4,
        cluster=CLUSTER,
        overlap=overlap,
    )
