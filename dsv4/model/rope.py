"""Rotation tables: plain for sliding layers, YaRN for compressed ones. Angles are float32 products."""

import math

import torch
from torch import Tensor

from dsv4.config import Yarn


def frequencies(theta: float, rope_dim: int, yarn: Yarn | None) -> Tensor:
    """[rope_dim / 2] float32."""
    exponent = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    freqs = 1.0 / (theta**exponent)
    if yarn is None:
        return freqs

    def turns(beta: float) -> float:
        return rope_dim * math.log(yarn.original_positions / (2 * math.pi * beta)) / (2 * math.log(theta))

    low = max(math.floor(turns(yarn.beta_fast)), 0)
    high = min(math.ceil(turns(yarn.beta_slow)), rope_dim - 1)
    ramp = torch.arange(rope_dim // 2, dtype=torch.float32) - low
    ramp = (ramp / max(high - low, 0.001)).clamp(0, 1)
    return freqs / yarn.factor * ramp + freqs * (1 - ramp)


class Rope:
    """cos and sin of every position up to `max_positions`."""

    def __init__(
        self, theta: float, rope_dim: int, yarn: Yarn | None, max_positions: int, device: str | torch.device
    ) -> None:
        positions = torch.arange(max_positions, dtype=torch.float32)
        # The reference rounds the angle to float32; cos and sin of that angle are then taken accurately.
        angles = torch.outer(positions, frequencies(theta, rope_dim, yarn)).double()
        self.cos = angles.cos().float().to(device)
        self.sin = angles.sin().float().to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[T] -> cos, sin [T, rope_dim / 2]."""
        return self.cos[positions], self.sin[positions]
