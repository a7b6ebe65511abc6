"""Blocks: scales and codes of FP8, MXFP4, NVFP4 and KV8 against a second implementation and examples."""

import math

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dsv4.quant import codec
from dsv4.quant.formats import Format, QuantTensor, empty_rows

NAN, INF = math.nan, math.inf


def rows(*values: float, width: int) -> torch.Tensor:
    """One row that starts with the values and ends in zeros."""
    out = torch.zeros(1, width)
    out[0, : len(values)] = torch.tensor(values)
    return out


def spread(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Gaussian times 2^u: neighbouring blocks get very different scales."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-30, 30, (*shape[:-1], 1), generator=generator).float()
    within = torch.randint(-6, 6, shape, generator=generator).float()
    return torch.randn(shape, generator=generator) * torch.exp2(powers + within)


FINITE_ROWS = hnp.arrays(
    np.float32,
    st.integers(1, 150),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
    | st.floats(-500, 500, width=32)
    | st.sampled_from([0.0, 448.0, 6.0, 1e4, 1e-4, 1e-40]),
)


@settings(max_examples=150, deadline=None)
@given(FINITE_ROWS, st.sampled_from([64, 128]))
def test_fp8_rows_equal_the_oracle(x: np.ndarray, block: int) -> None:
    codes, scale = codec.fp8_rows(torch.from_numpy(x).unsqueeze(0), block)
    want_codes, want_scale = oracle.fp8_row(x, block)
    assert scale[0].tolist() == want_scale.tolist()
    assert codes[0].tolist() == want_codes.tolist()


@settings(max_examples=150, deadline=None)
@given(FINITE_ROWS)
def test_mxfp4_rows_equal_the_oracle(x: np.ndarray) -> None:
    codes, scale = codec.mxfp4_rows(torch.from_numpy(x).unsqueeze(0))
    want_codes, want_scale = oracle.mxfp4_row(x)
    assert scale[0].tolist() == want_scale.tolist()
    assert codes[0].tolist() == want_codes.tolist()


def test_fp8_worked_example() -> None:
    x = rows(0.013, -0.5, 1, 3.14159, -7.7, 100, 447, -449, width=64)
    _, scale = codec.fp8_rows(x, 64)
    assert scale.tolist() == [[128]]  # 2: one value exceeds 448
    want = rows(0.01171875, -0.5, 1, 3.25, -7.5, 96, 448, -448, width=64)
    assert torch.equal(codec.fp8_round(x, 64), want)


def test_mxfp4_worked_example() -> None:
    x = rows(0, 0.1, -0.3, 0.7, 1, -1.9, 2.4, 3.3, width=32)
    _, scale = codec.mxfp4_rows(x)
    assert scale.tolist() == [[127]]  # ceil: 3.3/6 = 0.55 -> 1
    assert torch.equal(codec.mxfp4_round(x), rows(0, 0, -0.5, 0.5, 1, -2, 2, 3, width=32))


NV_EXAMPLE = (0.02, -0.11, 0.37, -0.95, 1.2, -1.3, 2, 2.6, -0.5, 0.4, 0, -0.07, 0.9, -2.2, 1.7, 0.3)


def test_nvfp4_worked_example() -> None:
    g = torch.tensor(4 / 2688)
    codes, scale = codec.nvfp4_rows(rows(*NV_EXAMPLE, width=16), g)
    assert codec.e4m3_decode(scale).tolist() == [[288]]  # 2.6 / 6g = 291.2
    want = [0, -0.5, 1, -2, 3, -3, 4, 6, -1, 1, 0, -0.0, 2, -6, 4, 0.5]
    assert codec.e2m1_decode(codes)[0].tolist() == want
    values = codec.decode(QuantTensor(Format.NVFP4, codec.pack_nibbles(codes), (1, 16), scale, float(g)))
    # 288 * 4/2688 = 3/7; printed to six places.
    printed = [0, -0.214286, 0.428571, -0.857143, 1.285714]
    assert values[0, :5].tolist() == pytest.approx(printed, abs=5e-7)


def test_zero_blocks() -> None:
    zeros = torch.zeros(2, 128)
    codes, scale = codec.fp8_rows(zeros, 128)
    assert not codes.any() and scale.tolist() == [[127 - 22]] * 2
    codes, scale = codec.mxfp4_rows(zeros)
    assert not codes.any() and scale.tolist() == [[127 - 126] * 4] * 2
    codes, scale = codec.nvfp4_rows(zeros, torch.tensor(1.0))
    assert not codes.any() and not codec.e4m3_decode(scale).isnan().any()
    for round in (lambda x: codec.fp8_round(x, 64), codec.mxfp4_round, codec.nvfp4_round):
        assert torch.equal(round(zeros), zeros)
    for format in Format:
        if format is not Format.KV8:
            q = codec.encode_weight(zeros, format)
            assert torch.equal(codec.decode(q), zeros) and q.global_scale == 1.0


def test_fp8_floor_scale() -> None:
    """Below 1e-4 the scale no longer shrinks: the smallest step is 2^-9 * 2^-22."""
    x = rows(9e-5, 2.0**-31, 2.0**-32, 2.0**-33, width=64)
    _, scale = codec.fp8_rows(x, 64)
    assert scale.tolist() == [[105]]
    # 2^-32 is half a step, a tie, and goes to the even code 0.
    got = codec.fp8_round(x, 64)[0]
    assert got[1:4].tolist() == [2.0**-31, 0, 0]


def test_nvfp4_weight_scales() -> None:
    w = spread((32, 64), 3) * 1e-3
    q = codec.encode_weight(w, Format.NVFP4)
    assert q.scale is not None
    assert q.global_scale == pytest.approx(float(w.abs().max()) / 2688, rel=2**-24)
    blocks = w.unflatten(1, (-1, 16)).abs().amax(-1)
    where = int(blocks.argmax())
    assert q.scale.flatten()[where] == 0x7E  # the largest block gets exactly 448
    # Oracle, in float64 from the float32 global scale; a double rounding could only move exact ties.
    want = np.clip(blocks.numpy().astype(np.float64) / (6 * np.float32(q.global_scale)), 2**-9, 448)
    np.testing.assert_array_equal(q.scale.numpy(), oracle.e4m3_encode(want))


def test_nvfp4_given_global_scale_is_used() -> None:
    """w1 and w3 of an expert share one global scale."""
    w = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    q = codec.encode_weight(w, Format.NVFP4, global_scale=0.01)
    assert q.global_scale == float(np.float32(0.01))
    assert q.scale is not None
    amax = w.unflatten(1, (-1, 16)).abs().amax(-1).numpy()
    want = oracle.e4m3_encode(np.clip(amax.astype(np.float64) / (6 * np.float32(0.01)), 2**-9, 448))
    np.testing.assert_array_equal(q.scale.numpy(), want)


def test_mxfp4_decode_is_exact() -> None:
    """Any codes under any scale up to 2^125, where 6 * scale still is a float32."""
    generator = np.random.default_rng(5)
    data = generator.integers(0, 256, (253, 32), dtype=np.uint8)
    scale = np.repeat(np.arange(253, dtype=np.uint8)[:, None], 2, axis=1)
    q = QuantTensor(Format.MXFP4, torch.from_numpy(data), (253, 64), torch.from_numpy(scale))
    np.testing.assert_array_equal(codec.decode(q).numpy(), oracle.decode_mxfp4(data, scale))


def test_mxfp4_values_survive_another_encoding() -> None:
    values = codec.mxfp4_round(spread((64, 96), 6))
    q = codec.encode_weight(values, Format.MXFP4)
    assert torch.equal(codec.decode(q), values)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Relative error and cosine, in float64."""
    got, want = got.double(), want.double()
    cosine = (got * want).sum() / (got.norm() * want.norm())
    return float((got - want).norm() / want.norm()), float(cosine)


def as_weight(format: Format) -> object:
    return lambda x: codec.decode(codec.encode_weight(x, format))


# Published to three or four digits, from other samples: half a unit of the last digit and the sampling noise.
@pytest.mark.parametrize(
    ("name", "round", "error", "cosine", "slack"),
    [
        ("bf16", lambda x: x.to(torch.bfloat16).float(), 0.0017, 0.9999986, 5e-5),
        ("fp8 1x128", lambda x: codec.fp8_round(x, 128), 0.0265, 0.99965, 1e-4),
        ("fp8 1x64", lambda x: codec.fp8_round(x, 64), 0.0265, 0.99965, 1e-4),
        ("fp8 128x128", as_weight(Format.FP8), 0.0265, 0.99965, 1e-4),
        ("mxfp4", codec.mxfp4_round, 0.115, 0.99333, 6e-4),
        ("mxfp4 weight", as_weight(Format.MXFP4), 0.115, 0.99333, 6e-4),
        ("nvfp4", codec.nvfp4_round, 0.0951, 0.99548, 2e-4),
        ("nvfp4 weight", as_weight(Format.NVFP4), 0.0951, 0.99548, 2e-4),
    ],
)
def test_error_on_gaussian_values(
    name: str, round: object, error: float, cosine: float, slack: float
) -> None:
    x = torch.randn(512, 4096, generator=torch.Generator().manual_seed(7))
    got, got_cosine = relative_error(round(x), x)  # type: ignore[operator]
    assert got == pytest.approx(error, abs=slack), name
    assert got_cosine == pytest.approx(cosine, abs=2e-5), name


def test_rounding_bfloat16_equals_rounding_its_float32() -> None:
    x = spread((8, 256), 8).to(torch.bfloat16)
    for round in (lambda v: codec.fp8_round(v, 64), codec.mxfp4_round):
        # FP8 and FP4 values times a power of two fit BF16, so the cast back loses nothing.
        assert torch.equal(round(x).float(), round(x.float()))


@pytest.mark.parametrize("shape", [(1, 2), (130, 200), (128, 128), (257, 50), (3, 300)])
def test_fp8_weight_tiles(shape: tuple[int, int]) -> None:
    """Each 128x128 tile, partial ones at the edges included, has the scale of its own largest value."""
    w = spread(shape, 9)
    q = codec.encode_weight(w, Format.FP8)
    assert q.scale is not None and q.data.shape == shape
    assert q.scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    for i in range(q.scale.shape[0]):
        for j in range(q.scale.shape[1]):
            at = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            tile = w[at].flatten().numpy()
            codes, scale = oracle.fp8_row(tile, len(tile))
            assert q.scale[i, j] == scale[0]
            np.testing.assert_array_equal(q.data[at].flatten().numpy(), codes)
    want = oracle.decode_fp8(q.data.numpy(), oracle.E8M0[q.scale.numpy()])
    np.testing.assert_array_equal(codec.decode(q).numpy(), want)


def test_fp8_float_scales_multiply() -> None:
    data = torch.randint(0, 127, (130, 140), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    scale = torch.tensor([[0.3, 7.1e-5], [12.5, 0.9]])
    got = codec.decode(QuantTensor(Format.FP8, data, (130, 140), scale))
    np.testing.assert_array_equal(got.numpy(), oracle.decode_fp8(data.numpy(), scale.numpy()))


@pytest.mark.parametrize("width", [2, 18, 30, 46])
def test_partial_blocks_of_four_bit_weights(width: int) -> None:
    """The last block is shorter; its scale is that of the values it has."""
    w = spread((5, width), width)
    for format, block in ((Format.MXFP4, 32), (Format.NVFP4, 16)):
        whole = codec.decode(codec.encode_weight(w, format, 0.5 if format is Format.NVFP4 else None))
        assert whole.shape == w.shape
        for start in range(0, width, block):
            part = w[:, start : start + block]
            alone = codec.encode_weight(part, format, 0.5 if format is Format.NVFP4 else None)
            assert torch.equal(whole[:, start : start + block], codec.decode(alone)), (format, start)


def test_large_and_infinite_values_saturate() -> None:
    """1e4 is an ordinary value; an infinity keeps its sign, becomes no NaN and leaves other blocks alone."""
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(2))
    x[0, :4] = torch.tensor([1e4, -1e4, 500.0, -500.0])
    hostile = x.clone()
    hostile[1, 0], hostile[1, 1] = INF, -INF
    for name, round in (
        ("fp8", lambda v: codec.fp8_round(v, 64)),
        ("mxfp4", codec.mxfp4_round),
        ("nvfp4", codec.nvfp4_round),
    ):
        got = round(hostile)
        assert not got.isnan().any(), name
        assert got[1, 0] > 3e38 and got[1, 1] < -3e38, name
        assert torch.equal(got[0], round(x)[0]), name
    # Half a step of the largest block: 16 of 448 for FP8, 1 of 6 for FP4.
    assert codec.fp8_round(x, 64)[0, 0] == pytest.approx(1e4, rel=16 / 448)
    assert codec.mxfp4_round(x)[0, 0] == pytest.approx(1e4, rel=1 / 4)
    assert codec.nvfp4_round(x)[0, 0] == pytest.approx(1e4, rel=1 / 16)


def test_nan_is_seen_and_stays_in_its_block() -> None:
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(4))
    x[1, 70] = NAN
    for name, round, block in (
        ("fp8", lambda v: codec.fp8_round(v, 64), 64),
        ("mxfp4", codec.mxfp4_round, 32),
    ):
        got = round(x)
        start = 70 // block * block
        assert got[1, start : start + block].isnan().all(), name
        got[1, start : start + block] = 0
        assert not got.isnan().any(), name
    assert codec.nvfp4_round(x)[1].isnan().any() and not codec.nvfp4_round(x)[[0, 2]].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "rope"), [(512, 64), (128, 64), (200, 6), (580, 64)])
def test_kv8_is_lossless_after_rounding(dtype: torch.dtype, width: int, rope: int) -> None:
    """The cache stores what attention would have seen without it, bit for bit."""
    x = spread((40, width), width)
    x[1] = 0
    x[2] *= 1e4
    x[3, ::2] = 0
    x = x.to(dtype)
    nope = width - rope
    x[:, :nope] = codec.fp8_round(x[:, :nope], 64)
    q = codec.encode_kv(x, rope, Format.KV8)
    assert torch.equal(codec.decode(q), x.float())
    store = empty_rows(Format.KV8, 50, width, rope, dtype)
    at = torch.arange(45, 5, -1)
    store.put(at, q)
    assert torch.equal(codec.decode(store.take(at)), x.float())
    assert torch.equal(codec.decode(store)[6:46].flip(0), x.float())
    assert not codec.decode(store)[:6].any() and not codec.decode(store)[46:].any()


def test_index_keys_are_lossless_after_rounding() -> None:
    keys = codec.mxfp4_round(spread((20, 128), 12))
    for format in (Format.MXFP4, Format.F32):
        assert torch.equal(codec.decode(codec.encode_kv(keys, 0, format)), keys)
    assert torch.equal(codec.decode(codec.encode_kv(keys, 0, Format.BF16)), keys.to(torch.bfloat16).float())


def test_bytes_per_cache_row() -> None:
    x = torch.zeros(3, 512)
    entry = codec.encode_kv(x.to(torch.bfloat16), 64, Format.KV8)
    assert entry.num_bytes == 3 * 584 and entry.data.shape == (3, 448 + 128)
    assert codec.encode_kv(x, 64, Format.KV8).num_bytes == 3 * (584 + 128)
    key = codec.encode_kv(torch.zeros(3, 128), 0, Format.MXFP4)
    assert key.num_bytes == 3 * 68
    assert empty_rows(Format.KV8, 7, 512, 64).num_bytes == 7 * 584
    assert empty_rows(Format.KV8, 7, 512, 64, torch.float32).num_bytes == 7 * 712
    assert empty_rows(Format.MXFP4, 7, 128).num_bytes == 7 * 68
    assert empty_rows(Format.BF16, 7, 512).num_bytes == 7 * 1024
    assert empty_rows(Format.F32, 7, 512).num_bytes == 7 * 2048


def test_bytes_per_weight() -> None:
    w = torch.zeros(256, 512)
    want = {
        Format.F32: 4 * 256 * 512,
        Format.BF16: 2 * 256 * 512,
        Format.FP8: 256 * 512 + 2 * 4,
        Format.MXFP4: 256 * 512 // 2 + 256 * 512 // 32,
        Format.NVFP4: 256 * 512 // 2 + 256 * 512 // 16 + 4,
    }
    assert {format: codec.encode_weight(w, format).num_bytes for format in want} == want


@pytest.mark.parametrize(
    ("format", "scale", "global_scale", "is_bad"),
    [
        (Format.MXFP4, [[127, 254, 0]], 1.0, False),
        (Format.MXFP4, [[127, 255, 0]], 1.0, True),
        (Format.FP8, [[127, 254, 0x7F]], 1.0, False),
        (Format.FP8, [[127, 255, 0]], 1.0, True),
        (Format.FP8, [[1.0, NAN, 2.0]], 1.0, True),
        (Format.FP8, [[1.0, INF, 2.0]], 1.0, True),
        (Format.FP8, [[1.0, 3.5, 2.0]], 1.0, False),
        (Format.NVFP4, [[1, 0x7E, 0]], 1.0, False),
        (Format.NVFP4, [[1, 0x7F, 0]], 1.0, True),
        (Format.NVFP4, [[1, 0xFF, 0]], 1.0, True),
        (Format.NVFP4, [[1, 2, 3]], NAN, True),
        (Format.NVFP4, [[1, 2, 3]], INF, True),
        (Format.NVFP4, [[1, 2, 3]], 1e39, True),  # infinite as a float32
    ],
)
def test_bad_scales_are_noticed(format: Format, scale: list, global_scale: float, is_bad: bool) -> None:
    dtype = torch.float32 if isinstance(scale[0][0], float) else torch.uint8
    q = QuantTensor(format, torch.zeros(1, 48), (1, 96), torch.tensor(scale, dtype=dtype), global_scale)
    assert codec.has_nan_scale(q) is is_bad
