"""Prompts: index selection in Triton, scores of a block of queries against a block of keys on tensor cores,
then an exact choice. Nothing loops over tokens in Python, and what a program does ends with what its tokens
see."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.gpu.numbers import e2m1_decode, power
from dsv4.ops.index import cpu
from dsv4.ops.index import prefill_queries as query_kernels
from dsv4.ops.index.cpu import hadamard, pool_rows
from dsv4.ops.index.decode_select import select_rows as choose
from dsv4.ops.rows import prefill as row_kernels
from dsv4.quant.formats import Format, QuantTensor

__all__ = ["hadamard", "keys", "pool_rows", "queries", "select", "visible_rows"]

# Queries and keys of a program, warps, stages; by compute type.
BLOCK = {torch.bfloat16: (32, 128, 4, 3), torch.float32: (16, 32, 4, 1)}
# Scores held at a time: bounds the queries that are handled together.
SCORE_BYTES = 256 << 20
# Programs that share the keys of a block of queries: two for each SM of an H200, or as many as there are.
MAX_PROGRAMS = 264


@triton.jit(do_not_specialize=["tokens", "cap"], do_not_specialize_on_alignment=["slots", "positions"])
def _scores_kernel(q, weights, data, scales, page_table, slots, positions, out, tokens, heads, width,  # type: ignore[no-untyped-def]
                   cap, pages, page_entries, ratio, topk, IS_MXFP4: tl.constexpr, Q: tl.constexpr,
                   B: tl.constexpr, H: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """out[t, c] = sum over heads of relu(q . key c) * weight, for entries c that token t sees; tokens that
    see no more than topk have no choice and may be passed over."""
    start, stop = tl.program_id(0) * Q, tl.minimum(tl.program_id(0) * Q + Q, tokens)
    head, col = tl.arange(0, H), tl.arange(0, W)
    token = start + tl.arange(0, Q)
    is_token = token < stop
    slot_of = tl.load(slots + token, mask=is_token, other=-1)
    seen_by = (tl.load(positions + token, mask=is_token, other=-1) + 1) // ratio
    seen_by = tl.where(seen_by > topk, seen_by, 0)
    here = (head < heads)[:, None] & (col < width)[None, :]
    act: tl.constexpr = q.dtype.element_ty
    for begin in range(tl.program_id(1) * B, tl.max(seen_by, 0).to(tl.int32), tl.num_programs(1) * B):
        entry = begin + tl.arange(0, B)
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


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["slots", "positions"])
def _rows_kernel(page_table, slots, positions, out, width, pages, page_entries, ratio, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pool rows of all entries that a token sees; -1 beyond."""
    token = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * B + tl.arange(0, B)
    is_entry = (entry < width) & (entry < (tl.load(positions + token) + 1) // ratio)
    slot = tl.load(slots + token)
    page = tl.load(page_table + slot * pages + entry // page_entries, mask=is_entry, other=0)
    row = page * page_entries + entry % page_entries
    tl.store(out + token * width + entry, tl.where(is_entry, row, -1), mask=entry < width)


def queries(q: Tensor, cos: Tensor, sin: Tensor, qat: bool) -> Tensor:
    if not qat or not _fits(q.shape[-1]):
        return cpu.queries(q, cos, sin, qat)
    if query_kernels.serves(q, cos):
        return query_kernels.rotate_round(q, cos, sin)
    return row_kernels.rotate_round(q, cos, sin)


def keys(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, qat: bool, format: Format
) -> QuantTensor:
    """Other forms than MXFP4 after training with it are for comparisons: the reference's steps serve them."""
    if not qat or format is not Format.MXFP4 or not _fits(x.shape[-1]):
        return cpu.keys(x, weight, cos, sin, eps, qat, format)
    return row_kernels.index_keys(x, weight, cos, sin, eps)


def _fits(width: int) -> bool:
    return width >= 32 and width & (width - 1) == 0


def _capacity(positions: Tensor, ratio: int, longest: int | None = None) -> int:
    """Entries that the longest sequence's last token sees."""
    if longest is None:
        longest = int(positions.max()) + 1 if positions.numel() else 0
    return longest // ratio


def visible_rows(
    page_table: Tensor, slots: Tensor, positions: Tensor, ratio: int, page_entries: int
) -> Tensor:
    """Row numbers are int32 here: at long contexts the list itself is large."""
    return _listed(page_table, slots, positions, ratio, page_entries, _capacity(positions, ratio))


def _listed(
    page_table: Tensor, slots: Tensor, positions: Tensor, ratio: int, page_entries: int, width: int
) -> Tensor:
    out = torch.empty(positions.shape[0], width, dtype=torch.int32, device=positions.device)
    if out.numel():
        _rows_kernel[(out.shape[0], triton.cdiv(out.shape[1], 512))](
            *(page_table, slots, positions, out, out.shape[1], page_table.shape[1], page_entries, ratio),
            **{"B": 512, "num_warps": 4},
        )
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
    topk: int = 0,
) -> None:
    """out [T, cap]: the score of every entry that a token sees, if more than topk; nothing beyond."""
    tokens, heads, width = q.shape
    cap = out.shape[1]
    num_queries, num_keys, warps, stages = BLOCK[q.dtype]
    _scores_kernel[(triton.cdiv(tokens, num_queries), min(triton.cdiv(cap, num_keys), MAX_PROGRAMS))](
        *(q, weights, pool.data, pool.data if pool.scale is None else pool.scale),
        *(page_table, slots, positions, out, tokens, heads, width, cap),
        *(page_table.shape[1], page_entries, ratio, topk),
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
    longest: int | None = None,
) -> Tensor:
    """Row numbers are int32 here."""
    cap = _capacity(positions, ratio, longest)
    if cap <= topk:
        return _listed(page_table, slots, positions, ratio, page_entries, cap)
    tokens = q.shape[0]
    q, weights = q.contiguous(), weights.contiguous()
    assert pool.format in (Format.MXFP4, Format.BF16, Format.F32) and page_table.is_contiguous()
    out = torch.empty(tokens, topk, dtype=torch.int32, device=q.device)
    num_queries = BLOCK[q.dtype][0]
    step = max(num_queries, SCORE_BYTES // (4 * cap) // num_queries * num_queries)
    scores = torch.empty(min(step, tokens), cap, device=q.device)
    for start in range(0, tokens, step):
        part = slice(start, min(start + step, tokens))
        where = (page_table, slots[part], positions[part])
        _scores(q[part], weights[part], pool, *where, scores[: part.stop - start], ratio, page_entries, topk)
        choose(
            scores=scores[: part.stop - start],
            positions=positions[part],
            ratio=ratio,
            page_table=page_table,
            slots=slots[part],
            page_entries=page_entries,
            out=out[part],
            overlap=False,
            mixed=True,
        )
    return out
