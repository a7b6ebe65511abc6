"""The GPU backends of attention and index selection against the reference: rings, pages, windows, padding."""

import math
import random

import pytest
import torch
from gpu_support import DEVICE, DTYPES, IS_GPU, MARKS, move, near, tiled, to, use_stand_ins
from ops_support import rand
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
from dsv4.ops.attention import cpu as attention_cpu
from dsv4.ops.attention import prefill as attention_prefill
from dsv4.ops.index import cpu as index_cpu
from dsv4.ops.index import prefill as index_prefill
from dsv4.ops.linear import prefill as linear_prefill
from dsv4.ops.linear import prefill_product as prompts
from dsv4.ops.linear.prefill_packed import Packed
from dsv4.quant.codec import encode_kv, encode_weight
from dsv4.quant.formats import Format, QuantTensor, join

pytestmark = MARKS
# The value product's weights are rounded by 2^-9 each, relative to another maximum than the reference's, and
# values may cancel: of the largest, twice that on both sides, and one for the rotation.
ROUNDED = 5 * 2.0**-9


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)


class Case:
    """Sequences of this step with rings that hold what came before, and a pool with listed rows."""

    def __init__(
        self,
        spans: list[tuple[int, int, int]],
        dtype: torch.dtype,
        format: Format = Format.KV8,
        heads: int = 6,
        width: int = 80,
        rope: int = 16,
        window: int = 40,
        listed: int = 21,
    ) -> None:
        """spans: (slot, first position in this step, tokens). What no query may see is NaN."""
        self.window, self.ring_size = window, window + 8
        slots = 1 + max(slot for slot, _, _ in spans)
        at = [(slot, p, start) for slot, start, count in spans for p in range(start, start + count)]
        self.slots, self.positions, self.first = (torch.tensor(v) for v in zip(*at, strict=True))
        tokens = len(at)
        ring = torch.full((slots * self.ring_size, width), math.nan)
        for slot, start, _ in spans:
            for p in range(max(0, start - window + 1), start):
                ring[slot * self.ring_size + p % self.ring_size] = rand(width, seed=1000 * slot + p)
        self.ring = encode_kv(ring.to(dtype), rope, format)
        self.fresh = encode_kv(rand(tokens, width, seed=1).to(dtype), rope, format)
        pool = rand(50, width, seed=2)
        pool[::7] = math.nan
        self.pool = encode_kv(pool.to(dtype), rope, format)
        good = torch.tensor([row for row in range(50) if row % 7])
        pick = torch.randint(0, len(good), (tokens, listed), generator=torch.Generator().manual_seed(3))
        self.rows = good[pick]
        for t in range(tokens):
            self.rows[t, t % (listed + 1) :] = -1
        self.rows[-1, ::2] = -1
        self.q = 2 * rand(tokens, heads, width, seed=4).to(dtype)
        self.sinks = rand(heads, seed=5)
        angle = rand(tokens, rope // 2, seed=6)
        self.cos, self.sin = angle.cos(), angle.sin()

    def arguments(self, pool: bool, only: int | None = None) -> list:
        """Of all tokens, or of one alone, whose step then begins at its own position."""
        pick = slice(None) if only is None else slice(only, only + 1)
        fresh, ring, first = self.fresh, self.ring, self.first
        if only is not None:
            # What the step had before this token lies in the ring now.
            data, scale = ring.data.clone(), None if ring.scale is None else ring.scale.clone()
            ring = QuantTensor(ring.format, data, ring.shape, scale, rope_dim=ring.rope_dim)
            slot, p, start = (int(v[only]) for v in (self.slots, self.positions, self.first))
            before = torch.arange(max(start, p - self.window + 1), p)
            ring.put(slot * self.ring_size + before % self.ring_size, fresh.take(only - (p - before)))
            fresh, first = fresh.take(torch.tensor([only])), self.positions
        return [
            *(self.q[pick], fresh, ring, self.slots[pick], self.positions[pick], first[pick], self.window),
            *(self.ring_size, self.pool if pool else None, self.rows[pick] if pool else None),
            *(self.sinks, self.cos[pick], self.sin[pick]),
        ]


def run(arguments: list) -> Tensor:
    there = [
        move(a) if isinstance(a, QuantTensor) else a.to(DEVICE) if isinstance(a, Tensor) else a
        for a in arguments
    ]
    return attention_prefill.attend(*there)


SPANS = [(2, 0, 3), (0, 60, 3), (1, 39, 2), (3, 200, 1)]


@DTYPES
@pytest.mark.parametrize(("has_pool", "is_decoded"), [(False, True), (True, True), (True, False)])
def test_attend(
    has_pool: bool, is_decoded: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of the ring, of this step and of the pool; a pool decoded beforehand or row by row."""
    if not is_decoded:
        monkeypatch.setattr(attention_prefill, "DECODED_BYTES", 0)
    case = Case(SPANS, dtype)
    want = attention_cpu.attend(*case.arguments(has_pool))
    got = run(case.arguments(has_pool))
    near(got, want, dtype, "attend", share=ROUNDED)
    for t in (4, 7) if IS_GPU else (4,):
        assert torch.equal(run(case.arguments(has_pool, only=t))[0], got[t]), f"token {t}"
    wider = case.arguments(has_pool)
    if has_pool:
        wider[9] = torch.cat((wider[9], torch.full((9, 70), -1)), dim=1).int()
        assert torch.equal(run(wider), got), "padding changes no bit"


@DTYPES
@pytest.mark.parametrize("is_decoded", [True, False])
def test_every_visible_entry_through_the_page_table(
    is_decoded: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a list: as with one of all that a query sees. Padding attends to nothing and changes no bit."""
    if not is_decoded:
        monkeypatch.setattr(attention_prefill, "DECODED_BYTES", 0)
    case = Case([(1, 60, 3), (0, 3, 2)], dtype)
    case.pool = encode_kv(rand(50, 80, seed=2).to(dtype), 16, Format.KV8)
    table = torch.tensor([[3, 0, 7, 9], [8, 2, 5, 1]], dtype=torch.int32)
    arguments = case.arguments(True)
    arguments[9] = index_cpu.visible_rows(table, case.slots, case.positions, 4, 5)
    listed = run(arguments)
    arguments[9] = None
    arguments += [table, 4, 5]
    assert torch.equal(run(arguments), listed)
    near(listed, attention_cpu.attend(*arguments), dtype, "all", share=ROUNDED)
    padded = [*arguments]
    for i, value in ((0, 1.0), (3, 0), (4, -1), (5, 0), (11, 1.0), (12, 0.0)):
        more = torch.full((2, *padded[i].shape[1:]), value, dtype=padded[i].dtype)
        padded[i] = torch.cat((padded[i], more))
    padded[1] = join([padded[1], padded[1].span(0, 2)])
    assert torch.equal(run(padded)[:5], listed)


@DTYPES
def test_queries_as_their_product_left_them(dtype: torch.dtype) -> None:
    """Norm and rotation inside: within a rounding of q of the reference, which rounds once more."""
    case = Case(SPANS, dtype)
    arguments = [*case.arguments(True), None, 0, 0, 1e-6]
    got = run(arguments)
    near(got, attention_cpu.attend(*arguments), dtype, "raw", share=2 * ROUNDED)
    alone = run([*case.arguments(True, only=4), None, 0, 0, 1e-6])
    assert torch.equal(alone[0], got[4])


@pytest.mark.parametrize("format", [Format.F32, Format.BF16])
def test_plain_stores(format: Format) -> None:
    dtype = torch.float32 if format is Format.F32 else torch.bfloat16
    case = Case([(0, 5, 4)], dtype, format, heads=17, width=48, rope=8)
    near(
        run(case.arguments(True)), attention_cpu.attend(*case.arguments(True)), dtype, "plain", share=ROUNDED
    )


def test_extreme_sinks_and_scores() -> None:
    case = Case([(0, 0, 3)], torch.float32)
    for value in (-math.inf, -3.0, 80.0, 1e4, math.inf):
        case.sinks = torch.full((6,), value)
        near(
            run(case.arguments(False)),
            attention_cpu.attend(*case.arguments(False)),
            torch.float32,
            f"{value}",
        )
    case.sinks, case.q = torch.zeros(6), case.q * 1e3
    near(
        run(case.arguments(True)), attention_cpu.attend(*case.arguments(True)), torch.float32, "large scores"
    )


def test_nothing_to_attend() -> None:
    case = Case([(0, 0, 3)], torch.float32)
    arguments = case.arguments(True)
    arguments[9] = arguments[9][:, :0]
    assert torch.equal(run(arguments), run(case.arguments(False)))
    empty = case.arguments(False)
    for i in (0, 3, 4, 5, 11, 12):
        empty[i] = empty[i][:0]
    empty[1] = empty[1].span(0, 0)
    assert run(empty).shape == (0, 6, 80)


needs_gpu = pytest.mark.skipif(not IS_GPU, reason="the published sizes need a GPU")
FLASH = {"rope": 64, "width": 512, "window": 128}


@needs_gpu
@DTYPES
def test_attend_at_flash_sizes(dtype: torch.dtype) -> None:
    case = Case([(0, 500, 70), (1, 0, 10)], dtype, heads=64, listed=600, **FLASH)
    near(
        run(case.arguments(True)), attention_cpu.attend(*case.arguments(True)), dtype, "flash", share=ROUNDED
    )


@needs_gpu
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("has_pool", [True, False])
def test_a_token_of_published_sizes_has_its_bits_anywhere(heads: int, has_pool: bool) -> None:
    """Alone and among others, at the edges of the window and of blocks of keys, whatever pads its list."""
    spans = [(0, 500, 70), (1, 0, 10), (2, 127, 3), (3, 62, 4), (4, 0, 140)]
    case = Case(spans, torch.bfloat16, heads=heads, listed=200, **FLASH)
    raw = [None, 0, 0, 1e-6]
    got = run([*case.arguments(has_pool), *raw])
    want = attention_cpu.attend(*case.arguments(has_pool), *raw)
    near(got, want, torch.bfloat16, "raw", share=2 * ROUNDED)
    assert torch.equal(run([*case.arguments(has_pool), *raw]), got), "a second run differs"
    for t in (0, 1, 63, 64, 69, 70, 71, 79, 80, 82, 83, 86, 87, 150, 214, 226):
        alone = run([*case.arguments(has_pool, only=t), *raw])
        assert torch.equal(alone[0], got[t]), f"token {t}"
    if has_pool:
        wider = case.arguments(True)
        wider[9] = torch.cat((wider[9], torch.full((len(wider[9]), 333), -1)), dim=1)
        assert torch.equal(run([*wider, *raw]), got), "padding changes no bit"


@needs_gpu
@pytest.mark.parametrize("format", [Format.NVFP4, Format.FP8, Format.BF16])
@pytest.mark.parametrize(("tokens", "heads"), [(48, 64), (83, 128), (1, 64)])
def test_results_packed_for_their_product(format: Format, tokens: int, heads: int) -> None:
    """Byte for byte what packing makes of the result; rows of every size, a NaN among them."""
    case = Case([(0, 100, tokens)], torch.bfloat16, heads=heads, **FLASH)
    sizes = 2.0 ** (torch.arange(tokens) * 7 % 41 - 20)
    case.fresh = encode_kv((rand(tokens, 512, seed=1) * sizes.unsqueeze(1)).bfloat16(), 64, Format.KV8)
    case.q[tokens // 2, 5, 7] = math.nan
    held = tiled(encode_weight(rand(heads * 8, 4096, seed=8).bfloat16(), format))
    plain = run(case.arguments(True))
    got = run([*case.arguments(True), None, 0, 0, None, held])
    want = prompts.pack(plain.view(tokens, -1, 4096), held)
    assert isinstance(got, Packed) and got.mode == want.mode and got.matrices == want.matrices
    if tokens % 16 == 0:  # padding is whatever was there
        used = got.mode.blocks * got.mode.group_bytes + got.mode.undo_bytes
        assert torch.equal(got.data[..., :used], want.data[..., :used])
    y, z = linear_prefill.grouped(got, held), linear_prefill.grouped(plain, held)
    assert torch.equal(y.view(torch.int16), z.view(torch.int16))


@needs_gpu
def test_published_sizes_through_the_page_table() -> None:
    """As with a list of all that a query sees; tokens at position -1 attend to nothing, and have no NaN."""
    case = Case([(1, 600, 30), (0, 3, 2), (2, 60, 9)], torch.bfloat16, heads=64, **FLASH)
    pages = torch.randperm(210, generator=torch.Generator().manual_seed(0)).int()
    table = pages.view(3, 70)
    case.pool = encode_kv(rand(210 * 5, 512, seed=2).bfloat16(), 64, Format.KV8)
    arguments = case.arguments(True)
    arguments[9] = index_cpu.visible_rows(table, case.slots, case.positions, 4, 5)
    listed = run(arguments)
    arguments[9] = None
    arguments += [table, 4, 5]
    assert torch.equal(run(arguments), listed)
    near(listed, attention_cpu.attend(*arguments), torch.bfloat16, "all", share=ROUNDED)
    padded = [*arguments]
    for i, value in ((0, 1.0), (3, 0), (4, -1), (5, 0), (11, 1.0), (12, 0.0)):
        more = torch.full((2, *padded[i].shape[1:]), value, dtype=padded[i].dtype)
        padded[i] = torch.cat((padded[i], more))
    padded[1] = join([padded[1], padded[1].span(0, 2)])
    got = run(padded)
    assert torch.equal(got[:-2], listed) and not bool(got[-2:].any())


@needs_gpu
def test_extreme_sinks_and_scores_of_published_sizes() -> None:
    case = Case([(0, 100, 9)], torch.bfloat16, heads=64, **FLASH)
    for value in (-math.inf, -3.0, 80.0, 1e4, math.inf):
        case.sinks = torch.full((64,), value)
        want = attention_cpu.attend(*case.arguments(True))
        near(run(case.arguments(True)), want, torch.bfloat16, f"sink {value}", share=ROUNDED)
    case.sinks, case.q = torch.zeros(64), case.q * 100
    want = attention_cpu.attend(*case.arguments(True))
    near(run(case.arguments(True)), want, torch.bfloat16, "large scores", share=ROUNDED)
    case.q[3, 5, 7] = math.nan
    found = torch.isnan(run(case.arguments(True))).cpu()
    assert bool(found[3, 5].all()) and int(found.sum()) == 512, "NaN is where it was, and nowhere else"


RATIO, PAGE = 4, 8


class Pages:
    """Index keys of some sequences in shuffled pages of one pool."""

    def __init__(self, lengths: list[int], width: int, format: Format, dtype: torch.dtype) -> None:
        per_sequence = -(-max(lengths) // PAGE) + 1
        count = 2 * len(lengths) * per_sequence
        numbers = random.Random(0).sample(range(count), len(lengths) * per_sequence)
        self.table = torch.tensor(numbers, dtype=torch.int32).view(len(lengths), per_sequence)
        self.pool = encode_kv(rand(count * PAGE, width).to(dtype), 0, format)


@DTYPES
@pytest.mark.parametrize("format", [Format.MXFP4, Format.BF16])
def test_select(format: Format, dtype: torch.dtype) -> None:
    """Sequences that change within a block of queries, positions at the edges of blocks and pages."""
    if format is Format.BF16 and dtype == torch.float32:
        format = Format.F32
    pages = Pages([70, 9, 40], 64, format, dtype)
    at = (
        [(0, p) for p in range(264, 280)]
        + [(1, p) for p in (0, 2, 3, 35)]
        + [(2, p) for p in range(156, 160)]
    )
    slots, positions = (torch.tensor(v) for v in zip(*at, strict=True))
    # FP4 values and few bits of weight: all sums are exact, so that the order of a sum decides nothing.
    q = index_cpu.mxfp4_round(rand(len(at), 5, 64, seed=1)).to(dtype)
    weights = (rand(len(at), 5, seed=2) * 4).round() / 4
    where = (pages.table, slots, positions)
    for topk in (1, 12, 1000) if IS_GPU else (12, 1000):
        want = index_cpu.select(q, weights, pages.pool, *where, RATIO, PAGE, topk)
        got = index_prefill.select(*to(q, weights), move(pages.pool), *to(*where), RATIO, PAGE, topk)
        if format is Format.MXFP4 or topk > 100:
            assert torch.equal(got.cpu().long(), want), topk
        else:  # products of plain keys are rounded: near ties may fall either way
            assert float((got.cpu().long() != want).float().mean()) < 0.05
        for t in (0, 21) if topk == 12 else ():
            one = [v[t : t + 1] for v in (q, weights, slots, positions)]
            alone = index_prefill.select(
                *to(*one[:2]), move(pages.pool), *to(pages.table, *one[2:]), RATIO, PAGE, topk
            )
            assert torch.equal(alone[0], got[t, : alone.shape[1]]) and bool(
                (got[t, alone.shape[1] :] < 0).all()
            )


def test_select_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties go to the lower entry, all scores may be negative, and a small score buffer changes nothing."""
    pages = Pages([70], 32, Format.MXFP4, torch.float32)
    positions = torch.arange(200, 240)
    where = (pages.table, torch.zeros(40, dtype=torch.long), positions)
    q, weights = index_cpu.mxfp4_round(rand(40, 2, 32, seed=1)), -torch.ones(40, 2)
    q[7] = 0.0
    want = index_cpu.select(q, weights, pages.pool, *where, RATIO, PAGE, 9)
    monkeypatch.setattr(index_prefill, "SCORE_BYTES", 1)
    got = index_prefill.select(*to(q, weights), move(pages.pool), *to(*where), RATIO, PAGE, 9)
    assert torch.equal(got.cpu().long(), want)


def test_a_score_that_is_nan_shows() -> None:
    """Of a query, of a key's scale: relu does not make it zero. (The interpreter's relu never did.)"""
    pages = Pages([8], 32, Format.MXFP4, torch.float32)
    assert pages.pool.scale is not None
    where = (pages.table, torch.zeros(2, dtype=torch.long), torch.tensor([30, 31]))
    q, weights, out = rand(2, 3, 32, seed=1), torch.ones(2, 3), torch.zeros(2, 8, device=DEVICE)
    q[0, 1, 5] = math.nan
    pages.pool.scale[int(pages.table[0, 0]) * PAGE + 4, 0] = 255
    index_prefill._scores(*to(q, weights), move(pages.pool), *to(*where), out, RATIO, PAGE)
    want = torch.zeros(2, 8, dtype=torch.bool)
    want[0, :7] = want[1, 4] = True
    assert torch.equal(torch.isnan(out.cpu()), want)


def test_visible_rows() -> None:
    pages = Pages([70, 9], 32, Format.F32, torch.float32)
    slots, positions = torch.tensor([0, 0, 1, 1, 0]), torch.tensor([0, 3, 35, 2, 279])
    want = index_cpu.visible_rows(pages.table, slots, positions, RATIO, PAGE)
    got = index_prefill.visible_rows(*to(pages.table, slots, positions), RATIO, PAGE)
    assert got.dtype == torch.int32 and torch.equal(got.cpu().long(), want)
    none = torch.tensor([], dtype=torch.long)
    assert index_prefill.visible_rows(*to(pages.table, none, none), RATIO, PAGE).shape == (0, 0)
    assert index_prefill.visible_rows(*to(pages.table, slots[:1], positions[:1]), RATIO, PAGE).shape == (1, 0)
