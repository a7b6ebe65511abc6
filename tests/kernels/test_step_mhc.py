"""The decode step's hyper-connection kernels give what the reference gives."""

from types import SimpleNamespace

import pytest
import torch
from step_support import DTYPES, blank, check, on_gpu, rand, runs, there
from torch import Tensor

from dsv4.errors import DeviceError
from dsv4.ops.linear import ref as linear
from dsv4.ops.mhc import ref
from dsv4.ops.norm.ref import rms_norm
from dsv4.quant.formats import Format, QuantTensor

mhc = pytest.importorskip("dsv4.kernels.mhc", reason="Triton is not installed")
pytestmark = runs
N, M = 4, 24
EPS, HC_EPS = 1e-6, 1e-6
ITERS = 20
# Rows, channels, parts of the output: odd sizes, V4-Flash and V4-Pro, several rows to a block.
SIZES = [(1, 96, 1), (2, 40, 2), (9, 33, 3), (5, 4096, 7), (32, 4096, 2), (32, 7168, 7)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed(dtype: torch.dtype) -> None:
    table = rand(7, 1100, dtype=torch.bfloat16)
    ids = torch.tensor([6, 0, 3, 3])
    out = blank(4, N, 1100, dtype=dtype)
    mhc.embed(there(ids), there(table), out)
    want = linear.embed(ids, QuantTensor(Format.BF16, table, (7, 1100)), dtype)
    assert torch.equal(out.cpu(), want.unsqueeze(1).expand(-1, N, -1))


def site(d: int, mixes: int) -> tuple[Tensor, Tensor, Tensor]:
    fn = rand(mixes, N * d, seed=1) * d**-0.5
    scale = torch.tensor([0.7, 1.3, 0.9])[: 3 if mixes == M else 1]
    counts = torch.tensor([N, N, N * N])[: len(scale)]
    return fn, rand(mixes, seed=2), scale.repeat_interleave(counts)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "d", "parts"), SIZES)
def test_site(rows: int, d: int, parts: int, dtype: torch.dtype) -> None:
    streams, weight = rand(rows, N, d, seed=3, dtype=dtype) * 3, rand(d, seed=4)
    y, gate, comb = rand(rows, parts, d, seed=5), rand(rows, N, seed=6), rand(rows, N, N, seed=7)
    fn, base, scale = site(d, M)
    board = mhc.Board.empty(rows, d, torch.device("cuda"))
    # One board for all, a head in between: what an earlier launch left must not be taken for this one's.
    for given, mixes in ((y, M), (None, M), (None, N), (y.to(dtype), M)):
        held, g, c, x = there(streams), there(gate), there(comb), blank(rows, d, dtype=dtype)
        wanted = (fn[:mixes].contiguous(), base[:mixes].contiguous(), scale[:mixes].contiguous())
        mhc.mix(
            *(
                None if given is None else there(given),
                held,
                *map(there, wanted),
                there(weight),
                g,
                c,
                x,
                board,
            ),
            *(EPS, HC_EPS, ITERS),
        )
        if given is None:
            assert torch.equal(held.cpu(), streams)
        else:
            check(held, ref.post(given.float().sum(1).to(dtype), streams, gate, comb), "streams", ulps=3)
        # From the streams the kernel made: a rounding that fell the other way is no error of the rest.
        made, fn_t = held.cpu(), wanted[0].t().contiguous()
        if mixes == N:
            want = ref.head(made, fn_t, *wanted[1:], EPS, HC_EPS), gate, comb
        else:
            want = ref.pre(made, fn_t, *wanted[1:], EPS, HC_EPS, ITERS)
        check(x, rms_norm(want[0], weight, EPS), "x", ulps=3, share=1e-5)
        check(g, want[1], "gate", ulps=8, share=1e-5)
        check(c, want[2], "comb", ulps=8, share=1e-5)


@on_gpu
@pytest.mark.parametrize("logit", [30.0, 3000.0])
def test_extreme_logits(logit: float) -> None:
    """Sinkhorn of a matrix far from even, and shares at both ends."""
    streams, weight = rand(2, N, 64, seed=3), rand(64, seed=4)
    fn, base, scale = site(64, M)
    base = base * logit
    board = mhc.Board.empty(2, 64, torch.device("cuda"))
    x, g, c = blank(2, 64), blank(2, N), blank(2, N, N)
    mhc.mix(
        *(None, there(streams), there(fn), there(base), there(scale), there(weight), g, c, x, board),
        *(EPS, HC_EPS, ITERS),
    )
    want = ref.pre(streams, fn.t().contiguous(), base, scale, EPS, HC_EPS, ITERS)
    check(g, want[1], "gate", ulps=64, share=1e-5)
    check(c, want[2], "comb", ulps=64, share=2e-5)


@on_gpu
def test_row_alone() -> None:
    """A row gives the same bits alone as among others, however many share its block."""
    d, rows = 4096, 31
    streams, weight = rand(rows, N, d, seed=3, dtype=torch.bfloat16), rand(d, seed=4)
    y, gate, comb = rand(rows, 3, d, seed=5), rand(rows, N, seed=6), rand(rows, N, N, seed=7)
    fn, base, scale = site(d, M)
    found = []
    for part in (slice(None), slice(20, 24), slice(22, 23)):
        held, g, c = there(streams[part]), there(gate[part]), there(comb[part])
        x = blank(len(held), d, dtype=torch.bfloat16)
        board = mhc.Board.empty(len(held), d, torch.device("cuda"))
        mhc.mix(
            *(there(y[part]), held, there(fn), there(base), there(scale), there(weight), g, c, x, board),
            *(EPS, HC_EPS, ITERS),
        )
        found.append((held, x, g, c))
    for among, few, alone in zip(*found, strict=True):
        assert torch.equal(among[22:23], alone) and torch.equal(few[2:3], alone)


@on_gpu
def test_thousands_of_launches() -> None:
    """The blocks wait for each other in every one of them, whatever runs before and after."""
    d, rows = 4096, 8
    streams = there(rand(rows, N, d, seed=3, dtype=torch.bfloat16))
    y, weight = there(rand(rows, 7, d, seed=5, dtype=torch.bfloat16)), there(rand(d, seed=4))
    fn, base, scale = map(there, site(d, M))
    gate, comb = there(rand(rows, N, seed=6)), there(rand(rows, N, N, seed=7))
    board, x = mhc.Board.empty(rows, d, torch.device("cuda")), blank(rows, d, dtype=torch.bfloat16)
    results = []
    for _ in range(2000):
        held, g, c = streams.clone(), gate.clone(), comb.clone()
        mhc.mix(y, held, fn, base, scale, weight, g, c, x, board, EPS, HC_EPS, ITERS)
        results.append(torch.stack((x.float().sum(), held.float().sum(), c.sum())))
    assert bool((torch.stack(results) == results[0]).all())
    assert board.launches.unique().tolist() == [2001]


def test_a_gpu_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SimpleNamespace(multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sizes)
    assert mhc.Board.empty(16, 4096, torch.device("cpu")).groups == 1
    with pytest.raises(
        DeviceError, match=r"32 rows of 4096 channels need 130 resident blocks .* room for 80"
    ):
        mhc.Board.empty(32, 4096, torch.device("cpu"))
