"""Attention over the raw window and the chosen compressed entries, with a sink; one shared KV head."""

from itertools import groupby

import torch
from torch import Tensor

from dsv4.ops._exact import cast, number, rotate
from dsv4.quant.codec import decode
from dsv4.quant.formats import QuantTensor, join

# Queries whose keys are decoded together: bounds the memory of a long prompt's chosen entries.
RUN = 32


def attend(
    q: Tensor,
    fresh: QuantTensor,
    ring: QuantTensor,
    slots: Tensor,
    positions: Tensor,
    first: Tensor,
    window: int,
    ring_size: int,
    pool: QuantTensor | None,
    rows: Tensor | None,
    sinks: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """q [T, H, D] -> o [T, H, D].

    Raw keys of a query at p: positions max(0, p-window+1) .. p, of which those >= first are rows of `fresh`
    (this step's tokens) and older ones rows `slot*ring_size + j mod ring_size` of `ring`. Compressed keys:
    `pool` rows listed in `rows` [T, S], -1 meaning none. Keys are the values too. The sink adds to the
    denominator only. The output is rotated back by the query's position.
    """
    out = torch.empty_like(q)
    scale, sinks = number(q.shape[-1] ** -0.5, q.device), sinks.unsqueeze(1)
    where = [*zip(slots.tolist(), first.tolist(), positions.tolist(), strict=True)]
    for (slot, start, _), group in groupby(range(len(where)), key=lambda t: (*where[t][:2], t // RUN)):
        run = [*group]
        lowest, highest = where[run[0]][2], where[run[-1]][2]
        # All keys of the run: raw ones from position `oldest` on, then the entries of each query.
        oldest = max(0, lowest - window + 1)
        newer = max(oldest, start)
        keys = _of_ring(ring, slot * ring_size, oldest, newer, ring_size)
        keys.append(fresh.span(run[-1] - (highest - newer), run[-1] + 1))
        counts = [0] * len(run)
        if pool is not None and rows is not None and rows.shape[1]:
            listed = rows[run[0] : run[-1] + 1]
            is_listed = listed >= 0
            counts = is_listed.sum(1).tolist()
            keys.append(pool.take(listed.masked_select(is_listed)))
        decoded = decode(join(keys))
        entry = highest + 1 - oldest
        for t, count in zip(run, counts, strict=True):
            p = where[t][2]
            raw = decoded[max(0, p - window + 1) - oldest : p + 1 - oldest]
            key = torch.cat((raw, decoded[entry : entry + count]))  # [S, D]
            entry += count
            score = torch.mm(q[t].float().clone(), key.t()) * scale  # [H, S]
            peak = score.amax(1, keepdim=True)
            weight = torch.exp(score - peak)
            total = weight.sum(1, keepdim=True) + torch.exp(sinks - peak)
            # The value product sees the weights in the compute type; the denominator does not.
            out[t] = torch.mm(cast(weight, q.dtype).float(), key) / total
    return rotate(out, cos, -sin)


def _of_ring(ring: QuantTensor, base: int, oldest: int, stop: int, size: int) -> list[QuantTensor]:
    """Positions oldest .. stop-1 of the ring that begins at row `base`: one piece, or two around its end."""
    low, high = base + oldest % size, base + stop % size
    if oldest == stop or low < high:
        return [ring.span(low, high)] if oldest < stop else []
    return [ring.span(low, base + size), ring.span(base, high)]
