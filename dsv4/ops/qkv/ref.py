"""Queries and raw keys made ready: norm, rotation, and the rounding the model was trained with."""

from torch import Tensor

from dsv4.ops._exact import rotate
from dsv4.ops.norm.ref import rms_norm
from dsv4.quant.codec import encode_kv, fp8_round
from dsv4.quant.formats import KV_BLOCK, Format, QuantTensor


def queries(q: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """q [T, H, D] -> per-head norm without weight (float32, one rounding), rotated."""
    return rotate(rms_norm(q, None, eps), cos, sin)


def entries(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, qat: bool) -> Tensor:
    """x [T, D] -> key/value vectors: norm, rotation, FP8 rounding of the unrotated channels (qat)."""
    kv = rotate(rms_norm(x, weight, eps), cos, sin)
    if qat:
        nope = kv.shape[1] - 2 * cos.shape[-1]
        kv[:, :nope] = fp8_round(kv[:, :nope], KV_BLOCK)
    return kv


def store(kv: Tensor, rope_dim: int, format: Format) -> QuantTensor:
    """The rows as the cache keeps them: attention reads these, also for tokens of the same step."""
    return encode_kv(kv, rope_dim, format)
