"""What a layer is built from: its weights by official name, the chosen ops, and the numeric options."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.config import Activations, ModelConfig
from dsv4.kernels.common.places import Placement
from dsv4.kernels.common.tiles import Bank, Tiled
from dsv4.ops import Ops


@dataclass(frozen=True)
class Numerics:
    """How the model computes. `qat`: apply the rounding points the model was trained with."""

    dtype: torch.dtype
    activations: Activations
    qat: bool


@dataclass(frozen=True)
class Weights:
    """Loaded tensors by official name: Tensor, QuantTensor, or on a GPU Tiled and a Bank per layer's experts.

    `quantised` names the linears that were stored in 8 or 4 bits. `placement`: where routed experts lie, if
    not all of them are in GPU memory.
    """

    tensors: Mapping[str, Any]
    quantised: frozenset[str]
    num_mtp_layers: int
    placement: Placement | None = None


@dataclass(frozen=True)
class Bundle:
    config: ModelConfig
    weights: Weights
    ops: Ops
    numerics: Numerics

    def plain(self, name: str) -> Tensor:
        tensor = self.weights.tensors[name]
        assert isinstance(tensor, Tensor)
        return tensor

    def tiled(self, name: str) -> Tiled:
        held = self.weights.tensors[name]
        assert isinstance(held, Tiled)
        return held

    def bank(self, name: str) -> Bank | None:
        """The experts of that name in the GPU's form, None where they are held one by one."""
        held = self.weights.tensors.get(name)
        assert held is None or isinstance(held, Bank)
        return held

    def linear(self, name: str, rounds_input: bool = True) -> "Linear":
        """`rounds_input`: whether the reference rounds this linear's input when the weight is quantised."""
        held = self.weights.tensors[name]
        active = rounds_input and name in self.weights.quantised
        return Linear(self.ops, held, self.numerics.activations if active else "a16")

    def grouped(self, name: str, groups: int) -> Any:
        """The weight's rows in equal groups, each a weight of its own; in tiles, all of them in one."""
        held = self.weights.tensors[name]
        if isinstance(held, Tiled):
            return held
        if isinstance(held, Tensor):  # [K, G*N]
            return [part.contiguous() for part in held.chunk(groups, dim=1)]
        rows = torch.arange(held.shape[0], device=held.data.device)
        return [held.take(part) for part in rows.chunk(groups)]

    def activations_of(self, name: str) -> Activations:
        return self.numerics.activations if name in self.weights.quantised else "a16"


@dataclass(frozen=True)
class Linear:
    """A bias-free linear layer: x [T, K] -> [T, N]."""

    ops: Ops
    held: Any
    activations: str

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return self.ops.linear.linear(x, self.held, self.activations, out_dtype)
