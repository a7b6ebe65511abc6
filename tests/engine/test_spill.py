"""Experts that do not fit on the GPU: how many, which, what is refused; loaded without a second copy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.config import EngineConfig
from dsv4.engine.engine import Engine
from dsv4.engine.request import SamplingParams
from dsv4.engine.spill import (
    ENTRY_BYTES,
    HOST_RESERVE,
    Drafts,
    Split,
    check_host,
    choose_resident,
    find_split,
    make_placement,
    place_experts,
)
from dsv4.errors import ConfigError
from dsv4.gpu.shapes import Form
from dsv4.gpu.tiles import Bank
from dsv4.models import embedded
from dsv4.quant.formats import Format
from dsv4.weights.load import Checkpoint
from dsv4.weights.tiled import draft_form, expert_bytes, expert_form, load_tiled
from tests.support.checkpoints import SMALL, write_model

FORM, NAMES = Form(Format.MXFP4, 64, 128), ("layers.0.ffn.experts", "layers.1.ffn.experts")


MANY = tuple(f"layers.{layer}.ffn.experts" for layer in range(8))


def found(spill: str, room: int, expert_memory: int | None = None) -> Split | None:
    return find_split(spill, expert_memory, FORM, MANY, num_experts=8, room=room)


def test_how_many_are_resident() -> None:
    size, entries = FORM.num_bytes, 2 * 64 * ENTRY_BYTES
    assert found("auto", room=64 * size + entries // 2) is None, "all fit"
    for left in (56, 32, 8):  # one slot of each memory stays empty: by way of it experts change places
        staged = min(2 * -(-(64 - left) // 8), left // 4)  # of two layers, for prompts
        split = found("auto", room=(left + 1 + staged) * size + entries + size - 1)
        assert split is not None and (split.num_resident, split.num_spilled) == (left, 64 - left)
        assert split.num_staged == staged and split.gpu_bytes == (left + 1 + staged) * size + entries
        assert split.host_bytes == (65 - left) * size
    assert found("off", room=0) is None and found("0", room=0) is None
    assert (split := found("3", room=10**12)) is not None and split.num_spilled == 24
    limited = found("auto", 10**12, expert_memory=(4 + 1 + 1) * size + entries)
    assert limited is not None and (limited.num_resident, limited.num_staged) == (4, 1)
    assert (split := found("auto", -(10**9))) is not None and split.num_resident == 0
    with pytest.raises(ConfigError, match="spill is 9, but a layer has 8 experts"):
        found("9", room=0)


def test_drafts_are_the_first_to_go() -> None:
    """No step reads them: what they leave holds experts of the layers."""
    drafts = Drafts(Form(Format.NVFP4, 64, 128), ("mtp.0.ffn.experts",), 8)
    room = 40 * FORM.num_bytes
    without = find_split("auto", None, FORM, MANY, 8, room)
    split = find_split("auto", None, FORM, MANY, 8, room, drafts)
    assert split is not None and without is not None
    assert split.num_resident > without.num_resident
    assert split.gpu_bytes <= room + drafts.num_bytes < split.gpu_bytes + 2 * FORM.num_bytes
    assert split.host_bytes == (split.num_spilled + 1) * FORM.num_bytes + drafts.num_bytes
    assert "of draft blocks, which no step reads" in split.note and "draft" not in without.note
    assert find_split("auto", None, FORM, MANY, 8, 10**9, drafts) is None, "all fit"
    placed, _ = place_experts(split, None, "cpu")
    assert [p.names for p in placed] == [MANY, drafts.names] and placed[1].slots.num_resident == 0


def test_which_are_resident() -> None:
    split = Split(FORM, NAMES, num_experts=8, num_resident=7)
    evenly = choose_resident(split, None)
    assert [sum(layer) for layer in evenly] == [4, 3]
    counts = [[0.0] * 8, [float(e) for e in range(8)]]
    counts[0][2] = 6.5
    by_count = choose_resident(split, counts)
    assert [e for e in range(8) if by_count[0][e]] == [2]
    assert [e for e in range(8) if by_count[1][e]] == [2, 3, 4, 5, 6, 7]


def test_host_memory_is_refused_with_the_numbers() -> None:
    split = Split(Form(Format.MXFP4, 2048, 4096), NAMES, num_experts=256, num_resident=12)
    check_host(split, split.host_bytes + HOST_RESERVE)
    with pytest.raises(
        ConfigError, match=r"500 of 512 experts .* take 6\.7 GB; 3\.0 GB are free, of which 4\.3 GB"
    ):
        check_host(split, 3 * 10**9)


@pytest.mark.parametrize("value", ["all", "-1", "1.5", ""])
def test_a_spill_that_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="expected off, auto or a number of experts per layer"):
        EngineConfig(spill=value)


def test_loaded_experts_are_those_of_a_whole_load() -> None:
    """In every placement an expert's bytes are where the table says; other weights are as before."""
    checkpoint = Checkpoint.open(embedded())
    form, names = expert_form(checkpoint)
    experts = checkpoint.config.num_experts
    assert expert_bytes(checkpoint) >= len(names) * experts * (form.num_bytes - 4 * 256)
    whole = load_tiled(checkpoint, "cpu")
    for resident in (0, len(names) * experts // 3, len(names) * experts):
        split = Split(form, tuple(names), experts, resident)
        placement = make_placement(split, None, "cpu")
        got = load_tiled(Checkpoint.open(embedded()), "cpu", placement=placement)
        assert got.placement is placement and got.tensors.keys() == whole.tensors.keys()
        assert sum(placement.num_resident(layer) for layer in range(len(names))) == resident
        for name in names:
            bank = whole.tensors[name]
            assert isinstance(bank, Bank)
            for e in range(experts):
                one = placement.expert(name, e)
                for part, want in ((one.w13, bank.w13), (one.w2, bank.w2)):
                    assert torch.equal(part.data[0], want.data[e]) and torch.equal(
                        part.factor[0], want.factor[e]
                    )
                    assert torch.equal(part.scale[0], want.scale[e])


def test_drafts_are_loaded_where_they_lie(tmp_path: Path) -> None:
    """Those of a whole load, expert by expert, in host memory alone; the layers' beside them."""
    write_model(tmp_path, "modelopt", replace(SMALL, num_mtp_layers=1))
    checkpoint = Checkpoint.open(tmp_path)
    whole = load_tiled(checkpoint, "cpu")
    (form, names), draft = expert_form(checkpoint), draft_form(checkpoint)
    experts = checkpoint.config.num_experts
    assert draft is not None and draft[1] == ["mtp.0.ffn.experts"]
    drafts = Drafts(draft[0], tuple(draft[1]), experts)
    split = Split(form, tuple(names), experts, len(names) * experts // 2, drafts=drafts)
    placed, _ = place_experts(split, None, "cpu")
    got = load_tiled(Checkpoint.open(tmp_path), "cpu", None, *placed)
    assert (
        got.drafts is placed[1] and got.placement is placed[0] and got.tensors.keys() == whole.tensors.keys()
    )
    bank = whole.tensors["mtp.0.ffn.experts"]
    assert isinstance(bank, Bank)
    for e in range(experts):
        assert not placed[1].slots.is_resident(placed[1].slot_of[0][e])
        one = placed[1].expert("mtp.0.ffn.experts", e)
        for part, want in ((one.w13, bank.w13), (one.w2, bank.w2)):
            assert torch.equal(part.data[0], want.data[e]) and torch.equal(part.scale[0], want.scale[e])
            assert torch.equal(part.factor[0], want.factor[e])


@pytest.mark.gpu
@pytest.mark.parametrize("spill", ["1", "3", "all"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_do_not_depend_on_the_place(spill: str, dtype: str) -> None:
    """The embedded model: prompts and generated tokens, several sequences at once."""
    experts = Checkpoint.open(embedded()).config.num_experts
    spill = str(experts) if spill == "all" else spill
    prompts = [[1, 5, 9, 12, 7] * 9, [3, 4], list(range(2, 120))]

    def generated(spill: str) -> list[list[tuple[int, float | None]]]:
        config = EngineConfig(device="cuda", compute_dtype=dtype, max_context=512, max_batch=4, spill=spill)
        engine = Engine.load(None, config)
        params = SamplingParams(max_tokens=40, temperature=0.0, logprobs=1)
        return [[(t.id, t.logprob) for t in c.tokens] for c in engine.generate(prompts, params)]

    assert generated(spill) == generated("off")


@pytest.mark.parametrize("options", [{"spill": "3"}, {"expert_memory": 1000}])
def test_without_a_gpus_kernels_it_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="leave them out"):
        Engine.load(None, EngineConfig(device="cpu", **options))
