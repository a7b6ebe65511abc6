"""Comparing float32 results with float64 ones, against bounds derived from the number of roundings."""

import torch
from torch import Tensor

# Largest relative error of one float32 rounding; exp and log1p are taken to err by at most twice as much.
ROUND = 2.0**-24
FUNCTION = 2.0**-23
TINY = 2.0**-126


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
