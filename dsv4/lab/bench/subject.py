"""What is measured: a model folder, or a model of random weights; and whether it fits before it is made."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dsv4.cache.layout import CacheLayout
from dsv4.config import Activations, ModelConfig, preset
from dsv4.device import OLDEST, available_memory
from dsv4.engine.memory import gpu_memory, unpacks_weights
from dsv4.engine.sizes import problems
from dsv4.engine.spill import Split, check_host, choose_resident, find_split, make_placement
from dsv4.errors import ConfigError
from dsv4.gpu.architectures import capability
from dsv4.gpu.shapes import ROWS, SLICE, Form, tile_bytes
from dsv4.gpu.tiles import Bank, Tiled
from dsv4.hub.cache import title
from dsv4.lab.plan import largest
from dsv4.lab.records import published
from dsv4.lab.routing import apply as follow
from dsv4.lab.routing import shares
from dsv4.lab.styles import LAYOUTS, format_of, layout_of
from dsv4.lab.synthetic import make_weights, num_stages, with_experts, with_stages
from dsv4.model.bundle import Bundle, Numerics, Weights
from dsv4.model.params import Param, check_ranks, declare, own_experts
from dsv4.ops import IMPLEMENTATIONS, Ops
from dsv4.ops.experts.placement import place
from dsv4.parallel.mesh import Mesh
from dsv4.quant.formats import Format
from dsv4.weights.load import Checkpoint, Progress
from dsv4.weights.tiled import expert_bytes, expert_form, load_tiled, tiled_bytes

DTYPE = torch.bfloat16
RESIDENT = 192  # experts of a synthetic model that are made by default, if it has as many


@dataclass(frozen=True)
class Subject:
    """A model whose weights are made or read only by `load`."""

    title: str
    config: ModelConfig
    layout: str
    weight_bytes: int
    whole_layers: int  # of the model as published
    checkpoint: Checkpoint | None = None
    routing: str | None = None  # law of a synthetic router (lab/routing.py)
    ranks: int = 1  # of a synthetic model: the share of one of so many is measured
    whole_experts: bool = False  # and that has some of the experts whole
    activations: Activations = "a16"

    @property
    def is_whole(self) -> bool:
        """Whether all its layers are there: a record of fewer says nothing about the model."""
        return self.config.num_layers == self.whole_layers

    def load(
        self, device: torch.device, progress: Progress | None = None, split: Split | None = None
    ) -> Weights:
        """`split`: experts between GPU and host memory, the most frequent on the GPU where that is known."""
        share = None if self.routing is None else shares(self.routing, self.config)
        placement = None
        if split is not None:
            placement = make_placement(split, None if share is None else share.tolist(), device)
        if self.checkpoint is not None:
            return load_tiled(self.checkpoint, device, progress, placement)
        weights = make_weights(
            config=self.config,
            layout=self.layout,
            device=str(device),
            placement=placement,
            ranks=self.ranks,
            whole_experts=self.whole_experts,
            draft_blocks=num_stages(self.config),
        )
        if share is not None:
            follow(weights.tensors, share, self.config)
        return weights

    def reroute(self, weights: Weights, split: Split | None, routing: str) -> "Subject":
        """The same weights under another law: random experts are all alike, so they only change names."""
        share = shares(routing, self.config)
        if split is not None and (placement := weights.placement) is not None:
            places = choose_resident(split, share.tolist())
            spare = int(split.has_spare)
            placement.slot_of, _, _ = place(places, num_spare=(spare + split.num_staged, spare))
            placement.publish()
        follow(weights.tensors, share, self.config)
        return replace(self, routing=routing)

    def bundle(
        self,
        device: torch.device,
        progress: Progress | None = None,
        split: Split | None = None,
        mesh: Mesh | None = None,
    ) -> Bundle:
        """The weights with the GPU backend of every op; sizes that the kernels cannot take are refused.
        `mesh`: of a rank of several."""
        check_kernels(self.config, device, ranks=self.ranks)
        ops = Ops.choose("cuda", **dict.fromkeys(IMPLEMENTATIONS, "gpu"))
        weights, numerics = self.load(device, progress, split), Numerics(DTYPE, self.activations, qat=True)
        return Bundle(self.config, weights, ops, numerics, mesh or Mesh())

    def split(self, spill: str, others: int, free: int) -> Split | None:
        """How experts are divided when `others` bytes beside the weights are needed; None: all on the GPU."""
        fits = self.weight_bytes + others <= free
        if spill == "off" or (spill == "auto" and fits):
            return None
        if self.checkpoint is not None:
            (form, names), experts = expert_form(self.checkpoint), expert_bytes(self.checkpoint)
        else:
            c, routed = self.config, [p for p in declare(self.config, 0) if p.expert is not None]
            form = Form(format_of(routed[0], self.layout), c.expert_width, c.hidden_size)
            names = [f"layers.{layer}.ffn.experts" for layer in range(c.num_layers)]
            experts = sum(_held(param, self.layout) for param in routed)
        room = free - others - (self.weight_bytes - experts)
        split = find_split(spill, None, form, names, self.config.num_experts, room)
        if split is not None:
            if split.gpu_bytes > room:
                raise ConfigError(
                    f"experts on the GPU take {split.gpu_bytes / 1e9:.1f} GB and {max(room, 0) / 1e9:.1f} GB "
                    "are left for them; use --spill auto, or lower --context or --batch"
                )
            check_host(split, available_memory())
        return split

    def facts(self) -> dict[str, Any]:
        c = self.config
        return {
            **{"model": self.title, "published": published(c), "is_synthetic": self.checkpoint is None},
            "layout": self.layout,
            **{"layers": c.num_layers, "experts": c.num_experts, "activations": self.activations},
            **({} if self.routing is None else {"routing": self.routing}),
        }


def check_kernels(config: ModelConfig, device: torch.device, max_context: int = 0, ranks: int = 1) -> None:
    """Refuse what no kernel takes on this GPU. `max_context`: tokens that a cache is made for."""
    found = problems(
        c=config,
        max_context=max_context,
        capability=capability(device),
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
        ranks=ranks,
    )
    if found:
        raise ConfigError(f"the GPU kernels cannot run a model of {'; '.join(found)}")


def synthetic(
    name: str,
    experts: int | None,
    layers: int | None,
    layout: str,
    routing: str | None = None,
    ranks: int = 1,
    whole_experts: bool = False,
    drafts: bool = False,
) -> Subject:
    """A published model's sizes with that many experts and layers; None: as many as usual, and all. `ranks`:
    the share of one of so many, which has its width of every expert or, `whole_experts`, some of them.
    `drafts`: with DSpark's stages."""
    whole = preset(name)
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown layout {layout!r}; use one of {', '.join(LAYOUTS)}")
    experts = min(RESIDENT, whole.num_experts) if experts is None else experts
    if not whole.experts_per_token <= experts <= whole.num_experts:
        raise ConfigError(
            f"experts is {experts}, expected {whole.experts_per_token} (chosen per token) to "
            f"{whole.num_experts} (all of {name})"
        )
    if layers is not None and not 1 <= layers <= whole.num_layers:
        raise ConfigError(f"layers is {layers}, expected 1 to {whole.num_layers} (all of {name})")
    config = replace(with_experts(whole, experts), layers=whole.layers[:layers])
    config = with_stages(config) if drafts else config
    if routing is not None:
        shares(routing, config)  # refuses what is no law
    check_ranks(config, ranks, whole_experts)
    return Subject(
        title=name,
        config=config,
        layout=layout,
        weight_bytes=synthetic_bytes(config, layout, ranks, whole_experts),
        whole_layers=whole.num_layers,
        routing=routing,
        ranks=ranks,
        whole_experts=whole_experts,
    )


def of_folder(folder: Path) -> Subject:
    checkpoint = Checkpoint.open(folder)
    c = checkpoint.config
    return Subject(
        title=title(folder),
        config=c,
        layout=layout_of((source, 1) for source in checkpoint.inventory.sources),
        weight_bytes=tiled_bytes(checkpoint),
        whole_layers=c.num_layers,
        checkpoint=checkpoint,
    )


def choose(
    model: Path | None,
    name: str | None,
    experts: int | None,
    layers: int | None,
    layout: str | None,
    routing: str | None = None,
) -> Subject:
    """The model folder, or the synthetic model of that name: one of them, and options that go with it."""
    if name is not None:
        if model is not None:
            raise ConfigError(f"both {model} and --synthetic {name} are given; measure one of them")
        return synthetic(name, experts, layers, layout or "modelopt", routing)
    assert model is not None
    given = {"experts": experts, "layers": layers, "layout": layout, "routing": routing}
    for option, value in given.items():
        if value is not None:
            raise ConfigError(f"--{option} goes with --synthetic; {model} is measured as it is")
    return of_folder(model)


def synthetic_bytes(config: ModelConfig, layout: str, ranks: int = 1, whole_experts: bool = False) -> int:
    """What `make_weights` allocates, to the byte. Of whole experts a rank has the first."""
    return sum(
        _held(param, layout, param.shared_by(ranks, whole_experts))
        for param in declare(config, num_stages(config))
        if not whole_experts or param.expert is None or param.expert in own_experts(config, 0, ranks)
    )


def _held(param: Param, layout: str, ranks: int = 1) -> int:
    shape = param.local_shape(ranks)
    if param.kind in ("table", "plain"):
        return math.prod(shape) * (8 if param.kind == "table" else 4)
    if param.stays_in_rows:
        return 2 * math.prod(shape)
    return tile_bytes(format_of(param, layout), (shape[0], shape[1]))


def cache_layout(config: ModelConfig, capacity: int, slots: int) -> CacheLayout:
    stages = num_stages(config)
    return CacheLayout(config, Format.KV8, Format.MXFP4, DTYPE.itemsize, capacity, slots, stages)


def other_bytes(layout: CacheLayout, rows: Sequence[int] = (), chunk: int = 0, spills: bool = False) -> int:
    """Beside the weights: decode steps of so many rows each, and a prompt's steps of so many tokens."""
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else OLDEST
    return gpu_memory(
        weights=0,
        layout=layout,
        dtype=DTYPE,
        graph_rows=rows,
        chunk=chunk,
        unpacks=unpacks_weights(DTYPE.itemsize, found),
        spills=spills,
    ).total


def check_fits(subject: Subject, others: int, free: int) -> None:
    """Refuse before anything is allocated; for a synthetic model, say how many experts would fit."""
    need = subject.weight_bytes + others
    if need <= free:
        return
    c = subject.config
    found = (
        f"{subject.title} with {c.num_experts} experts takes {subject.weight_bytes / 1e9:.1f} GB of weights "
        f"and {others / 1e9:.1f} GB beside them, but {free / 1e9:.1f} GB of GPU memory are free"
    )
    if subject.checkpoint is not None:
        raise ConfigError(f"{found}; lower --context or --batch, or use a smaller model")

    def fits(experts: int) -> bool:
        held = synthetic_bytes(with_experts(c, experts), subject.layout, subject.ranks, subject.whole_experts)
        return held + others <= free

    most = largest(c.num_experts, fits)
    if most < c.experts_per_token:
        raise ConfigError(
            f"{found}; not even {c.experts_per_token} fit: lower --context, --batch or --layers"
        )
    raise ConfigError(f"{found}; at most {most} fit: --experts {most}")


@dataclass(frozen=True)
class Reads:
    """Bytes of weights that a decode step needs: always, and of each chosen expert of each layer."""

    always: int
    per_expert: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Any], num_layers: int) -> "Reads":
        """As lab/plan.py: rows of the embedding and of hash tables are nothing; draft blocks do not run."""
        always, per_expert = 0, [0] * num_layers
        for name, held in tensors.items():
            if name == "embed" or name.startswith("mtp.") or name.endswith("tid2eid"):
                continue
            if isinstance(held, Bank) and held.w13.count > 1:
                both = needed_bytes(held.w13) + needed_bytes(held.w2)
                per_expert[int(name.split(".")[1])] = both // held.w13.count
            elif isinstance(held, Bank):
                always += needed_bytes(held.w13) + needed_bytes(held.w2)
            elif isinstance(held, Tiled):
                always += needed_bytes(held)
            else:
                always += held.numel() * held.element_size()
        return cls(always, tuple(per_expert))

    def step(self, distinct: list[float]) -> float:
        """With that many distinct experts chosen in each layer."""
        return self.always + sum(n * each for n, each in zip(distinct, self.per_expert, strict=True))


def needed_bytes(weight: Tiled) -> int:
    """Of a tiled weight, without what pads its last tiles."""
    n, k = weight.shape
    return weight.num_bytes * n * k // (weight.units * ROWS * weight.slices * SLICE)
