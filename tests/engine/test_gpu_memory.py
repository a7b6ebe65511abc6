"""What does not fit in a GPU's memory is refused in one sentence, before weights are read."""

from dataclasses import replace

import pytest
import torch

from dsv4.cache.layout import CacheLayout
from dsv4.config import EngineConfig, preset
from dsv4.engine.memory import prompt_bytes
from dsv4.engine.settings import Settings, check_memory, settle
from dsv4.errors import ConfigError
from dsv4.models import embedded
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
    settings, config, layout = on_gpu(checkpoint, needed + prompt_bytes(checkpoint.config, 4096))
    with pytest.raises(
        ConfigError, match=r"and what steps need 1\.\d GB, .* lower max_batch, max_context or chunk"
    ):
        check_memory(settings, config, checkpoint)


def test_a_prompt_of_flash_takes_gigabytes() -> None:
    assert 6e9 < prompt_bytes(preset("flash"), 4096) < 8e9
