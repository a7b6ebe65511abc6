"""Queries and raw keys in Triton: norm and rotation in one launch, the KV8 form in another."""

from torch import Tensor

from dsv4.kernels.prefill import rows
from dsv4.ops.qkv import ref
from dsv4.quant.formats import Format, QuantTensor


def queries(q: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return rows.norm_rotate(q, None, cos, sin, eps)


def entries(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return rows.norm_rotate(x, weight, cos, sin, eps)


def store(kv: Tensor, rope_dim: int, format: Format, qat: bool) -> QuantTensor:
    """Other formats than KV8 are for comparisons: the reference's elementwise steps serve them."""
    return rows.kv8(kv, rope_dim) if format is Format.KV8 else ref.store(kv, rope_dim, format, qat)
