"""A synthetic router whose choices follow a law: all experts alike, Zipf's, or recorded traffic's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.engine.frequency import read_counts
from dsv4.errors import ConfigError

# No expert is chosen by more tokens than this: a bias that made it certain would leave the others no law.
MOST = 0.98


def shares(law: str, config: ModelConfig, seed: int = 0) -> Tensor:
    """[layers, experts] how likely a token is to choose each, `experts_per_token` in all. `law`: uniform,
    zipf:S (the r-th expert of a layer r^-S as often as the first), or a file of counts."""
    layers, experts, k = config.num_layers, config.num_experts, config.experts_per_token
    if law == "uniform":
        return torch.full((layers, experts), k / experts)
    if law.startswith("zipf:"):
        try:
            exponent = float(law[5:])
        except ValueError:
            exponent = -1.0
        if not 0 <= exponent <= 10:
            raise ConfigError(f"routing {law!r}: expected zipf:S with S from 0 to 10, as in zipf:1.1")
        frequency = torch.arange(1, experts + 1, dtype=torch.float64) ** -exponent
        chance = torch.Generator().manual_seed(seed)
        weights = torch.stack([frequency[torch.randperm(experts, generator=chance)] for _ in range(layers)])
    else:
        counts = read_counts(Path(law))
        weights = torch.tensor(counts, dtype=torch.float64)
        if weights.shape != (layers, experts):
            found = f"{weights.shape[0]} layers of {weights.shape[1]} experts"
            raise ConfigError(f"{law} counts {found}, the model has {layers} of {experts}; use its own file")
    return torch.stack([_capped(row, k) for row in weights]).float()


def _capped(weights: Tensor, total: int) -> Tensor:
    """In proportion to `weights`, `total` in all, none above MOST, none zero."""
    weights = weights.clamp(min=float(weights.max()) * 1e-6)
    fixed = torch.zeros_like(weights, dtype=torch.bool)
    while True:
        left = total - MOST * int(fixed.sum())
        share = torch.where(fixed, MOST, weights * left / weights[~fixed].sum())
        above = (share > MOST) & ~fixed
        if not bool(above.any()):
            return share
        fixed |= above


def biases(share: Tensor) -> Tensor:
    """[E] -> what to add to sqrt(softplus(logit)), with logits of a standard normal law, so that the largest
    are those of that share: the threshold that a score exceeds that often is the same for all."""
    quantile = torch.special.ndtri((1 - share.double()).clamp(1e-9, 1 - 1e-9))
    return -torch.nn.functional.softplus(quantile).sqrt().float()


def apply(tensors: Mapping[str, Any], share: Tensor, config: ModelConfig, seed: int = 0) -> None:
    """Let the routers of these weights follow that law: biases, and tables by token id."""
    for layer, spec in enumerate(config.layers):
        name = f"layers.{layer}.ffn.gate"
        if spec.hash_routed:
            table = tensors[f"{name}.tid2eid"]
            chance = torch.Generator(table.device).manual_seed(seed + layer)
            rows = share[layer].to(table.device).expand(table.shape[0], -1)
            table.copy_(rows.multinomial(table.shape[1], generator=chance))
        else:
            bias = tensors[f"{name}.bias"]
            bias.copy_(biases(share[layer]).to(bias.device))
