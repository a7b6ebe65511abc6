"""The doctor finds each planted fault, names it and says what to do; and nothing where nothing is wrong."""

import json
import re
import shutil
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import SMALL, Tensors, write_model
from cli_support import dsv4, refused
from lab_support import altered, swap_nibbles, trained_model, with_structure

from dsv4.cli.doctor import _Shown
from dsv4.cli.show import out
from dsv4.config import preset
from dsv4.lab.byte_tokenizer import byte_tokenizer_json
from dsv4.lab.doctor import exact, machine, weights
from dsv4.lab.doctor import examine as examination
from dsv4.lab.doctor.examine import examine_model
from dsv4.lab.doctor.findings import Finding
from dsv4.lab.doctor.golden import FINGERPRINTS
from dsv4.lab.doctor.machine import examine_machine
from dsv4.lab.doctor.ops import examine_ops, finding, fingerprints
from dsv4.lab.doctor.selftest import examine_engine
from dsv4.lab.doctor.tokenizer import examine_tokenizer
from dsv4.lab.doctor.weights import examine_weights, looks_trained
from dsv4.ops import IMPLEMENTATIONS, agree, backend_module
from dsv4.ops._memory import recall
from dsv4.ops._product import Product
from dsv4.ops.agree import Verdict, compare
from dsv4.ops.cases import make_cases, to_device
from dsv4.ops.experts import cpu as experts
from dsv4.ops.mhc import cpu as mhc
from dsv4.ops.rows import cpu as norm
from dsv4.ops.sample import cpu as sample
from dsv4.quant.formats import QuantTensor
from dsv4.weights.load import Checkpoint

# The smallest model with a tokenizer: 272 ids are the bytes and the special tokens.
SPEAKING = replace(SMALL, vocab_size=280)


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("doctor") / "official", "official", SPEAKING)


@pytest.fixture(scope="module")
def structured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_structure(tmp_path_factory.mktemp("doctor") / "structured", SPEAKING)


def failures(model: Path) -> dict[str, Finding]:
    return {f.name: f for f in examine_model(model) if f.level == "fail"}


def faults(model: Path) -> dict[str, Finding]:
    """Of the weights alone: the model is not run."""
    return {f.name: f for f in examine_weights(Checkpoint.open(model), full=False) if f.level == "fail"}


@pytest.mark.parametrize("style", ["official", "modelopt", "ct", "hfnvfp4", "bf16"])
def test_nothing_is_found_in_a_sound_checkpoint(style: str, tmp_path: Path) -> None:
    assert failures(write_model(tmp_path / "model", style, SPEAKING)) == {}


MISSING = [
    "layers.1.attn.indexer.weights_proj.weight",
    "layers.1.attn.indexer.wq_b.scale",
    "layers.1.attn.indexer.compressor.ape",
]


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_indexer_tensor(name: str, official: Path, tmp_path: Path) -> None:
    model = altered(official, tmp_path / "model", lambda tensors: tensors.__delitem__(name))
    found = failures(model)
    assert found.keys() == {"tensors"}
    assert name.removesuffix(".scale") in found["tensors"].text and "again" in found["tensors"].remedy


def bytes_as_numbers(codes: np.ndarray) -> np.ndarray:
    """The byte 120, which means 2^-7, is taken for the number 120, which rounds to 2^7."""
    numbers = torch.tensor(codes).float()
    return numbers.to(torch.float8_e8m0fnu).view(torch.uint8).numpy()


def values_as_integers(codes: np.ndarray) -> np.ndarray:
    """2^-7 is converted to an integer: 0."""
    return torch.tensor(codes).view(torch.float8_e8m0fnu).float().to(torch.uint8).numpy()


def values_as_e4m3(codes: np.ndarray) -> np.ndarray:
    """2^-7 is converted to E4M3, whose byte is then taken for E8M0."""
    values = torch.tensor(codes).view(torch.float8_e8m0fnu).float()
    return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


@pytest.mark.parametrize("only", ["layers.0.ffn.experts.1.w2.", "attn.wkv.", "mtp.0.ffn.experts.", ""])
@pytest.mark.parametrize("convert", [bytes_as_numbers, values_as_integers, values_as_e4m3])
def test_scales_converted_as_numbers(
    convert: Callable[[np.ndarray], np.ndarray], only: str, official: Path, tmp_path: Path
) -> None:
    def change(tensors: Tensors) -> None:
        for name, stored in tensors.items():
            if stored.dtype == "F8_E8M0" and only in name:
                codes = np.frombuffer(bytes(stored.data), np.uint8)
                stored.data[:] = convert(codes).tobytes()

    found = faults(altered(official, tmp_path / "model", change))
    assert found.keys() == {"scales"}
    assert only.strip(".") in found["scales"].text and "copied as bytes" in found["scales"].remedy


def test_scales_that_are_no_numbers(official: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["layers.2.ffn.experts.0.w1.scale"].data[3] = 255

    found = failures(altered(official, tmp_path / "model", change))
    assert "layers.2.ffn.experts.0.w1 has a scale that is no finite number" in found["values"].text


def test_scales_of_every_expert_that_are_no_numbers(tmp_path: Path) -> None:
    """Then nothing is left to see the order of nibbles by."""
    model = write_model(tmp_path / "model", "modelopt", replace(SPEAKING, num_mtp_layers=0))

    def change(tensors: Tensors) -> None:
        for name, stored in tensors.items():
            if name.endswith("w1.weight_scale"):
                stored.data[:] = b"\x7f" * len(stored.data)

    assert failures(altered(model, tmp_path / "bad", change)).keys() == {"values"}


def test_a_negative_scale(structured: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["layers.1.ffn.experts.0.w1.weight_scale"].data[7] |= 128

    found = failures(altered(structured, tmp_path / "model", change))
    assert "layers.1.ffn.experts.0.w1 has a negative scale" in found["values"].text


def test_a_dropped_global_scale(structured: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name, stored in tensors.items():
            if name.endswith("weight_scale_2"):
                stored.data[:] = np.array(1.0, "<f4").tobytes()

    found = faults(altered(structured, tmp_path / "model", change))
    assert "weight_scale_2 must multiply" in found["scales"].remedy


def test_a_norm_that_holds_nan(official: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["layers.0.ffn_norm.weight"].data[:2] = b"\xc0\x7f"

    found = failures(altered(official, tmp_path / "model", change))
    assert found.keys() == {"values"} and "layers.0.ffn_norm" in found["values"].text


def test_a_hash_table_of_another_model(official: Path, tmp_path: Path) -> None:
    def twice(tensors: Tensors) -> None:
        table = tensors["layers.0.ffn.gate.tid2eid"]
        table.data[:16] = np.array([1, 1], "<i8").tobytes()

    def beyond(tensors: Tensors) -> None:
        tensors["layers.0.ffn.gate.tid2eid"].data[:8] = np.array(3, "<i8").tobytes()

    assert "twice" in failures(altered(official, tmp_path / "a", twice))["hash tables"].text
    assert "expected 0 to 2" in failures(altered(official, tmp_path / "b", beyond))["hash tables"].text


@pytest.mark.parametrize("only", ["", "layers.1.ffn.experts."])
def test_swapped_nibbles(only: str, structured: Path, tmp_path: Path) -> None:
    sound = examine_weights(Checkpoint.open(structured), full=False)
    assert {f.name: f.level for f in sound}["nibbles"] == "ok"
    found = faults(altered(structured, tmp_path / "model", lambda t: swap_nibbles(t, only)))
    assert "look swapped" in found["nibbles"].text and "low nibble" in found["nibbles"].remedy
    assert (only or "layers.") in found["nibbles"].text


def test_swapped_nibbles_cannot_be_seen_in_random_weights(official: Path, tmp_path: Path) -> None:
    """It is said, not hidden: the order of independent numbers leaves no trace."""
    for model in (official, altered(official, tmp_path / "model", swap_nibbles)):
        found = examine_weights(Checkpoint.open(model), full=False)
        (finding,) = [f for f in found if f.name == "nibbles"]
        assert finding.level == "note" and "cannot be seen" in finding.text


def test_a_trained_model_and_its_faults(tmp_path: Path) -> None:
    model = trained_model()
    assert looks_trained(Checkpoint.open(model))
    assert {f.level for f in examine_model(model)} == {"ok"}
    found = failures(altered(model, tmp_path / "swapped", swap_nibbles))
    assert found.keys() == {"nibbles", "prediction", "draft"}
    # The same words under other ids: sizes and special tokens agree, only the predictions do not.
    other = altered(model, tmp_path / "other", lambda tensors: None)
    content = json.loads((other / "tokenizer.json").read_text())
    special = {token["id"] for token in content["added_tokens"]}
    words = [(text, id) for text, id in content["model"]["vocab"].items() if id not in special]
    shuffled = np.random.default_rng(0).permutation([id for _, id in words]).tolist()
    content["model"]["vocab"] |= {text: id for (text, _), id in zip(words, shuffled, strict=True)}
    (other / "tokenizer.json").write_text(json.dumps(content))
    assert "prediction" in failures(other)


def test_a_draft_block_that_never_agrees(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name, stored in tensors.items():
            if name in ("mtp.0.e_proj.weight", "mtp.0.h_proj.weight"):
                stored.data.reverse()

    found = failures(altered(trained_model(), tmp_path / "model", change))
    assert "draft" in found and "E8M0 scales must be copied as bytes" in found["draft"].remedy


def test_a_tokenizer_of_another_model(official: Path, tmp_path: Path) -> None:
    config = Checkpoint.open(official).config
    assert examine_tokenizer(official, config).level == "ok"
    for size, word in ((400, "400 ids"), (272, "")):
        (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json(size))
        finding = examine_tokenizer(tmp_path, config)
        assert finding.level == ("fail" if word else "ok") and word in finding.text
    assert examine_tokenizer(official, replace(config, vocab_size=300)).level == "fail"
    assert "end token is 1, config.json says 5" in examine_tokenizer(official, replace(config, eos_id=5)).text
    published = examine_tokenizer(official, replace(config, vocab_size=129280))
    assert published.level == "fail" and "<｜fim▁hole｜> has id none, expected 128800" in published.text
    (tmp_path / "tokenizer.json").write_text("{}")
    assert examine_tokenizer(tmp_path, config).level == "fail"
    (tmp_path / "tokenizer.json").unlink()
    assert examine_tokenizer(tmp_path, config).level == "note"


def test_a_foreign_tokenizer_does_not_stop_the_examination(official: Path, tmp_path: Path) -> None:
    model = altered(official, tmp_path / "model", lambda tensors: None)
    (model / "tokenizer.json").write_text(byte_tokenizer_json(512))
    found = list(examine_model(model))
    assert [f.name for f in found if f.level == "fail"] == ["tokenizer"]
    (tokenizer,) = [finding for finding in found if finding.name == "tokenizer"]
    assert "of another model: tokenizer.json has 512 ids, the model 280 rows" in tokenizer.text


def test_a_large_checkpoint_is_sampled(structured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(structured)
    everything = sum(np.prod(s.param.shape) for s in checkpoint.inventory.sources if s.format is not None)
    monkeypatch.setattr(weights, "BUDGET", 1000)
    monkeypatch.setattr(examination, "SMALL_MODEL", 1000)
    seen = next(f for f in examine_model(structured) if f.name == "values").text
    assert "a sample of" in seen
    assert any(
        f.name == "run" and f.level == "note" and "--full" in f.text for f in examine_model(structured)
    )
    full = examine_weights(checkpoint, full=True)
    assert "all values" in full[0].text and everything > 0


def test_config_and_tensors_may_part(official: Path, tmp_path: Path) -> None:
    model = altered(official, tmp_path / "model", lambda tensors: None)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["moe_quant_algo"] = "NVFP4"
    (model / "config.json").write_text(json.dumps(config))
    notes = [f.text for f in examine_model(model) if f.level == "note" and f.name == "config"]
    assert notes == ["config.json announces NVFP4 experts, the tensors are mxfp4; the tensors decide"]


def test_rows_that_depend_on_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recall.cache_clear()
    (finding,) = exact.examine_exact(SMALL, 1, 512)
    assert finding.level == "ok" and "blas multiplies" in finding.text

    with monkeypatch.context() as changed:
        changed.setattr(exact, "row_product", lambda x, w: torch.mm(x, w) + x.shape[0])
        (finding,) = exact.examine_exact(SMALL, 1, 512)
        assert finding.level == "fail" and "depends on the others" in finding.text
        assert str(tmp_path) in finding.remedy
    with monkeypatch.context() as changed:
        other = Product("onednn", (8,), "")
        changed.setattr(exact, "measure", lambda *shape: other)
        (finding,) = exact.examine_exact(SMALL, 1, 512)
        assert finding.level == "fail" and "was remembered, but does not hold now" in finding.text
    recall.cache_clear()


def test_every_function_of_every_op_has_a_case() -> None:
    covered = {(case.op, case.function) for case in make_cases(torch.float32)}
    called = {
        ("linear", "linear"), ("linear", "grouped"), ("linear", "embed"), ("experts", "ffn"),
        ("experts", "routed"), ("route", "by_score"), ("route", "by_hash"), ("rows", "rms_norm"),
        ("mhc", "pre"), ("mhc", "post"), ("mhc", "head"), ("mhc", "mix_in"), ("attention", "queries"),
        ("attention", "entries"), ("attention", "store"), ("attention", "pool"), ("attention", "attend"),
        ("attention", "attend_block"),
        ("index", "queries"), ("index", "keys"), ("index", "select"), ("index", "visible_rows"),
        ("sample", "choose"), ("sample", "log_probs"),
    }  # fmt: skip
    assert covered == called
    assert {op for op, _ in covered} == set(IMPLEMENTATIONS)


def test_recorded_numbers_are_those_of_the_reference() -> None:
    now = fingerprints()
    assert now.keys() == FINGERPRINTS.keys()
    for name, values in now.items():
        assert values == pytest.approx(FINGERPRINTS[name], rel=2e-5, abs=2e-5 * max(map(abs, values))), name


def fake(op: str, monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    """A second backend of an op: the reference's functions, with some replaced."""
    reference = backend_module(op, "cpu")
    module = types.ModuleType(f"dsv4.ops.{op}.prefill")
    vars(module).update({**vars(reference), "__name__": module.__name__, **functions})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(IMPLEMENTATIONS, op, ("cpu", "gpu"))


def broken(*arguments: object) -> None:
    raise ValueError("no kernel image is available")


def test_a_wrong_backend_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fake("rows", monkeypatch)
    assert finding(compare("rows", "gpu", "cpu")).level == "ok"
    fake("rows", monkeypatch, rms_norm=lambda x, w, eps: norm.rms_norm(x, w, eps) * 1.001)
    found = finding(compare("rows", "gpu", "cpu"))
    assert found.level == "fail" and "rms_norm (weighted): relative error 1.0e-03" in found.text
    assert "--op rows=cpu" in found.remedy
    fake("rows", monkeypatch, rms_norm=lambda x, w, eps: norm.rms_norm(x, w, eps) / 0)
    assert "NaN or infinity" in compare("rows", "gpu", "cpu").problem
    fake("rows", monkeypatch, rms_norm=broken)
    assert "ValueError: no kernel image is available" in compare("rows", "gpu", "cpu").problem
    fake("sample", monkeypatch, choose=lambda *arguments: sample.choose(*arguments) + 1)
    assert "choices differ" in compare("sample", "gpu", "cpu").problem
    fake("sample", monkeypatch, log_probs=lambda logits: logits[:-1])
    assert "shapes [[199]], expected [[200]]" in compare("sample", "gpu", "cpu").problem


def test_a_backend_may_hold_weights_in_its_own_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the experts' case all fifteen, in their lists; never a cache entry or an activation."""
    held: list[str] = []

    @dataclass(frozen=True)
    class Tiles:
        weight: QuantTensor

    def hold(weight: QuantTensor, device: str) -> Tiles:
        held.append(device)
        return Tiles(weight)

    def opened(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(opened, value))
        assert not isinstance(value, QuantTensor)
        return value.weight if isinstance(value, Tiles) else value

    def through(function: Callable[..., object]) -> Callable[..., object]:
        return lambda *arguments: function(*opened(arguments))

    both = {name: through(getattr(experts, name)) for name in ("ffn", "routed")}
    fake("experts", monkeypatch, hold=hold, **both)
    assert not compare("experts", "gpu", "cpu").problem and held == ["cpu"] * 18
    fake("attention", monkeypatch, hold=broken)
    assert not compare("attention", "gpu", "cpu").problem, "nothing to hold"
    fake("experts", monkeypatch, hold=broken)
    assert "ValueError: no kernel image is available" in compare("experts", "gpu", "cpu").problem


def test_gpu_backends_get_tiles() -> None:
    """What they make of them needs a GPU; that they get them does not."""
    pytest.importorskip("triton")
    weighty = {("linear", "linear"), ("linear", "grouped"), ("experts", "ffn"), ("experts", "routed")}
    weighty |= {("route", "by_score"), ("route", "by_hash")}
    for case in make_cases(torch.bfloat16):
        module = backend_module(case.op, "gpu")
        shown = str(to_device(case.arguments, "cpu", getattr(module, "hold", None)))
        assert ("Tiled(" in shown) is ((case.op, case.function) in weighty), (case.op, case.function)


def test_every_backend_runs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is not chosen there."""
    fake("rows", monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(agree, "compare", lambda op, name, device: Verdict(f"{op}.{name} on {device}"))
    found = {f.name for f in examine_ops() if f.name.endswith(" on cuda")}
    assert found == {f"{op}.{name} on cuda" for op, names in IMPLEMENTATIONS.items() for name in names}
    assert "rows.gpu on cuda" in found


def test_backends_that_cannot_run_here_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("they run here")
    fake("rows", monkeypatch)
    notes = [f.text for f in examine_ops() if f.level == "note"]
    assert any("rows.gpu" in text for text in notes)


def test_a_reference_that_computes_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = mhc.post
    monkeypatch.setattr(mhc, "post", lambda x, streams, gate, comb: right(x, streams, gate, comb.mT))
    assert [f.name for f in examine_ops() if f.level == "fail"] == ["mhc.cpu"]
    finding = examine_engine("cpu")
    assert finding.level == "fail" and "median relative error" in finding.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_is_examined_too() -> None:
    found = examine_ops()
    assert [f for f in found if f.level == "fail"] == []
    assert any("on cuda" in f.name for f in found)
    assert examine_engine("cuda").level == "ok"


def test_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {f.name: f for f in examine_machine(tmp_path)}
    assert {"python", "torch", "gpu", "triton", "compiler", "memory", "disk", "model disk"} <= found.keys()
    assert all(f.level != "fail" for f in found.values()), found
    monkeypatch.setattr(machine, "LIBRARIES", {"torch": ("99", None), "no-such-thing": ("1", "2")})
    found = {f.name: f for f in examine_machine(None)}
    assert found["torch"].level == "fail" and found["torch"].remedy == "pip install 'torch>=99'"
    assert found["no-such-thing"].text == "not installed, expected no-such-thing>=1,<2"
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = {f.name: f for f in examine_machine(None)}
    assert found["gpu"].level == "fail" and "built for CUDA" in found["gpu"].remedy
    usage = types.SimpleNamespace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    assert {f.name: f for f in examine_machine(None)}["disk"].level == "fail"

    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda prefix: nowhere())
    assert "set TMPDIR" in {f.name: f for f in examine_machine(None)}["disk"].remedy
    assert "set TMPDIR" in examine_engine("cpu").remedy


def test_the_command(official: Path, tmp_path: Path) -> None:
    done = dsv4("doctor", official, "--json")
    report = json.loads(done.out)
    assert done.code == 0 and report["pass"] and done.err == ""
    assert {f["area"] for f in report["findings"]} == {"machine", "ops", "engine", "checkpoint", "model"}
    bad = altered(official, tmp_path / "bad", lambda tensors: tensors.__delitem__(MISSING[0]))
    done = dsv4("doctor", bad)
    said = " ".join(done.out.split())
    assert done.code == 1 and re.search(r"FAIL 1 of .* download the checkpoint again", said)
    assert f"fail checkpoint tensors: 1 tensors are missing, the first is '{MISSING[0]}'" in said
    assert max(map(len, done.out.splitlines())) <= 80 and "cases as recorded" not in done.out
    assert re.search(r"ok machine python, torch, .*ok ops linear\.cpu, experts\.cpu", said), "one line each"
    with out.capture() as capture:
        _Shown(verbose=True).add(Finding("ops", "linear.cpu", "ok", "19 cases as recorded"))
    assert capture.get() == "ok    ops        linear.cpu: 19 cases as recorded\n"


def test_mistakes_of_the_user(tmp_path: Path) -> None:
    assert "/missing does not exist" in refused(dsv4("doctor", tmp_path / "missing"))
    assert "No such option: --nope" in refused(dsv4("doctor", "--nope"))
    assert "config.json does not exist" in failures(tmp_path)["tensors"].text


def test_preset_of_the_golden_vector_is_the_one_recorded() -> None:
    """golden.py was made with these sizes; another preset needs another recording."""
    assert (preset("tiny").hidden_size, preset("tiny").vocab_size, preset("tiny").num_layers) == (256, 512, 4)
