"""Plans: the published totals to the byte, and the memory an engine really takes."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMALL, write_model
from published import PARTS, ROUTED, STORED
from torch import Tensor

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.config import ModelConfig, preset
from dsv4.engine.memory import GPU_CHUNK, prompt_bytes
from dsv4.engine.settings import _Needs, check_memory, settle
from dsv4.errors import ConfigError
from dsv4.lab import gpus
from dsv4.lab.gpus import NAMES, Machine, copy_bandwidth, known, parse, read_bandwidth, this_machine
from dsv4.lab.inspect import active_share
from dsv4.lab.plan import Demand, Plan, Wanted, describe
from dsv4.lab.styles import STYLES, contents
from dsv4.weights.detect import take_inventory
from dsv4.weights.load import Checkpoint
from dsv4.weights.reader import Entry
from dsv4.weights.sizes import tiled_source_bytes

ROOMY = Machine("a CPU", 1, 1 << 40, 1e10, "made up", is_cpu=True)


@cache
def demand(model: str, format: str) -> Demand:
    return describe(model, format)


def of_checkpoint(checkpoint: Checkpoint) -> Demand:
    inventory = checkpoint.inventory
    return Demand.of("a folder", checkpoint.config, inventory.num_mtp_layers, inventory.sources)


def plan(model: str, format: str, gpus: str, context: int, batch: int, **options: Any) -> Plan:
    return Plan.make(demand(model, format), parse(gpus), Wanted(context, batch, **options))


# Bytes of weights read per decoded token.
ACTIVE = [
    ("flash", "official", 11_217_572_060),
    ("flash", "modelopt", 11_420_477_708),
    ("pro", "official", 39_666_603_980),
    ("pro", "modelopt", 40_422_177_308),
]
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


@pytest.mark.parametrize(("model", "format", "active"), ACTIVE)
def test_published_totals_to_the_byte(model: str, format: str, active: int) -> None:
    report = plan(model, format, "8xB300", 8192, 1).report()
    assert report["stored_bytes"] == STORED[model, format]
    assert report["components"] == PARTS[model] | {"routed experts": ROUTED[model, format]}
    assert report["active_bytes_per_token"] == active
    one = plan(model, format, "B300", 8192, 1)
    assert one.read_bytes(1) == active + one.layout.read_bytes(8192)


@pytest.mark.parametrize(("model", "context"), SEQUENCES)
def test_published_cache_sizes(model: str, context: int) -> None:
    needed = demand(model, "official")
    for cache_format, want in zip(("fp8", "bf16"), SEQUENCES[model, context], strict=True):
        made = Plan.make(needed, parse("B300"), Wanted(context, 1, cache=cache_format))
        assert replace(made.layout, num_slots=1).sequence_bytes(context) == want
    made = Plan.make(needed, parse("B300"), Wanted(context, 1))
    assert round(made.layout.read_bytes(context) / 1e6, 1) == CACHE_READ[model, context]
    assert int(made.report()["cache_bytes_per_token"]) == {"flash": 3514, "pro": 5031}[model]


def test_speed_of_light_of_one_h200() -> None:
    """The ceiling that was computed by hand from 11.42 GB and 4.63 TB/s."""
    made = plan("flash", "modelopt", "H200", 1, 1)
    assert 404 < 4.63e12 / made.read_bytes(1) < 406


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
    needed = of_checkpoint(checkpoint)
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
    needed = of_checkpoint(checkpoint)
    planned = Plan.make(needed, known("H200", 1), Wanted(context, batch)).memory
    gc.collect()
    torch.cuda.empty_cache()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    config = EngineConfig(device="cuda", max_context=context, max_batch=batch)
    engine = Engine.load(tmp_path / "model", config)
    taken = torch.cuda.memory_allocated() - before
    counted = _Needs(engine.settings, engine.config, checkpoint).memory(spills=False).at_rest
    print(f"at rest: counted {counted:,}, taken {taken:,}")
    assert abs(counted - taken) <= 0.03 * taken
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
    made = Plan.make(of_checkpoint(checkpoint), machine, Wanted(512, 3, weights=weights))
    config = EngineConfig(device="cpu", max_context=512, max_batch=3, weights=weights)
    share = checkpoint.shard(0, ranks)
    settings = settle(config, share, ranks)
    total = made.memory.total
    exact = total - made.weight_bytes + share.held_bytes(weights == "dense")
    assert abs(exact / total - 1) < 0.01, "a plan rounds what ranks share up"
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
    made = plan("pro", "modelopt", "8xB300", long, many)
    instead = made.report()["instead"]
    context, batch = instead["context"], instead["batch"]
    assert not made.fits and 0 < context < long and 0 < batch < many
    assert plan("pro", "modelopt", "8xB300", context, many).fits
    assert not plan("pro", "modelopt", "8xB300", context + 1, many).fits
    assert plan("pro", "modelopt", "8xB300", long, batch).fits
    assert not plan("pro", "modelopt", "8xB300", long, batch + 1).fits


def test_nothing_fits_where_the_weights_do_not() -> None:
    made = plan("pro", "modelopt", "H200", 8192, 1)
    instead = made.report()["instead"]
    assert (instead["context"], instead["batch"]) == (0, 0)
    assert ("H200", 8) in {(each["name"], each["count"]) for each in instead["gpus"]}


def test_the_smallest_set_is_the_first_that_fits() -> None:
    """One GPU counts with experts in host memory: an H200 alone holds Flash."""
    made = plan("flash", "modelopt", "RTX5090", 32768, 8)
    sets = [each.machine for each in made.smallest_sets()]
    # A100 is too old for the kernels; of the RTX 5090 ten would do, and at most eight share a model.
    assert {machine.name for machine in sets} == set(NAMES) - {"A100", "RTX 5090"}
    assert known("H200", 1) in sets and not made.fits
    wanted = Wanted(32768, 8)
    for machine in sets:
        assert machine.count in (1, 2, 4, 8) and Plan.make(made.demand, machine, wanted).fits
        if machine.count > 1:
            fewer = known(machine.name, machine.count // 2)
            assert not Plan.make(made.demand, fewer, wanted).fits


def test_how_gpus_share_the_weights() -> None:
    """Experts' width, heads and vocabulary in parts, everything else on each GPU; the cache with it."""
    one, both = (plan("flash", "modelopt", f"{n}xB300", 8192, 8) for n in (1, 2))
    experts, split, copied = (
        sum(tiled_source_bytes(s) * n for s, n in one.demand.kinds if which(s.param))
        for which in (
            lambda p: p.expert is not None,
            lambda p: p.expert is None and p.shard != "whole",
            lambda p: p.shard == "whole",
        )
    )
    assert one.weight_bytes == experts + split + copied
    # Beside halves of the tiles, each GPU has the global scale of every weight.
    assert both.weight_bytes == pytest.approx(experts / 2 + split / 2 + copied, rel=1e-5)
    assert both.layout.store_bytes() == one.layout.store_bytes()
    whole = plan("flash", "modelopt", "2xB300", 8192, 8, whole_experts=True)
    assert whole.weight_bytes == pytest.approx(experts / 2 + split / 2 + copied, rel=1e-5)
    with pytest.raises(ConfigError, match="3 ranks cannot share this model; use 1 or 2 or 4 or 8"):
        plan("flash", "modelopt", "3xB300", 8192, 8)


def test_more_sequences_share_what_is_read() -> None:
    made = plan("flash", "modelopt", "2xB300", 4096, 64)
    rates = [made.tokens_per_second(batch) for batch in (1, 2, 8, 64)]
    each = [rate / batch for rate, batch in zip(rates, (1, 2, 8, 64), strict=True)]
    assert rates == sorted(rates) and each == sorted(each, reverse=True)
    everything = made.sum_shares(
        lambda s: s.num_bytes if active_share(s.param.component, made.demand.config) else 0
    )
    limit = everything + 4096 * made.layout.read_bytes(4096)
    assert 0.99 < made.read_bytes(4096) / limit <= 1


def test_a_batch_larger_than_the_chunk_needs_workspace_too() -> None:
    few, many = (
        Plan.make(demand("flash", "modelopt"), ROOMY, Wanted(256, batch, chunk=4, weights="dense"))
        for batch in (8, 512)
    )
    assert many.memory.workspace > 10 * few.memory.workspace


def test_a_gpu_is_planned_as_its_engine_runs() -> None:
    """Chunks, what their steps take, and snapshots are those of an engine with its defaults."""
    made = plan("flash", "modelopt", "2xH200", 32768, 8)
    assert made.chunk == GPU_CHUNK and made.layout.max_snapshots == EngineConfig().prefix_snapshots
    assert made.memory.workspace == prompt_bytes(made.layout, GPU_CHUNK, unpacks=False)
    without = plan("flash", "modelopt", "2xH200", 32768, 8, snapshots=0)
    held = made.report()["per_gpu"]["snapshots"]
    # Where snapshots are made there is one state more, which a step leaves at a place it has passed.
    passed = made.layout.state_bytes() - without.layout.state_bytes()
    assert held == 64 * made.layout.snapshot_bytes()
    assert made.memory.total - without.memory.total - passed == held > 0


def test_one_h200_holds_flash_with_some_experts_in_host_memory() -> None:
    made = plan("flash", "official", "H200", 131072, 1)
    report, split = made.report(), made.spill
    assert split is not None and made.fits and made.resident.total > made.machine.memory_bytes
    assert 5e9 < split.host_bytes < 25e9 and made.memory.total <= made.machine.memory_bytes
    assert made.memory.total + 2 * split.form.num_bytes > made.machine.memory_bytes, "as many as fit"
    # A slot of each memory is spare, and those of two layers are for prompts; nobody reads the draft block.
    more = 2 + split.num_staged
    assert split.num_staged == 2 * -(-split.num_spilled // 43) and split.draft_bytes > 3e9
    assert made.memory.weights + made.memory.host - more * split.form.num_bytes == made.weight_bytes
    assert report["per_gpu"]["host"] == split.host_bytes and report["spilled_experts"] == split.num_spilled
    over = (1 - split.share) * 6 * 43 * split.form.num_bytes / 52e9
    assert 1 / made.tokens_per_second(1) == pytest.approx(made.read_bytes(1) / 4.63e12 + over)
    # One GPU that holds them all needs no host memory; and none is assumed to have enough for Pro.
    assert plan("flash", "official", "B300", 131072, 1).spill is None
    assert plan("pro", "modelopt", "B300", 8192, 1).spill is None
    few = replace(made.machine, host_memory=split.host_bytes - 1)
    assert not replace(made, machine=few).fits, "host memory counts"


def test_what_kernels_do_not_run_on_is_not_recommended() -> None:
    made = plan("pro", "modelopt", "H200", 4096, 1)
    assert not made.fits and plan("tiny", "modelopt", "A100", 4096, 1).refusal
    named = {machine["name"] for machine in made.report()["instead"]["gpus"]}
    assert "A100" not in named and {"H200", "B200", "B300"} <= named


def test_names_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("2xH200") == parse(" 2 x h200 ") == parse("2×H200") == known("H200", 2)
    assert parse("RTX-5090") == parse("1xrtx 5090") == known("RTX 5090", 1)
    assert parse("4xrtx_pro_6000").name == "RTX PRO 6000"
    for bad in ("", "x", "2x", "2xH900", "0xH200", "-1xH200", "5000xH200", "H200,H100", "2.5xH200", "0"):
        with pytest.raises(ConfigError, match=r"^gpus "):
            parse(bad)
    here = Machine("H200", 2, 1, 1.0, "measured", host_memory=1)
    monkeypatch.setattr(gpus, "this_machine", lambda count: replace(here, count=count))
    assert parse("2") == here and not here.is_named and known("H200", 1).is_named


def test_this_machine_is_measured() -> None:
    machine = this_machine()
    assert machine.count >= 1 and machine.memory_bytes > 1 << 20 and machine.source == "measured"
    assert 1e8 < copy_bandwidth(1 << 24, rounds=2) < 1e13
    assert 1e8 < read_bandwidth("cpu", 1 << 26, rounds=2) < 1e13


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_ranks_hold_what_is_planned(name: str) -> None:
    """The plan's bytes of one GPU are those of the shares that a rank would load; none is cut in a scale."""
    whole = preset(name)
    few = replace(whole, layers=whole.layers[:4], num_experts=8)
    config, _, tensors = contents(few, "modelopt")
    entries = {t.name: Entry(t.name, t.dtype, t.shape, Path("x"), 0, t.num_bytes) for t in tensors}
    inventory = take_inventory(entries, config)
    needed = Demand.of("few", config, inventory.num_mtp_layers, inventory.sources)
    for size in (1, 2, 4, 8):
        made = Plan.make(needed, known("H200", size), Wanted(512, 1))
        held = [sum(map(tiled_source_bytes, inventory.shard(rank, size).sources)) for rank in range(size)]
        assert len({*held}) == 1 and made.weight_bytes == held[0], size


@pytest.mark.parametrize("format", STYLES)
def test_kinds_are_what_all_tensors_are(format: str) -> None:
    """A published model is described by one weight of each kind, not by all of them."""
    config, params, tensors = contents(preset("tiny"), format)
    entries = {t.name: Entry(t.name, t.dtype, t.shape, Path("x"), 0, t.num_bytes) for t in tensors}
    inventory = take_inventory(entries, config)
    whole = Demand.of("tiny", config, inventory.num_mtp_layers, inventory.sources)
    kinds = describe("tiny", format)
    assert len(kinds.kinds) < len(params) / 2 and sum(n for _, n in kinds.kinds) == len(params)
    assert (kinds.components, kinds.layout) == (whole.components, whole.layout)
    one, other = (Plan.make(d, parse("H200"), Wanted(512, 1)) for d in (kinds, whole))
    assert one.memory == other.memory and one.read_bytes(3) == other.read_bytes(3)


def test_several_gpus_go_by_one_rank_that_was_measured() -> None:
    """This GPU, model, layout and number of ranks, and widths that ranks share; else bytes over bandwidth."""
    speed = plan("flash", "hfnvfp4", "2xH200", 4096, 1).speed()
    assert (round(speed.tokens_per_second), speed.kind) == (304, "predicted")
    assert speed.tokens_per_second == pytest.approx(1e3 / (2.845 + 88 * 0.005))
    assert round(plan("pro", "hfnvfp4", "8xH200", 4096, 1).speed().tokens_per_second) == 184
    for other in ("2xB200", "modelopt"):
        made = (
            plan("flash", "hfnvfp4", other, 4096, 1)
            if "x" in other
            else plan("flash", other, "2xH200", 4096, 1)
        )
        assert made.speed().tokens_per_second == made.tokens_per_second(1)
        assert made.speed().how.startswith("at most")
    whole = plan("flash", "hfnvfp4", "2xH200", 4096, 1, whole_experts=True)
    assert whole.speed().tokens_per_second == whole.tokens_per_second(1)


def test_the_verdict_is_about_what_was_asked() -> None:
    """Eight GPUs that hold Pro are what is shown, not one of them."""
    made = plan("pro", "modelopt", "8xB300", 8192, 1)
    report = made.report()
    assert made.fits and report["fits"] and report["machine"]["count"] == 8
    assert report["per_gpu"]["total"] < report["machine"]["memory_bytes"]
    assert "fits on 8 x B300" in report["verdict"] and "never tested" in report["verdict"]
    assert "never tested" not in plan("flash", "hfnvfp4", "H200", 8192, 1).verdict
