"""Decode step: what a launch means: the values that it leaves in its buffers, and how close is right."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# What a claim's buffer should hold, and by how much each value may be off beside `ulps`.
Wanted = tuple[Tensor, Tensor | float]
# Of a row's values in 4 or 8 bits, the share that may lie one code further: those near a boundary.
RARE = 0.15
# How far one code is from the next, relative to the value and to the largest of its row.
CODED = {"fp8": (1 / 8, 2.0**-16), "fp4": (1 / 2, 1 / 6)}


@dataclass(frozen=True)
class Claim:
    """One buffer that a launch writes, or a part of it.

    `want` is evaluated on what the launch reads, before it runs; with `after`, on what it left, for a value
    that follows from another output. `ulps`: units of the buffer's type that a value may be off; 0 and no
    slack: exactly equal. `read` and `write`: for buffers in a kernel's own layout, and rows of a store.
    `coded`: values are those of codes, of which a few of each row may lie one code further.
    """

    name: str
    buffer: Tensor
    want: Callable[[], Wanted]
    ulps: float = 1.0
    after: bool = False
    coded: Literal["fp8", "fp4"] | None = None
    read: Callable[[], Tensor] | None = None
    write: Callable[[Tensor], None] | None = None

    def held(self) -> Tensor:
        return self.buffer if self.read is None else self.read()

    def put(self, value: Tensor) -> None:
        if self.write is None:
            self.buffer.copy_(value)
        else:
            self.write(value)


@dataclass(frozen=True)
class Difference:
    """The element of a buffer that is furthest beyond its bound."""

    buffer: str
    index: tuple[int, ...]
    got: float
    want: float
    bound: float
    beyond: int  # elements beyond their bound
    of: int

    def __str__(self) -> str:
        place = ", ".join(map(str, self.index))
        return (
            f"{self.buffer}[{place}] is {self.got:.6g}, expected {self.want:.6g} ± {self.bound:.2g}; "
            f"{self.beyond:,} of {self.of:,} values are beyond their bound"
        )


def difference(claim: Claim, wanted: Wanted) -> Difference | None:
    """Hold a buffer against what it should hold; None if it does."""
    want, slack = wanted
    got = claim.held()
    assert got.shape == want.shape and got.dtype == want.dtype, (claim.name, got.shape, want.shape)
    if not want.numel():
        return None
    a, b = got.double(), want.double()
    eps = torch.finfo(want.dtype).eps if want.dtype.is_floating_point else 0.0
    bound = claim.ulps * eps * b.abs() + slack
    same = (a == b) | (a.isnan() & b.isnan())
    excess = torch.where(same, -math.inf, (a - b).abs() - bound)
    excess = torch.where(excess.isnan(), math.inf, excess)  # a number against none
    beyond = excess > 0
    if claim.coded and 0 < float(beyond.double().mean(-1).max()) <= RARE:
        of_value, of_row = CODED[claim.coded]
        bound = of_value * 1.01 * b.abs() + of_row * b.abs().amax(-1, keepdim=True)
        excess = torch.where(beyond, (a - b).abs() - bound, -math.inf)
        excess = torch.where(excess.isnan(), math.inf, excess)
        beyond = excess > 0
    count = int(beyond.sum())
    if not count:
        return None
    worst = int(excess.argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape))
    its = [t.expand(got.shape).flatten()[worst].item() for t in (a, b, bound)]
    return Difference(claim.name, place, its[0], its[1], its[2], beyond=count, of=got.numel())


def wants(claims: Sequence[Claim], after: bool) -> list[tuple[Claim, Wanted]]:
    return [(claim, claim.want()) for claim in claims if claim.after == after]


def compute(claims: Sequence[Claim]) -> None:
    """Do in torch what the launch does."""
    for claim, (value, _) in wants(claims, after=False):
        claim.put(value)
    for claim in claims:
        if claim.after:
            claim.put(claim.want()[0])


def run_and_check(run: Callable[[], None], claims: Sequence[Claim]) -> list[Difference]:
    """Launch, and hold what is left against the claims."""
    before = wants(claims, after=False)
    run()
    found = [difference(claim, wanted) for claim, wanted in before]
    found += [difference(claim, wanted) for claim, wanted in wants(claims, after=True)]
    return [each for each in found if each is not None]
