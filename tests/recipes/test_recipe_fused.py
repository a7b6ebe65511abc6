"""The fused kernels give the plain functions' values and gradients, in Triton's interpreter."""

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from recipes.tiny import plain
from tests.support.compiling import fake_hopper
from tests.support.interpreter import quicken

triton = pytest.importorskip("triton", reason="Triton is not installed")
fused_attention, fused_streams = (
    importlib.import_module(f"recipes.tiny.{name}") for name in ("fused_attention", "fused_streams")
)
B, L, N, D, H = 2, 16, 4, 16, 4
# Triton decides at import whether its functions are interpreted, so these run in a process of their own.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="run by test_all, interpreted")
if IS_INTERPRETED:
    quicken()


@pytest.mark.slow
@pytest.mark.skipif(IS_INTERPRETED, reason="this is the process that test_all starts")
def test_all() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and " passed, 2 skipped" in done.stdout, done.stdout[-4000:]


@pytest.fixture(scope="module")
def fused() -> ModuleType:
    return importlib.import_module("recipes.tiny.fused")


def agree(want: Callable[..., Any], got: Callable[..., Any], *inputs: Tensor) -> None:
    results = []
    for function in (want, got):
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
        out = function(*leaves)
        outs = out if isinstance(out, tuple) else (out,)
        torch.manual_seed(7)
        loss = sum((o * torch.randn_like(o)).sum() for o in outs)
        if loss.requires_grad:
            loss.backward()
        results.append([*outs, *(t.grad for t in leaves if t.grad is not None)])
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def test_same_functions(fused: ModuleType) -> None:
    assert sorted(plain.__all__) == sorted(fused.__all__)
    for name in plain.__all__:
        assert inspect.signature(getattr(fused, name)) == inspect.signature(getattr(plain, name)), name


@pytest.mark.slow
@pytest.mark.skipif(IS_INTERPRETED, reason="compiles instead")
def test_kernels_compile_for_a_gpu(monkeypatch: pytest.MonkeyPatch, fused: ModuleType) -> None:
    """At the sizes of the recipe, forward and backward; nothing runs."""
    launch, built = triton.runtime.jit.JITFunction.run, set()

    def build(kernel: Any, *args: Any, **options: Any) -> Any:
        built.add(kernel.__name__)
        return launch(kernel, *args, **options | {"warmup": True})

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", build)

    def both(function: Callable[..., Any], *inputs: Tensor) -> None:
        out = function(*(t.requires_grad_(t.is_floating_point()) for t in inputs))
        sum(o.float().sum() for o in (out if isinstance(out, tuple) else (out,))).backward()

    def bf16(*shape: int) -> Tensor:
        return torch.zeros(1, 128, *shape, dtype=torch.bfloat16)

    cos, targets, width = torch.zeros(128, 32), torch.zeros(1, 128, dtype=torch.long), 8 + 16
    with fake_hopper():
        both(lambda x, w: fused.rms_norm(x, w, 1e-6), bf16(4, 512), torch.zeros(512))
        both(lambda x: fused.rotate_heads(fused.rms_norm(x, None, 1e-6), cos, cos), bf16(8, 512))
        for rows in (width, 4):
            both(lambda h, fn: fused.mixes(h, fn, 1e-6), bf16(4, 512), torch.zeros(rows, 2048))
        mixed = (bf16(4, 512), torch.zeros(1, 128, width), torch.zeros(width), torch.zeros(3))
        both(lambda *t: fused.mix_in(*t, 1e-6), *mixed)
        both(lambda z: fused.sinkhorn(z, 20, 1e-6), torch.zeros(1, 128, 4, 4))
        gates = torch.zeros(1, 128, 4), torch.zeros(1, 128, 4, 4)
        both(fused.mix_out, bf16(512), bf16(4, 512), *gates)
        weight = torch.zeros(1, 128, 16, 1)
        both(lambda g, u, w: fused.swiglu(g, u, 10.0, w), bf16(16, 64), bf16(16, 64), weight)
        both(lambda g, u: fused.swiglu(g, u, 10.0), bf16(64), bf16(64))
        both(lambda z: fused.nats(z, targets), bf16(4096))
        for entries in (0, 32, 1024):
            seen, sinks = torch.zeros(1, 128, 256 + entries, dtype=torch.bool), torch.zeros(8)
            keys = torch.zeros(1, 256 + entries, 512, dtype=torch.bfloat16)
            both(lambda q, k, s, seen=seen: fused.attend(q, k, seen, s), bf16(8, 512), keys, sinks)
            if entries:
                fused.mass(bf16(8, 512), keys.detach(), seen, sinks.detach(), entries)
        keys = torch.zeros(1, 1024, 128, dtype=torch.bfloat16)
        both(fused.index_scores, bf16(64, 128), keys, torch.zeros(1, 128, 64))
    modules = (fused, fused_attention, fused_streams)
    kernels = {
        n for m in modules for n, f in vars(m).items() if isinstance(f, triton.runtime.jit.JITFunction)
    }
    assert built == kernels - {"_row"}


def test_mass_is_the_weight_that_attention_gives() -> None:
    """Values that name their key make `attend` return its weights; they meet no query."""
    torch.manual_seed(6)
    q, keys, sinks = torch.randn(B, L, H, D), torch.randn(B, 24, D), torch.randn(H)
    seen = torch.rand(B, L, 24) < 0.5
    names = torch.eye(24).expand(B, -1, -1)
    wide = torch.cat((q * ((D + 24) / D) ** 0.5, q.new_zeros(B, L, H, 24)), -1)
    weights = plain.attend(wide, torch.cat((keys, names), -1), seen, sinks)[..., D + 9 :].sum(-2)
    want = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(plain.mass(q, keys, seen, sinks, 15), want)


@interpreted
def test_norms_and_rotations(fused: ModuleType) -> None:
    torch.manual_seed(0)
    x, w, cos, sin = torch.randn(B, L, H, D), torch.randn(D), torch.randn(L, 4), torch.randn(L, 4)
    agree(lambda x, w: plain.rms_norm(x, w, 1e-6), lambda x, w: fused.rms_norm(x, w, 1e-6), x, w)
    agree(lambda x: plain.rms_norm(x, None, 1e-6), lambda x: fused.rms_norm(x, None, 1e-6), x)
    agree(lambda x: plain.rotate_heads(x, cos, -sin), lambda x: fused.rotate_heads(x, cos, -sin), x)
    agree(lambda x: plain.rotate(x, cos, sin), lambda x: fused.rotate(x, cos, sin), x[:, :, 1])


@interpreted
def test_hyper_connections(fused: ModuleType) -> None:
    torch.manual_seed(1)
    streams, width = torch.randn(B, L, N, D), 2 * N + N * N
    for rows in (width, N):
        fn = torch.randn(rows, N * D)
        agree(lambda h, fn: plain.mixes(h, fn, 1e-3), lambda h, fn: fused.mixes(h, fn, 1e-3), streams, fn)
    agree(
        lambda *t: plain.mix_in(*t, 1e-3),
        lambda *t: fused.mix_in(*t, 1e-3),
        *(streams, torch.randn(B, L, width), torch.randn(width), torch.rand(3)),
    )
    logits = torch.randn(B, L, N, N) * 3
    agree(lambda z: plain.sinkhorn(z, 20, 1e-6), lambda z: fused.sinkhorn(z, 20, 1e-6), logits)
    y, gate, comb = torch.randn(B, L, D), torch.rand(B, L, N), torch.rand(B, L, N, N)
    agree(plain.mix_out, fused.mix_out, y, streams, gate, comb)


@interpreted
def test_experts_and_loss(fused: ModuleType) -> None:
    torch.manual_seed(2)
    gate, up, weight = torch.randn(B, L, 4, 16) * 3, torch.randn(B, L, 4, 16) * 3, torch.rand(B, L, 4, 1)
    agree(
        lambda g, u, w: plain.swiglu(g, u, 2.5, w),
        lambda g, u, w: fused.swiglu(g, u, 2.5, w),
        gate,
        up,
        weight,
    )
    agree(lambda g, u: plain.swiglu(g, u, 2.5), lambda g, u: fused.swiglu(g, u, 2.5), gate, up)
    targets = torch.randint(0, 64, (B, L))
    agree(lambda z: plain.nats(z, targets), lambda z: fused.nats(z, targets), torch.randn(B, L, 64))


@interpreted
@pytest.mark.parametrize("entries", [0, 5, 8])
def test_attention(fused: ModuleType, entries: int) -> None:
    torch.manual_seed(3)
    shape = (B, 3, 8)  # rows, blocks, queries of a block
    q, keys, sinks = torch.randn(*shape, H, D), torch.randn(B, 3, 16 + entries, D), torch.randn(H)
    seen = torch.rand(*shape, 16 + entries) < 0.5
    seen[..., 3] = True
    agree(
        lambda q, k, s: plain.attend(q, k, seen, s),
        lambda q, k, s: fused.attend(q, k, seen, s),
        q,
        keys,
        sinks,
    )
    if entries:
        seen[0, 0, :, 16:] = False  # queries that see none
        want, got = (module.mass(q, keys, seen, sinks, entries) for module in (plain, fused))
        torch.testing.assert_close(got, want)
        assert not want[0, 0].any()


@interpreted
def test_index_scores(fused: ModuleType) -> None:
    torch.manual_seed(4)
    agree(
        plain.index_scores,
        fused.index_scores,
        torch.randn(B, L, 16, D),
        torch.randn(B, 5, D),
        torch.randn(B, L, 16),
    )
