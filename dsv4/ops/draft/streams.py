"""Decode step: what MTP's block is fed with. Tokens and streams, normalised; and of a step's rows the last
committed one of each sequence.

A sequence or row at position -1 is padding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.gpu.numbers import channels, launch, launch_dependents, norm, to_act, wait_for_prerequisites
from dsv4.gpu.pdl import launcher
from dsv4.gpu.shapes import HOW
from dsv4.ops.draft import streams_meaning as meaning
from dsv4.ops.rows.quantize import round_row
from dsv4.ops.sample.cpu import PLAIN
from dsv4.quant.formats import FP8_TILE


@triton.jit
def _enter_kernel(ids_ptr, ids_step, table_ptr, streams_ptr, enorm_ptr, hnorm_ptr, e_ptr, h_ptr, eps,  # type: ignore[no-untyped-def]
                  N: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, E_HOW: tl.constexpr,
                  H_HOW: tl.constexpr):  # fmt: skip
    act: tl.constexpr = e_ptr.dtype.element_ty
    launch_dependents()
    row, stream, c = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, SIZE)
    if stream < N:
        weight = channels(hnorm_ptr, D, SIZE)
        wait_for_prerequisites()
        at = (row * N + stream) * D
        x = norm(channels(streams_ptr + at, D, SIZE).to(tl.float32), weight, eps, D, act)
        tl.store(h_ptr + at + c, to_act(round_row(x, H_HOW, SIZE, act), act), mask=c < D)
    else:
        weight = channels(enorm_ptr, D, SIZE)
        wait_for_prerequisites()
        id = tl.maximum(tl.load(ids_ptr + row * ids_step).to(tl.int64), 0)
        x = to_act(channels(table_ptr + id * D, D, SIZE).to(tl.float32), act).to(tl.float32)
        x = norm(x, weight, eps, D, act)
        tl.store(e_ptr + row * D + c, to_act(round_row(x, E_HOW, SIZE, act), act), mask=c < D)


@launcher(
    reads=("ids", "table", "streams"),
    reads_early=("enorm", "hnorm"),
    writes=("e", "h"),
    means=meaning.enter,
)
def enter(
    ids: Tensor,
    table: Tensor,
    streams: Tensor,
    enorm: Tensor,
    hnorm: Tensor,
    e: Tensor,
    h: Tensor,
    eps: float,
    e_activations: str = "a16",
    h_activations: str = "a16",
    overlap: bool = True,
) -> None:
    """ids [T] of the tokens that follow (-1: token 0), table [V, D], streams [T, N, D] -> e [T, D] and
    h [T * N, D]: the tokens' rows and all streams, normalised, each as the product sees it that reads it."""
    rows, n, d = streams.shape
    assert ids.shape == (rows,) and table.shape[1] == d and table.is_contiguous(), (ids.shape, table.shape)
    assert e.shape == (rows, d) and h.shape == (rows * n, d) and e.dtype == h.dtype, (e.shape, h.shape)
    assert streams.is_contiguous() and e.is_contiguous() and h.is_contiguous()
    if rows:
        launch(
            _enter_kernel,
            grid=(rows, n + 1),
            num_warps=8,
            overlap=overlap,
            ids_ptr=ids,
            ids_step=ids.stride(0),
            table_ptr=table,
            streams_ptr=streams,
            enorm_ptr=enorm,
            hnorm_ptr=hnorm,
            e_ptr=e,
            h_ptr=h,
            eps=eps,
            N=n,
            D=d,
            SIZE=max(FP8_TILE, triton.next_power_of_2(d)),
            E_HOW=HOW[e_activations],
            H_HOW=HOW[h_activations],
        )


@triton.jit
def _take_kernel(committed_ptr, anchors_at_ptr, anchors_slots_ptr, settings_ptr, streams_ptr, x_ptr,  # type: ignore[no-untyped-def]
                 x_in_ptr, gate_ptr, comb_ptr, to_streams_ptr, to_x_ptr, to_x_in_ptr, to_gate_ptr,
                 to_comb_ptr, positions_ptr, slots_ptr, choices_ptr, drafts_ptr, R: tl.constexpr,
                 EACH: tl.constexpr, EACH_SIZE: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
                 D: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    launch_dependents()
    r, part, c = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, SIZE)
    wait_for_prerequisites()
    j = tl.arange(0, EACH_SIZE)
    at = tl.load(committed_ptr + r * EACH + j, mask=j < EACH, other=-1)
    row = r * EACH + tl.max(tl.where(at >= 0, j, 0), 0)
    if part < N:
        stream = channels(streams_ptr + (row * N + part) * D, D, SIZE)
        tl.store(to_streams_ptr + (r * N + part) * D + c, stream, mask=c < D)
    else:
        tl.store(to_x_ptr + r * D + c, channels(x_ptr + row * D, D, SIZE), mask=c < D)
        if x_in_ptr is not None:
            tl.store(to_x_in_ptr + r * D + c, channels(x_in_ptr + row * D, D, SIZE), mask=c < D)
        n, nn = tl.arange(0, N), tl.arange(0, N * N)
        tl.store(to_gate_ptr + r * N + n, tl.load(gate_ptr + row * N + n))
        tl.store(to_comb_ptr + r * N * N + nn, tl.load(comb_ptr + row * N * N + nn))
        anchor_at = tl.load(anchors_at_ptr + r)
        tl.store(positions_ptr + r, tl.where(anchor_at < 0, -1, anchor_at - 1).to(tl.int64))
        tl.store(slots_ptr + r, tl.load(anchors_slots_ptr + r))
        w = tl.arange(0, WIDTH)
        setting = tl.load(settings_ptr + r * WIDTH + w)
        # Without logprobs, mask and penalties, and nothing forced.
        setting = tl.where(w == 6, PLAIN, tl.where(w == 7, -1, setting))
        tl.store(choices_ptr + r * WIDTH + w, setting)
        for k in tl.static_range(K):
            tl.store(drafts_ptr + k * R + r, anchor_at * 0 - 1)


@launcher(
    reads=(
        *("committed", "anchors_at", "anchors_slots", "settings"),
        *("streams", "x", "x_in", "gate", "comb"),
    ),
    writes=(
        *("to_streams", "to_x", "to_x_in", "to_gate", "to_comb"),
        *("positions", "slots", "choices", "drafts"),
    ),
    means=meaning.take_last,
)
def take_last(
    committed: Tensor,
    anchors_at: Tensor,
    anchors_slots: Tensor,
    settings: Tensor,
    streams: Tensor,
    x: Tensor,
    x_in: Tensor | None,
    gate: Tensor,
    comb: Tensor,
    to_streams: Tensor,
    to_x: Tensor,
    to_x_in: Tensor | None,
    to_gate: Tensor,
    to_comb: Tensor,
    positions: Tensor,
    slots: Tensor,
    choices: Tensor,
    drafts: Tensor,
    overlap: bool = True,
) -> None:
    """Copy the last committed row of each of R sequences: committed [T] positions, -1 of other rows, T / R
    rows of each sequence; streams [T, N, D], x and x_in [T, D], gate and comb of a site -> those of R.

    positions [R]: the one before the anchor's, -1 without one; its slot; choices [R, 8]: the settings of the
    first draft for the sampler. drafts [K, R]: none yet, -1.
    """
    (rows, n, d), count = streams.shape, len(anchors_at)
    assert count and rows % count == 0 and len(committed) == rows, (rows, count)
    pairs = [(streams, to_streams), (x, to_x), (gate, to_gate), (comb, to_comb)]
    assert (x_in is None) == (to_x_in is None)
    if x_in is not None and to_x_in is not None:
        pairs.append((x_in, to_x_in))
    for of, to in pairs:
        assert of.is_contiguous() and to.is_contiguous() and of.dtype == to.dtype, (of.dtype, to.dtype)
        assert len(of) == rows and to.shape == (count, *of.shape[1:]), (of.shape, to.shape)
    numbers = (committed, anchors_at, anchors_slots, settings, positions, slots, choices, drafts)
    assert all(t.dtype == torch.long and t.is_contiguous() for t in numbers)
    assert settings.shape == choices.shape and drafts.shape[1] == count == len(positions) == len(slots)
    launch(
        _take_kernel,
        grid=(count, n + 1),
        num_warps=8,
        overlap=overlap,
        committed_ptr=committed,
        anchors_at_ptr=anchors_at,
        anchors_slots_ptr=anchors_slots,
        settings_ptr=settings,
        streams_ptr=streams,
        x_ptr=x,
        x_in_ptr=x_in,
        gate_ptr=gate,
        comb_ptr=comb,
        to_streams_ptr=to_streams,
        to_x_ptr=to_x,
        to_x_in_ptr=to_x_in,
        to_gate_ptr=to_gate,
        to_comb_ptr=to_comb,
        positions_ptr=positions,
        slots_ptr=slots,
        choices_ptr=choices,
        drafts_ptr=drafts,
        R=count,
        EACH=rows // count,
        EACH_SIZE=triton.next_power_of_2(rows // count),
        K=len(drafts),
        N=n,
        D=d,
        SIZE=triton.next_power_of_2(d),
        WIDTH=settings.shape[1],
        PLAIN=PLAIN,
    )
