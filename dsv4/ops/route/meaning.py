"""Decode step: what routing means (decode.py): experts by rising number, their weights, and tasks."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv4.gpu.meaning import Claim, Wanted
from dsv4.ops.linear.decode import COLUMNS, FLOAT_COLUMNS
from dsv4.ops.linear.meaning import experts_of
from dsv4.spec import ops

if TYPE_CHECKING:
    from dsv4.ops.linear.decode import Tasks


def route(
    logits: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    ids: Tensor,
    scale: float,
    is_float: bool,
    chosen: Tensor,
    tasks: "Tasks",
    positions: Tensor | None = None,
    counts: Tensor | None = None,
    own: range | None = None,
    **_: Any,
) -> list[Claim]:
    rows, experts = logits.shape
    own = range(experts) if own is None else own

    def biased() -> Tensor:
        assert bias is not None, "a layer routes by its bias or by a table"
        return ops.route_scores(logits) + bias

    def choice() -> Tensor:
        listed = ops.top_k(biased(), tasks.choices) if table is None else table[ids.clamp(min=0)]
        return listed.sort(1).values

    def ranking(of: Tensor) -> Tensor:
        """What choices are compared by: a score one rounding away may win."""
        return of.float() if table is not None else biased().gather(1, of.long()).sort(1).values

    def put_choice(_: Tensor) -> None:
        chosen.copy_(choice())

    def want_tasks() -> Wanted:
        is_own = (chosen >= own.start) & (chosen < own.stop)
        if positions is not None and rows > 1:
            is_own &= (positions >= 0).unsqueeze(1)
        return torch.where(is_own, chosen - own.start, -1).flatten().float(), 0.0

    def put_tasks(of_pair: Tensor) -> None:
        tasks.expert.fill_(-1)
        tasks.pairs.fill_(-1)
        number, width = 0, 1 if rows == 1 else FLOAT_COLUMNS if is_float else COLUMNS
        for expert in of_pair[of_pair >= 0].unique().tolist():
            for part in (of_pair == expert).nonzero().flatten().split(width):
                at = int(part[0]) if rows == 1 else number
                tasks.expert[at] = int(expert)
                tasks.pairs[at, : len(part)] = part.to(tasks.pairs.dtype)
                number += 1

    claims = [
        Claim(
            name="chosen",
            buffer=chosen,
            want=lambda: (ranking(choice()), 1e-5),
            read=lambda: ranking(chosen),
            write=put_choice,
        ),
        Claim("chosen, in order", chosen, lambda: (chosen.sort(1).values, 0.0), ulps=0, after=True),
        Claim(
            name="weights",
            buffer=tasks.weights,
            want=lambda: (ops.route_weights(ops.route_scores(logits), chosen.long(), scale).flatten(), 1e-5),
            after=True,
        ),
        Claim(
            name="tasks",
            buffer=tasks.expert,
            want=want_tasks,
            ulps=0,
            after=True,
            read=lambda: experts_of(tasks, chosen.numel()).float(),
            write=put_tasks,
        ),
    ]
    if counts is not None:
        assert positions is not None
        before = counts.clone()

        def want_counts() -> Wanted:
            chosen_by = torch.bincount(chosen[positions >= 0].flatten().long(), minlength=experts)
            return before + chosen_by.to(before.dtype), 0.0

        claims.append(Claim("counts", counts, want_counts, ulps=0, after=True))
    return claims
