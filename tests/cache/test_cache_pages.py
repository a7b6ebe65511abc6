"""Pages and slots: who holds what, against simple models of the truth."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsv4.cache.layout import SPARE, CacheLayout
from dsv4.cache.pages import PagePool
from dsv4.cache.store import Cache
from dsv4.config import preset
from dsv4.errors import RequestError
from dsv4.quant.codec import decode
from dsv4.quant.formats import Format, QuantTensor

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


def make_cache(
    slots: int = 3, context: int = 1024, kv: Format = Format.F32, key: Format = Format.F32
) -> Cache:
    return Cache(CacheLayout(preset("tiny"), kv, key, 4, context, slots, 1), "cpu", torch.float32)


def pages_of(cache: Cache, slot: int, tokens: int) -> list[int]:
    return cache.page_table[slot, : cache.pages_for(tokens)].tolist()


def test_claim_and_release() -> None:
    cache = make_cache(slots=2, context=1024)
    assert (cache.layout.page_tokens, cache.pool.num_pages, cache.num_free_slots) == (256, 8, 2)
    first, second = cache.claim(1), cache.claim(1024)
    assert first is not None and second is not None and first != second
    assert cache.pool.num_free == 8 - 1 - 4 and cache.num_free_slots == 0
    assert not set(pages_of(cache, first, 1)) & set(pages_of(cache, second, 1024))
    assert cache.claim(1) is None, "no slot is free"
    cache.release(first)
    assert cache.pool.num_free == 4 and cache.num_free_slots == 1
    assert cache.claim(257) == first and cache.pool.num_free == 2
    cache.release(second)
    cache.release(first)
    assert cache.pool.num_free == 8 and cache.num_free_slots == 2
    with pytest.raises(AssertionError, match="not in use"):
        cache.release(first)


def test_claim_waits_for_pages() -> None:
    cache = make_cache(slots=3, context=512)  # 6 pages
    big = [cache.claim(512), cache.claim(512)]
    fork = cache.fork(big[0], 256, 512)  # type: ignore[arg-type]
    assert fork is not None and cache.pool.num_free == 1
    cache.release(big[0])  # type: ignore[arg-type]
    assert cache.pool.num_free == 2, "the shared page stays with the fork"
    small = cache.claim(1)
    assert small is not None and cache.pool.num_free == 1
    cache.release(small)
    cache.pool.take(1)
    assert cache.claim(512) is None and cache.num_free_slots == 1, "a refused claim takes nothing"
    assert cache.pool.num_free == 1


@pytest.mark.parametrize("call", ["claim", "fork"])
def test_what_can_never_fit_is_refused_with_the_numbers(call: str) -> None:
    cache = make_cache(context=1000)
    slot = cache.claim(10)
    assert slot is not None
    with pytest.raises(RequestError, match="1025 tokens do not fit a cache made for 1000"):
        cache.claim(1025) if call == "claim" else cache.fork(slot, 0, 1025)
    assert cache.num_free_slots == 2


def fill(store: QuantTensor, rows: torch.Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    store.data[rows] = torch.randint(0, 200, (len(rows), store.data.shape[1]), generator=generator).to(
        store.data.dtype
    )


def entry_rows(cache: Cache, layer: int, slot: int, tokens: int) -> torch.Tensor:
    """Pool rows of the complete entries among the first `tokens`."""
    held = cache.layers[layer]
    entry = torch.arange(tokens // held.spec.ratio)
    page = cache.page_table[slot, entry // held.page_entries].long()
    return page * held.page_entries + entry % held.page_entries


@pytest.mark.parametrize("position", [0, 4, 255, 256, 300, 512, 767])
def test_fork_shares_whole_pages_and_copies_the_started_one(position: int) -> None:
    cache = make_cache(slots=3, context=1024)
    source = cache.claim(768)
    assert source is not None
    layers = [i for i, layer in enumerate(cache.layers) if layer.entries is not None]
    for i in layers:
        for store in (cache.layers[i].entries, cache.layers[i].keys):
            if store is not None:
                fill(store, entry_rows(cache, i, source, 768), seed=i)
    fork = cache.fork(source, position, 1024)
    assert fork is not None
    whole = position // 256
    mine, donor = pages_of(cache, fork, 1024), pages_of(cache, source, 768)
    assert mine[:whole] == donor[:whole] and not set(mine[whole:]) & set(donor)
    assert cache.pool.num_free == 12 - 3 - (4 - whole)
    for i in layers:
        for store in (cache.layers[i].entries, cache.layers[i].keys):
            if store is not None:
                ours = decode(store.take(entry_rows(cache, i, fork, position)))
                theirs = decode(store.take(entry_rows(cache, i, source, position)))
                assert torch.equal(ours, theirs), f"layer {i}"
    # The donor may go; what was shared stays until the fork goes too.
    cache.release(source)
    assert cache.pool.num_free == 12 - 4
    cache.release(fork)
    assert cache.pool.num_free == 12


def test_fork_writes_do_not_reach_the_donor() -> None:
    cache = make_cache()
    source = cache.claim(512)
    assert source is not None
    at = entry_rows(cache, 1, source, 512)
    entries = cache.layers[1].entries
    assert entries is not None
    fill(entries, at, seed=1)
    before = entries.data[at].clone()
    fork = cache.fork(source, 300, 1024)
    assert fork is not None
    own = entry_rows(cache, 1, fork, 1024)[300 // 4 :]
    entries.data[own] = -1
    assert torch.equal(entries.data[at], before)


def test_fork_of_an_impossible_position_is_our_bug() -> None:
    cache = make_cache()
    source = cache.claim(256)
    assert source is not None
    with pytest.raises(AssertionError):
        cache.fork(source, 257, 1024)
    with pytest.raises(AssertionError):
        cache.fork(source, 256, 255)


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
    source, target = cache.claim(512), cache.claim(512)
    assert source is not None and target is not None
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
    snapshot = cache.snapshot(source, position)
    # The source moves on; the snapshot must not.
    for layer in cache.layers:
        layer.ring.data[source * layer.ring_rows : (source + 1) * layer.ring_rows] = 0
        for tail in layer.tails:
            tail.values[source], tail.scores[source] = 0, 0
    cache.restore(target, snapshot)
    for got, wanted, other, mask in zip(
        all_state(cache, target), want, others, needed(cache, position), strict=True
    ):
        assert torch.equal(got, torch.where(mask, wanted, other))


def test_rollback_reaches_back_as_far_as_the_rings_do() -> None:
    Cache.check_rollback(100, 100)
    Cache.check_rollback(100, 100 - SPARE)
    for new in (101, 100 - SPARE - 1):
        with pytest.raises(RequestError, match=f"from 100 to {new} tokens; at most {SPARE}"):
            Cache.check_rollback(100, new)
    one = make_cache().layout
    # Positions n-window+1 .. n+SPARE-1 live in the ring together, and both blocks of an overlap in the tail.
    assert one.ring_rows >= one.config.window - 1 + SPARE
    rows = {layer.kind: one.tail_rows(layer) for layer in one.layers if layer.ratio}
    assert rows == {"csa": 8 + SPARE, "hca": 128 + SPARE}


def test_layout_and_dtype_must_agree() -> None:
    one = CacheLayout(preset("tiny"), Format.KV8, Format.MXFP4, 2, 256, 1, 0)
    with pytest.raises(AssertionError):
        Cache(one, "cpu", torch.float32)
