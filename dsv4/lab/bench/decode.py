"""Decoding timed step by step: one graph replay per token, on a cache filled with plausible values."""

import gc
from dataclasses import dataclass
from typing import Any

import torch

from dsv4.cache.layout import CacheLayout
from dsv4.cache.store import Cache
from dsv4.config import ModelConfig
from dsv4.engine.memory import GPU_CHUNK
from dsv4.engine.spill import Split
from dsv4.errors import ConfigError, DeviceError
from dsv4.lab.bench.ceiling import timed
from dsv4.lab.bench.subject import DTYPE, Reads, Subject, cache_layout, check_fits, other_bytes
from dsv4.model.bundle import Bundle
from dsv4.model.model import Model
from dsv4.ops.exchange.decode import Peers
from dsv4.ops.sample.cpu import pack
from dsv4.quant.formats import Format, QuantTensor
from dsv4.step.buffers import ROWS, graph_rows
from dsv4.step.run import Decoder

WARM, COUNTED, PROFILED = 8, 32, 5
ROUTE = "route"  # the launch that writes which experts were chosen
_PAGE = 256  # tokens; a cache is made for a multiple, as an engine's is


@dataclass(frozen=True)
class Wanted:
    """`steps` timed tokens of `batch` sequences, each with `context` tokens before. `max_context`: tokens the
    cache is made for, which sizes some grids; None: as many as are needed."""

    context: int = 4096
    batch: int = 1
    steps: int = 128
    max_context: int | None = None

    def __post_init__(self) -> None:
        for name in ("context", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1")
        if not 1 <= self.batch <= ROWS[-1]:
            raise ConfigError(f"batch is {self.batch}, expected 1 to {ROWS[-1]}")

    @property
    def rows(self) -> int:
        """Of the graph: the batch padded to a size that graphs are made for."""
        return next(rows for rows in ROWS if rows >= self.batch)

    @property
    def span(self) -> int:
        """Tokens decoded in all: timed, before and after."""
        return WARM + self.steps + COUNTED + PROFILED

    def start(self, config: ModelConfig) -> int:
        """The first token's position: `context`, or less if the last token's would be beyond the model's."""
        if self.context > config.max_positions:
            raise ConfigError(f"context {self.context} exceeds the model's {config.max_positions} positions")
        start = min(self.context, config.max_positions - self.span)
        if start < 0:
            raise ConfigError(
                f"{self.steps} steps need {self.span} positions and the model has {config.max_positions}"
            )
        return start

    def layout(self, config: ModelConfig) -> CacheLayout:
        need = self.start(config) + self.span
        capacity = min(config.max_positions, -(-need // _PAGE) * _PAGE)
        if self.max_context is not None:
            if not need <= self.max_context <= config.max_positions:
                raise ConfigError(
                    f"max_context is {self.max_context}, expected {need} (context and steps) to "
                    f"{config.max_positions} (positions of the model)"
                )
            capacity = self.max_context
        return cache_layout(config, capacity, self.batch)


def fill(cache: Cache, seed: int = 0) -> None:
    """Random entries of ordinary size in every row, and pages in no order, as after hours of serving."""
    generator = torch.Generator(cache.page_table.device).manual_seed(seed)
    for layer in cache.layers:
        for store in (layer.ring, layer.entries, layer.keys):
            if store is not None:
                fill_rows(store, generator)
        for tail in layer.tails:
            tail.values.normal_(generator=generator)
            tail.scores.normal_(generator=generator)
    pages = torch.randperm(cache.layout.num_pages, generator=generator, device=cache.page_table.device)
    cache.page_table.copy_(pages.view(cache.page_table.shape))


def fill_rows(store: QuantTensor, generator: torch.Generator) -> None:
    """Random rows: entries below 2 times 1, index keys of a few units."""
    assert store.scale is not None
    store.data.random_(0, 256, generator=generator)
    if store.format is Format.KV8:
        nope = store.shape[1] - store.rope_dim
        store.data[:, :nope].bitwise_and_(0b10111111)  # E4M3 below 2, so never NaN
        store.data[:, nope:].view(DTYPE).normal_(generator=generator)
        store.scale.fill_(127)
    else:
        store.scale.random_(124, 128, generator=generator)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of each timed step; distinct experts per layer and the mean position they were read at."""

    milliseconds: tuple[float, ...]
    distinct: tuple[float, ...]
    position: int
    kernels: int
    spilled: tuple[float, ...] = ()  # of the distinct ones, those in host memory
    hit_rate: float = 1.0  # of all choices, those whose expert is in GPU memory
    beside: tuple[float, ...] = ()  # of the distinct ones, those in GPU memory beside some that are not

    @property
    def median(self) -> float:
        return sorted(self.milliseconds)[len(self.milliseconds) // 2]

    @property
    def p99(self) -> float:
        return sorted(self.milliseconds)[-(-99 * len(self.milliseconds) // 100) - 1]


def release() -> None:
    """Give back the memory of sessions and engines that are done with. A decoder's launches refer to it, and
    it to them, so it goes only when garbage is collected."""
    gc.collect()
    torch.cuda.empty_cache()


class Session:
    """A decoder with a filled cache, ready to be timed. Everything is compiled and recorded here.

    `peers`: the other ranks of a bundle that is one of several; without, its all-reduces are left out.
    """

    def __init__(
        self, bundle: Bundle, wanted: Wanted, device: torch.device, peers: Peers | None = None
    ) -> None:
        self.wanted, self.config = wanted, bundle.config
        self.placement = bundle.weights.placement
        layout = wanted.layout(bundle.config)
        self.cache = Cache(layout, device, DTYPE)
        fill(self.cache)
        self.model = Model(bundle, layout.max_context, device)
        self.peers, sums = peers, peers is not None or bundle.mesh.size == 1
        self.decoder = Decoder(bundle, self.model, self.cache, wanted.rows, peers=peers, sums=sums)
        self.decoder.run()  # all rows unused: compiles, touches nothing
        torch.cuda.synchronize()
        self.decoder.capture()
        self.place()

    def place(self) -> None:
        """Every sequence in its slot, at the same position, with some token."""
        f, batch = self.decoder.buffers, self.wanted.batch
        generator = torch.Generator().manual_seed(1)
        f.ids.copy_(torch.randint(0, self.config.vocab_size, f.ids.shape, generator=generator))
        f.settings.copy_(torch.tensor([pack()] * f.rows))
        f.positions.fill_(-1)
        f.positions[:batch] = self.wanted.start(self.config)
        f.slots.zero_()
        f.slots[:batch] = torch.arange(batch, device=f.slots.device)

    def time(self) -> Timing:
        """Warm up, time, then look at what the following steps choose."""
        steps = self.wanted.steps
        times = self.times(steps)
        distinct, spilled, beside, hit_rate = self._choices()
        if self.peers is not None and int(self.peers.ended):
            raise DeviceError("a push did not arrive, so the step is wrong and its time means nothing")
        if not bool(torch.isfinite(self.decoder.buffers.logits[: self.wanted.batch]).all()):
            raise DeviceError(
                "the logits hold NaN or infinity, so the step is wrong and its time means nothing"
            )
        position = self.wanted.start(self.config) + WARM + steps // 2
        kernels = len(self.decoder.launches)
        return Timing(
            milliseconds=times,
            distinct=distinct,
            position=position,
            kernels=kernels,
            spilled=spilled,
            hit_rate=hit_rate,
            beside=beside,
        )

    def times(self, steps: int) -> tuple[float, ...]:
        for _ in range(WARM):
            self.decoder.step()
        torch.cuda.synchronize()
        return tuple(timed(self.decoder.step, steps, warm=0))

    def _choices(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], float]:
        """Distinct experts per layer, those of them in host memory, those beside such, and the hit rate:
        means over some steps, which run launch by launch."""
        f, batch = self.decoder.buffers, self.wanted.batch
        distinct, spilled, beside, hits, total = [], [], [], 0, 0
        for _ in range(COUNTED):
            of_step = []
            for launch in self.decoder.launches:
                launch.run()
                if launch.name == ROUTE:
                    of_step.append(f.chosen[:batch].flatten().tolist())
            assert len(of_step) == self.config.num_layers, f"{len(of_step)} launches named {ROUTE}"
            distinct.append([len(set(chosen)) for chosen in of_step])
            spilled.append([len({e for e in c if self._is_spilled(i, e)}) for i, c in enumerate(of_step)])
            beside.append([d - s if s else 0 for d, s in zip(distinct[-1], spilled[-1], strict=True)])
            total += sum(map(len, of_step))
            hits += sum(not self._is_spilled(i, e) for i, c in enumerate(of_step) for e in c)
        means = [
            tuple(sum(layer) / COUNTED for layer in zip(*counts, strict=True))
            for counts in (distinct, spilled, beside)
        ]
        return means[0], means[1], means[2], hits / total

    def _is_spilled(self, layer: int, expert: int) -> bool:
        placement = self.placement
        return placement is not None and not placement.slots.is_resident(placement.slot_of[layer][expert])


def figures(
    timing: Timing, wanted: Wanted, layout: CacheLayout, reads: Reads, ceiling: float
) -> dict[str, Any]:
    """Everything that follows from the times: speed, bytes that had to be read, share of the ceiling."""
    weights = reads.step(list(timing.distinct))
    cache = wanted.batch * layout.read_bytes(timing.position)
    rate = (weights + cache) / timing.median * 1e3
    return {
        **{"context": wanted.context, "batch": wanted.batch, "steps": wanted.steps},
        **{"max_context": layout.max_context, "first_position": timing.position - WARM - wanted.steps // 2},
        **{"ms_per_token": round(timing.median, 4), "ms_per_token_p99": round(timing.p99, 4)},
        "tokens_per_second": round(wanted.batch * 1e3 / timing.median, 2),
        **{"read_bytes": round(weights + cache), "weight_bytes": round(weights), "cache_bytes": cache},
        "distinct_experts": round(sum(timing.distinct) / len(timing.distinct), 2),
        "gb_per_second": round(rate / 1e9, 1),
        "ceiling_gb_per_second": round(ceiling / 1e9, 1),
        "share": round(rate / ceiling, 4),
        "kernels_per_step": timing.kernels,
    }


def divide(subject: Subject, wanted: Wanted, spill: str, free: int) -> Split | None:
    """Experts between GPU and host memory as an engine divides them, which comes after the bare steps."""
    layout, rows = wanted.layout(subject.config), graph_rows(wanted.batch)
    split = subject.split(spill, other_bytes(layout, rows, GPU_CHUNK), free)
    if split is None:
        check_fits(subject, other_bytes(layout, (wanted.rows,)), free)
        return None
    return subject.split(spill, other_bytes(layout, rows, GPU_CHUNK, spills=True), free)


def spill_figures(timing: Timing, reads: Reads, split: Split) -> dict[str, Any]:
    """What lies in host memory, and what a step reads of it."""
    pcie = sum(n * each for n, each in zip(timing.spilled, reads.per_expert, strict=True))
    return {
        **{"spilled_experts": split.num_spilled, "host_bytes": split.host_bytes},
        **{"resident_share": round(split.share, 4), "hit_rate": round(timing.hit_rate, 5)},
        "pcie_bytes_per_step": round(pcie),
    }
