"""Prompts: queries and raw keys in Triton, norm and rotation in one launch, the KV8 form in another."""

from torch import Tensor

from dsv4.kernels.prefill import rows as row_kernels
from dsv4.kernels.prefill.place import place
from dsv4.ops.qkv import ref
from dsv4.quant.formats import Format, QuantTensor


def queries(q: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return row_kernels.norm_rotate(q, None, cos, sin, eps)


def entries(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return row_kernels.norm_rotate(x, weight, cos, sin, eps)


def store(kv: Tensor, rope_dim: int, format: Format, qat: bool) -> QuantTensor:
    """Other formats than KV8 are for comparisons: the reference's elementwise steps serve them."""
    return row_kernels.kv8(kv, rope_dim) if format is Format.KV8 else ref.store(kv, rope_dim, format, qat)


def put(store: QuantTensor, rows: Tensor, values: QuantTensor, tokens: Tensor | None = None) -> None:
    """A row of -1 is none: a graph's lists are padded."""
    assert store.format is values.format and store.shape[1] == values.shape[1]
    place(store.data, values.data, store.scale, values.scale, rows, tokens)
