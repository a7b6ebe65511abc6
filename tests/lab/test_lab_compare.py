"""Two runs held against each other: planted faults are found in their layer, and the part is named."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import SMALL, Tensors, write_model
from cli_support import dsv4, ok, refused
from lab_support import altered
from safetensors.torch import save_file
from torch import Tensor

from dsv4 import Engine, EngineConfig
from dsv4.cache.store import Tail
from dsv4.errors import ConfigError, RequestError
from dsv4.lab.compare import (
    PARTS,
    Comparison,
    Recording,
    check_alike,
    check_ids,
    compare,
    default_tokens,
    parse_settings,
    random_ids,
    record,
)
from dsv4.lab.difference import Agreement, Difference, Predictions, first_not_finite, routing_matrix
from dsv4.lab.score import score_ids
from dsv4.model.compressor import Compressor
from dsv4.model.step import Step
from dsv4.ops.mhc.cpu import Residual

# Four streams: a doubly stochastic matrix of two is symmetric, and could be transposed unseen.
SPEAKING = replace(SMALL, vocab_size=280, num_streams=4)
# Closes a block of 128, and leaves the indexer (the best 32 entries of 4 tokens each) something to choose.
IDS = random_ids(SPEAKING, 161)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("compare") / "model", "modelopt", SPEAKING)


def load(model: Path, **options: Any) -> Engine:
    return Engine.load(model, EngineConfig(max_batch=1, max_context=len(IDS), **options))


@pytest.fixture(scope="module")
def recording(model: Path) -> Recording:
    return record(load(model), IDS)


def against(recording: Recording, engine: Engine, limit: float | None = 1e-3) -> Comparison:
    return compare(recording, engine, IDS, limit=limit)


def test_the_same_twice_is_the_same(model: Path, recording: Recording) -> None:
    found = against(recording, load(model), limit=0.0)
    assert found.departure is None and found.largest_jump() is None
    assert list(found.layers) == ["layers.0", "layers.1", "layers.2", "mtp.0"]
    assert [layer.kind for layer in found.layers.values()] == ["sliding", "csa", "hca", "draft"]
    for layer in found.layers.values():
        assert all(part.relative == 0 and math.isclose(part.cosine, 1) for part in layer.parts.values())
        assert layer.routing.share == 1
    selection = found.layers["layers.1"].selection
    # 160 tokens: those from position 127 on see 32 entries or more.
    assert selection.share == 1 and selection.chosen == 33 * 32
    assert found.logits.as_dict() == {"kl_mean": 0, "kl_max": 0, "top1_agreement": 1, "positions": 160}


def test_every_part_is_looked_at(recording: Recording) -> None:
    seen = {(s.layer, s.part) for s in recording.seen}
    common = {part for part in PARTS if "compressor" not in part and "indexer" not in part}
    hca = common | {"attn.compressor.pooled"}
    parts = {"layers.0": common, "layers.1": set(PARTS), "layers.2": hca, "mtp.0": common}
    assert seen == {(layer, part) for layer, names in parts.items() for part in names | {"ffn.chosen"}}


def test_looking_changes_nothing(model: Path, recording: Recording) -> None:
    logits = score_ids(load(model, chunk=160), IDS[:160], 160)["prefill_logits"]
    assert torch.equal(recording.logits[0], logits)


def test_an_expert_whose_global_scale_was_doubled(model: Path, recording: Recording, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        stored = tensors["layers.2.ffn.experts.1.w2.weight_scale_2"]
        stored.data[:] = (2 * np.frombuffer(stored.data, "<f4")).tobytes()

    engine = load(altered(model, tmp_path / "model", change))
    found = against(recording, engine)
    assert found.departure is not None
    assert (found.departure.layer, found.departure.op) == ("layers.2", "experts.routed")
    assert found.departure.what == "routed experts" and "tokens of expert 1" in found.departure.detail
    assert list(found.layers) == ["layers.0", "layers.1", "layers.2"] and not found.logits.divergences
    jump = against(recording, engine, limit=None).largest_jump()
    assert jump is not None and (jump.layer, jump.part, jump.before) == ("layers.2", "ffn.routed", 0.0)


class BiasOnValues(Compressor):
    """The misreading of the reference that adds the position bias to values too."""

    def __init__(self, right: Compressor) -> None:
        vars(self).update(vars(right))
        self.project = right.wkv

    def __call__(self, x: Tensor, step: Step, tail: Tail) -> tuple[Tensor, Tensor]:
        bias = self.ape[step.positions % self.spec.ratio]
        self.wkv = lambda x, dtype: self.project(x, dtype) + bias  # type: ignore[assignment]
        return super().__call__(x, step, tail)


@pytest.mark.parametrize(("layer", "where"), [(1, "attention"), (2, "attention"), (1, "indexer")])
def test_a_position_bias_added_to_values(layer: int, where: str, model: Path, recording: Recording) -> None:
    engine = load(model)
    attention = engine.model.blocks[layer].attention
    holder: Any = attention if where == "attention" else attention.indexer
    holder.compressor = BiasOnValues(holder.compressor)
    found = against(recording, engine).departure
    assert found is not None and (found.layer, found.op) == (f"layers.{layer}", "compress.pool")
    assert ("indexer" in found.part) is (where == "indexer") and "ape" in found.what
    ratio = SPEAKING.layers[layer].ratio
    assert found.token % ratio == ratio - 1 and found.token < 160, (
        "a pooled entry stands where its block ends"
    )
    jump = against(recording, engine, limit=None).largest_jump()
    assert jump is not None and jump.layer == f"layers.{layer}"


@pytest.mark.parametrize(("layer", "site"), [(0, "hc_ffn"), (1, "hc_attn"), (2, "hc_ffn")])
def test_a_transposed_mixing_matrix(layer: int, site: str, model: Path, recording: Recording) -> None:
    engine = load(model)
    connection: Any = getattr(engine.model.blocks[layer], site)
    right = connection.mix_in

    def transposed(residual: Residual, *given: Any) -> Any:
        x = right(residual, *given)
        assert residual.comb is not None
        residual.comb = residual.comb.mT
        return x

    connection.mix_in = transposed
    # The streams are equal before the first layer's attention, and mixing equal ones shows nothing.
    found = against(recording, engine, limit=1e-4).departure
    assert found is not None
    assert (found.layer, found.part, found.op) == (f"layers.{layer}", f"{site}.streams", "mhc.post")


def test_a_router_with_another_bias(model: Path, recording: Recording) -> None:
    engine = load(model)
    moe: Any = engine.model.blocks[1].moe
    moe.bias = moe.bias.flip(0) + torch.tensor([0.0, 0.5, 0.0])
    found = against(recording, engine)
    assert found.departure is not None
    assert (found.departure.layer, found.departure.op) == ("layers.1", "route")
    assert found.layers["layers.1"].routing.share < 1


def test_an_indexer_that_chooses_otherwise(model: Path, recording: Recording) -> None:
    engine = load(model)
    indexer: Any = engine.model.blocks[1].attention.indexer
    right = indexer.weights_proj
    indexer.weights_proj = lambda x: -right(x)
    found = against(recording, engine)
    assert found.departure is not None
    assert (found.departure.layer, found.departure.op) == ("layers.1", "index.select")
    assert found.departure.token >= 127 and found.layers["layers.1"].selection.share < 0.999


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_located(value: float, model: Path, recording: Recording) -> None:
    engine = load(model)
    block: Any = engine.model.blocks[1]
    right = block.moe.ops.experts.ffn

    class Experts:
        routed = block.moe.ops.experts.routed

        @staticmethod
        def ffn(**arguments: Any) -> Tensor:
            y = right(**arguments).clone()
            y[17, 0, 5] = value
            return y

    block.moe.ops = replace(block.moe.ops, experts=Experts)
    found = against(recording, engine, limit=None)
    assert found.departure is not None and found.departure.relative is None
    assert (found.departure.layer, found.departure.op) == ("layers.1", "experts.ffn")
    assert found.departure.token == 17 and "B holds NaN or infinity at [17, 5]" in found.departure.detail
    assert "layers.2" not in found.layers
    json.dumps(found.report(), allow_nan=False)
    other = compare(record(engine, IDS), load(model), IDS).departure
    assert other is not None and other.detail.startswith("A holds NaN or infinity")


def test_logits_that_are_not_finite(model: Path, recording: Recording) -> None:
    engine = load(model)
    engine.model.norm[3] = math.nan
    found = against(recording, engine)
    assert found.departure is not None and found.departure.layer == "logits"


def test_single_tokens_are_looked_at_too(model: Path) -> None:
    wanted = record(load(model), IDS, num_single=3)
    assert [tuple(logits.shape) for logits in wanted.logits] == [(158, 280), *[(1, 280)] * 3]
    assert compare(wanted, load(model), IDS, 3, limit=0.0).logits.as_dict()["positions"] == 161
    engine = load(model)
    moe: Any = engine.model.blocks[2].moe
    right = moe.ops.experts

    class Experts:
        ffn = right.ffn

        @staticmethod
        def routed(**arguments: Any) -> Tensor:
            return right.routed(**arguments) * (1.1 if len(arguments["ids"]) == 1 else 1.0)

    moe.ops = replace(moe.ops, experts=Experts)
    found = compare(wanted, engine, IDS, 3, limit=1e-3)
    assert found.departure is not None and found.logits.as_dict()["positions"] == 158
    assert (found.departure.layer, found.departure.op) == ("layers.2", "experts.routed")
    assert found.departure.token == 158, "its place in the text, not in the step"


def test_activations_part_by_as_much_as_they_are_rounded(model: Path, recording: Recording) -> None:
    """The specification measures 0.038 for FP8 and 0.134 for NVFP4 products; roughly that is seen."""
    errors = []
    for activations in ("a8", "a4"):
        found = against(recording, load(model, activations=activations), limit=None)
        errors.append(found.layers["layers.0"].parts["ffn.out"].relative)
    assert 0.005 < errors[0] < 0.1 and 2 * errors[0] < errors[1] < 0.5


def test_a_draft_block_that_only_one_has(tmp_path: Path) -> None:
    config = replace(SPEAKING, num_mtp_layers=0)
    with_draft = write_model(tmp_path / "a", "bf16", SPEAKING)
    without = write_model(tmp_path / "b", "bf16", config)
    for a, b in ((with_draft, without), (without, with_draft)):
        found = compare(record(load(a), IDS, 2), load(b), IDS, 2, limit=0.0)
        assert found.departure is None and "mtp.0" not in found.layers
        assert found.logits.as_dict()["positions"] == 161


def test_only_models_of_one_size_can_be_compared() -> None:
    check_alike(SPEAKING, replace(SPEAKING, quantization={"quant_method": "fp8"}, num_mtp_layers=0))
    with pytest.raises(ConfigError, match="differ in hidden_size: 128 and 256; expected the same"):
        check_alike(SPEAKING, replace(SPEAKING, hidden_size=256))
    with pytest.raises(ConfigError, match="differ in layers"):
        check_alike(SPEAKING, replace(SPEAKING, layers=SPEAKING.layers[:2]))


def test_settings() -> None:
    assert parse_settings("") == EngineConfig()
    wanted = EngineConfig(activations="a8", qat="off", threads=2, ops=(("attention", "cpu"),))
    assert parse_settings(" activations=a8, op.attention=cpu ,qat=off,threads=2,") == wanted
    wanted = EngineConfig(no_graph=False, expert_parallel=True, rank_seconds=5.0, cache_pages=9)
    assert parse_settings("no_graph=false,expert_parallel=true,rank_seconds=5,cache_pages=9") == wanted
    for text, word in {
        "no_graph=off": "no_graph is 'off', expected true or false",
        "rank_seconds=x": "rank_seconds is 'x', expected a number",
        "activations": "expected NAME=VALUE",
        "activations=": "expected NAME=VALUE",
        "speed=9": "unknown setting 'speed'; use one of activations, cache",
        "max_batch=2": "unknown setting 'max_batch'",
        "activations=a8,activations=a4": "given twice",
        "activations=a5": "activations is 'a5'",
        "threads=x": "threads is 'x'",
    }.items():
        with pytest.raises(ConfigError, match=word):
            parse_settings(text)


def test_tokens() -> None:
    ids = random_ids(SPEAKING, 500)
    assert ids[0] == 0 and len(set(ids)) > 100 and all(0 <= id < 280 for id in ids)
    assert default_tokens(SPEAKING) == 256 and default_tokens(replace(SPEAKING, index_topk=100)) == 464
    assert default_tokens(replace(SPEAKING, index_topk=512)) == 256
    assert default_tokens(replace(SPEAKING, max_positions=50)) == 50
    for bad, single in (([5], 0), ([], 0), ([5, 280], 0), ([5, -1], 0), ([5, 6], 2), ([5, 6], -1)):
        with pytest.raises(RequestError):
            check_ids(bad, single, SPEAKING)


def test_differences() -> None:
    a, b = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    found = Difference()
    found.add(a[:1], b[:1])
    found.add(a[1:], b[1:])
    assert found.relative == pytest.approx(math.sqrt(32) / 5) and found.cosine == pytest.approx(9 / 25)
    assert found.rms == pytest.approx((2.5, 2.5))
    for x, y, relative, cosine in ((0.0, 0.0, 0.0, 1.0), (0.0, 1.0, math.inf, 0.0), (1.0, 0.0, 1.0, 0.0)):
        zero = Difference()
        zero.add(torch.full((2,), x), torch.full((2,), y))
        assert (zero.relative, zero.cosine) == (relative, cosine)
    chosen = Agreement()
    chosen.add(torch.tensor([[1, 2, -1], [3, 4, 5]]), torch.tensor([[2, 1, -1], [5, 9, 8]]))
    assert (chosen.shared, chosen.chosen) == (3, 5) and Agreement().share == 1
    logits = torch.tensor([[0.0, math.log(3.0)]])
    predictions = Predictions([])
    predictions.add(logits, torch.zeros(1, 2))
    expected = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert predictions.divergences == pytest.approx([expected]) and predictions.same == 0
    matrix = routing_matrix(torch.tensor([[2, 0]]), torch.tensor([[0.7, 0.3]]), 4)
    assert matrix.tolist() == [[pytest.approx(0.3), 0, pytest.approx(0.7), 0]]
    assert first_not_finite(torch.tensor([[1.0, math.inf]])) == [0, 1]
    assert first_not_finite(torch.tensor([1])) is None and first_not_finite(torch.tensor(1.0)) is None


def test_the_command(model: Path, tmp_path: Path) -> None:
    shown = ok("compare", model, model, "--tokens", 30)
    assert "bit for bit" in shown and "top-1 equal at 100.0% of 29 positions" in shown
    shown = ok("compare", model, "--b", "activations=a4", "--tokens", 40, "--decode", 2)
    assert "grows most  at layers.0" in shown and "40 tokens (made up)" in shown
    (tmp_path / "story").write_text("Once upon a time there was a red ball.")
    done = ok(
        "compare", model, "--b", "activations=a4", "--text", tmp_path / "story", "--json", "--limit", 0.01
    )
    report = json.loads(done)
    assert report["tokens"] == 38 and report["logits"] is None
    assert report["departure"]["layer"] == "layers.0" and report["departure"]["relative"] > 0.01
    assert report["layers"][0]["parts"]["attn.out"]["cosine"] < 1
    save_file({"ids": torch.tensor(IDS[:12])}, tmp_path / "ids")
    assert "11 tokens (ids)" in ok("compare", model, "--ids", tmp_path / "ids")


def test_a_picture(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for number, limit in enumerate((1e9, 0.01)):
        picture = tmp_path / f"depth{number}.png"
        ok("compare", model, "--b", "activations=a4", "--tokens", 140, "--limit", limit, "--plot", picture)
        assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(list(tmp_path.iterdir())) == 2


REFUSED: dict[str, str] = {
    "": "Missing argument",
    "{desk}/missing": "/missing does not exist",
    "{model} {desk}/missing": "/missing does not exist",
    "{model} {desk}": "config.json does not exist",
    "{model} {desk}/other": "the models differ in hidden_size",
    "{model} --a speed=9": "unknown setting 'speed'",
    "{model} --b op.attention=sm90": "op attention has no backend 'sm90'",
    "{model} --limit -1": "limit is -1.0, expected a number from 0",
    "{model} --limit nan": "limit is nan, expected a number from 0",
    "{model} --tokens 1": "tokens is 1, expected at least 2",
    "{model} --tokens 100000000": "100000000 tokens given, expected 2 to 65536",
    "{model} --tokens 9 --decode 9": "9 single tokens of 9",
    "{model} --text {desk}/missing": "/missing cannot be read",
    "{model} --text {desk}/noise": "noise is not UTF-8 text",
    "{model} --ids {desk}/noise": "/noise",
    "{model} --text {desk}/noise --ids {desk}/noise": "either --text or --ids",
    "{model} --plot {desk}/x.txt": "expected a name that ends in .png",
    "{model} --plot {desk}/missing/x.png": "expected the name of a file in an existing folder",
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    desk = tmp_path_factory.mktemp("desk")
    (desk / "noise").write_bytes(b"\xff\xfe\x00 not text, not safetensors")
    write_model(desk / "other", "bf16", replace(SPEAKING, hidden_size=256))
    return desk


@pytest.mark.parametrize("arguments", REFUSED)
def test_one_sentence_and_exit_code_2(arguments: str, model: Path, desk: Path) -> None:
    before = sorted(desk.iterdir())
    done = dsv4("compare", *(part.format(model=model, desk=desk) for part in arguments.split()))
    assert REFUSED[arguments] in refused(done)
    assert sorted(desk.iterdir()) == before


def test_without_matplotlib(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    message = refused(dsv4("compare", model, "--plot", tmp_path / "x.png"))
    assert "--plot needs matplotlib" in message and list(tmp_path.iterdir()) == []


def test_a_picture_that_cannot_be_written_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")

    replace_file = Path.replace

    def full(self: Path, target: Path) -> Path:
        if target.suffix == ".png":
            raise OSError(28, "No space left on device")
        return replace_file(self, target)  # what was measured of this CPU may be kept for the first time

    monkeypatch.setattr(Path, "replace", full)
    message = refused(dsv4("compare", model, "--tokens", 5, "--plot", tmp_path / "x.png"))
    assert "x.png cannot be written: No space left on device" in message and list(tmp_path.iterdir()) == []
