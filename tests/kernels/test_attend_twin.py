"""attention/prefill_sm90.cu's own source on the CPU: attention of a prompt's tokens against the reference,
and packed for the product that follows as packing would."""

import ctypes
import math
from collections.abc import Callable

import pytest
import torch
from prompt_support import on_twin, on_twins, rand
from torch import Tensor

from dsv4.gpu.tiles import empty
from dsv4.ops.attention import cpu
from dsv4.ops.attention import prefill_sm90 as attention
from dsv4.ops.linear import prefill_product as product
from dsv4.ops.linear.prefill_packed import Packed, empty_packed, mode_of
from dsv4.quant.codec import encode_kv
from dsv4.quant.formats import Format
from tests.support.once import folder_of_run
from tests.support.twin import needs_compiler, of_source, unfinished

pytestmark = needs_compiler
Twins = Callable[[str], ctypes.CDLL]
WIDTH, ROPE, RATIO, PAGE = 512, 64, 4, 5
# The value product's weights are rounded by 2^-9 each, relative to another maximum than the reference's, and
# values may cancel: of the largest, twice that on both sides, and one for the rotation.
ROUNDED = 5 * 2.0**-9


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    folder = folder_of_run(tmp_path_factory, "twins")
    return lambda source: of_source(source, folder)


class Case:
    """Sequences of this step, rings that hold what came before, and a pool. What no query may see is NaN."""

    def __init__(
        self, spans: list[tuple[int, int, int]], heads: int = 64, window: int = 70, listed: int = 75
    ) -> None:
        """spans: (slot, first position in this step, tokens)."""
        self.window, self.ring_size = window, window + 8
        slots = 1 + max(slot for slot, _, _ in spans)
        where = [(slot, p, start) for slot, start, count in spans for p in range(start, start + count)]
        self.slots, self.positions, self.first = (torch.tensor(v) for v in zip(*where, strict=True))
        tokens = len(where)
        self.ring = torch.full((slots * self.ring_size, WIDTH), math.nan).bfloat16()
        for slot, start, _ in spans:
            for p in range(max(0, start - window + 1), start):
                self.ring[slot * self.ring_size + p % self.ring_size] = rand(WIDTH, seed=1000 * slot + p)
        self.fresh, self.pool = rand(tokens, WIDTH, seed=1).bfloat16(), rand(50, WIDTH, seed=2).bfloat16()
        good = torch.tensor([row for row in range(50) if row % 7])
        pick = torch.randint(len(good), (tokens, listed), generator=torch.Generator().manual_seed(3))
        self.rows = good[pick].int()
        for t in range(tokens):
            self.rows[t, t * 31 % (listed + 1) :] = -1
        self.rows[-1, ::2] = -1
        self.table: Tensor | None = None
        self.q, self.sinks = 2 * rand(tokens, heads, WIDTH, seed=4).bfloat16(), rand(heads, seed=5)
        angle = rand(tokens, ROPE // 2, seed=6)
        self.cos, self.sin = angle.cos(), angle.sin()

    def see_all(self) -> None:
        """Entries by the page table instead of a list."""
        pages = torch.randperm(10, generator=torch.Generator().manual_seed(0))
        self.table = pages.int().view(2, 5)

    def hide(self) -> None:
        """What no list names."""
        self.pool[::7] = math.nan

    def run(
        self,
        twins: Twins,
        has_pool: bool = True,
        eps: float | None = None,
        to: Packed | None = None,
        seed: int = 0,
    ) -> Tensor:
        twin, out = twins("attention/prefill_sm90"), torch.full_like(self.q, math.nan)
        keys = torch.cat((self.ring, self.fresh, *([self.pool] if has_pool else [])))
        lists = [] if self.table is not None else [self.rows]
        late = self.q, keys, self.slots, self.positions, self.first, self.cos, self.sin, *lists
        with on_twin(twin, attention, seed), unfinished(twin, *late):
            attention.attend(
                q=self.q,
                keys=keys,
                out=out if to is None else to,
                slots=self.slots,
                positions=self.positions,
                first=self.first,
                window=self.window,
                ring_size=self.ring_size,
                ring_rows=len(self.ring),
                has_pool=has_pool,
                rows=self.rows if has_pool and self.table is None else None,
                page_table=self.table if has_pool else None,
                ratio=RATIO,
                page_entries=PAGE,
                sinks=self.sinks,
                cos=self.cos,
                sin=self.sin,
                eps=eps,
            )
        return out

    def reference(self, has_pool: bool = True, eps: float | None = None, tokens: int | None = None) -> Tensor:
        """Of the first tokens; None: of all."""
        kept = self.fresh[:tokens], self.ring, self.pool
        fresh, ring, pool = (encode_kv(it, ROPE, Format.BF16) for it in kept)
        return cpu.attend(
            q=self.q[:tokens],
            fresh=fresh,
            ring=ring,
            slots=self.slots[:tokens],
            positions=self.positions[:tokens],
            first=self.first[:tokens],
            window=self.window,
            ring_size=self.ring_size,
            pool=pool if has_pool else None,
            rows=self.rows[:tokens].long() if has_pool and self.table is None else None,
            sinks=self.sinks,
            cos=self.cos[:tokens],
            sin=self.sin[:tokens],
            page_table=self.table,
            ratio=RATIO,
            page_entries=PAGE,
            eps=eps,
        )


def near(got: Tensor, want: Tensor, share: float = ROUNDED) -> None:
    assert got.isfinite().all()
    assert float((got.double() - want.double()).abs().max()) <= share * float(want.abs().max())


# One key; less than a block of 64, and more; a window that lies in the ring, in the step, in both.
SPANS = [(1, 0, 2), (0, 60, 3), (2, 200, 2)]


@pytest.mark.parametrize("has_pool", [False, True])
def test_the_reference(twins: Twins, has_pool: bool) -> None:
    case = Case(SPANS)
    case.hide()
    got = case.run(twins, has_pool)
    near(got, case.reference(has_pool))
    assert torch.equal(case.run(twins, has_pool, seed=1), got), "the order of events shows"


def test_two_groups_of_heads_that_are_normed_here(twins: Twins) -> None:
    case = Case([(0, 40, 2)], heads=128)
    near(case.run(twins, eps=1e-6), case.reference(eps=1e-6), share=2 * ROUNDED)


def test_every_visible_entry(twins: Twins) -> None:
    """As with a list of them; a token at position -1 attends to nothing."""
    case = Case([(1, 90, 2), (0, 3, 1), (0, -1, 1)])
    case.see_all()
    got = case.run(twins)
    near(got[:3], case.reference(tokens=3))
    assert not got[3].any()


def test_results_packed_for_their_product(twins: Twins) -> None:
    """Byte for byte what packing makes of the result; rows of every size, a NaN among them."""
    case = Case([(0, 3, 16)], window=8, listed=3)
    case.fresh = (case.fresh.float() * 2.0 ** (torch.arange(16) * 7 % 41 - 20).unsqueeze(1)).bfloat16()
    case.q[8, 5, 7] = math.nan
    plain = case.run(twins)
    is_nan = torch.isnan(plain).any(-1)
    assert int(is_nan.sum()) == 1 and bool(is_nan[8, 5]), "NaN is where it was, and nowhere else"
    for format in (Format.NVFP4, Format.FP8, Format.BF16):
        weight = empty(format, (64, 8 * WIDTH), 1, 1, "cpu")
        to = empty_packed(mode_of(weight, "a16"), 16, 8 * WIDTH, torch.device("cpu"), matrices=8)
        case.run(twins, to=to)
        with on_twins(twins, product):
            want = product.pack(plain.view(16, 8, 8 * WIDTH), weight)
        used = to.mode.blocks * to.mode.group_bytes + to.mode.undo_bytes
        assert to.data.shape == want.data.shape == (8, 8, to.mode.slice_bytes)
        assert torch.equal(to.data[..., :used], want.data[..., :used]), format


@pytest.mark.parametrize("sink", [-math.inf, 80.0, math.inf])
def test_extreme_sinks_and_scores(twins: Twins, sink: float) -> None:
    case = Case([(0, 70, 1)])
    case.sinks = torch.full((64,), sink)
    # Of what a large sink leaves, more cancels than of others.
    near(case.run(twins), case.reference(), share=2 * ROUNDED)
    case.q *= 100
    near(case.run(twins), case.reference(), share=2 * ROUNDED)
