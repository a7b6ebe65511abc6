"""y = x Wᵀ for a weight in any format. The contract of every linear backend."""

import torch
from torch import Tensor

from dsv4.ops._exact import cast
from dsv4.ops._product import column_product, split_product
from dsv4.ops.activation import PLAIN, Form, Rows, activation
from dsv4.ops.linear.prefill_packed import Packed
from dsv4.quant.codec import decode
from dsv4.quant.formats import Format, QuantTensor
from dsv4.spec.rounding import linear_input

round_input = linear_input  # each backend has one
# What this backend multiplies with: float32 [K, N] (decoded once), or the stored tensor, decoded at each use.
Held = Tensor | QuantTensor


def dense(weight: Held) -> Tensor:
    """The float32 matrix [K, N], contiguous: K-major is twice as fast here and fixes the memory layout."""
    return weight if isinstance(weight, Tensor) else decode(weight).t().contiguous()


def form(dtype: torch.dtype, weight: object, activations: str) -> Form:
    """How products with this weight read rows of `dtype`."""
    return PLAIN


def parts_of(parts: int) -> int:
    """Parts in which this backend gives sums that are made of `parts` equal runs: as many, or one."""
    return parts


def linear(
    x: Rows,
    weight: Held,
    activations: str = "a16",
    out_dtype: torch.dtype | None = None,
    parts: int = 1,
) -> Tensor:
    """x [T, K] -> [T, N]; float32 accumulation, one rounding to `out_dtype` (default: x's dtype).

    The bits are those of `parts` products with equal runs of the weight's rows, however ranks share these.
    """
    x = activation(x).plain
    y = column_product(round_input(x, activations).float(), dense(weight), parts)
    return cast(y, out_dtype or x.dtype)


def partial(x: Rows, weight: Held, activations: str, parts: int, out_dtype: torch.dtype) -> Tensor:
    """x [T, K] -> [T, parts, N]: products with equal runs of K, for the caller to add up. `parts`: see
    `parts_of`."""
    x = activation(x).plain
    return cast(split_product(round_input(x, activations).float(), dense(weight), parts), out_dtype)


def grouped(x: Tensor | Packed, weights: list[Held]) -> Tensor:
    """x [T, ...] in equal groups of K, each with a weight [N, K] -> [T, G*N]; inputs are never quantised."""
    assert isinstance(x, Tensor), "rows are packed for the weights of a GPU"
    groups = x.flatten(1).chunk(len(weights), dim=1)
    return torch.cat(
        [linear(g.contiguous(), weight) for g, weight in zip(groups, weights, strict=True)], dim=1
    )


def embed(ids: Tensor, table: QuantTensor, dtype: torch.dtype) -> Tensor:
    """Rows of the embedding table, [T] -> [T, D]."""
    assert table.format in (Format.BF16, Format.F32)
    return table.data[ids].to(dtype)
