"""Attention over the raw window and the chosen compressed entries, with a sink; one shared KV head.

Queries and raw keys are made ready too: norm, rotation, and the rounding that the model was trained with.
A block of tokens is pooled into one entry, for any chunking: rows come from this step or from the tail.
"""

from functools import cache, lru_cache
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dsv4.ops._exact import cast, exp, padded, rotate, total
from dsv4.ops._product import batch_product, zeros
from dsv4.ops.index.cpu import visible_rows
from dsv4.ops.linear.prefill_packed import Packed
from dsv4.ops.rows.cpu import rms_norm
from dsv4.quant.codec import decode, encode_kv
from dsv4.quant.formats import Format, QuantTensor, join
from dsv4.spec.rounding import Rounding

# Whether to list every visible entry for `attend`: here a list serves all layers of a kind.
WANTS_LISTS = True
# Queries of one sequence at positions 32n .. 32n+31 share a tile of raw keys. A key's column follows from the
# query's position, however a prompt was cut: a query's products have one shape, wherever it is computed.
BLOCK = 32
MASKS = 64  # of such tiles that are kept


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
    page_table: Tensor | None = None,
    ratio: int = 0,
    page_entries: int = 0,
    eps: float | None = None,
    reader: object = None,
) -> Tensor | Packed:
    """q [T, H, D] -> o [T, H, D]. With `eps`, q is as its product left it: qkv.queries comes first.

    Raw keys of a query at p: positions max(0, p-window+1) .. p, of which those >= first are rows of `fresh`
    (this step's tokens) and older ones rows `slot*ring_size + j mod ring_size` of `ring`. Compressed keys:
    `pool` rows listed in `rows` [T, S], -1 meaning none; without a list all that are visible, found through
    the page table [S, P]. Keys are the values too. The sink adds to the denominator only. The output is
    rotated back by the query's position. A backend may give what linear.grouped takes, for
    the weights `reader`.
    """
    if eps is not None:
        q = queries(q, cos, sin, eps)
    if pool is not None and rows is None:
        assert page_table is not None
        rows = visible_rows(page_table, slots, positions, ratio, page_entries)
    out = torch.empty_like(q)
    where = [*zip(slots.tolist(), first.tolist(), positions.tolist(), strict=True)]
    counts = [0] * len(where) if rows is None else (rows >= 0).sum(1).tolist()
    for (slot, start, block, width), group in groupby(
        range(len(where)), key=lambda t: (*where[t][:2], where[t][2] // BLOCK, padded(counts[t]))
    ):
        run = [*group]
        mine = slice(run[0], run[-1] + 1)
        lowest, highest = where[run[0]][2], where[run[-1]][2]
        oldest = max(0, lowest - window + 1)
        newer = max(oldest, start)
        keys = _of_ring(ring, slot * ring_size, oldest, newer, ring_size)
        keys.append(fresh.span(run[-1] - (highest - newer), run[-1] + 1))
        seen, is_shared = counts[mine], True
        if pool is not None and rows is not None and width:
            # Where all see a part of what the last one sees, it is read once.
            is_shared = len(run) == 1 or _is_shared(rows[mine])
            listed = rows[run[-1]] if is_shared else rows[mine].flatten()
            keys.append(pool.take(listed if len(listed) == seen[-1] else listed[listed >= 0]))
        decoded = decode(join(keys))
        columns = min(raw_columns(window), (block + 1) * BLOCK)
        base = (block + 1) * BLOCK - columns  # the position of the first column
        before, after = oldest - base, base + columns - highest - 1
        if is_shared:
            tile = _shared_tile(
                decoded, highest + 1 - oldest, before, after, width - seen[-1] if width else 0
            )
        else:
            tile = _tiles(decoded, highest + 1 - oldest, before, after, seen, width)
        hidden = _hidden(lowest - base, highest - base, window, columns, tuple(seen), width, q.device)
        out[mine] = _weighted_keys(q[mine], tile, hidden, sinks.unsqueeze(1))
    return rotate(out, cos, -sin)


def attend_block(
    q: Tensor,
    fresh: QuantTensor,
    ring: QuantTensor,
    slots: Tensor,
    first: Tensor,
    oldest: Tensor,
    window: int,
    ring_size: int,
    sinks: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    reader: object = None,
) -> Tensor:
    """q [T, H, D] as its product left it -> o [T, H, D], for a block of drafts of each sequence.

    All queries of a sequence see the same keys: all of its rows of `fresh`, later ones too, and of the ring
    positions max(oldest, first-window) .. first-1. Otherwise as `attend`.
    """
    q = queries(q, cos, sin, eps)
    out = torch.empty_like(q)
    where = [*zip(slots.tolist(), first.tolist(), oldest.tolist(), strict=True)]
    for (slot, start, valid), group in groupby(range(len(where)), key=where.__getitem__):
        run = [*group]
        mine = slice(run[0], run[-1] + 1)
        keys = _of_ring(ring, slot * ring_size, max(valid, start - window, 0), start, ring_size)
        decoded = decode(join([*keys, fresh.span(mine.start, mine.stop)]))
        count = decoded.shape[0]
        tile = _shared_tile(decoded, count, 0, 0, padded(count) - count)
        hidden = _beyond(count, q.device).expand(len(run), 1, -1)
        out[mine] = _weighted_keys(q[mine], tile, hidden, sinks.unsqueeze(1))
    return rotate(out, cos, -sin)


@cache
def _beyond(count: int, device: torch.device) -> Tensor:
    """-inf for the rows of a tile that pad so many keys, else 0: [1, 1, rows]."""
    is_beyond = torch.arange(padded(count)) >= count
    return torch.zeros(1, 1, padded(count)).masked_fill(is_beyond, -torch.inf).to(device)


def _is_shared(rows: Tensor) -> bool:
    """Whether every list [T, S] is a beginning of the last, and none has a gap."""
    is_listed = rows >= 0
    return bool(((rows == rows[-1]) | ~is_listed).all() and (is_listed[:, 1:] <= is_listed[:, :-1]).all())


def raw_columns(window: int) -> int:
    """Raw keys that the queries of one block see, those of the block included."""
    return -(-(window - 1) // BLOCK) * BLOCK + BLOCK


def _shared_tile(decoded: Tensor, raw: int, before: int, after: int, beyond: int) -> Tensor:
    """[1, keys, D]: so many empty rows, the raw keys, empty rows, the entries, empty rows."""
    empty = zeros(max(before, after, beyond), decoded.shape[1], decoded.device)
    parts = (empty[:before], decoded[:raw], empty[:after], decoded[raw:], empty[:beyond])
    return torch.cat([part for part in parts if part.shape[0]]).unsqueeze(0)


def _tiles(decoded: Tensor, raw: int, before: int, after: int, counts: list[int], width: int) -> Tensor:
    """[B, keys, D]: the same raw keys for every query, and its own entries."""
    window = _shared_tile(decoded[:raw], raw, before, after, 0)
    entries = pad_sequence(
        [*decoded[raw:].split(counts), zeros(width, decoded.shape[1], decoded.device)], True
    )
    return torch.cat((window.expand(len(counts), -1, -1), entries[:-1]), dim=1)


@lru_cache(MASKS)
def _hidden(
    low: int, high: int, window: int, columns: int, counts: tuple[int, ...], width: int, device: torch.device
) -> Tensor:
    """-inf where a query at column low .. high does not see a row of its tile, else 0: [queries, 1, rows]."""
    before = raw_columns(window) - 1  # of the first row: as many as a query can have keys before it
    rows = _outside(window, device).unfold(0, columns, 1)[before - high : before - low + 1]
    hidden = rows.flip(0)
    if width:
        beyond = torch.tensor(counts).unsqueeze(1) <= torch.arange(width)
        hidden = torch.cat(
            (hidden, torch.zeros(beyond.shape).masked_fill(beyond, -torch.inf).to(device)), dim=1
        )
    return hidden.unsqueeze(1)


@cache
def _outside(window: int, device: torch.device) -> Tensor:
    """-inf where a query does not see a key that lies so many columns after its own, or (first) before."""
    after = torch.arange(1 - raw_columns(window), raw_columns(window))
    is_hidden = (after > 0) | (after <= -window)
    return torch.zeros(is_hidden.shape).masked_fill(is_hidden, -torch.inf).to(device)


def _weighted_keys(q: Tensor, tile: Tensor, hidden: Tensor, sinks: Tensor) -> Tensor:
    """q [B, H, D], tile of keys [B or 1, S, D], hidden [B, 1, S], sinks [H, 1] -> [B, H, D]."""
    score = torch.add(hidden, batch_product(q.float(), tile.mT), alpha=q.shape[2] ** -0.5)
    peak = score.amax(2, keepdim=True)
    weight = exp(score - peak)
    denominator = total(weight, 2).unsqueeze(2) + exp(sinks - peak)
    # The value product sees the weights in the compute type; the denominator does not.
    return cast(batch_product(cast(weight, q.dtype).float(), tile) / denominator, q.dtype)


def _of_ring(ring: QuantTensor, base: int, oldest: int, stop: int, size: int) -> list[QuantTensor]:
    """Positions oldest .. stop-1 of the ring that begins at row `base`: one piece, or two around its end."""
    low, high = base + oldest % size, base + stop % size
    if oldest == stop or low < high:
        return [ring.span(low, high)] if oldest < stop else []
    return [ring.span(low, base + size), ring.span(base, high)]


def queries(q: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """q [T, H, D] -> per-head norm without weight (float32, one rounding), rotated."""
    return rotate(rms_norm(q, None, eps), cos, sin)


def entries(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """x [T, D] -> key/value vectors: norm and rotation."""
    return rotate(rms_norm(x, weight, eps), cos, sin)


def store(kv: Tensor, rope_dim: int, format: Format, qat: bool) -> QuantTensor:
    """The rows as the cache keeps them; attention reads these, also for tokens of the same step.

    qat rounds them as the model was trained. The KV8 format is that rounding.
    """
    if qat and format is not Format.KV8:
        kv = Rounding().entry(kv, rope_dim)
    return encode_kv(kv, rope_dim, format)


def put_rows(store: QuantTensor, rows: Tensor, values: QuantTensor, tokens: Tensor | None = None) -> None:
    """store[rows] = values[tokens], all of them where tokens is None; in place."""
    store.put(rows, values if tokens is None else values.take(tokens))


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


def put_tail(
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
