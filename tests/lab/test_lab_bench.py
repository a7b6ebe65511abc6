"""`dsv4 bench` without a GPU: what it refuses, what it counts, what it writes."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_support import dsv4, ok, refused
from torch import Tensor

pytest.importorskip("triton", reason="the decode kernels need Triton")

from dsv4.cache.store import Cache
from dsv4.cli.bench_show import predicted_rows
from dsv4.config import ModelConfig, preset
from dsv4.engine.memory import RESERVED
from dsv4.errors import ConfigError
from dsv4.gpu.pdl import tensors_of
from dsv4.gpu.tiles import Bank, Tiled
from dsv4.lab.bench import beside, prefill, ranks
from dsv4.lab.bench import decode as bench
from dsv4.lab.bench.cases import Case, Maker
from dsv4.lab.bench.ops import CHECKED_ROWS, _call, check, floor, state_bytes, weight_bytes
from dsv4.lab.bench.plot import draw_speed
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
from dsv4.lab.bench.sweep import CONTEXTS, points, series
from dsv4.lab.doctor.ops import outputs
from dsv4.lab.gpus import parse
from dsv4.lab.plan import Demand, Plan, describe
from dsv4.lab.plan import Wanted as Planned
from dsv4.lab.synthetic import make_weights, with_experts
from dsv4.model.bundle import Bundle, Numerics
from dsv4.model.model import Model
from dsv4.ops import IMPLEMENTATIONS, Ops
from dsv4.ops.sample.cpu import HISTORY
from dsv4.quant.codec import decode
from dsv4.quant.formats import QuantTensor
from dsv4.step.buffers import ROWS, Buffers
from dsv4.step.run import Decoder

CPU = torch.device("cpu")
TINY = preset("tiny")

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
    "decode --synthetic tiny --plot speed.gif": "ends in .png, .svg, .pdf",
    "decode {folder} --beside-transformers": "compares random models; add --synthetic flash",
    "decode --synthetic tiny --beside-transformers --context 9000": "use at most 8192",
    "prefill --synthetic tiny --tokens 0": "tokens is 0, expected at least 1",
    "prefill --synthetic tiny --tokens 65537": "context 0 and 65537 tokens exceed the model's 65536",
    "ops --preset big": "unknown preset 'big'",
    "ops --op nope": "unknown ops ['nope']; use linear",
    "ops --tokens 9000": "tokens is 9000, expected 1 to the context, 8192",
    "ranks flash --of 3": "3 ranks cannot share this model; use 1 or 2 or 4 or 8",
    "ranks tiny --of 8": "o_groups 2 do not split over 8 ranks; use 1 or 2",
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
@pytest.mark.parametrize("command", ["decode", "prefill", "ops", "ranks"])
def test_no_gpu_is_one_sentence(command: str) -> None:
    given = {"ops": [], "ranks": ["flash", "--of", "2"]}.get(command, ["--synthetic", "flash"])
    assert NO_GPU.format(torch.__version__) in refused(dsv4("bench", command, *given))


def test_help() -> None:
    assert ok("bench").strip() == ok("bench", "--help").strip()
    for command in ("decode", "prefill", "ops", "ranks"):
        assert f"{command} " in ok("bench")
        text = ok("bench", command, "--help")
        assert f"dsv4 bench {command}" in text.split("Examples")[1]


def test_predicted_of_ranks() -> None:
    """One step of 4 ms: with two all-reduces a layer, the embedding's and the logits', of 5 us each."""
    wanted = bench.Wanted(600, 2)
    alone, one = synthetic("tiny", None, None, "nvfp4"), synthetic("tiny", None, None, "nvfp4", ranks=2)
    assert ranks.predicted(alone, wanted, 4.0, 5.0) == 500
    assert ranks.predicted(one, wanted, 4.0, 5.0) == 2e3 / (4 + 0.005 * (2 * TINY.num_layers + 2))
    assert one.weight_bytes == synthetic_bytes(TINY, "nvfp4", ranks=2) < alone.weight_bytes


def test_what_is_in_a_prediction_is_said() -> None:
    """The step as measured and every all-reduce in full; the text has the same figures as the JSON line."""
    wanted, ms, ms_without = bench.Wanted(600, 1, 8), 3.0, 2.8
    line = ranks.predictions(synthetic("flash", None, None, "nvfp4", ranks=2), wanted, ms, ms_without)
    assert line["all_reduces"] == 2 * preset("flash").num_layers + 2 == 88
    for rate, step, each, added in (
        ("predicted_tokens_per_second", ms, "all_reduce_us", "ms_added"),
        ("predicted_counted_once", ms_without, "all_reduce_us", "ms_added"),
        ("predicted_at_published", ms, "published_all_reduce_us", "ms_added_at_published"),
    ):
        assert line[added] == pytest.approx(88 * line[each] / 1e3, abs=1e-3)
        assert line[rate] == pytest.approx(1e3 / (step + line[added]), abs=0.1)
    assert "pushes" in line["predicted_is"] and "counted twice" in line["predicted_is"]
    assert "without" in line["predicted_counted_once_is"] and "once" in line["predicted_counted_once_is"]
    assert line["ms_without_all_reduces"] == ms_without
    (assumed, once, published, note) = predicted_rows({**line, "ranks": 2})
    assert assumed == (
        "predicted",
        "290.7 tokens/s",
        "2 GPUs: the step + 0.440 ms for 88 all-reduces of 5.0 us, assumed",
    )
    assert once[1:] == (
        "308.6 tokens/s",
        "2 GPUs: the step without them, 2.800 ms, + 0.440 ms for 88 all-reduces of 5.0 us, assumed",
    )
    assert "of 4.2 us, published" in published[2] and "counted twice" in note[2]
    alone = ranks.predictions(synthetic("flash", None, None, "nvfp4"), wanted, ms, ms)
    assert alone["all_reduces"] == alone["ms_added"] == 0 and alone["predicted_tokens_per_second"] == 333.3
    assert alone["predicted_counted_once"] == 333.3


def size_of(value: Any) -> int:
    if isinstance(value, Bank):
        return value.w13.num_bytes + value.w2.num_bytes
    if isinstance(value, Tiled | QuantTensor):
        return value.num_bytes
    return value.numel() * value.element_size()


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
    config, inventory = describe("flash", "modelopt")[1:]
    plan = Plan.make(Demand.of(config, inventory), parse("8xB200"), Planned(4096, 1, 1, 1))
    demand = plan.demand
    of_experts = demand.read_stored.experts * config.experts_per_token / config.num_experts
    want = of_experts + demand.read_stored.split + demand.read_stored.copied
    config = replace(config, num_mtp_layers=0)
    reads = Reads.of(meta_weights(config, "modelopt", monkeypatch).tensors, config.num_layers)
    assert reads.step([config.experts_per_token] * config.num_layers) == pytest.approx(want, rel=3e-3)
    assert sum(reads.per_expert) * config.num_experts == pytest.approx(demand.read_stored.experts, rel=1e-5)
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


def tiny_bundle(layout: str = "modelopt") -> Bundle:
    ops = Ops.choose("cuda", **dict.fromkeys(IMPLEMENTATIONS, "gpu"))
    return Bundle(TINY, make_weights(TINY, layout, "cpu"), ops, Numerics(DTYPE, "a16", True))


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """The real list of launches; none can be launched here."""
    sizes = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sizes)
    bundle, layout = tiny_bundle(), bench.Wanted(600).layout(TINY)
    cache = Cache(layout, "cpu", DTYPE)
    return Decoder(bundle, Model(bundle, layout.max_context, "cpu"), cache, 1)


def test_launches_belong_to_layers(decoder: Decoder) -> None:
    names = [launch.name for launch in decoder.launches]
    kinds = kinds_of(names, TINY)
    assert names.count(bench.ROUTE) == TINY.num_layers
    for name, kind in zip(names, kinds, strict=True):
        assert not name.startswith("attend ") or name == f"attend {kind}"
        assert (kind == ENDS) == (name in ("head", "sample")) or name.startswith("mhc")
    assert kinds.count(ENDS) == 4


def test_launches_read_what_a_step_reads(decoder: Decoder) -> None:
    """Every weight is in one launch: those of the launches are those of the step, but for plain tensors."""
    tensors = decoder.bundle.weights.tensors
    tiled = {name: held for name, held in tensors.items() if isinstance(held, Tiled | Bank)}
    tasks = decoder.buffers.tasks
    tasks.expert.copy_(torch.tensor([3, 5]))
    want = Reads.of(tiled, TINY.num_layers).step([2] * TINY.num_layers)
    assert sum(weight_bytes(launch.run) for launch in decoder.launches) == pytest.approx(want, rel=1e-4)


def test_launches_read_the_cache_and_the_mixing_matrices(decoder: Decoder) -> None:
    names = [launch.name for launch in decoder.launches]
    layout, position = decoder.cache.layout, 600
    found = {True: 0, False: 0}
    for name, kind in zip(names, kinds_of(names, TINY), strict=True):
        found[name == "mhc open"] += state_bytes(name, kind, layout, position)
    assert found[False] == layout.read_bytes(position)
    assert found[True] == sum(
        size_of(t) for n, t in decoder.bundle.weights.tensors.items() if n.endswith("_fn")
    )


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


def test_picture_from_given_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    ok("bench", "plot", tmp_path / "out", tmp_path / "elsewhere.png")
    assert (tmp_path / "elsewhere.png").stat().st_size > 10_000
    for text, why in (("{}", "holds no sweep"), ("a table", "is no record"), ("", "is no record")):
        (tmp_path / "out").write_text(text)
        assert why in refused(dsv4("bench", "plot", tmp_path / "out", tmp_path / "x.png"))
    draw_speed(tmp_path / "empty.png", [], [], "nothing fitted", "")
    with pytest.raises(ConfigError, match="cannot be written"):
        draw_speed(tmp_path / "no" / "x.png", contexts, batches, "", "")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refused(dsv4("bench", "decode", "--synthetic", "tiny", "--plot", tmp_path / "x.png"))
    assert "a picture needs matplotlib" in message


def test_no_transformers_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("bench", "decode", "--synthetic", "flash", "--beside-transformers")
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="4.0"))
    assert "transformers 4.0 has no DeepSeek-V4" in refused(dsv4(*given))
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "needs Hugging Face Transformers" in refused(dsv4(*given))


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
        beside.check_fits(preset("flash"), 10**9)


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


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [*Maker(TINY, "modelopt", 4, 512, CPU).cases()]


def test_cases_are_of_every_op(cases: list[Case]) -> None:
    assert {case.op for case in cases} == set(IMPLEMENTATIONS)
    for case in cases:
        made = case.make(CHECKED_ROWS)
        assert made.num_bytes > 0
        for result in outputs(_call(case, made, "cpu")):
            assert bool(torch.isfinite(result.double()).all()), (case.op, case.function, case.name)


def test_a_wrong_backend_is_found(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4.ops.rows import cpu, prefill

    case = next(case for case in cases if case.op == "rows")
    monkeypatch.setattr(prefill, "rms_norm", cpu.rms_norm)
    assert check(case, "gpu") == "" == check(case, "cpu")
    monkeypatch.setattr(prefill, "rms_norm", lambda x, weight, eps: 1.1 * cpu.rms_norm(x, weight, eps))
    assert "relative error" in check(case, "gpu")

    def broken(*given: Any) -> Tensor:
        raise RuntimeError("no\nsuch kernel")

    monkeypatch.setattr(prefill, "rms_norm", broken)
    assert check(case, "gpu") == "raised RuntimeError: no such kernel"


def test_floor_says_what_bounds() -> None:
    assert floor(4e6, 1e6, 4e12, 8e14) == (1.0, "memory")
    assert floor(4e6, 8e9, 4e12, 8e14) == (10.0, "arithmetic")
