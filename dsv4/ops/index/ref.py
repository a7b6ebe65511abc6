"""Which compressed entries a query attends to: score index keys and select, or take all that are visible."""

import torch
from torch import Tensor

from dsv4.ops._exact import rotate
from dsv4.ops.norm.ref import rms_norm
from dsv4.ops.route.ref import top_indices
from dsv4.quant.codec import decode, encode_kv, mxfp4_round
from dsv4.quant.formats import Format, QuantTensor


def hadamard(x: Tensor) -> Tensor:
    """Sylvester-ordered Walsh-Hadamard transform of the last dimension (a power of two), times size^-0.5."""
    size = x.shape[-1]
    out = x.float().flatten(0, -2)
    step = 1
    while step < size:
        pairs = out.unflatten(1, (-1, 2, step))
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        out = torch.stack((a + b, a - b), dim=2).flatten(1)
        step *= 2
    return (out * size**-0.5).view(x.shape).to(x.dtype)


def queries(q: Tensor, cos: Tensor, sin: Tensor, qat: bool) -> Tensor:
    """q [T, H, d] -> rotated; with qat also Hadamard and FP4 rounding."""
    q = rotate(q, cos, sin)
    return mxfp4_round(hadamard(q)) if qat else q


def keys(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, qat: bool, format: Format
) -> QuantTensor:
    """x [C, d] pooled rows -> index keys as the cache keeps them: norm, rotation, with qat Hadamard and FP4.

    The MXFP4 format is that FP4 rounding.
    """
    k = rotate(rms_norm(x, weight, eps), cos, sin)
    if qat:
        k = hadamard(k)
    if qat and format is not Format.MXFP4:
        k = mxfp4_round(k)
    return encode_kv(k, 0, format)


def pool_rows(page_table: Tensor, slot: int, count: int, page_entries: int) -> Tensor:
    """Pool rows of a sequence's compressed entries 0 .. count-1, found through its page table [S, P]."""
    entry = torch.arange(count, device=page_table.device)
    return page_table[slot, entry // page_entries].long() * page_entries + entry % page_entries


def visible_rows(
    page_table: Tensor, slots: Tensor, positions: Tensor, ratio: int, page_entries: int
) -> Tensor:
    """[T, S] pool rows of every visible entry (its block is complete at the query), -1 beyond."""
    counts = ((positions + 1) // ratio).tolist()
    rows = torch.full((len(counts), max(counts, default=0)), -1, dtype=torch.long, device=positions.device)
    for token, (slot, count) in enumerate(zip(slots.tolist(), counts, strict=True)):
        rows[token, :count] = pool_rows(page_table, slot, count, page_entries)
    return rows


def select(
    q: Tensor,
    weights: Tensor,
    pool: QuantTensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    ratio: int,
    page_entries: int,
    topk: int,
) -> Tensor:
    """q [T, H, d], weights [T, H] float32 -> [T, S] pool rows of the chosen entries in order, -1 beyond.

    score = sum over heads of relu(q . key) * weight. Only visible entries compete; a score may be negative.
    """
    counts = ((positions + 1) // ratio).tolist()
    chosen = [min(topk, count) for count in counts]
    rows = torch.full((len(counts), max(chosen, default=0)), -1, dtype=torch.long, device=q.device)
    tokens_of: dict[int, list[int]] = {}
    for token, slot in enumerate(slots.tolist()):
        tokens_of.setdefault(slot, []).append(token)
    for slot, tokens in tokens_of.items():
        where = pool_rows(page_table, slot, max(counts[t] for t in tokens), page_entries)
        needs_scores = any(counts[t] > topk for t in tokens)
        table = decode(pool.take(where)) if needs_scores else None
        for t in tokens:
            if counts[t] <= topk:
                rows[t, : counts[t]] = where[: counts[t]]
                continue
            assert table is not None
            scores = torch.mm(q[t].float().clone(), table[: counts[t]].t()).clamp(min=0)  # [H, count]
            scores = (scores * weights[t].unsqueeze(1)).sum(0)
            rows[t, :topk] = where[top_indices(scores, topk).sort().values]
    return rows
