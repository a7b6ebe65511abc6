"""index.cu's own source on the CPU, warps in shuffled orders, to the bit what its order of sums gives."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from dsv4.kernels.decode import index
from dsv4.ops.index import ref
from dsv4.quant.codec import mxfp4_round
from tests.support.twin import needs_compiler, twin_of, unfinished

pytestmark = needs_compiler
twin = twin_of("index", queries=ctypes.c_char_p)
HEADS, WIDTH = index.HEADS, index.WIDTH


def launches(twin: ctypes.CDLL, seed: int) -> Callable[..., None]:
    """In the place of `call`."""

    def call(source: str, kernel: str, device: torch.device, given: Any, blocks: int, **how: int) -> None:
        assert source == "index" and how["threads"] == 32 * index.WARPS
        problem = getattr(twin, kernel.removesuffix("_kernel"))(ctypes.byref(given), blocks, seed)
        assert problem == b"", problem.decode()

    return call


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b.double() + c.double()).float()


@pytest.mark.parametrize("warms", [False, True])
def test_queries(twin: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, warms: bool) -> None:
    monkeypatch.setattr(index, "call", launches(twin, seed=warms))
    positions = torch.tensor([0, -1, 900])
    cos, sin = (torch.rand(1000, index.ROPE // 2, generator=generator(i)) * 2 - 1 for i in range(2))
    iq = (torch.randn(3, HEADS, WIDTH, generator=generator(2)) * 5).bfloat16()
    iq[0, 0], iq[0, 1, ::7], iq[2, 3, 64] = 0, 1e-38, torch.inf
    iq[2, 5, 100] = torch.nan
    got = iq.clone()
    with unfinished(twin, got):
        index.rotate_round(got, cos, sin, positions, overlap=warms)
    pairs = iq.float().unflatten(-1, (-1, 2))
    c = torch.cat((torch.ones(3, 32), cos[positions.clamp(min=0)]), 1).unsqueeze(1)
    s = torch.cat((torch.zeros(3, 32), sin[positions.clamp(min=0)]), 1).unsqueeze(1)
    a, b = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((fma(a, c, -(b * s)), fma(a, s, b * c)), -1).flatten(-2).bfloat16()
    want = mxfp4_round(ref.hadamard(turned))
    assert torch.equal(got.isnan(), want.isnan()) and bool(want.isnan().any())
    assert torch.equal(got.nan_to_num(7).view(torch.int16), want.nan_to_num(7).view(torch.int16))


def test_queries_that_overflow_or_cancel(twin: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinity has the largest number's scale, not NaN; sums go by the lowest bit of a channel first."""
    monkeypatch.setattr(index, "call", launches(twin, seed=1))
    iq = torch.zeros(1, HEADS, WIDTH).bfloat16()
    iq[0, 0, :2] = 3e38
    iq[0, 1, 0], iq[0, 1, 4], iq[0, 1, 64] = 2.0**30, 1.0, -(2.0**30)
    want = mxfp4_round(ref.hadamard(iq))
    assert want[0, 0].isinf().any() and not want.isnan().any() and not want[0, 1, :64].any()
    cos, sin = torch.ones(1, index.ROPE // 2), torch.zeros(1, index.ROPE // 2)
    index.rotate_round(iq, cos, sin, torch.tensor([0]), overlap=True)
    assert torch.equal(iq, want)


def test_who_is_served() -> None:
    sizes = {"is_cuda": True, "dtype": torch.bfloat16, "shape": torch.Size((1, HEADS, WIDTH))}
    assert index.serves(SimpleNamespace(**sizes))  # type: ignore[arg-type]
    for name, other in (
        ("is_cuda", False),
        ("dtype", torch.float32),
        ("shape", torch.Size((1, 32, WIDTH))),
        ("shape", torch.Size((1, HEADS, 64))),
    ):
        assert not index.serves(SimpleNamespace(**{**sizes, name: other}))  # type: ignore[arg-type]
