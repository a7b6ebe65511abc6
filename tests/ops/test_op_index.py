"""Index selection against a sort in plain Python: visibility, signs, ties, pages, and Hadamard's order."""

import math
import random

import numpy as np
import oracle
import pytest
import torch
from ops_support import ROUND, check_close, rand
from torch import Tensor

from dsv4.ops._exact import rotate
from dsv4.ops.index import cpu
from dsv4.ops.rows.cpu import rms_norm
from dsv4.quant.codec import decode, encode_kv
from dsv4.quant.formats import Format, QuantTensor

RATIO, PAGE = 4, 8


@pytest.mark.parametrize("size", [1, 2, 4, 32, 128])
def test_hadamard_is_sylvesters_matrix(size: int) -> None:
    """Entry (i, j) is (-1)^popcount(i & j), scaled; orthogonal, so applying it twice gives the input back."""
    want = [[(-1) ** (i & j).bit_count() * size**-0.5 for j in range(size)] for i in range(size)]
    got = cpu.hadamard(torch.eye(size))
    check_close(got, torch.tensor(want, dtype=torch.float64), 2 * ROUND, "matrix")
    x = rand(3, 5, size)
    bound = (4 + 2 * math.log2(size)) * ROUND * x.abs().sum(-1, keepdim=True).double()
    check_close(cpu.hadamard(cpu.hadamard(x)), x, bound, "twice")
    assert cpu.hadamard(x.bfloat16()).dtype == torch.bfloat16
    assert cpu.hadamard(x[:0]).shape == (0, 5, size)


def mxfp4_rounded(x: Tensor) -> Tensor:
    rows = x.float().flatten(0, -2).numpy()
    out = np.empty_like(rows)
    for r, row in enumerate(rows):
        codes, scales = oracle.mxfp4_row(row)
        out[r] = oracle.E2M1[codes] * np.repeat(oracle.E8M0[scales], 32)[: len(row)]
    return torch.from_numpy(out).view(x.shape)


def test_queries_and_keys_are_rotated_then_transformed_then_rounded() -> None:
    q, angle, weight = rand(3, 5, 64), rand(3, 4, seed=1), rand(64, seed=2)
    cos, sin = angle.cos(), angle.sin()
    assert torch.equal(cpu.queries(q, cos, sin, qat=False), rotate(q, cos, sin))
    assert torch.equal(cpu.queries(q, cos, sin, qat=True), mxfp4_rounded(cpu.hadamard(rotate(q, cos, sin))))
    plain = rotate(rms_norm(q[:, 0], weight, 1e-6), cos, sin)
    assert torch.equal(decode(cpu.keys(q[:, 0], weight, cos, sin, 1e-6, False, Format.F32)), plain)
    rounded = mxfp4_rounded(cpu.hadamard(plain))
    for format in (Format.MXFP4, Format.BF16, Format.F32):
        got = decode(cpu.keys(q[:, 0], weight, cos, sin, 1e-6, True, format))
        assert torch.equal(got, rounded), f"{format}: every cache format holds the rounded key"


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


def naive_select(q: Tensor, weights: Tensor, keys: Tensor, visible: int, topk: int) -> list[int]:
    """Entries chosen for one query, rising; scores in float64, best first, ties to the lower."""
    scores = []
    for c in range(visible):
        dots = [sum(a * b for a, b in zip(head, keys[c].tolist(), strict=True)) for head in q.tolist()]
        scores.append(sum(max(dot, 0.0) * w for dot, w in zip(dots, weights.tolist(), strict=True)))
    return sorted(sorted(range(visible), key=lambda c: (-scores[c], c))[:topk])


def run_select(
    pages: Pages, q: Tensor, w: Tensor, slots: list[int], positions: list[int], topk: int
) -> Tensor:
    where = (torch.tensor(slots), torch.tensor(positions))
    return cpu.select(q, w, pages.pool, pages.table, *where, RATIO, PAGE, topk)


@pytest.mark.parametrize("topk", [1, 3, 12, 1000])
def test_select_against_loops(topk: int) -> None:
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
        visible = (p + 1) // RATIO
        want = [pages.row(slot, c) for c in naive_select(q[t], w[t], pages.keys[slot], visible, topk)]
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
    assert got[0].tolist() == [pages.row(0, c) for c in naive_select(q[0], w[0], pages.keys[0], 10, 4)]


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
    want = [(c + 8) % 16 for c in naive_select(q[0], w[0], by_entry, 16, 5)]
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
