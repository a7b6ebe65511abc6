"""Where the GPU backends run in tests (a GPU, or Triton's interpreter), and stand-ins for tiles and top-k."""

import os
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from ops_support import check_close
from torch import Tensor

from dsv4.quant.codec import decode, encode_weight
from dsv4.quant.formats import Format, QuantTensor

# Triton decides at import whether its functions are interpreted, so those run in a process of their own.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IS_GPU = not IS_INTERPRETED and torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"
MARKS = [
    pytest.mark.skipif(not (IS_INTERPRETED or IS_GPU), reason="run by test_gpu_all, interpreted, or on a GPU"),
    *([] if IS_INTERPRETED else [pytest.mark.gpu]),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


@dataclass(frozen=True)
class StandIn:
    """What the backends ask of tiles.Tiled, holding values without the factor."""

    format: Format
    shape: tuple[int, int]
    data: Tensor  # [count, N, K] float32
    factor: Tensor
    fits_bf16: bool
    count: int = 1
    global_scale: float = field(default=1.0)


def unpack(tiled: StandIn, out: Tensor, start: int = 0) -> None:
    values = tiled.data if out.dim() == 3 else tiled.data[0]
    assert out.dtype in (torch.float32, torch.bfloat16) and out.is_contiguous()
    assert out.dtype == torch.float32 or tiled.fits_bf16
    out.copy_(values[start : start + out.shape[0]])


def tiled(q: QuantTensor) -> StandIn:
    factor = q.global_scale if q.format is Format.NVFP4 else 1.0
    plain = QuantTensor(q.format, q.data, q.shape, q.scale, 1.0) if q.format is Format.NVFP4 else q
    values = decode(plain)
    return StandIn(
        *(q.format, q.shape, values.unsqueeze(0).to(DEVICE), torch.tensor([factor], device=DEVICE)),
        bool((values.bfloat16().float() == values).all()),
    )


def tiled_bank(experts: list[tuple[QuantTensor, ...]]) -> SimpleNamespace:
    """w1, w3, w2 of every expert as one w13 and one w2."""

    def stack(weights: list[list[QuantTensor]]) -> StandIn:
        parts = [[tiled(w) for w in group] for group in weights]
        data = torch.stack([torch.cat([p.data[0] for p in group]) for group in parts])
        factor = torch.stack([torch.cat([p.factor for p in group]) for group in parts])
        fits = all(p.fits_bf16 for group in parts for p in group)
        shape = (data.shape[1], data.shape[2])
        return StandIn(weights[0][0].format, shape, data, factor, fits, len(weights))

    return SimpleNamespace(w13=stack([[w1, w3] for w1, w3, _ in experts]), w2=stack([[w2] for *_, w2 in experts]))


def weight(values: Tensor, kind: str) -> QuantTensor:
    """A stored weight; `fp8f` has float scales that are no powers of two, so its values do not fit BF16."""
    if kind != "fp8f":
        return encode_weight(values, Format(kind))
    q = encode_weight(values, Format.FP8)
    assert q.scale is not None
    scale = torch.exp2(q.scale.float() - 127) * 1.2345678
    return QuantTensor(q.format, q.data, q.shape, scale)


def near(got: Tensor, want: Tensor, dtype: torch.dtype, what: str, ulps: float = 2.0) -> None:
    """Within 1e-5 of the largest value in float32; in BF16 also a few units of each value's own last place."""
    assert got.dtype == want.dtype, (what, got.dtype, want.dtype)
    finite = want.float()[torch.isfinite(want.float())]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    bound = want.double().abs().nan_to_num() * (0.0 if dtype == torch.float32 else ulps * 2.0**-8)
    small = 1e-5 if dtype == torch.float32 else 2.0**-12
    check_close(got.cpu(), want, bound + small * largest, what)


def to(*tensors: Tensor) -> list[Tensor]:
    return [t.to(DEVICE) for t in tensors]


def move(q: QuantTensor) -> QuantTensor:
    scale = None if q.scale is None else q.scale.to(DEVICE)
    return QuantTensor(q.format, q.data.to(DEVICE), q.shape, scale, q.global_scale, q.rope_dim)
