"""Decode step: what the launches of a round of speculation mean (round.py), in Python's integers."""

import math
from typing import Any

import torch
from torch import Tensor

from dsv4.gpu.meaning import Claim
from dsv4.ops.sample.cpu import HISTORY


def _equal(name: str, buffer: Tensor, wanted: Tensor) -> Claim:
    return Claim(name, buffer, lambda: (wanted.to(buffer.dtype), 0.0), ulps=0)


def _is_masked(asked: int) -> bool:
    return bool(asked >> 32 & 1)


def _of(state: Tensor, slot: int) -> list[int]:
    return state[slot].tolist() if slot >= 0 else [0, -1] + [0] * (state.shape[1] - 2)


def open_round(
    seats: Tensor,
    state: Tensor,
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    settings: Tensor,
    verified: Tensor,
    penalties: Tensor | None,
    **_: Any,
) -> list[Claim]:
    count, most_drafts = len(seats), len(ids) // len(seats) - 1
    held = None if penalties is None else penalties.clone()
    rows, chosen, used = [], [], []
    for slot, room, most, *how in seats.tolist():
        token, position, index, number, *drafts = _of(state, slot)
        most = 0 if _is_masked(how[6]) else most
        k = max(0, min(number, most, room - 1 - position, most_drafts))
        used.append(k if slot >= 0 and 0 <= position < room else -1)
        for j, id in enumerate([token, *drafts[:most_drafts]]):
            is_used = j <= used[-1]
            rows.append((id, position + j if is_used else -1, max(slot, 0)))
            chosen.append([*how[:4], index + j, *how[5:]])
            if is_used and held is not None and how[6] >> 33:
                held[(how[6] >> 33) - 1, HISTORY + position + j] = id
    table = torch.tensor(rows, device=ids.device).view(count * (most_drafts + 1), 3)
    claims = [
        _equal(name, buffer, table[:, column])
        for column, (name, buffer) in enumerate((("ids", ids), ("positions", positions), ("slots", slots)))
    ]
    claims.append(_equal("settings", settings, torch.tensor(chosen, device=ids.device)))
    claims.append(_equal("verified", verified, torch.tensor(used, device=ids.device)))
    if penalties is not None and held is not None:
        claims.append(_equal("penalties", penalties, held))
    return claims


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
    **_: Any,
) -> list[Claim]:
    each = len(committed) // len(seats)
    held, final, results, found = state.clone(), [], [], []
    for q, (seat, k) in enumerate(zip(seats.tolist(), verified.tolist(), strict=True)):
        slot, room, most, *how = seat
        _token, position, index, _count, *drafts = _of(state, slot)
        chosen = out[q * each : (q + 1) * each, 0].tolist()
        count = 0
        while count <= k:
            count += 1
            if count > k or chosen[count - 1] < 0 or chosen[count - 1] != drafts[count - 1]:
                break
        final += [position + j if j < count else -1 for j in range(each)]
        results.append((count, k))
        token = chosen[count - 1] if count else 0
        position, index = position + count, index + count
        if k >= 0:
            held[slot, :4] = torch.tensor((token, position, index, 0))
        wants = k >= 0 and token >= 0 and most > 0 and position + 1 < room and not _is_masked(how[6])
        found.append([max(token, 0), position if wants else -1, max(slot, 0), *how[:4], index, *how[5:]])
    device = state.device
    claims = [
        _equal("state", state, held),
        _equal("taken", taken, torch.tensor(results, device=device)),
        _equal("committed", committed, torch.tensor(final, device=device)),
    ]
    if anchors is not None:
        assert anchors_at is not None and anchors_slots is not None and settings is not None
        table = torch.tensor(found, device=device)
        named = (("anchors", anchors), ("anchors_at", anchors_at), ("anchors_slots", anchors_slots))
        claims += [_equal(name, buffer, table[:, i]) for i, (name, buffer) in enumerate(named)]
        claims.append(_equal("settings", settings, table[:, 3:]))
    return claims


def keep(
    drafts: Tensor,
    confidence: Tensor,
    anchors_at: Tensor,
    anchors_slots: Tensor,
    costs: Tensor,
    state: Tensor,
    **_: Any,
) -> list[Claim]:
    held, most = state.clone(), len(costs) - 1
    times = costs.tolist()
    for q, (at, slot) in enumerate(zip(anchors_at.tolist(), anchors_slots.tolist(), strict=True)):
        if at < 0:
            continue
        rates, survival, tokens = [1 / times[0]], 1.0, 1.0
        for j in range(most):
            logit = float(confidence[q, j])
            chance = 1 / (1 + math.exp(-max(logit, -700.0))) if logit == logit else 0.0
            survival *= min(max(chance, 0.01), 0.99)
            tokens += survival
            rates.append(tokens / times[j + 1])
        held[slot, 3] = rates.index(max(rates))
        held[slot, 4 : 4 + most] = drafts[:most, q]
    return [_equal("state", state, held)]
