"""Experts copied ahead on a GPU: the bits of any placement, however late streams are, and no host wait."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.cache.layout import CacheLayout
from dsv4.cache.store import Cache
from dsv4.config import ModelConfig, preset
from dsv4.engine.spill import Split, make_placement
from dsv4.gpu.shapes import Form
from dsv4.lab.synthetic import make_weights
from dsv4.model.bundle import Bundle, Numerics
from dsv4.model.model import Model
from dsv4.model.step import Step
from dsv4.ops import IMPLEMENTATIONS, Ops
from dsv4.ops.experts.placement import Placement
from dsv4.ops.experts.staging import READ_IN_PLACE, Staging, StreamLanes
from dsv4.quant.formats import Format

pytestmark = pytest.mark.gpu
EXPERTS, TOKENS = 16, 2 * READ_IN_PLACE + 40


def flash() -> ModelConfig:
    """Flash's widths, six layers."""
    whole = preset("flash")
    return replace(whole, layers=whole.layers[:6], num_experts=EXPERTS)


class LateLanes(StreamLanes):
    """Copies and reads that begin late, by up to some hundred microseconds."""

    chance = random.Random(7)

    def _sleep(self) -> None:
        if self.chance.random() < 0.3:
            torch.cuda._sleep(self.chance.randrange(400_000))

    def copy(self, to: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._copies):
            self._sleep()
        super().copy(to, source)

    def await_arrival(self, layer: int) -> None:
        super().await_arrival(layer)
        self._sleep()


def made(resident: int) -> tuple[Model, Cache, Placement]:
    config = flash()
    names = tuple(f"layers.{layer}.ffn.experts" for layer in range(config.num_layers))
    split = Split(Form(Format.MXFP4, config.expert_width, config.hidden_size), names, EXPERTS, resident)
    placement = make_placement(split, None, "cuda")
    weights = make_weights(config, "official", "cuda", placement=placement)
    ops = Ops.choose("cuda", **dict.fromkeys(IMPLEMENTATIONS, "gpu"))
    bundle = Bundle(config, weights, ops, Numerics(torch.bfloat16, "a16", True))
    layout = CacheLayout(config, Format.KV8, Format.MXFP4, 2, 2048, 1, 0)
    cache = Cache(layout, "cuda", torch.bfloat16)
    cache.page_table.copy_(torch.arange(cache.page_table.numel()).view(cache.page_table.shape))
    return Model(bundle, 2048, "cuda"), cache, placement


def read(model: Model, cache: Cache, seed: int) -> Tensor:
    ids = torch.randint(5, 1000, (TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()
    return model.forward(Step.build([(0, 0, ids)], "cuda"), cache).clone()


@contextmanager
def no_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bits_do_not_depend_on_what_is_copied_ahead() -> None:
    """Everything, half and little resident, read in place and copied ahead, with experts changing places."""
    total = 6 * EXPERTS
    model, cache, _ = made(total)
    want = [read(model, cache, seed) for seed in range(4)]
    assert all(bool(torch.isfinite(streams).all()) for streams in want)
    for resident in (total // 2, 8):
        model, cache, placement = made(resident)
        assert model.staging is not None and placement.staging
        staging, chance = model.staging, random.Random(resident)
        late = Staging(placement, LateLanes(6, placement.slots.device))
        for turn in range(24):
            model.staging = (None, staging, late, late)[turn % 4]
            if turn:
                torch.cuda.synchronize()
                with no_waits():
                    streams = read(model, cache, turn % 4)
            else:
                streams = read(model, cache, 0)
            torch.cuda.synchronize()  # what follows is the host's own work, as no swap's is
            # Two experts change slots, one of them perhaps in host memory: as a swap leaves them.
            (a, b), (c, d) = ((chance.randrange(6), chance.randrange(EXPERTS)) for _ in range(2))
            if (a, b) != (c, d):
                one, two = placement.slot_of[a][b], placement.slot_of[c][d]
                kept = placement.slots[one].clone()
                placement.slots[one].copy_(placement.slots[two])
                placement.slots[two].copy_(kept)
                placement.move([(a, b, two), (c, d, one)])
            assert torch.equal(streams, want[turn % 4]), (resident, turn)
