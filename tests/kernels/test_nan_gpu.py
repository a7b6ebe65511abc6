"""NaN and infinity in a step's CUDA kernels show where the reference shows them, in their own row alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.gpu.tiles import empty, put, tile
from dsv4.ops.index import decode_select as selecting
from dsv4.ops.linear.decode import MatVec, Mixing, Product, Tasks
from dsv4.ops.linear.prefill_unpack import unpack
from dsv4.ops.mhc import cpu as mhc_cpu
from dsv4.ops.route import cpu as route_cpu
from dsv4.ops.route import decode as routing
from dsv4.ops.rows.cpu import rms_norm
from dsv4.quant.codec import decode, encode_weight
from dsv4.quant.formats import Format, QuantTensor

mhc = pytest.importorskip("dsv4.ops.mhc.decode", reason="Triton is not installed")
pytestmark = pytest.mark.gpu
FORMATS = [Format.NVFP4, Format.MXFP4, Format.FP8, Format.BF16]
ACTS = [torch.bfloat16, torch.float32]
NAN, INF = float("nan"), float("inf")
STREAMS, MIXES, EPS, ITERS = 4, 24, 1e-6, 20


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(11)


def product(x: Tensor, weight: QuantTensor) -> Tensor:
    y = torch.full((len(x), weight.shape[0]), -7.0, device="cuda")
    MatVec([Product(tile(weight), x, y)], len(x)).launch()
    return y


def broken(weight: QuantTensor, row: int, column: int) -> QuantTensor:
    """One code, value or scale of that row made NaN."""
    data, scale = weight.data.clone(), None if weight.scale is None else weight.scale.clone()
    if weight.format is Format.BF16:
        data[row, column] = NAN
    elif weight.format is Format.FP8:
        data[row, column] = 127
    elif weight.format is Format.MXFP4:
        assert scale is not None
        scale[row, column // 32] = 255
    else:
        assert scale is not None
        scale[row, column // 16] = 127
    return replace(weight, data=data, scale=scale)


@pytest.mark.parametrize("act", ACTS, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_input(format: Format, act: torch.dtype, rows: int, value: float) -> None:
    n, k = 80, 1536
    weight = encode_weight(torch.randn(n, k, device="cuda"), format)
    x = torch.randn(rows, k, device="cuda").to(act)
    clean = product(x, weight)
    x[rows - 1, 700] = value
    found = product(x, weight)
    assert not bool(torch.isfinite(found[rows - 1]).any())
    assert torch.equal(found[: rows - 1], clean[: rows - 1])


@pytest.mark.parametrize("act", ACTS, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_weight(format: Format, act: torch.dtype, rows: int) -> None:
    """Its row of the weight, for every row of the batch; unpacked for prompts as well."""
    n, k = 80, 1536
    weight = encode_weight(torch.randn(n, k, device="cuda"), format)
    x = torch.randn(rows, k, device="cuda").to(act)
    clean, bad = product(x, weight), broken(weight, 37, 700)
    found = product(x, bad)
    assert bool(torch.isnan(found[:, 37]).all())
    found[:, 37] = clean[:, 37]
    assert torch.equal(found, clean)
    unpacked = torch.empty(n, k, device="cuda")
    unpack(tile(bad), unpacked)
    assert torch.equal(unpacked.isnan(), decode(bad).isnan())


@pytest.mark.parametrize("act", ACTS, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("half", [0, 1], ids=["gate", "up"])
def test_clamped_swiglu(format: Format, act: torch.dtype, rows: int, half: int) -> None:
    """NaN in an expert's weight passes the clamp, for the pairs that meet it."""
    d, width, experts, k = 512, 64, 8, 3
    stored = [
        [encode_weight(torch.randn(width, d, device="cuda"), format) for _ in range(2)]
        for _ in range(experts)
    ]
    x = torch.randn(rows, d, device="cuda").to(act)
    tasks, chosen = Tasks.empty(rows, k, "cuda"), torch.empty(rows, k, dtype=torch.int32, device="cuda")
    logits = torch.randn(rows, experts, device="cuda")
    logits[:, 5] += 9
    ids = torch.zeros(rows, dtype=torch.long, device="cuda")
    routing.route(logits, None, None, ids, 1.5, act == torch.float32, chosen, tasks)
    found = []
    for is_broken in (False, True):
        if is_broken:
            stored[5][half] = broken(stored[5][half], 20, 300)
        bank = empty(format, (width, d), experts, 2, "cuda")
        for e, pair in enumerate(stored):
            for i, part in enumerate(pair):
                put(bank, e, i, part)
        hidden = torch.full((rows * k, width), -7.0, device="cuda", dtype=act)
        MatVec([Product(bank, x, hidden, "up")], rows, tasks, 1.5).launch()
        found.append(hidden)
    meets = chosen.flatten() == 5
    assert int(meets.sum()) == rows and bool(torch.isnan(found[1][meets, 20]).all())
    found[1][meets, 20] = found[0][meets, 20]
    assert torch.equal(found[1], found[0])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("value", [NAN, -NAN, INF])
def test_route(rows: int, value: float) -> None:
    experts, k = 40, 3
    logits, bias = torch.randn(rows, experts, device="cuda"), torch.randn(experts, device="cuda")
    ids = torch.zeros(rows, dtype=torch.long, device="cuda")
    row = rows - 1
    results = []
    for step in range(3):
        if step == 1:
            logits[row, 33] = value
        elif step == 2:
            logits[row] = value
        tasks, chosen = Tasks.empty(rows, k, "cuda"), torch.empty(rows, k, dtype=torch.int32, device="cuda")
        routing.route(logits, bias, None, ids, 1.5, False, chosen, tasks)
        s = route_cpu.softplus(logits.cpu()).sqrt()
        want = route_cpu.top_indices(s + bias.cpu(), k).sort(1).values
        assert torch.equal(chosen.cpu().long(), want), step
        weights = tasks.weights.view(rows, k)
        assert bool(torch.isfinite(weights[:row]).all())
        assert bool(torch.isnan(weights[row]).any()) == (step > 0)
        assert int(tasks.expert.max()) < experts
        results.append((chosen[:row], weights[:row]))
    for chosen, weights in results[1:]:
        assert torch.equal(chosen, results[0][0]) and torch.equal(weights, results[0][1])


@pytest.mark.parametrize("count,topk", [(1000, 512), (4000, 512), (8000, 100), (70001, 512)])
def test_select(count: int, topk: int) -> None:
    """NaN of either sign is the best, as the reference sorts; rows inside the table whatever the scores."""
    scores = torch.randn(4, count, device="cuda")
    scores[1, ::7], scores[2] = NAN, NAN
    scores[3, 5:9].view(torch.int32).fill_(-1)  # a NaN with every bit set
    scores[3, 20] = -INF
    out = torch.full((4, topk), -7, dtype=torch.int32, device="cuda")
    table, slots = torch.zeros(1, 1, dtype=torch.int32, device="cuda"), torch.zeros(4, device="cuda").long()
    selecting.select_rows(scores, torch.full_like(slots, count - 1), 1, table, slots, count, out)
    want = route_cpu.top_indices(scores.cpu(), topk).sort(1).values
    assert torch.equal(out.cpu().long(), want)


@pytest.mark.parametrize("act", ACTS, ids=str)
@pytest.mark.parametrize(
    "where", ["streams", "infinite stream", "y", "gate", "comb", "fn", "base", "scale", "norm"]
)
def test_mhc_site(where: str, act: torch.dtype) -> None:
    rows, d = 3, 96
    fn, base = torch.randn(MIXES, STREAMS * d) * d**-0.5, torch.randn(MIXES)
    scale, norm = torch.full((MIXES,), 0.7), torch.randn(d)
    streams, y = torch.randn(rows, STREAMS, d).to(act), torch.randn(rows, 2, d)
    gate, comb = torch.rand(rows, STREAMS), torch.rand(rows, STREAMS, STREAMS)
    given = {"streams": streams, "y": y, "gate": gate, "comb": comb, "fn": fn, "base": base}
    given |= {"scale": scale, "norm": norm, "infinite stream": streams}
    # Of the weights, what mixes the streams (columns from 8 on); of the rest, the second row.
    at = {"fn": (14, 50), "base": (14,), "scale": (14,), "norm": (33,)}.get(where, (1, *[1] * 3))
    given[where][at[: given[where].dim()]] = INF if "infinite" in where else NAN

    def run(part: slice) -> list[Tensor]:
        held, old_gate, old_comb = (t[part].cuda() for t in (streams, gate, comb))
        count = len(held)
        partial = torch.full((count, mhc.num_chunks(d), mhc.WIDTH), -7.0, device="cuda")
        mhc.mix_open(y[part].cuda(), old_gate, old_comb, held, fn.cuda(), partial)
        x = torch.full((count, d), -7.0, device="cuda", dtype=act)
        g, c = torch.empty(count, STREAMS, device="cuda"), torch.empty(count, STREAMS, STREAMS, device="cuda")
        site = (base.cuda(), scale.cuda(), held, norm.cuda())
        mhc.mix_close(partial, *site, x, g, c, EPS, EPS)
        weight = tile(encode_weight(torch.ones(16, 64, device="cuda"), Format.BF16))
        small, out = torch.ones(count, 64, device="cuda", dtype=act), torch.empty(count, 16, device="cuda")
        MatVec([Product(weight, small, out)], count, mixing=Mixing(c, ITERS, EPS)).launch()
        return [held, x, g, c]

    found = run(slice(None))
    new = mhc_cpu.post(y.sum(1).to(act), streams, gate, comb)
    x, g, c = mhc_cpu.pre(new, fn.t().contiguous(), base, scale, EPS, EPS, ITERS)
    want = [new, rms_norm(x, norm, EPS), g, c]
    assert not all(bool(torch.isfinite(t).all()) for t in want), "the reference hides it"
    for name, got, wanted in zip(("streams", "x", "gate", "comb"), found, want, strict=True):
        assert torch.equal(torch.isfinite(got.cpu()), torch.isfinite(wanted)), name
    for got, alone in zip(found, run(slice(0, 1)), strict=True):
        assert torch.equal(got[:1].nan_to_num(1e9), alone.nan_to_num(1e9)), "another row changed"
