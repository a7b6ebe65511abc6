"""Decode step: a DSpark drafter besides its layers. Rows of its block, its context, Markov's part.

`begin` replaces the block's input of spec/drafts.py, `fuse` and `keep` what its stages take from the taps,
`markov` one turn of the loop over slots. A sequence or row at position -1 is padding.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.gpu.numbers import (
    angles,
    channels,
    launch,
    launch_dependents,
    norm,
    put_kv8,
    rotate,
    rounded,
    to_act,
    wait_for_prerequisites,
)
from dsv4.gpu.pdl import launcher
from dsv4.gpu.shapes import HOW
from dsv4.ops.attention.prepare import rope_part
from dsv4.ops.draft import meaning
from dsv4.ops.rows.quantize import round_row
from dsv4.ops.sample.cpu import PLAIN
from dsv4.quant.formats import FP8_TILE, QuantTensor

TABLE_BYTES = 32768  # of markov_w2 that a program takes: a few programs of a multiprocessor keep memory busy


@triton.jit
def _begin_kernel(  # type: ignore[no-untyped-def]
        anchors_ptr, anchors_at_ptr, anchors_slots_ptr, settings_ptr, ids_ptr, positions_ptr, slots_ptr,
        ends_ptr, choices_ptr, choices_at_ptr, chain_ptr, noise, R: tl.constexpr, B: tl.constexpr,
        B_SIZE: tl.constexpr, WIDTH: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    launch_dependents()
    wait_for_prerequisites()
    r, j = tl.program_id(0), tl.arange(0, B_SIZE)
    anchor, pos = tl.load(anchors_ptr + r), tl.load(anchors_at_ptr + r)
    slot = tl.load(anchors_slots_ptr + r)
    row, inside = r * B + j, j < B
    none = tl.zeros_like(row).to(tl.int64) - 1
    tl.store(ids_ptr + row, tl.where(j == 0, anchor, noise).to(tl.int64), mask=inside)
    tl.store(positions_ptr + row, tl.where(pos < 0, none, pos + j), mask=inside)
    tl.store(slots_ptr + row, none + 1 + slot, mask=inside)
    tl.store(ends_ptr + row, tl.where(pos < 0, none, none + pos), mask=inside)
    tl.store(chain_ptr + r, anchor)
    tl.store(chain_ptr + (j + 1) * R + r, none, mask=inside)
    tl.store(choices_at_ptr + r, pos)
    c = tl.arange(0, WIDTH)
    setting = tl.load(settings_ptr + r * WIDTH + c)
    # Without logprobs, mask and penalties, and nothing forced.
    setting = tl.where(c == 6, PLAIN, tl.where(c == 7, -1, setting))
    tl.store(choices_ptr + r * WIDTH + c, setting)


@launcher(
    reads=("anchors", "anchors_at", "anchors_slots", "settings"),
    writes=("ids", "positions", "slots", "ends", "choices", "choices_at", "chain"),
    means=meaning.begin,
)
def begin(
    anchors: Tensor,
    anchors_at: Tensor,
    anchors_slots: Tensor,
    settings: Tensor,
    noise: int,
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    ends: Tensor,
    choices: Tensor,
    choices_at: Tensor,
    chain: Tensor,
    overlap: bool = True,
) -> None:
    """The anchors [R] of R sequences, their positions (-1: padding) and slots, and settings [R, 8] of the
    first draft -> ids, positions, slots and ends [R * B] of the block's rows, all int64.

    A row's end is the position before its anchor's. choices and choices_at: settings and positions for the
    sampler, which moves them on. chain [1 + B, R]: the anchor, and no drafts yet, -1.
    """
    count, width = settings.shape
    rows = (anchors, anchors_at, anchors_slots, ids, positions, slots, ends, choices_at)
    assert all(t.dtype == torch.long and t.is_contiguous() for t in (*rows, settings, choices, chain))
    block = len(chain) - 1
    assert chain.shape[1] == count and len(ids) == count * block, (chain.shape, ids.shape)
    if count:
        launch(
            _begin_kernel,
            grid=(count,),
            num_warps=1,
            overlap=overlap,
            anchors_ptr=anchors,
            anchors_at_ptr=anchors_at,
            anchors_slots_ptr=anchors_slots,
            settings_ptr=settings,
            ids_ptr=ids,
            positions_ptr=positions,
            slots_ptr=slots,
            ends_ptr=ends,
            choices_ptr=choices,
            choices_at_ptr=choices_at,
            chain_ptr=chain,
            noise=noise,
            R=count,
            B=block,
            B_SIZE=triton.next_power_of_2(block),
            WIDTH=width,
            PLAIN=PLAIN,
        )


@triton.jit
def _fuse_kernel(parts_ptr, weight_ptr, out_ptr, in_ptr, rows, eps, PARTS: tl.constexpr, D: tl.constexpr,  # type: ignore[no-untyped-def]
                 SIZE: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    act: tl.constexpr = out_ptr.dtype.element_ty
    launch_dependents()
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    weight = channels(weight_ptr, D, SIZE)
    wait_for_prerequisites()
    x = channels(parts_ptr + row * D, D, SIZE)
    for part in tl.static_range(1, PARTS):
        x += channels(parts_ptr + (part * rows + row) * D, D, SIZE)
    x = norm(rounded(x, act), weight, eps, D, act)
    tl.store(out_ptr + row * D + c, to_act(x, act), mask=c < D)
    if in_ptr is not None:
        tl.store(in_ptr + row * D + c, to_act(round_row(x, HOW, SIZE, act), act), mask=c < D)


@launcher(
    reads=("parts",),
    reads_early=("weight",),
    writes=("out", "out_in"),
    means=meaning.fuse,
)
def fuse(
    parts: Tensor,
    weight: Tensor,
    out: Tensor,
    eps: float,
    out_in: Tensor | None = None,
    activations: str = "a16",
    overlap: bool = True,
) -> None:
    """parts [S, n, D] float32, to be summed -> out [n, D]: rounded, then normalised with weight [D]. out_in:
    out as quantised products see it, None with a16."""
    count, rows, width = parts.shape
    assert parts.is_contiguous() and out.shape == (rows, width) and out.is_contiguous(), parts.shape
    assert (out_in is None) == (activations == "a16") and (out_in is None or out_in.is_contiguous())
    if rows:
        launch(
            _fuse_kernel,
            grid=(rows,),
            num_warps=8,
            overlap=overlap,
            parts_ptr=parts,
            weight_ptr=weight,
            out_ptr=out,
            in_ptr=out_in,
            rows=rows,
            eps=eps,
            PARTS=count,
            D=width,
            SIZE=max(FP8_TILE, triton.next_power_of_2(width)),
            HOW=HOW[activations],
        )


@triton.jit
def _keep_kernel(kv_ptr, norms_ptr, ring_ptr, ring_rope_ptr, ring_scale_ptr, ring_step, cos_ptr, sin_ptr,  # type: ignore[no-untyped-def]
                 slots_ptr, positions_ptr, eps, ROWS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
                 ROPE: tl.constexpr, ROW: tl.constexpr, ROPE_ROW: tl.constexpr, SCALES: tl.constexpr,
                 RING: tl.constexpr):  # fmt: skip
    act: tl.constexpr = ring_rope_ptr.dtype.element_ty
    launch_dependents()
    row, stage = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    weight = channels(norms_ptr + stage * D, D, SIZE)
    wait_for_prerequisites()
    pos = tl.load(positions_ptr + row)
    if pos >= 0:
        x = channels(kv_ptr + (stage * ROWS + row) * D, D, SIZE)
        cos, sin = angles(cos_ptr, sin_ptr, pos, 1.0, D - ROPE, ROPE // 2, SIZE)
        x = rotate(norm(rounded(x, act), weight, eps, D, act), cos, sin, act)
        to = stage * ring_step + tl.load(slots_ptr + row) * RING + pos % RING
        put_kv8(x, ring_ptr, ring_rope_ptr, ring_scale_ptr, to, D - ROPE, ROPE, ROW, ROPE_ROW, SCALES, SIZE,
                act)  # fmt: skip


@launcher(
    reads=("kv", "slots", "positions", "cos", "sin"),
    reads_early=("norms",),
    writes=("rings",),
    means=meaning.keep,
)
def keep(
    kv: Tensor,
    norms: Tensor,
    rings: list[QuantTensor],
    ring_rows: int,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    positions: Tensor,
    act: torch.dtype,
    eps: float,
    overlap: bool = True,
) -> None:
    """kv [S, n, d] float32, rounded to `act` first; norms [S, d] -> each stage's entries of the rows whose
    positions [n] are not negative, in its ring at slot * ring_rows + position mod ring_rows.

    The rings are parts of one store, equally far apart.
    """
    stages, rows, d = kv.shape
    ring, rope = rings[0], rings[0].rope_dim
    assert kv.is_contiguous() and norms.is_contiguous() and norms.shape == (stages, d), norms.shape
    assert ring.scale is not None and cos.shape[1] * 2 == rope and len(rings) == stages, (cos.shape, rope)
    starts = [each.data.storage_offset() // ring.data.shape[1] for each in rings]
    step = starts[-1] - starts[-2] if stages > 1 else 0
    assert starts == [starts[0] + stage * step for stage in range(stages)], starts
    assert len({each.data.untyped_storage()._cdata for each in rings}) == 1, "rings of several stores"
    assert slots.dtype == positions.dtype == torch.long, (slots.dtype, positions.dtype)
    if rows:
        launch(
            _keep_kernel,
            grid=(rows, stages),
            num_warps=8,
            overlap=overlap,
            kv_ptr=kv,
            norms_ptr=norms,
            ring_ptr=ring.data,
            ring_rope_ptr=rope_part(ring, act),
            ring_scale_ptr=ring.scale,
            ring_step=step,
            cos_ptr=cos,
            sin_ptr=sin,
            slots_ptr=slots,
            positions_ptr=positions,
            eps=eps,
            ROWS=rows,
            D=d,
            SIZE=max(64, triton.next_power_of_2(d)),
            ROPE=rope,
            ROW=ring.data.shape[1],
            ROPE_ROW=ring.data.shape[1] // act.itemsize,
            SCALES=ring.scale.shape[1],
            RING=ring_rows,
        )


@triton.jit
def _known(previous_ptr, w1_ptr, row, RANK: tl.constexpr, RANK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Look up the token before in markov_w1: [RANK_SIZE]. For none (-1) that is token 0's row."""
    before = tl.maximum(tl.load(previous_ptr + row), 0)
    return channels(w1_ptr + before * RANK, RANK, RANK_SIZE).to(tl.float32)


@triton.jit(do_not_specialize=["slot"])
def _markov_kernel(chain_ptr, w1_ptr, w2_ptr, base_ptr, mixed_ptr, proj_ptr, z_ptr, confidence_ptr, tiles,  # type: ignore[no-untyped-def]
                   slot, R: tl.constexpr, B: tl.constexpr, V: tl.constexpr, D: tl.constexpr,
                   SIZE: tl.constexpr, RANK: tl.constexpr, RANK_SIZE: tl.constexpr, TILE: tl.constexpr,
                   UNROLLED: tl.constexpr):  # fmt: skip
    launch_dependents()
    tile = tl.program_id(0)
    previous_ptr = chain_ptr + slot * R
    if tile < tiles:
        v, k = tile * TILE + tl.arange(0, TILE), tl.arange(0, RANK_SIZE)
        inside = (v < V)[:, None] & (k < RANK)[None, :]
        # Each weight is read once for all rows.
        w2 = tl.load(w2_ptr + v.to(tl.int64)[:, None] * RANK + k[None, :], mask=inside, other=0.0)
        wait_for_prerequisites()
        for first in range(0, R, UNROLLED):
            for row in tl.static_range(UNROLLED):
                known = _known(previous_ptr, w1_ptr, first + row, RANK, RANK_SIZE)
                base = tl.load(base_ptr + ((first + row) * B + slot) * V + v, mask=v < V, other=0.0)
                z = base + tl.sum(w2.to(tl.float32) * known[None, :], 1)
                tl.store(z_ptr + (first + row) * V + v, z, mask=v < V)
    else:
        row = tile - tiles
        of_mixed, of_known = channels(proj_ptr, D, SIZE), channels(proj_ptr + D, RANK, RANK_SIZE)
        wait_for_prerequisites()
        known = _known(previous_ptr, w1_ptr, row, RANK, RANK_SIZE)
        mixed = channels(mixed_ptr + (row * B + slot) * D, D, SIZE).to(tl.float32)
        confidence = tl.sum(mixed * of_mixed.to(tl.float32), 0) + tl.sum(known * of_known.to(tl.float32), 0)
        tl.store(confidence_ptr + row * B + slot, confidence)


@launcher(
    reads=("chain", "base", "mixed"),
    reads_early=("w1", "w2", "proj"),
    writes=("z", "confidence"),
    means=meaning.markov,
)
def markov(
    slot: int,
    chain: Tensor,
    w1: Tensor,
    w2: Tensor,
    base: Tensor,
    mixed: Tensor,
    proj: Tensor,
    z: Tensor,
    confidence: Tensor,
    overlap: bool = True,
) -> None:
    """One slot of R blocks of B rows: its row of base + w1[token before] . w2 -> z [R, V], float32; and its
    column of confidence [R, B].

    chain [1 + B, R] int64: the anchors, then drafts; the slot's is the one after chain[slot]. w1, w2 [V, r];
    base [R * B, V] float32, mixed [R * B, D], proj [1, D + r].
    """
    (rows, vocab), block = z.shape, len(chain) - 1
    rank, width = w2.shape[1], mixed.shape[1]
    assert w1.shape == w2.shape == (vocab, rank), (w1.shape, w2.shape)
    assert base.shape == (rows * block, vocab) and mixed.shape == (rows * block, width), base.shape
    assert proj.shape == (1, width + rank) and confidence.shape == (rows, block), proj.shape
    assert 0 <= slot < block and chain.shape[1] == rows and chain.dtype == torch.long, chain.shape
    assert all(t.is_contiguous() for t in (chain, w1, w2, base, mixed, proj, z, confidence))
    assert base.dtype == z.dtype == confidence.dtype == torch.float32
    rank_size = triton.next_power_of_2(rank)
    tile = max(1, TABLE_BYTES // (rank_size * w2.dtype.itemsize))
    tiles = triton.cdiv(vocab, tile)
    if rows:
        launch(
            _markov_kernel,
            grid=(tiles + rows,),
            num_warps=8,
            overlap=overlap,
            chain_ptr=chain,
            w1_ptr=w1,
            w2_ptr=w2,
            base_ptr=base,
            mixed_ptr=mixed,
            proj_ptr=proj,
            z_ptr=z,
            confidence_ptr=confidence,
            tiles=tiles,
            slot=slot,
            R=rows,
            B=block,
            V=vocab,
            D=width,
            SIZE=triton.next_power_of_2(width),
            RANK=rank,
            RANK_SIZE=rank_size,
            TILE=tile,
            UNROLLED=math.gcd(rows, 8),
        )
