"""Synthetic routers that follow a law, and experts that spill in the bench."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4.cli.options import numbers
from dsv4.config import preset
from dsv4.engine.frequency import write_counts
from dsv4.engine.spill import Split, make_placement
from dsv4.errors import ConfigError
from dsv4.gpu.shapes import Form
from dsv4.gpu.tiles import Bank
from dsv4.lab.bench.decode import Timing, spill_figures
from dsv4.lab.bench.prefill import spill_figures as prompt_figures
from dsv4.lab.bench.subject import Reads, synthetic
from dsv4.lab.routing import MOST, apply, biases, shares
from dsv4.ops.route.cpu import softplus, top_indices
from dsv4.quant.formats import Format

FLASH = replace(preset("flash"), layers=preset("flash").layers[:2])


@pytest.mark.parametrize("law", ["uniform", "zipf:0.7", "zipf:1.3", "zipf:0"])
def test_choices_follow_the_law(law: str) -> None:
    """Top-k of sqrt(softplus(logit)) + bias over many tokens, by the reference."""
    share, k, tokens = shares(law, FLASH)[0], FLASH.experts_per_token, 6000
    assert share.shape == (256,) and abs(float(share.sum()) - k) < 1e-3 and float(share.max()) <= MOST + 1e-6
    logits = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(5))
    chosen = top_indices(softplus(logits).sqrt() + biases(share), k)
    found = torch.bincount(chosen.flatten(), minlength=256) / tokens
    ranked = share.argsort(descending=True)
    for most in (13, 128, 200, 236):  # what a cache of so many would hit
        want, got = float(share[ranked[:most]].sum()) / k, float(found[ranked[:most]].sum()) / k
        assert abs(want - got) < 0.03, (most, want, got)


def test_tables_by_token_follow_it_too() -> None:
    config = replace(preset("tiny"), num_experts=8)
    share = shares("zipf:1.5", config)
    hashed = next(i for i, spec in enumerate(config.layers) if spec.hash_routed)
    table = torch.zeros(config.vocab_size, config.experts_per_token, dtype=torch.long)
    tensors = {f"layers.{i}.ffn.gate.bias": torch.zeros(8) for i in range(config.num_layers)}
    apply({**tensors, f"layers.{hashed}.ffn.gate.tid2eid": table}, share, config)
    assert all(len(set(row)) == config.experts_per_token for row in table.tolist())
    found = torch.bincount(table.flatten(), minlength=8)
    assert found.argmax() == share[hashed].argmax()


def test_a_file_of_counts_is_a_law(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    write_counts(path, "some", [[float(e) for e in range(256)] for _ in range(2)])
    share = shares(str(path), FLASH)
    assert torch.equal(share[0].argsort(), torch.arange(256)) and float(share.min()) > 0
    write_counts(path, "some", [[1.0] * 4])
    with pytest.raises(ConfigError, match="counts 1 layers of 4 experts, the model has 2 of 256"):
        shares(str(path), FLASH)


@pytest.mark.parametrize("law", ["zipf:", "zipf:-1", "zipf:x", "zipf:nan"])
def test_no_law(law: str) -> None:
    with pytest.raises(ConfigError, match=r"expected zipf:S with S from 0 to 10"):
        shares(law, FLASH)


def test_a_synthetic_model_that_spills() -> None:
    """Room for half of the experts: the most frequent are resident, and all have weights where they lie."""
    subject = synthetic("tiny", None, None, "official", "zipf:1")
    c = subject.config
    routed = c.num_layers * c.num_experts
    whole = subject.split("off", 0, 0)
    assert whole is None and subject.split("auto", 10, subject.weight_bytes + 10) is None
    size = Form(Format.MXFP4, c.expert_width, c.hidden_size).num_bytes
    split = subject.split("auto", 10, subject.weight_bytes + 10 - routed // 2 * size)
    # A slot is spare, and some are for prompts; as many experts as fit are resident.
    assert split is not None and 0 <= split.num_spilled - routed // 2 - split.num_staged <= 3
    assert 0 < split.num_staged == len(make_placement(split, None, "cpu").staging)
    weights = subject.load(torch.device("cpu"), split=split)
    placement, share = weights.placement, shares("zipf:1", c)
    assert placement is not None
    resident = torch.tensor(
        [[placement.slots.is_resident(slot) for slot in layer] for layer in placement.slot_of]
    )
    assert int(resident.sum()) == split.num_resident
    assert float(share[resident].min()) >= float(share[~resident].max())
    for name in placement.names:
        assert isinstance(weights.tensors[name], Bank)
        for e in range(c.num_experts):
            one = placement.expert(name, e)
            assert one.w13.data.unique().numel() > 100 and one.w2.scale.unique().numel() == 3
            assert float(one.w13.factor.min()) > 0 and float(one.w2.factor.min()) > 0
    # Another law on the same weights: its own most frequent are resident.
    other = shares("zipf:2", c)
    before = sorted(slot for layer in placement.slot_of for slot in layer)
    assert subject.reroute(weights, split, "zipf:2").routing == "zipf:2"
    resident = torch.tensor(
        [[placement.slots.is_resident(slot) for slot in layer] for layer in placement.slot_of]
    )
    assert sorted(slot for layer in placement.slot_of for slot in layer) == before
    assert float(other[resident].min()) >= float(other[~resident].max())
    with pytest.raises(ConfigError, match=r"experts on the GPU take .* are left for them; use --spill auto"):
        subject.split("1", 10, 1000)


def test_figures_of_experts_in_host_memory() -> None:
    reads = Reads(always=10**9, per_expert=(10**7, 10**7))
    counts = {"distinct": (6.0, 6.0), "spilled": (1.0, 3.0), "beside": (5.0, 1.0)}
    timing = Timing(milliseconds=(7.0,), position=100, kernels=30, hit_rate=1 - 4 / 12, **counts)
    found = spill_figures(timing, reads, Split(Form(Format.MXFP4, 2048, 4096), ("a", "b"), 256, 472))
    assert found["pcie_bytes_per_step"] == 4 * 10**7 and found["spilled_experts"] == 40
    assert found["hit_rate"] == 0.66667 and found["resident_share"] == round(472 / 512, 4)
    split = Split(Form(Format.MXFP4, 2048, 4096), tuple("abcd"), 256, 1024 - 88)
    assert split.num_staged == 44
    found, copied = prompt_figures(split, seconds=0.1, chunks=2), 2 * 88 * split.form.num_bytes
    assert found["pcie_bytes"] == copied and found["pcie_gb_per_second"] == round(copied / 1e8, 1)


def test_several_batches_in_one_run() -> None:
    assert numbers("batch", "1") == [1] and numbers("batch", "1, 8") == [1, 8]
    for text in ("", "1,", "x", "-1", "1.5", "9" * 40):
        with pytest.raises(ConfigError, match="expected a number, or several as in 1,8"):
            numbers("batch", text)
