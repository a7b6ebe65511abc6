"""Decode step: a compressor's part of `prepare`: a token's row is kept, and a block that ends is pooled."""

import triton
import triton.language as tl

from dsv4.gpu.numbers import wait_for_prerequisites

FEW_ROWS = tl.constexpr(8)  # of a block and the one before it: each row lies in registers of its own
MAX_BLOCK = 16  # older rows of a block that are pooled at a time: 8 KB of values and of scores each
MOST_NEAR = 7  # rows before a row that may be its sequence's, in one step: as many as a ring has to spare


@triton.jit
def _older(tail_values_ptr, tail_scores_ptr, slot, pos, start, wanted, RATIO: tl.constexpr,  # type: ignore[no-untyped-def]
           OVERLAP: tl.constexpr, TAIL: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """Scores and values [BLOCK, SIZE] of the rows from `start` before the token on; -inf and 0 beyond."""
    c, back = tl.arange(0, SIZE), start + tl.arange(0, BLOCK)
    j = pos - back
    seen = (wanted & (back < RATIO * (1 + OVERLAP)) & (j >= 0))[:, None] & (c < D)[None, :]
    half = tl.where(back < RATIO, D * OVERLAP, 0)
    at = ((slot * TAIL + tl.maximum(j, 0) % TAIL) * (D * (1 + OVERLAP)) + half)[:, None] + c[None, :]
    scores = tl.load(tail_scores_ptr + at, mask=seen, other=-float("inf"), cache_modifier=".cg")
    return scores, tl.load(tail_values_ptr + at, mask=seen, other=0.0, cache_modifier=".cg")


@triton.jit
def _few_older(tail_values_ptr, tail_scores_ptr, slot, pos, wanted, RATIO: tl.constexpr,  # type: ignore[no-untyped-def]
               OVERLAP: tl.constexpr, TAIL: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Scores and values [SIZE] of the row before the token, of the one before that, and so on."""
    c = tl.arange(0, SIZE)
    rows = ()
    for back in tl.static_range(1, RATIO * (1 + OVERLAP)):
        j = pos - back
        seen = wanted & (j >= 0) & (c < D)
        half = D * OVERLAP if back < RATIO else 0
        at = (slot * TAIL + tl.maximum(j, 0) % TAIL) * (D * (1 + OVERLAP)) + half + c
        scores = tl.load(tail_scores_ptr + at, mask=seen, other=-float("inf"), cache_modifier=".cg")
        values = tl.load(tail_values_ptr + at, mask=seen, other=0.0, cache_modifier=".cg")
        rows += (scores, values)  # type: ignore[assignment]
    return rows


@triton.jit
def _is_near(slots_ptr, positions_ptr, row, slot, pos, back, NEAR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether the token `back` before this one is in the same step, so many rows before."""
    seen = (back <= NEAR) & (back <= row) & (back <= pos)
    before = tl.where(seen, row - back, 0)
    at = tl.load(positions_ptr + before, mask=seen, other=-1, cache_modifier=".cg")
    of = tl.load(slots_ptr + before, mask=seen, other=-1, cache_modifier=".cg")
    return seen & (at == pos - back) & (of == slot)


@triton.jit
def _nearer(s, v, values_ptr, scores_ptr, values_step, scores_step, ape_ptr, row, pos, near,  # type: ignore[no-untyped-def]
            RATIO: tl.constexpr, OVERLAP: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """The same of rows that are in this step: what the tail will hold of them."""
    c, back = tl.arange(0, SIZE), 1 + tl.arange(0, BLOCK)
    seen = near[:, None] & (c < D)[None, :]
    half = tl.where(back < RATIO, D * OVERLAP, 0)[:, None] + c[None, :]
    before = tl.where(near, row - back, 0)[:, None]
    bias = (tl.where(near, pos - back, 0) % RATIO * (D * (1 + OVERLAP)))[:, None]
    scores = tl.load(scores_ptr + before * scores_step + half, mask=seen, other=0.0)
    scores += tl.load(ape_ptr + bias + half, mask=seen, other=0.0)
    values = tl.load(values_ptr + before * values_step + half, mask=seen, other=0.0)
    return tl.where(seen, scores, s), tl.where(seen, values, v)


@triton.jit
def _few_nearer(rows, values_ptr, scores_ptr, values_step, scores_step, ape_ptr, row, pos, near,  # type: ignore[no-untyped-def]
                RATIO: tl.constexpr, OVERLAP: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
                NEAR: tl.constexpr):  # fmt: skip
    """The same of the first NEAR of `_few_older`; bit `back` of `near` says which are in this step."""
    c = tl.arange(0, SIZE)
    out = ()
    for back in tl.static_range(1, RATIO * (1 + OVERLAP)):
        s, v = rows[2 * back - 2], rows[2 * back - 1]
        if back <= NEAR:
            is_near = (near >> back & 1) != 0
            seen = is_near & (c < D)
            half = (D * OVERLAP if back < RATIO else 0) + c
            before, bias = tl.where(is_near, row - back, 0), tl.where(is_near, pos - back, 0) % RATIO
            scores = tl.load(scores_ptr + before * scores_step + half, mask=seen, other=0.0)
            scores += tl.load(ape_ptr + bias * (D * (1 + OVERLAP)) + half, mask=seen, other=0.0)
            s = tl.where(seen, scores, s)
            v = tl.where(seen, tl.load(values_ptr + before * values_step + half, mask=seen, other=0.0), v)
        out += (s, v)  # type: ignore[assignment]
    return out


@triton.jit
def _few_pooled(score, value, rows, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The token's row and COUNT older ones, weighted by the softmax of their scores, channel by channel."""
    peak = score
    for i in tl.static_range(COUNT):
        peak = tl.maximum(peak, rows[2 * i])
    count = tl.exp(score - peak)
    total = value * count
    for i in tl.static_range(COUNT):
        weight = tl.exp(rows[2 * i] - peak)
        count += weight
        total += weight * rows[2 * i + 1]
    return tl.div_rn(total, count)


@triton.jit
def pool(values_ptr, scores_ptr, values_step, scores_step, ape_ptr, tail_values_ptr, tail_scores_ptr, row,  # type: ignore[no-untyped-def]
          slot, pos, slots_ptr, positions_ptr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, TAIL: tl.constexpr,
          D: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, NEAR: tl.constexpr):  # fmt: skip
    """Keep the token's row in the tail; where it ends a block, -> pooled [SIZE], else anything.

    Of many rows a running softmax from the token back to the oldest, BLOCK rows at a time. Waits; rows of the
    tail are read before that too: older steps wrote them. Those of tokens that are in this step too (before
    drafts) may be written meanwhile, and are taken from where they were made.
    """
    c = tl.arange(0, SIZE)
    inside = c < D
    own = c + D * OVERLAP
    width: tl.constexpr = D * (1 + OVERLAP)
    span: tl.constexpr = RATIO * (1 + OVERLAP)
    at = (slot * TAIL + pos % TAIL) * width
    ends = (pos + 1) % RATIO == 0
    bias = ape_ptr + (pos % RATIO) * width
    first_bias = tl.load(bias + c, mask=inside, other=0.0)
    own_bias = tl.load(bias + own, mask=inside, other=0.0)
    if span <= FEW_ROWS:
        rows = _few_older(tail_values_ptr, tail_scores_ptr, slot, pos, ends, RATIO, OVERLAP, TAIL, D, SIZE)
    else:
        s, v = _older(tail_values_ptr, tail_scores_ptr, slot, pos, 1, ends, RATIO, OVERLAP, TAIL, D, SIZE,
                      BLOCK)  # fmt: skip
    if NEAR > 0:
        back = 1 + tl.arange(0, BLOCK)
        near = _is_near(slots_ptr, positions_ptr, row, slot, pos, back, NEAR)
    wait_for_prerequisites()
    values, scores = values_ptr + row * values_step, scores_ptr + row * scores_step
    if OVERLAP:
        # The first half: what the row means to the next block.
        value = tl.load(values + c, mask=inside, other=0.0)
        score = tl.load(scores + c, mask=inside, other=0.0) + first_bias
        tl.store(tail_values_ptr + at + c, value, mask=inside)
        tl.store(tail_scores_ptr + at + c, score, mask=inside)
    total = tl.load(values + own, mask=inside, other=0.0)
    top = tl.load(scores + own, mask=inside, other=0.0) + own_bias
    tl.store(tail_values_ptr + at + own, total, mask=inside)
    tl.store(tail_scores_ptr + at + own, top, mask=inside)
    if ends:
        if span <= FEW_ROWS:
            if NEAR > 0:
                bits = tl.sum(tl.where(near, 1 << back, 0), 0)
                rows = _few_nearer(rows, values_ptr, scores_ptr, values_step, scores_step, ape_ptr, row, pos,
                                   bits, RATIO, OVERLAP, D, SIZE, NEAR)  # fmt: skip
            total = _few_pooled(top, total, rows, span - 1)
        else:
            if NEAR > 0:
                s, v = _nearer(s, v, values_ptr, scores_ptr, values_step, scores_step, ape_ptr, row, pos,
                               near, RATIO, OVERLAP, D, SIZE, BLOCK)  # fmt: skip
            count = tl.full([SIZE], 1.0, tl.float32)
            for start in range(1, span, BLOCK):
                peak = tl.maximum(top, tl.max(s, 0))
                weight = tl.exp(s - peak[None, :])
                again = tl.exp(top - peak)
                count = count * again + tl.sum(weight, 0)
                total = total * again + tl.sum(weight * v, 0)
                top = peak
                s, v = _older(tail_values_ptr, tail_scores_ptr, slot, pos, start + BLOCK, ends, RATIO,
                              OVERLAP, TAIL, D, SIZE, BLOCK)  # fmt: skip
            total = tl.div_rn(total, count)
    return total
