"""Decode step: what attention's launches mean (prepare.py, decode.py, decode_any.py)."""

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from dsv4.gpu.meaning import Claim, Wanted
from dsv4.ops.index.meaning import pool_rows
from dsv4.quant.codec import decode, encode_kv
from dsv4.quant.formats import Format, QuantTensor
from dsv4.spec import ops
from dsv4.spec.rounding import Rounding, linear_input

if TYPE_CHECKING:
    from dsv4.ops.attention.prepare import Pooling

TRAINED = Rounding()
# Weights are rounded to BF16, by half a unit, relative to another peak on each side.
WEIGHTS = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-17}


def _angles(cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    at = positions.clamp(min=0)
    return cos[at], sin[at]


def near(x: Tensor) -> Wanted:
    """A normed and rotated vector: a rotation can cancel, so the bound is that of its largest channel."""
    eps = max(torch.finfo(x.dtype).eps, 2.0**-19)  # float32: of what is pooled in another order
    return x, eps * x.float().abs().amax(-1, keepdim=True)


def stored(name: str, store: QuantTensor, rows: Tensor, values: Tensor) -> list[Claim]:
    """Rows of a cache's store, compared by what they stand for: codes, and beside them rotated channels."""

    def claim(what: str, channels: slice, coded: Literal["fp8", "fp4"] | None) -> Claim:
        def part(held: QuantTensor) -> Tensor:
            return decode(held).to(values.dtype)[:, channels]

        return Claim(
            name=what,
            buffer=store.data,
            want=lambda: near(part(encode_kv(values, store.rope_dim, store.format))),
            coded=coded,
            read=lambda: part(store.take(rows)),
            write=lambda _: store.put(rows, encode_kv(values, store.rope_dim, store.format)),
        )

    if store.format is not Format.KV8:
        return [claim(name, slice(None), "fp4")]
    plain = values.shape[1] - store.rope_dim
    return [claim(name, slice(plain), "fp8"), claim(f"{name}, rotated", slice(plain, None), None)]


def prepare(
    q_low: Tensor,
    q_norm: Tensor,
    q_low_out: Tensor,
    kv: Tensor,
    kv_norm: Tensor,
    ring: QuantTensor,
    ring_rows: int,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    positions: Tensor,
    eps: float,
    page_table: Tensor | None = None,
    page_entries: int = 0,
    ratio: int = 0,
    entries: "Pooling | None" = None,
    keys: "Pooling | None" = None,
    q_in: Tensor | None = None,
    activations: Any = "a16",
    **_: Any,
) -> list[Claim]:
    act = q_low_out.dtype
    used = (positions >= 0).nonzero().flatten()
    at, of = positions[used], slots[used]
    kv = ops.rotate(ops.rms_norm(kv[used].to(act), kv_norm, eps), *_angles(cos, sin, at))
    claims = [
        Claim("q_low_out", q_low_out, lambda: near(ops.rms_norm(q_low.to(act), q_norm, eps))),
        *stored("ring", ring, of * ring_rows + at % ring_rows, kv),
    ]
    if q_in is not None:
        wanted = lambda: (linear_input(q_low_out, activations), 0.0)  # noqa: E731
        claims.append(Claim("q_in", q_in, wanted, ulps=0, after=True))
    for name, pooling in (("entries", entries), ("keys", keys)):
        if pooling is None:
            continue
        claims += _tail(name, pooling, ratio, used, of, at)
        closing = (at + 1) % ratio == 0
        if not bool(closing.any()):
            continue
        assert page_table is not None
        pooled = _pooled(pooling, ratio, used, of, at)[closing].to(act)
        starts = _angles(cos, sin, at[closing] + 1 - ratio)
        row = ops.rotate(ops.rms_norm(pooled, pooling.norm, eps), *starts)
        block = at[closing] // ratio
        page = page_table[of[closing], block // page_entries].long()
        row = row if name == "entries" else ops.hadamard(row)
        claims += stored(name, pooling.out, page * page_entries + block % page_entries, row)
    return claims


def _tail(name: str, p: "Pooling", ratio: int, used: Tensor, of: Tensor, at: Tensor) -> list[Claim]:
    """This step's row of a compressor, kept for later steps; the position bias is on the score alone."""
    place = at % p.tail_values.shape[1]
    wanted = {"values": p.values[used], "scores": p.scores[used] + p.ape[at % ratio]}

    def claim(part: str, tail: Tensor) -> Claim:
        def put(value: Tensor) -> None:
            tail[of, place] = value

        return Claim(
            name=f"{name}' tail of {part}",
            buffer=tail,
            want=lambda: (wanted[part], 0.0),
            read=lambda: tail[of, place],
            write=put,
        )

    return [claim("values", p.tail_values), claim("scores", p.tail_scores)]


def _pooled(p: "Pooling", ratio: int, rows: Tensor, of: Tensor, at: Tensor) -> Tensor:
    """Pool the blocks that end at these rows; older ones lie in the tail, or are rows of this step."""
    overlaps = p.values.shape[1] > p.norm.shape[0]
    span = ratio * (2 if overlaps else 1)
    wanted = at.unsqueeze(1) - torch.arange(span - 1, -1, -1, device=at.device)
    place = (of.unsqueeze(1), wanted.clamp(min=0) % p.tail_values.shape[1])
    values, scores = p.tail_values[place], p.tail_scores[place]
    for now, (slot, position) in enumerate(zip(of.tolist(), at.tolist(), strict=True)):
        here = (of.unsqueeze(1) == slot) & (wanted == position)
        values[here], scores[here] = p.values[rows[now]], p.scores[rows[now]] + p.ape[position % ratio]
    is_missing = (wanted < 0).unsqueeze(-1)
    values, scores = values.masked_fill(is_missing, 0.0), scores.masked_fill(is_missing, -torch.inf)
    return ops.compress(values, scores, ratio, overlaps)[:, -1]


def queries(
    q: Tensor | None, iq: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor, eps: float, **_: Any
) -> list[Claim]:
    angles, claims = _angles(cos, sin, positions), []
    if q is not None:
        claims.append(Claim("q", q, lambda: near(_query(q, angles, eps))))
    if iq is not None:
        want = lambda: near(TRAINED.index(ops.rotate_heads(iq, *angles)))  # noqa: E731
        claims.append(Claim("iq", iq, want, coded="fp4"))
    return claims


def _query(q: Tensor, angles: tuple[Tensor, Tensor], eps: float) -> Tensor:
    return ops.rotate_heads(ops.rms_norm(q, None, eps), *angles)


def _keys(
    ring: QuantTensor,
    ring_rows: int,
    window: int,
    entries: QuantTensor | None,
    rows: Tensor | None,
    page_table: Tensor | None,
    page_entries: int,
    ratio: int,
    slot: int,
    position: int,
    end: int | None = None,
) -> Tensor:
    """[S, d]: what one row of a step attends to, the window's oldest first. `end`: where that ends, if not at
    the row's position; then all listed rows are seen."""
    last = position if end is None else end
    first = torch.arange(max(0, last - window + 1), last + 1, device=ring.data.device)
    keys = [decode(ring.take(slot * ring_rows + first % ring_rows))]
    if entries is not None:
        visible = (position + 1) // ratio
        if rows is None:
            assert page_table is not None
            listed = pool_rows(page_table, slot, visible, page_entries)
        else:
            listed = rows[:visible] if end is None else rows
            listed = listed[listed >= 0].long()
        keys.append(decode(entries.take(listed)))
    return torch.cat(keys)


def attend(
    q: Tensor,
    slots: Tensor,
    positions: Tensor,
    sinks: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    out: Tensor,
    rows: Tensor | None,
    ends: Tensor | None = None,
    **where: Any,
) -> list[Claim]:
    """One launch from the queries' product to the result, rotated back."""

    def claim(row: int, slot: int, position: int) -> Claim:
        def want() -> Wanted:
            listed = None if rows is None else rows[row]
            end = None if ends is None else int(ends[row])
            keys = _keys(rows=listed, slot=slot, position=position, end=end, **where).unsqueeze(0)
            cs, sn = _angles(cos, sin, positions[row : row + 1])
            its_q = _query(q[row : row + 1], (cs, sn), eps)
            seen = torch.ones(1, 1, keys.shape[1], dtype=torch.bool, device=q.device)
            o = ops.rotate_heads(ops.attend(its_q.unsqueeze(0), keys, seen, sinks)[0], cs, -sn)
            scores = its_q[0].float() @ keys[0].mT * q.shape[2] ** -0.5
            weights = torch.cat((scores, sinks.unsqueeze(1)), 1).softmax(1)[:, :-1]
            largest = (weights @ keys[0].abs()).amax(-1, keepdim=True)
            return o.flatten(), (WEIGHTS[q.dtype] * largest).expand(o.shape[1:]).flatten()

        return Claim(f"out[{row}]", out.view(len(slots), -1)[row], want)

    at = zip(slots.tolist(), positions.tolist(), strict=True)
    return [claim(row, slot, position) for row, (slot, position) in enumerate(at) if position >= 0]


def attend_parts(
    q: Tensor,
    slots: Tensor,
    positions: Tensor,
    part_o: Tensor,
    part_ml: Tensor,
    rows: Tensor | None,
    ends: Tensor | None = None,
    **where: Any,
) -> list[Claim]:
    """Queries that are ready -> parts over keys; compared by what their sum would be without a sink."""

    def put(row: int, value: Tensor) -> None:
        part_ml[row, :, :, 0], part_ml[row, :, :, 1] = -torch.inf, 0.0
        part_ml[row, 0, :, 0], part_ml[row, 0, :, 1] = value[:, -1], 1.0
        part_o[row, 0] = value[:, :-1]

    def claim(row: int, slot: int, position: int) -> Claim:
        def want() -> Wanted:
            listed = None if rows is None else rows[row]
            end = None if ends is None else int(ends[row])
            keys = _keys(rows=listed, slot=slot, position=position, end=end, **where)
            scores = q[row].float() @ keys.mT * q.shape[2] ** -0.5
            weights = scores.softmax(-1)
            total = scores.logsumexp(-1, keepdim=True)
            slack = WEIGHTS[q.dtype] * (weights @ keys.abs()).amax(-1, keepdim=True).expand(-1, q.shape[2])
            return torch.cat((weights @ keys, total), 1), torch.cat((slack, 1e-4 + 1e-5 * total.abs()), 1)

        return Claim(
            name=f"parts[{row}]",
            buffer=part_o[row],
            want=want,
            read=lambda: sum_of_parts(part_o[row], part_ml[row]),
            write=lambda value: put(row, value),
        )

    at = zip(slots.tolist(), positions.tolist(), strict=True)
    return [claim(row, slot, position) for row, (slot, position) in enumerate(at) if position >= 0]


def sum_of_parts(part_o: Tensor, part_ml: Tensor) -> Tensor:
    """part_o [C, H, d], part_ml [C, H, 2] -> [H, d + 1]: the weighted keys, and the logarithm of all weights.

    A part without keys has peak -inf, and its part_o was not written.
    """
    peaks, sums = part_ml[..., 0], part_ml[..., 1]
    top = peaks.amax(0)
    share = torch.exp(peaks - top)
    total = (share * sums).sum(0).unsqueeze(-1)
    part_o = torch.where(peaks.unsqueeze(-1) == -torch.inf, 0.0, part_o)
    return torch.cat(((share.unsqueeze(-1) * part_o).sum(0) / total, top.unsqueeze(-1) + total.log()), 1)


def combine(
    part_o: Tensor,
    part_ml: Tensor,
    sinks: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    out: Tensor,
    **_: Any,
) -> list[Claim]:
    """The sum of the parts with the sink, rotated back."""
    rows = part_o.shape[0]

    def claim(row: int) -> Claim:
        def want() -> Wanted:
            held = sum_of_parts(part_o[row], part_ml[row])
            share = torch.sigmoid(held[:, -1] - sinks)  # of all weights, the sink's among them
            o = (held[:, :-1] * share.unsqueeze(-1)).to(out.dtype)
            cs, sn = _angles(cos, sin, positions[row])
            value, slack = near(ops.rotate(o, cs, -sn))
            # Parts are added in another order.
            return value.flatten(), (4 * slack * torch.ones_like(value, dtype=torch.float32)).flatten()

        return Claim(f"out[{row}]", out.view(rows, -1)[row], want, ulps=2)

    return [claim(row) for row in range(rows) if int(positions[row]) >= 0]
