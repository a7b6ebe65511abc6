"""Slots, pages and snapshots reused while steps are in flight: every answer is that of the request alone."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dsv4 import Engine, EngineConfig
from dsv4.lab.bench.engine import around
from dsv4.lab.bench.subject import synthetic
from tests.support.stress import cases, growing, stress, truth

# More rows than the largest graph, fewer pages than they need: parts, pauses and evictions.
MANY = {"max_batch": 40, "max_context": 1536, "cache_pages": 90, "prefix_snapshots": 12, "chunk": 700}


@pytest.mark.parametrize("longest", [17, pytest.param(150, marks=pytest.mark.slow)])
def test_on_a_cpu(engine_for: Callable[..., Engine], longest: int) -> None:
    options = {"max_context": 1100, "weights": "dense"}
    wanted = cases(12, vocab=300, page=256, longest=longest)
    alone = truth(engine_for("modelopt", max_batch=1, prefix_snapshots=0, speculate="off", **options), wanted)
    engine = engine_for("modelopt", max_batch=3, cache_pages=8, prefix_snapshots=3, **options)
    assert stress(engine, wanted, alone, requests=30) > 20


@pytest.mark.gpu
def test_pauses() -> None:
    """A paused sequence's tokens are processed again the way they were first: the answer stays."""
    wanted = growing(10, vocab=4000, page=256)
    single = EngineConfig(device="cuda", max_context=512, max_batch=1, prefix_snapshots=0)
    alone = truth(Engine.load(None, single), wanted)
    engine = Engine.load(None, replace(single, max_batch=6, cache_pages=8, prefix_snapshots=4))
    assert stress(engine, wanted, alone, requests=120) > 60 and engine.scheduler.num_pauses > 20


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 5, 40])
def test_the_embedded_model(batch: int) -> None:
    config = EngineConfig(device="cuda", max_context=1536)
    wanted = cases(40, vocab=4000, page=256, seed=batch)
    alone = truth(Engine.load(None, replace(config, max_batch=1, prefix_snapshots=0)), wanted)
    options = {**MANY, "max_batch": batch, "cache_pages": max(8, min(60, 2 * batch))}
    engine = Engine.load(None, EngineConfig(device="cuda", **options))  # type: ignore[arg-type]
    begin = time.perf_counter()
    compared = stress(engine, wanted, alone, requests=600)
    print(f"batch {batch}: {compared} answers in {time.perf_counter() - begin:.0f} s")
    assert compared > 400


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "experts"), [("flash", 16), ("pro", 8)])
def test_published_widths(model: str, experts: int) -> None:
    """Six layers, every kind: real widths, real vocabulary."""
    subject = synthetic(model, experts, 6, "nvfp4")
    bundle = subject.bundle(torch.device("cuda:0"))
    wanted = cases(40, vocab=129000, page=256, seed=3)
    alone = truth(
        around(bundle, EngineConfig(device="cuda", max_batch=1, max_context=1536, prefix_snapshots=0)), wanted
    )
    for batch in (1, 4, 40):
        options = {**MANY, "max_batch": batch, "cache_pages": max(8, min(60, 2 * batch))}
        engine = around(bundle, EngineConfig(device="cuda", **options))  # type: ignore[arg-type]
        assert stress(engine, wanted, alone, requests=500, seed=batch) > 350
