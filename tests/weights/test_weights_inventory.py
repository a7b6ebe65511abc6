"""What a checkpoint holds: the published totals from headers alone, draft blocks, copies that are skipped."""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import SMALL

from dsv4.config import Dspark, LayerSpec, ModelConfig, preset
from dsv4.errors import CheckpointError
from dsv4.lab.styles import STYLES, stored_tensors
from dsv4.model import params
from dsv4.model.params import Param, declare
from dsv4.quant.formats import Format
from dsv4.weights.detect import Inventory, take_inventory
from dsv4.weights.reader import Entry
from dsv4.weights.writer import Declared
from tests.support.published import PARTS, ROUTED, STORED

LAYERS = 2  # of a file whose config asks for many


def entries_of(tensors: Iterable[Declared]) -> dict[str, Entry]:
    file = Path("model.safetensors")
    return {t.name: Entry(t.name, t.dtype, t.shape, file, 0, t.num_bytes) for t in tensors}


def headers(config: ModelConfig, style: str, num_mtp: int = 1) -> dict[str, Entry]:
    return entries_of(t for p in declare(config, num_mtp) for t in stored_tensors(p, STYLES[style]))


# Tensors.
TOTALS = [
    ("flash", "official", 69_187),
    ("flash", "modelopt", 135_235),
    ("pro", "official", 145_116),
    pytest.param("pro", "modelopt", 285_660, marks=pytest.mark.slow),
]


@pytest.fixture
def _no_collection() -> Iterator[None]:
    """Hundreds of thousands of objects that all stay: looking for garbage among them doubles the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize(("name", "style", "count"), TOTALS)
def test_published_totals(name: str, style: str, count: int) -> None:
    config = preset(name)
    entries = headers(config, style)
    inventory = take_inventory(entries, config)
    assert len(entries) == count
    assert sum(entry.num_bytes for entry in entries.values()) == STORED[name, style] == inventory.num_bytes
    parts: Counter[str] = Counter()
    for source in inventory.sources:
        parts[source.param.component] += source.num_bytes
    assert parts == PARTS[name] | {"routed experts": ROUTED[name, style]}
    assert (inventory.num_mtp_layers, inventory.notes, inventory.family) == (1, (), "official")
    mtp = [entry for entry in entries if entry.startswith("mtp.")]
    assert len(mtp) == {"flash": 1575, "pro": 2343}[name]
    # The trap of the NVFP4 release: its draft experts stay MXFP4, so the format is decided per tensor.
    formats = {
        (source.param.name.startswith("mtp."), source.format)
        for source in inventory.sources
        if ".experts." in source.param.name
    }
    trunk = Format.NVFP4 if style == "modelopt" else Format.MXFP4
    assert formats == {(True, Format.MXFP4), (False, trunk)}


def without(entries: dict[str, Entry], *names: str) -> dict[str, Entry]:
    return {name: entry for name, entry in entries.items() if name not in names}


def summary(inventory: Inventory) -> tuple[int, int, tuple[str, ...]]:
    return len(inventory.sources), inventory.num_mtp_layers, inventory.notes


@pytest.mark.parametrize(
    "copies",
    [
        ["mtp.0.embed.weight", "mtp.0.head.weight"],
        ["mtp.0.emb.tok_emb.weight", "mtp.0.head.weight"],
    ],
)
def test_copies_beside_the_draft_block_are_skipped(copies: list[str]) -> None:
    entries = headers(SMALL, "official")
    plain = take_inventory(entries, SMALL)
    shape = (SMALL.vocab_size, SMALL.hidden_size)
    extra = entries_of(Declared(name, "BF16", shape) for name in copies)
    found = take_inventory(entries | extra, SMALL)
    assert found.notes == (f"not used: {min(copies)} and 1 more",)
    assert replace(found, notes=()) == plain


@pytest.mark.parametrize("name", ["mtp.0.head.bias", "mtp.0.embedding.weight", "layers.0.head.weight"])
def test_other_tensors_beside_the_draft_block_are_left_over(name: str) -> None:
    entries = headers(SMALL, "official") | entries_of([Declared(name, "BF16", (4,))])
    with pytest.raises(CheckpointError, match=f"belong to no parameter of this model, the first is '{name}'"):
        take_inventory(entries, SMALL)


BIAS_VL = Declared("layers.1.ffn.gate.bias_vl", "F32", (4,))
DSPARK = replace(SMALL, dspark=Dspark(5, 9, (1, 2), 4))


def test_dspark_stages_are_counted_by_their_tensors() -> None:
    """Published configs say 1. Every tensor of `mtp.*` belongs to a parameter, is named, or is refused."""
    for stages in (2, 3):
        entries = headers(DSPARK, "official", num_mtp=stages)
        found = take_inventory(entries, DSPARK)
        assert summary(found) == (len(declare(DSPARK, stages)), stages, ())
        used = {e.name for s in found.sources for e in (s.weight, s.scale, s.global_scale) if e}
        assert used == entries.keys()
        assert f"mtp.{stages - 1}.markov_head.markov_w1.weight" in used
        assert f"mtp.{stages - 1}.ffn.shared_experts.w1.weight" in used
        trunk = found.without_drafts()
        assert summary(trunk) == (len(declare(DSPARK, 0)), 0, ())
        assert not any(source.param.name.startswith("mtp.") for source in trunk.sources)
    copies = entries_of([Declared("mtp.2.head.weight", "BF16", (4, 4)), gate := BIAS_VL])
    assert summary(take_inventory(entries | copies, DSPARK))[2] == (f"not used: {gate.name} and 1 more",)
    odd = entries_of([Declared("mtp.2.markov.weight", "BF16", (4, 4))])
    with pytest.raises(CheckpointError, match=r"the first is 'mtp\.2\.markov\.weight'"):
        take_inventory(entries | odd, DSPARK)


def test_dspark_without_its_config_or_in_part() -> None:
    entries = headers(DSPARK, "official", num_mtp=3)
    count, blocks, notes = summary(take_inventory(entries, SMALL))
    assert (count, blocks) == (len(declare(SMALL, 0)), 0) and "config.json does not describe them" in notes[0]
    with pytest.raises(CheckpointError, match=r"'mtp\.0\.main_norm\.weight'"):
        take_inventory(without(entries, "mtp.0.main_norm.weight"), DSPARK)
    with pytest.raises(CheckpointError, match=r"mtp\.0\.attn_norm\.weight is missing"):
        take_inventory(without(entries, "mtp.0.attn_norm.weight"), DSPARK)
    none = headers(DSPARK, "official", num_mtp=0)
    assert "holds no draft block" in summary(take_inventory(none, DSPARK))[2][0]
    # MTP's tensors beside a config of DSpark's: which drafter it is shows in what is missing.
    with pytest.raises(CheckpointError, match=r"'mtp\.0\.main_proj\.weight'"):
        take_inventory(headers(SMALL, "official"), DSPARK)


@pytest.mark.parametrize(
    ("name", "rank", "per_stage", "ends", "tensors"),
    [
        ("flash", 256, 3_559_944_536, 183_004_692, 4_705),
        ("pro", 512, 13_853_319_192, 419_418_324, 7_009),
    ],
)
def test_published_dspark_bytes(name: str, rank: int, per_stage: int, ends: int, tensors: int) -> None:
    trunk = preset(name)
    last = len(trunk.layers) - 1
    config = replace(trunk, dspark=Dspark(5, 128799, (last - 2, last - 1, last), rank))
    entries = headers(replace(config, layers=trunk.layers[:1]), "modelopt", num_mtp=3)
    assert sum(entry.startswith("mtp.") for entry in entries) == tensors
    assert sum(e.num_bytes for e in entries.values() if e.name.startswith("mtp.")) == 3 * per_stage + ends


def test_number_of_draft_blocks_comes_from_the_weights() -> None:
    none, one, two = (headers(SMALL, "official", num_mtp=n) for n in range(3))
    silent = replace(SMALL, num_mtp_layers=0)
    assert summary(take_inventory(none, silent)) == (len(declare(SMALL, 0)), 0, ())
    count, num_mtp, notes = summary(take_inventory(none, SMALL))
    assert (count, num_mtp) == (len(declare(SMALL, 0)), 0) and "holds no draft block" in notes[0]
    count, num_mtp, notes = summary(take_inventory(one, silent))
    assert (count, num_mtp) == (len(declare(SMALL, 1)), 1) and "1 in the weights, 0 in config" in notes[0]
    count, num_mtp, notes = summary(take_inventory(two, SMALL))
    assert (count, num_mtp) == (len(declare(SMALL, 2)), 2) and "2 in the weights, 1 in config" in notes[0]


def test_incomplete_draft_block_is_refused() -> None:
    entries = headers(SMALL, "official")
    with pytest.raises(CheckpointError, match=r"mtp\.0\.attn_norm\.weight is missing") as caught:
        take_inventory(without(entries, "mtp.0.attn_norm.weight"), SMALL)
    assert "download" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"the first is 'mtp\.0\.e_proj\.weight'"):
        take_inventory(without(entries, "mtp.0.e_proj.weight", "mtp.0.e_proj.scale"), SMALL)


@pytest.mark.parametrize(
    ("layers", "experts", "said"),
    [
        (100_000, SMALL.num_experts, f"100000 or more tensors are missing, the first is 'layers.{LAYERS}."),
        (10_000, 4096, "layers.0.ffn.gate.weight: shape is"),
    ],
)
def test_nobody_lists_all_that_a_small_config_can_ask_for(
    layers: int, experts: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second and some megabytes, not the hours and the memory that all of it would take."""
    made, entries = [], headers(replace(SMALL, layers=SMALL.layers[1:2] * LAYERS), "official")
    before = params.block_params

    def block_params(c: ModelConfig, prefix: str, spec: LayerSpec) -> list[Param]:
        made.append(prefix)
        return before(c, prefix, spec)

    monkeypatch.setattr(params, "block_params", block_params)
    config = replace(SMALL, layers=SMALL.layers[1:2] * layers, num_experts=experts)
    with pytest.raises(CheckpointError) as caught:
        take_inventory(entries, config)
    assert said in str(caught.value)
    assert len(made) < 5000


def test_mixed_names_are_accepted() -> None:
    """Some converters write official expert names beside Hugging Face ones."""
    ours, theirs = headers(SMALL, "bf16", 0), headers(SMALL, "hf-bf16", 0)
    mixed = {name: e for name, e in theirs.items() if ".mlp.experts." not in name}
    mixed |= {name: e for name, e in ours.items() if ".ffn.experts." in name}
    inventory = take_inventory(mixed, replace(SMALL, num_mtp_layers=0))
    assert [s.param for s in inventory.sources] == declare(SMALL, 0)
    assert inventory.family == "hf"
