"""What a model needs on a machine: memory and bytes per token, from headers alone. No weight is read."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dsv4.cache.layout import CacheLayout
from dsv4.config import EngineConfig, ModelConfig, preset
from dsv4.engine.memory import Memory, largest_linear, reference_memory, unpacks_weights
from dsv4.engine.memory import gpu_memory as memory_of
from dsv4.engine.settings import DEFAULT_CHUNK, GPU_CHUNK, fits_dense
from dsv4.engine.sizes import problems
from dsv4.engine.spill import Split
from dsv4.errors import CheckpointError, ConfigError
from dsv4.gpu.architectures import ARCHITECTURES
from dsv4.hub.cache import title
from dsv4.lab.gpus import NAMES, Machine, known
from dsv4.lab.init import contents
from dsv4.lab.inspect import Component, active_share, components
from dsv4.lab.links import LINKS, num_all_reduces
from dsv4.lab.records import PRESETS
from dsv4.lab.spilled import spill_figures, split_of
from dsv4.model.params import Param, check_ranks, num_parts
from dsv4.quant.formats import Format
from dsv4.step.buffers import graph_rows
from dsv4.weights.detect import Inventory, take_inventory
from dsv4.weights.load import Checkpoint, held_bytes
from dsv4.weights.reader import Entry
from dsv4.weights.tiled import tiled_format, tiled_source_bytes

MAX_BATCH = 1 << 20


@dataclass(frozen=True)
class Shares:
    """Bytes by who holds them: of the routed experts a share, in parts on all ranks, or on each in full."""

    experts: int = 0
    split: int = 0
    copied: int = 0

    def per_gpu(self, expert_share: float, tp: int) -> int:
        return math.ceil(self.experts * expert_share) + -(-self.split // tp) + self.copied


@dataclass(frozen=True)
class Demand:
    """Everything about a model that a plan needs, summed up once."""

    config: ModelConfig
    num_mtp_layers: int
    components: tuple[Component, ...]
    dense: Shares
    packed: Shares
    tiled: dict[int, Shares]  # on so many GPUs, all of them together: more take more, as tiles are not cut
    uncut: dict[tuple[int, bool], str]  # why so many ranks cannot share all experts, or all other weights
    read_stored: Shares  # of these, what decoding touches; of the experts all, whichever are chosen
    read_dense: Shares
    largest_linear: int
    expert_format: Format
    draft_format: Format | None  # None: no draft block, or experts in several formats

    @classmethod
    def of(cls, config: ModelConfig, inventory: Inventory) -> "Demand":
        sums = {name: Counter[str]() for name in ("dense", "packed", "read_stored", "read_dense")}
        tiled = {n: Counter[str]() for n in (1, 2, 4, 8) if n <= num_parts(config)}
        known_bytes: dict[Any, int] = {}
        uncut: dict[tuple[int, bool], str] = {}
        for source in inventory.sources:
            param, where = source.param, _holder(source.param)
            dense = held_bytes(source, dense=True)
            sums["dense"][where] += dense
            sums["packed"][where] += held_bytes(source, dense=False)
            stored = (source.format, source.scale and source.scale.dtype, param.kind, param.name == "embed")
            for ranks, counts in tiled.items():
                key = (ranks, stored, param.shape, param.shard)
                if key not in known_bytes:
                    share = replace(source, param=replace(param, shape=param.local_shape(ranks)))
                    try:
                        source.shard(0, ranks)
                    except CheckpointError as error:
                        uncut.setdefault((ranks, param.expert is not None), str(error))
                    known_bytes[key] = tiled_source_bytes(share) * (1 if param.shard == "whole" else ranks)
                counts[where] += known_bytes[key]
            if active_share(param.component, config):
                sums["read_stored"][where] += source.num_bytes
                sums["read_dense"][where] += dense
        return cls(
            config=config,
            num_mtp_layers=inventory.num_mtp_layers,
            components=tuple(components(inventory, config)),
            tiled={ranks: Shares(**counts) for ranks, counts in tiled.items()},
            uncut=uncut,
            largest_linear=largest_linear(source.param for source in inventory.sources),
            expert_format=_formats(inventory, "layers.")[0],
            draft_format=drafts[0] if len(drafts := _formats(inventory, "mtp.")) == 1 else None,
            **{name: Shares(**counts) for name, counts in sums.items()},
        )

    @property
    def stored_bytes(self) -> int:
        return sum(part.total_bytes for part in self.components)


def _formats(inventory: Inventory, of: str) -> list[Format]:
    """Of routed experts."""
    sources = (s for s in inventory.sources if s.param.expert is not None and s.param.name.startswith(of))
    return list({tiled_format(source): None for source in sources})


def _holder(param: Param) -> str:
    """The field of `Shares` that the parameter counts to, by the rules of model/params.py."""
    if param.expert is not None:
        return "experts"
    return "copied" if param.shard == "whole" else "split"


def describe(model: str, format: str | None) -> tuple[str, ModelConfig, Inventory]:
    """A title, the config and the inventory of a model folder, or of a published model that is not here."""
    if model not in PRESETS:
        if format is not None:
            raise ConfigError(
                f"--format goes with {', '.join(PRESETS)}; the tensors of {model} say how they are stored"
            )
        if not Path(model).exists():
            raise ConfigError(f"{model} does not exist; give a model folder, or one of {', '.join(PRESETS)}")
        checkpoint = Checkpoint.open(model)
        return title(Path(model)), checkpoint.config, checkpoint.inventory
    format = format or "modelopt"
    config, _, tensors = contents(preset(model), format)
    file = Path("model.safetensors")
    entries = {t.name: Entry(t.name, t.dtype, t.shape, file, 0, t.num_bytes) for t in tensors}
    return f"{model}, {format}", config, take_inventory(entries, config)


@dataclass(frozen=True)
class Wanted:
    """What is asked for. `tp`: GPUs that share each layer. `ep`: groups of GPUs that have whole experts each,
    whose width the GPUs of a group share. None: `tp` as large as the layers allow, experts by width."""

    context: int
    batch: int
    tp: int | None = None
    ep: int | None = None
    weights: str = "auto"
    cache: str = "fp8"
    chunk: int | None = None  # prompt tokens of a step; None: as the engine's
    snapshots: int = EngineConfig.prefix_snapshots

    def __post_init__(self) -> None:
        for name in ("context", "batch", "tp", "ep", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, expected at least 1")
        for name, allowed in (("weights", ("auto", "dense", "packed")), ("cache", ("fp8", "bf16", "f32"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        if self.snapshots < 0:
            raise ConfigError(f"snapshots is {self.snapshots}, expected 0 or more")
        if self.batch > MAX_BATCH:
            raise ConfigError(f"batch is {self.batch}, expected at most {MAX_BATCH}")


@dataclass(frozen=True)
class Plan:
    """A model on a machine. All bytes are those of one GPU, the fullest."""

    demand: Demand
    machine: Machine
    wanted: Wanted
    tp: int
    ep: int

    @classmethod
    def make(cls, demand: Demand, machine: Machine, wanted: Wanted) -> "Plan":
        c, count = demand.config, machine.count
        if wanted.context > c.max_positions:
            most = f"the model's {c.max_positions} positions"
            raise ConfigError(f"context {wanted.context} exceeds {most}; lower --context")
        if wanted.weights != "auto" and not machine.is_cpu:
            raise ConfigError(f"weights {wanted.weights} is for a CPU; on a GPU use weights auto")
        tp = math.gcd(count, num_parts(c)) if wanted.tp is None else wanted.tp
        ep = max(1, count // tp) if wanted.ep is None else wanted.ep
        for name, value in (("tp", tp), ("ep", ep)):
            if count % value:
                raise ConfigError(
                    f"{name} {value} does not divide the {count} GPUs; use a divisor of {count}"
                )
        check_ranks(c, tp)
        if wanted.ep is not None and c.num_experts % ep:
            each = f"{c.num_experts / ep:.1f} each; use a divisor of {c.num_experts}"
            raise ConfigError(f"{c.num_experts} experts over ep {ep} make {each}")
        return cls(demand, machine, wanted, tp, min(ep, c.num_experts))

    @property
    def replicas(self) -> int:
        """Groups of GPUs that each run their own sequences."""
        return self.machine.count // self.tp

    @property
    def slots(self) -> int:
        return -(-self.wanted.batch // self.replicas)

    @property
    def width_ranks(self) -> int:
        """GPUs that share the width of an expert."""
        return max(1, min(self.tp, self.machine.count // self.ep))

    @property
    def expert_share(self) -> float:
        experts = self.demand.config.num_experts
        return -(-experts // self.ep) / experts / self.width_ranks

    @property
    def is_dense(self) -> bool:
        """On a CPU; a GPU holds weights in tiles."""
        if not self.machine.is_cpu:
            return False
        if self.wanted.weights != "auto":
            return self.wanted.weights == "dense"
        need = self.demand.dense.per_gpu(self.expert_share, self.tp)
        return fits_dense(need, self.machine.memory_bytes)

    @property
    def weights(self) -> str:
        """How they are held."""
        return "tiled" if not self.machine.is_cpu else "dense" if self.is_dense else "packed"

    @property
    def itemsize(self) -> int:
        """Of the compute type the engine chooses: float32 on a CPU, bfloat16 on a GPU."""
        return 4 if self.machine.is_cpu else 2

    @property
    def chunk(self) -> int:
        return self.wanted.chunk or (DEFAULT_CHUNK if self.machine.is_cpu else GPU_CHUNK)

    @property
    def layout(self) -> CacheLayout:
        plain = {"bf16": Format.BF16, "f32": Format.F32}
        kv, key = plain.get(self.wanted.cache, Format.KV8), plain.get(self.wanted.cache, Format.MXFP4)
        return CacheLayout(
            *(self.demand.config, kv, key, self.itemsize, self.wanted.context),
            *(self.slots, self.demand.num_mtp_layers, self.wanted.snapshots),
        )

    @property
    def weight_bytes(self) -> int:
        if self.machine.is_cpu:
            held = self.demand.dense if self.is_dense else self.demand.packed
        else:
            held = replace(self.demand.tiled[self.tp], experts=self.demand.tiled[self.width_ranks].experts)
        return held.per_gpu(self.expert_share, self.tp)

    def gpu_memory(self, spills: bool) -> Memory:
        return memory_of(
            weights=self.weight_bytes,
            layout=self.layout,
            dtype=torch.bfloat16,
            graph_rows=graph_rows(self.slots),
            chunk=self.chunk,
            unpacks=unpacks_weights(torch.bfloat16, self.machine.capability),
            spills=spills,
            ranks=self.tp,
            whole_experts=self.ep > 1 and self.width_ranks == 1,
        )

    @cached_property
    def memory(self) -> Memory:
        """With every weight on the GPU."""
        if not self.machine.is_cpu:
            return self.gpu_memory(spills=False)
        return reference_memory(
            weights=self.weight_bytes,
            layout=self.layout,
            chunk=self.chunk,
            decoded=0 if self.is_dense else self.demand.largest_linear // self.tp,
            ranks=self.tp,
        )

    @property
    def total_bytes(self) -> int:
        return self.memory.total

    @property
    def fits(self) -> bool:
        """With every weight on the GPU."""
        return self.total_bytes <= self.machine.memory_bytes

    @cached_property
    def refusal(self) -> str | None:
        """Why this engine's kernels do not run it, whatever memory there is; None: they do."""
        m, (major, minor) = self.machine, self.machine.capability
        if m.is_cpu:
            return None
        if 10 * major + minor not in ARCHITECTURES:
            return f"no kernel is built for compute capability {major}.{minor}, which {m.name} has"
        if self.wanted.cache != "fp8":
            return f"the kernels have no cache {self.wanted.cache}; use fp8"
        cut = self.demand.uncut
        if why := cut.get((self.tp, False)) or cut.get((self.width_ranks, True)):
            return why
        found = problems(self.demand.config, self.wanted.context, 10 * major + minor, ranks=self.tp)
        return f"the kernels cannot run a model of {'; '.join(found)}" if found else None

    @property
    def runs(self) -> bool:
        """With every weight on the GPU."""
        return self.fits and self.refusal is None

    @cached_property
    def spill(self) -> Split | None:
        """Experts in pinned host memory, where that makes one GPU do."""
        return None if self.fits or self.refusal else split_of(self)

    @cached_property
    def held(self) -> Memory:
        """What the engine takes: with experts in host memory, if they have to lie there."""
        if self.spill is None:
            return self.memory
        memory, form = self.gpu_memory(spills=True), self.spill.form
        gone = self.spill.num_spilled - self.spill.num_staged - self.spill.has_spare
        weights = memory.weights - gone * form.num_bytes - self.spill.draft_bytes
        return replace(memory, weights=weights, host=self.spill.host_bytes)

    def read_bytes(self, batch: int) -> int:
        """What one GPU reads to decode one token of each of `batch` sequences, all at full context."""
        c = self.demand.config
        read = self.demand.read_dense if self.is_dense else self.demand.read_stored
        # Experts that at least one of the tokens chooses, as if each chose its own at random.
        tokens = batch * self.ep / self.machine.count
        chosen = 1 - (1 - c.experts_per_token / c.num_experts) ** max(1.0, tokens)
        sequences = -(-batch // self.replicas)
        cache = sequences * self.layout.read_bytes(self.wanted.context)
        return read.per_gpu(chosen / self.ep / self.width_ranks, self.tp) + cache

    @property
    def is_built(self) -> bool:
        """Whether this engine shares a model so: all GPUs share each layer, experts by width or whole."""
        return self.tp == self.machine.count and self.ep in (1, self.tp) and self.refusal is None

    @property
    def num_all_reduces(self) -> int:
        return num_all_reduces(self.demand.config, self.tp)

    @property
    def message_bytes(self) -> int:
        """That each GPU adds to a sum, for one token: float32."""
        return 4 * self.demand.config.hidden_size

    def predicted(self, share: float, rank_ms: float | None) -> tuple[float, float] | None:
        """Tokens/s of one sequence, at least and at most; None if not built, or where no latency is known.

        `rank_ms`: a rank's step as measured; at least and at most are the same then. `share`: else, of the
        read bandwidth, what one GPU reaches. At least: what it loses stays in full on each of several. At
        most: it shrinks with what a GPU reads.
        """
        link = LINKS.get(self.machine.name)
        if link is None or not self.is_built:
            return None
        waits = self.num_all_reduces * link.all_reduce_us(self.tp, self.message_bytes) * 1e-6
        if rank_ms is not None:
            return (rate := 1 / (rank_ms * 1e-3 + waits)), rate
        lost = self.today.read_bytes(1) / self.machine.bandwidth * (1 / share - 1)
        reads = self.read_bytes(1) / self.machine.bandwidth
        return 1 / (reads + lost + waits), 1 / (reads / share + waits)

    def tokens_per_second(self, batch: int) -> float:
        """The speed of light: memory at full speed, arithmetic and communication for nothing."""
        return batch * self.machine.bandwidth / self.read_bytes(batch)

    def largest_context(self) -> int:
        """The most tokens per sequence that fit with this batch; 0 if not even one does."""
        return largest(self.demand.config.max_positions, lambda n: self._wanting(n, self.wanted.batch).runs)

    def largest_batch(self) -> int:
        return largest(MAX_BATCH, lambda n: self._wanting(self.wanted.context, n).runs)

    def _wanting(self, context: int, batch: int) -> "Plan":
        return replace(self, wanted=replace(self.wanted, context=context, batch=batch))

    def smallest_sets(self) -> list[Machine]:
        """Of each GPU the fewest that may share the model and hold it; fewest and smallest first."""
        out: list[Machine] = []
        free = replace(self.wanted, tp=None, ep=None, weights="auto")
        counts = [count for count in (1, 2, 4, 8) if count <= num_parts(self.demand.config)]
        for name in NAMES:
            plans = (Plan.make(self.demand, known(name, count), free) for count in counts)
            out += [made.machine for made in plans if made.runs][:1]
        return sorted(out, key=lambda machine: (machine.count, machine.memory_bytes))

    @cached_property
    def today(self) -> "Plan":
        """What was run: this engine on one device."""
        if self.machine.count == 1:
            return self
        alone = replace(self.machine, count=1)
        return Plan.make(self.demand, alone, replace(self.wanted, tp=None, ep=None))

    def report(self) -> dict[str, Any]:
        """As plain data, for `--json`: this engine on one GPU, then what several could."""
        out = self.today._figures()
        out["machine"]["count"] = self.machine.count
        if self.machine.count > 1:
            out["in_theory"] = {"built": self.is_built, "tp": self.tp, "ep": self.ep, **self._figures()}
            out["in_theory"]["communication"] = self.communication() if self.is_built else None
        return out

    def communication(self) -> dict[str, Any]:
        """Of one token of one sequence, on each GPU."""
        link = LINKS.get(self.machine.name)
        return {
            "all_reduces": self.num_all_reduces,
            "message_bytes": self.message_bytes,
            "sent_bytes": 2 * self.num_all_reduces * self.message_bytes * (self.tp - 1),  # with tags
            "all_reduce_us": link.all_reduce_us(self.tp, self.message_bytes) if link else None,
            "source": link.source if link else None,
        }

    def _figures(self) -> dict[str, Any]:
        layout, w = self.layout, self.wanted
        one, span = replace(layout, num_slots=1), layout.page_tokens
        out: dict[str, Any] = {
            "machine": {
                **{"name": self.machine.name, "count": self.machine.count},
                **{"memory_bytes": self.machine.memory_bytes, "bandwidth": self.machine.bandwidth},
                **{"bandwidth_source": self.machine.source, "was_run_on": self.machine.was_run_on},
            },
            **{"context": w.context, "batch": w.batch, "gpus_used": self.machine.count},
            **{"weights": self.weights, "cache": w.cache, "chunk": self.chunk},
            "stored_bytes": self.demand.stored_bytes,
            "components": {part.name: part.total_bytes for part in self.demand.components},
            "active_bytes_per_token": sum(part.active_bytes for part in self.demand.components),
            "per_gpu": {**vars(self.held), "total": self.held.total},
            **{"fits": self.runs or self.spill is not None, "refused": self.refusal},
            "spill": None if self.spill is None else spill_figures(self),
            "sequence_bytes": one.sequence_bytes(w.context),
            # Of one more token, on average over whole blocks.
            "cache_bytes_per_token": (one.sequence_bytes(2 * span) - one.sequence_bytes(span)) / span,
            "read_bytes": {"one": self.read_bytes(1), "batch": self.read_bytes(w.batch)},
            "at_most_tokens_per_second": {
                "one": self.tokens_per_second(1),
                "batch": self.tokens_per_second(w.batch),
            },
        }
        if not self.runs:
            sets = [{"name": m.name, "count": m.count} for m in self.smallest_sets()]
            out["instead"] = {"context": self.largest_context(), "batch": self.largest_batch(), "gpus": sets}
        return out


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest n up to `limit` that fits, 0 if 1 does not; what fits, fits with less."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
