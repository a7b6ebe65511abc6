"""The GPU backends of linear, experts and route against the reference, and rows on their own."""

import math

import pytest
import torch
from gpu_support import DEVICE, DTYPES, IS_GPU, MARKS, near, tiled, tiled_bank, to, use_stand_ins, weight
from ops_support import rand

pytest.importorskip("triton", reason="Triton is not installed")
from dsv4.ops.experts import cpu as experts_cpu
from dsv4.ops.experts import prefill as experts_prefill
from dsv4.ops.linear import cpu as linear_cpu
from dsv4.ops.linear import prefill as linear_prefill
from dsv4.ops.linear import prefill_dense as dense
from dsv4.ops.route import cpu as route_cpu
from dsv4.ops.route import prefill as route_prefill

pytestmark = MARKS
KINDS = ["nvfp4", "mxfp4", "fp8", "fp8f", "bf16", "f32"]


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)


def check_linear(rows: int, cols: int, depth: int, kind: str, dtype: torch.dtype) -> None:
    x, q = rand(rows, depth).to(dtype), weight(rand(cols, depth, seed=1), kind)
    held = tiled(q)
    for out_dtype in (None, torch.float32):
        want = linear_cpu.linear(x, q, out_dtype=out_dtype)
        got = linear_prefill.linear(*to(x), held, out_dtype=out_dtype)
        near(got, want, dtype if out_dtype is None else torch.float32, f"{kind} {rows}x{cols}x{depth}")
    for row in {0, rows - 1} if IS_GPU and rows else range(max(0, rows - 1), rows):
        alone = linear_prefill.linear(*to(x[row : row + 1]), held, out_dtype=torch.float32)
        assert torch.equal(alone[0], got[row]), f"row {row} depends on its company"


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
def test_linear(kind: str, dtype: torch.dtype) -> None:
    check_linear(*((300, 520, 1056) if IS_GPU else (21, 24, 96)), kind, dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(0, 24, 64), (1, 1, 32), (130, 3, 16), (3, 260, 80)])
def test_linear_sizes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_linear(*shape, "nvfp4" if shape[1] > 1 else "f32", dtype)


@DTYPES
def test_plain_weights_need_no_tiles(dtype: torch.dtype) -> None:
    x = rand(5, 48).to(dtype)
    for held in (rand(20, 48, seed=1), rand(20, 48, seed=1).bfloat16()):
        want = linear_cpu.linear(x, held.float().t().contiguous())
        near(linear_prefill.linear(*to(x, held)), want, dtype, f"{held.dtype}")


@pytest.mark.skipif(not IS_GPU, reason="the interpreter adds up in an order of its own")
def test_a_long_float32_sum_rounds_as_little_as_a_cpus() -> None:
    x, w = rand(64, 7168), rand(96, 7168, seed=1)
    exact = x.double() @ w.double().t()
    got = linear_prefill.linear(*to(x, w)).cpu()
    error = ((got - exact).norm() / exact.norm()).item()
    assert error < 8e-7, f"{error:.1e}; in one chain of additions it is 1.5e-6"


def test_a_large_weight_goes_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    x, q = rand(3, 32).bfloat16(), weight(rand(600, 32, seed=1), "nvfp4")
    whole = linear_prefill.linear(*to(x), tiled(q))
    monkeypatch.setattr(dense, "SCRATCH_BYTES", 1)
    assert torch.equal(linear_prefill.linear(*to(x), tiled(q)), whole)
    near(whole, linear_cpu.linear(x, q), torch.bfloat16, "in slices")


@pytest.mark.parametrize("activations", ["a8", "a4"])
def test_rounded_inputs(activations: str) -> None:
    x, q = rand(7, 160).bfloat16(), weight(rand(24, 160, seed=1), "nvfp4")
    got = linear_prefill.linear(*to(x), tiled(q), activations)
    near(got, linear_cpu.linear(x, q, activations), torch.bfloat16, activations)


@DTYPES
def test_grouped(dtype: torch.dtype) -> None:
    """One weight per group, or all groups in one weight: the same bits."""
    x, w = rand(9, 3, 64).to(dtype), rand(3 * 32, 64, seed=1)
    parts = [weight(part, "bf16") for part in w.split(32)]
    want = linear_cpu.grouped(x, parts)
    got = linear_prefill.grouped(*to(x), [tiled(part) for part in parts])
    near(got, want, dtype, "grouped")
    assert torch.equal(linear_prefill.grouped(*to(x), tiled(weight(w, "bf16"))), got)
    assert torch.equal(linear_prefill.grouped(*to(x[4:5]), tiled(weight(w, "bf16")))[0], got[4])


class Experts:
    def __init__(self, kind: str, count: int = 7, depth: int = 96, width: int = 40) -> None:
        self.stored = [
            (
                weight(rand(width, depth, seed=3 * e), kind),
                weight(rand(width, depth, seed=3 * e + 1), kind),
                weight(0.3 * rand(depth, width, seed=3 * e + 2), kind),
            )
            for e in range(count)
        ]
        self.bank = tiled_bank(self.stored)
        self.tuples = [tuple(tiled(w) for w in expert) for expert in self.stored]


@DTYPES
@pytest.mark.parametrize("kind", ["nvfp4", "fp8f"])
def test_routed(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts with no, one and many tokens, in groups of three; one token names an expert twice."""
    monkeypatch.setattr(experts_prefill, "GROUP", 3 if dtype == torch.bfloat16 else 6)
    e = Experts(kind, width=48)
    tokens, k = 18, 3
    x = (2 * rand(tokens, 96)).to(dtype)
    ids = torch.stack(
        [torch.randperm(6, generator=torch.Generator().manual_seed(t))[:k] for t in range(tokens)]
    )
    ids[ids == 2] = 6
    ids[0] = torch.tensor([4, 1, 4])
    weights = rand(tokens, k, seed=9).abs()
    want = experts_cpu.routed(x, ids, weights, e.stored, 1.5, "a16")[:, 0]
    got = experts_prefill.routed(*to(x, ids, weights), e.bank, 1.5, "a16")[:, 0]
    # In BF16 each choice is rounded: 2^-9 of it, and choices may cancel.
    near(got, want, dtype, f"routed {kind}", ulps=4, share=k * 2.0**-8)
    if kind == "nvfp4" and not (IS_GPU and dtype == torch.bfloat16):  # tuples are unpacked, a bank is not
        assert torch.equal(experts_prefill.routed(*to(x, ids, weights), e.tuples, 1.5, "a16")[:, 0], got)
    for t in (0, 17) if IS_GPU else (0,):
        alone = experts_prefill.routed(
            *to(x[t : t + 1], ids[t : t + 1], weights[t : t + 1]), e.bank, 1.5, "a16"
        )[:, 0]
        assert torch.equal(alone[0], got[t]), f"token {t} depends on its company"
    shared = rand(tokens, 1, 96, seed=4).to(DEVICE, dtype)
    for out_dtype in (torch.float32, dtype):
        both = experts_prefill.routed(
            *to(x, ids, weights), e.bank, 1.5, "a16", shared=shared, out_dtype=out_dtype
        )
        assert both.dtype == out_dtype
        assert torch.equal(both[:, 0], (got + shared[:, 0]).to(both.dtype)), "added last, and rounded once"


@DTYPES
def test_ranks_with_whole_experts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each adds up what its own experts give to a token, bit for bit, and nothing else that lies there."""

    def poisoned(x: torch.Tensor, *shape: int, **how: object) -> torch.Tensor:
        return x.new_full(shape, math.nan if x.is_floating_point() else 0, **how)  # type: ignore[call-overload]

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    ranks, share, tokens, k = 2, 3, 14, 3
    e = Experts("nvfp4", count=ranks * share, width=48)
    x, weights = (2 * rand(tokens, 96)).to(dtype), rand(tokens, k, seed=9).abs()
    ids = torch.stack(
        [torch.randperm(6, generator=torch.Generator().manual_seed(t))[:k] for t in range(tokens)]
    )
    ids[0], ids[1], ids[2, 1] = torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5]), -1
    shared = rand(tokens, 1, 96, seed=4).to(DEVICE, dtype)
    moved = x.to(DEVICE)
    given = []  # by choice
    for choice in range(k):
        one = ids[:, choice : choice + 1].clamp_min(0)
        given.append(
            experts_prefill.routed(moved, *to(one, weights[:, choice : choice + 1]), e.bank, 1.5, "a16")[:, 0]
        )
    for rank in range(ranks):
        first = rank * share
        own = (ids >= first) & (ids < first + share)
        how = {"limit": 1.5, "activations": "a16", "first": first, "ranks": ranks}
        bank = tiled_bank(e.stored[first : first + share])
        got = experts_prefill.routed(moved, *to(ids, weights), bank, shared=shared, **how)
        want = torch.zeros_like(given[0])
        for choice, made in enumerate(given):
            want = torch.where(own[:, choice : choice + 1].to(DEVICE), want + made, want)
        assert torch.equal(got[:, 0], want + shared[:, 0].float()), f"rank {rank}"
        stored = e.stored[first : first + share]
        near(
            want,
            experts_cpu.routed(x, ids, weights, stored, **how)[:, 0],
            dtype,
            "whole experts",
            ulps=4,
            share=k * 2.0**-8,
        )
    none = torch.full((1, k), 5)
    alone = experts_prefill.routed(
        *to(x[:1], none, weights[:1]), tiled_bank(e.stored[:3]), 1.5, "a16", first=0, ranks=2
    )
    assert not alone.any(), "no choice is this rank's"


@DTYPES
@pytest.mark.parametrize("activations", ["a16", "a8"])
def test_shared_expert(activations: str, dtype: torch.dtype) -> None:
    e = Experts("nvfp4", count=1, width=48)
    x, w = (2 * rand(9, 96)).to(dtype), rand(9, seed=1)
    for weights in (None, w):
        want = experts_cpu.ffn(x, e.stored[0], 1.5, activations, weights)[:, 0].to(dtype)
        moved = None if weights is None else weights.to(DEVICE)
        one = experts_prefill.ffn(*to(x), e.tuples[0], 1.5, "a16")[:, 0]
        near(one, experts_cpu.ffn(x, e.stored[0], 1.5, "a16")[:, 0].to(dtype), dtype, "no bank", ulps=4)
        got = experts_prefill.ffn(*to(x), e.bank, 1.5, activations, moved)[:, 0]
        if activations == "a16":
            near(got, want, dtype, "shared", ulps=4)
        else:  # a hidden value on the edge of an FP8 step may fall to its other side
            near(got, want, torch.bfloat16, "shared a8", ulps=32)
        alone = experts_prefill.ffn(
            *to(x[4:5]), e.bank, 1.5, activations, None if moved is None else moved[4:5]
        )[:, 0]
        assert torch.equal(alone[0], got[4])


def test_no_rows() -> None:
    e = Experts("nvfp4", count=2)
    none = torch.zeros(0, 2, dtype=torch.long)
    got = experts_prefill.routed(*to(rand(0, 96), none, rand(0, 2)), e.bank, 1.0, "a16")[:, 0]
    assert got.shape == (0, 96) and got.dtype == torch.float32
    assert experts_prefill.ffn(*to(rand(0, 96)), e.bank, 1.0, "a16")[:, 0].shape == (0, 96)


@DTYPES
@pytest.mark.parametrize("count", [7])
def test_route(count: int, dtype: torch.dtype) -> None:
    x, gate, bias = rand(12, 64).to(dtype), weight(rand(count, 64, seed=1), "f32"), 0.1 * rand(count, seed=2)
    held = tiled(gate)
    ids, w = route_cpu.by_score(x, gate, bias, 6, 1.5)
    got_ids, got_w = route_prefill.by_score(*to(x), held, *to(bias), 6, 1.5)
    assert torch.equal(got_ids.cpu(), ids)
    near(got_w, w, torch.float32, "weights")
    for t in (0, 11):
        alone = route_prefill.by_score(*to(x[t : t + 1]), held, *to(bias), 6, 1.5)
        assert torch.equal(alone[0][0], got_ids[t]) and torch.equal(alone[1][0], got_w[t])
    chosen = torch.randint(0, count, (12, 3))
    want = route_cpu.by_hash(x, gate, chosen, 1.5)[1]
    near(route_prefill.by_hash(*to(x), held, *to(chosen), 1.5)[1], want, torch.float32, "hash")


def test_ties_go_to_the_lower_expert() -> None:
    x, gate = torch.zeros(2, 32), torch.zeros(12, 32)
    bias = torch.zeros(12)
    bias[[3, 8]] = 1.0
    bias[5] = -math.inf
    ids, _ = route_prefill.by_score(*to(x, gate, bias), 12, 1.0)
    assert ids[0].tolist() == ids[1].tolist() == [3, 8, 0, 1, 2, 4, 6, 7, 9, 10, 11, 5]
