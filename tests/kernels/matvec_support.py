"""Products of small whole numbers, whose sums are exact in any order, launched on matvec.cu's twin."""

import ctypes
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.gpu.tiles import Tiled, empty, put, tile
from dsv4.ops.linear import decode as matvec
from dsv4.ops.linear.decode import MatVec
from dsv4.quant.codec import decode, e4m3_encode
from dsv4.quant.formats import FP8_TILE, MX_BLOCK, NV_BLOCK, Format, QuantTensor

FORMATS = [Format.NVFP4, Format.MXFP4, Format.FP8, Format.BF16]
BF16, F32 = torch.bfloat16, torch.float32
FACTOR = 0.7  # of NVFP4: the one rounding of an exact sum


class _Range(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("bytes", ctypes.c_int64))


def _ranges(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Where their storages begin, and how long they are."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def _array(ranges: dict[int, int]) -> ctypes.Array[_Range]:
    return (_Range * len(ranges))(*(_Range(at, count) for at, count in ranges.items()))


def launch(twin: ctypes.CDLL, plan: MatVec, seed: int = 0) -> None:
    """As a GPU would, and what a launch declares is held against what it does: until the wait, whatever it
    does not declare to read early holds something else."""
    touches = plan.touches
    early, late = _ranges(touches.reads_early), _ranges((*touches.reads, *touches.writes))
    late_only = _array({at: count for at, count in late.items() if at not in early})
    readable = _array(early | late)

    def call(source: str, kernel: str, device: torch.device, given: ctypes.Structure, **how: int) -> None:
        problem = twin.launch(
            ctypes.byref(given),
            kernel.encode(),
            how["blocks"],
            how["threads"],
            how["shared"],
            late_only,
            len(late_only),
            readable,
            len(readable),
            seed,
        )
        assert problem == b"", problem.decode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matvec, "call", call)
        plan.launch()


def whole(*shape: int, most: int, seed: int, dtype: torch.dtype = F32) -> Tensor:
    """Whole numbers from -most to most."""
    made = torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype)


def _pick(values: list[int], *shape: int, seed: int) -> Tensor:
    at = torch.randint(len(values), shape, generator=torch.Generator().manual_seed(seed))
    return torch.tensor(values, dtype=torch.uint8)[at]


def weight(format: Format, n: int, k: int, seed: int = 0) -> QuantTensor:
    if format is Format.BF16:
        return QuantTensor(format, whole(n, k, most=6, seed=seed, dtype=BF16), (n, k))
    if format is Format.FP8:
        scale = _pick([1, 2, 3], -(-n // FP8_TILE), -(-k // FP8_TILE), seed=seed + 1).float() / 2
        return QuantTensor(format, e4m3_encode(whole(n, k, most=8, seed=seed)), (n, k), scale)
    codes = _pick(list(range(256)), n, k // 2, seed=seed)
    if format is Format.MXFP4:
        return QuantTensor(format, codes, (n, k), _pick([126, 127, 128], n, -(-k // MX_BLOCK), seed=seed + 1))
    # 0.5, 1, 1.5 and 2
    scale = _pick([0x30, 0x38, 0x3C, 0x40], n, -(-k // NV_BLOCK), seed=seed + 1)
    return QuantTensor(format, codes, (n, k), scale, FACTOR)


def wanted(x: Tensor, w: QuantTensor) -> Tensor:
    """Exact, then times the factor in float32."""
    sums = x.double() @ decode(replace(w, global_scale=1.0)).double().t()
    assert torch.equal(sums.float().double(), sums), "choose smaller numbers"
    return sums.float() * w.global_scale


def bank(
    format: Format, experts: int, n: int, k: int, halves: int, apart: bool = False
) -> tuple[Tiled, list[list[QuantTensor]]]:
    """Experts with factors of their own; `apart`: in no order, each with its scales, at `places`."""
    to = empty(format, (n, k), experts, halves, "cpu")
    stored = [
        [
            replace(weight(format, n, k, seed=10 * e + half), global_scale=1.0 + e / 8 + half / 4)
            for half in range(halves)
        ]
        for e in range(experts)
    ]
    for e, parts in enumerate(stored):
        for half, part in enumerate(parts):
            put(to, e, half, part)
    if not apart:
        return to, stored
    data, scale = to.data[0].nbytes, to.scale[0].nbytes
    own = torch.full((experts, data + scale), 0xFF, dtype=torch.uint8)
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(1))
    own[order, :data] = to.data.flatten(1)
    own[order, data:] = to.scale.flatten(1)
    first, beside = own[:1, :data].view(to.data[:1].shape), own[:1, data:].view(to.scale[:1].shape)
    return replace(to, data=first, scale=beside, places=order * (data + scale)), stored


def tiled(*given: object) -> tuple[Tiled, QuantTensor]:
    w = weight(*given)  # type: ignore[arg-type]
    return tile(w), w
