"""Index selection against the specification: visibility, signs, ties, pages, and Hadamard's order."""

import math
import random

import pytest
import torch
from ops_support import ROUND, check_close, exactly, rand
from torch import Tensor

from dsv4.ops.index import cpu
from dsv4.quant.codec import decode, encode_kv
from dsv4.quant.formats import Format, QuantTensor
from dsv4.spec import ops as spec
from dsv4.spec.rounding import Rounding

RATIO, PAGE = 4, 8


@pytest.mark.parametrize("size", [1, 2, 4, 32, 128])
def test_hadamard(size: int) -> None:
    """Orthogonal and symmetric, so that applying it twice gives the input back."""
    got = cpu.hadamard(torch.eye(size))
    check_close(got, exactly(spec.hadamard, torch.eye(size)), 2 * ROUND, "matrix")
    x = rand(3, 5, size)
    bound = (4 + 2 * math.log2(size)) * ROUND * x.abs().sum(-1, keepdim=True).double()
    check_close(cpu.hadamard(x), exactly(spec.hadamard, x), bound * size**-0.5, "rows")
    check_close(cpu.hadamard(cpu.hadamard(x)), x, bound, "twice")
    assert cpu.hadamard(x.bfloat16()).dtype == torch.bfloat16
    assert cpu.hadamard(x[:0]).shape == (0, 5, size)


def eighths(*shape: int, seed: int = 0) -> Tensor:
    """Multiples of 1/8 below 4: a few products and sums of them are exact in float32, in any order."""
    return (8 * rand(*shape, seed=seed)).round().clamp(-31, 31) / 8


@pytest.mark.parametrize("size", [64, 16])
def test_queries_and_keys_are_rotated_then_transformed_then_rounded(size: int) -> None:
    """Bit for bit, with values that leave float32 nothing to round before FP4 does."""
    q, cos, sin = eighths(3, 5, size), eighths(3, 4, seed=1), eighths(3, 4, seed=2)
    weight, twos = eighths(size, seed=3), 2.0 * rand(3, size, seed=4).sign()  # of norm 2: divided exactly
    plain = spec.rotate_heads(q, cos, sin)
    assert torch.equal(cpu.queries(q, cos, sin, qat=False), plain)
    assert torch.equal(cpu.queries(q, cos, sin, qat=True), Rounding().index(plain))
    plain = spec.rotate(spec.rms_norm(twos, weight, 0.0), cos, sin)
    assert torch.equal(decode(cpu.keys(twos, weight, cos, sin, 0.0, False, Format.F32)), plain)
    for format in (Format.MXFP4, Format.BF16, Format.F32):
        got = decode(cpu.keys(twos, weight, cos, sin, 0.0, True, format))
        assert torch.equal(got, Rounding().index(plain)), (
            f"{format}: every cache format holds the rounded key"
        )


def test_any_queries_and_keys_lie_by_the_specifications() -> None:
    """Float noise may carry a value over a rounding boundary: by one step of FP4, and seldom."""
    q, angle, weight = rand(30, 5, 64), rand(30, 4, seed=1), rand(64, seed=2)
    cos, sin = angle.cos(), angle.sin()
    got = (
        cpu.queries(q, cos, sin, qat=True),
        decode(cpu.keys(q[:, 0], weight, cos, sin, 1e-6, True, Format.F32)),
    )
    plain = spec.rotate_heads(q, cos, sin), spec.rotate(spec.rms_norm(q[:, 0], weight, 1e-6), cos, sin)
    for some, unrounded in zip(got, plain, strict=True):
        want = Rounding().index(unrounded)
        assert (some != want).float().mean() < 2e-3
        check_close(some, want, float(want.abs().max()) / 3, "a step of the largest scale")


def test_leaving_the_transform_out_on_both_sides_changes_no_score() -> None:
    q, k = rand(6, 64), rand(9, 64, seed=1)
    bound = 40 * ROUND * (q.abs().sum(1, keepdim=True) * k.abs().amax()).double()
    check_close(cpu.hadamard(q) @ cpu.hadamard(k).t(), (q @ k.t()).double(), bound, "scores")


class Pages:
    """Index keys of some sequences, scattered over shuffled pages of one pool; other rows are NaN."""

    def __init__(self, lengths: list[int], d: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        per_sequence = -(-max(lengths) // PAGE) + 1
        numbers = rng.sample(range(3 * len(lengths) * per_sequence), len(lengths) * per_sequence)
        self.table = torch.tensor(numbers, dtype=torch.int32).view(len(lengths), per_sequence)
        data = torch.full((3 * len(lengths) * per_sequence * PAGE, d), math.nan)
        self.keys = [rand(length, d, seed=seed + 1 + s) for s, length in enumerate(lengths)]
        for s, keys in enumerate(self.keys):
            for c, key in enumerate(keys):
                data[self.row(s, c)] = key
        self.pool = QuantTensor(Format.F32, data, (data.shape[0], d))

    def row(self, slot: int, entry: int) -> int:
        return int(self.table[slot, entry // PAGE]) * PAGE + entry % PAGE


def best_entries(q: Tensor, weights: Tensor, keys: Tensor, position: int, topk: int) -> list[int]:
    """The entries that the specification selects for one query q [H, d], rising; scores in float64."""
    scores = exactly(spec.index_scores, q.unsqueeze(0), keys, weights.unsqueeze(0))
    seen = spec.is_visible(torch.tensor([position]), len(keys), RATIO)
    return spec.select(scores, seen, topk)[0].nonzero().flatten().tolist()


def run_select(
    pages: Pages, q: Tensor, w: Tensor, slots: list[int], positions: list[int], topk: int
) -> Tensor:
    where = (torch.tensor(slots), torch.tensor(positions))
    return cpu.select(q, w, pages.pool, pages.table, *where, RATIO, PAGE, topk)


@pytest.mark.parametrize("topk", [1, 3, 12, 1000])
def test_select_against_the_specification(topk: int) -> None:
    """Three sequences, queries mixed, at the edges of blocks and pages; page order is shuffled."""
    pages = Pages([25, 9, 40], d=6)
    slots, positions = [], []
    for slot, length in enumerate((25, 9, 40)):
        for p in (0, 2, 3, 4, 6, 7, 8, 4 * length - 2, 4 * length - 1):
            slots.append(slot)
            positions.append(p)
    order = random.Random(1).sample(range(len(slots)), len(slots))
    slots, positions = [slots[i] for i in order], [positions[i] for i in order]
    q, w = rand(len(slots), 3, 6, seed=5), rand(len(slots), 3, seed=6)
    got = run_select(pages, q, w, slots, positions, topk)
    assert got.shape[1] == max(min(topk, (p + 1) // RATIO) for p in positions)
    for t, (slot, p) in enumerate(zip(slots, positions, strict=True)):
        want = [pages.row(slot, c) for c in best_entries(q[t], w[t], pages.keys[slot], p, topk)]
        assert got[t].tolist() == want + [-1] * (got.shape[1] - len(want)), (slot, p)
        alone = run_select(pages, q[t : t + 1], w[t : t + 1], [slot], [p], topk)
        assert alone[0].tolist() == want, "batch-mates change no choice"


def test_negative_scores_do_not_lose_to_what_is_invisible() -> None:
    """All weights negative: every score is at most 0, and an invisible entry counted as 0 would win."""
    pages = Pages([20], d=4)
    q, w = rand(1, 2, 4, seed=3), -torch.ones(1, 2)
    got = run_select(pages, q, w, [0], [4 * 10 - 1], 4)
    allowed = {pages.row(0, c) for c in range(10)}
    assert len(set(got[0].tolist())) == 4 and set(got[0].tolist()) <= allowed
    assert got[0].tolist() == [pages.row(0, c) for c in best_entries(q[0], w[0], pages.keys[0], 39, 4)]


def test_scores_that_are_not_finite_and_views() -> None:
    """Infinite and NaN scores are chosen as in the specification; rows of q need not be neighbours."""
    pages = Pages([12], d=4)
    q, w = rand(4, 2, 4, seed=3), rand(4, 2, seed=4)
    q[1, 0, 1], q[2, 1, 0], w[3, 1] = math.inf, math.nan, -math.inf
    got = run_select(pages, q, w, [0] * 4, [47] * 4, 5)
    for t in range(4):
        want = best_entries(q[t], w[t], pages.keys[0], 47, 5)
        assert got[t].tolist() == [pages.row(0, c) for c in want], t
    view = q.transpose(0, 2).contiguous().transpose(0, 2)
    assert torch.equal(run_select(pages, view, w, [0] * 4, [47] * 4, 5), got)


def test_ties_go_to_the_lower_entry() -> None:
    pages = Pages([30], d=4)
    got = run_select(pages, torch.zeros(1, 2, 4), torch.ones(1, 2), [0], [119], 7)
    assert got[0].tolist() == [pages.row(0, c) for c in range(7)]


def test_few_entries_are_all_taken_in_order_and_unread() -> None:
    """topk >= visible: no scores, so not even NaN keys or queries matter."""
    pages = Pages([12], d=4)
    nan = torch.full((1, 2, 4), math.nan)
    got = run_select(pages, nan, nan[:, :, 0], [0], [47], 12)
    assert got[0].tolist() == [pages.row(0, c) for c in range(12)]
    assert run_select(pages, nan, nan[:, :, 0], [0], [2], 12).shape == (1, 0), "no block is complete"
    assert run_select(pages, nan[:0], nan[:0, :, 0], [], [], 12).shape == (0, 0)


@pytest.mark.parametrize("format", [Format.BF16, Format.MXFP4])
def test_select_reads_stored_keys(format: Format) -> None:
    """The keys compared are those of the cache's format, not the ones before."""
    keys, q, w = rand(16, 32), rand(1, 3, 32, seed=1), rand(1, 3, seed=2)
    pool = encode_kv(keys, 0, format)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    got = cpu.select(q, w, pool, table, torch.tensor([0]), torch.tensor([63]), RATIO, PAGE, 5)
    by_entry = torch.cat((decode(pool)[8:], decode(pool)[:8]))
    want = [(c + 8) % 16 for c in best_entries(q[0], w[0], by_entry, 63, 5)]
    assert got[0].tolist() == want


def test_visible_rows() -> None:
    pages = Pages([25, 9], d=1)
    slots, positions = [0, 1, 0, 1, 0], [0, 3, 99, 34, 4]
    got = cpu.visible_rows(pages.table, torch.tensor(slots), torch.tensor(positions), RATIO, PAGE)
    assert got.shape == (5, 25)
    for t, (slot, p) in enumerate(zip(slots, positions, strict=True)):
        rows = [pages.row(slot, c) for c in range((p + 1) // RATIO)]
        assert got[t].tolist() == rows + [-1] * (25 - len(rows)), (slot, p)
    none = torch.tensor([], dtype=torch.long)
    assert cpu.visible_rows(pages.table, none, none, RATIO, PAGE).shape == (0, 0)
