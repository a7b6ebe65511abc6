"""Worked values of the specification's operations and formats, by hand and from definitions in NumPy."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4.config import Activations, Yarn
from dsv4.spec import ops
from dsv4.spec.rounding import Rounding, linear_input
from tests.support import oracle

INF = math.inf
MIXES = [0.3, -0.2, 0.1, 0, 0.5, -0.5, 0.25, 0, 1, 0.2, -0.3, 0.4, 0, 0.9, 0.1, -0.6,
         -0.2, 0.3, 0.8, 0.1, 0.5, -0.1, 0.2, 0.7]  # fmt: skip
SCALE = torch.tensor([0.5, 1.0, 2.0])
BASE = torch.tensor([0.1] * 4 + [-0.1] * 4 + [0.0] * 16)
PRE = torch.tensor([0.562178, 0.500001, 0.537431, 0.524980])
POST = torch.tensor([1.197375, 0.708687, 1.074860, 0.950042])
COMB = torch.tensor(
    [
        [0.5800803, 0.1104697, 0.0545298, 0.2549192],
        [0.1150544, 0.6565284, 0.1778543, 0.0505620],
        [0.0642090, 0.1646304, 0.6004585, 0.1707011],
        [0.2406554, 0.0683706, 0.1671564, 0.5238167],
    ]
)
# pair -> frequency of the plain table (theta 10000) and of the YaRN table (theta 160000), 64 channels
FREQUENCIES = {
    0: (1.0, 1.0),
    8: (0.1, 0.05),
    15: (0.0133352149, 0.00363553851),
    16: (0.01, 0.00226562493),
    20: (0.00316227786, 0.000296977785),
    24: (0.001, 1.95312532e-05),
    25: (7.49894185e-4, 5.37231244e-06),
    31: (1.3335215e-4, 5.6805294e-07),
}
SCORES = {-5.0: 0.0819472, -1.0: 0.5596979, 0.0: 0.8325546, 1.0: 1.1459763, 5.0: 2.2375691}


def near(got: Tensor, want: object, atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), rtol=0, atol=atol, equal_nan=True)


def test_hyper_connections() -> None:
    """One stream at a time holds ones, which shows its weight."""
    mixes = torch.tensor(MIXES).expand(4, 24)
    x, gate, logits = ops.mix_in(torch.eye(4).unsqueeze(-1), mixes, BASE, SCALE, 1e-6)
    near(x.flatten(), PRE)
    near(gate, POST.expand(4, 4))
    comb = ops.sinkhorn(logits, 20, 1e-6)
    near(comb, COMB.expand(4, 4, 4), 3e-7)
    near(ops.mix_head(torch.eye(4).unsqueeze(-1), mixes[:, :4], BASE[:4], SCALE[:1], 1e-6).flatten(), PRE)


def test_sinkhorn_ends_with_columns() -> None:
    """Far from doubly stochastic: two iterations, one value at a time."""
    logits = torch.tensor([[3.0, 0.0], [2.0, 2.0]])
    rows = [[1 / (1 + math.exp(-3)), 1 / (1 + math.exp(3))], [0.5, 0.5]]
    comb = [[v + 1e-3 for v in row] for row in rows]
    for step in range(2):
        if step:
            comb = [[v / (sum(row) + 1e-3) for v in row] for row in comb]
        columns = [comb[0][k] + comb[1][k] + 1e-3 for k in range(2)]
        comb = [[row[k] / columns[k] for k in range(2)] for row in comb]
    near(ops.sinkhorn(logits, 2, 1e-3), comb, 3e-7)


def test_mix_out_sums_over_the_first_index() -> None:
    """A comb that sends stream 0 to stream 1 only, and an output that goes to stream 0 alone."""
    streams, comb = torch.tensor([[1.0, 2.0], [10.0, 20.0]]), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    out = ops.mix_out(torch.tensor([5.0, 6.0]), streams, torch.tensor([2.0, 0.0]), comb)
    assert out.tolist() == [[10.0, 12.0], [1.0, 2.0]]


def test_the_norm_of_streams_comes_after_their_product() -> None:
    streams = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    fn = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 2.0]])
    near(ops.mixes(streams, fn, 0.0), [7 / 2.5, 8 / 2.5])


def test_rms_norm() -> None:
    near(ops.rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), 0.5), [3 / 13**0.5, 8 / 13**0.5])


def test_frequencies() -> None:
    """The angle at position 1."""
    one, yarn = torch.tensor([1]), Yarn(16, 65536, 32, 1)
    (plain,), (slow,) = (
        torch.asin(ops.rope_table(one, *table)[1].double())
        for table in ((10000.0, 64, None), (160000.0, 64, yarn))
    )
    assert plain.shape == slow.shape == (32,)
    for pair, (want_plain, want_slow) in FREQUENCIES.items():
        # The values are given with 9 digits; a few float32 roundings of power and sine are allowed.
        assert float(plain[pair]) == pytest.approx(want_plain, rel=4 * 2**-23), pair
        assert float(slow[pair]) == pytest.approx(want_slow, rel=4 * 2**-23), pair


def test_angles_are_float32_products_and_their_cosines_accurate() -> None:
    """At position 10**6 the rounded angle is off by hundredths; training had that error too."""
    positions = torch.tensor([0, 1, 127, 65535, 999_999, 1_000_000])
    cos, sin = ops.rope_table(positions, 10000.0, 64, None)
    freqs = (1.0 / 10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)).numpy()
    for row, position in enumerate(positions.tolist()):
        for pair in range(32):
            angle = float(np.float32(position) * freqs[pair])
            assert float(cos[row, pair]) == float(np.float32(math.cos(angle))), (position, pair)
            assert float(sin[row, pair]) == float(np.float32(math.sin(angle))), (position, pair)
    exact = [1_000_000 * 10000.0 ** (-2 * pair / 64) for pair in range(32)]
    off = max(abs(math.cos(exact[i]) - float(cos[-1, i])) for i in range(32))
    assert off > 1e-3, "not computed in float64"


def test_rotation_turns_neighbours_of_the_last_channels() -> None:
    x = torch.tensor([7.0, 1.0, 2.0, 3.0, 4.0])
    cos, sin = torch.tensor([0.0, 0.6]), torch.tensor([1.0, 0.8])
    near(ops.rotate(x, cos, sin), [7, -2, 1, 3 * 0.6 - 4 * 0.8, 3 * 0.8 + 4 * 0.6])
    near(ops.rotate(ops.rotate(x, cos, sin), cos, -sin), x)


@pytest.mark.parametrize("size", [1, 2, 4, 32, 128])
def test_hadamard_is_sylvesters_matrix(size: int) -> None:
    """Entry (i, j) is (-1)^popcount(i & j), scaled."""
    want = [[(-1) ** (i & j).bit_count() * size**-0.5 for j in range(size)] for i in range(size)]
    near(ops.hadamard(torch.eye(size)), want, 1e-7)


def test_compress_overlaps_halves() -> None:
    """Values 1..8 in first halves and 101..108 in second ones; equal scores make an entry their mean."""
    first = torch.arange(1.0, 9).view(8, 1)
    values = torch.cat((first, 100 + first), 1)
    got = ops.compress(values, torch.zeros(8, 2), 4, True)
    assert got.tolist() == [[(101 + 102 + 103 + 104) / 4], [(1 + 2 + 3 + 4 + 105 + 106 + 107 + 108) / 8]]
    scores = torch.tensor([[-1e30], [0.0], [-1e30], [1e30], [0.0]])
    assert ops.compress(first[:5], scores, 4, False).tolist() == [[4.0]], "an open block has no entry"
    assert ops.compress(first[:3], scores[:3], 4, False).shape == (0, 1)


def test_who_sees_what() -> None:
    at = torch.arange(5)
    assert ops.in_window(at, at, 2).int().tolist() == [
        *([1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1])
    ]
    assert ops.is_visible(torch.tensor([0, 3, 4, 7]), 2, 4).int().tolist() == [[0, 0], [1, 0], [1, 0], [1, 1]]


@pytest.mark.parametrize("sink", [-INF, -3.0, 0.0, 5.0, 80.0, INF])
def test_the_sink_is_in_the_denominator_only(sink: float) -> None:
    """One key: the output is key / (1 + exp(sink - score))."""
    q, key = torch.tensor([[[1.0, 2.0, 0.0, 0.0]]]), torch.tensor([[3.0, 1.0, 0.5, 0.0]])
    seen = torch.tensor([[True]])
    got = ops.attend(q, key, seen, torch.tensor([sink]))
    near(got[0], key / (1 + math.exp(min(sink - 2.5, 700))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_rounded_for_the_values_and_not_for_the_denominator(dtype: torch.dtype) -> None:
    """One key of weight 1 and 100 of weight w, just above 1 - 2^-9: as BF16 factors they are all 1.

    Channel 0 holds 100 and 100 times -1: the values cancel in BF16. Channel 1 holds 1.0029 everywhere:
    divided by a rounded denominator it would round to 1, by the true one it exceeds the tie at 1 + 2^-8.
    """
    w = 1 - 2.0**-9 + 1e-5
    keys, q = torch.zeros(101, 4), torch.zeros(1, 1, 4)
    keys[:, 0], keys[:, 1], keys[1:, 2], q[0, 0, 2] = -1.0, 1.0029, 2 * math.log(w), 1.0
    keys[0, 0] = 100.0
    got = ops.attend(q.to(dtype), keys, torch.ones(1, 101).bool(), torch.full((1,), -INF))[0, 0, :2]
    exact = [100 * (1 - w) / (1 + 100 * w), 1.0029]
    near(got, [0.0, 1 + 2.0**-7] if dtype == torch.bfloat16 else exact, 1e-5)


def test_index_scores_and_selection() -> None:
    q, keys = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), torch.tensor([[3.0, 1.0], [-3.0, 1.0], [1.0, -1.0]])
    scores = ops.index_scores(q, keys, torch.tensor([[-1.0, 0.25]]))
    assert scores.tolist() == [[-3 + 0.5, 0.5, -1.0]]
    visible = torch.tensor([[True, False, True]])
    assert ops.select(scores, visible, 1).tolist() == [[False, False, True]], "-1 beats what is not visible"
    assert ops.select(scores, visible, 3).tolist() == visible.tolist()


def test_ties_go_to_the_lower_index() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [0.0, -0.0, 0.0, -1.0, 0.0]])
    assert ops.top_k(values, 3).tolist() == [[1, 2, 4], [0, 1, 2]]
    assert ops.top_k(torch.zeros(1, 4096), 100).tolist() == [list(range(100))]
    assert ops.top_k(torch.tensor([2.0, 9.0]), 5).tolist() == [1, 0], "fewer than k: all of them"


def test_route() -> None:
    near(ops.route_scores(torch.tensor(list(SCORES))), list(SCORES.values()), 3e-7)
    weights = ops.route_weights(torch.tensor([[1.0, 5.0, 3.0]]), torch.tensor([[2, 0]]), 1.5)
    near(weights, [[1.5 * 3 / 4, 1.5 / 4]])


def test_swiglu_clamps_the_gate_from_above_and_up_on_both_sides() -> None:
    gate = torch.tensor([25.0, -25.0, 2.0, 2.0, 1e30, -1e30])
    up = torch.tensor([1.0, 1.0, 25.0, -25.0, -1e30, 1e30])

    def silu(v: float) -> float:
        return v / (1 + math.exp(-v))

    want = [silu(10), silu(-25), silu(2) * 10, silu(2) * -10, -10 * silu(10), 0.0]
    near(ops.swiglu(gate, up, 10.0), want, 1e-5)
    near(ops.swiglu(gate, up, 10.0, torch.tensor(0.5)), [0.5 * v for v in want], 1e-5)


def rows(x: Tensor) -> np.ndarray:
    return x.float().flatten(0, -2).numpy()


def fp8_rounded(x: Tensor, block: int) -> Tensor:
    out = np.empty_like(rows(x))
    for r, row in enumerate(rows(x)):
        codes, scales = oracle.fp8_row(row, block)
        out[r] = oracle.E4M3[codes] * np.repeat(oracle.E8M0[scales], block)[: len(row)]
    return torch.from_numpy(out).view(x.shape)


def mxfp4_rounded(x: Tensor) -> Tensor:
    out = np.empty_like(rows(x))
    for r, row in enumerate(rows(x)):
        codes, scales = oracle.mxfp4_row(row)
        out[r] = oracle.E2M1[codes] * np.repeat(oracle.E8M0[scales], 32)[: len(row)]
    return torch.from_numpy(out).view(x.shape)


def nvfp4_rounded(x: Tensor) -> Tensor:
    """Per row: global scale amax / (6*448), blocks of 16 with an E4M3 scale, E2M1 codes; float32 steps."""
    out = np.zeros_like(rows(x))
    for r, row in enumerate(rows(x)):
        amax = np.abs(row).max()
        g = np.float32(amax) / np.float32(2688) if amax > 0 else np.float32(1)
        for start in range(0, len(row), 16):
            block = row[start : start + 16]
            wanted = np.abs(block).max() / (np.float32(6) * g)
            scale = oracle.E4M3[oracle.e4m3_encode(np.clip(wanted, 2.0**-9, 448))].astype(np.float32)
            codes = oracle.e2m1_encode(block / (scale * g))
            out[r, start : start + 16] = (oracle.E2M1[codes].astype(np.float32) * (scale * g)).astype(
                np.float32
            )
    return torch.from_numpy(out).view(x.shape)


def loud(count: int, width: int) -> Tensor:
    """Rows of many sizes, with an outlier and a half that is louder than the other."""
    sizes = torch.tensor([1.0, 100.0, 1e-6, 0.0, 1e4, 1e-3, 1e30])[:count]
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(width)) * sizes.unsqueeze(1)
    x[1, width // 2] = 1e5
    x[4:, width // 2 :] *= 100
    return x


@pytest.mark.parametrize("width", [16, 33, 128, 130, 300])
def test_inputs_of_linears(width: int) -> None:
    x = loud(7, width)
    assert linear_input(x, "a16") is x
    assert torch.equal(linear_input(x, "a8"), fp8_rounded(x, 128))
    assert torch.equal(linear_input(x, "a4"), nvfp4_rounded(x))


@pytest.mark.parametrize("activations", ["a8", "a4"])
def test_infinity_makes_no_nan_and_nan_stays_in_its_row(activations: Activations) -> None:
    x = loud(2, 128)
    x[0, 3], x[1, 7] = INF, math.nan
    rounded = linear_input(x, activations)
    assert not torch.isnan(rounded[0]).any() and rounded[0, 3] > 1e38 and torch.isnan(rounded[1, 7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_are_fp8_but_for_rotated_channels(dtype: torch.dtype) -> None:
    kv = loud(5, 166).to(dtype)
    want = torch.cat((fp8_rounded(kv[:, :150], 64).to(dtype), kv[:, 150:]), 1)
    assert torch.equal(Rounding().entry(kv, 16), want)
    given = [0.013, -0.5, 1, 3.14159, -7.7, 100, 447, -449]
    row = torch.tensor([*given, *[0.0] * 56, 0.123, 4.567])
    rounded = Rounding().entry(row, 2)
    assert rounded[:8].tolist() == [0.01171875, -0.5, 1, 3.25, -7.5, 96, 448, -448]
    assert torch.equal(rounded[64:], row[64:])
    assert Rounding(trained=False).entry(kv, 16) is kv


def test_index_values_are_transformed_then_rounded_to_fp4() -> None:
    x = loud(6, 64)
    assert torch.equal(Rounding().index(x), mxfp4_rounded(ops.hadamard(x)))
    given = torch.tensor([0, 0.1, -0.3, 0.7, 1, -1.9, 2.4, 3.3, *[0.0] * 24])
    # The transform is its own inverse: float noise is far from these values' boundaries.
    rounded = Rounding().index(ops.hadamard(given))
    assert rounded[:8].tolist() == [0, 0, -0.5, 0.5, 1, -2, 2, 3] and not rounded[8:].any()
    assert Rounding(trained=False).index(x) is x


def test_a_block_of_nvfp4() -> None:
    """With 4 as the row's largest value: global scale 4 / 2688, block scale 288."""
    block = [0.02, -0.11, 0.37, -0.95, 1.2, -1.3, 2, 2.6, -0.5, 0.4, 0, -0.07, 0.9, -2.2, 1.7, 0.3]
    codes = [0, -0.5, 1, -2, 3, -3, 4, 6, -1, 1, 0, 0, 2, -6, 4, 0.5]
    rounded = linear_input(torch.tensor([*block, 4.0, *[0.0] * 15]), "a4")
    near(rounded[:16], [code * 288 * 4 / 2688 for code in codes])
    near(rounded[1:5], [-0.214286, 0.428571, -0.857143, 1.285714])
