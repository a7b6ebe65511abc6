"""Pool a block of tokens into one entry, for any chunking: rows come from this step or from the tail."""

import torch
from torch import Tensor

from dsv4.ops._exact import exp, total


def rows_at(
    fresh: Tensor,
    tail: Tensor,
    token: Tensor,
    wanted: Tensor,
    slots: Tensor,
    positions: Tensor,
    first: Tensor,
) -> Tensor:
    """Rows of the sequence of `token` [C] at positions `wanted` [C, R] -> [C, R, ...].

    Position j >= first lies in this step, (positions[token] - j) rows above the token; an older one lies in
    the ring `tail` [S, L, ...] at j mod L. Negative positions give an arbitrary row: the caller masks them.
    """
    back = positions[token].unsqueeze(1) - wanted
    here = fresh[(token.unsqueeze(1) - back).clamp(min=0)]
    there = tail[slots[token].unsqueeze(1), wanted % tail.shape[1]]
    is_here = wanted >= first[token].unsqueeze(1)
    return torch.where(is_here.view(*is_here.shape, *[1] * (here.dim() - 2)), here, there)


def pool(
    values: Tensor,
    scores: Tensor,
    tail_values: Tensor,
    tail_scores: Tensor,
    closing: Tensor,
    slots: Tensor,
    positions: Tensor,
    first: Tensor,
    ratio: int,
    overlap: bool,
) -> Tensor:
    """values, scores [T, m*d] float32 (scores carry the position bias); closing [C]: tokens ending a block.

    -> [C, d]: a softmax per channel over the block's rows. With overlap (m = 2) the previous block's rows
    take part with their first halves, the current block's with their second halves.
    """
    if not closing.numel():
        return values.new_empty(0, values.shape[1] // (2 if overlap else 1))
    span = torch.arange(ratio * (2 if overlap else 1), device=values.device)
    wanted = positions[closing].unsqueeze(1) - span.flip(0)  # [C, R], oldest first
    where = (closing, wanted, slots, positions, first)
    v, s = rows_at(values, tail_values, *where), rows_at(scores, tail_scores, *where)
    s = s.masked_fill((wanted < 0).unsqueeze(-1), -torch.inf)
    v = v.masked_fill((wanted < 0).unsqueeze(-1), 0.0)
    if overlap:
        d = values.shape[1] // 2
        v = torch.cat((v[:, :ratio, :d], v[:, ratio:, d:]), dim=1)
        s = torch.cat((s[:, :ratio, :d], s[:, ratio:, d:]), dim=1)
    weight = exp(s - s.amax(1, keepdim=True))
    return total(weight * v, 1) / total(weight, 1)


def put(
    tail_values: Tensor,
    tail_scores: Tensor,
    rows: Tensor,
    values: Tensor,
    scores: Tensor,
    tokens: Tensor | None = None,
) -> None:
    """Keep these tokens' rows (None: all) in the tail [S, L, ...]: at slot * L + position mod L."""
    for tail, fresh in ((tail_values, values), (tail_scores, scores)):
        tail.flatten(0, 1).index_copy_(0, rows, fresh if tokens is None else fresh[tokens])
