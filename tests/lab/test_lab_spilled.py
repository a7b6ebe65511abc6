"""What `dsv4 plan` says of experts in host memory and of recorded routing."""

import gc
from functools import cache
from pathlib import Path

import pytest
from cli_support import dsv4, ok, refused

from dsv4.config import preset
from dsv4.engine.frequency import checksum, counts_path, write_counts
from dsv4.errors import ConfigError
from dsv4.lab.gpus import parse
from dsv4.lab.plan import Demand, Plan, Wanted, describe
from dsv4.lab.spilled import rate, recorded, spill_figures
from dsv4.models import embedded
from dsv4.weights.load import Checkpoint

SKEWED = [[1.0 / (expert + 1) for expert in range(256)] for _ in range(43)]


@cache
def flash(format: str) -> Demand:
    gc.disable()  # looking for garbage among so many tensors doubles the time
    try:
        return Demand.of(*describe("flash", format)[1:])
    finally:
        gc.enable()


def plan(format: str, gpus: str, batch: int) -> Plan:
    return Plan.make(flash(format), parse(gpus), Wanted(131072, batch))


def test_one_h200_holds_flash_with_some_experts_in_host_memory() -> None:
    made = plan("official", "H200", 1)
    report, split = made.report(), made.spill
    assert split is not None and not made.fits and report["fits"]
    assert 5e9 < split.host_bytes < 25e9 and made.held.total <= made.machine.memory_bytes
    assert made.held.total + 2 * split.form.num_bytes > made.machine.memory_bytes, "as many as fit"
    # A slot of each memory is spare, and those of two layers are for prompts; nobody reads the draft block.
    more = 2 + split.num_staged
    assert split.num_staged == 2 * -(-split.num_spilled // 43) and split.draft_bytes > 3e9
    both = made.held.weights + made.held.host - more * split.form.num_bytes
    assert both == made.memory.weights and report["per_gpu"]["weights"] == made.held.weights
    theory = made.tokens_per_second(1)
    assert rate(made, 1) < rate(made, 1, hit_rate=0.985) < rate(made, 1, hit_rate=1.0)
    assert abs(rate(made, 1, hit_rate=1.0) / theory - 1) < 1e-9
    over = (1 - split.share) * 6 * 43 * split.form.num_bytes / 52e9
    assert abs(1 / rate(made, 1, share=0.5) - (2 / theory + over)) < 1e-9
    assert report["spill"]["experts"] == split.num_spilled
    # One GPU that holds them all needs no host memory.
    assert plan("official", "B300", 1).spill is None


def test_recorded_routing_is_faster_than_uniform() -> None:
    made = plan("official", "H200", 8)
    assert spill_figures(made)["tokens_per_second_recorded"] is None
    found = spill_figures(made, SKEWED)
    assert made.spill is not None and found["hit_rate_recorded"] > made.spill.share
    assert found["tokens_per_second_recorded"]["one"] == rate(made, 1, hit_rate=_hits(made))
    assert found["tokens_per_second_recorded"]["batch"] > found["tokens_per_second_uniform"]["batch"]


def _hits(made: Plan) -> float:
    assert made.spill is not None
    ranked = sorted((count for row in SKEWED for count in row), reverse=True)
    return sum(ranked[: made.spill.num_resident]) / sum(ranked)


def test_where_counts_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = preset("flash")
    assert recorded("flash", None, config) == (None, "no counts of it are here; --counts FILE gives some")
    write_counts(tmp_path / "some.json", "any", SKEWED)
    assert recorded("flash", tmp_path / "some.json", config)[0] == SKEWED
    write_counts(tmp_path / "few.json", "any", [[1.0] * 8])
    with pytest.raises(ConfigError, match="counts 1 layers of 8 experts, the model has 43 of 256"):
        recorded("flash", tmp_path / "few.json", config)
    checkpoint = Checkpoint.open(embedded())
    own = [[1.0] * checkpoint.config.num_experts] * checkpoint.config.num_layers
    assert "nothing was counted yet" in recorded(str(embedded()), None, checkpoint.config)[1]
    write_counts(counts_path(checksum(checkpoint)), checksum(checkpoint), own)
    counts, said = recorded(str(embedded()), None, checkpoint.config)
    assert counts == own and "choices were counted" in said
    counts_path(checksum(checkpoint)).write_text("{")
    counts, said = recorded(str(embedded()), None, checkpoint.config)
    assert counts is None and "is damaged" in said


def test_plan_says_it(tmp_path: Path) -> None:
    given = ("plan", "flash", "--format", "official", "--gpus", "H200")
    write_counts(tmp_path / "some.json", "any", SKEWED)
    said = " ".join(ok(*given, "--counts", tmp_path / "some.json").split())
    assert "of experts in pinned host memory" in said and "recorded routing (" in said
    assert "(measured on H200)" in said
    (tmp_path / "bad.json").write_text("[]")
    assert "is damaged" in refused(dsv4("plan", "tiny", "--gpus", "H200", "--counts", tmp_path / "bad.json"))
