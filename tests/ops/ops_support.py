"""The specification in float64, and bounds on float32 results derived from their number of roundings."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.config import preset
from dsv4.spec.model import Model
from dsv4.spec.rounding import MODES

# Largest relative error of one float32 rounding; exp and log1p are taken to err by at most twice as much.
ROUND = 2.0**-24
FUNCTION = 2.0**-23
TINY = 2.0**-126


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def in_float64() -> Iterator[None]:
    """Inside, `.float()` gives float64: the specification names its precision so, and nowhere else."""
    float32 = Tensor.float
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.float = float32  # type: ignore[method-assign]


def exactly(function: Callable[..., Any], *args: Any) -> Any:
    """What a function of the specification gives for these values in float64."""
    with in_float64():
        return function(*(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args))


def spec_model(tensors: Mapping[str, Tensor], rounding: str = "off", **config: Any) -> Model:
    """The specification over some tensors, all of them quantised; config.json's keys as they are changed."""
    return Model(replace(preset("tiny"), **config), tensors, MODES[rounding], tensors.keys())


def check_close(got: Tensor, want: Tensor, bound: Tensor | float, what: str = "") -> None:
    """|got - want| <= bound everywhere; NaN and infinity must match. The message gives the worst place."""
    assert got.shape == want.shape, f"{what}: {list(got.shape)}, expected {list(want.shape)}"
    if not got.numel():
        return
    got, want = got.double(), want.double()
    finite = torch.isfinite(want)
    assert torch.equal(torch.isnan(got), torch.isnan(want)), f"{what}: NaN in other places"
    assert torch.equal(got[~finite].nan_to_num(), want[~finite].nan_to_num()), f"{what}: other infinities"
    excess = torch.where(finite, (got - want).abs() - bound, -1.0)
    worst = int(excess.argmax())
    at = [int(i) for i in torch.unravel_index(torch.tensor(worst), excess.shape)]
    assert float(excess.max()) <= 0, (
        f"{what}: {float(got.flatten()[worst])!r} at {at}, expected {float(want.flatten()[worst])!r}"
    )


def product_bound(x: Tensor, w: Tensor) -> Tensor:
    """What a float32 sum of K products, in any order, can be off: x [T, K], w [K, N] -> [T, N]."""
    k = x.shape[1]
    return (k + 1) * ROUND * (x.double().abs() @ w.double().abs())


def one_more_rounding(want: Tensor, dtype: torch.dtype) -> Tensor:
    """A unit in the last place of `dtype`, not half: the float32 value may lie beyond a tie."""
    return want.double().abs() * torch.finfo(dtype).eps + TINY
