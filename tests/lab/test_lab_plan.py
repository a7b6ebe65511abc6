"""Plans: the published totals to the byte, and the memory an engine really takes."""

import gc
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMALL, write_model
from cli_support import ok
from dsv4.lab.links import LINKS
from torch import Tensor

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.config import ModelConfig, preset
from dsv4.engine.memory import prompt_bytes
from dsv4.engine.settings import GPU_CHUNK, check_memory, settle
from dsv4.errors import ConfigError
from dsv4.lab.gpus import NAMES, Machine, known, measure_bandwidth, parse, this_machine
from dsv4.lab.init import contents
from dsv4.lab.plan import Demand, Plan, Wanted, describe
from dsv4.weights.detect import take_inventory
from dsv4.weights.load import Checkpoint
from dsv4.weights.reader import Entry
from dsv4.weights.tiled import tiled_source_bytes

ROOMY = Machine("a CPU", 1, 1 << 40, 1e10, "made up", is_cpu=True)


@cache
def demand(model: str, format: str) -> Demand:
    # Hundreds of thousands of objects that all stay: looking for garbage among them doubles the time.
    gc.disable()
    try:
        return Demand.of(*describe(model, format)[1:])
    finally:
        gc.enable()


def plan(model: str, format: str, gpus: str, context: int, batch: int, **options: Any) -> Plan:
    return Plan.make(demand(model, format), parse(gpus), Wanted(context, batch, **options))


# Bytes stored, and bytes of weights read per decoded token.
TOTALS = [
    ("flash", "official", 159_609_485_896, 11_217_572_060),
    ("flash", "modelopt", 168_266_793_544, 11_420_477_708),
    pytest.param("pro", "official", 864_704_792_696, 39_666_603_980, marks=pytest.mark.slow),
    ("pro", "modelopt", 913_061_485_688, 40_422_177_308),
]
PARTS = {
    "flash": {
        **{"attention": 4_599_335_040, "shared experts": 1_082_196_480, "compressor": 525_722_624},
        **{"indexer": 275_353_344, "mhc": 135_537_756, "gate": 90_218_496, "hash table": 18_616_320},
        **{"embedding": 1_059_061_760, "head": 1_059_061_760, "norm": 855_808, "mtp": 3_593_787_756},
    },
    "pro": {
        **{"attention": 18_294_573_440, "shared experts": 4_029_923_520, "compressor": 1_344_566_272},
        **{"indexer": 625_367_040, "mhc": 336_278_412, "gate": 335_895_552, "hash table": 18_616_320},
        **{"embedding": 1_853_358_080, "head": 1_853_358_080, "norm": 2_044_416, "mtp": 13_956_587_692},
    },
}
ROUTED = {
    ("flash", "official"): 147_169_738_752,
    ("flash", "modelopt"): 155_827_046_400,
    ("pro", "official"): 822_054_223_872,
    ("pro", "modelopt"): 870_410_916_864,
}
# One sequence with FP8 entries and FP4 keys, and with BF16.
SEQUENCES = {
    ("flash", 8192): (44_283_904, 74_334_208),
    ("flash", 131_072): (476_114_944, 919_748_608),
    ("flash", 1_048_576): (3_700_453_376, 7_232_176_128),
    ("pro", 8192): (64_562_688, 107_511_808),
    ("pro", 131_072): (682_825_728, 1_317_634_048),
    ("pro", 1_048_576): (5_299_189_760, 10_353_213_440),
}
# Cache bytes read per decoded token, FP8 and FP4, in megabytes as published.
CACHE_READ = {("flash", 8192): 13.2, ("flash", 131_072): 68.2, ("flash", 1_048_576): 479.5}
CACHE_READ |= {("pro", 8192): 27.8, ("pro", 131_072): 107.9, ("pro", 1_048_576): 705.6}


@pytest.mark.parametrize(("model", "format", "stored", "active"), TOTALS)
def test_published_totals_to_the_byte(model: str, format: str, stored: int, active: int) -> None:
    report = plan(model, format, "8xB300", 8192, 1).report()
    assert report["stored_bytes"] == stored
    assert report["components"] == PARTS[model] | {"routed experts": ROUTED[model, format]}
    assert report["active_bytes_per_token"] == active
    one = plan(model, format, "B300", 8192, 1)
    assert one.read_bytes(1) == active + one.layout.read_bytes(8192)


@pytest.mark.parametrize(("model", "context"), SEQUENCES)
def test_published_cache_sizes(model: str, context: int) -> None:
    # The cache depends on the config alone, so no list of a million tensors is needed.
    needed = replace(demand("tiny", "official"), config=preset(model))
    for cache_format, want in zip(("fp8", "bf16"), SEQUENCES[model, context], strict=True):
        made = Plan.make(needed, parse("B300"), Wanted(context, 1, cache=cache_format))
        assert replace(made.layout, num_slots=1).sequence_bytes(context) == want
    made = Plan.make(needed, parse("B300"), Wanted(context, 1))
    assert round(made.layout.read_bytes(context) / 1e6, 1) == CACHE_READ[model, context]
    assert int(made.report()["cache_bytes_per_token"]) == {"flash": 3514, "pro": 5031}[model]


def test_speed_of_light_of_one_h200() -> None:
    """The ceiling that was computed by hand from 11.42 GB and 4.63 TB/s."""
    made = plan("flash", "modelopt", "H200", 1, 1)
    assert 404 < made.tokens_per_second(1) < 406


def storages(value: object, seen: set[int] | None = None) -> Iterator[torch.UntypedStorage]:
    """Every tensor memory that can be reached from an object of ours."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value.untyped_storage()
    elif isinstance(value, list | tuple):
        for item in value:
            yield from storages(item, seen)
    elif type(value).__module__.startswith("dsv4."):
        for item in vars(value).values():
            yield from storages(item, seen)


def held_by(engine: Engine) -> int:
    executor: Any = engine.runner.executor
    held = [engine.model, executor.cache, executor.penalties]
    return sum({s.data_ptr(): s.nbytes() for s in storages(held) if s.nbytes()}.values())


def odd() -> ModelConfig:
    """Widths that no tile or block divides."""
    return replace(
        SMALL, hidden_size=160, expert_width=96, head_dim=112, rope_dim=32, vocab_size=301, num_mtp_layers=1
    )


def of_kind(kind: str) -> ModelConfig:
    """Whose layers are all alike: one table of rotations is enough."""
    layers = tuple(layer for layer in SMALL.layers if layer.kind == kind)
    return replace(SMALL, layers=layers, num_mtp_layers=0)


SHAPES = {"small": SMALL, "odd": odd(), "tiny": preset("tiny")}
SHAPES |= {kind: of_kind(kind) for kind in ("sliding", "hca")}
TAKEN = [
    ("small", "modelopt", "dense", 256, 1, "fp8"),
    ("small", "modelopt", "packed", 700, 3, "fp8"),
    ("small", "official", "packed", 256, 2, "bf16"),
    ("odd", "ct", "packed", 300, 2, "fp8"),
    ("odd", "fp8", "packed", 300, 2, "f32"),
    ("odd", "bf16", "dense", 4096, 1, "fp8"),
    ("tiny", "hfnvfp4", "packed", 1000, 2, "fp8"),
    ("tiny", "modelopt", "dense", 20000, 4, "fp8"),
    ("sliding", "bf16", "dense", 4096, 1, "fp8"),
    ("hca", "bf16", "dense", 4096, 1, "fp8"),
]


@pytest.mark.parametrize(("shape", "format", "weights", "context", "batch", "cache"), TAKEN)
def test_an_engine_takes_what_was_planned(
    shape: str, format: str, weights: str, context: int, batch: int, cache: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "model", format, SHAPES[shape])
    options = {"weights": weights, "cache": cache, "max_context": context, "max_batch": batch}
    engine = Engine.load(tmp_path / "model", EngineConfig(**options))  # type: ignore[arg-type]
    checkpoint = Checkpoint.open(tmp_path / "model")
    needed = Demand.of(checkpoint.config, checkpoint.inventory)
    # Snapshots are made when prompts have been read; a state beside those of slots is there at once.
    made = Plan.make(needed, ROOMY, Wanted(context, batch, weights=weights, cache=cache))
    predicted = made.memory.at_rest
    taken = held_by(engine)
    assert abs(predicted - taken) <= 0.001 * taken, f"planned {predicted:,}, taken {taken:,}"


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize(("context", "batch"), [(8192, 4), (65536, 32)])
def test_an_engine_on_a_gpu_takes_what_was_planned(context: int, batch: int, tmp_path: Path) -> None:
    """Wide enough that no part is lost in the allocator's rounding to 512 bytes."""
    shape = replace(preset("tiny"), hidden_size=2048, expert_width=1024, num_heads=16, vocab_size=32768)
    write_model(tmp_path / "model", "modelopt", shape)
    checkpoint = Checkpoint.open(tmp_path / "model")
    needed = Demand.of(checkpoint.config, checkpoint.inventory)
    planned = Plan.make(needed, known("H200", 1), Wanted(context, batch)).memory
    gc.collect()
    torch.cuda.empty_cache()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    config = EngineConfig(device="cuda", max_context=context, max_batch=batch)
    engine = Engine.load(tmp_path / "model", config)
    taken = torch.cuda.memory_allocated() - before
    print(f"at rest: planned {planned.at_rest:,}, taken {taken:,}")
    assert abs(planned.at_rest - taken) <= 0.03 * taken
    # A prompt of many chunks, then everything the process holds of the GPU.
    torch.cuda.reset_peak_memory_stats()
    ids = [5 + i % 1000 for i in range(min(context, 20000) - 8)]
    engine.generate([ids], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    step = torch.cuda.max_memory_allocated() - before - taken
    all_taken = free - torch.cuda.mem_get_info()[0]
    print(f"workspace: planned {planned.workspace:,}, taken {step:,}")
    print(f"in all: planned {planned.total:,}, taken of the GPU {all_taken:,}")
    assert step <= planned.workspace + planned.snapshots, "the estimate is on the safe side"
    assert all_taken <= planned.total, "nobody runs out of memory who was told that it fits"


@pytest.mark.parametrize("weights", ["dense", "packed"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_engine_refuses_what_does_not_fit_by_plan(weights: str, ranks: int, tmp_path: Path) -> None:
    """On a CPU, to the byte: one memory model."""
    write_model(tmp_path / "model", "bf16", preset("tiny"))
    checkpoint = Checkpoint.open(tmp_path / "model")
    machine = replace(ROOMY, count=ranks)
    made = Plan.make(
        Demand.of(checkpoint.config, checkpoint.inventory), machine, Wanted(512, 3, tp=ranks, weights=weights)
    )
    config = EngineConfig(device="cpu", max_context=512, max_batch=3, weights=weights)
    share = checkpoint.shard(0, ranks)
    settings = settle(config, share, ranks)
    exact = made.total_bytes - made.weight_bytes + share.held_bytes(weights == "dense")
    assert abs(exact / made.total_bytes - 1) < 0.01, "a plan rounds what ranks share up"
    for room, fits in ((exact, True), (exact - 1, False)):
        there = replace(settings, device=replace(settings.device, memory_bytes=room))
        with (
            nullcontext()
            if fits
            else pytest.raises(ConfigError, match="lower max_batch, max_context or chunk")
        ):
            check_memory(there, config, share, ranks)


def test_what_would_fit_is_the_largest_that_fits() -> None:
    long, many = 1_048_576, 64
    made = plan("flash", "modelopt", "B300", long, many)
    instead = made.report()["instead"]
    context, batch = instead["context"], instead["batch"]
    assert not made.fits and 0 < context < long and 0 < batch < many
    assert plan("flash", "modelopt", "B300", context, many).fits
    assert not plan("flash", "modelopt", "B300", context + 1, many).fits
    assert plan("flash", "modelopt", "B300", long, batch).fits
    assert not plan("flash", "modelopt", "B300", long, batch + 1).fits


def test_nothing_fits_where_the_weights_do_not() -> None:
    made = plan("flash", "modelopt", "H200", 8192, 1)
    instead = made.report()["instead"]
    assert (instead["context"], instead["batch"]) == (0, 0)
    assert {"name": "H200", "count": 2} in instead["gpus"]


def test_the_smallest_set_is_the_first_that_fits() -> None:
    made = plan("flash", "modelopt", "RTX5090", 32768, 8)
    sets = made.smallest_sets()
    # A100 is too old for the kernels; of the RTX 5090 ten would do, and at most eight share a model.
    assert {machine.name for machine in sets} == set(NAMES) - {"A100", "RTX 5090"}
    wanted = Wanted(32768, 8)
    for machine in sets:
        assert machine.count in (1, 2, 4, 8) and Plan.make(made.demand, machine, wanted).fits
        if machine.count > 1:
            fewer = known(machine.name, machine.count // 2)
            assert not Plan.make(made.demand, fewer, wanted).fits


def test_how_gpus_share_the_weights() -> None:
    """Experts' width, heads and vocabulary in parts, everything else on each GPU; the cache with it."""
    one = plan("flash", "modelopt", "B300", 8192, 8)
    both = plan("flash", "modelopt", "2xB300", 8192, 8)
    held = one.demand.tiled[1]
    # Beside halves of the tiles, each GPU has the global scale of every weight.
    halves = held.experts // 2 + held.split // 2 + held.copied
    assert both.weight_bytes == pytest.approx(halves, rel=1e-5)
    assert both.layout.store_bytes() == one.layout.store_bytes()
    experts_only = plan("flash", "modelopt", "2xB300", 8192, 8, tp=1, ep=2)
    assert experts_only.weight_bytes == held.experts // 2 + held.split + held.copied
    assert experts_only.layout.num_slots == 4
    whole_experts = plan("flash", "modelopt", "2xB300", 8192, 8, tp=2, ep=2)
    assert (whole_experts.width_ranks, both.width_ranks) == (1, 2)
    assert whole_experts.weight_bytes == pytest.approx(halves, rel=1e-5)
    assert whole_experts.is_built and not experts_only.is_built
    assert whole_experts.communication() == both.communication()
    with pytest.raises(ConfigError, match=r"256 experts over ep 3 make 85\.3 each"):
        plan("flash", "modelopt", "3xB300", 8192, 8, ep=3)
    # 256 experts over three GPUs: one of them holds 86.
    three = plan("flash", "modelopt", "3xB300", 8192, 8)
    assert three.tp == 1 and three.weight_bytes == held.experts * 86 // 256 + held.split + held.copied


def test_more_sequences_share_what_is_read() -> None:
    made = plan("flash", "modelopt", "2xB300", 4096, 64)
    rates = [made.tokens_per_second(batch) for batch in (1, 2, 8, 64)]
    each = [rate / batch for rate, batch in zip(rates, (1, 2, 8, 64), strict=True)]
    assert rates == sorted(rates) and each == sorted(each, reverse=True)
    everything = made.demand.read_stored
    limit = everything.per_gpu(0.5, 2) + 4096 * made.layout.read_bytes(4096)
    assert 0.99 < made.read_bytes(4096) / limit <= 1


def test_a_batch_larger_than_the_chunk_needs_workspace_too() -> None:
    demand = plan("flash", "modelopt", "8xB300", 256, 8).demand
    few, many = (Plan.make(demand, ROOMY, Wanted(256, batch, chunk=4, weights="dense")) for batch in (8, 512))
    assert many.memory.workspace > 10 * few.memory.workspace


def test_a_gpu_is_planned_as_its_engine_runs() -> None:
    """Chunks, what their steps take, and snapshots are those of an engine with its defaults."""
    made = plan("flash", "modelopt", "2xH200", 32768, 8)
    assert made.chunk == GPU_CHUNK and made.layout.max_snapshots == EngineConfig().prefix_snapshots
    step = prompt_bytes(made.layout, torch.bfloat16, GPU_CHUNK, unpacks=False)
    assert made.memory.workspace == step
    without = plan("flash", "modelopt", "2xH200", 32768, 8, snapshots=0)
    held = made.report()["per_gpu"]["snapshots"]
    # Where snapshots are made there is one state more, which a step leaves at a place it has passed.
    passed = made.layout.state_bytes() - without.layout.state_bytes()
    assert held == 64 * made.layout.snapshot_bytes() == made.total_bytes - without.total_bytes - passed > 0


def test_no_machine_is_taken_to_have_host_memory_for_pro() -> None:
    assert plan("pro", "modelopt", "B300", 8192, 1).spill is None


def test_what_kernels_do_not_run_on_is_not_recommended() -> None:
    made = plan("flash", "modelopt", "H200", 4096, 1)
    assert not made.fits and plan("tiny", "modelopt", "A100", 4096, 1).refusal
    named = {machine["name"] for machine in made.report()["instead"]["gpus"]}
    assert "A100" not in named and {"H200", "B200", "RTX PRO 6000"} <= named


def test_names_of_gpus() -> None:
    assert parse("2xH200") == parse(" 2 x h200 ") == parse("2×H200") == known("H200", 2)
    assert parse("RTX-5090") == parse("1xrtx 5090") == known("RTX 5090", 1)
    assert parse("4xrtx_pro_6000").name == "RTX PRO 6000"
    for bad in ("", "x", "2x", "2xH900", "0xH200", "-1xH200", "5000xH200", "H200,H100", "2.5xH200"):
        with pytest.raises(ConfigError, match=r"^gpus "):
            parse(bad)


def test_this_machine_is_measured() -> None:
    machine = this_machine()
    assert machine.count >= 1 and machine.memory_bytes > 1 << 20 and machine.source == "measured"
    assert 1e8 < measure_bandwidth("cpu", 1 << 26, rounds=2) < 1e13


def test_the_verdict_is_about_this_engine() -> None:
    """Eight GPUs would hold Pro; the engine uses one, on which it does not fit."""
    made = plan("pro", "modelopt", "8xB300", 8192, 1)
    report = made.report()
    assert made.fits and not report["fits"] and report["gpus_used"] == 1
    assert report["per_gpu"]["total"] > report["machine"]["memory_bytes"]
    theory = report["in_theory"]
    assert theory["fits"] and theory["built"] and (theory["tp"], theory["ep"]) == (8, 1)
    assert theory["per_gpu"]["total"] < report["per_gpu"]["total"] / 4
    assert not report["machine"]["was_run_on"] and known("H200", 1).was_run_on
    shown = ok("plan", "tiny", "--gpus", "4xH200", "--context", 512, "--batch", 2)
    verdict, not_run = shown.index("verdict  fits on one H200"), shown.index("not built     4 x H200")
    assert (
        verdict
        < shown.index("in theory     1 GPU, batch 1")
        < not_run
        < shown.index("in theory     4 GPUs, batch")
    )


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_ranks_hold_what_is_planned(name: str) -> None:
    """The plan's bytes of one GPU are those of the shares that a rank would load; none is cut in a scale."""
    whole = preset(name)
    few = replace(whole, layers=whole.layers[:4], num_experts=8)
    config, _, tensors = contents(few, "modelopt")
    entries = {t.name: Entry(t.name, t.dtype, t.shape, Path("x"), 0, t.num_bytes) for t in tensors}
    inventory = take_inventory(entries, config)
    for size in (1, 2, 4, 8):
        made = Plan.make(Demand.of(config, inventory), known("H200", size), Wanted(512, 1))
        held = [sum(map(tiled_source_bytes, inventory.shard(rank, size).sources)) for rank in range(size)]
        assert (made.tp, made.ep) == (size, 1) and len({*held}) == 1
        assert made.weight_bytes == pytest.approx(held[0], rel=1e-3), size


def test_prediction() -> None:
    """Between everything lost stays and everything shrinks; latencies are those published, and named."""
    one, two = (plan("flash", "modelopt", f"{n}xH200", 4096, 1) for n in (1, 2))
    measured = one.predicted(0.5, None)
    assert measured is not None and measured[0] == pytest.approx(measured[1])
    assert measured[0] == pytest.approx(one.tokens_per_second(1) / 2), "one GPU waits for nobody"
    said = two.communication()
    assert said["all_reduces"] == 2 * 43 + 2 and said["message_bytes"] == 16384
    assert said["sent_bytes"] == 88 * 2 * 16384 and 3.9 < said["all_reduce_us"] < 4.5
    low, high = two.predicted(0.5, None) or (0, 0)
    assert measured[0] < low < high < two.tokens_per_second(1)
    waits = 88 * said["all_reduce_us"] * 1e-6
    assert 1 / high == pytest.approx(2 / two.tokens_per_second(1) + waits)
    by_step = two.predicted(0.5, 2.866)
    assert by_step == (pytest.approx(1 / (2.866e-3 + waits)),) * 2
    # A push sends a vector to every other GPU: eight cards wait longer than four, two less.
    times = [LINKS["RTX PRO 6000"].all_reduce_us(n, 16384) for n in (1, 2, 4, 8)]
    assert times[0] == 0 and times == sorted(times) and times[2] == 7.2
    shown = ok("plan", "flash", "--gpus", "2xH200", "--context", 512, "--batch", 1, "--compare")
    assert "predicted     batch 1:" in shown and "8 x RTX PRO 6000" in shown and "sglang pull 2904" in shown
    assert "does not run" not in shown
    shown = ok("plan", "tiny", "--gpus", "2xH200", "--context", 512, "--compare")
    assert re.search(r"2 x H200 .* does not run", shown), "its scales cannot be cut"
    # Three GPUs could have whole experts only: that ranks would then send nothing is no prediction.
    three = plan("flash", "modelopt", "3xH200", 4096, 1)
    assert not three.is_built and three.predicted(0.5, None) is None
    assert three.report()["in_theory"]["communication"] is None
    assert "predicted     nothing" in ok("plan", "tiny", "--gpus", "4xH200", "--context", 512)
