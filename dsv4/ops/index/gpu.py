"""Index selection in Triton: scores of a block of queries against a block of keys on tensor cores, then an
exact choice. Nothing loops over tokens in Python; the longest sequence's length comes to the host once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.common.numbers import e2m1_decode, power
from dsv4.kernels.decode.choose import select as choose
from dsv4.kernels.prefill import rows as row_kernels
from dsv4.ops.index import ref
from dsv4.ops.index.ref import hadamard, pool_rows
from dsv4.quant.formats import Format, QuantTensor

__all__ = ["hadamard", "keys", "pool_rows", "queries", "select", "visible_rows"]

# Queries and keys of a program, warps, stages; by compute type.
BLOCK = {torch.bfloat16: (32, 128, 4, 3), torch.float32: (16, 32, 4, 1)}
# Scores held at a time: bounds the queries that are handled together.
SCORE_BYTES = 256 << 20


@triton.jit(do_not_specialize=["tokens", "cap"], do_not_specialize_on_alignment=["slots", "positions"])
def _scores_kernel(q, weights, data, scales, page_table, slots, positions, out, tokens, heads, width,  # type: ignore[no-untyped-def]
                   cap, pages, page_entries, ratio, IS_MXFP4: tl.constexpr, Q: tl.constexpr,
                   B: tl.constexpr, H: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """out[t, c] = sum over heads of relu(q . key c) * weight, for entries c that token t sees."""
    start, stop = tl.program_id(0) * Q, tl.minimum(tl.program_id(0) * Q + Q, tokens)
    begin = tl.program_id(1) * B
    entry = begin + tl.arange(0, B)
    head, col = tl.arange(0, H), tl.arange(0, W)
    token = start + tl.arange(0, Q)
    is_token = token < stop
    slot_of = tl.load(slots + token, mask=is_token, other=-1)
    seen_by = (tl.load(positions + token, mask=is_token, other=-1) + 1) // ratio
    here = (head < heads)[:, None] & (col < width)[None, :]
    act: tl.constexpr = q.dtype.element_ty
    # Tokens of one sequence after the other: they share the keys. Those that see none of them come first.
    at = tl.min(tl.where(is_token & (seen_by > begin), token, stop), 0)
    while at < stop:
        slot = tl.load(slots + at)
        end = tl.min(tl.where(is_token & (token > at) & (slot_of != slot), token, stop), 0)
        is_entry = entry < tl.max(tl.where((token >= at) & (token < end), seen_by, 0), 0)
        page = tl.load(page_table + slot * pages + entry // page_entries, mask=is_entry, other=0)
        row = page.to(tl.int64) * page_entries + entry % page_entries
        if IS_MXFP4:
            pair, block = tl.arange(0, W // 2), tl.arange(0, W // 32)
            inside = is_entry[:, None] & (pair < width // 2)[None, :]
            byte = tl.load(data + row[:, None] * (width // 2) + pair[None, :], mask=inside, other=0).to(
                tl.int32
            )
            code = tl.reshape(tl.join(byte & 15, byte >> 4), (B, W // 32, 32))
            inside = is_entry[:, None] & (block * 32 < width)[None, :]
            scale = tl.load(
                scales + row[:, None] * tl.cdiv(width, 32) + block[None, :], mask=inside, other=127
            )
            key = e2m1_decode(code) * power(scale.to(tl.int32))[:, :, None]
            key = tl.reshape(key, (B, W)).to(act)
        else:
            inside = is_entry[:, None] & (col < width)[None, :]
            key = tl.load(data + row[:, None] * width + col[None, :], mask=inside, other=0.0).to(act)
        for t in range(at, end):
            t_at = tl.cast(t, tl.int64)
            query = tl.load(
                q + t_at * heads * width + head[:, None] * width + col[None, :], mask=here, other=0.0
            )
            weight = tl.load(weights + t_at * heads + head, mask=head < heads, other=0.0)
            score = tl.dot(key, tl.trans(query), input_precision="ieee")
            score = tl.maximum(score, 0.0, propagate_nan=tl.PropagateNan.ALL)
            score = tl.sum(score * weight[None, :], 1)
            seen = (tl.load(positions + t) + 1) // ratio
            tl.store(out + t_at * cap + entry, score, mask=entry < seen)
        at = tl.min(tl.where(is_token & (token >= end) & (seen_by > begin), token, stop), 0)


@triton.jit(do_not_specialize=["width", "topk"], do_not_specialize_on_alignment=["slots", "positions"])
def _rows_kernel(chosen, page_table, slots, positions, out, width, pages, page_entries, ratio, topk,  # type: ignore[no-untyped-def]
                 HAS_CHOICE: tl.constexpr, B: tl.constexpr):  # fmt: skip
    """Pool rows of the chosen entries, or of all where there are no more than may be chosen; -1 beyond."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * B + tl.arange(0, B)
    seen = (tl.load(positions + token) + 1) // ratio
    entry = place.to(tl.int64)
    if HAS_CHOICE:
        choice = tl.load(chosen + token * width + place, mask=place < width, other=-1).to(tl.int64)
        entry = tl.where(seen > topk, choice, entry)
    is_entry = (place < width) & (entry >= 0) & (entry < seen)
    slot = tl.load(slots + token)
    page = tl.load(page_table + slot * pages + entry // page_entries, mask=is_entry, other=0)
    row = page * page_entries + (entry % page_entries).to(tl.int32)
    tl.store(out + token * width + place, tl.where(is_entry, row, -1), mask=place < width)


def queries(q: Tensor, cos: Tensor, sin: Tensor, qat: bool) -> Tensor:
    if not qat or not _fits(q.shape[-1]):
        return ref.queries(q, cos, sin, qat)
    return row_kernels.rotate_round(q, cos, sin)


def keys(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, qat: bool, format: Format
) -> QuantTensor:
    """Other forms than MXFP4 after training with it are for comparisons: the reference's steps serve them."""
    if not qat or format is not Format.MXFP4 or not _fits(x.shape[-1]):
        return ref.keys(x, weight, cos, sin, eps, qat, format)
    return row_kernels.index_keys(x, weight, cos, sin, eps)


def _fits(width: int) -> bool:
    return width >= 32 and width & (width - 1) == 0


def _capacity(positions: Tensor, ratio: int) -> int:
    """Entries that the longest sequence's last token sees."""
    return (int(positions.max()) + 1) // ratio if positions.numel() else 0


def _to_rows(
    chosen: Tensor | None,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    out: Tensor,
    ratio: int,
    page_entries: int,
) -> None:
    tokens, width = out.shape
    if out.numel():
        block = 512
        _rows_kernel[(tokens, triton.cdiv(width, block))](
            *(out if chosen is None else chosen, page_table, slots, positions, out, width),
            *(page_table.shape[1], page_entries, ratio, width),
            **{"HAS_CHOICE": chosen is not None, "B": block, "num_warps": 4},
        )


def visible_rows(
    page_table: Tensor, slots: Tensor, positions: Tensor, ratio: int, page_entries: int
) -> Tensor:
    """Row numbers are int32 here: at long contexts the list itself is large."""
    out = torch.empty(
        positions.shape[0], _capacity(positions, ratio), dtype=torch.int32, device=positions.device
    )
    _to_rows(None, page_table, slots, positions, out, ratio, page_entries)
    return out


def _scores(
    q: Tensor,
    weights: Tensor,
    pool: QuantTensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    out: Tensor,
    ratio: int,
    page_entries: int,
) -> None:
    """out [T, cap]: the score of every entry that a token sees; nothing is written beyond."""
    tokens, heads, width = q.shape
    cap = out.shape[1]
    num_queries, num_keys, warps, stages = BLOCK[q.dtype]
    _scores_kernel[(triton.cdiv(tokens, num_queries), triton.cdiv(cap, num_keys))](
        *(q, weights, pool.data, pool.data if pool.scale is None else pool.scale),
        *(page_table, slots, positions, out, tokens, heads, width, cap),
        *(page_table.shape[1], page_entries, ratio),
        **{"IS_MXFP4": pool.format is Format.MXFP4, "Q": num_queries, "B": num_keys},
        **{"H": max(16, triton.next_power_of_2(heads)), "W": max(32, triton.next_power_of_2(width))},
        **{"num_warps": warps, "num_stages": stages},
    )


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
    """Row numbers are int32 here."""
    cap = _capacity(positions, ratio)
    if cap <= topk:
        return visible_rows(page_table, slots, positions, ratio, page_entries)
    tokens = q.shape[0]
    q, weights = q.contiguous(), weights.contiguous()
    assert pool.format in (Format.MXFP4, Format.BF16, Format.F32) and page_table.is_contiguous()
    out = torch.empty(tokens, topk, dtype=torch.int32, device=q.device)
    chosen = torch.empty_like(out)
    counts = ((positions + 1) // ratio).int()
    num_queries = BLOCK[q.dtype][0]
    step = max(num_queries, SCORE_BYTES // (4 * cap) // num_queries * num_queries)
    scores = torch.empty(min(step, tokens), cap, device=q.device)
    for start in range(0, tokens, step):
        part = slice(start, min(start + step, tokens))
        count = part.stop - start
        of_part = (q[part], weights[part], pool, page_table, slots[part], positions[part], scores[:count])
        _scores(*of_part, ratio, page_entries)
        choose(scores[:count], counts[part], chosen[part])
    _to_rows(chosen, page_table, slots, positions, out, ratio, page_entries)
    return out
