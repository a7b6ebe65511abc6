"""Prompts: products, where a weight meets many rows.

BF16 on Hopper: weights are decoded in registers (prefill_sm90.cuh); a8 runs on FP8 tensor cores. NVFP4
activations and weights, where tensor cores multiply FP4: codes as they are (prefill_fp4.py). Else, float32
among it, weights are unpacked into scratch and multiplied by Triton.
"""

import torch
from torch import Tensor

from dsv4.gpu.tiles import Tiled, tile
from dsv4.ops.activation import Form, Rows, activation
from dsv4.ops.linear import prefill_dense as dense
from dsv4.ops.linear import prefill_fp4 as fp4
from dsv4.ops.linear import prefill_product as prompts
from dsv4.ops.linear.cpu import Held, embed
from dsv4.ops.linear.decode import splits
from dsv4.ops.linear.prefill_dense import Weight
from dsv4.ops.linear.prefill_gemm import gemm
from dsv4.ops.linear.prefill_packed import Packed, mode_of
from dsv4.ops.rows import prefill as rows
from dsv4.quant.formats import QuantTensor

__all__ = ["embed", "form", "grouped", "hold", "linear", "partial", "parts_of", "round_input"]


def hold(weight: QuantTensor, device: str) -> Tiled:
    """For `dsv4 doctor`: a weight, which is on the device already, as a model holds it there."""
    return tile(weight)


def round_input(x: Tensor, activations: str) -> Tensor:
    return rows.as_values(activation(x.reshape(-1, x.shape[-1])), activations).view(x.shape)


def form(dtype: torch.dtype, weight: object, activations: str) -> Form:
    if fp4.serves(weight, dtype, activations):
        return Form(activations, is_codes=True)
    return Form(activations, mode_of(weight, activations) if prompts.serves(weight, dtype) else None)


def parts_of(parts: int) -> int:
    return 1


def linear(
    x: Rows,
    weight: Held,
    activations: str = "a16",
    out_dtype: torch.dtype | None = None,
    parts: int = 1,
) -> Tensor:
    """On this backend a weight held as values is [N, K]. A row of it has the same bits in any weight."""
    return _linear(x, weight, activations, out_dtype, sums=1)


def partial(x: Rows, weight: Held, activations: str, parts: int, out_dtype: torch.dtype) -> Tensor:
    """In 16 bits it adds up what the decode step's split-K has as separate sums."""
    return _linear(x, weight, activations, out_dtype, sums=splits(weight.shape[1])).unsqueeze(1)


def _linear(x: Rows, weight: Weight, activations: str, out_dtype: torch.dtype | None, sums: int) -> Tensor:
    x = activation(x)
    given, how = x.like, form(x.like.dtype, weight, activations)
    y = torch.empty(given.shape[0], weight.shape[0], dtype=out_dtype or given.dtype, device=given.device)
    if not y.numel():
        return y
    if how.is_codes:
        fp4.product(rows.as_codes(x), weight, y)
    elif how.mode is not None:
        prompts.product(rows.as_packed(x, how), weight, y.unsqueeze(1), sums)
    else:
        product(rows.as_values(x, activations).contiguous().unsqueeze(1), weight, y.unsqueeze(1))
    return y


def grouped(x: Tensor | Packed, weights: list[Held]) -> Tensor:
    """`weights` may also be one weight [G*N, K], and x packed for it."""
    if isinstance(x, Packed):
        assert isinstance(weights, Tiled)
        y = torch.empty(x.rows, weights.shape[0], dtype=torch.bfloat16, device=x.data.device)
        prompts.product(x, weights, y.unflatten(1, (x.matrices, -1)))
        return y
    flat = x.flatten(1).contiguous()
    if not isinstance(weights, list):
        groups = flat.shape[1] // weights.shape[1]
        y = x.new_empty(x.shape[0], weights.shape[0])
        product(flat.unflatten(1, (groups, -1)), weights, y.unflatten(1, (groups, -1)))
        return y
    y = x.new_empty(x.shape[0], len(weights), weights[0].shape[0])
    for g, (part, weight) in enumerate(zip(flat.chunk(len(weights), dim=1), weights, strict=True)):
        product(part.contiguous().unsqueeze(1), weight, y[:, g : g + 1])
    return y.flatten(1)


def product(x: Tensor, weight: Weight, y: Tensor) -> None:
    """x [T, G, K], weight [G*N, K] -> y [T, G, N]. With one group, a large weight goes in slices of rows."""
    if not y.numel():
        return
    if prompts.serves(weight, x.dtype):
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
