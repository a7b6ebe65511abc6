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


def weights(logits: Tensor) -> tuple[Tensor, Tensor]:
    """gate and comb of a site whose logits these are."""
    return 2 * torch.sigmoid(logits[:, N : 2 * N]), ref.sinkhorn(
        logits[:, 2 * N :].view(-1, N, N), ITERS, HC_EPS
    )


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "d", "parts"), SIZES)
def test_site(rows: int, d: int, parts: int, dtype: torch.dtype) -> None:
    streams, weight = rand(rows, N, d, seed=3, dtype=dtype) * 3, rand(d, seed=4)
    y, last = rand(rows, parts, d, seed=5), rand(rows, M, seed=6) * 2
    fn, base, scale = site(d, M)
    board = mhc.Board.empty(rows, d, torch.device("cuda"))
    # One board for all, a head in between: what an earlier launch left must not be taken for this one's.
    for given, mixes in ((y, M), (None, M), (None, N), (y.to(dtype), M)):
        held, logits, x = there(streams), there(last), blank(rows, d, dtype=dtype)
        wanted = (fn[:mixes].contiguous(), base[:mixes].contiguous(), scale[:mixes].contiguous())
        mhc.mix(
            *(None if given is None else there(given), held, *map(there, wanted), there(weight), logits, x),
            *(board, EPS, HC_EPS, ITERS),
        )
        if given is None:
            assert torch.equal(held.cpu(), streams)
        else:
            want = ref.post(given.float().sum(1).to(dtype), streams, *weights(last))
            check(held, want, "streams", ulps=3, share=1e-5)
        # From the streams the kernel made: a rounding that fell the other way is no error of the rest.
        made, fn_t = held.cpu(), wanted[0].t().contiguous()
        if mixes == N:
            check(
                x,
                rms_norm(ref.head(made, fn_t, *wanted[1:], EPS, HC_EPS), weight, EPS),
                "x",
                ulps=3,
                share=1e-5,
            )
            assert torch.equal(logits.cpu(), last)
            continue
        want = ref.pre(made, fn_t, *wanted[1:], EPS, HC_EPS, ITERS)[0]
        check(x, rms_norm(want, weight, EPS), "x", ulps=3, share=1e-5)
        want = ref.mixes(made, fn_t, EPS) * scale + base
        check(logits[:, N:], want[:, N:], "logits", ulps=8, share=1e-5)


@on_gpu
@pytest.mark.parametrize("size", [30.0, 3000.0])
def test_extreme_logits(size: float) -> None:
    """Sinkhorn of a matrix far from even, and shares at both ends."""
    streams, y, weight = torch.zeros(2, N, 64), rand(2, 1, 64, seed=5), rand(64, seed=4)
    fn, base, scale = site(64, M)
    last = rand(2, M, seed=6) * size
    last[0, 8:] = torch.eye(N).flatten() * size
    for j in range(N):  # one stream at a time shows its row of comb
        streams.zero_()
        streams[:, j] = 1
        held = there(streams)
        board = mhc.Board.empty(2, 64, torch.device("cuda"))
        mhc.mix(
            *(there(y), held, there(fn), there(base), there(scale), there(weight), there(last)),
            *(blank(2, 64), board, EPS, HC_EPS, ITERS),
        )
        check(held, ref.post(y[:, 0], streams, *weights(last)), "streams", ulps=64, share=2e-5)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_streams_that_cancel(dtype: torch.dtype) -> None:
    """Two streams against two, but for a little: x is small, and its size still right."""
    rows, d = 3, 4096
    streams = rand(rows, N, d, seed=3, dtype=dtype)
    for row, rest in ((0, 2.0**-7), (2, 0.0)):
        streams[row, 1] = (-streams[row, 0].float() * (1 + rest)).to(dtype)
        streams[row, 3] = (-streams[row, 2].float() * (1 - rest)).to(dtype)
    fn, base, scale = torch.zeros(M, N * d), torch.zeros(M), torch.ones(M)
    x, weight = blank(rows, d, dtype=dtype), rand(d, seed=4)
    board = mhc.Board.empty(rows, d, torch.device("cuda"))
    mhc.mix(
        *(
            None,
            there(streams),
            there(fn),
            there(base),
            there(scale),
            there(weight),
            there(torch.zeros(rows, M)),
        ),
        *(x, board, EPS, HC_EPS, ITERS),
    )
    want = ref.pre(streams, fn.t().contiguous(), base, scale, EPS, HC_EPS, ITERS)[0]
    check(x, rms_norm(want, weight, EPS), "x", ulps=3, share=1e-5)


@on_gpu
def test_row_alone() -> None:
    """A row gives the same bits alone as among others, however many share its block."""
    d, rows = 4096, 31
    streams, weight = rand(rows, N, d, seed=3, dtype=torch.bfloat16), rand(d, seed=4)
    streams[21, 1:] = -streams[21, :1]  # a neighbour whose input is measured apart
    y, last = rand(rows, 3, d, seed=5), rand(rows, M, seed=6)
    fn, base, scale = site(d, M)
    found = []
    for part in (slice(None), slice(20, 24), slice(22, 23)):
        held, logits = there(streams[part]), there(last[part])
        x = blank(len(held), d, dtype=torch.bfloat16)
        board = mhc.Board.empty(len(held), d, torch.device("cuda"))
        mhc.mix(
            *(there(y[part]), held, there(fn), there(base), there(scale), there(weight), logits, x, board),
            *(EPS, HC_EPS, ITERS),
        )
        found.append((held, x, logits))
    for among, few, alone in zip(*found, strict=True):
        assert torch.equal(among[22:23], alone) and torch.equal(few[2:3], alone)


@on_gpu
def test_thousands_of_launches() -> None:
    """The blocks wait for each other in every one of them, whatever runs before and after."""
    d, rows = 4096, 8
    streams = there(rand(rows, N, d, seed=3, dtype=torch.bfloat16))
    y, weight = there(rand(rows, 7, d, seed=5, dtype=torch.bfloat16)), there(rand(d, seed=4))
    fn, base, scale = map(there, site(d, M))
    last = there(rand(rows, M, seed=6))
    board, x = mhc.Board.empty(rows, d, torch.device("cuda")), blank(rows, d, dtype=torch.bfloat16)
    results = []
    for _ in range(2000):
        held, logits = streams.clone(), last.clone()
        mhc.mix(y, held, fn, base, scale, weight, logits, x, board, EPS, HC_EPS, ITERS)
        results.append(torch.stack((x.float().sum(), held.float().sum(), logits.sum())))
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
