"""matvec.cu's own source on the CPU, warps in shuffled orders, copies as late as they may come, against exact
sums of whole numbers."""

import ctypes
import math

import pytest
import torch
from matvec_support import BF16, F32, FORMATS, bank, launch, tiled, wanted, weight, whole
from torch import Tensor

from dsv4.gpu.tiles import empty, put, tile
from dsv4.ops.linear.cpu import round_input
from dsv4.ops.linear.decode import FEW_COLUMNS, MAX_FEW, MatVec, Mixing, Product, Tasks, pairs_of_task, splits
from dsv4.ops.mhc.cpu import sinkhorn
from dsv4.quant.codec import encode_weight
from dsv4.quant.formats import Format, QuantTensor
from tests.support.twin import needs_compiler, twin_of

pytestmark = needs_compiler
QUANTISED = [format for format in FORMATS if format is not Format.BF16]
WIDE = 4612  # columns: ten slices, in two passes of five


twin = twin_of("matvec", level="-Og", launch=ctypes.c_char_p)


def rows_of_x(rows: int, k: int, act: torch.dtype) -> Tensor:
    """Rows of different sizes."""
    sizes = 2.0 ** (torch.arange(rows) % 4).view(-1, 1)
    return (whole(rows, k, most=2, seed=rows) * sizes).to(act)


def check_product(
    twin: ctypes.CDLL, format: Format, act: torch.dtype, n: int, k: int, rows: int, blocks: int, seed: int
) -> None:
    """Rows lie further apart than they are long: nothing there is read or written."""
    tiles, w = tiled(format, n, k, seed)
    x, pad = rows_of_x(rows, k, act), 4 if rows % 2 else 8  # copied by 8 bytes or by 16
    if act == F32 and k == 64:  # short sums have room for more bits than one FP16 or two BF16 numbers hold
        x[:, :4] = whole(rows, 4, most=1 << (20 if format is Format.BF16 else 15), seed=rows)
    apart = torch.nn.functional.pad(x, (0, pad), value=math.nan)
    out = torch.full((rows + 1, n + 3), 7.0, dtype=act if seed % 2 else F32)
    carry = torch.full((rows * n,), math.nan)
    one = Product(tiles, apart, out, x_stride=k + pad, y_stride=n + 3)
    launch(twin, MatVec([one], rows, blocks=blocks, carry=carry), seed)
    assert torch.equal(out[:rows, :n], wanted(x, w).to(out.dtype)), (rows, n, k)
    assert out[:, n:].eq(7.0).all() and out[rows:].eq(7.0).all()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_single_row(twin: ctypes.CDLL, format: Format) -> None:
    """Blocks of one unit and of many, with idle warps; one pass or two, of the same length or not."""
    cases = [(16, 64, 1), (200, 500, 1), (333, 1028, 2), (100, 1540, 1), (100, 4096, 2), (90, WIDE, 1)]
    for seed, (n, k, blocks) in enumerate([*cases, (45, 4100, 3), (40, 8192, 1)]):
        check_product(twin, format, BF16, n, k, 1, blocks, seed)


@pytest.mark.parametrize("act", [BF16, F32], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_batches(twin: ctypes.CDLL, format: Format, act: torch.dtype) -> None:
    """Groups of eight rows, of float32 two. From one warp to eight share a sum; up to sixteen groups."""
    cases = [(560, 64, 2, 1), (200, 1028, 8, 2), (100, 1540, 9, 2), (40, 4096, 3, 1), (90, WIDE, 9, 3)]
    for seed, (n, k, rows, blocks) in enumerate([*cases, (130, 4100, 7, 1), (40, 2600, 20, 4)]):
        check_product(twin, format, act, n, k, -(-rows // 4) if act == F32 else rows, blocks, seed)


@pytest.mark.parametrize("rows", [1, 3])
def test_products_side_by_side(twin: ctypes.CDLL, rows: int) -> None:
    """Each has its format, sizes and, where K is long, sums (split-K) or passes; few blocks and many."""
    sizes = [
        (Format.NVFP4, 40, 5000),
        (Format.BF16, 24, 640),
        (Format.FP8, 130, 1500),
        (Format.MXFP4, 50, 4700),
    ]
    for seed, (blocks, is_split) in enumerate(((6, True), (23, True), (5, False))):
        products, want = [], []
        for i, (format, n, k) in enumerate(sizes):
            tiles, w = tiled(format, n, k, i)
            parts = splits(k) if is_split else 1
            y = torch.full((parts, rows, n), math.nan)
            x = rows_of_x(rows, k, BF16)
            products.append(Product(tiles, x, y if parts > 1 else y[0], splits=parts))
            want.append((y, w, wanted(x, w)))
        launch(twin, MatVec(products, rows, blocks=blocks), seed)
        for y, w, exact in want:
            # Each part is rounded by the factor.
            assert torch.allclose(y.sum(0), exact, rtol=1e-6, atol=1e-3), (w.format, blocks)
            assert len(y) > 1 or torch.equal(y[0], exact), (w.format, blocks)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_when_weights_are_fetched(twin: ctypes.CDLL, format: Format) -> None:
    """Before the input or after it, all at once or not, two stages or four; blocks with idle warps, too."""
    for seed, (n, k, blocks) in enumerate([(20, 64, 1), (300, 700, 1), (100, 1400, 1), (40, WIDE, 1)]):
        tiles, w = tiled(format, n, k, seed)
        x = rows_of_x(1, k, BF16)
        for options in (
            *({"early_stages": 0}, {"early_stages": 1}, {"paced": True}, {"spread": True}),
            *({"paced": True, "triggers_late": True}, {"spread": True, "paced": True}),
            *({"spread": True, "early_stages": 1}, {"triggers_late": True}),
        ):
            y = torch.full((1, n), math.nan)
            launch(twin, MatVec([Product(tiles, x, y)], 1, blocks=blocks, **options), seed)  # type: ignore[arg-type]
            assert torch.equal(y, wanted(x, w)), (options, n, k)


def as_top(x: Tensor) -> Tensor:
    """The largest magnitude, float32's bits."""
    return x.float().abs().max().view(1).view(torch.int32)


@pytest.mark.parametrize("activations", ["a8", "a4"])
@pytest.mark.parametrize("format", QUANTISED, ids=str)
def test_a_single_row_is_rounded_on_the_way(twin: ctypes.CDLL, format: Format, activations: str) -> None:
    """As before the launch; the largest value may lie in a slice that another block multiplies."""
    for seed, k in enumerate((64, 1032, 3000, 4608)):
        parts, tiles = splits(k), tile(weight(format, 50, k, seed))
        usual = torch.randn(1, k, generator=torch.Generator().manual_seed(k)).bfloat16()
        # The last ones are on either side of where a row is too small or too large for FP16 (round.cuh).
        sizes = (1.0, 0.0, 2.0**-57, 2.0**-56, 2.0**118, 2.0**119)
        for number, size in enumerate(sizes[seed % 3 :: 3]):
            x = usual * size
            x[0, (0, k // 2, k - 1)[(number + seed) % 3]] = 300.0 * size
            found = []
            for x_in, how, top in (
                (round_input(x, activations), "a16", None),
                (x, activations, as_top(x)),
                (x, activations, None),
            ):
                if parts > 1 and how == "a4" and top is None:
                    continue
                y = torch.full((parts, 1, 50), math.nan)
                out = y if parts > 1 else y[0]
                one = Product(tiles, x_in, out, splits=parts, activations=how, x_top=top)
                launch(twin, MatVec([one], 1, blocks=parts, early_stages=seed % 3), seed)
                found.append(y)
            assert all(torch.equal(y, found[0]) for y in found[1:]), (k, size)


@pytest.mark.parametrize("k", [512, WIDE])
def test_the_largest_of_a_single_row(twin: ctypes.CDLL, k: int) -> None:
    """Of several products together; what was cleared before."""
    x, n = rows_of_x(1, k, BF16), 100
    y = torch.full((1, 3 * n), math.nan, dtype=BF16)
    tops = torch.full((3,), 7 << 28, dtype=torch.int32)
    pieces = [tiled(format, n, k, i) for i, format in enumerate(QUANTISED)]
    cut = [(tiles, y[:, n * i :]) for i, (tiles, _) in enumerate(pieces)]
    products = [Product(tiles, x, part, y_stride=3 * n, y_top=tops[:1]) for tiles, part in cut]
    carry = torch.full((3 * n,), math.nan)
    clearing = Product(pieces[0][0], x, torch.empty(1, n, dtype=BF16))
    for seed in range(2):
        launch(twin, MatVec([clearing], 1, blocks=2, clears=tops[:2], carry=carry), seed)
        assert tops.tolist() == [0, 0, 7 << 28]
        launch(twin, MatVec(products, 1, blocks=7, carry=carry), seed)
        assert torch.equal(y, torch.cat([wanted(x, w) for _, w in pieces], dim=1).to(BF16))
        assert tops.tolist() == [int(as_top(y)), 0, 7 << 28]


@pytest.mark.parametrize("rows", [1, 5, 200])
def test_beside_the_products(twin: ctypes.CDLL, rows: int) -> None:
    """Mixing, in a block of its own; or a prefetch."""
    n, k, iters, eps = 40, 300, 4, 1e-2
    tiles, w = tiled(Format.FP8, n, k)
    x, y = rows_of_x(rows, k, BF16), torch.full((rows, n), math.nan)
    logits = torch.randn(rows, 4, 4, generator=torch.Generator().manual_seed(rows))
    ahead, blocks = torch.empty(1_000_000, dtype=torch.uint8), 26 if rows > 8 else 3
    for triggers_late in (False, True):
        comb = logits.softmax(-1) + eps
        options = {"prefetch": ahead} if triggers_late else {"mixing": Mixing(comb, iters, eps)}
        plan = MatVec([Product(tiles, x, y)], rows, blocks=blocks, triggers_late=triggers_late, **options)  # type: ignore[arg-type]
        launch(twin, plan, rows)
        assert torch.equal(y, wanted(x, w))
        if not triggers_late:
            assert torch.allclose(comb, sinkhorn(logits, iters, eps), rtol=1e-5, atol=1e-7)


def swiglu(x: Tensor, pair: list[QuantTensor], limit: float, share: Tensor, act: torch.dtype) -> Tensor:
    gate, up = (wanted(x, w).to(act).double() for w in pair)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + torch.exp(-gate)) * up * share.double()


def tasks_of(chosen: list[list[int]], own: range, act: torch.dtype) -> Tasks:
    """As the router lists them; experts of other ranks have none."""
    rows, choices = len(chosen), len(chosen[0])
    tasks = Tasks.empty(rows, choices, "cpu")
    tasks.weights.copy_(torch.rand(rows * choices, generator=torch.Generator().manual_seed(rows)) + 0.5)
    flat = [expert for row in chosen for expert in row]
    if rows == 1:
        tasks.expert.copy_(torch.tensor([e - own.start if e in own else -1 for e in flat]))
        tasks.pairs[:, 0] = torch.arange(choices)
        return tasks
    per_task, count = pairs_of_task(rows, act == F32, tasks.expert.device), 0
    for expert in own:
        pairs = [i for i, e in enumerate(flat) if e == expert]
        for first in range(0, len(pairs), per_task):
            part = pairs[first : first + per_task]
            tasks.expert[count] = expert - own.start
            tasks.pairs[count, : len(part)] = torch.tensor(part, dtype=torch.int32)
            count += 1
    return tasks


def check_experts(
    twin: ctypes.CDLL,
    format: Format,
    act: torch.dtype,
    up_size: tuple[int, int],
    down_size: tuple[int, int],
    rows: int,
    blocks: int,
) -> None:
    """Experts 2 to 5 of seven, and the shared one beside "down", in another format."""
    own, choices, limit, seed = range(2, 6), 3, 6.0, rows + blocks
    (width, d), (n, k) = up_size, down_size
    up, w13 = bank(format, len(own), width, d, 2, apart=rows % 2 == 0)
    down, w2 = bank(format, len(own), n, k, 1, apart=blocks % 2 == 0)
    shared, w_shared = tiled(Format.FP8, n, k, 5)
    # Many choose expert 3: several tasks of a large batch.
    chosen = [[i % 3, 3, 4 + i % 3] for i in range(rows)]
    tasks = tasks_of(chosen, own, act)
    x = (whole(rows, d, most=2, seed=rows) / 16).to(act)
    hidden = torch.full((rows * choices, width), math.nan, dtype=act)
    carry = torch.full((rows * choices * max(2 * width, n) + rows * n,), math.nan)
    plan = MatVec([Product(up, x, hidden, "up")], rows, tasks, limit, blocks=blocks, carry=carry)
    launch(twin, plan, seed)
    here = [(row, c, e - own.start) for row, es in enumerate(chosen) for c, e in enumerate(es) if e in own]
    for row, c, expert in here:
        pair = row * choices + c
        want = swiglu(x[row : row + 1], w13[expert], limit, tasks.weights[pair], act)[0]
        apart_by = (hidden[pair].double() - want).abs()
        assert bool((apart_by <= 2.0 ** (-8 if act == BF16 else -20) * want.abs() + 1e-6).all()), (row, c)
    is_here = torch.zeros(rows * choices, dtype=torch.bool)
    is_here[[row * choices + c for row, c, _ in here]] = True
    assert hidden[~is_here].isnan().all()

    hidden = whole(rows * choices, k, most=3, seed=rows).to(act)
    beside = rows_of_x(rows, k, act)
    out = torch.full((rows, choices + 1, n), math.nan, dtype=act)
    tops = torch.zeros(choices, dtype=torch.int32) if rows == 1 and act == BF16 else None
    products = [
        Product(down, hidden, out, "down", y_top=tops),
        Product(shared, beside, out[:, choices:], y_stride=out.stride(0)),
    ]
    launch(twin, MatVec(products, rows, tasks, blocks=blocks, carry=carry), seed)
    assert torch.equal(out[:, choices], wanted(beside, w_shared).to(act))
    for row, c, expert in here:
        pair = row * choices + c
        assert torch.equal(out[row, c], wanted(hidden[pair : pair + 1], w2[expert][0])[0].to(act)), (row, c)
    assert out[:, :choices].flatten(0, 1)[~is_here].isnan().all()
    if tops is not None:
        assert tops.tolist() == [int(as_top(y)) for y in out[0, :choices].nan_to_num()]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_experts_of_a_single_row(twin: ctypes.CDLL, format: Format) -> None:
    for up, down, blocks in (
        ((80, 200), (200, 80), 5),
        ((70, 1032), (130, 600), 4),
        ((20, WIDE), (40, 4100), 7),
    ):
        check_experts(twin, format, BF16, up, down, rows=1, blocks=blocks)


@pytest.mark.parametrize("act", [BF16, F32], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_experts_of_a_batch(twin: ctypes.CDLL, format: Format, act: torch.dtype) -> None:
    """Tasks of one row to eight; shares of one block, of a few, of more than there are turns."""
    cases = [((300, 200), (260, 40), 2, 2), ((20, WIDE), (24, 4100), 5, 3)]
    if act == BF16:
        cases += [((40, 600), (24, 1032), 20, 1), ((20, 1032), (20, 520), 9, 5)]
    for up, down, rows, blocks in cases:
        check_experts(twin, format, act, up, down, rows if act == BF16 else 2, blocks)


@pytest.mark.parametrize(
    "format",
    [pytest.param(f, id=str(f), marks=() if f is Format.NVFP4 else pytest.mark.slow) for f in FORMATS],
)
def test_experts_of_few_rows_as_of_many(twin: ctypes.CDLL, format: Format) -> None:
    """Where sums do round: blocks of half the warps, and an expert's pairs in several tasks."""
    generator = torch.Generator().manual_seed(6)
    for d, width in ((600, 1040), (WIDE, 40)):
        banks = []
        for n, k, halves in ((width, d, 2), (d, width, 1)):
            to = empty(format, (n, k), 3, halves, "cpu")
            for expert in range(3):
                for half in range(halves):
                    put(to, expert, half, encode_weight(torch.randn(n, k, generator=generator) / 8, format))
            banks.append(to)
        most, rows = MAX_FEW + 1, MAX_FEW - 2
        assert pairs_of_task(most, False, banks[0].data.device) > FEW_COLUMNS
        x = torch.randn(most, d, generator=generator).bfloat16()
        chosen = [[1, i % 2 * 2] for i in range(most)]
        found = []
        for count in (most, rows):
            tasks, carry = (
                tasks_of(chosen[:count], range(3), BF16),
                torch.empty(count * 2 * max(2 * width, d)),
            )
            tasks.weights.fill_(0.37)
            hidden = torch.full((count * 2, width), math.nan, dtype=BF16)
            out = torch.full((count, 3, d), math.nan, dtype=BF16)
            up, down = Product(banks[0], x, hidden, "up"), Product(banks[1], hidden, out, "down")
            launch(twin, MatVec([up], count, tasks, 6.0, blocks=3, carry=carry), count)
            launch(twin, MatVec([down], count, tasks, blocks=5, carry=carry), count)
            found.append((hidden[: rows * 2], out[:rows, :2]))
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*found, strict=True))


def test_more_tasks_than_threads(twin: ctypes.CDLL) -> None:
    """A task for every pair: blocks count them in several rounds."""
    rows = 520
    down, weights = bank(Format.NVFP4, 2, 16, 64, 1)
    tasks = Tasks.empty(rows, 1, "cpu")
    tasks.expert.copy_(torch.arange(rows) * 2 // rows)
    tasks.pairs[:, 0] = torch.arange(rows)
    hidden, out = rows_of_x(rows, 64, BF16), torch.full((rows, 2, 16), math.nan)
    launch(twin, MatVec([Product(down, hidden, out, "down")], rows, tasks, blocks=3))
    both = [wanted(hidden, w) for (w,) in weights]
    assert torch.equal(out[:, 0], torch.where(tasks.expert.view(-1, 1) > 0, both[1], both[0]))


def test_no_task_at_all(twin: ctypes.CDLL) -> None:
    """All choices are other ranks': the shared expert alone; "up" alone writes nothing."""
    (up, _), (down, _) = bank(Format.NVFP4, 2, 40, 64, 2), bank(Format.NVFP4, 2, 64, 40, 1)
    shared, w = tiled(Format.NVFP4, 64, 40)
    for rows in (1, 4):
        tasks = Tasks.empty(rows, 3, "cpu")
        x, beside = rows_of_x(rows, 64, BF16), rows_of_x(rows, 40, BF16)
        hidden = torch.full((rows * 3, 40), math.nan, dtype=BF16)
        out = torch.full((rows, 4, 64), math.nan)
        launch(twin, MatVec([Product(up, x, hidden, "up")], rows, tasks, 1.0, blocks=3))
        products = [Product(down, hidden, out, "down"), Product(shared, beside, out[:, 3:], y_stride=256)]
        launch(twin, MatVec(products, rows, tasks, blocks=4))
        if rows > 1:
            launch(twin, MatVec(products[:1], rows, tasks, blocks=2))
        assert hidden.isnan().all() and out[:, :3].isnan().all()
        assert torch.equal(out[:, 3], wanted(beside, w))


@pytest.mark.parametrize("activations", ["a8", "a4"])
def test_each_choice_of_a_single_row_is_rounded(twin: ctypes.CDLL, activations: str) -> None:
    """Each by its own largest value, which may be known."""
    d, width, choices = 100, 520, 3
    down, _ = bank(Format.NVFP4, 5, d, width, 1)
    tasks = Tasks.empty(1, choices, "cpu")
    tasks.expert.copy_(torch.tensor([3, -1, 4]))
    tasks.pairs[:, 0] = torch.arange(choices)
    sizes = torch.tensor([[1.0], [300.0], [1.2e-3]])  # no powers of two apart
    hidden = (torch.randn(choices, width, generator=torch.Generator().manual_seed(1)) * sizes).bfloat16()
    tops = torch.cat([as_top(row) for row in hidden])
    found = []
    for x, how, top in (
        (round_input(hidden, activations), "a16", None),
        (hidden, activations, None),
        (hidden, activations, tops),
    ):
        y = torch.full((choices, d), math.nan)
        one = Product(down, x, y, "down", activations=how, x_top=top)
        launch(twin, MatVec([one], 1, tasks, blocks=6))
        found.append(y)
    assert not found[0][[0, 2]].isnan().any() and found[0][1].isnan().all()
    assert all(torch.equal(y.nan_to_num(), found[0].nan_to_num()) for y in found[1:])


@pytest.mark.parametrize("act", [BF16, F32], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_rows_do_not_see_each_other(twin: ctypes.CDLL, format: Format, act: torch.dtype) -> None:
    """Where sums do round: one order, whatever the batch, the grid and the seed."""
    generator = torch.Generator().manual_seed(4)
    for n, k in ((50, 1536), (20, WIDE)):
        w = encode_weight(torch.randn(n, k, generator=generator), format)
        tiles, rows = tile(w), 3
        x = torch.randn(rows, k, generator=generator).to(act)
        x[1] = math.nan
        together = torch.empty(rows, n)
        launch(twin, MatVec([Product(tiles, x, together)], rows, blocks=2))
        for row in range(rows):
            alone = torch.empty(1, n)
            one = Product(tiles, x[row : row + 1].clone(), alone)
            launch(twin, MatVec([one], 1, blocks=1 + row), seed=row)
            assert torch.equal(alone[0].nan_to_num(), together[row].nan_to_num()), row
            assert bool(alone.isnan().all() if row == 1 else alone.isfinite().all())


@pytest.mark.parametrize("rows", [1, 2])
def test_the_order_of_sums(twin: ctypes.CDLL, rows: int) -> None:
    """Sixteen columns at a time along a slice, then the slices one after the other, as of a prompt."""
    generator = torch.Generator().manual_seed(5)
    for n, slices in ((50, 3), (20, 10)):
        w = torch.randn(n, slices * 512, generator=generator).bfloat16()
        x = torch.randn(rows, slices * 512, generator=generator).bfloat16()
        y = torch.full((rows, n), math.nan)
        tiles = tile(QuantTensor(Format.BF16, w, (n, slices * 512)))
        launch(twin, MatVec([Product(tiles, x, y)], rows, blocks=2))
        sixteens = (w.double() * x.double().unsqueeze(1)).view(rows, n, slices, 32, 16).sum(-1)
        want = torch.zeros(rows, n)
        for i in range(slices):
            sums = torch.zeros(rows, n)
            for part in sixteens[:, :, i].unbind(-1):
                sums = (sums.double() + part).float()
            want += sums
        assert torch.equal(y, want)
