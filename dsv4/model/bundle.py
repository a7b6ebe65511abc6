"""What a layer is built from: its weights by official name, the chosen ops, and the numeric options."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4.config import Activations, ModelConfig
from dsv4.gpu.tiles import Bank, Tiled
from dsv4.model.params import num_parts
from dsv4.ops import Ops
from dsv4.ops._exact import cast
from dsv4.ops.activation import Form, Norm, Rows
from dsv4.ops.experts.placement import Placement
from dsv4.parallel.mesh import Mesh
from dsv4.quant.formats import QuantTensor

Held = Tensor | QuantTensor | Tiled  # a weight: decoded, as stored, or in a GPU's tiles
Grouped = Tiled | list[Tensor] | list[QuantTensor]  # one weight for each group, or all in one


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
    not all of them are in GPU memory; `drafts`: where those of draft blocks do. `checksum`: the model under
    which choices of experts are kept.
    """

    tensors: Mapping[str, Held | Bank]
    quantised: frozenset[str]
    num_mtp_layers: int
    placement: Placement | None = None
    checksum: str | None = None
    drafts: Placement | None = None


@dataclass(frozen=True)
class Bundle:
    """`weights` are this rank's shares; `config` is the whole model's."""

    config: ModelConfig
    weights: Weights
    ops: Ops
    numerics: Numerics
    mesh: Mesh = field(default_factory=Mesh)

    @property
    def num_parts(self) -> int:
        """Of the sums that ranks share, this rank's; a GPU gives its own as one."""
        parts: int = self.ops.linear.parts_of(num_parts(self.config) // self.mesh.size)
        return parts

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of such sums: float32 as long as something is to be added."""
        is_whole = self.num_parts == self.mesh.size == 1
        return self.numerics.dtype if is_whole else torch.float32

    def held(self, name: str) -> Held:
        held = self.weights.tensors[name]
        assert not isinstance(held, Bank)
        return held

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

    def linear(self, name: str, rounds_input: bool = True, parts: int = 1) -> "Linear":
        """`rounds_input`: whether the reference rounds this linear's input when the weight is quantised.

        `parts`: `num_parts` of a weight whose rows ranks share.
        """
        activations = self.activations_of(name) if rounds_input else "a16"
        return Linear(self.ops, self.held(name), activations, parts)

    def norm(self, name: str, forms: Iterable[Form]) -> Norm:
        """`forms`: in which the products that come next read its output, in their order."""
        return Norm(self.plain(name), self.config.norm_eps, tuple(dict.fromkeys(forms)))

    def forms(self, readers: "Iterable[Linear]") -> list[Form]:
        dtype = self.numerics.dtype
        return [self.ops.linear.form(dtype, reader.held, reader.activations) for reader in readers]

    def summed(self, name: str) -> "Summed":
        """A linear whose columns ranks share."""
        held, activations = self.held(name), self.activations_of(name)
        return Summed(self.ops, held, activations, self.num_parts, self.mesh, self.sum_dtype)

    def grouped(self, name: str, groups: int) -> Grouped:
        """The weight's rows in equal groups, each a weight of its own; in tiles, all of them in one."""
        held = self.held(name)
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
    """A bias-free linear layer: x [T, K] -> [T, N], of these N a rank's share."""

    ops: Ops
    held: Held
    activations: str
    parts: int = 1

    def __call__(self, x: Rows, out_dtype: torch.dtype | None = None) -> Tensor:
        return self.ops.linear.linear(x, self.held, self.activations, out_dtype, self.parts)


@dataclass(frozen=True)
class Summed:
    """A linear layer of whose input each rank has a share: x [T, K / ranks] -> [T, N] on all of them."""

    ops: Ops
    held: Held
    activations: str
    parts: int
    mesh: Mesh
    sum_dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        y = self.ops.linear.partial(x, self.held, self.activations, self.parts, self.sum_dtype)
        return cast(self.mesh.comm.sum_parts(y), x.dtype)
