"""Attention over the raw window and the chosen compressed entries, with a sink; one shared KV head."""

import torch
from torch import Tensor

from dsv4.ops._exact import rotate
from dsv4.quant.codec import decode
from dsv4.quant.formats import QuantTensor


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
    here = decode(fresh)
    scale = q.shape[-1] ** -0.5
    for t, (slot, p, start) in enumerate(
        zip(slots.tolist(), positions.tolist(), first.tolist(), strict=True)
    ):
        oldest = max(0, p - window + 1)
        keys = [here[t - (p - max(oldest, start)) : t + 1]]
        if oldest < start:
            older = torch.arange(oldest, start, device=q.device)
            keys.insert(0, decode(ring.take(slot * ring_size + older % ring_size)))
        if pool is not None and rows is not None:
            keys.append(decode(pool.take(rows[t][rows[t] >= 0])))
        key = torch.cat(keys)  # [S, D]
        score = torch.mm(q[t].float().clone(), key.t()) * scale  # [H, S]
        peak = score.amax(1, keepdim=True)
        weight = torch.exp(score - peak)
        total = weight.sum(1, keepdim=True) + torch.exp(sinks.unsqueeze(1) - peak)
        # The value product sees the weights in the compute type; the denominator does not.
        out[t] = (torch.mm(weight.to(q.dtype).float(), key) / total).to(q.dtype)
    return rotate(out, cos, -sin)
