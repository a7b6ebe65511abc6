"""Hyper-connections against the specification in float64, and the order of comb's indices."""

import math
from weakref import ref

import pytest
import torch
from ops_support import ROUND, check_close, exactly, one_more_rounding, rand

from dsv4.ops.activation import Norm
from dsv4.ops.mhc import cpu
from dsv4.ops.rows.cpu import rms_norm
from dsv4.spec import ops as spec


@pytest.mark.parametrize(
    ("tokens", "n", "width", "iters"), [(3, 4, 11, 20), (1, 3, 7, 20), (2, 2, 5, 1), (4, 1, 3, 2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pre_post_head_against_the_specification(
    tokens: int, n: int, width: int, iters: int, dtype: torch.dtype
) -> None:
    streams = rand(tokens, n, width).to(dtype)
    m = 2 * n + n * n
    fn, base, scales = rand(n * width, m, seed=1) * width**-0.5, rand(m, seed=2), rand(3, seed=3)
    scale = scales.repeat_interleave(torch.tensor([n, n, n * n]))  # one of each mix, as the op takes it
    y = rand(tokens, width, seed=4).to(dtype)
    x, gate, comb = cpu.pre(streams, fn, base, scale, 1e-6, 1e-2, iters)
    new = cpu.post(y, streams, gate, comb)
    top = cpu.head(streams, fn[:, :n].contiguous(), base[:n], scale[:1], 1e-6, 1e-2)
    assert x.dtype == new.dtype == top.dtype == dtype and gate.dtype == comb.dtype == torch.float32

    mixed = exactly(spec.mixes, streams, fn.t(), 1e-6)
    want_x, want_gate, logits = exactly(spec.mix_in, streams, mixed, base, scales, 1e-2)
    want_comb = exactly(spec.sinkhorn, logits, iters, 1e-2)
    want_top = exactly(spec.mix_head, streams, mixed[:, :n], base[:n], scales[:1], 1e-2)
    want_new = exactly(spec.mix_out, y, streams, want_gate, want_comb)
    # Products of n*width terms, then functions with slopes below 1; 20 steps of 2 roundings in the mixing.
    near = 4 * (n * width + 4 * iters + 10) * ROUND
    for t in range(tokens):
        spread = (1 + float(scale.abs().max())) * (1 + float(mixed[t].abs().max()))
        size = streams[t].double().abs().sum(0) * 2
        bound = near * spread * size + one_more_rounding(size, dtype)
        check_close(x[t], want_x[t], bound, f"x of token {t}")
        check_close(top[t], want_top[t], bound, f"head of token {t}")
        check_close(gate[t], want_gate[t], near * spread, f"gate of token {t}")
        check_close(comb[t], want_comb[t], near * spread, f"comb of token {t}")
        size = 2 * y[t].double().abs() + streams[t].double().abs().sum(0)
        bound = near * spread * size + one_more_rounding(size, dtype)
        check_close(new[t], want_new[t], bound.expand(n, width), f"post of token {t}")


@pytest.mark.parametrize("iters", [1, 2, 3, 20])
def test_sinkhorn_takes_the_given_number_of_steps(iters: int) -> None:
    """Far from doubly stochastic, so that every step still moves the result."""
    logits = 6 * rand(5, 3, 3)
    want = exactly(spec.sinkhorn, logits, iters, 1e-6)
    check_close(cpu.sinkhorn(logits, iters, 1e-6), want, 40 * iters * ROUND, f"{iters} iterations")


def test_post_sums_over_the_first_index() -> None:
    """A comb that sends stream 0 to stream 1 only: comb[0, 1] = 1. Transposed, stream 0 would receive."""
    streams = torch.tensor([[[1.0, 2.0], [10.0, 20.0]]])
    comb = torch.tensor([[[0.0, 1.0], [0.0, 0.0]]])
    out = cpu.post(torch.zeros(1, 2), streams, torch.zeros(1, 2), comb)
    assert out.tolist() == [[[0.0, 0.0], [1.0, 2.0]]]


def test_rows_are_independent_and_none_is_fine() -> None:
    n, width = 4, 33
    streams, fn = rand(21, n, width), rand(n * width, 24, seed=1)
    base, scale = rand(24, seed=2), rand(24, seed=3)
    whole = cpu.pre(streams, fn, base, scale, 1e-6, 1e-6, 20)
    posted = cpu.post(whole[0], streams, whole[1], whole[2])
    for count in (0, 1, 2, 7, 8, 9):
        part = cpu.pre(streams[:count], fn, base, scale, 1e-6, 1e-6, 20)
        assert all(torch.equal(a, b[:count]) for a, b in zip(part, whole, strict=True)), count
        assert torch.equal(cpu.post(part[0], streams[:count], part[1], part[2]), posted[:count])
    for t in range(21):
        alone = cpu.pre(streams[t : t + 1], fn, base, scale, 1e-6, 1e-6, 20)
        assert all(torch.equal(a[0], b[t]) for a, b in zip(alone, whole, strict=True)), t
    # The first layer hands in one row expanded over the streams: no memory of its own.
    view = rand(5, width).unsqueeze(1).expand(-1, n, -1)
    for a, b in zip(
        cpu.pre(view, fn, base, scale, 1e-6, 1e-6, 20),
        cpu.pre(view.contiguous(), fn, base, scale, 1e-6, 1e-6, 20),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_streams_that_are_not_finite() -> None:
    """NaN in the token where the specification has it, and in no other."""
    streams, fn = rand(4, 3, 7), rand(21, 15, seed=1)
    streams[1, 2, 3], streams[2, 0, 0] = math.nan, math.inf
    base, scales = rand(15, seed=2), rand(3, seed=3)
    scale = scales.repeat_interleave(torch.tensor([3, 3, 9]))
    got = cpu.pre(streams, fn, base, scale, 1e-6, 1e-2, 3)
    x, gate, logits = exactly(
        spec.mix_in, streams, exactly(spec.mixes, streams, fn.t(), 1e-6), base, scales, 1e-2
    )
    for name, some, want in zip(
        ("x", "gate", "comb"), got, (x, gate, exactly(spec.sinkhorn, logits, 3, 1e-2)), strict=True
    ):
        check_close(some, want, 1e-4, name)
        assert torch.isfinite(some[0]).all() and torch.isnan(some[1]).all(), name


def test_extreme_mixes_stay_finite() -> None:
    """Zero streams (the norm's eps carries them), huge ones, and logits far apart."""
    fn, base, scale = rand(4 * 8, 24), torch.zeros(24), torch.full((24,), 50.0)
    for streams in (torch.zeros(2, 4, 8), 1e15 * rand(2, 4, 8), 1e-30 * rand(2, 4, 8)):
        x, gate, comb = cpu.pre(streams, fn, base, scale, 1e-6, 1e-6, 20)
        assert all(torch.isfinite(v).all() for v in (x, gate, comb))
        check_close(comb.sum(1), torch.ones(2, 4), 2e-6, "columns")
    far = torch.tensor([[[1e4, -1e4], [1e4, -1e4]]])
    comb = cpu.sinkhorn(far, 20, 1e-6)
    check_close(comb.sum(1), torch.ones(1, 2), 1e-5, "columns of far logits")
    assert torch.isnan(cpu.sinkhorn(torch.tensor([[[math.nan, 0.0], [0.0, 0.0]]]), 20, 1e-6)).all()


def test_mix_in_adds_the_last_output_and_frees_the_old_streams() -> None:
    tokens, n, width = 5, 4, 6
    old, y = rand(tokens, n, width), rand(tokens, width, seed=1)
    gate, comb = rand(tokens, n, seed=2), rand(tokens, n, n, seed=3)
    site = cpu.Mixing(rand(n * width, 24, seed=4), rand(24, seed=5), rand(24, seed=6), 1e-6, 1e-5, 3)
    norm = Norm(rand(width, seed=7), 1e-6)
    streams = cpu.post(y, old, gate, comb)
    x, its_gate, its_comb = cpu.pre(streams, *site)
    residual, held = cpu.Residual(old, y, gate, comb), [ref(tensor) for tensor in (old, y, gate, comb)]
    del old, y, gate, comb
    made, before = cpu.mix_in(residual, site, norm, keeps_x=True)
    assert [tensor() for tensor in held] == [None] * 4, "a long prompt's streams are held once"
    assert before is not None and torch.equal(before, x)
    assert torch.equal(made.plain, rms_norm(x, norm.weight, norm.eps))
    for got, want in ((residual.streams, streams), (residual.gate, its_gate), (residual.comb, its_comb)):
        assert got is not None and torch.equal(got, want)
    assert residual.y is None and torch.equal(residual.added(cpu.post), streams), "nothing is added twice"
