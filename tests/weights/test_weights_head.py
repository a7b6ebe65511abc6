"""`--head nvfp4`: the output matrix rounded at load, the same however weights are held; what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsv4 import Engine, EngineConfig
from dsv4.errors import ConfigError
from dsv4.lab.score import score_ids
from dsv4.quant.codec import decode, encode_weight
from dsv4.quant.formats import Format, QuantTensor
from dsv4.weights import load
from dsv4.weights.load import Checkpoint
from dsv4.weights.tiled import load_tiled, tiled_bytes

IDS = [5, 9, 2, 77, 30, 8]


def test_all_ways_to_hold_it_agree(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint("bf16")
    plain, recoded = Checkpoint.open(folder), Checkpoint.open(folder).with_head("nvfp4", ranks=1)
    stored = plain.load(dense=False).tensors["head"]
    want = encode_weight(stored.data, Format.NVFP4)
    monkeypatch.setattr(load, "BLOCK_BYTES", 4 * stored.shape[1] * 7)  # seven rows at a time
    packed, dense = recoded.load(dense=False), recoded.load(dense=True)
    held = packed.tensors["head"]
    assert isinstance(held, QuantTensor) and held.format is Format.NVFP4
    assert held.scale is not None and want.scale is not None and held.global_scale == want.global_scale
    assert torch.equal(held.data, want.data) and torch.equal(held.scale, want.scale)
    assert torch.equal(dense.tensors["head"], decode(want).t())
    assert "head" not in packed.quantised, "its input is never rounded"
    tiled = load_tiled(recoded, "cpu").tensors["head"]
    assert tiled.format is Format.NVFP4
    saved = tiled_bytes(plain) - tiled_bytes(recoded)
    assert saved == load_tiled(plain, "cpu").tensors["head"].num_bytes - tiled.num_bytes > 0
    assert plain.held_bytes(dense=False) - recoded.held_bytes(dense=False) == 2 * want.data.numel() * 2 - (
        want.data.numel() + want.scale.numel()
    )


def test_only_the_logits_change(checkpoint: Callable[..., Path]) -> None:
    found = []
    for options in ({}, {"head": "nvfp4"}, {"head": "nvfp4", "weights": "packed"}):
        config = EngineConfig(device="cpu", max_context=256, max_batch=1, **options)
        found.append(score_ids(Engine.load(checkpoint("modelopt"), config), IDS, 4))
    for name, stored in found[0].items():
        error = float((found[1][name] - stored).norm() / stored.norm())
        assert 0.01 < error < 0.2, "NVFP4 of random weights is 0.1 off"
        assert torch.equal(found[1][name], found[2][name])


def test_what_is_refused(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="head is 'fp8', expected one of stored, nvfp4"):
        EngineConfig(head="fp8")
    with pytest.raises(ConfigError, match="head nvfp4 has one scale for all rows, and 2 ranks share them"):
        Checkpoint.open(checkpoint("bf16")).with_head("nvfp4", ranks=2)
