"""From a model folder to a rank's executor: what rank 0 and all others do alike. Knows no scheduler."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dsv4.cache.store import Cache
from dsv4.config import EngineConfig
from dsv4.device import Device, one_thread
from dsv4.engine.eager import Eager
from dsv4.engine.frequency import checksum
from dsv4.engine.settings import Settings, cache_layout, check_memory, crowding, settle
from dsv4.engine.spill import Split, place_experts
from dsv4.errors import ConfigError, DeviceError
from dsv4.model.bundle import Bundle, Numerics, Weights
from dsv4.model.exact import settle_exact
from dsv4.model.model import Model
from dsv4.ops.exchange.decode import Peers, inbox_places
from dsv4.parallel.machines import World
from dsv4.parallel.mesh import Mesh
from dsv4.parallel.reading import Share
from dsv4.step.buffers import graph_rows
from dsv4.text.tokenizer import Tokenizer
from dsv4.weights.load import Checkpoint, Progress
from dsv4.weights.tiled import load_tiled

# Kernels compiled so far, all of them, and the last one's name.
Compiled = Callable[[int, int, str], None]


def rank_devices(config: EngineConfig, world: World | None = None) -> list[str]:
    """The device of each rank; of torchrun's, that of this one for all."""
    if world is not None:
        if config.gpus is not None or config.ranks > 1:
            raise ConfigError(f"torchrun started {world.size} ranks; leave gpus and ranks out")
        kind = Device.choose(config.device).kind
        return [f"cuda:{world.local_rank}" if kind == "cuda" else "cpu"] * world.size
    if config.gpus is None:
        if config.ranks > 1 and (found := Device.choose(config.device)).kind != "cpu":
            raise ConfigError(
                f"ranks {config.ranks} is for a CPU, and the engine runs on {found.name}; "
                f"use --gpus {config.ranks}, or --device cpu"
            )
        return ["cpu"] * config.ranks if config.ranks > 1 else [config.device]
    numbers = [part.strip() for part in config.gpus.split(",")]
    if not all(number.isdigit() and len(number) < 5 for number in numbers) or len({*numbers}) < len(numbers):
        raise ConfigError(f"gpus {config.gpus!r}: expected how many, or which ones: 2 or 0,1")
    if len(numbers) == 1:
        numbers = [str(number) for number in range(int(numbers[0]))]
    if not numbers:
        raise ConfigError("gpus 0: expected at least one; use --device cpu for none")
    if not torch.cuda.is_available():
        there = f", or use --ranks {len(numbers)} there" if len(numbers) > 1 else ""
        raise DeviceError(
            f"gpus {config.gpus!r}: torch {torch.__version__} sees no CUDA GPU; "
            f"leave it out to run on the CPU{there}"
        )
    return [Device.choose(f"cuda:{number}").torch_name for number in numbers]


@dataclass(frozen=True)
class Prepared:
    """A rank's share of a checkpoint, checked against the machine; no weight has been read yet."""

    checkpoint: Checkpoint
    settings: Settings
    config: EngineConfig
    rank: int
    size: int
    split: Split | None = None  # experts between GPU and host memory; None: all are with the other weights

    @classmethod
    def make(cls, path: Path, config: EngineConfig, rank: int, devices: list[str]) -> "Prepared":
        """`config` is settled by rank 0: what depends on free memory is the same on all of them."""
        size = len(devices)
        if size > 1 and devices[rank] != "cpu":
            torch.cuda.set_device(devices[rank])  # else every rank makes a context on the first GPU
        if size > 1 and config.prefix_dir is not None:
            raise ConfigError(f"prefix_dir keeps what one rank has, and there are {size}; leave it out")
        if config.expert_parallel and size == 1:
            raise ConfigError(
                "expert_parallel gives each rank whole experts, and there is one rank; "
                "leave it out, or use --gpus 2 or --ranks 2, or more"
            )
        checkpoint = Checkpoint.open(path)
        if config.speculate == "off":
            checkpoint = checkpoint.without_drafts()
        checkpoint = checkpoint.shard(rank, size, config.expert_parallel)
        checkpoint = checkpoint.with_head(config.head, size)
        settings = settle(replace(config, device=devices[rank], gpus=None), checkpoint, size)
        if settings.tiled and settings.drafts == 0 and checkpoint.config.dspark is not None:
            checkpoint = checkpoint.without_drafts()  # nothing would run them
        split = None
        if not settings.tiled and (config.spill not in ("off", "auto") or config.expert_memory is not None):
            raise ConfigError(
                "spill and expert_memory share experts between a GPU with kernels and host memory, and this "
                f"engine runs on {settings.device.torch_name} without; leave them out"
            )
        if not settings.tiled and (config.no_graph or config.no_overlap):
            raise ConfigError(
                "no_graph and no_overlap are about a GPU's decode kernels, and this engine runs on "
                f"{settings.device.torch_name} without; leave them out"
            )
        if size > 1 and config.spill not in ("off", "auto"):
            raise ConfigError(
                f"spill {config.spill} is for one GPU, and there are {size} ranks; leave it out"
            )
        if rank == 0 or settings.device.kind == "cuda":
            its_config = replace(config, spill="off") if size > 1 else config
            split = check_memory(settings, its_config, checkpoint, size)
        if split is not None and config.speculate == "auto" and settings.drafts != 0:
            settings = settings.without_drafts(
                "experts lie in host memory, and each draft would read more of them over PCIe"
            )
            if checkpoint.config.dspark is not None:
                checkpoint = checkpoint.without_drafts()
                split = check_memory(settings, its_config, checkpoint, size)
        return cls(checkpoint, settings, config, rank, size, split)

    def tokenizer(self, folder: Path) -> Tokenizer | None:
        """The model's, if its folder has one."""
        if not (folder / "tokenizer.json").exists():
            return None
        tokenizer, rows = Tokenizer.load(folder), self.checkpoint.config.vocab_size
        if tokenizer.vocab_size > rows:
            raise ConfigError(
                f"tokenizer.json has {tokenizer.vocab_size} ids, the model {rows} rows; "
                f"it belongs to another model: put the model's own into {folder}"
            )
        return tokenizer

    @property
    def settled(self) -> EngineConfig:
        """For the other ranks: with what depends on this machine's state decided."""
        s = self.settings
        weights = self.config.weights if s.tiled else "dense" if s.dense else "packed"
        return replace(self.config, weights=weights, threads=s.threads, max_context=s.max_context)

    def load(
        self, progress: Progress | None = None, share: Share | None = None
    ) -> tuple[Weights, tuple[str, ...]]:
        """The weights, and notes on what was found. `share`: with the other ranks of this machine."""
        s = self.settings
        if s.device.kind == "cuda":
            torch.cuda.set_device(s.device.torch_name)  # kernels run on the thread's current device
        notes = (*self.checkpoint.inventory.notes, *crowding(s.threads, self.config.ranks))
        with one_thread():
            if s.tiled:
                model = checksum(self.checkpoint)
                placed, said = place_experts(self.split, model, s.device.torch_name)
                notes += said
                weights = load_tiled(self.checkpoint, s.device.torch_name, progress, *placed, share=share)
                weights = replace(weights, checksum=model)
            else:
                weights = self.checkpoint.load(s.dense, s.device.torch_name, progress, share)
        torch.set_num_threads(s.threads)
        if not s.tiled:
            notes += settle_exact(
                config=self.checkpoint.config,
                num_mtp_layers=weights.num_mtp_layers,
                max_context=s.max_context,
                device=torch.device(s.device.torch_name),
                threads=s.threads,
                ranks=self.size,
                whole_experts=self.config.expert_parallel,
            ).notes
        return weights, notes

    def bundle(self, weights: Weights, mesh: Mesh) -> Bundle:
        numerics = Numerics(self.settings.dtype, self.config.activations, self.config.qat == "on")
        return Bundle(self.checkpoint.config, weights, self.settings.ops, numerics, mesh)


def make_executor(
    bundle: Bundle, settings: Settings, config: EngineConfig, compiled: Compiled | None = None
) -> tuple[Model, Eager]:
    """The model and its cache on this rank's device, when all ranks have theirs.

    `compiled` is told of kernels on a GPU."""
    model, executor = _make_executor(bundle, settings, config, compiled)
    executor.threads = settings.threads
    bundle.mesh.comm.begin()
    return model, executor


def _make_executor(
    bundle: Bundle, settings: Settings, config: EngineConfig, compiled: Compiled | None
) -> tuple[Model, Eager]:
    s, device = settings, settings.device.torch_name
    layout = cache_layout(bundle.config, s, config, bundle.weights.num_mtp_layers)
    model = Model(bundle, s.max_context, device, copies_ahead=not config.no_overlap)
    cache = Cache(layout, device, s.dtype)
    if not s.tiled:
        return model, Eager(model, cache, device, drafts=s.drafts != 0)
    peers = None
    if bundle.mesh.size > 1 and (peers := find_peers(bundle, config)) is None:
        return model, Eager(model, cache, device)
    # These import Triton, which a machine without a GPU may lack.
    from dsv4.engine.graphs import Graphs
    from dsv4.engine.rounds import Rounds

    drafts = s.ahead_drafts(bundle.config)
    kind = Rounds if drafts else Graphs
    graphs = kind(
        b=bundle,
        model=model,
        cache=cache,
        max_batch=config.max_batch,
        chunk=s.chunk,
        use_graphs=not config.no_graph,
        overlap=not config.no_overlap,
        compiled=compiled,
        swap_share=config.swap_share,
        peers=peers,
        num_drafts=drafts,
        drafts_always=s.drafts is not None,
    )
    return model, graphs


def find_peers(bundle: Bundle, config: EngineConfig) -> Peers | None:
    """The other ranks' memory, for the kernels of decode steps; None: they are out of reach."""
    c, mesh = bundle.config, bundle.mesh
    rows, vocab = graph_rows(config.max_batch)[-1], c.vocab_size // mesh.size
    inbox = mesh.comm.inbox(inbox_places(rows, c.hidden_size, vocab))
    if inbox is None:
        return None
    return Peers(
        rank=mesh.rank,
        rows=rows,
        hidden=c.hidden_size,
        vocab=vocab,
        inbox=inbox.own,
        addresses=inbox.addresses,
        ended=inbox.ended,
        seconds=config.rank_seconds,
    )
