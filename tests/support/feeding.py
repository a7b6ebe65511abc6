"""Sequences fed by hand, several in a step if need be: the model's own passes, below plans and scheduling."""

from torch import Tensor

from dsv4 import Engine
from dsv4.cache.store import Cache
from dsv4.engine.runner import no_masks
from dsv4.model.step import Step


def cache_of(engine: Engine) -> Cache:
    return engine.runner.executor.cache  # type: ignore[attr-defined]


def claim(engine: Engine, tokens: int) -> int:
    """A slot that the device knows of."""
    slot = engine.slots.claim(engine.next_number(), tokens)
    assert slot is not None
    settle(engine)
    return slot


def release(engine: Engine, *slots: int) -> None:
    for slot in slots:
        engine.slots.release(slot)
    settle(engine)


def settle(engine: Engine) -> None:
    """Carry out what has changed in the cache, and nothing else."""
    assert engine.runner.apply(engine.scheduler.changes(), no_masks) == []


def feed_all(engine: Engine, spans: list[tuple[int, int, list[int]]]) -> Tensor:
    """(slot, start, ids) of each sequence -> logits of all rows."""
    return engine.model.logits(engine.model.forward(Step.build(spans, "cpu"), cache_of(engine)))


def feed(engine: Engine, slot: int, start: int, ids: list[int]) -> Tensor:
    return feed_all(engine, [(slot, start, ids)])
