"""Decode step: a round of speculation. Its rows from what the device knows of each sequence, what is
accepted, and how many of the next drafts are worth verifying. Nobody waits for the host.

A seat is a sequence's place in a round: K + 1 rows, for the token that is known and for K drafts. What the
device knows of a sequence lies by its slot in `state`, so the next round may have other seats.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.gpu.numbers import launch, launch_dependents, wait_for_prerequisites
from dsv4.gpu.pdl import launcher
from dsv4.ops.draft import round_meaning as meaning
from dsv4.ops.sample.cpu import HISTORY, RESULT, WIDTH

# Of a seat, from the host: its slot (-1: empty), tokens it has room for, most drafts to verify, settings.
SLOT, ROOM, MOST, SETTINGS = range(4)
SEAT = SETTINGS + WIDTH
# Of a slot: the token that is known and not yet processed, its position, the index of the token after it, the
# number of its drafts, and they.
TOKEN, POSITION, INDEX, COUNT, DRAFTS = range(5)
# Numbers of the sampler's settings.
AT_INDEX, ASKED = 4, 6


def state_of(slots: int, drafts: int, device: str | torch.device) -> Tensor:
    """int64 [slots, DRAFTS + drafts], of nobody yet."""
    return torch.zeros(slots, DRAFTS + drafts, dtype=torch.long, device=device)


@triton.jit
def _open_kernel(seats_ptr, state_ptr, state_step, ids_ptr, positions_ptr, slots_ptr, settings_ptr,  # type: ignore[no-untyped-def]
                 verified_ptr, penalties_ptr, penalty_step, K: tl.constexpr, SEAT: tl.constexpr,
                 SETTINGS: tl.constexpr, WIDTH: tl.constexpr, INDEX_AT: tl.constexpr, ASKED: tl.constexpr,
                 DRAFTS: tl.constexpr, HISTORY: tl.constexpr):  # fmt: skip
    launch_dependents()
    seat = seats_ptr + tl.program_id(0) * SEAT
    wait_for_prerequisites()
    slot, room, most = tl.load(seat), tl.load(seat + 1), tl.load(seat + 2)
    state = state_ptr + tl.maximum(slot, 0) * state_step
    token = tl.load(state, mask=slot >= 0, other=0)
    position = tl.load(state + 1, mask=slot >= 0, other=-1)
    index = tl.load(state + 2, mask=slot >= 0, other=0)
    count = tl.load(state + 3, mask=slot >= 0, other=0)
    asked = tl.load(seat + SETTINGS + ASKED)
    most = tl.where((asked >> 32 & 1) != 0, 0, most)  # a grammar's mask is for the first row alone
    k = tl.maximum(tl.minimum(tl.minimum(count, most), tl.minimum(room - 1 - position, K)), 0)
    is_used = (slot >= 0) & (position >= 0) & (position < room)
    tl.store(verified_ptr + tl.program_id(0), tl.where(is_used, k, -1))
    penalised = (asked >> 33) - 1
    c = tl.arange(0, WIDTH)
    settings = tl.load(seat + SETTINGS + c)
    for j in tl.static_range(K + 1):
        row = tl.program_id(0) * (K + 1) + j
        if j > 0:
            token = tl.load(state + DRAFTS + j - 1, mask=slot >= 0, other=0)
        used = is_used & (j <= k)
        tl.store(ids_ptr + row, token)
        tl.store(positions_ptr + row, tl.where(used, position + j, -1))
        tl.store(slots_ptr + row, tl.maximum(slot, 0))
        tl.store(settings_ptr + row * WIDTH + c, tl.where(c == INDEX_AT, index + j, settings))
        if penalties_ptr is not None:
            at = penalties_ptr + tl.maximum(penalised, 0) * penalty_step + HISTORY + position + j
            tl.store(at, token.to(tl.int32), mask=used & (penalised >= 0))


@launcher(
    reads=("seats", "state"),
    writes=("ids", "positions", "slots", "settings", "verified", "penalties"),
    means=meaning.open_round,
)
def open_round(
    seats: Tensor,
    state: Tensor,
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    settings: Tensor,
    verified: Tensor,
    penalties: Tensor | None,
    overlap: bool = True,
) -> None:
    """seats int64 [R, SEAT], state [slots, DRAFTS + B] -> rows [R * (K + 1)] of ids, positions (-1: unused),
    slots and settings; `verified` [R]: how many drafts are, -1 for a seat without a row. Tokens of penalised
    seats go to their places in `penalties`."""
    count, rows = len(seats), len(ids)
    assert rows % count == 0 and seats.shape[1] == SEAT and seats.is_contiguous() and settings.is_contiguous()
    assert state.shape[1] - DRAFTS >= rows // count - 1, (state.shape, rows, count)
    launch(
        _open_kernel,
        grid=(count,),
        num_warps=1,
        overlap=overlap,
        seats_ptr=seats,
        state_ptr=state,
        state_step=state.stride(0),
        ids_ptr=ids,
        positions_ptr=positions,
        slots_ptr=slots,
        settings_ptr=settings,
        verified_ptr=verified,
        penalties_ptr=penalties,
        penalty_step=0 if penalties is None else penalties.stride(0),
        K=rows // count - 1,
        SEAT=SEAT,
        SETTINGS=SETTINGS,
        WIDTH=WIDTH,
        INDEX_AT=AT_INDEX,
        ASKED=ASKED,
        DRAFTS=DRAFTS,
        HISTORY=HISTORY,
    )


@triton.jit
def _accept_kernel(seats_ptr, state_ptr, state_step, out_ptr, verified_ptr, taken_ptr, committed_ptr,  # type: ignore[no-untyped-def]
                   anchors_ptr, anchors_at_ptr, anchors_slots_ptr, settings_ptr, K: tl.constexpr,
                   SEAT: tl.constexpr, SETTINGS: tl.constexpr, WIDTH: tl.constexpr, INDEX_AT: tl.constexpr,
                   ASKED: tl.constexpr, DRAFTS: tl.constexpr, RESULT: tl.constexpr):  # fmt: skip
    launch_dependents()
    q = tl.program_id(0)
    seat = seats_ptr + q * SEAT
    wait_for_prerequisites()
    slot, room, most = tl.load(seat), tl.load(seat + 1), tl.load(seat + 2)
    state = state_ptr + tl.maximum(slot, 0) * state_step
    position = tl.load(state + 1, mask=slot >= 0, other=-1)
    index = tl.load(state + 2, mask=slot >= 0, other=0)
    k = tl.load(verified_ptr + q)
    goes_on = k >= 0
    token, taken = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for j in tl.static_range(K + 1):
        row = q * (K + 1) + j
        counts = goes_on & (j <= k)
        id = tl.load(out_ptr + row * RESULT).to(tl.int64)
        token = tl.where(counts, id, token)
        taken += counts.to(tl.int64)
        tl.store(committed_ptr + row, tl.where(counts, position + j, -1))
        if j < K:
            goes_on = counts & (j < k) & (id >= 0) & (id == tl.load(state + DRAFTS + j))
    position += taken
    index += taken
    tl.store(taken_ptr + q * 2, taken.to(tl.int32))
    tl.store(taken_ptr + q * 2 + 1, k.to(tl.int32))
    tl.store(state, token, mask=k >= 0)
    tl.store(state + 1, position, mask=k >= 0)
    tl.store(state + 2, index, mask=k >= 0)
    tl.store(state + 3, taken * 0, mask=k >= 0)
    if anchors_ptr is not None:
        asked = tl.load(seat + SETTINGS + ASKED)
        drafts = (k >= 0) & (token >= 0) & (most > 0) & (position + 1 < room) & ((asked >> 32 & 1) == 0)
        tl.store(anchors_ptr + q, tl.maximum(token, 0))
        tl.store(anchors_at_ptr + q, tl.where(drafts, position, -1))
        tl.store(anchors_slots_ptr + q, tl.maximum(slot, 0))
        c = tl.arange(0, WIDTH)
        settings = tl.load(seat + SETTINGS + c)
        tl.store(settings_ptr + q * WIDTH + c, tl.where(c == INDEX_AT, index, settings))


@launcher(
    reads=("seats", "state", "out", "verified"),
    writes=("state", "taken", "committed", "anchors", "anchors_at", "anchors_slots", "settings"),
    means=meaning.accept,
)
def accept(
    seats: Tensor,
    state: Tensor,
    out: Tensor,
    verified: Tensor,
    taken: Tensor,
    committed: Tensor,
    anchors: Tensor | None = None,
    anchors_at: Tensor | None = None,
    anchors_slots: Tensor | None = None,
    settings: Tensor | None = None,
    overlap: bool = True,
) -> None:
    """What a row chose (`out` int32 [R * (K + 1), RESULT]) counts if all drafts before it were chosen.

    -> `taken` int32 [R, 2]: tokens that come out (0: none) and drafts that were verified; `committed` int64
    [R * (K + 1)]: positions that are final, -1; the state of their slots, with the last token that came out.
    That is the anchor of the next drafts, which are chosen by `settings` [R, WIDTH]; `anchors_at`: its
    position, -1 where none are wanted. Without `anchors`: nobody drafts.
    """
    count, rows = len(seats), len(committed)
    assert rows % count == 0 and out.is_contiguous() and len(out) == rows and taken.dtype == torch.int32
    launch(
        _accept_kernel,
        grid=(count,),
        num_warps=1,
        overlap=overlap,
        seats_ptr=seats,
        state_ptr=state,
        state_step=state.stride(0),
        out_ptr=out,
        verified_ptr=verified,
        taken_ptr=taken,
        committed_ptr=committed,
        anchors_ptr=anchors,
        anchors_at_ptr=anchors_at,
        anchors_slots_ptr=anchors_slots,
        settings_ptr=settings,
        K=rows // count - 1,
        SEAT=SEAT,
        SETTINGS=SETTINGS,
        WIDTH=WIDTH,
        INDEX_AT=AT_INDEX,
        ASKED=ASKED,
        DRAFTS=DRAFTS,
        RESULT=RESULT,
    )


@triton.jit
def _keep_kernel(drafts_ptr, confidence_ptr, anchors_at_ptr, anchors_slots_ptr, costs_ptr, state_ptr,  # type: ignore[no-untyped-def]
                 state_step, SEATS: tl.constexpr, B: tl.constexpr, K: tl.constexpr,
                 DRAFTS: tl.constexpr):  # fmt: skip
    launch_dependents()
    q = tl.program_id(0)
    wait_for_prerequisites()
    wanted = tl.load(anchors_at_ptr + q) >= 0
    state = state_ptr + tl.load(anchors_slots_ptr + q) * state_step
    survival, tokens = 1.0, 1.0
    best, count = 1.0 / tl.load(costs_ptr), tl.full([], 0, tl.int64)
    for j in tl.static_range(K):
        chance = 1.0 / (1.0 + tl.exp(-tl.load(confidence_ptr + q * B + j)))
        survival *= tl.minimum(tl.maximum(chance, 0.01), 0.99)
        tokens += survival
        rate = tokens / tl.load(costs_ptr + j + 1)
        count = tl.where(rate > best, j + 1, count)
        best = tl.maximum(rate, best)
        tl.store(state + DRAFTS + j, tl.load(drafts_ptr + j * SEATS + q), mask=wanted)
    tl.store(state + 3, count, mask=wanted)


@launcher(
    reads=("drafts", "confidence", "anchors_at", "anchors_slots", "costs"),
    writes=("state",),
    means=meaning.keep,
)
def keep(
    drafts: Tensor,
    confidence: Tensor,
    anchors_at: Tensor,
    anchors_slots: Tensor,
    costs: Tensor,
    state: Tensor,
    overlap: bool = True,
) -> None:
    """drafts int64 [B, R] and their confidence [R, B] (logits) -> the first K of them in the slots' state,
    and how many of those are worth verifying: as many as give most tokens for `costs` [K + 1], the time of a
    round that verifies 0 to K. A longer run of drafts must give more than a shorter one."""
    block, count = drafts.shape
    assert confidence.shape == (count, block) and drafts.is_contiguous() and confidence.is_contiguous()
    assert 1 <= len(costs) - 1 <= block and costs.dtype == torch.float32, (costs.shape, block)
    launch(
        _keep_kernel,
        grid=(count,),
        num_warps=1,
        overlap=overlap,
        drafts_ptr=drafts,
        confidence_ptr=confidence,
        anchors_at_ptr=anchors_at,
        anchors_slots_ptr=anchors_slots,
        costs_ptr=costs,
        state_ptr=state,
        state_step=state.stride(0),
        SEATS=count,
        B=block,
        K=len(costs) - 1,
        DRAFTS=DRAFTS,
    )
