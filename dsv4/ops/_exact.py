"""Functions whose result for one row never depends on the other rows. Used by every reference op.

torch's loops finish with a tail, and split a long sum between threads: either could make a token depend on
its batch-mates. So each function here is measured once on the machine it runs on, and where rows are not
independent it is run row by row. Avoided from the start, because their tails are another implementation:
torch's own sigmoid, silu and softplus. Products of matrices are in _product.py.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from dsv4.ops._memory import recall
from dsv4.ops._product import row_product as row_product
from dsv4.spec import ops

Sample = tuple[Any, ...]  # the shape of one row, then the other arguments
Function = Callable[..., Tensor]


def by_row(*samples: Sample) -> Callable[[Function], Function]:
    """f(x [T, ...], ...): all rows at once where no sample shows a difference, else each alone."""

    def wrap(f: Function) -> Function:
        @cache
        def is_independent(device: torch.device, threads: int) -> bool:
            known = recall(device, threads)[0].get(f.__name__)
            return all(_holds(f, *s, device=device) for s in samples) if known is None else known

        @wraps(f)
        def run(x: Tensor, *rest: Any) -> Tensor:
            if x.shape[0] == 1 or is_independent(x.device, torch.get_num_threads()):
                return f(x, *rest)
            return torch.cat([f(row.clone(), *rest) for row in x.split(1)])

        run.__dict__["is_independent"] = is_independent
        return run

    return wrap


def _holds(f: Function, shape: tuple[int, ...], *rest: Any, device: torch.device) -> bool:
    """Rows alone, in groups, at other addresses and in strided views against the same rows among 100."""
    generator = torch.Generator(device).manual_seed(sum(shape))
    wide = 8 * torch.randn(100, *shape[:-1], shape[-1] + 3, generator=generator, device=device)
    view = wide[..., 1:-2]
    x = view.contiguous()
    whole = f(x, *rest)
    if not torch.equal(f(view, *rest), whole):
        return False
    groups = [slice(start, start + count) for start in (0, 1, 7, 30) for count in (1, 2, 3, 5, 8, 17, 70)]
    return all(torch.equal(f(x[group], *rest), whole[group]) for group in groups)


def padded(count: int) -> int:
    """So many keys of a query are multiplied as that many: few shapes, and rows of them begin aligned."""
    step = 64 if count <= 256 else 256
    return -(-count // step) * step


@cache
def number(value: float, device: torch.device) -> Tensor:
    """A float32 scalar. torch makes one of a Python number at each use, which costs as much as the sum."""
    return torch.tensor(value, dtype=torch.float32, device=device)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), free when x has that type already: in float32 all of a step's casts have."""
    return x if x.dtype is dtype else x.to(dtype)


@by_row(((1,),), ((5,),), ((33,),), ((8, 24),), ((257,),))
def exp(x: Tensor) -> Tensor:
    return torch.exp(x)


@by_row(
    ((1,), 1), ((6,), 1), ((96,), 1), ((1024,), 1), ((4, 96), 1), ((4, 4, 33), 1), ((4, 5), 2), ((8, 192), 2)
)
def total(x: Tensor, dim: int) -> Tensor:
    """x [T, ...] -> the sum along one dimension, not the first."""
    return x.sum(dim)


@by_row(((5,), 1e-6), ((64,), 1e-6), ((4, 80), 1e-6), ((1024,), 1e-6))
def mean_square(x: Tensor, eps: float) -> Tensor:
    """Mean of the squares over the last dimension, plus eps: x [..., D] float32 -> [..., 1]."""
    total = x.square().sum(-1, keepdim=True)
    return torch.addcmul(number(eps, x.device), total, number(1 / x.shape[-1], x.device))


@by_row(((1,),), ((8,),), ((33,),))
def sigmoid(x: Tensor) -> Tensor:
    return (number(1, x.device) + torch.exp(-x)).reciprocal()


@by_row(((1,),), ((64,),), ((129,),))
def silu(x: Tensor) -> Tensor:
    return x / (number(1, x.device) + torch.exp(-x))


@by_row(((1,),), ((7,),), ((16,),), ((257,),))
def softplus(x: Tensor) -> Tensor:
    return x.relu() + torch.log1p(torch.exp(-x.abs()))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, ..., D] by each row's angle: cos, sin [T, R]."""
    while cos.dim() < x.dim():
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return ops.rotate(x, cos, sin)
