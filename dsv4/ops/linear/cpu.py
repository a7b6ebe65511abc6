"""y = x Wᵀ for a weight in any format. The contract of every linear backend."""

import torch
from torch import Tensor

from dsv4.ops._exact import cast
from dsv4.ops._product import column_product, split_product
from dsv4.quant.codec import decode
from dsv4.quant.formats import Format, QuantTensor
from dsv4.spec.rounding import linear_input

round_input = linear_input  # each backend has one
# What this backend multiplies with: float32 [K, N] (decoded once), or the stored tensor, decoded at each use.
Held = Tensor | QuantTensor


def dense(weight: Held) -> Tensor:
    """The float32 matrix [K, N], contiguous: K-major is twice as fast here and fixes the memory layout."""
    return weight if isinstance(weight, Tensor) else decode(weight).t().contiguous()


def linear(
    x: Tensor,
    weight: Held,
    activations: str = "a16",
    out_dtype: torch.dtype | None = None,
    parts: int = 1,
) -> Tensor:
    """x [T, K] -> [T, N]; float32 accumulation, one rounding to `out_dtype` (default: x's dtype).

    The bits are those of `parts` products with equal runs of the weight's rows, however ranks share these.
    """
    y = column_product(round_input(x, activations).float(), dense(weight), parts)
    return cast(y, out_dtype or x.dtype)


def partial(x: Tensor, weight: Held, activations: str, parts: int, is_alone: bool) -> Tensor:
    """x [T, K] -> float32 [T, parts, N]: products with equal runs of K, for the caller to add up.

    A backend may give fewer parts: then its sums have another order. One that gives a single part, to which
    no other rank adds (`is_alone`), may round it to x's type.
    """
    return split_product(round_input(x, activations).float(), dense(weight), parts)


def grouped(x: Tensor, weights: list[Held]) -> Tensor:
    """x [T, ...] in equal groups of K, each with a weight [N, K] -> [T, G*N]; inputs are never quantised."""
    groups = x.flatten(1).chunk(len(weights), dim=1)
    return torch.cat(
        [linear(g.contiguous(), weight) for g, weight in zip(groups, weights, strict=True)], dim=1
    )


def embed(ids: Tensor, table: QuantTensor, dtype: torch.dtype) -> Tensor:
    """Rows of the embedding table, [T] -> [T, D]."""
    assert table.format in (Format.BF16, Format.F32)
    return table.data[ids].to(dtype)
