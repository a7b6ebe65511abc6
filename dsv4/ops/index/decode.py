"""Decode step: scores of a CSA layer's index keys for each row. Replaces the product in index.select.

In V4's sizes and BF16 decode.cu makes the queries, and the scores of a single row; Triton the rest. On Hopper
both add up in one order. On other GPUs Triton's depends on its tile, so decode.cu scores all rows there: a
row has the same bits alone and in a batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.gpu import architectures
from dsv4.gpu.build import call
from dsv4.gpu.numbers import launch, launch_dependents, product, wait_for_prerequisites
from dsv4.gpu.pdl import launcher
from dsv4.gpu.shapes import MAX_INDEX_DIM, MAX_INDEX_HEADS, MIN_INDEX_DIM
from dsv4.gpu.structs import mirror
from dsv4.ops.index import meaning
from dsv4.quant.formats import Format, QuantTensor

# Keys a program scores at a time; fewer where each program still has a multiprocessor of an H200 to itself:
# at 4k and one row 4.9 -> 3.3 us, with 8 and 32 rows no faster.
KEYS, FEW_KEYS, MULTIPROCESSORS = 128, 64, 132
MAX_PROGRAMS = 2 * MULTIPROCESSORS  # per row
# Numbers of decode.cu, and how many rows it scores on Hopper: more were not timed since it has a form for
# many keys.
HEADS, WIDTH, ROPE, WARPS, BLOCK_KEYS, SHARED_BYTES = 64, 128, 64, 4, 16, 16640
MAX_ROWS = 1
# Keys enter the product 2^63 too small, which is exact (scales of 2^-62 to 2^64): one factor per value then
# does for two, since 2^126, by which a code's bits are too small, and the scale would overflow together.
LIFT = 63

_Queries = mirror("index/decode.cu", "Queries")

_Scores = mirror("index/decode.cu", "Scores")


def serves(iq: Tensor) -> bool:
    """Whether decode.cu takes queries of this size and type."""
    return iq.is_cuda and iq.dtype == torch.bfloat16 and iq.shape[1:] == (HEADS, WIDTH)


def rotate_round(iq: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, overlap: bool) -> None:
    """What `queries` of attention/prepare.py does with iq [T, Hi, di], where decode.cu serves it."""
    assert cos.shape[1] * 2 == sin.shape[1] * 2 == ROPE and cos.is_contiguous() and sin.is_contiguous()
    given = _Queries(
        q=iq,
        cos=cos,
        sin=sin,
        positions=positions,
        warms=overlap,
    )
    call(
        "index/decode",
        "queries_kernel",
        iq.device,
        given,
        blocks=iq.shape[0] * HEADS // WARPS,
        threads=WARPS * 32,
        overlap=overlap,
    )


@triton.jit
def _rows(page_table_ptr, block, count, BLOCK: tl.constexpr, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK] pool rows of keys block*BLOCK .. count-1; anything in bounds beyond."""
    entry = block * BLOCK + tl.arange(0, BLOCK)
    at = page_table_ptr + entry // PAGE
    page = tl.load(at, mask=entry < count, other=0, cache_modifier=".cg").to(tl.int64)
    return page * PAGE + entry % PAGE


@triton.jit
def _keys(data_ptr, scale_ptr, row, block, count, BLOCK: tl.constexpr, DI: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes [BLOCK, DI / 32, 16] and scales [BLOCK, DI / 32] of those rows, zero from key `count` on."""
    seen = block * BLOCK + tl.arange(0, BLOCK) < count
    part, byte = tl.arange(0, DI // 32), tl.arange(0, 16)
    at = row[:, None, None] * (DI // 2) + part[None, :, None] * 16 + byte[None, None, :]
    data = tl.load(data_ptr + at, mask=seen[:, None, None], other=0, cache_modifier=".cg")
    scale_at = scale_ptr + row[:, None] * (DI // 32) + part[None, :]
    return data, tl.load(scale_at, mask=seen[:, None], other=0, cache_modifier=".cg")


@triton.jit
def _half(bits, SHIFT: tl.constexpr, unit, BLOCK: tl.constexpr, DI: tl.constexpr):  # type: ignore[no-untyped-def]
    """The even (SHIFT 0) or odd (4) channels of the keys, times 2^-LIFT: bfloat16 [BLOCK, DI / 2].

    A code's three low bits are those of a float 2^126 below it; `unit` holds what is missing, but LIFT.
    """
    tiny = ((bits << (22 - SHIFT)) & 0x01C00000) | ((bits << (28 - SHIFT)) & -0x80000000)
    return tl.reshape((tiny.to(tl.float32, bitcast=True) * unit).to(tl.bfloat16), (BLOCK, DI // 2))


@triton.jit
def _scores_kernel(iq_ptr, weights_ptr, data_ptr, scale_ptr, page_table_ptr, slots_ptr, positions_ptr,  # type: ignore[no-untyped-def]
                   out_ptr, pages, cap, factor, RATIO: tl.constexpr, PAGE: tl.constexpr, HI: tl.constexpr,
                   HEADS: tl.constexpr, DI: tl.constexpr, BLOCK: tl.constexpr,
                   LIFT: tl.constexpr):  # fmt: skip
    launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    count = (tl.load(positions_ptr + row, cache_modifier=".cg").to(tl.int32) + 1) // RATIO
    block, step = tl.program_id(0), tl.num_programs(0)
    page_table = page_table_ptr + tl.load(slots_ptr + row, cache_modifier=".cg") * pages
    rows = _rows(page_table, block, count, BLOCK, PAGE)
    next_rows = _rows(page_table, block + step, count, BLOCK, PAGE)
    data, scale = _keys(data_ptr, scale_ptr, rows, block, count, BLOCK, DI)
    wait_for_prerequisites()
    if block * BLOCK < count:
        # Channels 2i and 2i+1 share byte i of a key: one product for the even ones, one for the odd.
        h, i = tl.arange(0, HEADS), tl.arange(0, DI)
        q = tl.load(iq_ptr + (row * HI + h)[:, None] * DI + i[None, :], mask=(h < HI)[:, None], other=0.0)
        even, odd = tl.split(tl.reshape(q.to(tl.bfloat16), (HEADS, DI // 2, 2)))
        even, odd = tl.trans(even), tl.trans(odd)
        weight = tl.load(weights_ptr + row * HI + h, mask=h < HI, other=0.0).to(tl.float32) * factor
        while block * BLOCK < count:
            # The next keys travel while these are scored, and the rows of those after them.
            next_data, next_scale = _keys(data_ptr, scale_ptr, next_rows, block + step, count, BLOCK, DI)
            next_rows = _rows(page_table, block + 2 * step, count, BLOCK, PAGE)
            # A scale that is NaN, or beyond what LIFT leaves room for, gives NaN. Not min(code, 255) == 255:
            # ptxas 12.8 joins these to a VIMNMX.U16x2 whose second predicate overwrites the first.
            bits, code = data.to(tl.int32), scale.to(tl.int32) + (126 - LIFT)
            unit = tl.where(code >= 255, 0x7FC00000, code << 23).to(tl.float32, bitcast=True)[:, :, None]
            dots = product(_half(bits, 0, unit, BLOCK, DI), even)
            dots += product(_half(bits, 4, unit, BLOCK, DI), odd)
            dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
            score = tl.sum(dots * weight[None, :], 1) * (2.0**LIFT)
            entry = block * BLOCK + tl.arange(0, BLOCK)
            tl.store(out_ptr + row * cap + entry, score, mask=entry < count)
            data, scale = next_data, next_scale
            block += step


@launcher(
    reads=("iq", "weights", "keys", "page_table"),
    reads_early=("keys", "page_table", "slots", "positions"),
    writes=("out",),
    means=meaning.scores,
)
def scores(
    iq: Tensor,
    weights: Tensor,
    keys: QuantTensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    out: Tensor,
    ratio: int,
    page_entries: int,
    factor: float,
    overlap: bool = True,
) -> None:
    """iq [T, Hi, di], FP4 values as `queries` leaves them, so exact in bfloat16 whatever their type; weights
    [T, Hi], times factor; keys MXFP4 -> out [T, cap] float32: columns below (position + 1) // ratio.
    """
    rows, heads, di = iq.shape
    assert keys.format is Format.MXFP4 and keys.scale is not None and keys.shape[1] == di, keys.shape
    assert heads <= MAX_INDEX_HEADS and MIN_INDEX_DIM <= di <= MAX_INDEX_DIM, (heads, di)
    assert iq.is_contiguous() and weights.shape == (rows, heads) and out.stride(1) == 1
    assert weights.is_contiguous() and weights.dtype == iq.dtype
    if not rows or not out.shape[1]:
        return
    programs = min(triton.cdiv(out.shape[1], BLOCK_KEYS), MAX_PROGRAMS)
    are_powers = all(number & (number - 1) == 0 for number in (ratio, page_entries))
    is_hopper = architectures.capability(iq.device) == 90
    if serves(iq) and are_powers and (rows <= MAX_ROWS or not is_hopper):
        given = _Scores(
            q=iq,
            weights=weights,
            keys=keys.data,
            scales=keys.scale,
            page_table=page_table,
            slots=slots,
            positions=positions,
            out=out,
            stride=out.stride(0),
            pages=page_table.stride(0),
            page_bits=page_entries.bit_length() - 1,
            ratio_bits=ratio.bit_length() - 1,
            programs=programs,
            warms=overlap,
            factor=factor,
        )
        call(
            "index/decode",
            "scores_kernel",
            iq.device,
            given,
            blocks=rows * programs,
            threads=WARPS * 32,
            shared=SHARED_BYTES,
            overlap=overlap,
        )
    else:
        is_few = is_hopper and rows * triton.cdiv(out.shape[1], FEW_KEYS) <= MULTIPROCESSORS
        block = FEW_KEYS if is_few else KEYS
        launch(
            _scores_kernel,
            grid=(min(triton.cdiv(out.shape[1], block), MAX_PROGRAMS), rows),
            num_warps=4,
            overlap=overlap,
            iq_ptr=iq,
            weights_ptr=weights,
            data_ptr=keys.data,
            scale_ptr=keys.scale,
            page_table_ptr=page_table,
            slots_ptr=slots,
            positions_ptr=positions,
            out_ptr=out,
            pages=page_table.stride(0),
            cap=out.stride(0),
            factor=factor,
            RATIO=ratio,
            PAGE=page_entries,
            HI=heads,
            HEADS=max(16, triton.next_power_of_2(heads)),
            DI=di,
            BLOCK=block,
            LIFT=LIFT,
        )
