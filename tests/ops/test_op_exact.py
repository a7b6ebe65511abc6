"""dsv4.ops._exact: results that do not depend on a row's neighbours or place, and how accurate they are."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops_support import FUNCTION, ROUND, TINY, check_close, exactly, product_bound, rand
from torch import Tensor

from dsv4.ops import _product
from dsv4.ops._exact import rotate, row_product, sigmoid, silu, softplus
from dsv4.ops._product import batch_product
from dsv4.spec import ops as spec

INF, NAN = math.inf, math.nan
SIZES = (1, 2, 3, 5, 7, 8, 16, 17, 31, 33, 48, 64, 96, 100, 127, 128, 129, 255, 256, 480, 513, 1024, 2048)
COLUMNS = (*range(1, 18), 24, 31, 32, 33, 48, 64, 96, 100, 128, 300)


@pytest.mark.parametrize("k", SIZES)
def test_a_row_gives_the_same_bits_wherever_it_lies(k: int) -> None:
    for n in COLUMNS:
        w, row = rand(k, n, seed=n), rand(1, k, seed=k)
        alone = row_product(row, w)
        everywhere = row_product(row.expand(5 * 8, k).clone(), w)
        assert torch.equal(everywhere, alone.expand(5 * 8, n)), f"[{k}, {n}]"


@pytest.mark.parametrize(("k", "n"), [(1, 1), (3, 7), (33, 2), (96, 5), (100, 300), (257, 24), (1024, 3)])
def test_row_counts_change_no_bit(k: int, n: int) -> None:
    """0 to 40 rows, and each row alone: the neighbours of a row must not be seen in its result."""
    x, w = rand(40, k, seed=1), rand(k, n, seed=2)
    alone = torch.cat([row_product(row.unsqueeze(0), w) for row in x])
    for count in range(41):
        assert torch.equal(row_product(x[:count], w), alone[:count]), count
        assert torch.equal(row_product(x[40 - count :], w), alone[40 - count :]), count
    check_close(alone, x.double() @ w.double(), product_bound(x, w), f"product [{k}, {n}]")


@pytest.mark.parametrize(("k", "n"), [(96, 1), (1000, 300), (2048, 300)])
def test_hundreds_of_rows_change_no_bit(k: int, n: int) -> None:
    """Shapes for which one large product was seen to differ from the product of a few rows."""
    x, w = rand(200, k, seed=1), rand(k, n, seed=2)
    whole = row_product(x, w)
    for count in (1, 9, 16, 199):
        assert torch.equal(row_product(x[:count], w), whole[:count]), count


@st.composite
def products(draw: st.DrawFn) -> tuple[int, int, int, int, bool]:
    """K, N, rows, a seed, and whether the weight lies turned."""
    sizes = st.one_of(st.integers(1, 40), st.integers(41, 400), st.sampled_from((64, 128, 256, 512, 1024)))
    rows = st.one_of(st.integers(1, 12), st.integers(13, 300))
    return draw(sizes), draw(sizes), draw(rows), draw(st.integers(0, 1 << 30)), draw(st.booleans())


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=products())
def test_whatever_lies_beside_a_row_changes_no_bit(case: tuple[int, int, int, int, bool]) -> None:
    """Random shapes and places: a row among others, among NaN and infinity, at an odd address, as alone."""
    k, n, count, seed, is_turned = case
    w = rand(n, k, seed=seed).t() if is_turned else rand(k, n, seed=seed)
    x = rand(count, k, seed=seed + 1)
    place = seed % count
    row = x[place].clone()
    alone = row_product(row.unsqueeze(0), w)[0]
    assert torch.equal(row_product(x, w)[place], alone)
    x[:] = torch.tensor([NAN, INF, -INF, 1e38])[torch.arange(count) % 4].unsqueeze(1)
    x[place] = row
    assert torch.equal(row_product(x, w)[place], alone)
    shifted = torch.cat((torch.zeros(1), x.flatten()))[1:].view(count, k)
    assert torch.equal(row_product(shifted, w)[place], alone)
    check_close(alone, row.double() @ w.double(), product_bound(row.unsqueeze(0), w)[0], f"[{k}, {n}]")


@pytest.mark.parametrize(("k", "n"), [(33, 700), (64, 515)])
def test_a_large_weight_is_multiplied_in_parts(k: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_product, "PART", 1 << 14)
    _product._cut.cache_clear()
    x, w = rand(21, k, seed=1), rand(k, n, seed=2)
    whole = row_product(x, w)
    assert torch.equal(torch.cat([row_product(row, w) for row in x.split(1)]), whole)
    check_close(whole, x.double() @ w.double(), product_bound(x, w), "in parts")
    _product._cut.cache_clear()


@pytest.mark.parametrize(("batch", "height", "k", "n"), [(2, 8, 128, 224), (7, 6, 80, 96), (32, 3, 33, 64)])
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_batch_has_the_bits_of_its_products(
    batch: int, height: int, k: int, n: int, is_turned: bool
) -> None:
    x, w = rand(batch, height, k), rand(batch, n, k).mT if is_turned else rand(batch, k, n)
    want = torch.stack([row_product(rows, part) for rows, part in zip(x, w, strict=True)])
    assert torch.equal(batch_product(x, w), want)
    assert torch.equal(batch_product(x, w[:1]), row_product(x.flatten(0, 1), w[0]).view(batch, height, n))


def test_padding_stays_small_however_many_heights_are_padded() -> None:
    made = [_product.zeros(rows, 777, torch.device("cpu")) for rows in range(129)]
    assert all(part.shape == (rows, 777) and not part.any() for rows, part in enumerate(made))
    places = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in made[1:]}
    assert sum(places.values()) < 2 * 4 * 128 * 777


def test_infinite_and_nan_rows_stay_in_their_row() -> None:
    x, w = rand(19, 37), rand(37, 11, seed=1)
    clean = row_product(x, w)
    for row, value in ((3, INF), (7, NAN), (8, -INF), (18, NAN)):
        x[row, row] = value
    got = row_product(x, w)
    good = [row for row in range(19) if row not in (3, 7, 8, 18)]
    assert torch.equal(got[good], clean[good])
    assert (
        torch.isnan(got[7]).all() and torch.isinf(got[3]).all() and torch.equal(got[8], got[8].sign() * INF)
    )


def test_row_product_reads_strided_views() -> None:
    x, w = rand(37, 20), rand(37, 9, seed=1)
    assert torch.equal(row_product(x.t(), w), row_product(x.t().contiguous(), w))
    wide = rand(20, 74, seed=2)
    assert torch.equal(row_product(wide[:, ::2], w), row_product(wide[:, ::2].contiguous(), w))


def exact_softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def exact_sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[float], float], float]] = {
    # exp, the sum and the quotient
    "sigmoid": (sigmoid, exact_sigmoid, FUNCTION + 2 * ROUND),
    "silu": (silu, lambda x: x * exact_sigmoid(x), FUNCTION + 2 * ROUND),
    # exp, log1p and the sum
    "softplus": (softplus, exact_softplus, 2 * FUNCTION + ROUND),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_accuracy(name: str) -> None:
    function, exact, relative = FUNCTIONS[name]
    x = torch.cat((torch.linspace(-110, 110, 4001), rand(2000) * 3, torch.tensor([0.0, -0.0, 1e-30, -1e-30])))
    want = torch.tensor([exact(v) for v in x.tolist()], dtype=torch.float64)
    # Below exp(-88) the quotient underflows to zero.
    check_close(function(x), want, relative * want.abs() + TINY * (1 + x.abs()), name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_value_gives_the_same_bits_wherever_it_lies(name: str) -> None:
    """Vector loops finish with a tail; the tail must not be another implementation."""
    function = FUNCTIONS[name][0]
    x = rand(200) * 20
    x[::17] = torch.tensor(
        [INF, -INF, NAN, 0.0, -0.0, 1e-42, -1e-42, 88.8, -88.8, 104.0, -104.0, 1e38]
    ).float()
    whole = function(x)
    for length in range(1, 70):
        for start in (0, 1, 3, 50):
            part = function(x[start : start + length])
            assert torch.equal(part.nan_to_num(7), whole[start : start + length].nan_to_num(7)), (
                start,
                length,
            )
    for view in (x.view(40, 5)[:, 1:4], x.view(40, 5).t(), x[::3]):
        assert torch.equal(function(view).nan_to_num(7), function(view.contiguous()).nan_to_num(7))


def test_limits() -> None:
    x = torch.tensor([-INF, -3e38, 3e38, INF, NAN])
    assert sigmoid(x).nan_to_num(7).tolist() == [0, 0, 1, 1, 7]
    assert softplus(x).nan_to_num(7, INF).tolist() == [0, 0, float(x[2]), INF, 7]
    # silu(-inf) is -inf / inf: a gate that is infinite is broken and must not become a quiet zero.
    assert silu(x).nan_to_num(7, INF).tolist() == [7, 0, float(x[2]), INF, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "heads", "width", "pairs"), [(0, 2, 6, 3), (1, 1, 2, 1), (3, 5, 11, 4)])
def test_rotate_turns_neighbours_of_the_last_channels(
    tokens: int, heads: int, width: int, pairs: int, dtype: torch.dtype
) -> None:
    x, angle = rand(tokens, heads, width).to(dtype), 3 * rand(tokens, pairs, seed=1)
    cos, sin = angle.cos(), angle.sin()
    got, want = rotate(x, cos, sin), exactly(spec.rotate_heads, x, cos, sin)
    assert got.dtype == dtype
    size = x.double().abs().amax(-1, keepdim=True) if width else 0.0
    check_close(got, want, 2 * size * torch.finfo(dtype).eps + 4 * ROUND * size, "rotate")
    keep = width - 2 * pairs
    assert torch.equal(got[..., :keep], x[..., :keep]), "unrotated channels are not touched"
    if dtype == torch.float32:
        check_close(rotate(got, cos, -sin), x, 8 * ROUND * size, "-sin turns back")
    assert torch.equal(rotate(x[:, 0], cos, sin), got[:, 0]), "without a head dimension"
