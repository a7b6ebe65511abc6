"""A prompt step padded for a graph against the same tokens in a step of their own: the same bits."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu_support import DEVICE, MARKS, use_stand_ins
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
from dsv4.cache.layout import CacheLayout
from dsv4.cache.store import Cache
from dsv4.config import LayerSpec, ModelConfig, preset
from dsv4.lab.init import make
from dsv4.model.bundle import Bundle, Numerics
from dsv4.model.model import Model
from dsv4.model.prompt import Prompt
from dsv4.model.step import Mark, Span, Step
from dsv4.ops import Ops
from dsv4.quant.formats import Format
from dsv4.weights.load import Checkpoint

pytestmark = MARKS
CONTEXT = 256
# The products are not what this is about: those of the reference are quick and their rows independent.
OURS = dict.fromkeys(("rows", "mhc", "index", "attention"), "gpu")
OTHERS = dict.fromkeys(("linear", "experts", "route", "sample"), "cpu")


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)


def narrow() -> ModelConfig:
    return replace(
        preset("tiny"),
        **{
            "hidden_size": 64,
            "vocab_size": 100,
            "num_heads": 2,
            "head_dim": 80,
            "rope_dim": 16,
            "q_rank": 32,
        },
        **{"o_groups": 2, "o_rank": 16, "window": 12, "index_heads": 2, "index_dim": 32, "index_topk": 2},
        **{"num_experts": 3, "expert_width": 32, "num_streams": 2, "num_mtp_layers": 0, "max_positions": 512},
        sinkhorn_iters=2,
        layers=(LayerSpec("sliding", 0, True), LayerSpec("csa", 4, False), LayerSpec("hca", 8, False)),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = Path(tmp_path_factory.mktemp("narrow")) / "model"
    for _ in make(folder, narrow(), "bf16", seed=3):
        pass
    opened = Checkpoint.open(folder)
    bundle = Bundle(
        config=opened.config,
        weights=replace(opened.load(True, DEVICE), num_mtp_layers=0),
        ops=Ops.choose("cpu", **OURS, **OTHERS),
        numerics=Numerics(torch.float32, "a16", True),
    )
    return Model(bundle, CONTEXT, DEVICE)


def cache_for(c: ModelConfig) -> Cache:
    layout = CacheLayout(
        config=c,
        kv_format=Format.KV8,
        key_format=Format.MXFP4,
        rope_itemsize=4,
        max_context=CONTEXT,
        num_slots=3,
        num_mtp_layers=0,
        max_snapshots=1,
    )
    cache = Cache(layout, DEVICE, torch.float32)
    pages = random.Random(4).sample(range(layout.num_pages), layout.num_pages)
    for slot in range(3):
        per = layout.pages_per_sequence
        cache.set_pages(slot, tuple(pages[slot * per : (slot + 1) * per]))
    return cache


def state(cache: Cache) -> list[Tensor]:
    found = []
    for layer in cache.layers:
        for store in (layer.ring, layer.entries, layer.keys):
            found += [
                t for t in (getattr(store, "data", None), getattr(store, "scale", None)) if t is not None
            ]
        found += [t for tail in layer.tails for t in (tail.values, tail.scores)]
    return found


# Chunks of up to three sequences: inside blocks, over a ring's end, longer than a ring, alone and together.
STEPS = [
    [(1, 0, 2), (0, 0, 14)],
    [(0, 14, 3), (2, 0, 1), (1, 2, 7)],
]


# Whose state, and where, a step leaves beside the slots.
MARKS_OF_STEPS = [Mark(0, 12, 3), None]


@torch.inference_mode()
def test_padding_changes_nothing(model: Model) -> None:
    rng = random.Random(1)
    alone, padded = cache_for(model.config), cache_for(model.config)
    for step, mark in zip(STEPS, MARKS_OF_STEPS, strict=True):
        spans: list[Span] = [(slot, at, [rng.randrange(100) for _ in range(n)]) for slot, at, n in step]
        want = model.forward(Step.build(spans, DEVICE, mark=mark), alone)
        got = Prompt(model, padded, 18)(spans, mark)
        assert torch.equal(got, want), step
        assert all(map(torch.equal, state(padded), state(alone))), step
        if mark is not None:
            there = cache_for(model.config)
            model.forward(Step.build([(0, 0, spans[1][2][: mark.position])], DEVICE), there)
            alone.save(0, mark.to, mark.position)
            there.save(0, 0, mark.position)
            assert torch.equal(alone.read_snapshot(0), there.read_snapshot(0))


@torch.inference_mode()
def test_only_padding_touches_nothing(model: Model) -> None:
    cache = cache_for(model.config)
    before = [t.clone() for t in state(cache)]
    Prompt(model, cache, 16).run()
    assert all(map(torch.equal, state(cache), before))


def test_what_fits(model: Model) -> None:
    prompt = Prompt(model, cache_for(model.config), 16)
    assert prompt.fits([(0, 5, [1] * 16)]) and not prompt.fits([(0, 5, [1] * 17)])
    assert not prompt.fits([(slot, 0, [1]) for slot in range(17)])
