"""Which compressed entries a query attends to: score index keys and select, or take all that are visible."""

from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from dsv4.ops._exact import cast, number, padded, rotate, row_product, total
from dsv4.ops.rows.cpu import rms_norm
from dsv4.quant.codec import decode, encode_kv, mxfp4_round
from dsv4.quant.formats import Format, QuantTensor
from dsv4.spec.ops import top_k

# Queries scored together: bounds the memory of a long prompt's scores.
RUN = 32


def hadamard(x: Tensor) -> Tensor:
    """Sylvester-ordered Walsh-Hadamard transform of the last dimension (a power of two), times size^-0.5."""
    out, size = x.float(), x.shape[-1]
    # Each step transforms the lowest bit of the channel's number and moves it to the top.
    for _ in range(size.bit_length() - 1):
        a, b = out[..., 0::2], out[..., 1::2]
        out = torch.cat((a + b, a - b), dim=-1)
    return cast(out * number(size**-0.5, x.device), x.dtype)


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
    rows: list[Tensor] = []
    for slot, group in groupby(zip(slots.tolist(), positions.tolist(), strict=True), key=itemgetter(0)):
        counts = [(position + 1) // ratio for _, position in group]
        of_slot = pool_rows(page_table, slot, max(counts), page_entries)
        rows += [of_slot[:count] for count in counts]
    return _padded(rows, positions.device)


def _padded(rows: list[Tensor], device: torch.device) -> Tensor:
    """Lists of row numbers as one matrix [T, S], -1 beyond the end of a list."""
    if not rows:
        return torch.empty(0, 0, dtype=torch.long, device=device)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


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
    longest: int | None = None,
) -> Tensor:
    """q [T, H, d], weights [T, H] float32 -> [T, S] pool rows of the chosen entries in order, -1 beyond.

    score = sum over heads of relu(q . key) * weight. Only visible entries compete; a score may be negative.
    `longest`: no position reaches it, for backends that would have to ask the device.
    """
    rows: list[Tensor] = []
    visible = (positions + 1) // ratio
    counts, owners = visible.tolist(), slots.tolist()
    # A query that sees no more than it may take needs no scores: width 0.
    widths = [padded(count) if count > topk else 0 for count in counts]
    for slot, group in groupby(range(len(counts)), key=owners.__getitem__):
        tokens = [*group]
        most = max(counts[t] for t in tokens)
        of_slot = pool_rows(page_table, slot, most, page_entries)
        table = decode(pool.take(of_slot)) if most > topk else q.new_empty(0, q.shape[2])
        table = torch.cat((table, table.new_zeros(padded(len(table)) - len(table), table.shape[1])))
        for (width, _), run in groupby(tokens, key=lambda t: (widths[t], t // RUN)):
            low, *others = run
            mine = slice(low, low + 1 + len(others))
            if not width:
                rows += [of_slot[:count] for count in counts[mine]]
                continue
            scores = _scores(q[mine], weights[mine], table[:width])
            is_beyond = torch.arange(width, device=q.device) >= visible[mine].unsqueeze(1)
            rows += of_slot[top_k(scores.masked_fill(is_beyond, -torch.inf), topk).sort().values]
    return _padded(rows, q.device)


def _scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """q [B, H, d], weights [B, H], keys [S, d] -> [B, S]."""
    products = row_product(q.float().flatten(0, 1), keys.t()).view(*q.shape[:2], -1)
    return total(products.relu() * weights.unsqueeze(2), 1)
