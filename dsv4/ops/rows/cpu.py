"""RMSNorm: float32 inside, one rounding at the end."""

from torch import Tensor

from dsv4.ops._exact import cast, mean_square
from dsv4.ops.activation import Activation, Norm, activation


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., D] -> same shape and dtype; `weight` [D] float32, or None for a plain normalisation."""
    wide = x.float()
    normed = wide / mean_square(wide, eps).sqrt()
    return cast(normed if weight is None else weight * normed, x.dtype)


def normed(x: Tensor, norm: Norm) -> Activation:
    """RMSNorm of x [T, K], in the forms that `norm` names or as plain rows."""
    return activation(rms_norm(x, norm.weight, norm.eps))
