"""Attention against the specification over true positions: sinks, window edges, ring, pages of entries."""

import math

import pytest
import torch
from ops_support import FUNCTION, ROUND, check_close, exactly, one_more_rounding, rand
from torch import Tensor

from dsv4.ops.attention.cpu import attend
from dsv4.quant.codec import decode, encode_kv
from dsv4.quant.formats import Format, QuantTensor
from dsv4.spec import ops as spec

HEADS, WIDTH, PAIRS = 3, 6, 2
WINDOW, RING = 5, 7


def plain(x: Tensor) -> QuantTensor:
    return QuantTensor(Format.F32, x, (x.shape[0], x.shape[1]))


class Case:
    """Sequences with known keys at every position; a ring that holds exactly what a real one would."""

    def __init__(self, spans: list[tuple[int, int, int]], format: Format = Format.F32, seed: int = 0) -> None:
        """spans: (slot, first position in this step, tokens). Ring rows never written are NaN."""
        self.spans = spans
        slots = 1 + max(slot for slot, _, _ in spans)
        self.keys = {slot: rand(start + count, WIDTH, seed=seed + slot) for slot, start, count in spans}
        ring = torch.full((slots * RING, WIDTH), math.nan)
        for slot, start, _ in spans:
            for p in range(max(0, start - RING), start):
                ring[slot * RING + p % RING] = self.keys[slot][p]
        self.ring = plain(ring)
        fresh = torch.cat([self.keys[slot][start : start + count] for slot, start, count in spans])
        self.fresh = plain(fresh)
        at = [(slot, p, start) for slot, start, count in spans for p in range(start, start + count)]
        self.slots, self.positions, self.first = (torch.tensor(v) for v in zip(*at, strict=True))
        tokens = len(at)
        self.q, self.sinks = 2 * rand(tokens, HEADS, WIDTH, seed=50), rand(HEADS, seed=51)
        self.angle = self.positions.unsqueeze(1) * torch.tensor([[1.0, 0.1]])

    def run(self, pool: QuantTensor | None = None, rows: Tensor | None = None, **change: Tensor) -> Tensor:
        values = {"q": self.q, "sinks": self.sinks} | change
        return attend(
            *(values["q"], self.fresh, self.ring, self.slots, self.positions, self.first, WINDOW, RING),
            *(pool, rows, values["sinks"], self.angle.cos(), self.angle.sin()),
        )

    def raw_keys(self, token: int) -> Tensor:
        keys = self.keys[int(self.slots[token])]
        return keys[spec.in_window(self.positions[token], torch.arange(len(keys)), WINDOW)]

    def want(self, token: int, extra: list[Tensor] | None = None, **change: Tensor) -> Tensor:
        """The specification's attention of one query [H, D] over its raw keys and the entries `extra`."""
        values = {"q": self.q, "sinks": self.sinks} | change
        keys = torch.cat((self.raw_keys(token), *(entry.unsqueeze(0) for entry in extra or [])))
        seen = torch.ones(1, len(keys), dtype=torch.bool)
        one = slice(token, token + 1)
        out = exactly(spec.attend, values["q"][one], keys, seen, values["sinks"])
        angle = self.angle[one]
        return exactly(spec.rotate_heads, out, angle.cos(), -angle.sin())[0]


# Scores of size 20 off by a few roundings each, exp of them, then sums of at most 20 terms of size 4.
NEAR = (20 * (WIDTH + 3) * ROUND + FUNCTION + 30 * ROUND) * 8


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 6, 7, 8, 20])
@pytest.mark.parametrize("count", [1, 2, 6, 15])
def test_window_and_ring(start: int, count: int) -> None:
    """The ring wraps at 7 and the window holds 5: each query sees p-4 .. p and nothing else."""
    case = Case([(1, start, count)])
    got = case.run()
    for t in range(count):
        check_close(got[t], case.want(t), NEAR, f"position {start + t}")


def test_window_edge() -> None:
    """Position p-5 must not matter and p-4 must: in the ring, and among this step's tokens."""
    for start in (8, 0):
        case = Case([(0, start, 9 - start)])
        before = case.run()[-1]
        for p, matters in ((3, False), (4, True)):
            for store in (case.ring.data, case.fresh.data):
                row = p % RING if store is case.ring.data else p - start
                if (store is case.ring.data) == (p < start):
                    kept = store[row].clone()
                    store[row] = 100.0
                    assert torch.equal(case.run()[-1], before) is not matters, (start, p)
                    store[row] = kept


def test_several_sequences_in_one_step() -> None:
    case = Case([(2, 9, 3), (0, 0, 6), (1, 4, 1)])
    got = case.run()
    for t in range(10):
        check_close(got[t], case.want(t), NEAR, f"token {t}")
        alone = Case([(2, 9, 3), (0, 0, 6), (1, 4, 1)])
        poison = [i for i in range(10) if alone.slots[i] != alone.slots[t]]
        alone.fresh.data[poison] = math.nan
        assert torch.equal(alone.run()[t], got[t]), "another sequence's keys change no bit"


def test_compressed_entries_beside_the_window() -> None:
    """Listed rows are attended, -1 is not; unlisted rows of the pool are NaN and would show."""
    case = Case([(0, 6, 3)])
    pool = torch.full((11, WIDTH), math.nan)
    listed = [[4, 9, 0], [-1, 9, -1], [-1, -1, -1]]
    for row in (0, 4, 9):
        pool[row] = rand(WIDTH, seed=60 + row)
    rows = torch.tensor(listed)
    got = case.run(plain(pool), rows)
    for t in range(3):
        extra = [pool[row] for row in listed[t] if row >= 0]
        check_close(got[t], case.want(t, extra), NEAR, f"token {t}")
    assert torch.equal(case.run(plain(pool), rows[:, :0]), case.run()), "no entry yet: the window alone"
    wider = torch.cat((rows, torch.full((3, 4), -1)), dim=1)
    assert torch.equal(case.run(plain(pool), wider), got), "padding is not part of the softmax"


@pytest.mark.parametrize("lists", ["beginnings", "different", "gaps", "long"])
def test_a_query_alone_has_the_bits_it_has_in_a_prompt(lists: str) -> None:
    """Entries that the queries of a block share, and entries of their own; blocks begin at 0, 32 and 64."""
    whole, pool = Case([(0, 0, 70)]), plain(rand(90, WIDTH, seed=7))
    chance = torch.Generator().manual_seed(1)
    rows = torch.stack(
        [torch.randperm(90, generator=chance)[: 70 if lists == "long" else 6] for _ in range(70)]
    )
    if lists == "beginnings":
        rows = torch.arange(18).expand(70, 18).clone()
        rows[torch.arange(18) >= torch.arange(1, 71).unsqueeze(1) // 4] = -1
    elif lists == "gaps":
        rows[torch.rand(rows.shape, generator=chance) < 0.4] = -1
    got = whole.run(pool, rows)
    for t in range(70):
        alone = Case([(0, t, 1)])
        for p in range(max(0, t - RING), t):
            alone.ring.data[p % RING] = whole.keys[0][p]
        alone.fresh.data[0] = whole.keys[0][t]
        one = alone.run(pool, rows[t : t + 1], q=whole.q[t : t + 1])
        assert torch.equal(one[0], got[t]), t


def test_the_sink_is_in_the_denominator_only() -> None:
    """One key: the output is key / (1 + exp(sink - score)). A sink of -inf leaves the key itself."""
    case = Case([(0, 0, 1)])
    key, q = case.keys[0][0].double(), case.q[0].double()
    for sink in (-math.inf, -3.0, 0.0, 5.0, 80.0, 1e4, math.inf):
        sinks = torch.full((HEADS,), sink)
        got = case.run(sinks=sinks)[0]
        for h in range(HEADS):
            score = float(q[h] @ key) * WIDTH**-0.5
            share = 0.0 if sink - score > 700 else 1 / (1 + math.exp(sink - score))
            check_close(got[h], share * key, NEAR, f"sink {sink}, head {h}")
    check_close(case.run()[0], case.want(0), NEAR, "a sink per head")


def test_large_scores_do_not_overflow() -> None:
    case = Case([(0, 2, 4)])
    q = case.q * 1e4
    got = case.run(q=q)
    assert torch.isfinite(got).all()
    for t in range(4):
        check_close(got[t], case.want(t, q=q), 1e-5, "all weight on the best key")


@pytest.mark.parametrize("format", [Format.KV8, Format.BF16])
def test_stored_rows_are_what_is_attended(format: Format) -> None:
    """Also for this step's own tokens: attention reads the rows as the cache keeps them."""
    case = Case([(0, 6, 2)])
    fresh = encode_kv(case.fresh.data, 2 * PAIRS, format)
    ring = encode_kv(case.ring.data.nan_to_num(), 2 * PAIRS, format)
    got = attend(
        *(case.q, fresh, ring, case.slots, case.positions, case.first, WINDOW, RING, None, None),
        *(case.sinks, case.angle.cos(), case.angle.sin()),
    )
    for t, p in enumerate((6, 7)):
        case.keys[0][max(0, p - WINDOW) : 6] = torch.stack(
            [decode(ring)[j % RING] for j in range(max(0, p - WINDOW), 6)]
        )
        case.keys[0][6:] = decode(fresh)
        check_close(got[t], case.want(t), NEAR, f"token {t}")


def test_bfloat16_rounds_weights_and_output() -> None:
    case = Case([(0, 4, 3)])
    got = case.run(q=case.q.bfloat16())
    assert got.dtype == torch.bfloat16
    case.q = case.q.bfloat16().float()
    for t in range(3):
        want = case.want(t)
        size = case.raw_keys(t).abs().amax().double()
        # Weights rounded by 2^-9 each, output before and after the rotation by as much.
        check_close(got[t], want, 4 * one_more_rounding(size, torch.bfloat16) + NEAR, f"token {t}")


def test_weights_are_rounded_for_the_values_and_not_for_the_denominator() -> None:
    """One key of weight 1 and 100 of weight w, just above 1 - 2^-9: as BF16 factors they are all 1.

    Channel 0 holds 100 and 100 times -1: the values cancel in BF16. Channel 1 holds 1.0029 everywhere:
    divided by a rounded denominator it would round to 1, by the true one it exceeds the tie at 1 + 2^-8.
    """
    count = 101
    keys, q = torch.zeros(count, WIDTH), torch.zeros(count, 1, WIDTH)
    keys[:, 0], keys[:, 1] = -1.0, 1.0029
    keys[0, 0] = 100.0
    keys[1:, 2], q[:, 0, 2] = math.log(1 - 2.0**-9 + 1e-5) * WIDTH**0.5, 1.0
    zeros = torch.zeros(count, dtype=torch.long)
    still = torch.zeros(count, PAIRS)
    w = 1 - 2.0**-9 + 1e-5
    total = 1 + 100 * w
    for dtype, want in (
        (torch.bfloat16, [0.0, 1 + 2.0**-7]),
        (torch.float32, [(100 - 100 * w) / total, 1.0029]),
    ):
        got = attend(
            *(q.to(dtype), plain(keys), plain(torch.zeros(RING, WIDTH)), zeros, torch.arange(count), zeros),
            *(200, RING, None, None, torch.full((1,), -math.inf), still + 1, still),
        )
        assert got[-1, 0, :2].tolist() == pytest.approx(want, abs=count * ROUND), dtype


def test_queries_that_are_not_finite_and_views() -> None:
    """NaN where the specification has it, and in no other query; heads that are neighbours in memory."""
    case = Case([(0, 3, 4)])
    q = case.q.clone()
    q[1, 0, 2], q[2, 1, 0], q[3, 2, 5] = math.nan, math.inf, -math.inf
    got = case.run(q=q)
    for t in range(4):
        check_close(got[t], case.want(t, q=q), NEAR, f"token {t}")
    assert torch.isnan(got[1, 0]).all() and torch.isfinite(got[0]).all()
    view = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert not view.is_contiguous() and torch.equal(case.run(q=view).nan_to_num(7), got.nan_to_num(7))


def test_no_tokens() -> None:
    none = torch.tensor([], dtype=torch.long)
    empty = plain(torch.zeros(0, WIDTH))
    got = attend(
        *(
            torch.zeros(0, HEADS, WIDTH),
            empty,
            plain(torch.zeros(RING, WIDTH)),
            none,
            none,
            none,
            WINDOW,
            RING,
        ),
        *(None, None, torch.zeros(HEADS), torch.zeros(0, PAIRS), torch.zeros(0, PAIRS)),
    )
    assert got.shape == (0, HEADS, WIDTH)
