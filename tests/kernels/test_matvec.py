"""Products of the decode step against float64, for every format, row count and hostile input."""

import pytest
import torch
from torch import Tensor

from dsv4.gpu.tiles import Tiled, empty, put, tile
from dsv4.ops.index import decode_select as selecting
from dsv4.ops.linear.cpu import round_input
from dsv4.ops.linear.decode import MatVec, Product, Tasks, splits
from dsv4.ops.linear.prefill_unpack import unpack
from dsv4.ops.route import cpu as route_cpu
from dsv4.ops.route import decode as routing
from dsv4.quant.codec import decode, encode_weight
from dsv4.quant.formats import Format, QuantTensor

pytestmark = pytest.mark.gpu
FORMATS = [Format.NVFP4, Format.MXFP4, Format.FP8, Format.BF16]
ACTS = [torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(11)


def weight(format: Format, n: int, k: int, spread: float = 1.0) -> QuantTensor:
    w = torch.randn(n, k, device="cuda") * k**-0.5
    if spread != 1.0:  # block scales of very different sizes
        w *= spread ** torch.randn(n, -(-k // 32), device="cuda").repeat_interleave(32, 1)[:, :k]
    return encode_weight(w, format)


def wanted(x: Tensor, w: QuantTensor) -> Tensor:
    return x.double() @ decode(w).double().t()


def apart(got: Tensor, want: Tensor) -> float:
    """The largest error of a row relative to that row's size."""
    scale = want.norm(dim=-1, keepdim=True).clamp(min=1e-30) / want.shape[-1] ** 0.5
    return float(((got.double() - want).abs() / scale).max())


def largest(x: Tensor) -> Tensor:
    """As a product with y_top leaves it."""
    return x.float().abs().max().view(1).view(torch.int32)


@pytest.mark.parametrize("act", ACTS, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(
    "n,k,rows",
    [
        *((16, 64, 1), (100, 512, 3), (33, 1028, 8), (512, 4096, 9)),
        # Two passes over K: slices that divide and do not, blocks of many units, one and two columns a warp.
        *((80, 8192, 2), (256, 7168, 33), (5000, 7168, 1), (5000, 7168, 8), (40, 4100, 1), (40, 4100, 7)),
    ],
)
def test_product(format: Format, act: torch.dtype, n: int, k: int, rows: int) -> None:
    w = weight(format, n, k, 4.0)
    x = torch.randn(rows, k, device="cuda").to(act)
    x[:, ::7] *= 50.0
    x[0, : k // 2] = 0
    parts = splits(k)
    y = torch.full((parts, rows, n), torch.nan, device="cuda")
    MatVec([Product(tile(w), x, y if parts > 1 else y[0], splits=parts)], rows).launch()
    assert apart(y.sum(0), wanted(x, w)) < 2e-5
    whole = torch.full((rows, n), torch.nan, device="cuda")
    MatVec([Product(tile(w), x, whole)], rows).launch()
    assert apart(whole, wanted(x, w)) < 2e-5
    assert parts > 1 or torch.equal(whole, y[0])
    rounded = torch.full((rows, n), torch.nan, device="cuda", dtype=act)
    MatVec([Product(tile(w), x, rounded)], rows, carry=carry(rows * n)).launch()
    assert torch.equal(rounded, whole.to(act))


def carry(values: int) -> Tensor:
    return torch.full((values,), torch.nan, device="cuda")


@pytest.mark.parametrize("act", ACTS, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("k", [1536, 4608, 7168])
def test_rows_do_not_see_each_other(format: Format, act: torch.dtype, k: int) -> None:
    n, rows = 144, 29
    w = tile(weight(format, n, k))
    x = torch.randn(rows, k, device="cuda").to(act)
    x[3] = torch.nan
    together = torch.empty(rows, n, device="cuda")
    MatVec([Product(w, x, together)], rows).launch()
    for row in range(rows):
        alone = torch.empty(1, n, device="cuda")
        MatVec([Product(w, x[row : row + 1].contiguous(), alone)], 1).launch()
        if row == 3:
            assert bool(alone.isnan().all())
        else:
            assert torch.equal(alone[0], together[row]), row


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(
    "n,k", [(16, 64), (100, 512), (1000, 1028), (9000, 1024), (6000, 4096), (6000, 7168)]
)
def test_when_weights_are_fetched(format: Format, n: int, k: int) -> None:
    """Before the input or after it, all at once or not: the same sums, also where warps have no work."""
    w, x = weight(format, n, k), torch.randn(1, k, device="cuda").bfloat16()
    parts, found = tile(w), []
    for options in (
        *({}, {"early_stages": 0}, {"early_stages": 1}, {"paced": True}),
        *({"paced": True, "triggers_late": True}, {"overlap": False}),
        *({"spread": True}, {"spread": True, "paced": True}, {"beside": True, "paced": True}),
    ):
        y = torch.full((1, n), torch.nan, device="cuda")
        MatVec([Product(parts, x, y)], 1, **options).launch()  # type: ignore[arg-type]
        found.append(y)
    assert apart(found[0], wanted(x, w)) < 2e-5 and all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize("activations", ["a8", "a4"])
@pytest.mark.parametrize("format", [f for f in FORMATS if f is not Format.BF16], ids=str)
@pytest.mark.parametrize("k", [64, 1032, 2048, 8192, 16384])
def test_a_single_row_is_rounded_on_the_way(format: Format, k: int, activations: str) -> None:
    """As by a launch before it; the largest value may lie in a slice that another block multiplies."""
    w, parts, n = tile(weight(format, 1200, k)), splits(k), 1200

    def product(x: Tensor, how: str, has_top: bool = True) -> Tensor:
        y = torch.full((parts, 1, n), torch.nan, device="cuda")
        top = largest(x.flatten()) if has_top else None
        out = Product(w, x, y if parts > 1 else y[0], splits=parts, activations=how, x_top=top)
        MatVec([out], 1, early_stages=0).launch()
        return y

    usual = torch.randn(1, k, device="cuda").bfloat16()
    # The last ones are on either side of where a row is too small or too large for FP16 (round.cuh).
    sizes = (1.0, 1e-3, 3e4, 0.0, 2.0**-130, 2.0**-57, 2.0**-56, 2.0**118, 2.0**119)
    for number, size in enumerate(sizes):
        x = usual * size
        x[0, (0, k // 2, k - 1)[number % 3]] = 300.0 * size
        rounded = round_input(x.cpu(), activations).cuda()
        want = product(rounded, "a16")
        assert torch.equal(product(x, activations), want)
        assert parts > 1 or torch.equal(product(x, activations, has_top=False), want)
    x = usual.clone()
    x[0, 3] = torch.nan
    assert bool(product(x, activations)[0].isnan().all())


@pytest.mark.parametrize("k", [512, 7168])
def test_the_largest_of_a_single_row(k: int) -> None:
    """Of several products together; what was cleared before."""
    x = torch.randn(1, k, device="cuda").bfloat16()
    y = torch.full((1, 600), torch.nan, device="cuda", dtype=torch.bfloat16)
    tops = torch.full((3,), 7 << 28, dtype=torch.int32, device="cuda")
    pieces = [tile(weight(Format.NVFP4, 200, k)) for _ in range(3)]
    parts = [Product(w, x, y[:, 200 * i :], y_stride=600, y_top=tops[:1]) for i, w in enumerate(pieces)]
    kept = carry(600)
    for _ in range(2):
        MatVec([Product(pieces[0], x, torch.empty_like(y[:, :200]))], 1, clears=tops[:2], carry=kept).launch()
        MatVec(parts, 1, carry=kept).launch()
    assert tops.tolist() == [int(largest(y)), 0, 7 << 28]


@pytest.mark.parametrize("activations", ["a8", "a4"])
@pytest.mark.parametrize("format", [f for f in FORMATS if f is not Format.BF16], ids=str)
def test_each_choice_of_a_single_row_is_rounded(format: Format, activations: str) -> None:
    """Each by its own largest value."""
    d, width, choices = 1000, 520, 3
    weight, _ = bank(format, 5, d, width, 1)
    tasks = Tasks.empty(1, choices, "cuda")
    tasks.expert.copy_(torch.tensor([3, 0, 4]))
    tasks.pairs[:, 0] = torch.arange(choices)
    hidden = torch.randn(choices, width, device="cuda").bfloat16() * torch.tensor([[1], [300], [1e-3]]).cuda()
    found = []
    for x, how in (
        (hidden.bfloat16(), activations),
        (round_input(hidden.bfloat16().cpu(), activations), "a16"),
    ):
        y = torch.full((choices, d), torch.nan, device="cuda", dtype=torch.bfloat16)
        MatVec([Product(weight, x.cuda(), y, "down", activations=how)], 1, tasks).launch()
        found.append(y)
    assert torch.equal(*found)


@pytest.mark.parametrize("k", [1024, 7168])
def test_several_products_in_one_launch(k: int) -> None:
    rows = 5
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    weights = [weight(f, n, k) for f, n in zip(FORMATS * 3, range(24, 24 + 12 * 40, 40), strict=True)]
    outs = [torch.full((rows, w.shape[0]), torch.nan, device="cuda") for w in weights]
    MatVec([Product(tile(w), x, y) for w, y in zip(weights, outs, strict=True)], rows).launch()
    for w, y in zip(weights, outs, strict=True):
        assert apart(y, wanted(x, w)) < 2e-5


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("n,k", [(16, 64), (40, 1028), (256, 512)])
def test_unpack(format: Format, n: int, k: int) -> None:
    w = weight(format, n, k, 4.0)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full((n, k), torch.nan, device="cuda", dtype=dtype)
        unpack(tile(w), out)
        want = decode(QuantTensor(w.format, w.data, w.shape, w.scale, 1.0))
        assert torch.equal(out.float(), want), dtype


def bank(format: Format, experts: int, n: int, k: int, halves: int) -> tuple[Tiled, list[list[QuantTensor]]]:
    to = empty(format, (n, k), experts, halves, "cuda")
    stored = [[weight(format, n, k) for _ in range(halves)] for _ in range(experts)]
    for e, parts in enumerate(stored):
        for half, part in enumerate(parts):
            put(to, e, half, part)
    return to, stored


@pytest.mark.parametrize("act", ACTS, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 13, 32])
@pytest.mark.parametrize(("d", "width"), [(576, 160), (7168, 96), (96, 4640)])
def test_experts(format: Format, act: torch.dtype, rows: int, d: int, width: int) -> None:
    experts, k, limit = 12, 3, 1.5
    up, w13 = bank(format, experts, width, d, 2)
    down, w2 = bank(format, experts, d, width, 1)
    x = torch.randn(rows, d, device="cuda").to(act)
    logits = torch.randn(rows, experts, device="cuda")
    logits[:, 5] += 2.0  # one expert gets more than eight rows of a large batch
    bias = torch.randn(experts, device="cuda") * 0.1
    tasks = Tasks.empty(rows, k, "cuda")
    chosen = torch.empty(rows, k, dtype=torch.int32, device="cuda")
    routing.route(
        logits,
        bias,
        None,
        torch.zeros(rows, dtype=torch.long, device="cuda"),
        1.5,
        act == torch.float32,
        chosen,
        tasks,
    )
    hidden = torch.full((rows * k, width), torch.nan, device="cuda", dtype=act)
    out = torch.full((rows, k + 1, d), torch.nan, device="cuda", dtype=act)
    kept = carry(rows * k * max(2 * width, d))
    MatVec([Product(up, x, hidden, "up")], rows, tasks, limit, carry=kept).launch()
    MatVec([Product(down, hidden, out, "down")], rows, tasks, carry=kept).launch()

    s = route_cpu.softplus(logits.cpu()).sqrt().cuda()
    ids = route_cpu.top_indices(s + bias, k)
    weights = route_cpu._weights(s.cpu(), ids.cpu(), 1.5).cuda()
    order = ids.argsort(1)
    ids, weights = ids.gather(1, order), weights.gather(1, order)
    assert torch.equal(ids.int(), chosen)
    assert torch.allclose(weights.flatten(), tasks.weights, rtol=1e-6)
    tolerance = 2e-5 if act == torch.float32 else 3e-2
    for row in range(rows):
        for c in range(k):
            w1, w3 = (decode(w).double() for w in w13[int(ids[row, c])])
            gate = (x[row].double() @ w1.t()).to(act).double().clamp(max=limit)
            upv = (x[row].double() @ w3.t()).to(act).double().clamp(-limit, limit)
            want = gate / (1 + torch.exp(-gate)) * upv * weights[row, c].double()
            assert apart(hidden[row * k + c], want.to(act).double()) < tolerance
            want = hidden[row * k + c].double() @ decode(w2[int(ids[row, c])][0]).double().t()
            assert apart(out[row, c], want) < tolerance


@pytest.mark.parametrize("d", [1024, 4608])
@pytest.mark.parametrize("kind", ["some", "all different", "none"])
def test_shares_of_blocks_do_not_show(kind: str, d: int) -> None:
    """One block with pieces of all experts and of the shared one, in another format; some; many."""
    rows, experts, k, width = 4, 12, 3, 160
    up, _ = bank(Format.NVFP4, experts, width, d, 2)
    down, _ = bank(Format.NVFP4, experts, d, width, 1)
    shared = tile(weight(Format.FP8, d, width))
    x = torch.randn(rows, d, device="cuda").bfloat16()
    beside = torch.randn(rows, width, device="cuda").bfloat16()
    logits = torch.randn(rows, experts, device="cuda")
    if kind == "all different":
        logits += 30.0 * torch.eye(rows, device="cuda").repeat_interleave(k, dim=1)
    logits[:, -1] -= 60.0 if kind == "none" else 0.0
    tasks = Tasks.empty(rows, k, "cuda")
    routing.route(
        logits=logits,
        bias=None,
        table=None,
        ids=torch.zeros(rows, dtype=torch.long, device="cuda"),
        scale=1.5,
        is_float=False,
        chosen=torch.empty(rows, k, dtype=torch.int32, device="cuda"),
        tasks=tasks,
        own=range(experts - 1, experts) if kind == "none" else None,
    )
    found = int((tasks.expert >= 0).sum())
    assert found == {"none": 0, "all different": rows * k}.get(kind, found)
    alone = torch.full((rows, d), torch.nan, device="cuda", dtype=torch.bfloat16)
    MatVec([Product(shared, beside, alone)], rows).launch()
    results = []
    for blocks in (None, 1, 3):
        hidden = torch.full((rows * k, width), torch.nan, device="cuda", dtype=torch.bfloat16)
        out = torch.full((rows, k + 1, d), torch.nan, device="cuda", dtype=torch.bfloat16)
        kept = carry(rows * k * max(2 * width, d))
        MatVec([Product(up, x, hidden, "up")], rows, tasks, 1.5, blocks=blocks, carry=kept).launch()
        products = [
            Product(down, hidden, out, "down"),
            Product(shared, beside, out[:, k:], y_stride=out.stride(0)),
        ]
        MatVec(products, rows, tasks, blocks=blocks, carry=kept).launch()
        assert torch.equal(out[:, k], alone)
        assert torch.isnan(out[:, :k]).all() if kind == "none" else not torch.isnan(out).any()
        results.append((hidden.view(torch.int16), out.view(torch.int16)))
    for hidden, out in results[1:]:
        assert torch.equal(hidden, results[0][0]) and torch.equal(out, results[0][1])


@pytest.mark.parametrize("rows", [1, 5, 32])
@pytest.mark.parametrize("experts", [256, 257, 384, 512])
def test_route_of_many(rows: int, experts: int) -> None:
    k = 6
    logits, bias = torch.randn(rows, experts, device="cuda"), torch.randn(experts, device="cuda") * 0.1
    tasks, chosen = Tasks.empty(rows, k, "cuda"), torch.empty(rows, k, dtype=torch.int32, device="cuda")
    ids = torch.zeros(rows, dtype=torch.long, device="cuda")
    routing.route(logits, bias, None, ids, 2.5, False, chosen, tasks)
    s = route_cpu.softplus(logits.cpu()).sqrt()
    want = route_cpu.top_indices(s + bias.cpu(), k).sort(1).values
    assert torch.equal(chosen.cpu().long(), want)
    weights = route_cpu._weights(s, want, 2.5).flatten()
    assert torch.allclose(tasks.weights.cpu(), weights, rtol=1e-6)
    used = [e for e in tasks.expert.tolist() if e >= 0]
    assert used == sorted(used) and set(used) == set(want.flatten().tolist())


@pytest.mark.parametrize("rows", [1, 5, 32])
@pytest.mark.parametrize("is_float", [False, True])
def test_route_to_own_experts(rows: int, is_float: bool) -> None:
    """Ranks with whole experts: together their tasks are those of one, each by its numbers, in the order of
    all; a single row's stay in their places."""
    k, experts, ranks = 6, 24, 2
    logits, bias = torch.randn(rows, experts, device="cuda"), torch.randn(experts, device="cuda") * 0.1
    ids = torch.zeros(rows, dtype=torch.long, device="cuda")

    def tasks_of(own: range | None) -> list[tuple[int, list[int]]]:
        tasks, chosen = Tasks.empty(rows, k, "cuda"), torch.empty(rows, k, dtype=torch.int32, device="cuda")
        routing.route(logits, bias, None, ids, 2.5, is_float, chosen, tasks, own=own)
        start = 0 if own is None else own.start
        listed = list(zip(tasks.expert.tolist(), tasks.pairs.tolist(), strict=True))
        if rows > 1:
            assert all(e < 0 for e, _ in listed[sum(e >= 0 for e, _ in listed) :]), "no gaps"
        return [(e + start, pairs) for e, pairs in listed if e >= 0]

    share = experts // ranks
    parts = [tasks_of(range(rank * share, (rank + 1) * share)) for rank in range(ranks)]
    assert all(e // share == rank for rank, part in enumerate(parts) for e, _ in part)
    assert [task for part in parts for task in part] == tasks_of(None)


def test_route_by_table_with_repeats_and_ties() -> None:
    rows, experts, k = 4, 8, 3
    table = torch.tensor([[1, 1, 0], [7, 2, 2], [3, 4, 5]], device="cuda")
    ids = torch.tensor([0, 1, 2, 1], device="cuda")
    logits = torch.zeros(rows, experts, device="cuda")
    tasks, chosen = Tasks.empty(rows, k, "cuda"), torch.empty(rows, k, dtype=torch.int32, device="cuda")
    routing.route(logits, None, table, ids, 1.5, False, chosen, tasks)
    assert chosen.tolist() == [[0, 1, 1], [2, 2, 7], [3, 4, 5], [2, 2, 7]]
    assert tasks.expert.tolist() == [0, 1, 2, 3, 4, 5, 7] + [-1] * 5
    assert tasks.pairs[2].tolist() == [3, 4, 9, 10, -1, -1, -1, -1]
    routing.route(logits, torch.zeros(experts, device="cuda"), None, ids, 1.5, False, chosen, tasks)
    assert chosen.tolist() == [[0, 1, 2]] * rows


@pytest.mark.parametrize(
    "count,topk",
    [
        *((1, 4), (4, 4), (5, 4), (1000, 512), (1024, 512), (70001, 512), (262144, 1024)),
        *(
            (2043, 7),
            (2044, 512),
            (8187, 1024),
            (8188, 1024),
        ),  # where kernels change
    ],
)
def test_select(count: int, topk: int) -> None:
    rows = 5
    scores = torch.randn(rows, count + 5, device="cuda")
    scores[1] = (scores[1] * 2).round()  # many ties, zeros of both signs
    scores[2] = -scores[2].abs()
    scores[3] = 1.5
    scores[4, : count // 2] = -torch.inf
    counts = torch.tensor([count, max(1, count - 1), count, count, count], dtype=torch.int32, device="cuda")
    out = torch.full((rows, topk), -7, dtype=torch.int32, device="cuda")
    table, slots = torch.zeros(1, 1, dtype=torch.int32, device="cuda"), torch.zeros_like(counts).long()
    selecting.select_rows(scores, counts.long() - 1, 1, table, slots, scores.shape[1], out)
    for row in range(rows):
        n = int(counts[row])
        want = route_cpu.top_indices(scores[row, :n].cpu(), min(topk, n)).sort().values.tolist()
        assert out[row].tolist() == want + [-1] * (topk - len(want)), row


@pytest.mark.parametrize("mixed", [False, True])
def test_select_of_rows_with_few_entries_and_with_many(mixed: bool) -> None:
    """Each row as in a launch for rows of its kind, though none has the capacity's number of entries."""
    counts, topk = [5, 512, 513, 8192, 8193, 20000, 0, 70000], 512
    scores = torch.randn(len(counts), 100000, device="cuda")
    positions = torch.tensor(counts, device="cuda") - 1
    table, slots = torch.zeros(1, 1, dtype=torch.int32, device="cuda"), torch.zeros_like(positions)
    out = torch.full((len(counts), topk), -7, dtype=torch.int32, device="cuda")
    how = {"overlap": not mixed, "mixed": mixed}  # as in a step, and for a prompt
    selecting.select_rows(scores, positions, 1, table, slots, scores.shape[1], out, **how)
    for row, n in enumerate(counts):
        want = route_cpu.top_indices(scores[row, :n].cpu(), min(topk, n)).sort().values.tolist()
        assert out[row].tolist() == want + [-1] * (topk - len(want)), n


def test_select_through_pages() -> None:
    rows, topk, ratio, page_entries = 2, 8, 4, 16
    table = torch.tensor([[3, 1, 0], [2, 5, 4]], dtype=torch.int32, device="cuda")
    positions = torch.tensor([159, -1], device="cuda")
    scores = torch.randn(rows, 48, device="cuda")
    out = torch.empty(rows, topk, dtype=torch.int32, device="cuda")
    slots = torch.tensor([1, 0], device="cuda")
    selecting.select_rows(scores, positions, ratio, table, slots, page_entries, out)
    best = route_cpu.top_indices(scores[0, :40].cpu(), topk).sort().values.tolist()
    pages = table[1].tolist()
    assert out[0].tolist() == [pages[e // 16] * 16 + e % 16 for e in best]
    assert out[1].tolist() == [-1] * topk
