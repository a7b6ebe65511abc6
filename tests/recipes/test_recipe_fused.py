"""The fused kernels give the plain functions' values and gradients, in Triton's interpreter."""

import importlib
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
from recipes.tiny.plain import Documents
from tests.support.interpreter import quicken

pytest.importorskip("triton", reason="Triton is not installed")
B, L, N, D, H, W = 2, 16, 4, 16, 4, 8
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
    assert done.returncode == 0 and " passed, 1 skipped" in done.stdout, done.stdout[-4000:]


@pytest.fixture(scope="module")
def fused() -> ModuleType:
    return importlib.import_module("recipes.tiny.fused")


def documents() -> Documents:
    """Rows of three documents each, cut at odd places."""
    torch.manual_seed(5)
    return Documents(torch.randint(0, 3, (B, L)).sort(1).values.int())


def agree(want: Callable[..., Any], got: Callable[..., Any], *inputs: Tensor) -> None:
    results = []
    for function in (want, got):
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
        out = function(*leaves)
        outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o is not None]
        torch.manual_seed(7)
        loss = sum((o * torch.randn_like(o)).masked_fill(o < -1e29, 0).sum() for o in outs)
        if loss.requires_grad:
            loss.backward()
        results.append(outs + [t.grad for t in leaves if t.grad is not None])
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@interpreted
def test_norms_and_rotations(fused: ModuleType) -> None:
    torch.manual_seed(0)
    x, w, cos, sin = torch.randn(B, L, H, D), torch.randn(D), torch.randn(L, 4), torch.randn(L, 4)
    agree(lambda x, w: plain.rms(x, w, 1e-6), lambda x, w: fused.rms(x, w, 1e-6), x, w)
    agree(
        lambda x, w: plain.norm_rotate(x, w, cos, sin, 1e-6),
        lambda x, w: fused.norm_rotate(x, w, cos, sin, 1e-6),
        x,
        w,
    )
    agree(
        lambda x: plain.norm_rotate(x, None, cos, sin, 1e-6),
        lambda x: fused.norm_rotate(x, None, cos, sin, 1e-6),
        x,
    )
    agree(lambda x: plain.rotate(x, cos, -sin), lambda x: fused.rotate(x, cos, -sin), x)


@interpreted
def test_hyper_connections(fused: ModuleType) -> None:
    torch.manual_seed(1)
    h, raw = torch.randn(B, L, N, D), torch.randn(B, L, 2 * N + N * N)
    agree(
        lambda *t: plain.mix_in(*t, 1e-6, 1e-3),
        lambda *t: fused.mix_in(*t, 1e-6, 1e-3),
        *(h, raw, torch.rand(3), torch.randn(2 * N + N * N)),
    )
    logits = torch.randn(B, L, N, N) * 3
    agree(lambda z: plain.sinkhorn(z, 1e-6, 20), lambda z: fused.sinkhorn(z, 1e-6, 20), logits)
    agree(plain.mix_out, fused.mix_out, torch.randn(B, L, D), h, torch.rand(B, L, N), torch.rand(B, L, N, N))


@interpreted
def test_experts_and_loss(fused: ModuleType) -> None:
    torch.manual_seed(2)
    gate, up, weights = torch.randn(B, L, 4, 16) * 3, torch.randn(B, L, 4, 16) * 3, torch.rand(B, L, 4)
    agree(lambda *t: plain.swiglu(*t, 2.5), lambda *t: fused.swiglu(*t, 2.5), gate, up, weights)
    targets = torch.randint(0, 64, (B, L))
    agree(lambda z: plain.nats(z, targets), lambda z: fused.nats(z, targets), torch.randn(B, L, 64))


@interpreted
@pytest.mark.parametrize(("ratio", "narrowed"), [(0, False), (4, True), (8, False)])
def test_attention_weights(fused: ModuleType, ratio: int, narrowed: bool) -> None:
    torch.manual_seed(3)
    of, near, sinks = documents(), torch.randn(B, L // W, W, H, 2 * W) * 3, torch.randn(H)
    if not ratio:
        agree(
            lambda n, s: plain.attend_weights(n, None, None, of, 0, s, 0.5),
            lambda n, s: fused.attend_weights(n, None, None, of, 0, s, 0.5),
            *(near, sinks),
        )
        return
    far = torch.randn(B, L, H, L // ratio) * 3
    chosen = torch.randint(0, 2, (B, L, L // ratio)).to(torch.uint8) if narrowed else None
    agree(
        lambda n, f, s: plain.attend_weights(n, f, chosen, of, ratio, s, 0.5),
        lambda n, f, s: fused.attend_weights(n, f, chosen, of, ratio, s, 0.5),
        *(near, far, sinks),
    )
    agree(
        lambda n, f, s: plain.attend_mass(n, f, of, ratio, s, 0.5),
        lambda n, f, s: fused.attend_mass(n, f, of, ratio, s, 0.5),
        *(near, far, sinks),
    )


@interpreted
def test_index_scores(fused: ModuleType) -> None:
    torch.manual_seed(4)
    of, raw, weights = documents(), torch.randn(B, L, H, L // 4), torch.randn(B, L, H)
    agree(
        lambda r, w: plain.index_scores(r, w, of, 4),
        lambda r, w: fused.index_scores(r, w, of, 4),
        raw,
        weights,
    )
