"""Decode step: the meaning of a DSpark drafter's launches (decode.py)."""

from typing import Any

import torch
from torch import Tensor

from dsv4.gpu.meaning import Claim, Wanted
from dsv4.ops.attention.meaning import near, stored
from dsv4.ops.mhc.meaning import SUM
from dsv4.ops.sample.cpu import PLAIN
from dsv4.quant.formats import QuantTensor
from dsv4.spec import ops
from dsv4.spec.rounding import linear_input


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
    **_: Any,
) -> list[Claim]:
    """Slot j of a block stands at the anchor's position + j; all but the first hold noise."""
    block, count = len(chain) - 1, len(anchors)
    slot = torch.arange(block, device=ids.device)
    is_used = (anchors_at >= 0).unsqueeze(1)
    plain = settings.clone()
    plain[:, 6], plain[:, 7] = PLAIN, -1
    wanted = {
        "ids": torch.where(slot == 0, anchors.unsqueeze(1), noise).flatten(),
        "positions": torch.where(is_used, anchors_at.unsqueeze(1) + slot, -1).flatten(),
        "slots": anchors_slots.repeat_interleave(block, output_size=count * block),
        "ends": torch.where(is_used, anchors_at.unsqueeze(1) - 1, -1).expand(count, block).flatten(),
        "choices": plain,
        "choices_at": anchors_at.clone(),
        "chain": torch.cat((anchors.unsqueeze(0), torch.full_like(chain[1:], -1))),
    }
    held = {"ids": ids, "positions": positions, "slots": slots, "ends": ends}
    held |= {"choices": choices, "choices_at": choices_at, "chain": chain}

    def claim(name: str) -> Claim:
        return Claim(name, held[name], lambda: (wanted[name], 0.0), ulps=0)

    return [claim(name) for name in held]


def fuse(
    parts: Tensor,
    weight: Tensor,
    out: Tensor,
    eps: float,
    out_in: Tensor | None = None,
    activations: Any = "a16",
    **_: Any,
) -> list[Claim]:
    claims = [Claim("out", out, lambda: near(ops.rms_norm(parts.sum(0).to(out.dtype), weight, eps)))]
    if out_in is not None:
        rounded = lambda: (linear_input(out, activations), 0.0)  # noqa: E731
        claims.append(Claim("out_in", out_in, rounded, ulps=0, after=True))
    return claims


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
    **_: Any,
) -> list[Claim]:
    used = (positions >= 0).nonzero().flatten()
    at, claims = positions[used], []
    to = slots[used] * ring_rows + at % ring_rows
    for stage, ring in enumerate(rings):
        value = ops.rotate(ops.rms_norm(kv[stage, used].to(act), norms[stage], eps), cos[at], sin[at])
        claims += stored(f"ring {stage}", ring, to, value)
    return claims


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
    **_: Any,
) -> list[Claim]:
    base, mixed = (rows.unflatten(0, (z.shape[0], -1))[:, slot] for rows in (base, mixed))
    known = w1[chain[slot].clamp(min=0)].float()
    seen = torch.cat((mixed.float(), known), 1)

    def corrected() -> Wanted:
        wide = w2.float()
        return base + known @ wide.mT, base.abs() * SUM + known.abs() @ wide.abs().mT * SUM

    def confident() -> Wanted:
        return seen @ proj[0].float(), seen.abs() @ proj[0].float().abs() * SUM

    return [Claim("z", z, corrected), Claim("confidence", confidence[:, slot], confident)]
