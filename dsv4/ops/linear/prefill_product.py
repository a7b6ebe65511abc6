"""Prompts: launches the products (prefill_sm90.cuh) and prefill_pack.cu. Weights in tiles, experts by a
list of tiles made on the device.

Nothing here waits for the device, and no launch depends on what is there: all can be captured in a graph.
"""

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from dsv4.gpu.build import HOPPER, architecture, call
from dsv4.gpu.structs import mirror
from dsv4.gpu.tiles import BRICK, SLICE, Tiled
from dsv4.ops.linear.prefill_packed import (
    FP8_CODES,
    IN_16_BITS,
    ROW_GROUP,
    Codes,
    Mode,
    Packed,
    empty_packed,
    mode_of,
    padded,
)
from dsv4.ops.rows import quantize
from dsv4.quant.formats import Format

# Numbers of prefill_sm90.cuh and prefill_pack.cu.
UNITS, THREADS, CONSUMERS, MAX_CARRIED = 8, 384, 256, 128
W_STAGE, EXCHANGE_ROW_BYTES, BARRIER_BYTES = 32768, 256, 512
SORT_THREADS = MAX_EXPERTS = 512
MAX_SORT_BLOCKS = 32
SMALL_CAP = 32
# tiles.cuh's name of a format.
NUMBER = {Format.NVFP4: 0, Format.MXFP4: 1, Format.FP8: 2, Format.BF16: 3}
CAPS = (16, 32, 64, 128)  # rows of a tile, at most; `heights` may have another

_Product = mirror("linear/prefill_sm90.cuh", "Product")

_Packing = mirror("linear/prefill_pack.cu", "Packing")

_Gathering = mirror("linear/prefill_pack.cu", "Gathering")

_Sorting = mirror("linear/prefill_pack.cu", "Sorting")


@dataclass(frozen=True)
class Sorted:
    """Pairs of token and choice by expert. `capacity`: rows there can be, each expert's padded to groups."""

    pairs: Tensor  # int32 [capacity] token * choices + choice, -1: none
    weights: Tensor  # float32 [capacity]
    tiles: Tensor  # int32 [tiles, 4] expert, first row, rows
    counts: Tensor  # int32 [2] tiles, groups of rows
    choices: int
    cap: int  # rows of a tile, at most

    @property
    def capacity(self) -> int:
        return self.pairs.shape[0]


def serves(weight: object, dtype: torch.dtype) -> TypeGuard[Tiled]:
    """Whether rows of `dtype` times this weight are a product of this file: BF16, tiles, Hopper (wgmma)."""
    return (
        dtype == torch.bfloat16
        and isinstance(weight, Tiled)
        and weight.factor.is_cuda
        and architecture(weight.factor.device) == HOPPER
    )


def heights(weight: Tiled, mode: Mode) -> tuple[int, ...]:
    """Rows of the tiles that the kernel has. A cap between two would be summed, and exchanged, as the larger
    one, for which there is no shared memory."""
    if mode.is_fp8:
        return (*CAPS, 144)
    return (*CAPS[:-1], 112) if weight.format is Format.FP8 else CAPS


def max_cap(weight: Tiled, mode: Mode) -> int:
    """Rows of the largest tile: as many as registers hold. FP8 weights in 16 bits have one sum more there."""
    return heights(weight, mode)[-1]


def cap_for(rows: int, most: int = CAPS[-1]) -> int:
    """The smallest tile that takes so many rows, or the largest, of `most`."""
    return next((cap for cap in CAPS if rows <= cap < most), most)


def even_cap(rows: int, tiles_m: int, weight: Tiled, mode: Mode, multiprocessors: int) -> int:
    """The same where all tiles are alike. Large ones read less in all, unless few are left for a last round
    of the multiprocessors: what counts is rounds times the bytes a tile reads. In FP8 tiles of 144 rows
    spare an expert its third tile; here 128 are as fast."""
    most = min(max_cap(weight, mode), CAPS[-1])
    if most in CAPS or rows <= 64:
        return cap_for(rows, most)
    below = max(cap for cap in CAPS if cap < most)
    w_bytes = BRICK[weight.format] // SLICE * UNITS  # of a column
    x_bytes = mode.slice_bytes / ROW_GROUP / SLICE

    def read(cap: int) -> float:
        return -(-(-(-rows // cap) * tiles_m) // multiprocessors) * (w_bytes + cap * x_bytes)

    return min((below, most), key=read)


def sort(ids: Tensor, weights: Tensor, experts: int, max_cap: int, first: int = 0, ranks: int = 1) -> Sorted:
    """ids (-1: none), weights [T, K]: the chosen. `max_cap`: rows of a tile, at most. Of so many `ranks`,
    this one has `experts` of them, from `first` on; those of others are as none."""
    pairs, choices = ids.numel(), ids.shape[1]
    assert ids.dtype == torch.long and ids.is_contiguous() and weights.dtype == torch.float32
    assert weights.is_contiguous() and experts <= MAX_EXPERTS, experts
    # Few rows an expert: two small tiles are faster than one large (32 rows on average: 819 us against 879).
    average = pairs / (experts * ranks)
    cap = min(cap_for(ids.shape[0], max_cap), 16 if average <= 4 else 32 if average <= 40 else max_cap)
    capacity = min(pairs, -(-pairs // ROW_GROUP) + experts) * ROW_GROUP
    most_tiles = min(pairs, pairs // cap + experts)
    integers = {"dtype": torch.int32, "device": ids.device}
    out = Sorted(
        pairs=torch.empty(capacity, **integers),  # type: ignore[call-overload]
        weights=torch.empty(capacity, device=ids.device),
        tiles=torch.empty(most_tiles, 4, **integers),  # type: ignore[call-overload]
        counts=torch.empty(2, **integers),  # type: ignore[call-overload]
        choices=choices,
        cap=cap,
    )
    sorting = _Sorting(
        ids=ids,
        weights=weights,
        rows=out.pairs,
        row_weights=out.weights,
        tiles=out.tiles,
        counts=out.counts,
        pairs=pairs,
        cap=cap,
        first_own=first,
        own=experts,
    )
    blocks = min(MAX_SORT_BLOCKS, -(-pairs // SORT_THREADS))
    call("linear/prefill_pack", "sort_kernel", ids.device, sorting, blocks=blocks, threads=SORT_THREADS)
    return out


def pack(
    x: Tensor, weight: Tiled, activations: str = "a16", by: Sorted | None = None, gathers: bool = True
) -> Packed:
    """x [T, G, K] BF16, for weights like this one; or the rows of `by`, of x [T, K] or already in its order.

    Rounded as `activations` says.
    """
    return pack_as(x, mode_of(weight, activations), activations, by, gathers)


def pack_as(
    x: Tensor, mode: Mode, activations: str, by: Sorted | None = None, gathers: bool = True
) -> Packed:
    if activations != "a16" and not mode.is_fp8:
        flat, rounded = x.reshape(-1, x.shape[-1]), torch.empty_like(x, memory_format=torch.contiguous_format)
        quantize.round_values(flat, rounded.view(flat.shape), activations, overlap=False)
        x = rounded
    rows, matrices, k = x.shape if by is None else (by.capacity, 1, x.shape[-1])
    assert x.dtype == torch.bfloat16 and x.stride(-1) == 1 and k % 4 == 0, (x.shape, x.dtype)
    assert x.data_ptr() % 8 == 0 and all(s % 4 == 0 for s in x.stride()[:-1]), x.stride()
    made = empty_packed(mode, rows, k, x.device, matrices)
    out = made.data
    groups, slices = out.shape[:2]
    packing = _Packing(
        x=x,
        out=out,
        pairs=by.pairs if by and gathers else None,
        num_groups=by and by.counts[1:],
        x_row=x.stride(0),
        x_matrix=x.stride(1) if by is None else 0,
        groups=groups,
        slices=slices,
        k=k,
        rows=rows,
        rows_padded=padded(rows),
        choices=1 if by is None else by.choices,
        is_wide=k % 8 == 0 and x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in x.stride()[:-1]),
    )
    warps = 2 * groups * slices * (mode.blocks if mode.is_fp8 else 1)  # each has eight rows
    call("linear/prefill_pack", mode.packing, x.device, packing, blocks=-(-warps // 4), threads=128)
    return made


def gather(x: Codes, by: Sorted) -> Packed:
    """The rows of `by` as `pack` makes them in FP8, of codes that are there already."""
    k = x.data.shape[1]
    assert k % SLICE == 0 and x.data.is_contiguous() and x.scale.is_contiguous(), x.data.shape
    out = empty_packed(FP8_CODES, by.capacity, k, x.data.device)
    parts = out.data.shape[1] * FP8_CODES.blocks
    gathering = _Gathering(
        codes=x.data,
        scales=x.scale,
        out=out.data,
        pairs=by.pairs,
        num_groups=by.counts[1:],
        parts=parts,
        choices=by.choices,
    )
    warps = 2 * out.data.shape[0] * parts  # each has eight rows of 256 columns
    call(
        "linear/prefill_pack", "gather_8_kernel", x.data.device, gathering, blocks=-(-warps // 4), threads=128
    )
    return out


def product(x: Packed, weight: Tiled, y: Tensor, parts: int = 1) -> None:
    """x [T, G, K], weight [G*N, K] -> y [T, G, N], BF16 or float32.

    `parts`: as decode's split-K, in 16 bits; in FP8 there is one sum.
    """
    rows, matrices, n = y.shape
    assert weight.count == 1 and weight.halves == 1 and y.stride(2) == 1, (weight.count, y.stride())
    assert (x.rows, x.matrices) == (rows, matrices) and weight.shape == (matrices * n, x.k), weight.shape
    assert matrices == 1 or n % 16 == 0, f"{n} rows of a group: a tile has 16"
    _launch(
        x,
        weight,
        y,
        units=weight.units // matrices,
        n=n,
        cap=_even_cap(x, weight, matrices * -(-weight.units // matrices // UNITS)),
        y_row=y.stride(0),
        y_matrix=y.stride(1),
        parts=1 if x.mode.is_fp8 else parts,
        has_factors=False,
    )


def gate_up(
    x: Packed, weight: Tiled, y: Tensor, limit: float, by: Sorted | None = None, weights: Tensor | None = None
) -> None:
    """y [rows, I] <- weights * silu(min(gate, limit)) * clamp(up), of pairs [I, K] of all experts, or one."""
    assert weight.halves == 2 and y.dtype == torch.bfloat16 and y.stride(1) == 1
    if weights is not None:
        assert weights.dtype == torch.float32 and weights.stride(0) == 1, (weights.dtype, weights.stride())
        # The kernel reads them in pairs, up to the end of a group.
        missing = x.rows_padded - weights.shape[0]
        weights = torch.nn.functional.pad(weights, (0, missing)) if missing else weights
    _launch_bank(x, weight, y, by, limit=limit, weights=weights)


def down(x: Packed, weight: Tiled, y: Tensor, by: Sorted | None = None) -> None:
    """y [T * K, D], by pair <- rows of x in the order of `by` times their expert's [D, I]."""
    assert weight.halves == 1 and y.stride(1) == 1
    _launch_bank(x, weight, y, by, places=None if by is None else by.pairs)


def _even_cap(x: Packed, weight: Tiled, tiles_m: int) -> int:
    return even_cap(x.rows, tiles_m, weight, x.mode, _multiprocessors(x.data.device))


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch_bank(
    x: Packed,
    weight: Tiled,
    y: Tensor,
    by: Sorted | None,
    limit: float = 0.0,
    weights: Tensor | None = None,
    places: Tensor | None = None,
) -> None:
    assert weight.shape[1] == x.k and (by is not None or weight.count == 1)
    tiles_m = -(-weight.units * weight.halves // UNITS)
    cap = by.cap if by is not None else _even_cap(x, weight, tiles_m)
    _launch(
        x,
        weight,
        y,
        units=weight.units,
        n=weight.shape[0],
        cap=cap,
        y_row=y.stride(0),
        y_matrix=0,
        limit=limit,
        by=by,
        weights=weights,
        places=places,
        has_factors=True,
    )


@dataclass(frozen=True)
class Rings:
    """How shared memory is used: stages of W and of x, for tiles of `cap` rows; pairs exchange results."""

    cap: int
    mode: Mode
    is_paired: bool
    w_stages: int
    x_stages: int

    @property
    def is_small(self) -> bool:
        """Two blocks on a multiprocessor: few rows wait for memory and for latencies, not for products."""
        return self.cap <= SMALL_CAP

    @property
    def x_stage_bytes(self) -> int:
        return self.cap // ROW_GROUP * self.mode.group_bytes

    @property
    def shared_bytes(self) -> int:
        x_bytes = self.x_stage_bytes + self.cap // ROW_GROUP * self.mode.undo_bytes
        rings = self.w_stages * W_STAGE + self.x_stages * x_bytes
        return rings + self.is_paired * self.cap * EXCHANGE_ROW_BYTES + BARRIER_BYTES


def rings(format: Format, cap: int, mode: Mode, is_paired: bool) -> Rings:
    """A stage of W is 128 columns of BF16, but 256 or 512 of the others; one of x 128 columns, of FP8 256."""
    if cap <= SMALL_CAP:
        w_stages, x_stages = 2, {16: 8, 32: 4}[cap]
    elif mode.is_fp8:
        w_stages, x_stages = (3, 5) if cap == 64 else (2, 3) if is_paired else (3, 3)
    elif format is Format.BF16:
        w_stages, x_stages = {64: (4, 4), 128: (3, 3)}[cap]
    else:
        w_stages, x_stages = {64: (3, 6), 112: (2, 4) if is_paired else (3, 4), 128: (2, 4)}[cap]
    return Rings(cap, mode, is_paired, w_stages, x_stages)


def _launch(
    x: Packed,
    weight: Tiled,
    y: Tensor,
    units: int,
    n: int,
    cap: int,
    y_row: int,
    y_matrix: int,
    has_factors: bool,
    parts: int = 1,
    limit: float = 0.0,
    by: Sorted | None = None,
    weights: Tensor | None = None,
    places: Tensor | None = None,
) -> None:
    device = y.device
    modes = (IN_16_BITS[weight.format], mode_of(weight, "a8"))
    assert x.mode in modes, f"x is packed for another format than {weight.format}"
    known = heights(weight, x.mode)
    assert cap in known, f"tiles of {cap} rows: the product with {weight.format} has {known}"
    assert y.dtype in (torch.bfloat16, torch.float32), y.dtype
    assert weight.data.is_contiguous() and weight.scale.is_contiguous()
    ring = rings(weight.format, cap, x.mode, weight.halves == 2)
    blocks = _multiprocessors(device) * (2 if ring.is_small else 1)
    carry = torch.empty(blocks, MAX_CARRIED // 2, CONSUMERS, device=device) if parts > 1 else None
    params = _Product(
        data=weight.data,
        scale=weight.scale,
        homes=weight.places,
        factor=weight.factor,
        x=x.data,
        y=y,
        carry=carry,
        tiles=None if by is None else by.tiles,
        num_tiles=None if by is None else by.counts,
        places=places,
        weights=weights,
        y_row=y_row,
        y_matrix=y_matrix,
        units=units,
        slices=weight.slices,
        halves=weight.halves,
        n=n,
        matrices=x.matrices,
        rows=x.rows,
        rows_padded=x.rows_padded,
        cap=cap,
        part=-(-weight.slices // parts),
        is_f32=y.dtype == torch.float32,
        has_factors=has_factors,
        w_stages=ring.w_stages,
        x_stages=ring.x_stages,
        x_stage_bytes=ring.x_stage_bytes,
        limit=limit,
    )
    if by is None:
        tiles_m = -(-units * weight.halves // UNITS)
        blocks = min(blocks, x.matrices * -(-x.rows // cap) * tiles_m)
    call(
        f"linear/prefill_sm90_{'a8_' if x.mode.is_fp8 else ''}{weight.format.value}",
        f"product_kernel<{NUMBER[weight.format]}, {str(ring.is_small).lower()}>",
        device,
        params,
        blocks=blocks,
        threads=THREADS,
        shared=ring.shared_bytes,
    )
