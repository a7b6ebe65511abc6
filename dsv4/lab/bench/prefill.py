"""Prompts through the ops' GPU backends, chunk by chunk, as the engine runs them: tokens and arithmetic."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dsv4.cache.layout import CacheLayout
from dsv4.cache.store import Cache
from dsv4.config import ModelConfig
from dsv4.engine.spill import Split
from dsv4.errors import ConfigError, DeviceError
from dsv4.lab.bench.decode import fill
from dsv4.lab.bench.subject import DTYPE, cache_layout, other_bytes
from dsv4.model.bundle import Bundle
from dsv4.model.model import Model
from dsv4.model.params import each_kind
from dsv4.model.step import Step


@dataclass(frozen=True)
class Wanted:
    """A prompt of `tokens` after `context` others, in chunks; `rounds` times over."""

    tokens: int = 8192
    chunk: int = 8192
    context: int = 0
    rounds: int = 3

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("chunk", 1), ("context", 0), ("rounds", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least {least}")

    def layout(self, config: ModelConfig) -> CacheLayout:
        total = self.context + self.tokens
        if total > config.max_positions:
            raise ConfigError(
                f"context {self.context} and {self.tokens} tokens exceed the model's "
                f"{config.max_positions} positions"
            )
        return cache_layout(config, min(config.max_positions, -(-total // 256) * 256), 1)

    def other_bytes(self, config: ModelConfig) -> int:
        """Beside the weights."""
        return other_bytes(self.layout(config), chunk=min(self.chunk, self.tokens))


def flops(config: ModelConfig, start: int, tokens: int) -> float:
    """Multiplications and additions of a prompt's products: weights, scores and values; logits of one row."""
    c = config
    weights = 0.0
    for param, count in each_kind(c, 0):
        values = math.prod(param.shape) * count
        if param.name == "head":
            weights += values / tokens
        elif param.expert is not None:
            weights += values * c.experts_per_token / c.num_experts
        elif param.name.endswith("_fn") or (param.kind in ("linear", "grouped") and param.name != "embed"):
            weights += values
    keys = scored = 0.0
    specs = Counter((layer.kind, layer.ratio) for layer in c.layers)
    for position in range(start, start + tokens):
        for (kind, ratio), layers in specs.items():
            seen = (position + 1) // ratio if ratio else 0
            keys += layers * min(c.window, position + 1)
            keys += layers * (min(seen, c.index_topk) if kind == "csa" else seen)
            if kind == "csa" and (start + tokens) // ratio > c.index_topk:
                scored += layers * seen
    attention = 2 * keys * c.num_heads * c.head_dim + scored * c.index_heads * c.index_dim
    return 2 * (weights * tokens + attention)


def reader(bundle: Bundle, wanted: Wanted, device: torch.device) -> Callable[[], list[float]]:
    """-> a function that reads the prompt and gives the seconds of each round, by the host's clock, since
    chunks may wait for the GPU."""
    layout = wanted.layout(bundle.config)
    cache = Cache(layout, device, DTYPE)
    fill(cache)
    model = Model(bundle, layout.max_context, device)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, bundle.config.vocab_size, (wanted.tokens,), generator=generator).tolist()

    def timed() -> list[float]:
        times = []
        for _ in range(1 + wanted.rounds):  # the first compiles
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for at in range(0, wanted.tokens, wanted.chunk):
                span = (0, wanted.context + at, ids[at : at + wanted.chunk])
                streams = model.forward(Step.build([span], device), cache)
            logits = model.logits(streams[-1:])
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        if not bool(torch.isfinite(logits).all()):
            raise DeviceError(
                "the logits hold NaN or infinity, so prefill is wrong and its time means nothing"
            )
        return times[1:]

    return timed


def figures(times: list[float], wanted: Wanted, config: ModelConfig, matmul: float) -> dict[str, Any]:
    median = statistics.median(times)
    rate = flops(config, wanted.context, wanted.tokens) / median
    return {
        **{"tokens": wanted.tokens, "chunk": wanted.chunk, "context": wanted.context},
        **{"rounds": wanted.rounds, "ms": round(1e3 * median, 2), "ms_slowest": round(1e3 * max(times), 2)},
        "tokens_per_second": round(wanted.tokens / median, 1),
        "tflops": round(rate / 1e12, 2),
        "matmul_tflops": round(matmul / 1e12, 1),
        # Not named `share`: that is of the read ceiling, and dsv4 plan looks for it.
        "matmul_share": round(rate / matmul, 4),
    }


def spill_figures(split: Split, seconds: float, chunks: int) -> dict[str, Any]:
    """Each chunk copies all spilled experts to GPU memory while it computes."""
    copied = chunks * split.num_spilled * split.form.num_bytes
    return {
        **{"spilled_experts": split.num_spilled, "host_bytes": split.host_bytes},
        **{"resident_share": round(split.share, 4), "staged_slots": split.num_staged},
        **{"pcie_bytes": copied, "pcie_gb_per_second": round(copied / seconds / 1e9, 1)},
    }
