"""mhc/prefill_sm90.cu's own source on the CPU: sites of a prompt as the reference has them, in all
forms that are wanted."""

import ctypes

import pytest
import torch
from prompt_support import BF16, fp8_rows_of, on_twin, rand
from torch import Tensor

from dsv4.ops.linear.prefill_packed import FP8_CODES
from dsv4.ops.mhc import cpu
from dsv4.ops.mhc import prefill_sm90 as sites
from dsv4.ops.rows.cpu import rms_norm
from dsv4.quant.codec import fp8_rows
from tests.support.layouts import plain_rows
from tests.support.twin import needs_compiler, twin_of, unfinished

pytestmark = needs_compiler
twin = twin_of("streams", launch=ctypes.c_char_p)
EPS, HC_EPS, ITERS = 1e-6, 1e-6, 3
FORMS = {FP8_CODES, sites.IN_BF16}
# One row; a tile and a row; more tiles than a block's warps, some of them empty; more than 4,096 channels.
SIZES = [(1, 512), (17, 1024), (300, 512), (9, 4608)]


class Site:
    def __init__(self, rows: int, d: int) -> None:
        self.y, self.streams = rand(rows, d, seed=1).bfloat16(), (3 * rand(rows, 4, d, seed=2)).bfloat16()
        self.gate = rand(rows, 4, seed=3).sigmoid() * 2
        self.comb = cpu.sinkhorn(rand(rows, 4, 4, seed=4), ITERS, HC_EPS).contiguous()
        self.fn, self.base = rand(4 * d, 24, seed=5) / (4 * d) ** 0.5, rand(24, seed=6)
        self.scale, self.norm = rand(24, seed=7).sigmoid(), rand(d, seed=8).sigmoid()

    def run(
        self, twin: ctypes.CDLL, rows: slice = slice(None), has_y: bool = True, seed: int = 0
    ) -> tuple[Tensor, sites.Closed]:
        """Of these rows alone; what earlier launches write is missing until the wait."""
        y, streams, gate, comb = (it[rows] for it in (self.y, self.streams, self.gate, self.comb))
        before = (y, streams, gate, comb) if has_y else (streams,)
        with on_twin(twin, sites, seed):
            with unfinished(twin, *before):
                out, partial = sites.open_site(y if has_y else None, streams, gate, comb, self.fn)
            with unfinished(twin, partial, out):
                closed = sites.close_site(
                    streams=out,
                    partial=partial,
                    base=self.base,
                    scale=self.scale,
                    norm=self.norm,
                    norm_eps=EPS,
                    hc_eps=HC_EPS,
                    iters=ITERS,
                    modes=FORMS,
                    wants_codes=True,
                    wants_x=True,
                )
        return out, closed


def near(got: Tensor | None, want: Tensor, what: str) -> None:
    """BF16: an ulp, where a sum was rounded otherwise; float32: of sums of 24 bits."""
    assert got is not None and got.dtype == want.dtype
    share, least = (2.0**-7, 1e-4) if got.dtype == BF16 else (2e-5, 2e-6)
    excess = (got.double() - want.double()).abs() - share * want.double().abs()
    assert float(excess.max()) <= least, what


@pytest.mark.parametrize("has_y", [True, False])
@pytest.mark.parametrize(("rows", "d"), SIZES)
def test_the_reference(twin: ctypes.CDLL, rows: int, d: int, has_y: bool) -> None:
    site = Site(rows, d)
    streams, got = site.run(twin, has_y=has_y)
    if has_y:
        near(streams, cpu.post(site.y, site.streams, site.gate, site.comb), "streams")
    x, gate, comb = cpu.pre(streams, site.fn, site.base, site.scale, EPS, HC_EPS, ITERS)
    near(got.x, x, "x")
    near(got.gate, gate, "gate")
    near(got.comb, comb, "comb")
    assert got.x is not None and got.normed is not None
    near(got.normed, rms_norm(got.x, site.norm, EPS), "normed")


@pytest.mark.parametrize(("rows", "d"), [(37, 1024), (16, 4608)])
def test_forms_are_those_of_the_codec(twin: ctypes.CDLL, rows: int, d: int) -> None:
    site = Site(rows, d)
    site.streams[3] *= 1e-6
    site.streams[4, :, : d // 2] *= 1e20
    site.streams[5], site.y[5] = 0, 0
    _, got = site.run(twin)
    assert got.normed is not None and got.codes is not None
    assert torch.equal(plain_rows(got.packed[sites.IN_BF16]), got.normed)
    codes, scales = fp8_rows_of(got.packed[FP8_CODES])
    want, its_scales = fp8_rows(got.normed, 128)
    assert torch.equal(codes[:rows], want.view(torch.uint8)) and not codes[rows:].any()
    assert torch.equal(scales[:rows], torch.exp2(its_scales.float() - 127 - 24))
    assert torch.equal(got.codes.data, want.view(torch.uint8)) and torch.equal(got.codes.scale, scales[:rows])


def test_a_row_is_the_same_bits_in_any_company(twin: ctypes.CDLL) -> None:
    """And a NaN stays in its row."""
    site = Site(150, 1024)
    streams, got = site.run(twin)
    site.streams[40, 1, 5], site.y[133, 9] = torch.nan, torch.inf
    for seed, rows in enumerate((slice(0, 1), slice(1, 8), slice(8, 150))):
        its_streams, its = site.run(twin, rows, seed=seed + 1)
        clean = torch.tensor([at not in (40, 133) for at in range(150)[rows]])
        assert torch.equal(its_streams[clean], streams[rows][clean]), rows
        for name in ("x", "normed", "gate", "comb"):
            assert torch.equal(getattr(its, name)[clean], getattr(got, name)[rows][clean]), (name, rows)
    assert its.gate[40 - 8].isnan().all() and its.comb[40 - 8].isnan().all()
