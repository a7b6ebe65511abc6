"""Products for prompts, where a weight meets many rows.

BF16 on Hopper: weights are decoded in registers (product.cuh); a8 runs on FP8 tensor cores. Else, float32
among it, they are unpacked into scratch and multiplied by Triton.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.kernels.common import quantize
from dsv4.kernels.common.tiles import Tiled, tile
from dsv4.kernels.decode.matvec import splits
from dsv4.kernels.prefill import dense
from dsv4.kernels.prefill import product as prompts
from dsv4.kernels.prefill.dense import Weight
from dsv4.kernels.prefill.gemm import gemm
from dsv4.ops.linear.ref import Held, embed
from dsv4.quant.formats import QuantTensor

__all__ = ["embed", "grouped", "hold", "linear", "partial", "prepare", "round_input"]


@dataclass(frozen=True)
class Prepared:
    """x [T, K], and packed for the products that have met it."""

    x: Tensor
    packed: dict[tuple[str, prompts.Mode], prompts.Packed]  # by activations and mode

    def pack(self, weight: Tiled, activations: str) -> prompts.Packed:
        key = (activations, prompts.mode_of(weight, activations))
        if key not in self.packed:
            self.packed[key] = prompts.pack(self.x.contiguous().unsqueeze(1), weight, activations)
        return self.packed[key]


def prepare(x: Tensor) -> Any:
    return Prepared(x, {})


def hold(weight: QuantTensor, device: str) -> Tiled:
    """For `dsv4 doctor`: a weight, which is on the device already, as a model holds it there."""
    return tile(weight)


def round_input(x: Tensor, activations: str) -> Tensor:
    if activations == "a16":
        return x
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    quantize.round_values(flat, out, activations, overlap=False)
    return out.view(x.shape)


def linear(
    x: Tensor,
    weight: Held,
    activations: str = "a16",
    out_dtype: torch.dtype | None = None,
    parts: int = 1,
) -> Tensor:
    """On this backend a weight held as values is [N, K]. A row of it has the same bits in any weight."""
    return _linear(x, weight, activations, out_dtype, sums=1)


def partial(x: Tensor, weight: Held, activations: str, parts: int, is_alone: bool) -> Tensor:
    """One part. In 16 bits it adds up what the decode step's split-K has as separate sums."""
    dtype = x.dtype if is_alone else torch.float32
    return _linear(x, weight, activations, dtype, sums=splits(weight.shape[1])).unsqueeze(1)


def _linear(
    x: Tensor | Prepared, weight: Weight, activations: str, out_dtype: torch.dtype | None, sums: int
) -> Tensor:
    ready = x if isinstance(x, Prepared) else Prepared(x, {})
    x = ready.x
    y = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype or x.dtype, device=x.device)
    if y.numel() and prompts.serves(x, weight):
        prompts.product(ready.pack(weight, activations), weight, y.unsqueeze(1), sums)
    else:
        product(round_input(x, activations).contiguous().unsqueeze(1), weight, y.unsqueeze(1))
    return y


def grouped(x: Tensor, weights: list[Held]) -> Tensor:
    """`weights` may also be one weight [G*N, K]."""
    groups = x.shape[1]
    if not isinstance(weights, list):
        y = x.new_empty(x.shape[0], weights.shape[0])
        product(x.contiguous(), weights, y.view(x.shape[0], groups, -1))
        return y
    y = x.new_empty(x.shape[0], groups, weights[0].shape[0])
    for g, weight in enumerate(weights):
        product(x[:, g : g + 1].contiguous(), weight, y[:, g : g + 1])
    return y.flatten(1)


def product(x: Tensor, weight: Weight, y: Tensor) -> None:
    """x [T, G, K], weight [G*N, K] -> y [T, G, N]. With one group, a large weight goes in slices of rows."""
    if not y.numel():
        return
    if prompts.serves(x, weight):
        prompts.product(prompts.pack(x, weight), weight, y)
        return
    groups, cols = y.shape[1:]
    depth = x.shape[2]
    factor = dense.factor_of(weight)
    if factor is not None and groups > 1:
        factor = factor.expand(groups).contiguous()
    row_bytes = depth * max(4 * (x.dtype == torch.float32), 8 * dense.num_parts(weight, x.dtype) - 6)
    slice_rows = cols if groups > 1 else min(cols, max(256, dense.SCRATCH_BYTES // row_bytes // 256 * 256))
    for start in range(0, cols, slice_rows):
        stop = min(cols, start + slice_rows)
        w = dense.rows(weight, x.dtype, start * groups, stop * groups)
        gemm(x, w.view(w.shape[0], groups, stop - start, depth), y[:, :, start:stop], factor)
