"""Hyper-connections: check values, a float64 loop over every index, and the order of comb's indices."""

import math
from weakref import ref

import pytest
import torch
from ops_support import ROUND, check_close, one_more_rounding, rand
from torch import Tensor

from dsv4.ops.activation import Norm
from dsv4.ops.mhc import cpu
from dsv4.ops.rows.cpu import rms_norm

MIXES = [0.3, -0.2, 0.1, 0, 0.5, -0.5, 0.25, 0, 1, 0.2, -0.3, 0.4, 0, 0.9, 0.1, -0.6,
         -0.2, 0.3, 0.8, 0.1, 0.5, -0.1, 0.2, 0.7]  # fmt: skip
SCALE = torch.tensor([0.5] * 4 + [1.0] * 4 + [2.0] * 16)
BASE = torch.tensor([0.1] * 4 + [-0.1] * 4 + [0.0] * 16)
PRE = torch.tensor([0.562178, 0.500001, 0.537431, 0.524980])
POST = torch.tensor([1.197375, 0.708687, 1.074860, 0.950042])
COMB = torch.tensor(
    [
        [0.5800803, 0.1104697, 0.0545298, 0.2549192],
        [0.1150544, 0.6565284, 0.1778543, 0.0505620],
        [0.0642090, 0.1646304, 0.6004585, 0.1707011],
        [0.2406554, 0.0683706, 0.1671564, 0.5238167],
    ]
)


def test_check_values_of_sinkhorn() -> None:
    logits = 2 * torch.tensor(MIXES[8:]).view(1, 4, 4)
    comb = cpu.sinkhorn(logits, 20, 1e-6)[0]
    check_close(comb, COMB, 1e-7, "comb")
    check_close(comb.sum(0), torch.ones(4), 2e-6, "the last step normalises columns (but for eps)")
    # Rows were normalised one step earlier: they are off by more than columns, and by little.
    assert float((comb.sum(1) - 1).abs().max()) < 1e-5


def test_check_values_of_pre() -> None:
    """Streams of ones have the norm 1, so columns of fn that sum to the mixes give those mixes."""
    width = 8
    streams = torch.ones(3, 4, width)
    fn = (torch.tensor(MIXES) / (4 * width)).expand(4 * width, 24).contiguous()
    x, gate, comb = cpu.pre(streams, fn, BASE, SCALE, 0.0, 1e-6, 20)
    check_close(gate, POST.expand(3, 4), 1e-6, "gate")
    check_close(comb, COMB.expand(3, 4, 4), 3e-7, "comb")
    # Streams that are 0 but one give pre of that stream, once rescaled to the same norm of 1.
    for j in range(4):
        one = torch.zeros(1, 4, width)
        one[0, j] = 2.0
        fn_j = torch.zeros(4 * width, 24)
        fn_j[j * width : (j + 1) * width] = torch.tensor(MIXES) / (2 * width)
        x, _, _ = cpu.pre(one, fn_j, BASE, SCALE, 0.0, 1e-6, 20)
        check_close(x[0] / 2, PRE[j].expand(width), 1e-6, f"pre {j}")


def exact_sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v))


def naive_mixes(streams: Tensor, fn: Tensor, eps: float) -> list[float]:
    """One token: streams [N, D] -> [M], in float64."""
    flat = [float(v) for v in streams.flatten()]
    factor = 1 / math.sqrt(sum(v * v for v in flat) / len(flat) + eps)
    return [factor * sum(flat[i] * float(fn[i, m]) for i in range(len(flat))) for m in range(fn.shape[1])]


def naive_sinkhorn(logits: list[list[float]], iters: int, eps: float) -> list[list[float]]:
    n = len(logits)
    comb = []
    for row in logits:
        shifted = [math.exp(v - max(row)) for v in row]
        comb.append([v / sum(shifted) + eps for v in shifted])
    for step in range(iters):
        if step:
            comb = [[v / (sum(row) + eps) for v in row] for row in comb]
        columns = [sum(comb[j][k] for j in range(n)) + eps for k in range(n)]
        comb = [[comb[j][k] / columns[k] for k in range(n)] for j in range(n)]
    return comb


@pytest.mark.parametrize(
    ("tokens", "n", "width", "iters"), [(3, 4, 11, 20), (1, 3, 7, 20), (2, 2, 5, 1), (4, 1, 3, 2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pre_post_head_against_loops(tokens: int, n: int, width: int, iters: int, dtype: torch.dtype) -> None:
    streams = rand(tokens, n, width).to(dtype)
    m = 2 * n + n * n
    fn, base, scale = rand(n * width, m, seed=1) * width**-0.5, rand(m, seed=2), rand(m, seed=3)
    y = rand(tokens, width, seed=4).to(dtype)
    x, gate, comb = cpu.pre(streams, fn, base, scale, 1e-6, 1e-5, iters)
    new = cpu.post(y, streams, gate, comb)
    top = cpu.head(streams, fn[:, :n].contiguous(), base[:n], scale[:n], 1e-6, 1e-5)
    assert x.dtype == new.dtype == top.dtype == dtype and gate.dtype == comb.dtype == torch.float32
    # Products of n*width terms, then functions with slopes below 1; 20 steps of 2 roundings in the mixing.
    near = 4 * (n * width + 4 * iters + 10) * ROUND
    for t in range(tokens):
        mix = naive_mixes(streams[t], fn, 1e-6)
        spread = (1 + float(scale.abs().max())) * (1 + max(map(abs, mix)))
        pre = [exact_sigmoid(mix[j] * float(scale[j]) + float(base[j])) + 1e-5 for j in range(n)]
        want = torch.tensor(
            [[pre[j] * float(streams[t, j, d]) for d in range(width)] for j in range(n)]
        ).double()
        size = streams[t].double().abs().sum(0) * 2
        check_close(
            x[t], want.sum(0), near * spread * size + one_more_rounding(size, dtype), f"x of token {t}"
        )
        check_close(
            top[t], want.sum(0), near * spread * size + one_more_rounding(size, dtype), f"head of token {t}"
        )
        post = [2 * exact_sigmoid(mix[n + j] * float(scale[n + j]) + float(base[n + j])) for j in range(n)]
        check_close(gate[t], torch.tensor(post), near * spread, f"gate of token {t}")
        moved = [a * float(s) + float(b) for a, s, b in zip(mix, scale, base, strict=True)]
        logits = [moved[2 * n + n * j : 3 * n + n * j] for j in range(n)]
        mixing = naive_sinkhorn(logits, iters, 1e-5)
        check_close(comb[t], torch.tensor(mixing), near * spread, f"comb of token {t}")
        out = [
            [
                post[k] * float(y[t, d]) + sum(mixing[j][k] * float(streams[t, j, d]) for j in range(n))
                for d in range(width)
            ]
            for k in range(n)
        ]
        size = 2 * y[t].double().abs() + streams[t].double().abs().sum(0)
        bound = near * spread * size + one_more_rounding(size, dtype)
        check_close(new[t], torch.tensor(out), bound.expand(n, width), f"post of token {t}")


@pytest.mark.parametrize("iters", [1, 2, 3, 20])
def test_sinkhorn_takes_the_given_number_of_steps(iters: int) -> None:
    """Far from doubly stochastic, so that every step still moves the result."""
    logits = 6 * rand(5, 3, 3)
    want = torch.tensor([naive_sinkhorn(matrix, iters, 1e-6) for matrix in logits.tolist()])
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
