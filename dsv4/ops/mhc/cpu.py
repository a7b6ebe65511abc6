"""Manifold-constrained hyper-connections: mix residual streams into one input, and the output back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.ops._exact import by_row, cast, mean_square, number, row_product, sigmoid, total
from dsv4.ops.activation import Activation, Norm
from dsv4.ops.rows.cpu import normed


class Mixing(NamedTuple):
    """One site's weights and numbers, as `pre` takes them."""

    fn: Tensor  # [N*D, M]
    base: Tensor  # [M]
    scale: Tensor  # [M]
    norm_eps: float
    eps: float
    iters: int


@dataclass
class Residual:
    """The residual streams [T, N, D] between sites: an output y [T, D] may still have to be added to them.

    Who adds it takes everything, so that the old streams are freed when the new ones are there.
    """

    streams: Tensor | None
    y: Tensor | None = None
    gate: Tensor | None = None  # of the last site: how its output goes back
    comb: Tensor | None = None
    site: str = ""  # whose output y is or was: for taps

    def take(self) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:
        assert self.streams is not None, "streams are taken once"
        taken = self.y, self.streams, self.gate, self.comb
        self.y = self.streams = self.gate = self.comb = None
        return taken

    def added(self, post: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """The streams with the output, taken."""
        streams = self.seen(post)
        self.take()
        return streams

    def seen(self, post: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """The same, with everything left for the next site."""
        assert self.streams is not None, "streams are taken once"
        if self.y is None:
            return self.streams
        assert self.gate is not None and self.comb is not None
        return post(self.y, self.streams, self.gate, self.comb)


def mix_in(
    residual: Residual, mixing: Mixing, norm: Norm, keeps_x: bool = False
) -> tuple[Activation, Tensor | None]:
    """Add the last output to the streams, mix these into one input x [T, D], and normalise it.

    -> the normalised input, and x if it is to be kept. The residual has the new streams, gate and comb.
    """
    residual.streams = streams = residual.added(post)
    x, residual.gate, residual.comb = pre(streams, *mixing)
    return normed(x, norm), x if keeps_x else None


def _mixes(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """streams [T, N, D], fn [N*D, M] float32 -> [T, M]; the norm's factor is applied after the product."""
    flat = streams.flatten(1).float()
    return row_product(flat, fn) * mean_square(flat, norm_eps).rsqrt()


@by_row(((4, 4), 20, 1e-6), ((3, 3), 2, 1e-6))
def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """logits [T, N, N] -> nearly doubly stochastic matrices; the last step normalises columns."""
    tokens, n, _ = logits.shape
    # A row and a column of eps around the matrix: the sum of N + 1 values is that of N plus eps, in one call
    # and without a new tensor. On a CPU this loop is a good part of a small model's step.
    framed = logits.new_full((tokens, n + 1, n + 1), eps)
    comb, rows, columns = framed[:, :n, :n], framed[:, :n], framed[:, :, :n]
    row_sums, column_sums = logits.new_empty(tokens, n, 1), logits.new_empty(tokens, 1, n)
    ones = logits.new_ones(tokens, n + 1, 1)
    turned = ones.mT

    shifted = torch.exp(logits - logits.amax(-1, keepdim=True))
    torch.add(shifted / shifted.sum(-1, keepdim=True), number(eps, logits.device), out=comb)
    comb.div_(torch.bmm(turned, columns, out=column_sums))
    for _ in range(iters - 1):
        comb.div_(torch.bmm(rows, ones, out=row_sums))
        comb.div_(torch.bmm(turned, columns, out=column_sums))
    return comb


def pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """streams [T, N, D] -> x [T, D], gate [T, N], comb [T, N, N].

    fn [N*D, M], base and scale [M], M = 2N+N*N: N weights of x, N of gate, N*N of comb.
    """
    n = streams.shape[1]
    logits = _mixes(streams, fn, norm_eps) * scale + base
    shares = sigmoid(logits[:, : 2 * n])
    into = shares[:, :n] + number(eps, shares.device)
    gate = shares[:, n:] * number(2, shares.device)
    comb = sinkhorn(logits[:, 2 * n :].view(-1, n, n), iters, eps)
    return _weighted(streams, into), gate, comb


def post(x: Tensor, streams: Tensor, gate: Tensor, comb: Tensor) -> Tensor:
    """x [T, D], streams [T, N, D], gate [T, N], comb [T, N, N] -> [T, N, D]; sums over comb's FIRST index."""
    mixed = total(comb.unsqueeze(-1) * streams.float().unsqueeze(2), 1)
    return cast(gate.unsqueeze(-1) * x.float().unsqueeze(1) + mixed, streams.dtype)


def head(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, eps: float) -> Tensor:
    """streams [T, N, D] -> [T, D] before the final norm. fn [N*D, N], base [N], scale [1]."""
    weights = sigmoid(_mixes(streams, fn, norm_eps) * scale + base)
    return _weighted(streams, weights + number(eps, weights.device))


def _weighted(streams: Tensor, weights: Tensor) -> Tensor:
    return cast(total(weights.unsqueeze(-1) * streams.float(), 1), streams.dtype)
