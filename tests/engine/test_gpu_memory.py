"""What does not fit in a GPU's memory is refused in one sentence, before weights are read."""

from dataclasses import replace

import pytest
import torch

from dsv4.cache.layout import CacheLayout
from dsv4.cache.store import Cache
from dsv4.config import EngineConfig, preset
from dsv4.engine.memory import prompt_bytes, unpacks_weights
from dsv4.engine.settings import Settings, check_memory, settle
from dsv4.errors import ConfigError
from dsv4.lab.synthetic import make_weights
from dsv4.model.bundle import Bundle, Numerics
from dsv4.model.model import Model
from dsv4.model.step import Step
from dsv4.models import embedded
from dsv4.ops import IMPLEMENTATIONS, Ops
from dsv4.quant.formats import Format
from dsv4.weights.load import Checkpoint
from dsv4.weights.tiled import tiled_bytes


def on_gpu(checkpoint: Checkpoint, free: int) -> tuple[Settings, EngineConfig, CacheLayout]:
    """The settings of an engine on a GPU with that much memory, which need not be there."""
    config = EngineConfig(device="cpu", max_batch=8, max_context=4096)
    settings = settle(config, checkpoint)
    device = replace(settings.device, kind="cuda", memory_bytes=free)
    layout = CacheLayout(checkpoint.config, Format.KV8, Format.MXFP4, 2, 4096, 8, 0)
    settings = replace(settings, device=device, tiled=True, dense=False, dtype=torch.bfloat16, chunk=4096)
    return settings, config, layout


def test_memory_of_a_step_counts() -> None:
    """Weights and cache alone would fit: what graphs and a prompt's step take is said, and asked for."""
    pytest.importorskip("triton", reason="Triton is not installed")
    checkpoint = Checkpoint.open(embedded())
    settings, config, layout = on_gpu(checkpoint, 10**12)
    check_memory(settings, config, checkpoint)
    needed = tiled_bytes(checkpoint) + layout.store_bytes()
    step = prompt_bytes(layout, 4096, unpacks=False)
    settings, config, layout = on_gpu(checkpoint, needed + step)
    with pytest.raises(
        ConfigError, match=r"and what steps need 1\.\d GB, .* lower max_batch, max_context or chunk"
    ):
        check_memory(settings, config, checkpoint)


def test_a_prompt_of_flash_takes_gigabytes() -> None:
    """On Hopper its rows; where weights are unpacked, sixteen experts of these as well."""
    layout = CacheLayout(preset("flash"), Format.KV8, Format.MXFP4, 2, 131072, 1, 0)
    assert 1.1e9 < prompt_bytes(layout, 4096, unpacks=False) < 1.6e9
    assert 4e9 < prompt_bytes(layout, 4096, unpacks=True) < 6e9
    assert unpacks_weights(4, (9, 0)) and unpacks_weights(2, (12, 0))
    assert not unpacks_weights(2, (9, 0))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "before"), [(512, 0), (4096, 0), (4096, 126000)])
def test_a_prompts_step_takes_what_was_planned(tokens: int, before: int) -> None:
    """Flash's widths, a layer of every kind: the estimate is on the safe side, and not by much."""
    config = preset("flash")
    kinds = {spec.kind: number for number, spec in enumerate(config.layers)}
    config = replace(config, layers=tuple(config.layers[n] for n in kinds.values()), num_experts=32)
    layout = CacheLayout(config, Format.KV8, Format.MXFP4, 2, 131072, 1, 0)
    ops = Ops.choose("cuda", **dict.fromkeys(IMPLEMENTATIONS, "gpu"))
    weights = make_weights(config, "official", "cuda")
    model = Model(Bundle(config, weights, ops, Numerics(torch.bfloat16, "a16", True)), 131072, "cuda")
    cache = Cache(layout, "cuda", torch.bfloat16)
    cache.page_table.copy_(torch.arange(cache.page_table.numel()).view(cache.page_table.shape))
    step = Step.build([(0, before, list(range(5, 5 + tokens)))], "cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        model.logits(model.forward(step, cache)[-1:])
        taken = torch.cuda.max_memory_allocated() - held
    planned = prompt_bytes(layout, tokens, unpacks=False)
    print(f"{tokens} tokens after {before}: planned {planned:,}, taken {taken:,}")
    assert taken <= planned <= 1.6 * taken + (300 << 20)
