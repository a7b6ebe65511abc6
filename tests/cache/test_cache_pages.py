"""Pages and slots: who holds what, against simple models of the truth."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsv4.cache.layout import SPARE, CacheLayout
from dsv4.cache.pages import PagePool
from dsv4.cache.slots import Slots
from dsv4.cache.store import Cache
from dsv4.config import preset
from dsv4.errors import RequestError
from dsv4.quant.codec import decode
from dsv4.quant.formats import Format

NUM_PAGES = 7


class PoolMachine(RuleBasedStateMachine):
    """The pool against a list of holders, each a set of pages."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.holders: list[list[int]] = []

    def held(self) -> set[int]:
        return {page for pages in self.holders for page in pages}

    @rule(count=st.integers(0, NUM_PAGES + 1))
    def take(self, count: int) -> None:
        before = self.held()
        if count > NUM_PAGES - len(before):
            with pytest.raises(RequestError, match=f"{count} cache pages are needed"):
                self.pool.take(count)
            return
        pages = self.pool.take(count)
        assert len(set(pages)) == count and not before & set(pages)
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        donor = data.draw(st.sampled_from(self.holders))
        pages = donor[: data.draw(st.integers(0, len(donor)))]
        self.pool.share(pages)
        self.holders.append(list(pages))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(pages)

    @rule(page=st.integers(0, NUM_PAGES - 1))
    def never_twice(self, page: int) -> None:
        if page not in self.held():
            with pytest.raises(AssertionError, match="released twice"):
                self.pool.release([page])
            with pytest.raises(AssertionError, match="is free"):
                self.pool.share([page])

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.num_free == NUM_PAGES - len(self.held())


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def layout(
    slots: int = 3, context: int = 1024, kv: Format = Format.F32, key: Format = Format.F32
) -> CacheLayout:
    return CacheLayout(preset("tiny"), kv, key, 4, context, slots, 1)


def test_claim_and_release() -> None:
    slots = Slots(layout(slots=2, context=1024))
    assert (slots.layout.page_tokens, slots.pool.num_pages, slots.num_free) == (256, 8, 2)
    first, second = slots.claim(10, 1), slots.claim(11, 1024)
    assert first is not None and second is not None and first != second
    assert slots.pool.num_free == 8 - 1 - 4 and slots.num_free == 0
    ((_, a, pages_a), (_, b, pages_b)) = slots.take_claims()
    assert (a, b, len(pages_a), len(pages_b)) == (10, 11, 1, 4) and not set(pages_a) & set(pages_b)
    assert slots.claim(12, 1) is None, "no slot is free"
    slots.release(first)
    assert slots.pool.num_free == 4 and slots.num_free == 1
    assert slots.claim(13, 257) == first and slots.pool.num_free == 2
    assert slots.take_freed() == (first,) and slots.take_freed() == ()
    assert [(slot, sequence) for slot, sequence, _ in slots.take_claims()] == [(first, 13)]
    slots.release(second)
    slots.release(first)
    assert slots.pool.num_free == 8 and slots.num_free == 2 and slots.take_claims() == ()
    with pytest.raises(AssertionError, match="not in use"):
        slots.release(first)


def test_claim_waits_for_pages() -> None:
    slots = Slots(layout(slots=3, context=512))  # 6 pages
    big = slots.claim(0, 512), slots.claim(1, 512)
    assert big[0] is not None and big[1] is not None
    shared = [slots.page_at(big[0], 0)]
    other = slots.claim(2, 512, shared)
    assert other is not None and slots.pool.num_free == 1
    assert slots.page_at(other, 0) == shared[0] and slots.page_at(other, 256) != slots.page_at(big[0], 256)
    slots.release(big[0])
    assert slots.pool.num_free == 2, "the shared page stays with the other"
    small = slots.claim(3, 1)
    assert small is not None and slots.pool.num_free == 1
    slots.release(small)
    slots.pool.take(1)
    assert slots.claim(4, 512) is None and slots.num_free == 1, "a refused claim takes nothing"
    assert slots.pool.num_free == 1


def test_growing_is_told_once_and_keeps_the_pages_there_are() -> None:
    slots = Slots(layout(slots=1, context=1024))
    slot = slots.claim(5, 100)
    assert slot is not None
    ((_, _, before),) = slots.take_claims()
    assert slots.grow(slot, 256) and slots.take_claims() == () and slots.capacity(slot) == 256
    assert slots.grow(slot, 257) and slots.grow(slot, 700)
    ((_, owner, after),) = slots.take_claims()
    assert owner == 5 and after[:1] == before and len(after) == 3 and slots.take_claims() == ()


@pytest.mark.parametrize("call", ["claim", "grow"])
def test_what_can_never_fit_is_refused_with_the_numbers(call: str) -> None:
    slots = Slots(layout(context=1000))
    slot = slots.claim(0, 10)
    assert slot is not None
    with pytest.raises(RequestError, match="1025 tokens do not fit a cache made for 1000"):
        slots.claim(1, 1025) if call == "claim" else slots.grow(slot, 1025)
    assert slots.num_free == 2


def make_cache(kv: Format = Format.F32, key: Format = Format.F32) -> Cache:
    return Cache(layout(kv=kv, key=key), "cpu", torch.float32)


def all_state(cache: Cache, slot: int) -> list[torch.Tensor]:
    out = []
    for layer in cache.layers:
        rows = slot * layer.ring_rows + torch.arange(layer.ring_rows)
        out.append(decode(layer.ring.take(rows)))
        out += [part[slot] for tail in layer.tails for part in (tail.values, tail.scores)]
    return out


def needed(cache: Cache, position: int) -> list[torch.Tensor]:
    """Which numbers of all_state a sequence needs to go on at `position`: by the rules, one row at a time."""
    window, out = cache.layout.config.window, []
    for layer in cache.layers:
        mask = torch.zeros(layer.ring_rows, cache.layout.config.head_dim, dtype=torch.bool)
        for p in range(max(0, position - window + 1), position):
            mask[p % layer.ring_rows] = True
        out.append(mask)
        ratio = layer.spec.ratio
        for tail in layer.tails:
            mask = torch.zeros(tail.values.shape[1:], dtype=torch.bool)
            opened = position // ratio * ratio
            for p in range(opened, position):
                mask[p % tail.num_rows] = True
            if layer.spec.kind == "csa":
                for p in range(max(0, opened - ratio), opened):
                    mask[p % tail.num_rows, : mask.shape[1] // 2] = True
            out += [mask, mask]
    return out


@pytest.mark.parametrize("position", [0, 1, 3, 4, 7, 63, 64, 127, 128, 130, 256, 301])
@pytest.mark.parametrize(("kv", "key"), [(Format.F32, Format.F32), (Format.KV8, Format.MXFP4)])
def test_restore_brings_back_exactly_what_is_needed(position: int, kv: Format, key: Format) -> None:
    cache = make_cache(kv=kv, key=key)
    source, target = 0, 2
    generator = torch.Generator().manual_seed(position)
    for layer in cache.layers:
        codes = torch.randint(0, 120, layer.ring.data.shape, generator=generator)
        layer.ring.data.copy_(codes.to(layer.ring.data.dtype))
        if layer.ring.scale is not None:
            layer.ring.scale.fill_(127)
        for tail in layer.tails:
            tail.values.copy_(torch.randn(tail.values.shape, generator=generator))
            tail.scores.copy_(torch.randn(tail.scores.shape, generator=generator))
    want = [part.clone() for part in all_state(cache, source)]
    others = [part.clone() for part in all_state(cache, target)]
    cache.save(3, source, position)
    # The source moves on; the snapshot must not.
    for layer in cache.layers:
        layer.ring.data[source * layer.ring_rows : (source + 1) * layer.ring_rows] = 0
        for tail in layer.tails:
            tail.values[source], tail.scores[source] = 0, 0
    cache.restore(target, 3)
    for got, wanted, other, mask in zip(
        all_state(cache, target), want, others, needed(cache, position), strict=True
    ):
        assert torch.equal(got, torch.where(mask, wanted, other))


def test_rings_and_tails_have_room_for_what_is_taken_back() -> None:
    one = layout()
    # Positions n-window+1 .. n+SPARE-1 live in the ring together, and both blocks of an overlap in the tail.
    assert one.ring_rows >= one.config.window - 1 + SPARE
    rows = {layer.kind: one.tail_rows(layer) for layer in one.layers if layer.ratio}
    assert rows == {"csa": 8 + SPARE, "hca": 128 + SPARE}


def test_layout_and_dtype_must_agree() -> None:
    one = CacheLayout(preset("tiny"), Format.KV8, Format.MXFP4, 2, 256, 1, 0)
    with pytest.raises(AssertionError):
        Cache(one, "cpu", torch.float32)
