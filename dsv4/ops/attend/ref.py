"""Attention over the raw window and the chosen compressed entries, with a sink; one shared KV head."""

from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dsv4.ops._exact import cast, exp, padded, rotate, total
from dsv4.ops._product import batch_product, zeros
from dsv4.quant.codec import decode
from dsv4.quant.formats import QuantTensor, join

# Queries of one sequence at positions 32n .. 32n+31 share a tile of raw keys. A key's column follows from the
# query's position, however a prompt was cut: a query's products have one shape, wherever it is computed.
BLOCK = 32


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
    `pool` rows listed in `rows` [T, S], -1 beyond the end of a list. Keys are the values too. The sink adds
    to the denominator only. The output is rotated back by the query's position.
    """
    out = torch.empty_like(q)
    where = [*zip(slots.tolist(), first.tolist(), positions.tolist(), strict=True)]
    counts = [0] * len(where) if rows is None else (rows >= 0).sum(1).tolist()
    columns = raw_columns(window)
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
        seen = counts[mine]
        base = (block + 1) * BLOCK - columns  # the position of a block's first column
        entries: list[int] = []
        if pool is not None and rows is not None and width:
            listed = rows[mine]
            # Where all see a part of what the last one sees, it is read once.
            is_shared = len(run) == 1 or bool(((listed == listed[-1]) | (listed < 0)).all())
            entries = seen[-1:] if is_shared else seen
            keys.append(pool.take(listed[-1, : seen[-1]] if is_shared else listed.masked_select(listed >= 0)))
        raw, *chosen = decode(join(keys)).split([highest + 1 - oldest, *entries])
        tile = _tile(raw, oldest - base, columns, chosen, width)
        hidden = _hidden(lowest, highest, base, window, columns, tuple(seen), width, q.device)
        out[mine] = _weighted_keys(q[mine], tile, hidden, sinks.unsqueeze(1))
    return rotate(out, cos, -sin)


def raw_columns(window: int) -> int:
    """Raw keys that the queries of one block see, those of the block included."""
    return -(-(window - 1) // BLOCK) * BLOCK + BLOCK


def _tile(raw: Tensor, before: int, columns: int, chosen: list[Tensor], width: int) -> Tensor:
    """[B or 1, columns + width, D]: raw keys behind `before` empty rows, then the entries of each list."""
    empty = zeros(max(columns, width), raw.shape[1], raw.device)
    window = (empty[:before], raw, empty[before + len(raw) : columns])
    if len(chosen) < 2:
        return torch.cat((*window, *chosen, *(empty[len(part) : width] for part in chosen))).unsqueeze(0)
    entries = pad_sequence([*chosen, empty[:width]], batch_first=True)[:-1]
    return torch.cat((torch.cat(window).expand(len(chosen), -1, -1), entries), dim=1)


@lru_cache(maxsize=64)
def _hidden(
    lowest: int,
    highest: int,
    base: int,
    window: int,
    columns: int,
    counts: tuple[int, ...],
    width: int,
    device: torch.device,
) -> Tensor:
    """-inf where a query at lowest .. highest does not see a row of its tile, else 0: [queries, 1, rows]."""
    p, column = torch.arange(lowest, highest + 1).unsqueeze(1), torch.arange(base, base + columns)
    raw = (column > p) | (column < (p - window + 1).clamp(min=0))
    entries = torch.arange(width) >= torch.tensor(counts).unsqueeze(1)
    is_hidden = torch.cat((raw, entries), dim=1).unsqueeze(1)
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
