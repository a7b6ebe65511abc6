"""linear/prefill_pack.cu's own source on the CPU: rows as products read them, and which expert meets which
rows."""

import ctypes

import pytest
import torch
from prompt_support import BF16, fp8_rows_of, hostile, on_twin, rand
from torch import Tensor

from dsv4.gpu.tiles import Tiled, tile
from dsv4.ops.linear import prefill_product as prompts
from dsv4.ops.linear.prefill_packed import ROW_GROUP, Codes, Packed
from dsv4.quant.codec import encode_weight, fp8_rows
from dsv4.quant.formats import Format
from tests.support.twin import needs_compiler, twin_of, unfinished

pytestmark = needs_compiler
twin = twin_of("pack", launch=ctypes.c_char_p)


def weight(format: Format, k: int) -> Tiled:
    return tile(encode_weight(rand(16, k, seed=k), format))


def packed(twin: ctypes.CDLL, x: Tensor, format: Format, activations: str = "a16", **how: object) -> Packed:
    with on_twin(twin, prompts, seed=len(x)), unfinished(twin, x):
        return prompts.pack(x, weight(format, x.shape[-1]), activations, **how)  # type: ignore[arg-type]


def numbers_of(packed: Packed) -> Tensor:
    """[rows, K] of rows in 16 bits, scaling undone."""
    groups, slices = packed.data.shape[:2]
    dtype = BF16 if packed.mode.number == 2 else torch.float16
    words = packed.data[..., :16384].contiguous().view(dtype).view(groups, slices, 4, 2, 2, 8, 8, 8)
    each = torch.arange(8)  # chunk c of row r is at c ^ r
    chunks = words.take_along_dim((each.unsqueeze(1) ^ each).view(1, 1, 1, 1, 1, 8, 8, 1), dim=6)
    rows = chunks.permute(0, 3, 5, 1, 2, 4, 6, 7).reshape(groups * ROW_GROUP, slices, 8, 64)
    mixed = (
        8 if packed.mode.number == 0 else 2
    )  # chunks whose columns mix: word w of chunk c is pair w * mixed + c
    pairs = rows.reshape(groups * ROW_GROUP, slices, -1, mixed, 4, 2).transpose(3, 4)
    undo = packed.data[..., 16384:16448].contiguous().view(torch.float32)  # [groups, slices, rows]
    values = pairs.reshape(groups * ROW_GROUP, slices, 512).float() * undo.transpose(1, 2).reshape(
        -1, slices, 1
    )
    return values.flatten(1)


@pytest.mark.parametrize("format", [Format.NVFP4, Format.FP8, Format.MXFP4])
@pytest.mark.parametrize(("rows", "k"), [(1, 512), (21, 1032), (16, 68), (33, 516)])
def test_rows_in_16_bits(twin: ctypes.CDLL, format: Format, rows: int, k: int) -> None:
    """Their values are x's; in FP16, but for what is 2^-29 of a slice's largest, or less than 2^-126."""
    x = hostile(rows, k)
    made = packed(twin, x.unsqueeze(1), format)
    got = numbers_of(made)
    assert not got[rows:].any() and not got[:, k:].any()
    is_number = x.isfinite().all(1)
    want, found = x[is_number].double(), got[:rows, :k][is_number].double()
    if made.mode.number == 2:
        assert torch.equal(found, want)
    top = torch.nn.functional.pad(want.abs(), (0, -k % 512)).unflatten(1, (-1, 512)).amax(2)
    lost = (top * 2.0**-39).clamp(min=2.0**-126).repeat_interleave(512, 1)[:, :k]
    assert ((found - want).abs() <= lost).all()
    assert not got[:rows][~is_number].isfinite().all(1).any()


@pytest.mark.parametrize(("rows", "k"), [(1, 512), (21, 1032), (16, 68), (33, 516)])
def test_rows_in_fp8_are_the_codecs(twin: ctypes.CDLL, rows: int, k: int) -> None:
    x = hostile(rows, k)
    codes, scales = fp8_rows_of(packed(twin, x.unsqueeze(1), Format.FP8, "a8"))
    want, its_scales = fp8_rows(x, 128)
    is_number = ~x.isnan().any(1)
    assert torch.equal(codes[:rows, :k][is_number], want.view(torch.uint8)[is_number])
    assert torch.equal(
        scales[:rows, : its_scales.shape[1]][is_number], torch.exp2(its_scales[is_number].float() - 127 - 24)
    )
    for row in (~is_number).nonzero().flatten().tolist():
        blocks = torch.nn.functional.pad(x[row].isnan(), (0, -k % 128)).unflatten(0, (-1, 128)).any(1)
        assert torch.equal(scales[row, : len(blocks)].isnan(), blocks)
    assert not codes[:rows, k:].any() and not codes[rows:].any()


def test_matrices_and_strides(twin: ctypes.CDLL) -> None:
    """Rows further apart than they are long, of which nothing else is read."""
    apart = torch.full((19, 3, 600), torch.nan, dtype=BF16)
    apart[..., :516] = rand(19, 3, 516, seed=3).bfloat16()
    x = apart[..., :516]
    for format in (Format.NVFP4, Format.BF16):
        with on_twin(twin, prompts):
            got = numbers_of(prompts.pack(x, weight(format, 516))).view(3, 32, 1024)
        assert torch.equal(got[:, :19, :516].transpose(0, 1).bfloat16(), x)
        assert not got[:, 19:].any() and not got[..., 516:].any()


def choices(tokens: int, k: int, experts: int) -> Tensor:
    """Distinct ones, some none; one expert is popular, the last one nobody's."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts - 1, generator=generator).topk(k, dim=1).indices
    ids[tokens // 2 :, 0] = 0
    ids[0, 0] = -1
    return ids


def check_sorted(by: prompts.Sorted, ids: Tensor, weights: Tensor, first: int, experts: int) -> None:
    num_tiles, num_groups = by.counts.tolist()
    rows, expert = by.pairs[: num_groups * ROW_GROUP].long(), ids.flatten()
    seen = rows[rows >= 0]
    order = expert.argsort(stable=True)
    is_own = (expert >= first) & (expert < first + experts)
    assert torch.equal(seen, order[is_own[order]]), "by expert, and in the pairs' order"
    assert torch.equal(by.weights[: len(rows)], torch.where(rows >= 0, weights.flatten()[rows], 0.0))
    covered = 0
    for number, at, height, _ in by.tiles[:num_tiles].tolist():
        assert at % ROW_GROUP == 0 and 0 < height <= by.cap
        assert (expert[rows[at : at + height]] == first + number).all()
        covered += height
    assert covered == len(seen)


SIZES = [(1, 6, 40, 128), (70, 3, 20, 64), (700, 6, 192, 144)]


@pytest.mark.parametrize(("tokens", "k", "experts", "most"), SIZES)
def test_sorting(
    twin: ctypes.CDLL, tokens: int, k: int, experts: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks whose warps have a few pairs each, or many: few blocks."""
    ids, weights = choices(tokens, k, experts), rand(tokens, k, seed=2)
    for seed, (first, own, ranks) in enumerate(((0, experts, 1), (experts // 2, experts // 2, 2))):
        with on_twin(twin, prompts, seed), unfinished(twin, ids, weights):
            by = prompts.sort(ids, weights, own, most, first=first, ranks=ranks)
        check_sorted(by, ids, weights, first, own)
        monkeypatch.setattr(prompts, "MAX_SORT_BLOCKS", 2)


def test_rows_of_experts(twin: ctypes.CDLL) -> None:
    """Gathered from rows as they are, in FP8 too, or from codes that are there: rows of no pair are zeros."""
    tokens, k, experts = 50, 1024, 12
    x, ids = hostile(tokens, k), choices(tokens, 3, experts)
    with on_twin(twin, prompts):
        by = prompts.sort(ids, rand(tokens, 3, seed=2), experts, 64)
        plain = prompts.pack(x, weight(Format.BF16, k), by=by)
        rounded = prompts.pack(x, weight(Format.FP8, k), "a8", by)
    groups = int(by.counts[1])
    pairs = by.pairs[: groups * ROW_GROUP].long()
    want = torch.where((pairs >= 0).unsqueeze(1), x[pairs.clamp(min=0) // 3].float(), 0.0)
    got = numbers_of(plain)[: groups * ROW_GROUP]
    assert torch.equal(got.nan_to_num(3.0), want.nan_to_num(3.0))
    codes, scales = (its[: groups * ROW_GROUP] for its in fp8_rows_of(rounded))
    data, its_scales = fp8_rows(x, 128)
    alone = Codes(data.view(torch.uint8), torch.exp2(its_scales.float() - 127 - 24))
    with on_twin(twin, prompts, seed=1), unfinished(twin, alone.data, alone.scale):
        gathered, scales_there = (its[: groups * ROW_GROUP] for its in fp8_rows_of(prompts.gather(alone, by)))
    is_row = (pairs >= 0) & ~want.isnan().any(1)
    assert torch.equal(gathered[is_row], codes[is_row]) and not gathered[pairs < 0].any()
    assert torch.equal(scales_there[is_row], scales[is_row])
