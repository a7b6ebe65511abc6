"""Rotation tables of every position that an engine may use."""

import torch
from torch import Tensor

from dsv4.config import Yarn
from dsv4.spec.ops import rope_table


class Rope:
    """cos and sin of every position up to `max_positions`."""

    def __init__(
        self, theta: float, rope_dim: int, yarn: Yarn | None, max_positions: int, device: str | torch.device
    ) -> None:
        cos, sin = rope_table(torch.arange(max_positions), theta, rope_dim, yarn)
        self.cos, self.sin = cos.to(device), sin.to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[T] -> cos, sin [T, rope_dim / 2]."""
        return self.cos[positions], self.sin[positions]
