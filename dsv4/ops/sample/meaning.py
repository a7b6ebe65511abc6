"""Decode step: what the choice of tokens means (decode.py): cpu.py's, bit for bit, and rows move on."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4.gpu.meaning import Claim, Wanted
from dsv4.ops.sample.cpu import HISTORY, choose


def sample(
    logits: Tensor,
    settings: Tensor,
    mask: Tensor | None,
    out: Tensor,
    next_ids: Tensor | None = None,
    positions: Tensor | None = None,
    slots: Tensor | None = None,
    latest: Tensor | None = None,
    penalties: Tensor | None = None,
    **_: Any,
) -> list[Claim]:
    assert next_ids is not None and positions is not None and slots is not None
    used = positions >= 0
    noted = None
    if penalties is not None:  # the input of a row that has some is the last token of its history
        noted, has = penalties.clone(), used & (settings[:, 6] >> 33 > 0)
        noted[slots[has], HISTORY + positions[has]] = next_ids[has].int()
    chosen = choose(logits, settings, mask, noted)
    moved = settings.clone()
    moved[used, 4] += 1
    ids = torch.where(used, chosen[:, 0].long(), next_ids)
    wanted = {"out": torch.where(used.unsqueeze(1), chosen, out), "next_ids": ids}
    wanted |= {"positions": positions + used, "settings": moved}
    held = {"out": out, "next_ids": next_ids, "positions": positions, "settings": settings}
    if penalties is not None and noted is not None:
        wanted["penalties"], held["penalties"] = noted, penalties
    if latest is not None:
        wanted["latest"], held["latest"] = latest.index_put((slots[used],), ids[used]), latest
    return [Claim(name, held[name], partial(_exactly, value), ulps=0) for name, value in wanted.items()]


def _exactly(value: Tensor) -> Wanted:
    return value, 0.0
