"""What a model needs on a machine, and how fast it could be: from headers alone, without torch."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dsv4.cache.layout import CacheLayout, most_drafts
from dsv4.config import EngineConfig, ModelConfig, preset
from dsv4.engine.memory import (
    DEFAULT_CHUNK,
    GPU_CHUNK,
    Memory,
    fits_dense,
    largest_linear,
    planned_memory,
    reference_memory,
    unpacks_weights,
)
from dsv4.engine.sizes import problems
from dsv4.engine.spill import Drafts, Split, find_split
from dsv4.errors import CheckpointError, ConfigError
from dsv4.gpu.architectures import ARCHITECTURES
from dsv4.gpu.shapes import Form
from dsv4.hub.cache import title
from dsv4.lab.files import size
from dsv4.lab.gpus import HOST_BANDWIDTH, NAMES, Machine, known
from dsv4.lab.inspect import active_share
from dsv4.lab.records import PRESETS, SHIPPED, Speed, best, by_rank_step, of_folder, published
from dsv4.lab.styles import layout_of, stored_config, stored_tensors, style_of
from dsv4.model.params import check_ranks, each_kind, num_parts
from dsv4.quant.formats import Format
from dsv4.weights.detect import Finder, Source, read_headers
from dsv4.weights.reader import Entry
from dsv4.weights.sizes import held_bytes, tiled_format, tiled_source_bytes

MAX_BATCH = 1 << 20


@dataclass(frozen=True)
class Demand:
    """A model as it is stored: one weight of each kind, and how many are like it."""

    title: str
    config: ModelConfig
    num_mtp_layers: int
    kinds: tuple[tuple[Source, int], ...]

    @classmethod
    def of(cls, title: str, config: ModelConfig, num_mtp_layers: int, sources: Iterable[Source]) -> "Demand":
        alike: dict[Any, tuple[Source, int]] = {}
        for source in sources:
            p, scale = source.param, source.scale and source.scale.dtype
            key = (p.kind, p.component, p.expert is None, p.shape, p.shard, p.stays_in_rows, source.format)
            first, count = alike.get((*key, scale, source.num_bytes), (source, 0))
            alike[(*key, scale, source.num_bytes)] = first, count + 1
        return cls(title, config, num_mtp_layers, tuple(alike.values()))

    def without_drafts(self) -> "Demand":
        """The same, loaded with speculate off."""
        kinds = tuple(each for each in self.kinds if each[0].param.component != "mtp")
        return replace(self, num_mtp_layers=0, kinds=kinds)

    @cached_property
    def components(self) -> dict[str, int]:
        """Bytes stored, the largest first."""
        found = Counter[str]()
        for source, count in self.kinds:
            found[source.param.component] += count * source.num_bytes
        return dict(found.most_common())

    @property
    def stored_bytes(self) -> int:
        return sum(self.components.values())

    def active_bytes(self) -> int:
        """What one decoded token reads of them, at batch 1, without drafts."""
        return sum(round(total * active_share(name, self.config)) for name, total in self.components.items())

    @cached_property
    def layout(self) -> str:
        return layout_of(self.kinds)

    @property
    def name(self) -> str:
        """The published model that has these sizes, or the folder."""
        return published(self.config) or of_folder(self.title)

    def expert_formats(self, component: str) -> list[Format]:
        found = (s for s, _ in self.kinds if s.param.expert is not None and s.param.component == component)
        return list({tiled_format(source): None for source in found})


def describe(model: str, format: str | None) -> Demand:
    """A model folder, or a published model that is not here."""
    if model in PRESETS:
        style = style_of(format := format or "modelopt")
        config = stored_config(preset(model), style)
        kinds = []
        for param, count in each_kind(config, config.num_mtp_layers):
            tensors = stored_tensors(param, style)
            entries = {t.name: Entry(t.name, t.dtype, t.shape, Path(), 0, t.num_bytes) for t in tensors}
            source = Finder(entries, set(), config.num_experts).find(param)
            assert source is not None, param
            kinds.append((source, count))
        return Demand(f"{model} ({format})", config, config.num_mtp_layers, tuple(kinds))
    if format is not None:
        raise ConfigError(
            f"--format goes with {', '.join(PRESETS)}; the tensors of {model} say how they are stored"
        )
    if not Path(model).exists():
        raise ConfigError(f"{model} does not exist; give a model folder, or one of {', '.join(PRESETS)}")
    config, _, inventory = read_headers(model)
    return Demand.of(title(Path(model)), config, inventory.num_mtp_layers, inventory.sources)


@dataclass(frozen=True)
class Wanted:
    """What is asked for. `whole_experts`: GPUs share the other weights, and each has some of the experts."""

    context: int
    batch: int
    whole_experts: bool = False
    weights: str = "auto"
    cache: str = "fp8"
    chunk: int | None = None  # prompt tokens of a step; None: as the engine's
    snapshots: int = EngineConfig.prefix_snapshots
    speculate: str = "auto"  # off: the drafter is left out

    def __post_init__(self) -> None:
        for name in ("context", "batch", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, expected at least 1")
        for name, allowed in (
            ("weights", ("auto", "dense", "packed")),
            ("cache", ("fp8", "bf16", "f32")),
            ("speculate", ("auto", "off")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        if self.snapshots < 0:
            raise ConfigError(f"snapshots is {self.snapshots}, expected 0 or more")
        if self.batch > MAX_BATCH:
            raise ConfigError(f"batch is {self.batch}, expected at most {MAX_BATCH}")


@dataclass(frozen=True)
class Plan:
    """A model on a machine, whose GPUs share every layer. All bytes are those of one GPU."""

    demand: Demand
    machine: Machine
    wanted: Wanted

    @classmethod
    def make(cls, demand: Demand, machine: Machine, wanted: Wanted) -> "Plan":
        c = demand.config
        if wanted.context > c.max_positions:
            most = f"the model's {c.max_positions} positions"
            raise ConfigError(f"context {wanted.context} exceeds {most}; lower --context")
        if wanted.weights != "auto" and not machine.is_cpu:
            raise ConfigError(f"weights {wanted.weights} is for a CPU; on a GPU use weights auto")
        check_ranks(c, machine.count, wanted.whole_experts)
        return cls(demand.without_drafts() if wanted.speculate == "off" else demand, machine, wanted)

    @property
    def ranks(self) -> int:
        return self.machine.count

    def sum_shares(self, of: Callable[[Source], float]) -> int:
        """Of a rank's share of every weight."""
        total = 0.0
        for source, count in self.demand.kinds:
            if self.wanted.whole_experts and source.param.expert is not None:
                total += of(source) * count / self.ranks
            else:
                total += of(source.shard(0, self.ranks)) * count
        return math.ceil(total)

    @cached_property
    def is_dense(self) -> bool:
        """Whether a CPU decodes the weights at load."""
        if not self.machine.is_cpu or self.wanted.weights != "auto":
            return self.wanted.weights == "dense"
        need = self.sum_shares(lambda source: held_bytes(source, dense=True))
        return fits_dense(need, self.machine.memory_bytes)

    @property
    def weights(self) -> str:
        """How they are held."""
        return "tiled" if not self.machine.is_cpu else "dense" if self.is_dense else "packed"

    @cached_property
    def weight_bytes(self) -> int:
        if self.machine.is_cpu:
            return self.sum_shares(lambda source: held_bytes(source, self.is_dense))
        return self.sum_shares(tiled_source_bytes)

    @property
    def chunk(self) -> int:
        return self.wanted.chunk or (DEFAULT_CHUNK if self.machine.is_cpu else GPU_CHUNK)

    @cached_property
    def layout(self) -> CacheLayout:
        """In the compute type that the engine chooses: float32 on a CPU, bfloat16 on a GPU."""
        w, plain = self.wanted, {"bf16": Format.BF16, "f32": Format.F32}
        kv, key = plain.get(w.cache, Format.KV8), plain.get(w.cache, Format.MXFP4)
        itemsize, drafts = 4 if self.machine.is_cpu else 2, self.demand.num_mtp_layers
        return CacheLayout(self.demand.config, kv, key, itemsize, w.context, w.batch, drafts, w.snapshots)

    @cached_property
    def drafter_bytes(self) -> int:
        """Of `weight_bytes`, those of the drafter."""
        if not self.demand.num_mtp_layers:
            return 0
        return self.weight_bytes - self.without_drafter.weight_bytes

    @cached_property
    def without_drafter(self) -> "Plan":
        return Plan.make(self.demand, self.machine, replace(self.wanted, speculate="off"))

    @property
    def advice(self) -> str | None:
        """When to leave the drafter out; None: not at all."""
        if not self.demand.num_mtp_layers or self.refusal is not None:
            return None
        other, saved = (
            self.without_drafter,
            f"--speculate off leaves out {size(self.drafter_bytes)} of drafter",
        )
        if other.fits and not self.fits:
            return f"{saved}: then it fits"
        if other.fits and self.spill is not None and other.spill is None:
            return f"{saved}: then all experts fit on the GPU"
        return None

    @cached_property
    def uncut(self) -> str | None:
        """Why so many GPUs cannot share the weights; None: they can."""
        try:
            self.sum_shares(lambda source: source.num_bytes)
        except CheckpointError as error:
            return str(error)
        return None

    @cached_property
    def refusal(self) -> str | None:
        """Why this engine's kernels do not run it, whatever memory there is; None: they do."""
        m, (major, minor) = self.machine, self.machine.capability
        if self.uncut is not None or m.is_cpu:
            return self.uncut
        if 10 * major + minor not in ARCHITECTURES:
            return f"no kernel is built for compute capability {major}.{minor}, which {m.name} has"
        if self.wanted.cache != "fp8":
            return f"the kernels have no cache {self.wanted.cache}; use fp8"
        found = problems(self.demand.config, self.wanted.context, 10 * major + minor, ranks=self.ranks)
        return f"the kernels cannot run a model of {'; '.join(found)}" if found else None

    def on_gpu(self, spills: bool) -> Memory:
        """With every weight there; `spills`: of an engine that has experts elsewhere."""
        unpacks = unpacks_weights(2, self.machine.capability)
        return planned_memory(self.weight_bytes, self.layout, self.chunk, unpacks, spills, self.ranks)

    @cached_property
    def resident(self) -> Memory:
        """With every weight in the memory that computes."""
        if not self.machine.is_cpu:
            return self.on_gpu(spills=False)
        largest = largest_linear(source.param for source, _ in self.demand.kinds)
        decoded = 0 if self.is_dense else largest // self.ranks
        drafts = most_drafts(self.demand.config) if self.demand.num_mtp_layers else 0
        return reference_memory(self.weight_bytes, self.layout, self.chunk, decoded, self.ranks, drafts)

    @cached_property
    def spill(self) -> Split | None:
        """Experts in pinned host memory, where that makes one GPU do."""
        c, m = self.demand.config, self.machine
        formats = self.demand.expert_formats("routed experts")
        if m.is_cpu or m.count > 1 or self.resident.total <= m.memory_bytes or len(formats) > 1:
            return None
        names = [f"layers.{layer}.ffn.experts" for layer in range(c.num_layers)]
        form, drafts = Form(formats[0], c.expert_width, c.hidden_size), None
        room = m.memory_bytes - self.on_gpu(spills=True).total + form.num_bytes * len(names) * c.num_experts
        if len(held := self.demand.expert_formats("mtp")) == 1:
            blocks = tuple(f"mtp.{block}.ffn.experts" for block in range(self.demand.num_mtp_layers))
            drafts = Drafts(Form(held[0], c.expert_width, c.hidden_size), blocks, c.num_experts)
        split = find_split("auto", None, form, names, c.num_experts, room, drafts)
        if split is None or split.gpu_bytes > room + split.draft_bytes or split.host_bytes > m.host_memory:
            return None
        return split

    @cached_property
    def memory(self) -> Memory:
        """What the engine takes: with experts in host memory, if they have to lie there."""
        if self.spill is None:
            return self.resident
        gone = self.spill.num_spilled - self.spill.num_staged - self.spill.has_spare
        weights = self.weight_bytes - gone * self.spill.form.num_bytes - self.spill.draft_bytes
        return replace(self.on_gpu(spills=True), weights=weights, host=self.spill.host_bytes)

    @property
    def fits(self) -> bool:
        return self.refusal is None and self.memory.total <= self.machine.memory_bytes

    @property
    def verdict(self) -> str:
        """In one sentence."""
        m, each = self.machine, " on each" if self.ranks > 1 else ""
        if self.refusal is not None:
            return f"{self.demand.title} does not run on {m.label}: {self.refusal}"
        memory = self.memory
        if not self.fits:
            needed = f"needs {size(memory.total)}{each}, {size(m.memory_bytes)} are there"
            return f"{self.demand.title} does not fit on {m.label}: {needed}"
        free = f", {size(m.memory_bytes - memory.total)} free{each}"
        left = f" with {size(memory.host)} of experts in host memory" if memory.host else free
        never = "" if m.was_run_on and self.ranks == 1 else "; never tested, all figures are calculated"
        return f"{self.demand.title} fits on {m.label}{left}{never}"

    def read_bytes(self, batch: int) -> float:
        """What one GPU reads to decode one token of each of `batch` sequences, all at full context."""
        c = self.demand.config
        # Experts that at least one of the tokens chooses, as if each chose its own at random.
        chosen = 1 - (1 - c.experts_per_token / c.num_experts) ** batch

        def read(source: Source) -> float:
            if not (share := active_share(source.param.component, c)):
                return 0.0
            held = held_bytes(source, dense=True) if self.is_dense else source.num_bytes
            return held * (chosen if source.param.expert is not None else share)

        return self.sum_shares(read) + batch * self.layout.read_bytes(self.wanted.context)

    def tokens_per_second(self, batch: int) -> float:
        """At most: GPU memory at full speed, experts in host memory over PCIe with uniform routing, nothing
        else."""
        seconds = self.read_bytes(batch) / self.machine.bandwidth
        if self.spill is not None:
            c = self.demand.config
            chosen = c.num_experts * (1 - (1 - c.experts_per_token / c.num_experts) ** batch)
            missed = (1 - self.spill.share) * chosen * c.num_layers * self.spill.form.num_bytes
            seconds += missed / HOST_BANDWIDTH
        return batch / seconds

    def speed(self, records: Path = SHIPPED) -> Speed:
        """Of one sequence: as measured; else by one rank of several; else the bytes over the bandwidth."""
        d, name = self.demand, self.machine.name
        found = None
        if self.ranks == 1:
            found = best(records, name, d.name, d.layout, spills=self.spill is not None)
        elif not self.wanted.whole_experts:
            found = by_rank_step(d.config, name, d.name, d.layout, self.ranks)
        read = f"at most: {size(self.read_bytes(1))} read per token at {size(self.machine.bandwidth)}/s"
        if self.spill is not None:
            read += f", {1 - self.spill.share:.1%} of chosen experts over PCIe"
        return found or Speed(self.tokens_per_second(1), "predicted", read)

    def largest_context(self) -> int:
        """The most tokens per sequence that fit with this batch; 0 if not even one does."""
        return largest(self.demand.config.max_positions, lambda n: self._with(context=n).fits)

    def largest_batch(self) -> int:
        return largest(MAX_BATCH, lambda n: self._with(batch=n).fits)

    def _with(self, **changes: Any) -> "Plan":
        return replace(self, wanted=replace(self.wanted, **changes))

    @property
    def most_ranks(self) -> int:
        return num_parts(self.demand.config)

    def smallest_sets(self) -> "list[Plan]":
        """Of each known GPU the fewest that hold the model; fewest and smallest first."""
        out: list[Plan] = []
        wanted = replace(self.wanted, weights="auto", whole_experts=False)
        counts = [count for count in (1, 2, 4, 8) if count <= self.most_ranks]
        for name in NAMES:
            plans = (Plan.make(self.demand, known(name, count), wanted) for count in counts)
            out += [plan for plan in plans if plan.fits][:1]
        return sorted(out, key=lambda plan: (plan.machine.count, plan.machine.memory_bytes))

    def summary(self, records: Path = SHIPPED) -> dict[str, Any]:
        """What it takes and how fast it is; nothing where the weights cannot be shared so."""
        m, held = self.machine, None if self.uncut else {**vars(self.memory), "total": self.memory.total}
        return {
            **{"name": m.name, "count": m.count, "was_run_on": m.was_run_on},
            **{"fits": self.fits, "refused": self.refusal, "per_gpu": held},
            "speed": vars(self.speed(records)) if self.fits else None,
        }

    def report(self, records: Path = SHIPPED) -> dict[str, Any]:
        """As plain data, for `--json`."""
        w, d, one = self.wanted, self.demand, replace(self.layout, num_slots=1)
        span, counts = one.page_tokens, {} if self.uncut else {"one": 1, "batch": w.batch}
        out: dict[str, Any] = {
            **{"verdict": self.verdict, "model": d.title, "layout": d.layout, "machine": vars(self.machine)},
            **self.summary(records),
            **{"context": w.context, "batch": w.batch, "weights": self.weights, "cache": w.cache},
            **{"chunk": self.chunk, "whole_experts": w.whole_experts},
            **{"stored_bytes": d.stored_bytes, "components": d.components},
            **{"drafter": d.config.drafter(d.num_mtp_layers), "advice": self.advice},
            "drafter_bytes": 0 if self.uncut else self.drafter_bytes,
            "active_bytes_per_token": d.active_bytes(),
            "spilled_experts": 0 if self.uncut or self.spill is None else self.spill.num_spilled,
            "sequence_bytes": one.sequence_bytes(w.context),
            # Of one more token, on average over whole blocks.
            "cache_bytes_per_token": (one.sequence_bytes(2 * span) - one.sequence_bytes(span)) / span,
            "read_bytes": {name: self.read_bytes(count) for name, count in counts.items()},
            "at_most_tokens_per_second": {n: self.tokens_per_second(count) for n, count in counts.items()},
        }
        if not self.fits:
            sets = [plan.summary(records) for plan in self.smallest_sets()]
            out["instead"] = {"context": self.largest_context(), "batch": self.largest_batch(), "gpus": sets}
        return out


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest n up to `limit` that fits, 0 if 1 does not; what fits, fits with less."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
