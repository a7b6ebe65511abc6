"""Decode step: the meaning of what feeds MTP's block (streams.py)."""

from typing import Any

import torch
from torch import Tensor

from dsv4.gpu.meaning import Claim, Wanted
from dsv4.ops.attention.meaning import near
from dsv4.ops.sample.cpu import PLAIN
from dsv4.spec import ops
from dsv4.spec.rounding import linear_input


def enter(
    ids: Tensor,
    table: Tensor,
    streams: Tensor,
    enorm: Tensor,
    hnorm: Tensor,
    e: Tensor,
    h: Tensor,
    eps: float,
    e_activations: Any = "a16",
    h_activations: Any = "a16",
    **_: Any,
) -> list[Claim]:
    def claim(name: str, buffer: Tensor, x: Tensor, weight: Tensor, activations: Any) -> Claim:
        def want() -> Wanted:
            normed = ops.rms_norm(x, weight, eps)
            if activations == "a8":  # its scales are powers of two
                return linear_input(normed, activations), 0.0
            return near(linear_input(normed, activations))

        coded = {"a16": None, "a8": "fp8", "a4": "fp4"}[activations]
        return Claim(name, buffer, want, coded=coded)  # type: ignore[arg-type]

    embedded = table[ids.long().clamp(min=0)].to(e.dtype)
    return [
        claim("e", e, embedded, enorm, e_activations),
        claim("h", h, streams.flatten(0, 1), hnorm, h_activations),
    ]


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
    **_: Any,
) -> list[Claim]:
    """The committed rows of a sequence are its first."""
    count = len(anchors_at)
    of_sequence = committed.view(count, -1)
    last = ((of_sequence >= 0).sum(1) - 1).clamp(min=0)
    rows = torch.arange(count, device=last.device) * of_sequence.shape[1] + last
    plain = settings.clone()
    plain[:, 6], plain[:, 7] = PLAIN, -1
    wanted = {
        "to_streams": (to_streams, streams[rows]),
        "to_x": (to_x, x[rows]),
        "to_gate": (to_gate, gate[rows]),
        "to_comb": (to_comb, comb[rows]),
        "positions": (positions, torch.where(anchors_at < 0, -1, anchors_at - 1)),
        "slots": (slots, anchors_slots.clone()),
        "choices": (choices, plain),
        "drafts": (drafts, torch.full_like(drafts, -1)),
    }
    if x_in is not None and to_x_in is not None:
        wanted["to_x_in"] = (to_x_in, x_in[rows])

    def claim(name: str) -> Claim:
        buffer, value = wanted[name]
        return Claim(name, buffer, lambda: (value, 0.0), ulps=0)

    return [claim(name) for name in wanted]
