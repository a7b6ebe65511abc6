"""Experts in slots: every byte is where the table says, and no result depends on the place."""

import ctypes
import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dsv4.gpu.shapes import Form
from dsv4.gpu.tiles import Bank, Tiled, empty, put
from dsv4.ops.experts import prefill as experts_op
from dsv4.ops.experts.placement import Placement, Slots, place, views
from dsv4.ops.linear.decode import MatVec, Product, Tasks, pairs_of_task
from dsv4.ops.linear.prefill_unpack import unpack
from dsv4.quant.codec import encode_weight
from dsv4.quant.formats import Format, QuantTensor

FORMATS = [Format.NVFP4, Format.MXFP4, Format.FP8, Format.BF16]
WIDTH, HIDDEN, EXPERTS, NAMES = 40, 1028, 5, ("layers.0.ffn.experts", "layers.1.ffn.experts")


def placements(form: Form, device: str) -> list[Placement]:
    """Everything, half and nothing in GPU memory; the half in a random order, with spare slots."""
    out = []
    for share in (EXPERTS, 2, 0):
        resident = [[e < share for e in range(EXPERTS)] for _ in NAMES]
        slot_of, num_resident, num_spilled = place(resident, num_spare=(2, 1) if share == 2 else (0, 0))
        if share == 2:
            slots = list(range(num_resident + num_spilled))
            random.Random(1).shuffle(slots)
            slot_of = [slots[:EXPERTS], slots[EXPERTS : 2 * EXPERTS]]
        out.append(Placement(form, NAMES, slot_of, Slots(form, num_resident, num_spilled, device)))
    return out


def weight(format: Format, n: int, k: int, device: str, seed: int) -> QuantTensor:
    generator = torch.Generator(device).manual_seed(seed)
    return encode_weight(torch.randn(n, k, device=device, generator=generator) * k**-0.5, format)


def filled(form: Form, placed: list[Placement], device: str) -> list[Bank]:
    """The same experts into every placement, and one after the other into whole banks: these are returned."""
    banks = []
    for layer, name in enumerate(NAMES):
        up = empty(form.format, (form.width, form.hidden), EXPERTS, 2, device)
        down = empty(form.format, (form.hidden, form.width), EXPERTS, 1, device)
        for e in range(EXPERTS):
            seed = 100 * layer + 10 * e
            parts = [
                (("w13", 0), weight(form.format, form.width, form.hidden, device, seed)),
                (("w13", 1), weight(form.format, form.width, form.hidden, device, seed + 1)),
                (("w2", 0), weight(form.format, form.hidden, form.width, device, seed + 2)),
            ]
            for (part, half), w in parts:
                put(up if part == "w13" else down, e, half, w)
                for placement in placed:
                    put(getattr(placement.expert(name, e), part), 0, half, w)
        banks.append(Bank(up, down))
    return banks


def at(address: int, like: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(ctypes.string_at(address, like.numel())), dtype=torch.uint8).view(
        like.shape
    )


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_byte_is_where_the_table_says(format: Format) -> None:
    form = Form(format, WIDTH, HIDDEN)
    placed = placements(form, "cpu")
    for layer, whole in enumerate(filled(form, placed, "cpu")):
        for placement in placed:
            bank = placement.bank(NAMES[layer])
            for part, want in ((bank.w13, whole.w13), (bank.w2, whole.w2)):
                assert part.places is not None and part.count == EXPERTS == want.count
                assert (part.units, part.slices, part.halves) == (want.units, want.slices, want.halves)
                assert part.num_bytes == want.num_bytes and torch.equal(part.factor, want.factor)
                for e, offset in enumerate(part.places.tolist()):
                    assert torch.equal(at(part.data.data_ptr() + offset, want.data[e]), want.data[e])
                    if format is not Format.BF16:
                        assert torch.equal(at(part.scale.data_ptr() + offset, want.scale[e]), want.scale[e])
                some = part.span(1, 4)
                assert some.count == 3 and some.places is not None
                assert torch.equal(some.places, part.places[1:4]) and some.data is part.data


def test_slots_do_not_overlap() -> None:
    form = Form(Format.MXFP4, WIDTH, HIDDEN)
    slots = Slots(form, 3, 4, "cpu")
    begins = sorted(slots[i].data_ptr() for i in range(len(slots)))
    assert all(b - a >= form.num_bytes for a, b in pairwise(begins))
    assert [slots.is_resident(i) for i in range(7)] == [True] * 3 + [False] * 4
    parts = [part for i in range(len(slots)) for part in views(form, slots[i])]
    for number, part in enumerate(parts):
        part.fill_(number)
    assert all(bool((part == number).all()) for number, part in enumerate(parts))


def test_a_moved_expert_is_found_when_published() -> None:
    form = Form(Format.NVFP4, WIDTH, HIDDEN)
    placement = placements(form, "cpu")[1]
    filled(form, [placement], "cpu")
    free, slot = placement.spare[0], placement.slot_of[1][3]
    placement.slots[free].copy_(placement.slots[slot])
    placement.slots[slot].fill_(0)
    before = placement.table.clone()
    placement.slot_of[1][3] = free
    assert torch.equal(placement.table, before), "the device sees a move when it is told"
    placement.publish()
    bank = placement.bank(NAMES[1])
    place_of = int(bank.w2.places[3])  # type: ignore[index]
    want = filled(form, [], "cpu")[1].w2.data[3]
    assert torch.equal(at(bank.w2.data.data_ptr() + place_of, want), want)


def products(bank: Bank, x: Tensor, tasks: Tasks, rows: int) -> tuple[Tensor, Tensor]:
    k, (width, hidden) = tasks.choices, bank.w13.shape
    up = torch.full((rows * k, width), torch.nan, device="cuda", dtype=x.dtype)
    out = torch.full((rows, k + 1, hidden), torch.nan, device="cuda", dtype=x.dtype)
    kept = torch.full((rows * k * max(2 * width, hidden),), torch.nan, device="cuda")
    MatVec([Product(bank.w13, x, up, "up")], rows, tasks, 1.5, carry=kept).launch()
    MatVec([Product(bank.w2, up, out, "down")], rows, tasks, carry=kept).launch()
    return up, out[:, :k]


@pytest.mark.gpu
@pytest.mark.parametrize("act", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 32])
@pytest.mark.parametrize(("width", "hidden"), [(WIDTH, HIDDEN), (96, 7168), (4640, 96)])
def test_products_do_not_depend_on_the_place(
    format: Format, act: torch.dtype, rows: int, width: int, hidden: int
) -> None:
    form = Form(format, width, hidden)
    placed = placements(form, "cuda")
    banks = filled(form, placed, "cuda")
    torch.manual_seed(3)
    x, choices = torch.randn(rows, hidden, device="cuda").to(act), 2
    tasks = Tasks.empty(rows, choices, "cuda")
    per_task = pairs_of_task(rows, act == torch.float32, torch.device("cuda"))
    if rows == 1:
        tasks.expert[:] = torch.tensor([1, 4], dtype=torch.int32)
        tasks.pairs[:, 0] = torch.arange(choices, dtype=torch.int32)
    else:
        number = 0
        for e in (1, 4):  # every row goes to both
            pairs = [row * choices + (e == 4) for row in range(rows)]
            for start in range(0, rows, per_task):
                some = torch.tensor(pairs[start : start + per_task], dtype=torch.int32)
                tasks.expert[number] = e
                tasks.pairs[number, : len(some)] = some
                number += 1
    tasks.weights.uniform_()
    for layer, whole in enumerate(banks):
        want = products(whole, x, tasks, rows)
        assert not any(bool(y.isnan().any()) for y in want)
        for placement in placed:
            got = products(placement.bank(NAMES[layer]), x, tasks, rows)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_unpacked_weights_do_not_depend_on_the_place(format: Format) -> None:
    form = Form(format, WIDTH, HIDDEN)
    placed = placements(form, "cuda")
    for layer, whole in enumerate(filled(form, placed, "cuda")):
        for placement in placed:
            bank = placement.bank(NAMES[layer])
            for part, want in ((bank.w13, whole.w13), (bank.w2, whole.w2)):
                found = [unpacked(each.span(1, 4)) for each in (part, want)]
                assert torch.equal(found[0], found[1]) and not bool(found[0].isnan().any())


def unpacked(weight: Tiled) -> Tensor:
    n, k = weight.shape
    out = torch.full((weight.count * weight.halves * n, k), torch.nan, device="cuda")
    unpack(weight, out)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("tokens", [3, 400])
def test_prompts_do_not_depend_on_the_place(format: Format, tokens: int) -> None:
    """All experts of a prompt in one launch: several tiles of rows for an expert, and few rows."""
    form = Form(format, WIDTH, HIDDEN)
    placed = placements(form, "cuda")
    torch.manual_seed(4)
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    ids = torch.rand(tokens, EXPERTS, device="cuda").argsort(1)[:, :2].contiguous()
    weights = torch.rand(tokens, 2, device="cuda")
    for layer, whole in enumerate(filled(form, placed, "cuda")):
        want = experts_op.routed(x, ids, weights, whole, 1.5, "a16")  # type: ignore[arg-type]
        assert not bool(want.isnan().any())
        for placement in placed:
            bank = placement.bank(NAMES[layer])
            assert torch.equal(experts_op.routed(x, ids, weights, bank, 1.5, "a16"), want)  # type: ignore[arg-type]
