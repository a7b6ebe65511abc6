"""How a launch's work is cut: every unit of every task once, no more blocks than fit, about equal bytes."""

from collections import Counter

import pytest
import torch

from dsv4.kernels.common.tiles import empty
from dsv4.kernels.decode.matvec import (
    COLUMNS,
    STAGES,
    MatVec,
    Product,
    Tasks,
    _Segment,
    _share,
    fits_beside,
    splits,
)
from dsv4.quant.formats import Format


def segment(units: int, format: int = 0, warps: int = 8, halves: int = 1, routed: int = 0) -> _Segment:
    return _Segment(units=units, format=format, span=warps, warps=warps, halves=halves, routed=routed)


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
    work = _share(segments, rows, COLUMNS, None, blocks)
    seen = Counter((s, task, unit) for s, first, count, task in work for unit in range(first, first + count))
    groups = -(-rows // COLUMNS)
    want = {(i, g, u) for i, s in enumerate(segments) for g in range(groups) for u in range(s.units)}
    assert seen == Counter(want)
    assert len(work) <= max(blocks, groups * len(segments))
    if name == "output b" and rows <= COLUMNS:
        assert max(count for _, _, count, _ in work) <= 4, "512 units on 132 blocks"


@pytest.mark.parametrize("rows", [1, 2, 32])
def test_experts_and_the_shared_one(rows: int) -> None:
    tasks = Tasks.empty(rows, 6, "cpu")
    segments = [segment(256, warps=4, routed=2), segment(256, warps=4)]
    work = _share(segments, rows, COLUMNS, tasks, 264)
    seen = Counter((s, task, unit) for s, first, count, task in work for unit in range(first, first + count))
    want = {(0, t, u) for t in range(6 * rows) for u in range(256)}
    want |= {(1, g, u) for g in range(-(-rows // COLUMNS)) for u in range(256)}
    assert seen == Counter(want)
    if rows == 1:
        assert len(work) <= 264


@pytest.mark.parametrize("k,count", [(64, 1), (4096, 1), (4097, 2), (7168, 2), (8192, 2), (16384, 4)])
def test_splits(k: int, count: int) -> None:
    assert splits(k) == count


class Multiprocessors:
    multi_processor_count = 132


def product(n: int, k: int, format: Format = Format.NVFP4) -> Product:
    weight = empty(format, (n, k), 1, 1, "meta")
    return Product(weight, torch.empty(1, k, dtype=torch.bfloat16, device="meta"), torch.empty(1, n))


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
    work = _share([segment(256)], 1, COLUMNS, None, 132)
    assert max(units for _, _, units, _ in work) == STAGES, "all that its warps multiply is fetched early"
