"""A rank's shares: together they are the weights, a rank reads no other bytes, scales are never cut."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4.config import LayerSpec, ModelConfig, preset
from dsv4.errors import CheckpointError, ConfigError
from dsv4.model.params import check_ranks, declare, num_parts
from dsv4.quant.codec import decode
from dsv4.quant.formats import QuantTensor
from dsv4.weights.load import Checkpoint
from dsv4.weights.tiled import load_tiled
from tests.support.checkpoints import write_model

# Widths of 256: eight blocks of 32, two FP8 tiles.
WIDE = replace(
    preset("tiny"),
    **{"hidden_size": 128, "vocab_size": 256, "num_heads": 8, "o_groups": 8, "head_dim": 64, "rope_dim": 16},
    **{"num_experts": 3, "expert_width": 256, "index_heads": 2, "o_rank": 32, "num_streams": 2},
    layers=(LayerSpec("sliding", 0, True), LayerSpec("csa", 4, False), LayerSpec("hca", 128, False)),
)
RANKS = {"bf16": 8, "hf-bf16": 4, "modelopt": 2, "official": 2, "ct": 2, "hfnvfp4": 2, "fp8": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("shards")
    return {style: write_model(root / style, style, WIDE) for style in RANKS}


def values(held: object) -> Tensor:
    return decode(held) if isinstance(held, QuantTensor) else held  # type: ignore[return-value]


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("style", RANKS)
def test_shares_make_up_the_weights(folders: dict[str, Path], style: str, dense: bool) -> None:
    size = RANKS[style]
    checkpoint = Checkpoint.open(folders[style])
    whole = checkpoint.load(dense)
    shares = [checkpoint.shard(rank, size).load(dense) for rank in range(size)]
    for param in declare(WIDE, whole.num_mtp_layers):
        parts = [values(share.tensors[param.name]) for share in shares]
        want = values(whole.tensors[param.name])
        is_turned = dense and param.kind in ("linear", "grouped") and param.name != "embed"
        if param.shard == "whole":
            assert all(torch.equal(part, want) for part in parts), param.name
        else:
            axis = (param.shard == "columns") != is_turned
            assert torch.equal(torch.cat(parts, dim=int(axis)), want), param.name
    assert all(share.quantised == whole.quantised for share in shares)


@pytest.mark.parametrize("style", RANKS)
def test_a_rank_reads_its_share(folders: dict[str, Path], style: str) -> None:
    size = RANKS[style]
    checkpoint = Checkpoint.open(folders[style])
    split = {p.name for p in declare(WIDE, 1) if p.shard == "rows"}  # of columns, whole lines are read
    sources = checkpoint.inventory.sources
    share = sum(s.num_bytes / (size if s.param.name in split else 1) for s in sources)
    assert share < 0.75 * checkpoint.inventory.num_bytes, "what is split must weigh something here"
    for rank in range(size):
        own = checkpoint.shard(rank, size)
        before = own.reader.num_read
        own.load(dense=False)
        assert own.reader.num_read - before <= 1.01 * share
        assert own.inventory.num_bytes <= 1.01 * share


def test_a_rank_with_whole_experts_reads_these_alone(tmp_path: Path) -> None:
    config = replace(WIDE, num_experts=4)
    checkpoint = Checkpoint.open(write_model(tmp_path / "model", "modelopt", config))
    whole = checkpoint.load(dense=False)
    by_width = sum(checkpoint.shard(rank, 2).inventory.num_bytes for rank in range(2))
    shares = []
    for rank in range(2):
        own = checkpoint.shard(rank, 2, whole_experts=True)
        before = own.reader.num_read
        shares.append(own.load(dense=False))
        # Of columns, whole lines are read: twice what is kept.
        lines = (s for s in own.inventory.sources if s.param.shard == "columns" and s.param.expert is None)
        share = own.inventory.num_bytes + sum(s.num_bytes for s in lines)
        assert own.reader.num_read - before <= 1.01 * share
        assert own.inventory.num_bytes == pytest.approx(by_width / 2, rel=0.01), "as much as by width"
        assert shares[-1].quantised == whole.quantised
    for param in declare(config, whole.num_mtp_layers):
        if param.expert is not None:
            found = [share.tensors.get(param.name) for share in shares]
            assert (found[0] is None) == (param.expert >= 2) and (found[1] is None) == (param.expert < 2)
            held = found[param.expert // 2]
            assert torch.equal(values(held), values(whole.tensors[param.name])), param.name


def test_a_bank_of_whole_experts(tmp_path: Path) -> None:
    """In tiles, as a GPU has them: a rank's are a run of the whole bank, the shared expert's a part of it."""
    config = replace(WIDE, num_experts=4)
    checkpoint = Checkpoint.open(write_model(tmp_path / "model", "modelopt", config))
    whole = load_tiled(checkpoint, "cpu")
    by_width = load_tiled(checkpoint.shard(1, 2), "cpu")
    for rank in range(2):
        own = checkpoint.shard(rank, 2, whole_experts=True)
        assert own.inventory.experts == range(2 * rank, 2 * rank + 2)
        got = load_tiled(own, "cpu")
        for name in (f"layers.{layer}.ffn.experts" for layer in range(config.num_layers)):
            for part in ("w13", "w2"):
                want, held = getattr(whole.tensors[name], part), getattr(got.tensors[name], part)
                assert held.count == 2 and held.shape == want.shape
                for tensor in ("data", "scale", "factor"):
                    run = getattr(want, tensor)[2 * rank : 2 * rank + 2]
                    assert torch.equal(getattr(held, tensor), run), (name, part, tensor)
    shared = "layers.0.ffn.shared_experts"
    assert torch.equal(got.tensors[shared].w2.data, by_width.tensors[shared].w2.data)


def test_experts_that_do_not_split() -> None:
    with pytest.raises(
        ConfigError, match=r"3 experts do not split over 2 ranks, .* 1\.5 each; leave expert_parallel out"
    ):
        check_ranks(WIDE, 2, whole_experts=True)
    check_ranks(WIDE, 2)


def test_scales_are_not_cut(folders: dict[str, Path]) -> None:
    checkpoint = Checkpoint.open(folders["official"])
    with pytest.raises(CheckpointError, match=r"over 4 ranks make 64 each, but fp8 shares a scale among 128"):
        checkpoint.shard(0, 4)


@pytest.mark.parametrize(
    ("config", "size", "words"),
    [
        (preset("flash"), 3, "3 ranks cannot share this model; use 1 or 2 or 4 or 8"),
        (preset("flash"), 16, "16 ranks cannot share"),
        (preset("tiny"), 4, "o_groups 2 do not split over 4 ranks; use 1 or 2"),
        (replace(WIDE, vocab_size=252), 8, "vocab_size 252 do not split over 8 ranks; use 1 or 2 or 4"),
    ],
)
def test_sizes_that_do_not_divide(config: ModelConfig, size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_ranks(config, size)


def test_published_models_split_over_eight() -> None:
    for name in ("flash", "pro"):
        config = preset(name)
        assert num_parts(config) == 8
        for param in declare(replace(config, layers=config.layers[:3], num_experts=1), 1):
            for size in (2, 4, 8):
                shape = param.local_shape(size)
                if param.shard == "columns":
                    assert shape[1] % 128 == 0, (param.name, shape)
                elif param.shard == "rows" and param.name not in ("embed", "head", "attn_sink"):
                    assert shape[0] % 128 == 0 or len(shape) == 1, (param.name, shape)
