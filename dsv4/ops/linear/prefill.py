"""Prompts: products, where a weight meets many rows.

BF16 on Hopper: weights are decoded in registers (prefill_sm90.cuh); a8 runs on FP8 tensor cores. NVFP4
activations and weights, where tensor cores multiply FP4: codes as they are (prefill_fp4.py). Else, float32
among it, weights are unpacked into scratch and multiplied by Triton.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dsv4.gpu.tiles import Tiled, tile
from dsv4.ops.linear import prefill_dense as dense
from dsv4.ops.linear import prefill_fp4 as fp4
from dsv4.ops.linear import prefill_product as prompts
from dsv4.ops.linear.cpu import Held, embed
from dsv4.ops.linear.decode import splits
from dsv4.ops.linear.prefill_dense import Weight
from dsv4.ops.linear.prefill_gemm import gemm
from dsv4.ops.linear.prefill_packed import IN_16_BITS, Codes, Mode, Packed, mode_of
from dsv4.ops.rows import prefill as rows
from dsv4.ops.rows import quantize
from dsv4.quant.formats import Format, QuantTensor

__all__ = ["embed", "grouped", "hold", "linear", "partial", "round_input"]


class Prepared:
    """x [T, K], normalised where there is a `norm`, as the products want it that have met it so far.

    Where the first of them rounds, one launch normalises and rounds; with `both` it keeps the unrounded rows.
    """

    def __init__(self, x: Tensor, norm: Tensor | None = None, eps: float = 0.0, both: bool = True) -> None:
        self._given, self._norm, self._eps, self._both = x, norm, eps, both
        self._normed = x if norm is None else None
        self._rounded: dict[str, Tensor] = {}
        self._packed: dict[tuple[str, Mode], Packed] = {}  # by activations and mode
        self.codes_8: Codes | None = None  # FP8, row by row, where whoever made x made them too

    @classmethod
    def of(
        cls,
        like: Tensor,
        x: Tensor | None,
        packed: dict[Mode, Packed],
        codes_8: Codes | None,
    ) -> "Prepared":
        """Of x that was normalised, and packed, by whoever made it: plain, or in BF16 among others."""
        ready = cls(like)
        ready._normed = x
        ready._packed = {("a8" if mode.is_fp8 else "a16", mode): rows for mode, rows in packed.items()}
        ready.codes_8 = codes_8
        return ready

    @property
    def like(self) -> Tensor:
        """For its shape, type and device; the values may not be the normalised ones."""
        return self._given

    @property
    def x(self) -> Tensor:
        if self._normed is None:
            held = self._packed.get(("a16", IN_16_BITS[Format.BF16]))
            self._normed = rows.rms_norm(self._given, self._norm, self._eps) if held is None else held.plain()
        return self._normed

    @property
    def _is_to_be_normed(self) -> bool:
        return self._normed is None and self._norm is not None

    def _norm_beside(self) -> dict[str, Any]:
        """What makes a quantiser normalise, if that is still to be done; and where the rows go meanwhile."""
        if not self._is_to_be_normed:
            return {}
        normed = torch.empty_like(self._given, memory_format=torch.contiguous_format) if self._both else None
        self._normed = normed
        return {"norm_weight": self._norm, "eps": self._eps, "normed": normed}

    def rounded(self, activations: str) -> Tensor:
        if activations == "a16":
            return self.x
        if activations not in self._rounded:
            x = self._given if self._is_to_be_normed else self.x
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            quantize.round_values(x, out, activations, **self._norm_beside(), overlap=False)
            self._rounded[activations] = out
        return self._rounded[activations]

    @cached_property
    def codes(self) -> quantize.Packed:
        """NVFP4, for tensor cores that multiply it."""
        x = self._given if self._is_to_be_normed else self.x
        return quantize.pack(x, **self._norm_beside())

    def to_pack(self, weight: Tiled, activations: str) -> tuple[Tensor, str]:
        """What product.pack takes, and how it has to round that: FP8 codes are made while x is packed."""
        if mode_of(weight, activations).is_fp8:
            return self.x.contiguous(), activations
        return self.rounded(activations).contiguous(), "a16"

    def pack(self, weight: Tiled, activations: str) -> Packed:
        """For prefill_sm90.cuh."""
        key = (activations, mode_of(weight, activations))
        if key not in self._packed:
            x, how = self.to_pack(weight, activations)
            self._packed[key] = prompts.pack(x.unsqueeze(1), weight, how)
        return self._packed[key]


def prepared(x: Tensor | Prepared) -> Prepared:
    return x if isinstance(x, Prepared) else Prepared(x)


def hold(weight: QuantTensor, device: str) -> Tiled:
    """For `dsv4 doctor`: a weight, which is on the device already, as a model holds it there."""
    return tile(weight)


def round_input(x: Tensor, activations: str) -> Tensor:
    return Prepared(x.reshape(-1, x.shape[-1])).rounded(activations).view(x.shape)


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
    ready = prepared(x)
    given = ready.like
    y = torch.empty(given.shape[0], weight.shape[0], dtype=out_dtype or given.dtype, device=given.device)
    if not y.numel():
        return y
    if fp4.serves(given, weight, activations):
        fp4.product(ready.codes, weight, y)
    elif prompts.serves(given, weight):
        prompts.product(ready.pack(weight, activations), weight, y.unsqueeze(1), sums)
    else:
        product(ready.rounded(activations).contiguous().unsqueeze(1), weight, y.unsqueeze(1))
    return y


def grouped(x: Tensor, weights: list[Held]) -> Tensor:
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
