"""A whole decode step of the GPU's path, every launch of it, gives what the reference gives: on a CPU."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from step_support import IS_INTERPRETED

from dsv4.config import ModelConfig, preset
from dsv4.lab.init import make

pytest.importorskip("triton", reason="Triton is not installed")

from tests.support.emulated import Decoders, Launches
from tests.support.twin import needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(not IS_INTERPRETED, reason="run by test_step_interpreted"),
]
TINY = preset("tiny")
# Every kind of layer and routing. In V4's own sizes of heads and index the kernels for those run.
SMALL = replace(TINY, layers=TINY.layers[:3], num_mtp_layers=0)
HEADS = replace(
    SMALL,
    **{"num_heads": 16, "head_dim": 512, "index_heads": 64, "index_dim": 128, "q_rank": 64},
    layers=TINY.layers[1:3],
)
# Blocks of 4 and of 128 end here, and more entries are there than are selected.
POSITION = 383
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where twins are built: those of the tests around this process, where there are some."""
    return Path(os.environ.get("DSV4_TWINS") or tmp_path_factory.mktemp("twins"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[int, str], Path] = {}

    def get(config: ModelConfig, format: str = "modelopt") -> Path:
        key = config.head_dim, format
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model") / "model"
            for _ in make(made[key], config, format, seed=3):
                pass
        return made[key]

    return get


@pytest.mark.parametrize(
    ("format", "activations", "rows"),
    [("modelopt", "a16", 1), ("official", "a8", 2), ("ct", "a4", 1), ("hfnvfp4", "a4", 3)],
)
def test_the_references_logits(
    twins: Path, saved: Callable[..., Path], format: str, activations: str, rows: int
) -> None:
    launches = Launches(twins)
    decoders = Decoders(saved(SMALL, format), launches, rows, POSITION, F32, activations)  # type: ignore[arg-type]
    got, want = decoders.step()[0], decoders.reference()
    assert float((got - want).abs().max()) <= 1e-5 * float(want.abs().max())
    f = decoders.ranks[0].buffers
    assert f.positions.tolist() == [POSITION + 1] * rows
    assert torch.equal(f.out[:, 0].long(), f.ids), "the step's choice is the next step's token"


@pytest.mark.parametrize(("config", "rows"), [(SMALL, 4), (HEADS, 2)])
def test_a_row_alone(twins: Path, saved: Callable[..., Path], config: ModelConfig, rows: int) -> None:
    """BF16, as it is served: the same bits alone and in a batch, near the reference's."""
    launches = Launches(twins)
    batch = Decoders(saved(config), launches, rows, POSITION, BF16)
    got, want = batch.step()[0], batch.reference()
    assert bool(((got - want).abs().amax(1) <= 0.05 * want.abs().amax(1)).all())
    if config is HEADS:
        assert launches.counts["attention"] and launches.counts["index"]
    alone = Decoders(saved(config), launches, 1, POSITION, BF16, slots=rows)
    assert torch.equal(alone.step()[0], got[:1])


@pytest.mark.parametrize("whole_experts", [False, True])
def test_ranks(twins: Path, saved: Callable[..., Path], whole_experts: bool) -> None:
    """Two ranks and all that they exchange: the same bits on both, and the reference's logits."""
    launches = Launches(twins, ranks=2)
    decoders = Decoders(saved(SMALL, "hfnvfp4"), launches, 2, POSITION, F32, whole_experts=whole_experts)
    got, want = decoders.step(), decoders.reference()
    assert torch.equal(got[0], got[1]), "ranks differ"
    assert float((got[0] - want).abs().max()) <= 1e-5 * float(want.abs().max())
    for decoder in decoders.ranks:
        assert decoder.peers is not None
        assert not decoder.peers.inbox.any() and not decoder.peers.ended.any(), "a packet was left"
