"""The kernels between projections and attention write what the reference writes, and nothing else."""

from dataclasses import replace

import pytest
import torch
from step_support import DTYPES, blank, check, check_rows, moved, on_gpu, rand, runs, there
from torch import Tensor

from dsv4.ops.attention import cpu as attention
from dsv4.ops.index import cpu as index
from dsv4.ops.linear.cpu import round_input
from dsv4.ops.rows.cpu import rms_norm
from dsv4.quant.formats import Format, QuantTensor, empty_rows

kernels = pytest.importorskip("dsv4.ops.attention.prepare", reason="Triton is not installed")
pytestmark = runs
EPS, SLOTS, PAGE, PAGES, SPARE = 1e-6, 5, 4, 12, 8
LONGEST = 1024


def tables(half: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(LONGEST), 0.3 ** torch.arange(half).float())
    return angles.cos(), angles.sin()


def noise(store: QuantTensor, seed: int) -> QuantTensor:
    """The store filled with bytes that must survive."""
    generator = torch.Generator().manual_seed(seed)
    for part in (store.data, store.scale):
        assert part is not None
        part.copy_(torch.randint(100, 120, part.shape, generator=generator))
    return store


def pooling(rows: int, d: int, ratio: int, m: int, out: QuantTensor, seed: int) -> kernels.Pooling:
    wide, tail = (
        rand(rows, 2 * m * d + 3, seed=seed) * 3,
        rand(SLOTS, ratio * m + SPARE, m * d, seed=seed + 1),
    )
    return kernels.Pooling(
        *(wide[:, 1 : 1 + m * d], wide[:, 2 + m * d : 2 + 2 * m * d], rand(ratio, m * d, seed=seed + 2)),
        *(tail, tail.flip(0) * 3, rand(d, seed=seed + 3), out),
    )


def placed(p: kernels.Pooling) -> kernels.Pooling:
    wide = there(torch.cat((p.values, p.scores), 1))
    values, scores = wide.tensor_split(2, 1)
    rest = {name: there(getattr(p, name)) for name in ("ape", "tail_values", "tail_scores", "norm")}
    return replace(p, values=values, scores=scores, out=moved(p.out), **rest)


def closed(p: kernels.Pooling, slots: Tensor, positions: Tensor, ratio: int, dtype: torch.dtype) -> Tensor:
    """What the compressor gives for each row; rows that close no block give anything. Writes the tails."""
    m = p.values.shape[1] // p.norm.shape[0]
    scores = p.scores + p.ape[positions % ratio]
    tails = (p.tail_values, p.tail_scores)
    pooled = attention.pool(
        *(p.values, scores, *tails, torch.arange(len(slots)), slots, positions, positions, ratio, m == 2)
    )
    live = positions >= 0
    for tail, fresh in zip(tails, (p.values, scores), strict=True):
        tail[slots[live], positions[live] % tail.shape[1]] = fresh[live]
    return pooled.to(dtype)


# Query rank, head, rotary and index channels, ratio, whether blocks overlap.
SIZES = [
    (48, 80, 16, 32, 4, True),
    (33, 96, 64, 64, 4, True),
    (16, 80, 16, 0, 0, False),
    (16, 40, 8, 0, 20, False),
    (16, 80, 16, 0, 128, False),
    pytest.param(1024, 512, 64, 128, 4, True, marks=on_gpu),
    pytest.param(1024, 512, 64, 0, 128, False, marks=on_gpu),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "d", "rope", "di", "ratio", "overlap"), SIZES)
def test_prepare(
    rank: int, d: int, rope: int, di: int, ratio: int, overlap: bool, dtype: torch.dtype
) -> None:
    # The first block, block ends, inside a block, far on; and a row of padding in the middle.
    every = ratio or 5
    positions = torch.tensor([0, every - 1, -1, 6 * every - 1, 3 * every, 2 * every - 1])
    slots = torch.tensor([3, 0, 0, 1, 4, 2])
    page_table = torch.randperm(PAGES).int()[:10].view(SLOTS, 2)
    rows, m, ring_rows = len(positions), 1 + overlap, 48
    cos, sin = tables(rope // 2)
    at = positions.clamp(min=0)
    wide = rand(rows, rank + d + 1, seed=1) * 2
    q_low, kv = wide[:, :rank], wide[:, rank + 1 :]
    q_norm, kv_norm = rand(rank, seed=2), rand(d, seed=3)
    ring = noise(empty_rows(Format.KV8, SLOTS * ring_rows, d, rope, dtype), 4)
    entries = keys = None
    if ratio:
        out = noise(empty_rows(Format.KV8, PAGES * PAGE, d, rope, dtype), 5)
        entries = pooling(rows, d, ratio, m, out, 10)
    if di:
        keys = pooling(rows, di, ratio, m, noise(empty_rows(Format.MXFP4, PAGES * PAGE, di), 6), 20)

    given_ring, q_out, q_in = moved(ring), blank(rows, rank, dtype=dtype), blank(rows, rank, dtype=dtype)
    activations = "a4" if overlap else "a8"
    given = [p if p is None else placed(p) for p in (entries, keys)]
    wide_there = there(wide)
    kernels.prepare(
        *(wide_there[:, :rank], there(q_norm), q_out, wide_there[:, rank + 1 :], there(kv_norm)),
        *(given_ring, ring_rows, there(cos), there(sin), there(slots), there(positions), EPS),
        *(there(page_table), PAGE, ratio, *given, q_in, activations),
    )

    assert torch.equal(q_in.cpu(), round_input(q_out.cpu(), activations))
    check(q_out, rms_norm(q_low.to(dtype), q_norm, EPS), "q_low", ulps=2)
    live = positions >= 0
    ring_at = (slots * ring_rows + positions % ring_rows)[live]
    fresh = attention.entries(kv.to(dtype), kv_norm, cos[at], sin[at], EPS)
    ring.put(ring_at, attention.store(fresh[live], rope, Format.KV8, True))
    check_rows(given_ring, ring, ring_at.tolist(), "ring")
    if not ratio:
        return
    ends = live & ((positions + 1) % ratio == 0)
    block = at // ratio
    pool_at = (page_table[slots, block // PAGE].long() * PAGE + block % PAGE)[ends]
    turn = [table[at + 1 - ratio][ends] for table in (cos, sin)]
    for p, got, name in ((entries, given[0], "entries"), (keys, given[1], "keys")):
        if p is None:
            continue
        pooled = closed(p, slots, positions, ratio, dtype)[ends]
        if name == "keys":
            made = index.keys(pooled, p.norm, *turn, EPS, True, Format.MXFP4)
        else:
            made = attention.store(attention.entries(pooled, p.norm, *turn, EPS), rope, Format.KV8, True)
        p.out.put(pool_at, made)
        check_rows(got.out, p.out, pool_at.tolist(), name)
        assert torch.equal(got.tail_values.cpu(), p.tail_values), name
        assert torch.equal(got.tail_scores.cpu(), p.tail_scores), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "d", "rope", "index_heads", "di"),
    [
        (3, 80, 16, 2, 32),
        (2, 96, 64, 3, 64),
        (2, 40, 8, 0, 0),
        pytest.param(64, 512, 64, 64, 128, marks=on_gpu),
    ],
)
def test_queries(heads: int, d: int, rope: int, index_heads: int, di: int, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, -1, 7, 900])
    at = positions.clamp(min=0)
    cos, sin = tables(rope // 2)
    q = rand(4, heads, d, seed=1, dtype=dtype) * 5
    q[2, 0] = 0
    iq = rand(4, index_heads, di, seed=2, dtype=dtype) * 5 if di else None
    held, iheld = there(q), None if iq is None else there(iq)
    kernels.queries(held, iheld, there(cos), there(sin), there(positions), EPS)
    check(held, attention.queries(q, cos[at], sin[at], EPS), "q", ulps=3)
    if iq is not None:
        want, got = index.queries(iq, cos[at], sin[at], True), iheld.cpu()
        assert float((got != want).float().mean()) <= 0.02
        assert bool(((got - want).abs() <= 0.51 * want.abs() + 0.1 * want.abs().max()).all())
        alone = there(iq)
        kernels.queries(None, alone, there(cos), there(sin), there(positions), EPS)
        assert torch.equal(alone, iheld), "where attention takes q as it is"


# Tokens of each sequence that go through in one step: drafts after the one that is known.
RUNS = [(3, 2, 5), (1, 6, 8), (4, 0, 3), (2, 125, 8)]  # slot, first position, tokens


@pytest.mark.parametrize(
    ("d", "rope", "di", "ratio", "overlap"), [(80, 16, 32, 4, True), (40, 8, 0, 128, False)]
)
def test_tokens_of_one_step_are_as_one_by_one(d: int, rope: int, di: int, ratio: int, overlap: bool) -> None:
    """Blocks that end within a step of several tokens of a sequence: the same ring, tails and pools."""
    rows, m, ring_rows, dtype = sum(n for *_, n in RUNS), 1 + overlap, 136, torch.float32
    slots = torch.cat([torch.full((n,), slot) for slot, _, n in RUNS])
    positions = torch.cat([first + torch.arange(n) for _, first, n in RUNS])
    page_table = torch.randperm(SLOTS * 34).int().view(SLOTS, 34)
    cos, sin = (there(table) for table in tables(rope // 2))
    wide, q_norm, kv_norm = rand(rows, 16 + d, seed=1), there(rand(16, seed=2)), there(rand(d, seed=3))
    entries = pooling(
        rows, d, ratio, m, noise(empty_rows(Format.KV8, SLOTS * 34 * PAGE, d, rope, dtype), 5), 10
    )
    keys = (
        pooling(rows, di, ratio, m, noise(empty_rows(Format.MXFP4, SLOTS * 34 * PAGE, di), 6), 20)
        if di
        else None
    )

    def run(steps: list[Tensor]) -> list[Tensor]:
        ring = moved(noise(empty_rows(Format.KV8, SLOTS * ring_rows, d, rope, dtype), 4))
        whole = [p if p is None else placed(p) for p in (entries, keys)]
        for step in steps:
            given = [
                p and replace(p, values=p.values[there(step)], scores=p.scores[there(step)]) for p in whole
            ]
            of = there(wide[step])
            kernels.prepare(
                *(of[:, :16], q_norm, blank(len(step), 16, dtype=dtype), of[:, 16:], kv_norm),
                *(ring, ring_rows, cos, sin, there(slots[step]), there(positions[step]), EPS),
                *(there(page_table), PAGE, ratio, *given, None, "a16"),
            )
        held = [ring.data, ring.scale]
        for p in whole:
            held += [] if p is None else [p.tail_values, p.tail_scores, p.out.data, p.out.scale]
        return [tensor for tensor in held if tensor is not None]

    at_once, one_by_one = run([torch.arange(rows)]), run([torch.tensor([row]) for row in range(rows)])
    for ours, theirs in zip(at_once, one_by_one, strict=True):
        assert torch.equal(ours, theirs)
