"""Prompts: launches prefill_unpack.cu. Weights in tiles as rows again."""

import ctypes

import torch
from torch import Tensor

from dsv4.gpu.build import call
from dsv4.gpu.tiles import Tiled
from dsv4.ops.linear.decode import segment_of


def unpack(weight: Tiled, out: Tensor) -> None:
    """The values without factor, row-major: out [count * halves * N, K] BF16 or float32, w1 before w3."""
    assert (
        out.is_contiguous()
        and out.numel() == weight.count * weight.halves * weight.shape[0] * weight.shape[1]
    )
    assert weight.places is not None or (weight.data.is_contiguous() and weight.scale.is_contiguous())
    act = "float" if out.dtype == torch.float32 else "__nv_bfloat16"
    bricks = weight.count * weight.units * weight.slices * weight.halves
    call(
        "linear/prefill_unpack",
        f"unpack_kernel<{act}>",
        out.device,
        segment_of(weight),
        out,
        ctypes.c_int64(bricks),
        blocks=-(-bricks // 4),
        threads=128,
    )
