"""How a launch's work is cut: every unit of every task once, no more blocks than fit, about equal bytes."""

import ctypes
from collections import Counter
from dataclasses import replace

import pytest
import torch

from dsv4.gpu.tiles import empty
from dsv4.ops.linear.decode import (
    COLUMNS,
    MAX_FEW,
    STAGES,
    MatVec,
    Product,
    Tasks,
    _Segment,
    _Share,
    _shares,
    _work,
    fits_beside,
    splits,
)
from dsv4.quant.formats import Format
from tests.support.twin import needs_compiler, twin_of


def segment(units: int, format: int = 0, warps: int = 8, halves: int = 1, routed: int = 0) -> _Segment:
    return _Segment.blank(units=units, format=format, span=warps, warps=warps, halves=halves, routed=routed)


FLASH = {
    "projections": [segment(64), segment(32), segment(64, 3), segment(64, 3), segment(16, 3), segment(4, 3)],
    "queries up": [segment(2048, warps=2), segment(512, warps=2)],
    "output a": [segment(64) for _ in range(8)],
    "output b": [segment(256), segment(256)],
    "tiny": [segment(1, warps=1)],
}


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 32])
@pytest.mark.parametrize("name", FLASH)
def test_products_of_all_rows(name: str, rows: int) -> None:
    segments, blocks = FLASH[name], 132
    work = _work(segments, rows, COLUMNS, None, blocks)
    seen = Counter((s, task, unit) for s, first, count, task in work for unit in range(first, first + count))
    groups = -(-rows // COLUMNS)
    want = {(i, g, u) for i, s in enumerate(segments) for g in range(groups) for u in range(s.units)}
    assert seen == Counter(want)
    assert len(work) <= max(blocks, groups * len(segments))
    if name == "output b" and rows <= COLUMNS:
        assert max(count for _, _, count, _ in work) <= 4, "512 units on 132 blocks"


def test_experts_of_a_single_row() -> None:
    tasks = Tasks.empty(1, 6, "cpu")
    segments = [segment(256, warps=4, routed=2), segment(256, warps=4)]
    work = _work(segments, 1, COLUMNS, tasks, 264)
    seen = Counter((s, task, unit) for s, first, count, task in work for unit in range(first, first + count))
    assert seen == Counter((i, t, u) for i in range(2) for t in range(1 if i else 6) for u in range(256))
    assert len(work) <= 264


twin = twin_of("share")


def parts(twin: ctypes.CDLL, shares: list[_Share], tasks: int, blocks: int) -> list[list[tuple[int, ...]]]:
    """Of every block: (segment, first unit, units, task or group of rows)."""
    given, room, out = (_Share * len(shares))(*shares), (ctypes.c_int * 4096)(), []
    for block in range(blocks):
        found = twin.pieces(given, len(shares), tasks, block, blocks, room)
        out.append([tuple(room[4 * i : 4 * i + 4]) for i in range(found)])
    return out


ROUTED = {
    "up": [segment(128, halves=2, routed=1)],
    "up of Pro": [_Segment.blank(units=192, format=0, span=14, warps=7, halves=2, routed=1)],
    "down": [segment(256, warps=4, routed=2), segment(256, warps=4)],
    "down beside FP8": [segment(250, warps=4, routed=2), segment(250, format=2, warps=4)],
    "narrow": [segment(3, warps=1, routed=2), segment(3, warps=1)],
}


@needs_compiler
@pytest.mark.parametrize("blocks", [131, 7])
@pytest.mark.parametrize("rows", [2, 9, 32])
@pytest.mark.parametrize("name", ROUTED)
def test_experts_of_a_batch(twin: ctypes.CDLL, name: str, rows: int, blocks: int) -> None:
    segments, most = ROUTED[name], 6 * rows
    shares = _shares(segments, rows, COLUMNS, 16, most)
    for tasks in {0, 1, most // 3, most}:
        found, cost = parts(twin, shares, tasks, blocks), [0] * blocks
        seen: Counter[tuple[int, int, int]] = Counter()
        for block, pieces in enumerate(found):
            for i, first, count, task in pieces:
                cost[block] += count // shares[i].units * shares[i].cost
                seen.update((i, task, unit) for unit in range(first, min(first + count, segments[i].units)))
        repeats = [tasks if s.routed else -(-rows // COLUMNS) for s in segments]
        want = {(i, t, u) for i, s in enumerate(segments) for t in range(repeats[i]) for u in range(s.units)}
        assert seen == Counter(want)
        even = sum(r * share.turns * share.cost for r, share in zip(repeats, shares, strict=True)) / blocks
        assert max(cost) <= even + 1 + max(share.cost for share in shares)
        assert max(len(pieces) for pieces in found) <= 2 + even / min(s.turns * s.cost for s in shares)


@pytest.mark.parametrize("k,count", [(64, 1), (4096, 1), (4097, 2), (7168, 2), (8192, 2), (16384, 4)])
def test_splits(k: int, count: int) -> None:
    assert splits(k) == count


class Multiprocessors:
    multi_processor_count = 132


def product(n: int, k: int, format: Format = Format.NVFP4) -> Product:
    weight = empty(format, (n, k), 1, 1, "meta")
    return Product(weight, torch.empty(1, k, dtype=torch.bfloat16, device="meta"), torch.empty(1, n))


def test_two_blocks_of_few_rows_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Multiprocessors)
    down = replace(product(4096, 2048), who="down")
    for rows in (2, MAX_FEW, MAX_FEW + 1):
        plan = MatVec([down], rows, Tasks.empty(rows, 6, "meta"))
        fitting = 2 if rows <= MAX_FEW else 1
        assert plan.blocks == 132 * fitting
        assert fitting <= (228 << 10) / (plan.shared + (1 << 10)) < fitting + 1


def test_a_product_beside_a_spread_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output a and b of Flash on two ranks, not alone. Both fit on a multiprocessor, two of a do not."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Multiprocessors)
    a, b = [product(1024, 4096)] * 4, product(4096, 4096)
    assert fits_beside(b, a) and not fits_beside(product(4096, 8192), a * 2)
    assert not fits_beside(product(4096, 4096, Format.FP8), a)
    assert not fits_beside(b, [product(1024, 8192)]), "whose blocks are not spread"
    spread, beside = MatVec(a, 1, spread=True), MatVec([b], 1, beside=True)
    assert len(spread.work) <= 132 and len(beside.work) <= 132
    has, reserved = 228 << 10, 1 << 10  # of a multiprocessor, and of it for each block
    assert spread.shared + beside.shared + 2 * reserved <= has < 2 * (spread.shared + reserved)
    work = _work([segment(256)], 1, COLUMNS, None, 132)
    assert max(units for _, _, units, _ in work) == STAGES, "all that its warps multiply is fetched early"
