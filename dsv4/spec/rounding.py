"""Every point where DeepSeek-V4 rounds to fewer bits than its activations have.

| point | values | format | modes |
|---|---|---|---|
| `linear_input` | input of a linear whose weight has 8 or 4 bits, not of `wo_a` | FP8 per 128 channels | a8 |
| | | NVFP4 per 16 channels, one scale per row | a4 |
| `entry` | raw keys and compressed entries, without rotated channels | FP8 per 64 channels | a16, a8, a4 |
| `index` | index queries and keys, after a Hadamard transform | MXFP4 per 32 channels | a16, a8, a4 |

The model was trained with the last two, so a cache in these formats loses nothing. `off` has no rounding.
`quant/codec.py` defines the formats.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config import Activations
from dsv4.quant.codec import fp8_round, mxfp4_round, nvfp4_round
from dsv4.quant.formats import FP8_TILE, KV_BLOCK
from dsv4.spec.ops import hadamard


def linear_input(x: Tensor, activations: str) -> Tensor:
    """Round what a product with quantised weights reads: a16 not at all, a8 to FP8, a4 to NVFP4."""
    if activations == "a8":
        return fp8_round(x, FP8_TILE)
    return nvfp4_round(x) if activations == "a4" else x


@dataclass(frozen=True)
class Rounding:
    """`trained`: apply the roundings the model was trained with. `dtype`: what an operation's result has."""

    activations: Activations = "a16"
    trained: bool = True
    dtype: torch.dtype = torch.float32

    def entry(self, kv: Tensor, rope_dim: int) -> Tensor:
        """Round a raw key or compressed entry [..., d]; its rotated channels stay."""
        if not self.trained:
            return kv
        plain = kv.shape[-1] - rope_dim
        return torch.cat((fp8_round(kv[..., :plain], KV_BLOCK), kv[..., plain:]), -1)

    def index(self, x: Tensor) -> Tensor:
        return mxfp4_round(hadamard(x)) if self.trained else x


MODES = {"off": Rounding("a16", False), "a16": Rounding("a16"), "a8": Rounding("a8"), "a4": Rounding("a4")}
