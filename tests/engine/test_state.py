"""Snapshots, forks and rollback: a sequence goes on exactly as if nothing had happened."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4 import Engine
from dsv4.cache.layout import SPARE
from dsv4.errors import RequestError
from dsv4.lab.score import score_ids
from dsv4.model.step import Step

TEXT = [random.Random(9).randrange(300) for _ in range(300)]
NOISE = [random.Random(10).randrange(300) for _ in range(300)]


@pytest.fixture(scope="module")
def engine(engine_for: Callable[..., Engine]) -> Engine:
    return engine_for("official")


@pytest.fixture(scope="module")
def want(engine: Engine) -> Tensor:
    return score_ids(engine, TEXT, 300)["prefill_logits"]


def feed(engine: Engine, slot: int, start: int, ids: list[int]) -> Tensor:
    model = engine.runner.model
    return model.logits(model.forward(Step.build([(slot, start, ids)], "cpu"), engine.cache))


@pytest.mark.parametrize("position", [0, 1, 3, 4, 7, 8, 31, 40, 62, 127, 128, 130, 255, 256, 259])
def test_snapshot_restores_exactly(engine: Engine, want: Tensor, position: int) -> None:
    """The source goes astray after the snapshot; the same slot and a fork both resume as if it had not."""
    cache = engine.cache
    slot = cache.claim(300)
    assert slot is not None
    if position:
        feed(engine, slot, 0, TEXT[:position])
    snapshot = cache.snapshot(slot, position)
    fork = cache.fork(slot, position, 300)
    assert fork is not None
    feed(engine, slot, position, NOISE[: min(150, 300 - position)])
    for target in (fork, slot):
        cache.restore(target, snapshot)
        stop = min(300, position + 140)
        assert torch.equal(feed(engine, target, position, TEXT[position:stop]), want[position:stop])
    cache.release(slot)
    cache.release(fork)
    assert cache.pool.num_free == cache.pool.num_pages


def test_a_fork_survives_its_source(engine: Engine, want: Tensor) -> None:
    cache = engine.cache
    slot = cache.claim(300)
    assert slot is not None
    feed(engine, slot, 0, TEXT[:260])
    snapshot, fork = cache.snapshot(slot, 260), cache.fork(slot, 260, 300)
    assert fork is not None
    cache.release(slot)
    other = cache.claim(300)
    assert other == slot
    feed(engine, other, 0, NOISE)
    cache.restore(fork, snapshot)
    assert torch.equal(feed(engine, fork, 260, TEXT[260:]), want[260:])
    cache.release(other)
    cache.release(fork)


@pytest.mark.parametrize("length", [1, 3, 4, 6, 40, 47, 126, 127, 128, 130, 200, 255, 258])
def test_rollback_of_drafts(engine: Engine, want: Tensor, length: int) -> None:
    """Up to SPARE wrong tokens are processed and taken back, again and again."""
    cache = engine.cache
    slot = cache.claim(300)
    assert slot is not None
    feed(engine, slot, 0, TEXT[:length])
    for drafts in (1, 3, SPARE):
        feed(engine, slot, length, NOISE[:drafts])
        cache.check_rollback(length + drafts, length)
    assert torch.equal(feed(engine, slot, length, TEXT[length : length + 20]), want[length : length + 20])
    cache.release(slot)


def test_rollback_too_far_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="at most 8"):
        engine.cache.check_rollback(100, 100 - SPARE - 1)


def test_a_reused_slot_leaks_nothing(engine: Engine, want: Tensor) -> None:
    """Short prompts after a long one: the reference itself forgets to reset here."""
    cache = engine.cache
    for length in (1, 2, 3, 5, 127):
        slot = cache.claim(300)
        assert slot is not None
        feed(engine, slot, 0, NOISE[:290])
        cache.release(slot)
        again = cache.claim(300)
        assert again == slot
        assert torch.equal(feed(engine, again, 0, TEXT[:length]), want[:length])
        cache.release(again)
