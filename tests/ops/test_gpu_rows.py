"""The GPU backends of norm, qkv, mhc, compress, and the index's queries and keys, against the reference."""

import math

import pytest
import torch
from gpu_support import DEVICE, DTYPES, IS_GPU, MARKS, near, to, use_stand_ins
from ops_support import rand
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
from dsv4.ops.attention import cpu as attention_cpu
from dsv4.ops.attention import prefill as attention_prefill
from dsv4.ops.index import cpu as index_cpu
from dsv4.ops.index import prefill as index_prefill
from dsv4.ops.mhc import cpu as mhc_cpu
from dsv4.ops.mhc import prefill as mhc_prefill
from dsv4.ops.rows import cpu as rows_cpu
from dsv4.ops.rows import prefill as rows_prefill
from dsv4.quant.codec import decode, encode_kv
from dsv4.quant.formats import Format, QuantTensor

pytestmark = MARKS


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)


def turns(count: int, pairs: int) -> tuple[Tensor, Tensor]:
    angle = 3 * rand(count, pairs, seed=90)
    return angle.cos(), angle.sin()


@DTYPES
@pytest.mark.parametrize("shape", [(0, 8), (1, 96), (37, 40), (5, 3, 512), (2, 4099)])
def test_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = (3 * rand(*shape)).to(dtype), rand(shape[-1], seed=1)
    for w in (None, weight):
        held = None if w is None else w.to(DEVICE)
        got = rows_prefill.rms_norm(*to(x), held, 1e-6)
        near(got, rows_cpu.rms_norm(x, w, 1e-6), dtype, f"{shape}", ulps=1)
        if x.numel():
            assert torch.equal(rows_prefill.rms_norm(*to(x[-1:]), held, 1e-6)[0], got[-1])


@DTYPES
@pytest.mark.parametrize(("width", "pairs"), [(128, 32), (80, 8), (96, 32)])
def test_queries_and_entries(width: int, pairs: int, dtype: torch.dtype) -> None:
    q, x = rand(11, 3, width).to(dtype), rand(11, width, seed=1).to(dtype)
    weight, (cos, sin) = rand(width, seed=2), turns(11, pairs)
    got = attention_prefill.queries(*to(q, cos, sin), 1e-6)
    near(got, attention_cpu.queries(q, cos, sin, 1e-6), dtype, "queries")
    assert torch.equal(attention_prefill.queries(*to(q[7:8], cos[7:8], sin[7:8]), 1e-6)[0], got[7])
    got = attention_prefill.entries(*to(x, weight, cos, sin), 1e-6)
    near(got, attention_cpu.entries(x, weight, cos, sin, 1e-6), dtype, "entries")


def hostile(count: int, width: int) -> Tensor:
    """Rows of zeros, infinity, NaN, ties between codes, tiny and huge values."""
    x = rand(count, width) * torch.exp2(torch.arange(count) * 3.0 - 30).unsqueeze(1)
    x[0] = 0.0
    x[1, 3], x[2, 5], x[3, 1] = math.inf, -math.inf, math.nan
    x[4] = (torch.arange(width) - width // 2) * 0.0625  # with 448 for a top, halves of E4M3's steps
    x[4, 0] = 448.0
    x[5] = (torch.arange(width) % 29 - 14) * 0.25  # with 6 for a top, halves of E2M1's steps
    x[5, ::32] = 6.0
    return x


@DTYPES
@pytest.mark.parametrize(("width", "rope"), [(80, 16), (96, 64), (512, 64)])
def test_stored_rows_are_the_codecs_bits(width: int, rope: int, dtype: torch.dtype) -> None:
    x = hostile(24, width).to(dtype)
    want, got = encode_kv(x, rope, Format.KV8), attention_prefill.store(*to(x), rope, Format.KV8, True)
    assert got.scale is not None and want.scale is not None and got.shape == want.shape
    assert torch.equal(got.scale.cpu(), want.scale)
    is_nan = torch.isnan(decode(want))
    codes, wanted = got.data.cpu(), want.data
    nope = width - rope
    same = (codes[:, :nope] == wanted[:, :nope]) | is_nan[:, :nope]
    assert bool(same.all()) and torch.equal(codes[:, nope:], wanted[:, nope:])
    moved = QuantTensor(got.format, codes, got.shape, got.scale.cpu(), rope_dim=rope)
    assert torch.equal(torch.isnan(decode(moved)), is_nan)
    plain = attention_prefill.store(*to(x), rope, Format.BF16, True)
    assert torch.equal(
        plain.data.cpu().nan_to_num(), attention_cpu.store(x, rope, Format.BF16, True).data.nan_to_num()
    )
    assert attention_prefill.store(*to(x[:0]), rope, Format.KV8, True).data.shape == (0, want.data.shape[1])


@DTYPES
def test_index_queries_and_keys(dtype: torch.dtype) -> None:
    """Rotation and transform in the reference's order: bit for bit, FP4 codes included."""
    q, (cos, sin) = rand(9, 4, 64).to(dtype), turns(9, 16)
    want = index_cpu.queries(q, cos, sin, True)
    got = index_prefill.queries(*to(q, cos, sin), True).cpu()
    # On a GPU a rotation's product and sum may be fused: a value at a tie can fall to the other side.
    assert got.dtype == dtype and float((got != want).float().mean()) < 0.01
    near(
        index_prefill.queries(*to(q, cos, sin), False), index_cpu.queries(q, cos, sin, False), dtype, "no qat"
    )
    x, weight = rand(9, 64, seed=3).to(dtype), rand(64, seed=4)
    stored = index_cpu.keys(x, weight, cos, sin, 1e-6, True, Format.MXFP4)
    made = index_prefill.keys(*to(x, weight, cos, sin), 1e-6, True, Format.MXFP4)
    assert made.scale is not None and stored.scale is not None and made.format is Format.MXFP4
    assert torch.equal(made.scale.cpu(), stored.scale)
    assert float((made.data.cpu() != stored.data).float().mean()) < 0.01
    alone = index_prefill.keys(*to(x[5:6], weight, cos[5:6], sin[5:6]), 1e-6, True, Format.MXFP4)
    assert torch.equal(alone.data[0], made.data[5])


@pytest.mark.skipif(not IS_GPU, reason="the published sizes have a kernel of their own on a GPU")
def test_index_queries_of_published_sizes() -> None:
    """Bit for bit but for fused rotations; without turning all of it, special values too."""
    q, (cos, sin) = rand(41, 64, 128).bfloat16(), turns(41, 32)
    want = index_cpu.queries(q, cos, sin, True)
    got = index_prefill.queries(*to(q, cos, sin), True)
    assert float((got.cpu() != want).float().mean()) < 0.01
    alone = index_prefill.queries(*to(q[7:8], cos[7:8], sin[7:8]), True)
    assert torch.equal(alone[0], got[7])
    x = rand(300, 1, 128, seed=1)
    x = torch.cat((x, x[:8] * 1e-20, x[:8] * 1e30, hostile(24, 128).unsqueeze(1))).bfloat16()
    still = (torch.ones(len(x), 32), torch.zeros(len(x), 32))
    want, got = index_cpu.queries(x, *still, True), index_prefill.queries(*to(x, *still), True).cpu()
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_fp4_codes_are_the_codecs() -> None:
    """Without turning, and with a transform undone by itself: every tie and every special value."""
    x = hostile(24, 64)[[0, 4, 5, 8, 12, 20]]
    still = (torch.ones(6, 4), torch.zeros(6, 4))
    want = index_cpu.queries(x.unsqueeze(1), *still, True)
    got = index_prefill.queries(*to(x.unsqueeze(1), *still), True)
    assert torch.equal(got.cpu(), want)


@DTYPES
@pytest.mark.parametrize("depth", [96, 1100] if IS_GPU else [136])
def test_hyper_connections(depth: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    n, tokens = 4, 66 if IS_GPU else 18
    streams = rand(tokens, n, depth).to(dtype)
    fn, base, scale = 0.1 * rand(n * depth, 24, seed=1), rand(24, seed=2), 1 + 0.1 * rand(24, seed=3)
    want = mhc_cpu.pre(streams, fn, base, scale, 1e-6, 1e-6, 20)
    got = mhc_prefill.pre(*to(streams, fn, base, scale), 1e-6, 1e-6, 20)
    near(got[0], want[0], dtype, "x")
    near(got[1], want[1], torch.float32, "gate")
    near(got[2], want[2], torch.float32, "comb")
    x = rand(tokens, depth, seed=5).to(dtype)
    after = mhc_prefill.post(*to(x, streams, want[1], want[2]))
    near(after, mhc_cpu.post(x, streams, want[1], want[2]), dtype, "post")
    for t in (0, tokens - 1):
        alone = mhc_prefill.pre(*to(streams[t : t + 1], fn, base, scale), 1e-6, 1e-6, 20)
        assert all(torch.equal(a[0], b[t]) for a, b in zip(alone, got, strict=True)), f"token {t}"
        one = mhc_prefill.post(*to(*(v[t : t + 1] for v in (x, streams, want[1], want[2]))))
        assert torch.equal(one[0], after[t])
    monkeypatch.setattr(mhc_prefill, "_MANY", 1)
    wide = mhc_prefill.pre(*to(streams, fn, base, scale), 1e-6, 1e-6, 20)
    assert all(torch.equal(a, b) for a, b in zip(wide, got, strict=True)), "the tiles of many tokens"
    fn, base, scale = fn[:, :4].contiguous(), base[:4], scale[:1]
    head = mhc_prefill.head(*to(streams, fn, base, scale), 1e-6, 1e-6)
    near(head, mhc_cpu.head(streams, fn, base, scale, 1e-6, 1e-6), dtype, "head")


def test_streams_may_be_one_vector_seen_four_times() -> None:
    x = rand(5, 96).bfloat16()
    streams = x.unsqueeze(1).expand(-1, 4, -1)
    fn, base, scale = 0.1 * rand(384, 24, seed=1), rand(24, seed=2), torch.ones(24)
    want = mhc_cpu.pre(streams, fn, base, scale, 1e-6, 1e-6, 3)
    there = to(x)[0].unsqueeze(1).expand(-1, 4, -1)
    got = mhc_prefill.pre(there, *to(fn, base, scale), 1e-6, 1e-6, 3)
    near(got[0], want[0], torch.bfloat16, "x")
    after = mhc_prefill.post(*to(x), there, got[1], got[2])
    near(after, mhc_cpu.post(x, streams, want[1], want[2]), torch.bfloat16, "post")
    empty = mhc_prefill.pre(there[:0], *to(fn, base, scale), 1e-6, 1e-6, 3)
    assert [list(t.shape) for t in empty] == [[0, 96], [0, 4], [0, 4, 4]]


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (128, False), (3, True), (5, False)])
def test_pool(ratio: int, overlap: bool) -> None:
    """Chunks that begin inside blocks: rows from this step and from the tail, none from before position 0."""
    width, tail_rows = 20, ratio * (2 if overlap else 1) + 8
    columns = width * (2 if overlap else 1)
    spans = [
        (1, 0, 2 * ratio + 1),
        (0, 3 * ratio + 2, ratio + 3),
        (2, ratio - 1, 1),
        (3, 7 * ratio, ratio - 1),
    ]
    at = [(slot, p, start) for slot, start, count in spans for p in range(start, start + count)]
    slots, positions, first = (torch.tensor(v) for v in zip(*at, strict=True))
    values, scores = rand(len(at), columns), 5 * rand(len(at), columns, seed=1)
    tails = rand(4, tail_rows, columns, seed=2), rand(4, tail_rows, columns, seed=3)
    closing = ((positions + 1) % ratio == 0).nonzero().squeeze(1)
    where = (closing, slots, positions, first)
    want = attention_cpu.pool(values, scores, *tails, *where, ratio, overlap)
    got = attention_prefill.pool(*to(values, scores, *tails, *where), ratio, overlap)
    near(got, want, torch.float32, "pooled")
    alone = attention_prefill.pool(*to(values, scores, *tails, closing[1:2], *where[1:]), ratio, overlap)
    assert torch.equal(alone[0], got[1])
    none = attention_prefill.pool(*to(values, scores, *tails, closing[:0], *where[1:]), ratio, overlap)
    assert none.shape == (0, width)
