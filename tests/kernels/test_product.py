"""Products of prompts against exact sums, against float64 and against the decode step, bit for bit."""

from itertools import product

import pytest
import torch
from torch import Tensor

from dsv4.gpu import build
from dsv4.gpu.tiles import Bank, Tiled, empty, put, tile
from dsv4.ops.experts import prefill as experts_prefill
from dsv4.ops.linear import prefill_product as prompts
from dsv4.ops.linear.decode import MatVec, Product
from dsv4.ops.linear.prefill_packed import FP8_CODES, IN_16_BITS, ROW_GROUP, Packed, mode_of
from dsv4.quant.codec import decode, encode_weight
from dsv4.quant.formats import Format, QuantTensor

gpu = pytest.mark.gpu
FORMATS = {
    "nvfp4": Format.NVFP4,
    "mxfp4": Format.MXFP4,
    "fp8": Format.FP8,
    "fp8f": Format.FP8,
    "bf16": Format.BF16,
}
# Rows of a tile and beside: every size of tile, and both kernels (small and large).
HEIGHTS = (1, 7, 16, 17, 32, 33, 64, 65, 112, 113, 128, 129, 144, 145)
SHAPES = [(200, 1056), (1032, 512), (64, 4096), (33, 68), (320, 2048)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(11)


def heights(weight: Tiled, activations: str) -> list[int]:
    """The tiles there are for it."""
    return [*prompts.heights(weight, mode_of(weight, activations))]


def test_tiles_fit_in_shared_memory() -> None:
    for format, activations, paired in product(IN_16_BITS, ("a16", "a8"), (False, True)):
        weight = empty(format, (16, 512), 1, 1, "cpu")
        mode = mode_of(weight, activations)
        for cap in heights(weight, activations):
            ring = prompts.rings(format, cap, mode, paired)
            blocks = 2 if ring.is_small else 1
            assert blocks * (ring.shared_bytes + 1024) <= 228 << 10, (format, cap)
            assert max(ring.w_stages, ring.x_stages) <= 16 and min(ring.w_stages, ring.x_stages) > 1


def test_tiles_are_large_where_that_reads_less() -> None:
    fp8, nvfp4 = (empty(format, (16, 512), 1, 1, "cpu") for format in (Format.FP8, Format.NVFP4))
    codes, numbers = FP8_CODES, IN_16_BITS[Format.FP8]
    # 74 or 128 tiles of rows, times 64, are 36 or 63 rounds of 132; two of either, times 64, are one round.
    assert prompts.even_cap(8192, 64, fp8, numbers, 132) == 112
    assert prompts.even_cap(128, 64, fp8, numbers, 132) == 64
    assert prompts.even_cap(8192, 32, fp8, codes, 132) == 128
    assert prompts.even_cap(8192, 64, nvfp4, IN_16_BITS[Format.NVFP4], 132) == 128
    assert [prompts.even_cap(rows, 8, fp8, codes, 132) for rows in (1, 16, 17, 64)] == [16, 16, 32, 64]


def test_tiles_that_a_kernel_does_not_have_are_refused() -> None:
    """112 rows, FP8's in 16 bits, would be 128 to the others: 4 KiB of their exchange have no place."""
    for format, activations in ((Format.NVFP4, "a16"), (Format.BF16, "a16"), (Format.FP8, "a8")):
        up = empty(format, (16, 512), 1, 2, "cpu")
        mode, rows = mode_of(up, activations), torch.zeros(112, dtype=torch.int32)
        by = prompts.Sorted(rows, rows.float(), rows[:4].view(1, 4), rows[:2], choices=1, cap=112)
        x = Packed(torch.empty(0, dtype=torch.uint8), mode, matrices=1, rows=112, k=512)
        with pytest.raises(AssertionError, match="tiles of 112 rows"):
            prompts.gate_up(x, up, torch.empty(112, 16, dtype=torch.bfloat16), 1.0, by, by.weights)


def test_other_architectures_do_without() -> None:
    assert "linear/prefill_sm90_nvfp4" in build.sources(build.HOPPER)
    assert not [name for name in build.sources("100a") if "sm90" in name]
    assert "linear/prefill_unpack" in build.sources("100a")


def encoded(values: Tensor, kind: str) -> QuantTensor:
    q = encode_weight(values, FORMATS[kind])
    if kind != "fp8f":
        return q
    assert q.scale is not None
    return QuantTensor(q.format, q.data, q.shape, torch.exp2(q.scale.float() - 127) * 1.2345678)


def multiplied(
    x: Tensor, w: Tiled, dtype: torch.dtype = torch.float32, groups: int = 1, parts: int = 1
) -> Tensor:
    x = x.unsqueeze(1) if x.dim() == 2 else x
    shape = (x.shape[0], groups, w.shape[0] // groups)
    y = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
    prompts.product(prompts.pack(x, w), w, y, parts)
    return y.flatten(1)


def apart(got: Tensor, want: Tensor) -> float:
    """The largest error of a row, relative to the row."""
    return float(((got.double() - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)).max())


@gpu
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "fp8", "bf16"])
@pytest.mark.parametrize("n,k", SHAPES)
def test_sums_of_integers_are_exact(kind: str, n: int, k: int) -> None:
    values = torch.randint(-3, 4, (n, k), device="cuda").float()
    q = encode_weight(values, FORMATS[kind], *([1.0] if kind == "nvfp4" else []))
    x = torch.randint(-4, 5, (300, k), device="cuda").bfloat16()
    assert torch.equal(multiplied(x, tile(q)).double(), x.double() @ decode(q).double().t())


@gpu
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("n,k", SHAPES)
def test_a_row_is_the_same_bits_in_any_company(kind: str, n: int, k: int) -> None:
    """Rows of any size, and in the last bit the float32 sum of decode; one sum for every height of tile."""
    q = encoded(torch.randn(n, k, device="cuda"), kind)
    w, x = tile(q), torch.randn(300, k, device="cuda").bfloat16()
    x[5] *= 1e-6
    x[6] *= 1e20
    x[7, ::2] = 0
    whole = multiplied(x, w)
    assert apart(whole, x.double() @ decode(q).double().t()) < 1e-5
    assert torch.equal(multiplied(x, w, torch.bfloat16), whole.bfloat16())
    for rows in HEIGHTS:
        assert torch.equal(multiplied(x[:rows], w), whole[:rows]), rows
    for start in (3, 100, 250):
        assert torch.equal(multiplied(x[start : start + 40], w), whole[start : start + 40]), start


@gpu
@pytest.mark.parametrize("kind", ["nvfp4", "fp8", "fp8f", "bf16"])
@pytest.mark.parametrize("n,k", SHAPES)
def test_decode_gives_the_same_bits(kind: str, n: int, k: int) -> None:
    w = tile(encoded(torch.randn(n, k, device="cuda"), kind))
    x, y = torch.randn(8, k, device="cuda").bfloat16(), torch.empty(8, n, device="cuda")
    MatVec([Product(w, x, y)], 8).launch()
    assert torch.equal(multiplied(x, w), y)


@gpu
@pytest.mark.parametrize("kind", ["nvfp4", "fp8f", "bf16"])
@pytest.mark.parametrize("rows", [8, 33, 130])
def test_parts_of_a_sum(kind: str, rows: int) -> None:
    """As decode's split-K: each part is multiplied with the factor, then they are added."""
    q = encoded(torch.randn(96, 8192, device="cuda"), kind)
    w, x = tile(q), torch.randn(rows, 8192, device="cuda").bfloat16()
    parts, y = torch.empty(2, 8, 96, device="cuda"), multiplied(x, w, parts=2)
    MatVec([Product(w, x[:8].contiguous(), parts, splits=2)], 8).launch()
    assert torch.equal(parts[0] + parts[1], y[:8])
    assert apart(y, x.double() @ decode(q).double().t()) < 1e-5


@gpu
@pytest.mark.parametrize("kind", FORMATS)
def test_groups(kind: str) -> None:
    groups, n, k = 3, 48, 320
    q, x = (
        encoded(torch.randn(groups * n, k, device="cuda"), kind),
        torch.randn(70, groups, k, device="cuda").bfloat16(),
    )
    want = torch.einsum("tgk,gnk->tgn", x.double(), decode(q).double().view(groups, n, k)).flatten(1)
    assert apart(multiplied(x, tile(q), groups=groups), want) < 1e-5


@gpu
def test_nan_and_infinity_stay_in_their_row() -> None:
    w = tile(encoded(torch.randn(80, 1024, device="cuda"), "nvfp4"))
    x = torch.randn(40, 1024, device="cuda").bfloat16()
    clean = multiplied(x, w)
    x[3, 700], x[20, 5] = float("nan"), float("inf")
    got = multiplied(x, w)
    others = [row for row in range(40) if row not in (3, 20)]
    assert torch.equal(got[others], clean[others])
    assert got[3].isnan().all() and not got[20].isfinite().any()


class Experts:
    def __init__(self, kind: str, count: int = 40, depth: int = 512, width: int = 352) -> None:
        shapes = [(width, depth), (width, depth), (depth, width)]
        stored = [
            [encoded(0.05 * torch.randn(*s, device="cuda"), kind) for s in shapes] for _ in range(count)
        ]
        up = empty(FORMATS[kind], (width, depth), count, 2, "cuda")
        down = empty(FORMATS[kind], (depth, width), count, 1, "cuda")
        for number, (w1, w3, w2) in enumerate(stored):
            put(up, number, 0, w1)
            put(up, number, 1, w3)
            put(down, number, 0, w2)
        self.bank, self.count = Bank(up, down), count
        self.values = [[decode(q).double() for q in three] for three in stored]

    def wanted(self, x: Tensor, ids: Tensor, weights: Tensor, limit: float) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
        for expert, (w1, w3, w2) in enumerate(self.values):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            gate = (x[token].double() @ w1.t()).bfloat16().double().clamp(max=limit)
            up = (x[token].double() @ w3.t()).bfloat16().double().clamp(-limit, limit)
            hidden = (
                (gate * torch.sigmoid(gate) * up * weights[token, choice, None].double()).bfloat16().double()
            )
            out.index_add_(0, token, (hidden @ w2.t()).bfloat16().double())
        return out


def choices(tokens: int, count: int, k: int = 6) -> Tensor:
    """Distinct ones; half of the tokens choose expert 3, which so has many tiles."""
    ids = torch.rand(tokens, count, device="cuda").topk(k, dim=1).indices
    lacks = ~(ids == 3).any(1)
    lacks[: tokens // 2] = False
    ids[lacks, 0] = 3
    return ids


def routed(x: Tensor, ids: Tensor, weights: Tensor, bank: Bank, activations: str = "a16") -> Tensor:
    return experts_prefill.routed(x, ids, weights, bank, 1.5, activations)[:, 0]  # type: ignore[arg-type]


@gpu
@pytest.mark.parametrize("kind", FORMATS)
def test_experts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    e = Experts(kind)
    for tokens in (1, 16, 70, 700):
        x, ids = torch.randn(tokens, 512, device="cuda").bfloat16(), choices(tokens, e.count)
        weights, at = torch.rand(tokens, 6, device="cuda"), tokens // 2
        got = routed(x, ids, weights, e.bank)
        # A few hidden values fall to the other side of a BF16 step.
        assert apart(got, e.wanted(x, ids, weights, 1.5)) < 2**-7, tokens
        alone = routed(x[at : at + 1], ids[at : at + 1], weights[at : at + 1], e.bank)
        assert torch.equal(alone[0], got[at]), tokens
        for cap in heights(e.bank.w13, "a16"):
            with monkeypatch.context() as patch:
                patch.setattr(prompts, "max_cap", lambda weight, mode, cap=cap: cap)
                assert torch.equal(routed(x, ids, weights, e.bank), got), (tokens, cap)


@gpu
@pytest.mark.parametrize(
    "kind,activations", [("nvfp4", "a16"), ("mxfp4", "a16"), ("mxfp4", "a8"), ("fp8", "a8")]
)
def test_tiles_of_many_heights_one_after_the_other(kind: str, activations: str) -> None:
    """A block takes tile after tile, of 16 to 144 rows, over more columns than the rings hold: a warp
    that is a lap behind, or results that change hands too early, show in a row, or nothing comes back."""
    e = Experts(kind, count=24, depth=4096, width=512)
    for tokens in (96, 1100, 4290):
        x, ids = torch.randn(tokens, 4096, device="cuda").bfloat16(), choices(tokens, e.count)
        weights = torch.rand(tokens, 6, device="cuda")
        got = routed(x, ids, weights, e.bank, activations)
        for _ in range(20):
            assert torch.equal(routed(x, ids, weights, e.bank, activations), got), (
                f"{tokens}: a second run differs"
            )
        for at in range(0, tokens, tokens // 8):
            one = slice(at, at + 1)
            assert torch.equal(routed(x[one], ids[one], weights[one], e.bank, activations)[0], got[at]), (
                tokens,
                at,
            )


@gpu
@pytest.mark.parametrize("kind", ["nvfp4", "fp8", "bf16"])
def test_a_stage_is_read_before_it_is_given_back(kind: str) -> None:
    """Rows whose size changes from slice to slice, over many slices and tiles: what undoes a slice's scaling
    is the last that is read of a stage, and an early copy of the next one shows as another power of two."""
    w = tile(encoded(torch.randn(2048, 8192, device="cuda"), kind))
    x = torch.randn(2176, 16, 512, device="cuda") * torch.exp2(
        torch.randint(-8, 9, (2176, 16, 1), device="cuda")
    )
    x = x.flatten(1).bfloat16()
    got = multiplied(x, w, torch.bfloat16, parts=2)
    for _ in range(30):
        assert torch.equal(multiplied(x, w, torch.bfloat16, parts=2), got), "a second run differs"
    for at in range(0, 2176, 272):
        assert torch.equal(multiplied(x[at : at + 3], w, torch.bfloat16, parts=2), got[at : at + 3]), at


@gpu
@pytest.mark.parametrize(
    "tokens,k,count", [(1, 6, 192), (16, 6, 192), (300, 6, 40), (3000, 8, 512), (9000, 6, 192)]
)
@pytest.mark.parametrize("most", [64, 128, 144])
def test_sorting(tokens: int, k: int, count: int, most: int) -> None:
    ids = choices(tokens, count, k)
    ids[0, 0] = -1
    weights = torch.rand(tokens, k, device="cuda")
    by = prompts.sort(ids, weights, count, most)
    num_tiles, num_groups = by.counts.tolist()
    rows, expert = by.pairs[: num_groups * ROW_GROUP], ids.flatten()
    seen = rows[rows >= 0].long()
    assert torch.equal(seen.sort().values, (expert >= 0).nonzero().flatten())
    assert torch.equal(by.weights[: rows.shape[0]][rows >= 0], weights.flatten()[seen])
    order = expert.argsort(stable=True)
    assert torch.equal(seen, order[expert[order] >= 0]), "by expert, and in the pairs' order"
    covered = 0
    for number, first, height, _ in by.tiles[:num_tiles].tolist():
        assert first % ROW_GROUP == 0 and 0 < height <= by.cap
        assert (expert[rows[first : first + height].long()] == number).all()
        covered += height
    assert covered == seen.shape[0]


@gpu
@pytest.mark.parametrize("tokens", [1, 300, 5000])
def test_sorting_of_own_experts(tokens: int) -> None:
    """The rows of a rank's experts are those that all experts' have there, in the same order."""
    count, ranks, k = 48, 4, 6
    ids, weights = choices(tokens, count, k), torch.rand(tokens, k, device="cuda")
    ids[0, 0] = -1
    expert, share = ids.flatten(), count // ranks
    for first in range(0, count, share):
        by = prompts.sort(ids, weights, share, 128, first=first, ranks=ranks)
        num_tiles, num_groups = by.counts.tolist()
        rows = by.pairs[: num_groups * ROW_GROUP].long()
        is_own = (expert >= first) & (expert < first + share)
        order = expert.argsort(stable=True)
        assert torch.equal(rows[rows >= 0], order[is_own[order]])
        assert torch.equal(by.weights[: rows.shape[0]][rows >= 0], weights.flatten()[rows[rows >= 0]])
        covered = 0
        for number, at, height, _ in by.tiles[:num_tiles].tolist():
            assert (expert[rows[at : at + height]] == first + number).all()
            covered += height
        assert covered == int(is_own.sum())


@gpu
def test_a_graph_follows_what_is_on_the_device() -> None:
    """Nothing of a launch depends on the chosen experts: a graph replayed with others is right."""
    e = Experts("nvfp4")
    x, weights = torch.randn(64, 512, device="cuda").bfloat16(), torch.rand(64, 6, device="cuda")
    ids = choices(64, e.count)
    routed(x, ids, weights, e.bank)  # compiled and loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = routed(x, ids, weights, e.bank)
    for round in range(20):
        x.copy_(torch.randn(64, 512, device="cuda"))
        ids.copy_(torch.zeros(64, 6) if round == 3 else choices(64, e.count))
        graph.replay()
        got = out.clone()
        assert torch.equal(got, routed(x, ids, weights, e.bank)), round
