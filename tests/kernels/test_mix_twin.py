"""mhc/decode_mix.cu's own source on the CPU: a site's next input, gate and comb as the reference has them."""

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.gpu.shapes import MIX_CHUNK, MIX_WIDTH, mix_chunks
from dsv4.ops.linear.cpu import round_input
from dsv4.ops.mhc import cpu
from dsv4.ops.mhc import decode as mhc
from dsv4.ops.rows.cpu import rms_norm
from tests.support.twin import needs_compiler, twin_of, unfinished

pytestmark = needs_compiler
twin = twin_of("mix", launch=ctypes.c_char_p)
N, M, EPS, HC_EPS = 4, 24, 1e-6, 1e-5
F32, BF16 = torch.float32, torch.bfloat16
# Odd sizes; one item a thread; Flash's and Pro's widths; the widest.
SIZES = [(2, 40), (1, 4096), (2, 7168), (1, 8192)]


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Site:
    def __init__(self, rows: int, d: int, dtype: torch.dtype, mixes: int = M) -> None:
        self.streams, self.weight = (rand(rows, N, d, seed=1) * 3).to(dtype), rand(d, seed=2)
        self.fn, self.base = rand(mixes, N * d, seed=3) * d**-0.5, rand(mixes, seed=4)
        self.scale = torch.tensor([0.7, 1.3, 0.9]).repeat_interleave(torch.tensor([N, N, N * N]))[:mixes]
        # By chunk, as mhc/decode_open.cu leaves it; beyond the last column nobody looks.
        self.partial = torch.full((rows, mix_chunks(d), MIX_WIDTH), torch.nan)
        columns = [m + (m >= N) for m in range(mixes)]
        for chunk in range(mix_chunks(d)):
            channels = slice(chunk * MIX_CHUNK, (chunk + 1) * MIX_CHUNK)
            of = self.streams[..., channels].float()
            products = of.flatten(1) @ self.fn.view(mixes, N, d)[..., channels].flatten(1).t()
            self.partial[:, chunk, columns] = products
            self.partial[:, chunk, N] = of.square().sum((1, 2))

    def close(
        self,
        twin: ctypes.CDLL,
        monkeypatch: pytest.MonkeyPatch,
        activations: str = "a16",
        seed: int = 0,
        **more: Tensor,
    ) -> dict[str, Tensor | None]:
        """What the launcher has the kernel write."""

        def call(source: str, kernel: str, device: object, given: Any, blocks: int, **how: int) -> None:
            assert source == "mhc/decode_mix" and how["threads"] == 512
            problem = twin.launch(ctypes.byref(given), kernel == "close_kernel<float>", blocks, seed)
            assert problem == b"", problem.decode()

        monkeypatch.setattr(mhc, "call", call)
        is_last = len(self.fn) == N
        blank = torch.full_like(self.streams[:, 0], torch.nan)
        out = {
            "x": blank,
            "x_in": None if activations == "a16" else blank.clone(),
            "gate": None if is_last else torch.full((len(blank), N), torch.nan),
            "comb": None if is_last else torch.full((len(blank), N, N), torch.nan),
            **more,
        }
        with unfinished(twin, self.partial, self.streams):
            mhc.mix_close(
                partial=self.partial,
                base=self.base,
                scale=self.scale,
                streams=self.streams,
                weight=self.weight,
                norm_eps=EPS,
                hc_eps=HC_EPS,
                activations=activations,
                **out,
            )
        return out


def close_to(got: Tensor | None, want: Tensor, share: float = 1e-5) -> None:
    assert got is not None and got.dtype == want.dtype
    eps = torch.finfo(got.dtype).eps if got.dtype == BF16 else 0.0
    excess = (got.double() - want.double()).abs() - 3 * eps * want.double().abs()
    assert float(excess.max()) <= share * float(want.abs().max()), float(excess.max())


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "d"), SIZES)
def test_site(
    twin: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, rows: int, d: int, dtype: torch.dtype
) -> None:
    site = Site(rows, d, dtype)
    got = site.close(twin, monkeypatch)
    x, gate, comb = cpu.pre(site.streams, site.fn.t().contiguous(), site.base, site.scale, EPS, HC_EPS, 1)
    close_to(got["x"], rms_norm(x, site.weight, EPS))
    close_to(got["gate"], gate)
    # The first of Sinkhorn's rounds: columns alone, since the rows are even.
    assert got["comb"] is not None
    close_to(got["comb"] / (got["comb"].sum(1, keepdim=True) + HC_EPS), comb)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_head(twin: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    site = Site(2, 1024, dtype, mixes=N)
    want = cpu.head(site.streams, site.fn.t().contiguous(), site.base, site.scale, EPS, HC_EPS)
    got = site.close(twin, monkeypatch)
    close_to(got["x"], rms_norm(want, site.weight, EPS))
    kept = site.close(twin, monkeypatch, seed=1, mixed=torch.full_like(want, torch.nan))
    close_to(kept["mixed"], want)
    assert got["x"] is not None and kept["x"] is not None and torch.equal(kept["x"], got["x"])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "d"), SIZES)
def test_mean_of_the_streams(
    twin: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, rows: int, d: int, dtype: torch.dtype
) -> None:
    """A layer's tap lands in its columns of a wider row; all other outputs are as without it."""
    site = Site(rows, d, dtype)
    taps = torch.full((rows, 3 * d), torch.nan, dtype=dtype)
    without, got = site.close(twin, monkeypatch), site.close(twin, monkeypatch, mean=taps[:, d : 2 * d])
    close_to(taps[:, d : 2 * d], site.streams.float().mean(1).to(dtype))
    assert taps[:, :d].isnan().all() and taps[:, 2 * d :].isnan().all()
    for name in ("x", "gate", "comb"):
        assert torch.equal(got[name], without[name]), name  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("activations", ["a8", "a4"])
@pytest.mark.parametrize(("rows", "d"), SIZES)
def test_input_of_quantised_products(
    twin: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    d: int,
    activations: str,
    dtype: torch.dtype,
) -> None:
    """x is what it is without; beside it lies x as the reference rounds it, bit for bit."""
    site = Site(rows, d, dtype)
    site.weight[d // 2] = 3e4
    want = site.close(twin, monkeypatch)["x"]
    got = site.close(twin, monkeypatch, activations, seed=1)
    assert got["x"] is not None and got["x_in"] is not None and want is not None
    assert torch.equal(got["x"], want), "other warps were slow"
    assert torch.equal(got["x_in"], round_input(got["x"], activations))
