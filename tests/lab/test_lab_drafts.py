"""What the commands say of a drafter, and the drafts that `dsv4 score` writes along a walk."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import SMALL, write_model
from safetensors.torch import load_file, save_file

from dsv4 import Engine, EngineConfig
from dsv4.config import Dspark
from dsv4.errors import CheckpointError, ConfigError, RequestError
from dsv4.lab.compare import compare, record
from dsv4.lab.doctor.selftest import behaviour
from dsv4.lab.gpus import known
from dsv4.lab.inspect import report
from dsv4.lab.plan import Demand, Plan, Wanted, describe
from dsv4.lab.score import Anchors, parse_walk, score_ids
from dsv4.weights.detect import read_headers
from tests.cli.cli_support import dsv4

DSPARK = replace(SMALL, num_mtp_layers=2, dspark=Dspark(4, 3, (0, 2), 8))
IDS = [5 + (7 * n + n // 9) % 50 for n in range(90)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("drafts") / "model", "official", DSPARK)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(folder, EngineConfig(max_context=100, max_batch=1, chunk=32))


def test_inspect_names_the_drafter(folder: Path, made: Callable[[str], Path]) -> None:
    config, _, inventory = read_headers(folder)
    assert report(inventory, config)["drafter"] == "DSpark drafter (2 stages, blocks of 4)"
    assert "mtp.1.markov_head.markov_w1" in report(inventory, config)["tensors"]
    for style, drafter in (("official", "MTP drafter"), ("hfnvfp4", "no drafter")):
        config, _, inventory = read_headers(made(style))
        assert config.drafter(inventory.num_mtp_layers) == drafter


def test_plan_counts_the_drafter_and_says_when_to_leave_it_out(folder: Path) -> None:
    demand, wanted = describe(str(folder), None), Wanted(context=100, batch=1)
    plan = Plan.make(demand, known("H200", 1), wanted)
    bare = Plan.make(demand, known("H200", 1), replace(wanted, speculate="off"))
    assert plan.drafter_bytes == plan.weight_bytes - bare.weight_bytes > 0 == bare.drafter_bytes
    assert plan.layout.store_bytes() > bare.layout.store_bytes() and plan.advice is None
    assert plan.report()["drafter"] == "DSpark drafter (2 stages, blocks of 4)"
    tiny = describe("tiny", "official")
    sizes = [Plan.make(tiny, known("H200", 1), replace(wanted, speculate=s)) for s in ("auto", "off")]
    room = sum(plan.memory.total for plan in sizes) // 2
    tight = replace(known("H200", 1), memory_bytes=room, host_memory=0)
    advice = Plan.make(tiny, tight, wanted).advice
    assert advice is not None and advice.startswith("--speculate off") and advice.endswith("then it fits")
    with pytest.raises(ConfigError, match="speculate is 'on', expected one of auto, off"):
        Wanted(context=1, batch=1, speculate="on")


def test_published_dspark_is_counted() -> None:
    """10.86 GB for Flash."""
    flash = replace(describe("flash", "official").config, dspark=Dspark(5, 128799, (40, 41, 42), 256))
    from dsv4.lab.styles import STYLES, stored_tensors
    from dsv4.model.params import each_kind

    total = sum(
        tensor.num_bytes * count
        for param, count in each_kind(flash, 3)
        if param.component == "mtp"
        for tensor in stored_tensors(param, STYLES["official"])
    )
    assert total == 10_862_838_300
    assert Demand("flash", flash, 3, ()).without_drafts().num_mtp_layers == 0


def test_compare_looks_into_the_stages(engine: Engine, folder: Path, tmp_path: Path) -> None:
    wanted = record(engine, IDS[:60], num_single=2)
    assert {seen.layer for seen in wanted.seen} >= {"mtp.0", "mtp.1"}
    assert compare(wanted, engine, IDS[:60], num_single=2).departure is None
    other = write_model(tmp_path / "other", "official", DSPARK, seed=3)
    weights = load_file(other / "model.safetensors")
    weights["mtp.1.ffn.gate.bias"] += 3 * torch.randn(weights["mtp.1.ffn.gate.bias"].shape)
    save_file(weights, other / "model.safetensors")
    changed = Engine.load(other, EngineConfig(max_context=100, max_batch=1))
    departure = compare(wanted, changed, IDS[:60], num_single=2, limit=1e-3).departure
    assert departure is not None and departure.layer == "mtp.1"
    bare = Engine.load(folder, EngineConfig(max_context=100, max_batch=1, speculate="off"))
    assert compare(wanted, bare, IDS[:60], num_single=2).departure is None


def test_doctor_measures_what_is_drafted(engine: Engine) -> None:
    _, acceptance = behaviour(engine)
    assert acceptance is not None and 0 <= acceptance <= 1


WALKS = ["0/0", "0/7,3/5", "7/7,1/2,4/4"]


def test_score_writes_the_same_along_every_walk(engine: Engine, folder: Path, tmp_path: Path) -> None:
    given, out = tmp_path / "ids.safetensors", tmp_path / "out.safetensors"
    anchors = torch.tensor([88, 0, 30, 47, 48, 49, 55, 60, 71, 86, 2])
    forced = torch.arange(44).view(11, 4)
    save_file({"ids": torch.tensor(IDS), "anchors": anchors, "forced_ids": forced}, given)
    done = dsv4(
        "score", folder, "--ids", given, "--prompt-len", 48, "--logits", out, "--draft-logits", "--json"
    )
    assert done.code == 0, done.err
    shapes = json.loads(done.out)["shapes"]
    assert shapes == {
        **{"prefill_logits": [48, 60], "decode_logits": [42, 60], "main_hidden": [11, 256]},
        **{"draft_base": [11, 4, 60], "draft_ids": [11, 4], "draft_logits": [11, 4, 60]},
        **{"confidence": [11, 4], "forced_logits": [11, 4, 60], "forced_confidence": [11, 4]},
    }
    want = load_file(out)
    assert torch.equal(want["draft_logits"].argmax(-1), want["draft_ids"])
    assert torch.equal(want["forced_logits"][:, 0], want["draft_logits"][:, 0])
    for walk in WALKS:
        got = score_ids(engine, IDS, 48, anchors=Anchors.read(given), walk=parse_walk(walk))
        for name, rows in want.items():
            assert torch.equal(got[name], rows), (walk, name)


def test_what_score_refuses(engine: Engine, made: Callable[[str], Path], tmp_path: Path) -> None:
    for text in ("", "3", "a/2", "1/2,", "-1/2", "3/2", "2/8"):
        with pytest.raises(ConfigError, match="--walk"):
            parse_walk(text)
    given = tmp_path / "ids.safetensors"
    save_file({"ids": torch.tensor(IDS)}, given)
    with pytest.raises(CheckpointError, match="has no tensor 'anchors'"):
        Anchors.read(given)
    save_file({"anchors": torch.tensor([3]), "forced_ids": torch.tensor([[1], [2]])}, given)
    with pytest.raises(CheckpointError, match="forced_ids has 2 rows, expected 1"):
        Anchors.read(given)
    for anchors, words in (
        (Anchors((89,), None), "anchor 89 has no token after it; expected 0 to 88"),
        (Anchors((3,), ((1, 2, 3),)), "forced_ids has 3 tokens for each anchor, expected 4"),
        (Anchors((3,), ((1, 2, 3, 60),)), "forced id 60 is outside the vocabulary of 60"),
    ):
        with pytest.raises(RequestError, match=words):
            score_ids(engine, IDS, 48, anchors=anchors)
    bare = Engine.load(made("official"), EngineConfig(max_context=100, speculate="off"))
    with pytest.raises(RequestError, match="no drafts are made here"):
        score_ids(bare, IDS, 48, anchors=Anchors((3,), None))
