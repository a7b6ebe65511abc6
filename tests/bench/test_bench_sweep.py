"""`python -m bench.sweep` and `bench.beside`: what they measure, leave out and draw."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the decode kernels need Triton")

from bench import beside
from bench.sweep import CONTEXTS, _line, draw_line, draw_speed, points, read_line, series
from dsv4.config import preset
from dsv4.errors import ConfigError
from dsv4.lab.bench import decode as bench
from dsv4.lab.bench import subject
from dsv4.lab.bench.subject import Reads
from dsv4.step.buffers import ROWS

CPU = torch.device("cpu")
TINY = preset("tiny")


def test_points_of_a_sweep() -> None:
    wanted = bench.Wanted(4096, 1, 128)
    found = points(wanted, 1 << 20)
    assert len(found) == len(CONTEXTS) + len(ROWS) - 1  # one is in both
    assert all(point.steps == 64 for point in found)
    lines = [{"context": p.context, "batch": p.batch, "tokens_per_second": 1.0, "share": 0.5} for p in found]
    lines[-1] = {"context": 4096, "batch": 32, "left_out": "takes too much"}
    curves = series(lines, wanted)
    assert [p["context"] for p in curves["over_context"]] == list(CONTEXTS)
    assert [p["batch"] for p in curves["over_batch"]] == [1, 2, 4, 8, 16]
    assert len(curves["left_out"]) == 1
    assert {p.context for p in points(wanted, 65536)} == {4096, 16384, 65536}


def test_a_sweep_leaves_out_a_context_beyond_the_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of an sm_120 has 99 KiB of shared memory: a row has at most as many entries as fit."""
    sizes = SimpleNamespace(multi_processor_count=188)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sizes)
    monkeypatch.setattr(subject, "capability", lambda device: 120)
    flash = SimpleNamespace(config=preset("flash"), mesh=SimpleNamespace(size=1))
    line = _line(flash, bench.Wanted(1 << 20), Reads(0, ()), 1.0, CPU)  # type: ignore[arg-type]
    assert "expected at most 191824" in line["left_out"]


def test_picture_from_given_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    contexts = [
        {"context": c, "tokens_per_second": 300 - 20 * i, "share": 0.5} for i, c in enumerate(CONTEXTS)
    ]
    batches = [{"batch": b, "tokens_per_second": 300 * b**0.5, "share": 0.4} for b in ROWS]
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        draw_speed(tmp_path / f"speed{suffix}", contexts, batches, "Decoding flash", "NVIDIA H200")
        assert (tmp_path / f"speed{suffix}").read_bytes().startswith(start)
    swept = {"over_context": contexts, "over_batch": batches, "date": "2026-11-15T09:00:00", "model": "flash"}
    swept |= {"layout": "nvfp4", "is_synthetic": True, "layers": 43, "experts": 192, "device_name": "a GPU"}
    (tmp_path / "out").write_text(f"a table\n{json.dumps(swept)}\n")
    draw_line(read_line(tmp_path / "out"), tmp_path / "elsewhere.png")
    assert (tmp_path / "elsewhere.png").stat().st_size > 10_000
    for text, why in (("{}", "holds no sweep"), ("a table", "is no record"), ("", "is no record")):
        (tmp_path / "out").write_text(text)
        with pytest.raises(ConfigError, match=why):
            read_line(tmp_path / "out")
    draw_speed(tmp_path / "empty.png", [], [], "nothing fitted", "")
    with pytest.raises(ConfigError, match="cannot be written"):
        draw_speed(tmp_path / "no" / "x.png", contexts, batches, "", "")


def test_no_transformers_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="4.0"))
    with pytest.raises(ConfigError, match=r"transformers 4\.0 has no DeepSeek-V4"):
        beside.check(4096)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="needs Hugging Face Transformers"):
        beside.check(4096)


def test_a_context_that_transformers_cannot_hold_is_refused() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="use at most 8192"):
        beside.check(9000)


def test_transformers_has_the_same_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    config = replace(TINY, hidden_size=64, num_experts=4, expert_width=32)
    model = beside.make(config, CPU)
    want = config.layers
    kinds = {"sliding": "sliding", "csa": "compressed_sparse", "hca": "heavily_compressed"}
    assert model.config.layer_types == [f"{kinds[layer.kind]}_attention" for layer in want]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    tables = [b for name, b in model.named_buffers() if name.endswith("tid2eid")]
    assert len(tables) == 1 and int(tables[0].max()) == 3
    monkeypatch.setattr(beside, "WARM", 0)
    monkeypatch.setattr(beside, "STEPS", 1)
    monkeypatch.setattr(beside, "make", lambda config, device: model)
    found = beside.measure(config, 5, 2, CPU)
    assert found["ms_per_token"] > 0 and found["tokens_per_second"] > 0
    with pytest.raises(ConfigError, match="lower --layers or --experts"):
        beside.check_theirs(preset("flash"), 10**9)
