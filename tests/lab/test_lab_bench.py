"""`dsv4 bench` without a GPU: what it refuses, what it counts, what it writes."""

import importlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benched import TINY, size_of, tiny_bundle, tiny_decoder
from cli_support import dsv4, ok, refused

pytest.importorskip("triton", reason="the decode kernels need Triton")


from dsv4.cache.store import Cache
from dsv4.config import ModelConfig, preset
from dsv4.engine.memory import RESERVED
from dsv4.errors import ConfigError
from dsv4.gpu.pdl import tensors_of
from dsv4.lab.bench import decode as bench
from dsv4.lab.bench import prefill
from dsv4.lab.bench.profile import ENDS, Span, kinds_of, summarise
from dsv4.lab.bench.record import commit
from dsv4.lab.bench.subject import (
    DTYPE,
    Reads,
    check_fits,
    choose,
    other_bytes,
    synthetic,
    synthetic_bytes,
)
from dsv4.lab.inspect import active_share
from dsv4.lab.plan import describe
from dsv4.lab.synthetic import make_weights, with_experts
from dsv4.model.model import Model
from dsv4.ops.sample.cpu import HISTORY
from dsv4.quant.codec import decode
from dsv4.step.buffers import Buffers
from dsv4.step.run import Decoder

CPU = torch.device("cpu")

REFUSED = {
    "decode --synthetic big": "unknown preset 'big'; use one of flash, pro, tiny",
    "decode --synthetic flash --experts 300": "experts is 300, expected 6 (chosen per token) to 256",
    "decode --synthetic flash --experts 5": "experts is 5, expected 6",
    "decode --synthetic flash --layers 44": "layers is 44, expected 1 to 43",
    "decode --synthetic flash --layout int4": "unknown layout 'int4'; use one of official, modelopt, nvfp4",
    "decode {folder} --synthetic flash": "both",
    "decode {folder} --experts 8": "--experts goes with --synthetic",
    "decode {folder} --layout nvfp4": "--layout goes with --synthetic",
    "decode {folder}/missing": "does not exist",
    "decode --synthetic tiny --context 0": "context is 0, expected at least 1",
    "decode --synthetic tiny --context 70000": "context 70000 exceeds the model's 65536 positions",
    "decode --synthetic tiny --batch 33": "batch is 33, expected 1 to 32",
    "decode --synthetic tiny --steps 0": "steps is 0, expected at least 1",
    "decode --synthetic tiny --steps 70000": "70000 steps need",
    "decode --synthetic tiny --max-context 4096": "max_context is 4096, expected 4269",
    "decode --synthetic tiny --save x.json": "x.json: dsv4 plan reads records from *.jsonl",
    "decode --synthetic tiny --save no/such/x.jsonl": "its folder must exist",
    "decode --synthetic tiny --layers 2 --save x.jsonl": "--save keeps figures of whole models",
    "prefill --synthetic tiny --tokens 0": "tokens is 0, expected at least 1",
    "prefill --synthetic tiny --tokens 65537": "context 0 and 65537 tokens exceed the model's 65536",
    "nope": "No such command 'nope'",
}
NO_GPU = "torch {} sees no CUDA GPU; run it on a machine with one"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, not to be changed."""
    folder = tmp_path_factory.mktemp("bench") / "model"
    for _ in dsv4_init(folder):
        pass
    return folder


@pytest.mark.parametrize("command", REFUSED)
def test_refused(command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert REFUSED[command] in refused(dsv4("bench", *command.format(folder=folder).split()))
    assert list(tmp_path.iterdir()) == []


def dsv4_init(folder: Path) -> Iterator[Any]:
    from dsv4.lab.init import make

    return make(folder, replace(TINY, vocab_size=300), "modelopt", 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["decode", "prefill"])
def test_no_gpu_is_one_sentence(command: str) -> None:
    assert NO_GPU.format(torch.__version__) in refused(dsv4("bench", command, "--synthetic", "flash"))


def test_help() -> None:
    assert ok("bench").strip() == ok("bench", "--help").strip()
    for command in ("decode", "prefill"):
        assert f"{command} " in ok("bench")
        text = ok("bench", command, "--help")
        assert f"dsv4 bench {command}" in text.split("Examples")[1]


@pytest.mark.parametrize("layout", ["modelopt", "nvfp4"])
def test_weights_take_what_was_computed(layout: str) -> None:
    weights = make_weights(TINY, layout, "cpu")
    assert synthetic_bytes(TINY, layout) == sum(map(size_of, weights.tensors.values()))


def test_everything_else_takes_what_was_computed() -> None:
    wanted = bench.Wanted(600, 3)
    bundle = tiny_bundle()
    layout = wanted.layout(TINY)
    cache = Cache(layout, "cpu", DTYPE)
    buffers = Buffers(TINY, wanted.rows, layout.max_context, DTYPE, "cpu")
    of_memory = {
        t.untyped_storage().data_ptr(): t for t in reversed(tensors_of(list(vars(buffers).values())))
    }
    held = list(of_memory.values())
    held += [t for layer in cache.layers for tail in layer.tails for t in (tail.values, tail.scores)]
    model = Model(bundle, layout.max_context, "cpu")
    ropes = {id(b.attention.rope): b.attention.rope for b in model.blocks}.values()
    held += [t for rope in ropes for t in (rope.cos, rope.sin)] + [cache.page_table]
    held += [site.mixing.fn for b in model.blocks for site in (b.hc_attn, b.hc_ffn)] + [
        model.hc_head.mixing.fn
    ]
    held += [torch.zeros(layout.num_slots, HISTORY + layout.max_context, dtype=torch.int32)]  # of penalties
    rows = [q for layer in cache.layers for q in (layer.entries, layer.keys) if q is not None]
    rows.append(cache._rings)  # of all layers, with what lies between them
    assert other_bytes(layout, (wanted.rows,)) - RESERVED == sum(map(size_of, held + rows))


def meta_weights(config: ModelConfig, layout: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Shapes without memory; there is no generator for them."""
    importlib.import_module("torch._dynamo")  # which looks at the class, first
    monkeypatch.setattr(torch, "Generator", lambda device: SimpleNamespace(manual_seed=lambda seed: None))
    return make_weights(config, layout, "meta")


def test_bytes_read_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for block scales, which tiles of FP8 repeat for every 16 rows, and norms kept in float32."""
    demand = describe("flash", "modelopt")
    config, kinds = (
        demand.config,
        [(s, n) for s, n in demand.kinds if active_share(s.param.component, demand.config)],
    )
    experts = sum(s.num_bytes * n for s, n in kinds if s.param.expert is not None)
    others = sum(s.num_bytes * n for s, n in kinds if s.param.expert is None)
    want = experts * config.experts_per_token / config.num_experts + others
    config = replace(config, num_mtp_layers=0)
    reads = Reads.of(meta_weights(config, "modelopt", monkeypatch).tensors, config.num_layers)
    assert reads.step([config.experts_per_token] * config.num_layers) == pytest.approx(want, rel=3e-3)
    assert sum(reads.per_expert) * config.num_experts == pytest.approx(experts, rel=1e-5)
    # Fewer resident experts make the model smaller, not the step; the gate apart.
    fewer = with_experts(config, 16)
    small = Reads.of(meta_weights(fewer, "modelopt", monkeypatch).tensors, config.num_layers)
    gate = 2 * config.hidden_size + 4
    assert small.per_expert == reads.per_expert
    assert reads.always - small.always <= config.num_layers * gate * (config.num_experts - 16)


def test_experts_that_do_not_fit_are_refused_with_how_many_would() -> None:
    subject = synthetic("flash", 192, None, "modelopt")
    others = 5 * 10**9
    free = 100 * 10**9
    with pytest.raises(
        ConfigError, match=r"takes 125\.7 GB of weights and 5\.0 GB beside .* at most"
    ) as error:
        check_fits(subject, others, free)
    most = int(str(error.value).rsplit(" ", 1)[1])
    assert synthetic_bytes(with_experts(subject.config, most), "modelopt") + others <= free
    assert synthetic_bytes(with_experts(subject.config, most + 1), "modelopt") + others > free
    check_fits(synthetic("flash", most, None, "modelopt"), others, free)
    with pytest.raises(ConfigError, match="not even 6 fit: lower --context, --batch or --layers"):
        check_fits(subject, others, 10**9)


def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    for _ in dsv4_init(tmp_path / "model"):
        pass
    subject = choose(tmp_path / "model", None, None, None, None)
    check_fits(subject, 0, subject.weight_bytes)
    with pytest.raises(ConfigError, match=r"model with 8 experts takes .* lower --context or --batch"):
        check_fits(subject, 0, subject.weight_bytes - 1)


def test_where_the_tokens_are() -> None:
    flash = preset("flash")
    wanted = bench.Wanted(4096, 3, 128)
    assert (wanted.start(flash), wanted.rows) == (4096, 4)
    assert wanted.layout(flash).max_context >= 4096 + wanted.span
    assert wanted.layout(flash).max_context % 256 == 0 and wanted.layout(flash).num_slots == 3
    last = replace(wanted, context=1 << 20)
    assert last.start(flash) == (1 << 20) - last.span and last.layout(flash).max_context == 1 << 20
    assert replace(wanted, max_context=1 << 20).layout(flash).max_context == 1 << 20


def test_the_cache_is_filled_with_numbers() -> None:
    cache = Cache(bench.Wanted(600, 2).layout(TINY), "cpu", DTYPE)
    bench.fill(cache)
    for layer in cache.layers:
        for store in (layer.ring, layer.entries, layer.keys):
            if store is not None:
                values = decode(store)
                assert bool(torch.isfinite(values).all()) and 0.3 < float(values.std()) < 4
    pages = cache.page_table.flatten().sort().values
    assert torch.equal(pages, torch.arange(cache.layout.num_pages, dtype=torch.int32))


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    return tiny_decoder(monkeypatch)


def test_launches_belong_to_layers(decoder: Decoder) -> None:
    names = [launch.name for launch in decoder.launches]
    kinds = kinds_of(names, TINY)
    assert names.count(bench.ROUTE) == TINY.num_layers
    for name, kind in zip(names, kinds, strict=True):
        assert not name.startswith("attend ") or name == f"attend {kind}"
        assert (kind == ENDS) == (name in ("head", "sample")) or name.startswith("mhc")
    assert kinds.count(ENDS) == 4


def test_figures() -> None:
    timing = bench.Timing(tuple(float(n) for n in range(1, 101)), (6.0, 5.5, 6.0, 6.0), 600, 50)
    wanted = bench.Wanted(500, 3, 100)
    layout = wanted.layout(TINY)
    found = bench.figures(timing, wanted, layout, Reads(10**9, (10**6,) * 4), 4e12)
    assert (found["ms_per_token"], found["ms_per_token_p99"]) == (51.0, 99.0)
    assert found["tokens_per_second"] == pytest.approx(3 / 0.051, abs=0.01)
    cache = 3 * layout.read_bytes(600)
    assert (found["weight_bytes"], found["cache_bytes"]) == (10**9 + 23_500_000, cache)
    assert found["read_bytes"] == found["weight_bytes"] + cache
    assert found["share"] == pytest.approx(found["read_bytes"] / 0.051 / 4e12, abs=1e-4)
    assert found["distinct_experts"] == pytest.approx(5.88, abs=0.01) and found["kernels_per_step"] == 50


def test_profile_adds_up() -> None:
    names, kinds = ["a", "b", "a"], ["csa", "csa", "hca"]
    spans = [Span(f"k{i}", 10 * i, 10 * i + 6 + i % 3) for i in range(6)]
    found = summarise(spans, names, kinds, 2)
    assert found.is_named and found.launches["a"].count == 2 and found.launches["b"].count == 1
    assert found.launches["a"].busy_us == 6 + 8 and found.launches["b"].busy_us == 7
    # A step's first kernel has no gap before it.
    assert found.launches["b"].gap_us == 4 and found.launches["a"].gap_us == 3
    assert found.kinds["csa"].busy_us == 13 and found.kinds["hca"].gap_us == 3
    assert found.busy_us == 21 and found.as_dict()["launches"]["b"]["gap_us"] == 4
    unknown = summarise(spans[:5], names, kinds, 1)
    assert not unknown.is_named and unknown.kinds.keys() == {"all"} and unknown.busy_us == 34


def test_commit_is_that_of_the_checkout(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    (tmp_path / ".git").write_text("gitdir: /nowhere")
    assert commit(tmp_path) is None
    (tmp_path / ".git").unlink()
    made = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for step in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*made, *step], check=True)
    head = commit(tmp_path)
    assert head is not None and len(head) == 40
    (tmp_path / "file").write_text("2")
    assert commit(tmp_path) == head + "+"


def test_arithmetic_of_a_prompt() -> None:
    c = TINY
    d, experts = c.hidden_size, c.experts_per_token + 1
    per_layer = d * c.q_rank + c.q_rank * c.num_heads * c.head_dim + d * c.head_dim
    per_layer += c.num_heads * c.head_dim * c.o_rank + c.o_groups * c.o_rank * d
    per_layer += c.num_experts * d + experts * 3 * d * c.expert_width + 2 * 24 * c.num_streams * d
    compressors = 2 * (4 * d * c.head_dim + 4 * d * c.index_dim) + 2 * d * c.head_dim
    indexers = 2 * (c.q_rank * c.index_heads * c.index_dim + c.index_heads * d)
    weights = 4 * per_layer + compressors + indexers + 4 * c.num_streams * d
    tokens, head = 300, c.vocab_size * d
    keys = scored = 0
    for p in range(tokens):
        seen = (p + 1) // 4
        keys += 4 * min(c.window, p + 1) + 2 * min(seen, c.index_topk) + (p + 1) // 128
        scored += 2 * seen
    want = weights * tokens + head + 2 * keys * c.num_heads * c.head_dim
    want += scored * c.index_heads * c.index_dim
    assert prefill.flops(c, 0, tokens) == pytest.approx(2 * want)
    later = prefill.flops(c, 1000, 300)
    assert later > prefill.flops(c, 0, 300)
    found = prefill.figures([0.5, 0.1, 0.2], prefill.Wanted(tokens, rounds=3), c, 1e12)
    assert found["tokens_per_second"] == 1500 and "share" not in found


def test_load_on_a_cpu() -> None:
    """Of the embedded model: each way, cold and warm, and every byte of it."""
    line = json.loads(ok("bench", "load", "--device", "cpu", "--rounds", "1").splitlines()[-1])
    assert [(r["what"], r["is_cold"]) for r in line["results"]] == [
        *(("reads", True), ("load", True), ("reads", False), ("load", False))
    ]
    assert len({r["num_bytes"] for r in line["results"]}) == 1
    assert line["results"][0]["num_bytes"] > 13_900_000 and all(r["seconds"] > 0 for r in line["results"])
    phases = json.loads(ok("bench", "load", "--device", "cpu", "--ready").splitlines()[-1])["ready"]
    assert 0 < phases["imported"] < phases["first_bytes"] <= phases["loaded"] < phases["ready"]
    assert "leave it out" in dsv4("bench", "load", "--device", "cpu", "--spill", "2").err
