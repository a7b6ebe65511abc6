"""Snapshots and rollback: a sequence goes on exactly as if nothing had happened."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4 import Engine
from dsv4.cache.layout import SPARE
from dsv4.lab.score import score_ids
from tests.support.feeding import cache_of, claim, feed, release, settle

TEXT = [random.Random(9).randrange(300) for _ in range(300)]
NOISE = [random.Random(10).randrange(300) for _ in range(300)]


@pytest.fixture(scope="module")
def engine(engine_for: Callable[..., Engine]) -> Engine:
    return engine_for("official")


@pytest.fixture(scope="module")
def want(engine: Engine) -> Tensor:
    return score_ids(engine, TEXT, 300)["prefill_logits"]


@pytest.mark.parametrize("position", [0, 1, 3, 4, 7, 8, 31, 40, 62, 127, 128, 130, 255, 256, 259])
def test_snapshot_restores_exactly(engine: Engine, want: Tensor, position: int) -> None:
    """The sequence goes astray after the snapshot, and resumes as if it had not."""
    cache, slot = cache_of(engine), claim(engine, 300)
    if position:
        feed(engine, slot, 0, TEXT[:position])
    cache.save(7, slot, position)
    pages = cache.page_table[slot].clone()
    entries = [layer.entries.data.clone() for layer in cache.layers if layer.entries is not None]
    feed(engine, slot, position, NOISE[: min(150, 300 - position)])
    assert torch.equal(cache.page_table[slot], pages)
    cache.restore(slot, 7)
    stop = min(300, position + 140)
    assert torch.equal(feed(engine, slot, position, TEXT[position:stop]), want[position:stop])
    cache.drop(7)
    release(engine, slot)
    assert entries and engine.slots.pool.num_free == engine.slots.pool.num_pages


def test_a_snapshot_survives_its_slot(engine: Engine, want: Tensor) -> None:
    """Another sequence takes the slot and fills it; a third goes on from the snapshot and that page."""
    cache, slot = cache_of(engine), claim(engine, 300)
    feed(engine, slot, 0, TEXT[:256])
    cache.save(8, slot, 256)
    page = engine.slots.page_at(slot, 0)
    engine.slots.pool.share([page])
    release(engine, slot)
    other = claim(engine, 300)
    assert other == slot
    feed(engine, other, 0, NOISE)
    third = engine.slots.claim(engine.next_number(), 300, [page])
    assert third is not None
    settle(engine)
    cache.restore(third, 8)
    assert torch.equal(feed(engine, third, 256, TEXT[256:]), want[256:])
    cache.drop(8)
    release(engine, other, third)
    engine.slots.pool.release([page])


@pytest.mark.parametrize("length", [1, 3, 4, 6, 40, 47, 126, 127, 128, 130, 200, 255, 258])
def test_rollback_of_drafts(engine: Engine, want: Tensor, length: int) -> None:
    """Up to SPARE wrong tokens are processed and taken back, again and again."""
    slot = claim(engine, 300)
    feed(engine, slot, 0, TEXT[:length])
    for drafts in (1, 3, SPARE):
        feed(engine, slot, length, NOISE[:drafts])
    assert torch.equal(feed(engine, slot, length, TEXT[length : length + 20]), want[length : length + 20])
    release(engine, slot)


def test_a_reused_slot_leaks_nothing(engine: Engine, want: Tensor) -> None:
    """Short prompts after a long one: the reference itself forgets to reset here."""
    for length in (1, 2, 3, 5, 127):
        slot = claim(engine, 300)
        feed(engine, slot, 0, NOISE[:290])
        release(engine, slot)
        again = claim(engine, 300)
        assert again == slot
        assert torch.equal(feed(engine, again, 0, TEXT[:length]), want[:length])
        release(engine, again)
