"""Attention of a decode step, in chunks of keys, against the reference."""

import pytest
import torch
from step_support import DEVICE, DTYPES, blank, check, moved, on_gpu, rand, runs, there
from torch import Tensor

from dsv4.ops.attention import cpu
from dsv4.ops.index.cpu import visible_rows
from dsv4.quant.codec import encode_kv
from dsv4.quant.formats import Format, QuantTensor

kernels = pytest.importorskip("dsv4.ops.attention.decode_any", reason="Triton is not installed")
pytestmark = runs
LONGEST, SLOTS = 2100, 4
# What float32 sums in another order, and bfloat16 weights rounded relative to another maximum, can do.
SHARE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}


def tables(half: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(LONGEST), 0.3 ** torch.arange(half).float())
    return angles.cos(), angles.sin()


def run(
    q: Tensor, ring: QuantTensor, window: int, entries: QuantTensor | None, rows: Tensor | None,
    page_table: Tensor, page: int, ratio: int, most: int, slots: Tensor, positions: Tensor, sinks: Tensor,
) -> Tensor:  # fmt: skip
    tokens, heads, d = q.shape
    cos, sin = (there(table) for table in tables(ring.rope_dim // 2))
    chunks = kernels.num_chunks(q.dtype, window, most)
    part_o, part_ml = blank(tokens, chunks, heads, d), blank(tokens, chunks, heads, 2)
    kernels.attend(
        *(there(q), moved(ring), window + 8, window, None if entries is None else moved(entries)),
        *(None if rows is None else there(rows), there(page_table), page, ratio),
        *(there(slots), there(positions), part_o, part_ml),
    )
    out = blank(tokens, heads * d, dtype=q.dtype)
    kernels.combine(part_o, part_ml, there(sinks), cos, sin, there(positions), out)
    return out.view(tokens, heads, d)


def want(
    q: Tensor, ring: QuantTensor, window: int, entries: QuantTensor | None, rows: Tensor | None,
    slots: Tensor, positions: Tensor, sinks: Tensor,
) -> Tensor:  # fmt: skip
    cos, sin = (table[positions] for table in tables(ring.rope_dim // 2))
    fresh = ring.take(slots * (window + 8) + positions % (window + 8))
    return cpu.attend(
        *(q, fresh, ring, slots, positions, positions, window, window + 8),
        *(entries, None if rows is None else rows.long(), sinks, cos, sin),
    )


# Heads, head and rotary channels, window, ratio, page: odd sizes, and V4-Flash's.
SIZES = [(2, 80, 16, 40, 4, 6), (1, 96, 64, 16, 8, 64), pytest.param(64, 512, 64, 128, 4, 64, marks=on_gpu)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["window", "listed", "visible"])
@pytest.mark.parametrize(("heads", "d", "rope", "window", "ratio", "page"), SIZES)
def test_attend(
    heads: int, d: int, rope: int, window: int, ratio: int, page: int, kind: str, dtype: torch.dtype
) -> None:
    end = 150 if DEVICE == "cpu" else 2000
    positions = torch.tensor([0, ratio - 1, -1, window - 1, end, window + 7, end - 1])
    slots = torch.tensor([0, 1, 0, 2, 3, 1, 2])
    tokens, pages = len(positions), -(-(end + 1) // ratio // page) + 1
    generator = torch.Generator().manual_seed(9)
    page_table = torch.randint(0, 20, (SLOTS, pages), generator=generator).int()
    page_table[3] = page_table[2]  # a fork
    q = rand(tokens, heads, d, seed=1, dtype=dtype) * 2
    sinks = rand(heads, seed=2) * 3
    ring, entries = (
        encode_kv(rand(count, d, seed=count, dtype=dtype), rope, Format.KV8)
        for count in (SLOTS * (window + 8), 20 * page)
    )
    entries = None if kind == "window" else entries
    live = positions >= 0
    rows, most = None, end // ratio + 1
    if kind == "visible":
        listed = visible_rows(page_table, slots, positions.clamp(min=0), ratio, page)
    elif kind == "listed":
        # As the indexer leaves them: in order, -1 beyond; one row without any, one with all.
        most = 70 if DEVICE == "cpu" else 512
        rows = torch.randint(0, 20 * page, (tokens, most), generator=generator).int()
        for t, count in enumerate([0, 1, most, most // 2, most, most - 1, 16]):
            rows[t, count:] = -1
        listed = rows
    else:
        listed, most = None, 0
    out = run(q, ring, window, entries, rows, page_table, page, ratio, most, slots, positions, sinks)
    shared = (q[live], ring, window, entries, None if listed is None else listed[live])
    check(out[there(live)], want(*shared, slots[live], positions[live], sinks), kind, 4, SHARE[dtype])
    assert bool(torch.isfinite(out).all()), "a padding row must stay finite"


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_drafts(dtype: torch.dtype) -> None:
    """Rows see all of their block, later ones too, and a window that ends before it."""
    heads, d, rope, window, block = 2, 80, 16, 20, 5
    anchors = torch.tensor([41, -1, 3])
    number = torch.arange(len(anchors) * block) // block
    is_used, slot = anchors[number] >= 0, torch.arange(len(number)) % block
    positions = torch.where(is_used, anchors[number] + slot, -1)
    ends, slots = torch.where(is_used, anchors[number] - 1, -1), (number + 1) % SLOTS
    q, sinks = rand(len(number), heads, d, seed=1, dtype=dtype) * 2, rand(heads, seed=2) * 3
    ring, entries = (
        encode_kv(rand(count, d, seed=count, dtype=dtype), rope, Format.KV8)
        for count in (SLOTS * (window + 8), len(number))
    )
    rows = (number.unsqueeze(1) * block + torch.arange(block)).int()
    of_ring = (moved(ring), window + 8, window)
    part_o = blank(len(q), kernels.num_chunks(q.dtype, window, block), heads, d)
    part_ml, out = blank(*part_o.shape[:3], 2), blank(len(q), heads * d, dtype=dtype)
    kernels.attend(
        *(there(q), *of_ring, moved(entries), there(rows), None, 0, 1, there(slots), there(positions)),
        *(part_o, part_ml, there(ends)),
    )
    cos, sin = tables(rope // 2)
    kernels.combine(part_o, part_ml, there(sinks), there(cos), there(sin), there(positions), out)
    fresh = ring.take(slots * (window + 8) + ends % (window + 8))
    for row in is_used.nonzero().flatten().split(1):  # its position is that of its rotation alone
        wanted = cpu.attend(
            *(q[row], fresh.take(row), ring, slots[row], ends[row], ends[row], window, window + 8, entries),
            *(rows[row].long(), sinks, cos[positions[row]], sin[positions[row]]),
        )
        check(out.view(q.shape)[there(row)], wanted, "block", 4, SHARE[dtype])


@pytest.mark.parametrize("sink", [-80.0, 80.0])
def test_extremes(sink: float) -> None:
    """Scores far apart between chunks, and a sink that outweighs or vanishes."""
    d, rope, window = 64, 16, 40
    q, sinks = rand(2, 2, d, seed=1) * 60, torch.full((2,), sink)
    ring = encode_kv(rand(2 * (window + 8), d, seed=2), rope, Format.KV8)
    slots, positions = torch.tensor([1, 0]), torch.tensor([100, 20])
    page_table = torch.zeros(2, 1, dtype=torch.int32)
    out = run(q, ring, window, None, None, page_table, 1, 0, 0, slots, positions, sinks)
    check(out, want(q, ring, window, None, None, slots, positions, sinks), f"sink {sink}", 16, 1e-5)


def test_groups_of_heads() -> None:
    """More heads than a program takes, and not a multiple: each is the reference's."""
    d, rope, window, heads = 64, 16, 20, 17
    q, sinks = rand(1, heads, d, seed=1), rand(heads, seed=3)
    ring = encode_kv(rand(window + 8, d, seed=2), rope, Format.KV8)
    slots, positions, page_table = torch.tensor([0]), torch.tensor([30]), torch.zeros(1, 1, dtype=torch.int32)
    out = run(q, ring, window, None, None, page_table, 1, 0, 0, slots, positions, sinks)
    check(out, want(q, ring, window, None, None, slots, positions, sinks), "heads", 4, SHARE[q.dtype])
