"""index/decode.cu's own source on the CPU, warps in shuffled orders, to the bit what its order of sums
gives."""

import ctypes
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from dsv4.gpu import architectures, build
from dsv4.ops.index import cpu
from dsv4.ops.index import decode as index
from dsv4.quant.codec import decode, encode_kv, mxfp4_round
from dsv4.quant.formats import Format, QuantTensor
from tests.support.twin import needs_compiler, twin_of, unfinished

pytestmark = needs_compiler
twin = twin_of("index", queries=ctypes.c_char_p, scores=ctypes.c_char_p)
HEADS, WIDTH, PAGE, RATIO = index.HEADS, index.WIDTH, 8, 4


def launches(twin: ctypes.CDLL, seed: int) -> Callable[..., None]:
    """In the place of `call`."""

    def call(source: str, kernel: str, device: torch.device, given: Any, blocks: int, **how: int) -> None:
        assert source == "index/decode" and how["threads"] == 32 * index.WARPS
        assert given.warms == how["overlap"], "serial launches start when all is there: work for nobody"
        assert how.get("shared", 0) == (index.SHARED_BYTES if kernel == "scores_kernel" else 0)
        problem = getattr(twin, kernel.removesuffix("_kernel"))(ctypes.byref(given), blocks, seed)
        assert problem == b"", problem.decode()

    return call


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b.double() + c.double()).float()


@pytest.mark.parametrize("warms", [False, True])
def test_queries(twin: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, warms: bool) -> None:
    monkeypatch.setattr(index, "call", launches(twin, seed=warms))
    positions = torch.tensor([0, -1, 900])
    cos, sin = (torch.rand(1000, index.ROPE // 2, generator=generator(i)) * 2 - 1 for i in range(2))
    iq = (torch.randn(3, HEADS, WIDTH, generator=generator(2)) * 5).bfloat16()
    iq[0, 0], iq[0, 1, ::7], iq[2, 3, 64] = 0, 1e-38, torch.inf
    iq[2, 5, 100] = torch.nan
    got = iq.clone()
    with unfinished(twin, got):
        index.rotate_round(got, cos, sin, positions, overlap=warms)
    pairs = iq.float().unflatten(-1, (-1, 2))
    c = torch.cat((torch.ones(3, 32), cos[positions.clamp(min=0)]), 1).unsqueeze(1)
    s = torch.cat((torch.zeros(3, 32), sin[positions.clamp(min=0)]), 1).unsqueeze(1)
    a, b = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((fma(a, c, -(b * s)), fma(a, s, b * c)), -1).flatten(-2).bfloat16()
    want = mxfp4_round(cpu.hadamard(turned))
    assert torch.equal(got.isnan(), want.isnan()) and bool(want.isnan().any())
    assert torch.equal(got.nan_to_num(7).view(torch.int16), want.nan_to_num(7).view(torch.int16))


def wanted(iq: Tensor, weights: Tensor, keys: Tensor, factor: float) -> Tensor:
    """iq [Hi, di], weights [Hi], keys [S, di] -> [S], every sum rounded as on the GPU."""
    dots = torch.zeros(len(keys), HEADS)
    for odd in range(2):
        for block in range(WIDTH // 32):
            channels = slice(block * 32 + odd, block * 32 + 32, 2)
            dots = (dots.double() + keys[:, channels].double() @ iq[:, channels].double().t()).float()
    dots = dots.relu().where(~dots.isnan(), torch.nan)
    wide = weights.float() * torch.tensor(factor)
    sums = []
    for part in range(4):
        first, *rest = (8 * n + 2 * part + e for n in range(8) for e in range(2))
        total = fma(wide[first], dots[:, first], wide[rest[0]] * dots[:, rest[0]])
        for head in rest[1:]:
            total = fma(wide[head], dots[:, head], total)
        sums.append(total)
    return (sums[0] + sums[2]) + (sums[1] + sums[3])


@pytest.mark.parametrize(("warms", "programs"), [(False, 264), (True, 264), (True, 4), (True, 1), (False, 2)])
def test_scores(twin: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, warms: bool, programs: int) -> None:
    """Pages that two rows share, padding, a row's last key inside a block and at the end of its pages, scales
    far apart, one NaN, and a query that is NaN in one head. With few programs some rows have more keys than
    one block each, in one or more rounds."""
    monkeypatch.setattr(index, "call", launches(twin, seed=warms))
    monkeypatch.setattr(index, "serves", lambda iq: True)
    monkeypatch.setattr(index, "MAX_ROWS", 5)
    monkeypatch.setattr(index, "MAX_PROGRAMS", programs)
    pages, cap = 17, 136
    positions = torch.tensor([cap * RATIO - 1, -1, 2, 16 * RATIO + 1, 67 * RATIO - 1])
    slots = torch.tensor([1, 0, 2, 2, 0])
    # Behind a row's pages lie ones that do not exist.
    table = torch.full((3, pages + 2), 1 << 28, dtype=torch.int32)
    table[:, :pages] = torch.randint(0, 2 * pages, (3, pages), generator=generator(1))
    table = table[:, :pages]
    far = 2.0 ** torch.randint(-9, 9, (2 * pages * PAGE, WIDTH // 32, 1), generator=generator(2))
    raw = torch.randn(2 * pages * PAGE, WIDTH // 32, 32, generator=generator(3)) * far
    keys = encode_kv(raw.flatten(1), 0, Format.MXFP4)
    assert keys.scale is not None
    keys.scale[table[1, 0] * PAGE + 3, 2] = 255
    iq = mxfp4_round(torch.randn(5, HEADS, WIDTH, generator=generator(4))).bfloat16()
    iq[4, 29, 64:96] = torch.nan
    weights = torch.randn(5, HEADS, generator=generator(5)).bfloat16()
    out = torch.full((5, cap + 2), 77.0)
    with unfinished(twin, iq, weights, out):
        index.scores(
            iq=iq,
            weights=weights,
            keys=keys,
            page_table=table,
            slots=slots,
            positions=positions,
            out=out[:, :cap],
            ratio=RATIO,
            page_entries=PAGE,
            factor=0.0125,
            overlap=warms,
        )
    for row, position in enumerate(positions.tolist()):
        count = (position + 1) // RATIO
        seen: QuantTensor = keys.take(cpu.pool_rows(table, int(slots[row]), count, PAGE))
        want, got = wanted(iq[row], weights[row], decode(seen), 0.0125), out[row, :count]
        assert torch.equal(got.isnan(), want.isnan()) and (row > 0 or bool(want.isnan().any()))
        assert torch.equal(got.nan_to_num(7).view(torch.int32), want.nan_to_num(7).view(torch.int32)), row
        assert bool(out[row, count:].eq(77).all()), f"row {row}: written beyond {count}"


def test_queries_that_overflow_or_cancel(twin: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinity has the largest number's scale, not NaN; sums go by the lowest bit of a channel first."""
    monkeypatch.setattr(index, "call", launches(twin, seed=1))
    iq = torch.zeros(1, HEADS, WIDTH).bfloat16()
    iq[0, 0, :2] = 3e38
    iq[0, 1, 0], iq[0, 1, 4], iq[0, 1, 64] = 2.0**30, 1.0, -(2.0**30)
    want = mxfp4_round(cpu.hadamard(iq))
    assert want[0, 0].isinf().any() and not want.isnan().any() and not want[0, 1, :64].any()
    cos, sin = torch.ones(1, index.ROPE // 2), torch.zeros(1, index.ROPE // 2)
    index.rotate_round(iq, cos, sin, torch.tensor([0]), overlap=True)
    assert torch.equal(iq, want)


def test_scales_up_to_the_limit(twin: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """LIFT leaves room for 2^-62 to 2^64; what is beyond gives NaN, as 255 does."""
    monkeypatch.setattr(index, "call", launches(twin, seed=1))
    monkeypatch.setattr(index, "serves", lambda iq: True)
    codes = torch.tensor([65, 66, 127, 190, 191, 192, 193, 254, 255], dtype=torch.uint8)
    count = len(codes)
    keys = encode_kv(torch.randn(2 * PAGE, WIDTH, generator=generator(1)), 0, Format.MXFP4)
    assert keys.scale is not None
    keys.scale[:count] = codes.unsqueeze(1)
    iq = mxfp4_round(torch.randn(1, HEADS, WIDTH, generator=generator(2))).bfloat16()
    weights = torch.randn(1, HEADS, generator=generator(3)).bfloat16()
    table, slots, out = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([0]), torch.zeros(1, 2 * PAGE)
    positions = torch.tensor([count * RATIO - 1])
    index.scores(iq, weights, keys, table, slots, positions, out, RATIO, PAGE, 0.0125)
    assert out[0, :count].isnan().tolist() == [code > 191 for code in codes.tolist()]
    fits = torch.arange(count)[codes <= 191]
    want = wanted(iq[0], weights[0], decode(keys.take(fits)), 0.0125)
    assert torch.equal(out[0, fits].view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("position", [-1, RATIO - 2, RATIO - 1])
def test_a_row_without_keys_waits(twin: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    """One of its blocks: else the launch would be complete before those ahead of it. Others leave at once."""
    monkeypatch.setattr(index, "call", launches(twin, seed=1))
    monkeypatch.setattr(index, "serves", lambda iq: True)
    iq, out = torch.zeros(1, HEADS, WIDTH).bfloat16(), torch.full((1, 4 * PAGE), 77.0)
    weights, keys = iq[:, :, 0].clone(), encode_kv(torch.randn(PAGE, WIDTH), 0, Format.MXFP4)
    table, slots = torch.zeros(1, 4, dtype=torch.int32), torch.tensor([0])
    with unfinished(twin, iq, weights, out):
        index.scores(iq, weights, keys, table, slots, torch.tensor([position]), out, RATIO, PAGE, 0.0125)
    count = (position + 1) // RATIO
    assert bool(out[0, :count].eq(0).all()) and bool(out[0, count:].eq(77).all())


def test_few_and_many_keys_give_the_same_bits(twin: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which form scores a key depends on how many there are. Every scale, queries of any size, zeros of both
    signs, infinity, NaN, and zero times infinity."""
    monkeypatch.setattr(index, "call", launches(twin, seed=1))
    monkeypatch.setattr(index, "serves", lambda iq: True)
    pages = 40
    count = pages * PAGE
    keys = encode_kv(torch.randn(count, WIDTH, generator=generator(1)), 0, Format.MXFP4)
    assert keys.scale is not None
    keys.data.copy_(torch.randint(0, 256, keys.data.shape, generator=generator(2)))
    keys.scale.copy_(torch.randint(60, 192, keys.scale.shape, generator=generator(3)))
    keys.scale[:256] = torch.arange(256).unsqueeze(1)
    iq = torch.randn(6, HEADS, WIDTH, generator=generator(4))
    weights = torch.randn(6, HEADS, generator=generator(5))
    iq *= 2.0 ** torch.tensor([0, -130, 100, 0, 0, 0]).view(6, 1, 1)
    iq[3, ::2], iq[4, 7, 3], iq[5, 9, 5] = -0.0, torch.inf, torch.nan
    weights[3, :20], weights[3, 20:40], weights[4, :30] = 0.0, -0.0, 0.0
    weights[0, 5] = torch.inf
    monkeypatch.setattr(index, "MAX_ROWS", 6)
    outs = []
    for programs in (1 << 30, 3, 1):
        monkeypatch.setattr(index, "MAX_PROGRAMS", programs)
        outs.append(out := torch.full((6, count), 77.0))
        index.scores(
            iq=mxfp4_round(iq).bfloat16(),
            weights=weights.bfloat16(),
            keys=keys,
            page_table=torch.randperm(pages, generator=generator(6)).int().unsqueeze(0),
            slots=torch.zeros(6, dtype=torch.long),
            positions=torch.full((6,), count * RATIO - 1),
            out=out,
            ratio=RATIO,
            page_entries=PAGE,
            factor=0.0125,
        )
    for row, got in enumerate(outs[0]):
        assert bool(got.isnan().any()) and not bool(got.eq(77).any()), row
        assert row in (0, 4, 5) or bool(got.isfinite().any()), row
        for other in outs[1:]:
            a, b = (it.where(~it.isnan(), torch.nan).view(torch.int32) for it in (got, other[row]))
            assert torch.equal(a, b), row


def test_who_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """index.cu has its own sizes, pages it can shift by, and one row in a cache of any size; more rows where
    Triton adds up in another order. There Triton has one tile, for any number of rows."""
    sizes = {"is_cuda": True, "dtype": torch.bfloat16, "shape": torch.Size((1, HEADS, WIDTH))}
    assert index.serves(SimpleNamespace(**sizes))  # type: ignore[arg-type]
    for name, other in (
        ("is_cuda", False),
        ("dtype", torch.float32),
        ("shape", torch.Size((1, 32, WIDTH))),
        ("shape", torch.Size((1, HEADS, 64))),
    ):
        assert not index.serves(SimpleNamespace(**{**sizes, name: other}))  # type: ignore[arg-type]
    seen: list[str] = []
    monkeypatch.setattr(index, "serves", lambda iq: True)
    monkeypatch.setattr(index, "call", lambda *given, **how: seen.append(f"{how['blocks']} blocks"))
    monkeypatch.setattr(index, "launch", lambda *given, **how: seen.append(f"{how['BLOCK']} keys"))
    for gpu, rows, entries, ratio, page in (
        *((90, 1, 2112, 4, 64), (90, 1, 4225, 4, 64), (90, 1, 262144, 4, 64), (90, 2, 16, 4, 64)),
        *((90, 1, 64, 4, 6), (90, 1, 64, 3, 64), (100, 2, 64, 4, 64), (120, 32, 64, 4, 64)),
        *((90, 1, 64, 4, 6), (100, 1, 64, 4, 6), (120, 1, 64, 4, 6)),
    ):
        monkeypatch.setattr(architectures, "capability", lambda device, gpu=gpu: gpu)
        longs = torch.zeros(rows, dtype=torch.long)
        iq = torch.zeros(rows, HEADS, WIDTH, dtype=torch.bfloat16)
        keys = encode_kv(torch.zeros(page, WIDTH), 0, Format.MXFP4)
        table = torch.zeros(rows, 99, dtype=torch.int32)
        scores = torch.zeros(rows, entries)
        index.scores(iq, iq[:, :, 0].contiguous(), keys, table, longs, longs, scores, ratio, page, 1.0)
    found = ["132 blocks", "264 blocks", "264 blocks", "64 keys", "64 keys", "64 keys"]
    assert seen == [*found, "8 blocks", "128 blocks", "64 keys", "128 keys", "128 keys"]


def test_shared_memory_is_what_the_source_takes() -> None:
    sizes = re.findall(r"sizeof\((?:Few|Many)\) == (\d+)", build.source_path("index/decode").read_text())
    assert max(map(int, sizes)) == index.SHARED_BYTES and len(sizes) == 2
