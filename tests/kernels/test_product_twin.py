"""Products of prompts on the CPU, their kernels' own source: against exact sums, and against the decode step
bit for bit. Copies and products come as late as they may."""

import ctypes
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from matvec_support import FORMATS, bank, launch, tiled, wanted, whole
from prompt_support import BF16, F32, on_twins, rand
from torch import Tensor

from dsv4.gpu.tiles import Tiled, tile
from dsv4.ops.linear import prefill_product as prompts
from dsv4.ops.linear.decode import MatVec, Product
from dsv4.ops.linear.prefill_packed import Packed
from dsv4.quant.codec import decode, encode_weight, fp8_round
from dsv4.quant.formats import Format, QuantTensor
from tests.support.once import folder_of_run
from tests.support.twin import at, needs_compiler, of_source, unfinished

pytestmark = needs_compiler
Twins = Callable[[str], ctypes.CDLL]
IN_FP8 = [Format.MXFP4, Format.FP8]
KINDS = [*((format, "a16") for format in FORMATS), *((format, "a8") for format in IN_FP8)]
kinds = pytest.mark.parametrize(("format", "activations"), KINDS, ids=lambda it: str(it))


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    folder = folder_of_run(tmp_path_factory, "twins")
    return lambda source: of_source(source, folder)


def multiplied(
    twins: Twins,
    x: Tensor,
    w: Tiled,
    activations: str = "a16",
    dtype: torch.dtype = F32,
    groups: int = 1,
    parts: int = 1,
    seed: int = 0,
) -> Tensor:
    """x [T, G, K] or [T, K]. Until the wait there is neither x nor y; copies may read W and x alone."""
    x = x.unsqueeze(1) if x.dim() == 2 else x
    n = w.shape[0] // groups
    y = torch.full((len(x), groups, n + 3), 7.0, dtype=dtype)
    with on_twins(twins, prompts, seed):
        packed = prompts.pack(x, w, activations)
        assert packed.mode.is_fp8 == (activations == "a8" and w.format in IN_FP8)
        run(twins, packed, w, y, lambda: prompts.product(packed, w, y[..., :n], parts))
    assert y[..., n:].eq(7.0).all()
    return y[..., :n].flatten(1)


def run(
    twins: Twins, x: Packed, w: Tiled, y: Tensor, launch: Callable[[], None], by: prompts.Sorted | None = None
) -> None:
    lists = [] if by is None else [by.pairs, by.weights, by.tiles, by.counts]
    twin = twins(f"linear/prefill_sm90_{'a8_' if x.mode.is_fp8 else ''}{w.format.value}")
    for tensor in (w.data, x.data):
        storage = tensor.untyped_storage()
        twin.allow(ctypes.c_void_p(storage.data_ptr()), ctypes.c_int64(storage.nbytes()))
    try:
        with unfinished(twin, x.data, y, *lists):
            launch()
    finally:
        twin.allow(at(None), ctypes.c_int64(0))


def whole_rows(rows: int, k: int) -> Tensor:
    """Rows of different sizes."""
    return (whole(rows, k, most=2, seed=rows) * 2.0 ** (torch.arange(rows) % 4).view(-1, 1)).bfloat16()


# Every size of tile, in both kernels; units that a block has no rows for; slices beyond the rings.
SHAPES = [(200, 1056, 40), (33, 68, 1), (40, 516, 17), (300, 1540, 100), (140, 520, 130)]


@kinds
def test_sums_of_integers_are_exact(twins: Twins, format: Format, activations: str) -> None:
    for seed, (n, k, rows) in enumerate(SHAPES):
        tiles, w = tiled(format, n, k, seed)
        x = whole_rows(rows, k)
        for dtype in (F32, BF16):
            got = multiplied(twins, x, tiles, activations, dtype, seed=seed)
            assert torch.equal(got, wanted(x, w).to(dtype)), (n, k, rows, dtype)


@kinds
def test_a_row_is_the_same_bits_in_any_company(twins: Twins, format: Format, activations: str) -> None:
    """Where sums do round, whatever the tile, the grid and the seed; and a NaN stays in its row."""
    n, k, rows = 50, 1040, 140
    w = tile(encode_weight(rand(n, k, seed=1), format))
    x = rand(rows, k, seed=2).bfloat16()
    x[5] *= 1e-6
    x[6] *= 1e20
    x[7, ::2] = 0
    together = multiplied(twins, x, w, activations)
    for seed, part in enumerate((slice(0, 9), slice(3, 33), slice(70, 120))):
        alone = multiplied(twins, x[part], w, activations, seed=seed + 1)
        assert torch.equal(alone, together[part]), part
    x[20, 700] = torch.nan
    got = multiplied(twins, x[:30], w, activations)
    is_clean = torch.arange(30) != 20
    assert torch.equal(got[is_clean], together[:30][is_clean]) and got[20].isnan().all()


def scaled(format: Format, n: int, k: int) -> tuple[Tiled, QuantTensor]:
    w = encode_weight(rand(n, k, seed=1), format)
    return tile(w), w


@pytest.mark.parametrize("format", [Format.NVFP4, Format.FP8, Format.BF16], ids=str)
def test_decode_gives_the_same_bits(twins: Twins, format: Format) -> None:
    """One sum and two (split-K)."""
    w, stored = scaled(format, 40, 1600)
    x, y = rand(8, 1600, seed=2).bfloat16(), torch.full((8, 40), torch.nan)
    launch(twins("linear/matvec"), MatVec([Product(w, x, y)], 8, blocks=2))
    got = multiplied(twins, x, w)
    assert torch.equal(got, y)
    exact = x.double() @ decode(stored).double().t()
    assert float((got - exact).norm() / exact.norm()) < 1e-6
    parts = torch.full((2, 8, 40), torch.nan)
    launch(twins("linear/matvec"), MatVec([Product(w, x, parts, splits=2)], 8, blocks=3))
    assert torch.equal(multiplied(twins, x, w, parts=2), parts[0] + parts[1])


@pytest.mark.parametrize("format", IN_FP8, ids=str)
def test_sums_in_fp8(twins: Twins, format: Format) -> None:
    w, stored = scaled(format, 40, 1600)
    x = rand(20, 1600, seed=2).bfloat16()
    got, exact = multiplied(twins, x, w, "a8"), fp8_round(x, 128).double() @ decode(stored).double().t()
    assert float((got - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize(("format", "activations"), [(Format.NVFP4, "a16"), (Format.FP8, "a8")])
def test_groups(twins: Twins, format: Format, activations: str) -> None:
    groups, n, k = 3, 48, 320
    tiles, w = tiled(format, groups * n, k)
    x = whole_rows(20 * groups, k).view(20, groups, k)
    got = multiplied(twins, x, tiles, activations, groups=groups).view(20, groups, n)
    want = wanted(x.flatten(0, 1), w).view(20, groups, groups, n)
    assert torch.equal(got, want[:, torch.arange(groups), torch.arange(groups)])


def padded_rows(ids: Tensor, experts: int) -> int:
    return ids.numel() + experts * prompts.ROW_GROUP


def values(w: QuantTensor) -> Tensor:
    """[K, N], times the factor, which not all formats' codecs multiply with."""
    return decode(replace(w, global_scale=1.0)).double().t() * w.global_scale


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    gate, up = gate.bfloat16().double().clamp(max=limit), up.bfloat16().double().clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize("apart", [False, True])
@kinds
def test_experts(twins: Twins, format: Format, activations: str, apart: bool) -> None:
    """Tiles of many heights in a block; experts one after the other, or each in its place."""
    experts, d, width, tokens, limit = 4, 68, 72, 60, 1.5
    (up, up_of), (down, down_of) = (
        bank(format, experts, width, d, 2, apart),
        bank(format, experts, d, width, 1, apart),
    )
    x = (whole_rows(tokens, d).float() / 64).bfloat16()
    ids = torch.tensor([[0, 1 + t % 2] if t else [3, -1] for t in range(tokens)])
    weights = rand(tokens, 2, seed=3).sigmoid()
    hidden = torch.full((padded_rows(ids, experts), width), torch.nan, dtype=BF16)
    y = torch.full((tokens * 2, d), torch.nan, dtype=BF16)
    with on_twins(twins, prompts, seed=int(apart)):
        by = prompts.sort(ids, weights, experts, prompts.max_cap(up, prompts.mode_of(up, activations)))
        rows = prompts.pack(x, up, activations, by)
        run(twins, rows, up, hidden, lambda: prompts.gate_up(rows, up, hidden, limit, by, by.weights), by)
        made = prompts.pack(hidden[: by.capacity], down, activations, by, gathers=False)
        run(twins, made, down, y, lambda: prompts.down(made, down, y, by), by)
    rounds = activations == "a8"
    for token, choice in ((t, c) for t in range(tokens) for c in range(2)):
        expert = int(ids[token, choice])
        if expert < 0:
            assert y[2 * token + choice].isnan().all()
            continue
        row = fp8_round(x[token], 128).double() if rounds else x[token].double()
        gate, its_up = (row @ values(part) for part in up_of[expert])
        its = (swiglu(gate, its_up, limit) * weights[token, choice].double()).bfloat16()
        its = fp8_round(its, 128) if rounds else its
        want = its.double() @ values(down_of[expert][0])
        error = (y[2 * token + choice].double() - want).norm() / want.norm()
        assert error < 2.0**-6, (token, choice)
