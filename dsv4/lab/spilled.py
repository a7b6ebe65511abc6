"""What `dsv4 plan` says of experts that lie in host memory."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4.config import ModelConfig
from dsv4.engine.frequency import Counts, checksum, coverage, known_counts, read_counts
from dsv4.engine.spill import Drafts, Split, find_split
from dsv4.errors import ConfigError
from dsv4.lab.gpus import HOST_BANDWIDTH, HOST_MEASURED_ON, HOST_MEMORY
from dsv4.ops.experts.placement import Form
from dsv4.weights.load import Checkpoint

if TYPE_CHECKING:
    from dsv4.lab.plan import Plan

HITS = 0.985  # a share of choices that find their expert on the GPU, for those who know none


def split_of(made: "Plan") -> Split | None:
    """Experts in host memory, for a model that does not fit; None: with them it does not fit either."""
    c, m = made.demand.config, made.machine
    if m.is_cpu or m.count > 1:
        return None
    names = [f"layers.{layer}.ffn.experts" for layer in range(c.num_layers)]
    form = Form(made.demand.expert_format, c.expert_width, c.hidden_size)
    experts = form.num_bytes * len(names) * c.num_experts
    room = m.memory_bytes - made.gpu_memory(spills=True).total + experts
    drafts, held = None, made.demand.draft_format
    if held is not None:
        blocks = tuple(f"mtp.{block}.ffn.experts" for block in range(made.demand.num_mtp_layers))
        drafts = Drafts(Form(held, c.expert_width, c.hidden_size), blocks, c.num_experts)
    split = find_split("auto", None, form, names, c.num_experts, room, drafts)
    if split is None or split.gpu_bytes > room + split.draft_bytes or split.host_bytes > HOST_MEMORY:
        return None
    return split


def rate(made: "Plan", batch: int, share: float = 1.0, hit_rate: float | None = None) -> float:
    """Tokens per second with `spill`, GPU memory at that share of its speed, PCIe as measured; hits as with
    uniform routing, or as given."""
    c, spill = made.demand.config, made.spill
    assert spill is not None
    chosen = c.num_experts * (1 - (1 - c.experts_per_token / c.num_experts) ** batch)
    misses = 1 - (spill.share if hit_rate is None else hit_rate)
    over_pcie = misses * chosen * c.num_layers * spill.form.num_bytes
    return batch / (batch / made.tokens_per_second(batch) / share + over_pcie / HOST_BANDWIDTH)


def spill_figures(made: "Plan", counts: Counts | None = None, share: float = 1.0) -> dict[str, Any]:
    """What lies in host memory and what that costs, GPU memory at that `share` of its speed; `counts`: how
    often each expert was chosen."""
    spill = made.spill
    assert spill is not None
    out: dict[str, Any] = {
        **{"experts": spill.num_spilled, "host_bytes": spill.host_bytes, "resident_share": spill.share},
        **{"staged": spill.num_staged, "draft_bytes": spill.draft_bytes},
        **{"host_bandwidth": HOST_BANDWIDTH, "host_bandwidth_measured_on": HOST_MEASURED_ON},
        **{"gpu_memory_share": share, "tokens_per_second_uniform": _rates(made, share, None)},
        **{"hit_rate_assumed": HITS, "tokens_per_second_assumed": _rates(made, share, HITS)},
        "hit_rate_recorded": None,
        "tokens_per_second_recorded": None,
    }
    if counts is not None:
        hits = coverage(counts, spill.num_resident)
        out |= {"hit_rate_recorded": round(hits, 5), "tokens_per_second_recorded": _rates(made, share, hits)}
    return out


def recorded(model: str, file: Path | None, config: ModelConfig) -> tuple[Counts | None, str]:
    """How often experts of this model were chosen, by its own file or the given one; and what to say."""
    layers, experts = config.num_layers, config.num_experts
    if file is not None:
        counts = read_counts(file)
        if len(counts) != layers or any(len(row) != experts for row in counts):
            raise ConfigError(
                f"{file} counts {len(counts)} layers of {len(counts[0]) if counts else 0} experts, the model "
                f"has {layers} of {experts}; give its own file"
            )
        return counts, str(file)
    if not Path(model).is_dir():
        return None, "no counts of it are here; --counts FILE gives some"
    known, ignored = known_counts(checksum(Checkpoint.open(model)), layers, experts)
    if known is None:
        return None, ignored or "nothing was counted yet: counts are kept when the model decodes on a GPU"
    return known, f"{sum(map(sum, known)):,.0f} choices were counted"


def _rates(made: "Plan", share: float, hits: float | None) -> dict[str, float]:
    return {"one": rate(made, 1, share, hits), "batch": rate(made, made.wanted.batch, share, hits)}
