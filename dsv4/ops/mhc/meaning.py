"""Decode step: what the launches of a hyper-connection mean (decode.py)."""

from functools import partial as bind
from typing import Any

import torch
from torch import Tensor

from dsv4.gpu.meaning import Claim, Wanted
from dsv4.spec import ops
from dsv4.spec.rounding import linear_input

# A sum of this many float32 products, in any order: a part of the sum of their magnitudes.
SUM = 2.0**-18


def mixes_of(partial: Tensor, n: int, mixes: int) -> Tensor:
    """Read `partial` [T, chunks, WIDTH]: [T, mixes + 1], the sum of squares after the first n."""
    return partial[:, :, : mixes + 1].sum(1)


def _put_mixes(partial: Tensor, value: Tensor) -> None:
    partial.zero_()
    partial[:, 0, : value.shape[1]] = value


def _partial(streams: Tensor, fn: Tensor, partial: Tensor) -> Claim:
    """The streams' products with fn, of which a block leaves those of some channels."""
    n, mixes = streams.shape[1], fn.shape[0]

    def want() -> Wanted:
        flat = streams.flatten(1).float()
        products, squares = flat @ fn.mT, flat.square().sum(1, keepdim=True)
        slack = flat.abs() @ fn.abs().mT * SUM
        value = torch.cat((products[:, :n], squares, products[:, n:]), 1)
        return value, torch.cat((slack[:, :n], squares * SUM, slack[:, n:]), 1)

    return Claim(
        name="partial",
        buffer=partial,
        want=want,
        after=True,
        read=bind(mixes_of, partial, n, mixes),
        write=bind(_put_mixes, partial),
    )


def embed_open(
    ids: Tensor, table: Tensor, streams: Tensor, fn: Tensor, partial: Tensor, **_: Any
) -> list[Claim]:
    def want() -> Wanted:
        return table[ids.clamp(min=0)].to(streams.dtype).unsqueeze(1).expand(streams.shape), 0.0

    return [Claim("streams", streams, want, ulps=0), _partial(streams, fn, partial)]


def mix_open(
    y: Tensor,
    gate: Tensor,
    comb: Tensor,
    streams: Tensor,
    fn: Tensor,
    partial: Tensor,
    chosen: Tensor | None = None,
    own: range = range(0),
    **_: Any,
) -> list[Claim]:
    def want() -> Wanted:
        parts = y.float()
        if chosen is not None:
            is_own = (chosen >= own.start) & (chosen < own.stop)
            parts = torch.cat((parts[:, :-1] * is_own.unsqueeze(-1), parts[:, -1:]), 1)
        out = parts.sum(1).to(streams.dtype)
        eps = torch.finfo(streams.dtype).eps  # the output may round the other way
        largest = (gate.abs().unsqueeze(-1) * out.float().abs().unsqueeze(1)).nan_to_num()
        return ops.mix_out(out, streams, gate, comb), largest * eps + parts.abs().sum(1).unsqueeze(1) * SUM

    return [Claim("streams", streams, want), _partial(streams, fn, partial)]


def mix_close(
    partial: Tensor,
    base: Tensor,
    scale: Tensor,
    streams: Tensor,
    weight: Tensor,
    x: Tensor,
    gate: Tensor | None,
    comb: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    x_in: Tensor | None = None,
    activations: Any = "a16",
    mixed: Tensor | None = None,
    mean: Tensor | None = None,
    **_: Any,
) -> list[Claim]:
    n, d = streams.shape[1:]

    def mixes() -> tuple[Tensor, ...]:
        held = mixes_of(partial, n, len(base))
        m = torch.cat((held[:, :n], held[:, n + 1 :]), 1)
        m = m * torch.rsqrt(held[:, n : n + 1] / (n * d) + norm_eps)
        if gate is None:
            return (ops.mix_head(streams, m, base, scale[:1], hc_eps),)
        return ops.mix_in(streams, m, base, scale[[0, n, 2 * n]], hc_eps)

    def want_x() -> Wanted:
        out = ops.rms_norm(mixes()[0], weight, norm_eps)
        return out, 1e-5 * out.float().abs().amax(1, keepdim=True)

    claims = [Claim("x", x, want_x, ulps=3)]
    if gate is not None and comb is not None:
        # The exponential is the GPU's fast one; Sinkhorn's rounds are done later.
        claims.append(Claim("gate", gate, lambda: (mixes()[1], 2e-5)))
        claims.append(Claim("comb", comb, lambda: (mixes()[2].softmax(-1) + hc_eps, 2e-5)))
    if mixed is not None:
        # Shares are right to 2^-21 of one; streams can cancel.
        slack = lambda: streams.float().abs().sum(1) * 2e-5  # noqa: E731
        claims.append(Claim("mixed", mixed, lambda: (mixes()[0], slack())))
    if mean is not None:
        exact = lambda: streams.float().mean(1).to(streams.dtype)  # noqa: E731
        claims.append(Claim("mean", mean, lambda: (exact(), streams.float().abs().sum(1) * 2.0**-23)))
    if x_in is not None:
        claims.append(Claim("x_in", x_in, lambda: (linear_input(x, activations), 0.0), ulps=0, after=True))
    return claims
