"""Queries and raw keys made ready: norm, rotation, and the rounding the model was trained with."""

import torch
from torch import Tensor

from dsv4.ops._exact import rotate
from dsv4.ops.norm.ref import rms_norm
from dsv4.quant.codec import encode_kv, fp8_round
from dsv4.quant.formats import KV_BLOCK, Format, QuantTensor


def queries(q: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """q [T, H, D] -> per-head norm without weight (float32, one rounding), rotated."""
    return rotate(rms_norm(q, None, eps), cos, sin)


def entries(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """x [T, D] -> key/value vectors: norm and rotation."""
    return rotate(rms_norm(x, weight, eps), cos, sin)


def store(kv: Tensor, rope_dim: int, format: Format, qat: bool) -> QuantTensor:
    """The rows as the cache keeps them; attention reads these, also for tokens of the same step.

    qat rounds the unrotated channels to FP8 in blocks of 64. The KV8 format is that rounding.
    """
    if qat and format is not Format.KV8:
        nope = kv.shape[1] - rope_dim
        kv = torch.cat((fp8_round(kv[:, :nope], KV_BLOCK), kv[:, nope:]), dim=1)
    return encode_kv(kv, rope_dim, format)


def put(store: QuantTensor, rows: Tensor, values: QuantTensor, tokens: Tensor | None = None) -> None:
    """store[rows] = values[tokens], all of them where tokens is None; in place."""
    store.put(rows, values if tokens is None else values.take(tokens))
