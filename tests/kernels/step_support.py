"""What the tests of the decode step's kernels share: where they run, inputs, and how close is close."""

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.quant.codec import decode
from dsv4.quant.formats import QuantTensor
from tests.support.interpreter import quicken

# Triton decides at import whether its functions are interpreted, so that happens in a process of its own,
# started by test_step_interpreted. The same tests run on a GPU where there is one.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IS_GPU = torch.cuda.is_available() and not IS_INTERPRETED
DEVICE = "cuda" if IS_GPU else "cpu"
runs = [
    pytest.mark.skipif(not (IS_INTERPRETED or IS_GPU), reason="run by test_step_interpreted, or on a GPU"),
    *([pytest.mark.gpu] if IS_GPU else []),
]
on_gpu = pytest.mark.skipif(not IS_GPU, reason="Flash sizes need a GPU")
DTYPES = [torch.float32, torch.bfloat16]


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def there(x: Tensor) -> Tensor:
    """A copy where the kernels run."""
    return x.detach().clone().to(DEVICE)


def blank(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An output: NaN, so that what a kernel forgets or reads too early shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def check(got: Tensor, want: Tensor, what: str, ulps: float = 2, share: float = 4e-7) -> None:
    """Each value within `ulps` units of its type and `share` of the largest: sums run in another order."""
    got, dtype = got.cpu(), got.dtype
    assert got.shape == want.shape and dtype == want.dtype, (what, got.shape, want.shape, dtype)
    if not want.numel():
        return
    assert bool(torch.isfinite(got).all()), f"{what}: not finite"
    wide = want.double()
    bound = ulps * torch.finfo(dtype).eps * wide.abs() + share * float(wide.abs().max())
    excess = (got.double() - wide).abs() - bound
    worst = int(excess.argmax())
    assert float(excess.max()) <= 0, (
        f"{what}: {float(got.flatten()[worst])!r} at {worst}, expected {float(want.flatten()[worst])!r}"
    )


if IS_INTERPRETED:
    quicken()


def moved(q: QuantTensor) -> QuantTensor:
    """A copy of a store where the kernels run."""
    assert q.scale is not None
    return replace(q, data=there(q.data), scale=there(q.scale))


def check_rows(got: QuantTensor, want: QuantTensor, touched: list[int], what: str) -> None:
    """Stored rows: all but the touched ones bit for bit; of those few values may lie one code further.

    A value that lay at a tie can round the other way, after sums in another order.
    """
    data, scale = got.data.cpu(), got.scale.cpu()  # type: ignore[union-attr]
    assert want.scale is not None
    rest = torch.ones(len(data), dtype=torch.bool)
    rest[touched] = False
    assert torch.equal(data[rest], want.data[rest]), f"{what}: a row that is not this step's was written"
    assert torch.equal(scale, want.scale), f"{what}: other scales"
    a, b = decode(replace(got, data=data, scale=scale))[touched], decode(want)[touched]
    # One step of E2M1 is at most half of its value (2 to 3), or half the block's scale below 1.
    assert not a.numel() or bool(((a - b).abs() <= 0.51 * b.abs() + 0.1 * b.abs().max()).all()), what
    nope = want.shape[1] - want.rope_dim
    if a.numel():
        assert float((a != b)[:, :nope].float().mean()) <= 0.02, f"{what}: too many values differ"
    if want.rope_dim:
        itemsize = (data.shape[1] - nope) // want.rope_dim
        ulp = 2.0**-7 if itemsize == 2 else 2.0**-20
        # Of the row's largest: a rotation can cancel.
        assert bool(((a - b).abs() <= ulp * b.abs().amax(1, keepdim=True))[:, nope:].all()), what
