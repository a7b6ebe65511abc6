"""RMSNorm: float32 inside, one rounding at the end."""

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., D] -> same shape and dtype; `weight` [D] float32, or None for a plain normalisation."""
    wide = x.float()
    normed = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return (normed if weight is None else weight * normed).to(x.dtype)
