"""Settles every `auto` of an EngineConfig once, for this machine and checkpoint, and keeps the reasons."""

from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec

import torch

from dsv4.cache.layout import CacheLayout, most_drafts
from dsv4.config import EngineConfig, ModelConfig
from dsv4.device import OLDEST, Device, available_memory, too_old, usable_cores
from dsv4.engine import proof
from dsv4.engine.memory import (
    DEFAULT_CHUNK,
    GPU_CHUNK,
    Memory,
    default_context,
    fits_dense,
    gpu_memory,
    largest_linear,
    reference_memory,
    unpacks_weights,
)
from dsv4.engine.sizes import check_sizes
from dsv4.engine.spill import Drafts, Split, check_host, find_split
from dsv4.errors import ConfigError, DeviceError
from dsv4.gpu.architectures import capability, standing
from dsv4.gpu.build import architecture, compile_all
from dsv4.ops import IMPLEMENTATIONS, Ops
from dsv4.quant.formats import FP8_TILE, Format
from dsv4.step.buffers import graph_rows, round_sizes
from dsv4.weights.load import Checkpoint
from dsv4.weights.tiled import draft_form, expert_bytes, expert_form, tiled_bytes

# Below this, one decode step's products are too short to share between threads (measured: docs/log.md).
SMALL_MODEL_BYTES = 1 << 30
MAX_THREADS = 1024
AUTO_MTP = 1  # drafts of MTP on a GPU: a second is right half the time at best


@dataclass(frozen=True)
class Choice:
    """A setting that was `auto`, what it became and why; shown at start and by `dsv4 info`."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Settings:
    device: Device
    ops: Ops
    dtype: torch.dtype
    kv_format: Format
    key_format: Format
    max_context: int
    chunk: int
    threads: int
    dense: bool
    drafts: int | None  # most that a step verifies; 0: none are made; None: as many as pay
    tiled: bool  # weights in the GPU kernels' own form; generated tokens run as graphs
    choices: tuple[Choice, ...]

    def without_drafts(self, why: str) -> "Settings":
        """The same, but nothing is drafted; the list of choices says why."""
        others = [choice for choice in self.choices if choice.name != "speculate"]
        return replace(self, drafts=0, choices=(*others, Choice("speculate", "off", why)))

    def ahead_drafts(self, model: ModelConfig) -> int:
        """Most that a GPU verifies and makes by itself, in steps launched ahead."""
        if not self.tiled:
            return 0
        if self.drafts is not None:
            return self.drafts
        return AUTO_MTP if model.dspark is None else most_drafts(model)


def settle(config: EngineConfig, checkpoint: Checkpoint, ranks: int = 1) -> Settings:
    """For one of so many ranks, whose shares `checkpoint` has."""
    device = Device.choose(config.device)
    if device.kind == "cpu":
        device = replace(device, memory_bytes=device.memory_bytes // ranks)  # one memory for all of them
    _check_rounding(config, checkpoint.config, ranks)
    choices: list[Choice] = []

    def chosen(name: str, value: str, why: str) -> str:
        choices.append(Choice(name, value, why))
        return value

    dtype = config.compute_dtype
    if dtype == "auto":
        on_cpu = device.kind == "cpu"
        why = "exact, and fastest on a CPU" if on_cpu else "the model's own type"
        dtype = chosen("compute_dtype", "float32" if on_cpu else "bfloat16", why)

    cache = config.cache
    if cache == "auto" and config.qat == "on":
        cache = chosen("cache", "fp8", "lossless after the model's own rounding")
    elif cache == "auto":
        cache = chosen("cache", "f32", "qat is off: entries are not rounded")

    slow = _why_reference(config, cache) if device.kind == "cuda" else None
    if slow:
        chosen("ops", "cpu", f"{slow} has no GPU kernels; the reference runs on the GPU, slowly")
    tiled = device.kind == "cuda" and slow is None
    if tiled:
        _check_gpu(device, checkpoint.config, _max_context(config, checkpoint.config, []), ranks)
    if tiled and config.weights != "auto":
        raise ConfigError(f"weights {config.weights} is for a CPU; on a GPU use weights auto")

    need, have = checkpoint.held_bytes(dense=True), device.memory_bytes
    weights = config.weights
    if weights == "auto" and tiled:
        weights = chosen("weights", "tiled", "as stored, in the order the GPU kernels read them")
    elif weights == "auto":
        why = f"decoded weights take {need / 1e9:.1f} GB, {have / 1e9:.1f} GB of memory are free"
        packed = "" if fits_dense(need, have) else "; packed weights are decoded at every use, which is slow"
        weights = chosen("weights", "packed" if packed else "dense", why + packed)

    chunk = config.chunk
    if chunk is None and tiled:
        why = "a prompt's step reads all experts, whatever its length; longer ones would keep others waiting"
        chunk = int(chosen("chunk", str(GPU_CHUNK), why))
    threads = config.threads or max(1, torch.get_num_threads() // ranks)
    if threads > MAX_THREADS:
        raise ConfigError(f"threads is {threads}, expected at most {MAX_THREADS}")
    if config.threads is None and device.kind == "cpu" and need < SMALL_MODEL_BYTES:
        threads = int(chosen("threads", "1", "small model: waking further threads costs more than it gains"))

    drafts = _drafts(config, device, checkpoint, tiled and ranks == 1)
    if config.speculate == "auto":
        choices.append(_drafter_choice(drafts, checkpoint))
    plain = {"bf16": Format.BF16, "f32": Format.F32}
    return Settings(
        device=device,
        ops=_choose_ops(device, config, slow is not None),
        dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype],
        kv_format=plain.get(cache, Format.KV8),
        key_format=plain.get(cache, Format.MXFP4),
        max_context=_max_context(config, checkpoint.config, choices),
        chunk=chunk or DEFAULT_CHUNK,
        threads=threads,
        dense=weights == "dense",
        drafts=drafts,
        tiled=tiled,
        choices=tuple(choices),
    )


def crowding(threads: int, ranks: int) -> tuple[str, ...]:
    """A note on more threads than there are cores. `ranks`: processes on this machine.

    No error: it is slow and not wrong, and who wants the bits of a larger machine needs its number."""
    cores = usable_cores()
    if threads == 1 or threads * ranks <= cores:
        return ()
    found = f"threads is {threads}" + (f" on each of {ranks} ranks" if ranks > 1 else "")
    return (
        f"{found}, and this process may use {cores} cores: threads that wait for a core make steps slower; "
        f"leave threads out, or give at most {max(1, cores // ranks)}",
    )


def _drafter_choice(drafts: int | None, checkpoint: Checkpoint) -> Choice:
    """What speculate auto became."""
    blocks = checkpoint.inventory.num_mtp_layers
    if drafts is None:
        drafter = checkpoint.config.drafter(blocks)
        return Choice("speculate", f"auto, {drafter}", "as many drafts as pay, which is measured")
    why = "a GPU drafts only alone and with its own kernels" if blocks else "neither MTP nor DSpark is there"
    return Choice("speculate", "off", why)


def _drafts(config: EngineConfig, device: Device, checkpoint: Checkpoint, has_rounds: bool) -> int | None:
    """`has_rounds`: a GPU's kernels run all of the model, so that they can verify and draft."""
    wanted, has_drafter = config.speculate, checkpoint.inventory.num_mtp_layers > 0
    can_draft = has_drafter and (device.kind == "cpu" or has_rounds)
    if not wanted.isdecimal():
        return None if wanted == "auto" and can_draft else 0
    if not has_drafter:
        raise ConfigError(
            f"speculate is {wanted}, but the model has no drafter (neither MTP nor DSpark); leave it out"
        )
    if not can_draft:
        raise ConfigError(
            f"speculate is {wanted}: a GPU speculates only alone and with its own kernels; leave it out"
        )
    if int(wanted) > (most := most_drafts(checkpoint.config)):
        kind = "DSpark's block has" if checkpoint.config.dspark else "MTP proposes at most"
        raise ConfigError(f"speculate is {wanted}, but {kind} {most} tokens; use auto, off or 1 to {most}")
    return int(wanted)


def cache_layout(model: ModelConfig, s: Settings, config: EngineConfig, num_mtp_layers: int) -> CacheLayout:
    return CacheLayout(
        config=model,
        kv_format=s.kv_format,
        key_format=s.key_format,
        rope_itemsize=s.dtype.itemsize,
        max_context=s.max_context,
        num_slots=config.max_batch,
        num_mtp_layers=num_mtp_layers,
        max_snapshots=config.prefix_snapshots,
        max_pages=config.cache_pages,
    )


def check_memory(
    settings: Settings, config: EngineConfig, checkpoint: Checkpoint, ranks: int = 1
) -> Split | None:
    """Refuse before anything is read: an allocation that fails later, or swaps, would be a worse answer.

    -> how experts are split between GPU and host memory; None: all are where the other weights are.
    """
    if not settings.tiled:
        _check_plain(settings, config, checkpoint, ranks)
        return None
    needs = _Needs(settings, config, checkpoint, ranks)
    split = needs.split
    need = needs.memory(spills=split is not None)
    weights = need.weights
    if split is not None:
        weights += split.gpu_bytes - needs.experts - split.draft_bytes
    beside = need.beside_weights - needs.layout.store_bytes()
    _refuse(settings, needs.layout, weights, beside, "lower max_batch, max_context or chunk")
    if split is not None:
        check_host(split, available_memory())
    return split


def _check_plain(settings: Settings, config: EngineConfig, checkpoint: Checkpoint, ranks: int) -> None:
    params = (source.param for source in checkpoint.inventory.sources)
    layout = cache_layout(checkpoint.config, settings, config, checkpoint.inventory.num_mtp_layers)
    need = reference_memory(
        weights=checkpoint.held_bytes(settings.dense),
        layout=layout,
        chunk=settings.chunk,
        decoded=0 if settings.dense else largest_linear(params),
        ranks=ranks,
        drafts=most_drafts(checkpoint.config) if settings.drafts is None else settings.drafts,
    )
    lower = "lower max_batch, max_context or chunk" + (", or use weights packed" if settings.dense else "")
    _refuse(settings, layout, need.weights, need.beside_weights - layout.store_bytes(), lower)


def _refuse(settings: Settings, layout: CacheLayout, weights: int, beside: int, lower: str) -> None:
    """What does not fit. `beside`: neither weights nor cache."""
    cache, free = layout.store_bytes(), settings.device.memory_bytes
    if weights + cache + beside > free:
        raise ConfigError(
            f"the weights take {weights / 1e9:.1f} GB, the cache of {layout.num_slots} sequences of "
            f"{layout.max_context} tokens {cache / 1e9:.1f} GB and what steps need {beside / 1e9:.1f} GB, "
            f"but {free / 1e9:.1f} GB of memory are free; {lower}"
        )


@dataclass(frozen=True)
class _Needs:
    """What an engine takes of a GPU."""

    settings: Settings
    config: EngineConfig
    checkpoint: Checkpoint
    ranks: int = 1  # of so many, one's share of the checkpoint

    @cached_property
    def layout(self) -> CacheLayout:
        return cache_layout(
            self.checkpoint.config, self.settings, self.config, self.checkpoint.inventory.num_mtp_layers
        )

    @cached_property
    def weights(self) -> int:
        return tiled_bytes(self.checkpoint)

    @cached_property
    def experts(self) -> int:
        """Of these bytes, those of routed experts."""
        return expert_bytes(self.checkpoint)

    def memory(self, spills: bool) -> Memory:
        """With all weights on the GPU; `spills`: of an engine some of whose experts lie elsewhere."""
        dtype, name = self.settings.dtype, self.settings.device.torch_name
        found = torch.cuda.get_device_capability(name) if torch.cuda.is_available() else OLDEST
        drafts, batch = self.settings.ahead_drafts(self.checkpoint.config), self.config.max_batch
        return gpu_memory(
            weights=self.weights,
            layout=self.layout,
            dtype=dtype,
            graph_rows=graph_rows(batch),
            rounds=round_sizes(batch, drafts) if drafts else (),
            chunk=self.settings.chunk,
            activations=self.config.activations,
            unpacks=unpacks_weights(dtype.itemsize, found),
            spills=spills,
            ranks=self.ranks,
            whole_experts=self.config.expert_parallel,
        )

    @cached_property
    def split(self) -> Split | None:
        """None where all experts lie on the GPU."""
        config, free = self.config, self.settings.device.memory_bytes
        wants = config.spill.isdecimal() or config.expert_memory is not None
        if config.spill == "off" or (not wants and self.memory(spills=False).total <= free):
            return None
        (form, names), draft = expert_form(self.checkpoint), draft_form(self.checkpoint)
        experts = self.checkpoint.config.num_experts
        return find_split(
            spill=config.spill,
            expert_memory=config.expert_memory,
            form=form,
            names=names,
            num_experts=experts,
            room=free - self.memory(spills=True).total + self.experts,
            drafts=draft and Drafts(draft[0], tuple(draft[1]), experts),
        )


def _check_gpu(device: Device, model: ModelConfig, max_context: int, ranks: int) -> None:
    """Refuse a GPU, a machine or a model that the kernels cannot run, and compile them, before weights are
    read."""
    found = torch.cuda.get_device_capability(device.torch_name)
    if found < OLDEST:
        raise DeviceError(f"{device.name} {too_old(found)}; use --device cpu")
    if find_spec("triton") is None:
        raise DeviceError("the GPU kernels need Triton, which is not installed: pip install triton")
    # Imports Triton, which a machine without a GPU may lack.
    from dsv4.gpu.ahead import check_triton

    check_triton()
    gpu = torch.device(device.torch_name)
    standing(capability(gpu))
    proof.check(gpu)
    check_sizes(
        model,
        max_context=max_context,
        capability=capability(gpu),
        multiprocessors=torch.cuda.get_device_properties(gpu).multi_processor_count,
        ranks=ranks,
    )
    compile_all(architecture(gpu))


def _check_rounding(config: EngineConfig, c: ModelConfig, ranks: int) -> None:
    """Inputs that ranks share must round as they would on one."""
    if ranks > 1 and config.activations == "a4":
        raise ConfigError(
            f"activations a4 scale a row by all of it, and {ranks} ranks share it; use a16 or a8"
        )
    for name, width in (("expert_width", c.expert_width), ("o_groups x o_rank", c.o_groups * c.o_rank)):
        if ranks > 1 and config.activations == "a8" and width // ranks % FP8_TILE:
            raise ConfigError(
                f"activations a8 round blocks of {FP8_TILE}, but {name} {width} over {ranks} ranks makes "
                f"{width // ranks} each; use fewer ranks, or a16"
            )


def _why_reference(config: EngineConfig, cache: str) -> str | None:
    """What the GPU kernels do not serve, if anything."""
    if config.ops:
        return "a choice of ops"
    if config.qat == "off":
        return "qat off"
    return f"cache {cache}" if cache != "fp8" else None


def _choose_ops(device: Device, config: EngineConfig, reference: bool) -> Ops:
    if unknown := sorted({op for op, _ in config.ops} - IMPLEMENTATIONS.keys()):
        raise ConfigError(f"unknown ops {unknown}; the ops are {', '.join(IMPLEMENTATIONS)}")
    if len(dict(config.ops)) < len(config.ops):
        raise ConfigError(f"ops names an op twice: {', '.join(f'{o}={b}' for o, b in config.ops)}; keep one")
    for op, backend in config.ops:
        if device.kind == "cpu" and backend != "cpu" and backend in IMPLEMENTATIONS[op]:
            raise ConfigError(f"{op}={backend} needs a GPU, and the engine runs on a CPU; use {op}=cpu")
    default = dict.fromkeys(IMPLEMENTATIONS, "cpu") if reference else {}
    return Ops.choose(device.kind, **default | dict(config.ops))


def _max_context(config: EngineConfig, model: ModelConfig, choices: list[Choice]) -> int:
    if config.max_context is None:
        value = default_context(model)
        choices.append(Choice("max_context", str(value), f"the model allows {model.max_positions}"))
        return value
    if config.max_context > model.max_positions:
        raise ConfigError(
            f"max_context {config.max_context} exceeds the model's {model.max_positions} positions; lower it"
        )
    return config.max_context
