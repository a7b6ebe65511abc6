"""Hyper-connections of prompts from one site into the next: against the reference in float64, the forms that
products read against those that `pack` makes, and no bit that depends on company."""

import pytest
import torch
from torch import Tensor

from dsv4.gpu.tiles import tile
from dsv4.ops.linear import prefill_product as prompts
from dsv4.ops.linear.cpu import Held
from dsv4.ops.linear.prefill_packed import FP8_CODES, Packed
from dsv4.ops.mhc import cpu
from dsv4.ops.mhc import prefill_sm90 as sites
from dsv4.ops.rows import cpu as rows_cpu
from dsv4.quant.codec import encode_weight
from dsv4.quant.formats import Format
from tests.support.layouts import plain_rows

pytestmark = pytest.mark.gpu
EPS, HC_EPS, ITERS = 1e-6, 1e-6, 20
FORMS = {FP8_CODES, sites.IN_BF16}
Site = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(17)


def site(rows: int, d: int) -> Site:
    """y, streams, gate, comb; fn, base, scale, the norm's weight."""
    y, streams = torch.randn(rows, d).bfloat16(), (3 * torch.randn(rows, 4, d)).bfloat16()
    gate, comb = 2 * torch.rand(rows, 4), cpu.sinkhorn(torch.randn(rows, 4, 4), ITERS, HC_EPS)
    fn = torch.randn(4 * d, 24) / (4 * d) ** 0.5
    both = y, streams, gate, comb, fn, torch.randn(24), torch.rand(24) + 0.5, torch.rand(d) + 0.5
    return tuple(tensor.cuda() for tensor in both)


def entered(given: Site, has_y: bool = True) -> tuple[Tensor, sites.Closed]:
    y, streams, gate, comb, fn, base, scale, norm = given
    out, partial = sites.open_site(y if has_y else None, streams, gate, comb, fn)
    more = {"modes": FORMS, "wants_codes": True, "wants_x": True}
    return out, sites.close_site(out, partial, base, scale, norm, EPS, HC_EPS, ITERS, **more)  # type: ignore[arg-type]


def test_what_nobody_wants_is_not_made() -> None:
    given = site(40, 1024)
    out, partial = sites.open_site(*given[:5])
    more = (*given[5:], EPS, HC_EPS, ITERS)
    _, want = entered(given)
    both = sites.close_site(out, partial, *more, modes=FORMS, wants_normed=False)
    assert both.normed is both.x is both.codes is None
    for mode in FORMS:
        assert torch.equal(rows_of(both.packed[mode]), rows_of(want.packed[mode]))
    codes = sites.close_site(out, partial, *more, modes={FP8_CODES}, wants_normed=False)
    assert codes.normed is not None and torch.equal(codes.normed, want.normed)
    assert set(codes.packed) == {FP8_CODES}
    made = codes.packed[FP8_CODES].data
    assert torch.equal(made, want.packed[FP8_CODES].data)


def rows_of(packed: Packed) -> Tensor:
    return packed.data if packed.mode.is_fp8 else plain_rows(packed)


def part_of(given: Site, rows: slice) -> Site:
    return *(tensor[rows].contiguous() for tensor in given[:4]), *given[4:]


@pytest.mark.parametrize(("rows", "d"), [(1, 512), (37, 4096), (16, 7168), (2500, 1536)])
def test_against_the_reference(rows: int, d: int) -> None:
    given = site(rows, d)
    y, streams, gate, comb, fn, base, scale, norm = (tensor.cpu().double() for tensor in given)
    got_streams, got = entered(given)
    mixed = (comb.unsqueeze(-1) * streams.unsqueeze(2)).sum(1) + gate.unsqueeze(-1) * y.unsqueeze(1)
    assert float(((got_streams.cpu().double() - mixed).abs() / mixed.abs().clamp(min=1)).max()) < 2.0**-8
    # From here on of the streams as they were rounded.
    flat = got_streams.cpu().double().flatten(1)
    logits = flat @ fn / (flat.square().mean(1, keepdim=True) + EPS).sqrt() * scale + base
    shares = logits[:, :8].sigmoid()
    assert float((got.gate.cpu() - 2 * shares[:, 4:]).abs().max()) < 1e-5
    want = cpu.sinkhorn(logits[:, 8:].view(-1, 4, 4).float(), ITERS, HC_EPS)
    assert float((got.comb.cpu() - want).abs().max()) < 2e-5
    x = ((shares[:, :4] + HC_EPS).unsqueeze(-1) * got_streams.cpu().double()).sum(1)
    assert got.x is not None
    assert float(((got.x.cpu().double() - x).abs() / x.abs().clamp(min=1)).max()) < 2.0**-8
    x = rows_cpu.rms_norm(got.x.cpu().float(), norm.float(), EPS).double()
    assert float(((got.normed.cpu().double() - x).abs() / x.abs().clamp(min=1)).max()) < 2.0**-8


def test_without_an_output_the_streams_stay() -> None:
    given = site(40, 1024)
    one = given[1][:, 0].contiguous()
    seen_four_times = one.unsqueeze(1).expand(-1, 4, -1)
    streams, got = entered((given[0], seen_four_times, *given[2:]), has_y=False)
    assert streams is seen_four_times
    _, want = entered((given[0], seen_four_times.contiguous(), *given[2:]), has_y=False)
    assert torch.equal(got.normed, want.normed) and torch.equal(got.comb, want.comb)


def weight_of(format: Format, k: int) -> Held:
    plain = torch.randn(16, k, device="cuda")
    return tile(encode_weight(plain, format))


@pytest.mark.parametrize(("rows", "d"), [(37, 4096), (16, 512), (130, 7168)])
def test_forms_are_those_of_pack(rows: int, d: int) -> None:
    given = site(rows, d)
    given[1][3] *= 1e-6
    given[1][4, :, : d // 2] *= 1e20
    given[1][5] = 0
    given[0][5] = 0
    given[1][6, 2, 7] = float("nan")
    _, got = entered(given)
    x = got.normed.unsqueeze(1)
    want = prompts.pack(x, weight_of(Format.FP8, d), "a8").data
    assert torch.equal(got.packed[FP8_CODES].data, want)
    want = prompts.pack(x, weight_of(Format.BF16, d)).data
    made = got.packed[sites.IN_BF16].data
    assert torch.equal(plain_rows(got.packed[sites.IN_BF16]).nan_to_num(7.0), got.normed.nan_to_num(7.0))
    used = sites.IN_BF16.blocks * sites.IN_BF16.group_bytes + sites.IN_BF16.undo_bytes
    assert torch.equal(made[..., :used], want[..., :used])
    assert bool(got.normed[6].isnan().all()) and not bool(
        got.normed[[*range(6), *range(7, 16)]].isnan().any()
    )


def test_experts_rows_are_those_of_pack() -> None:
    _, got = entered(site(150, 2048))
    ids = torch.rand(150, 12, device="cuda").topk(3, dim=1).indices
    ids[40:44] = -1
    by = prompts.sort(ids.contiguous(), torch.rand(150, 3, device="cuda"), 12, 64)
    want = prompts.pack(got.normed, weight_of(Format.FP8, 2048), "a8", by).data
    assert got.codes is not None
    made, groups = prompts.gather(got.codes, by).data, int(by.counts[1])
    assert groups > 12
    is_row = (by.pairs[: groups * 16] >= 0).view(groups, 2, 8)
    rows = [data[:groups].view(groups, -1, 2, 2112) for data in (made, want)]
    codes = [part[..., :2048].reshape(groups, -1, 2, 16, 8, 16).permute(0, 2, 4, 1, 3, 5) for part in rows]
    scales = [part[..., 2048:].reshape(groups, -1, 2, 2, 8, 4).permute(0, 2, 4, 1, 3, 5) for part in rows]
    assert torch.equal(codes[0], codes[1]) and torch.equal(scales[0][is_row], scales[1][is_row])


@pytest.mark.parametrize("d", [4096, 7168])
def test_a_row_is_the_same_bits_in_any_company(d: int) -> None:
    given = site(700, d)
    streams, got = entered(given)
    for rows in (slice(0, 1), slice(1, 8), slice(8, 72), slice(72, 372), slice(399, 700)):
        its_streams, its = entered(part_of(given, rows))
        assert torch.equal(its_streams, streams[rows]), rows
        for name in ("x", "normed", "gate", "comb"):
            assert torch.equal(getattr(its, name), getattr(got, name)[rows]), (name, rows)


def test_a_nan_stays_in_its_row() -> None:
    given = site(40, 1024)
    clean = entered(given)
    given[1][17, 1, 5] = float("nan")
    given[0][33, 9] = float("inf")
    streams, got = entered(given)
    others = [row for row in range(40) if row not in (17, 33)]
    assert torch.equal(streams[others], clean[0][others])
    for name in ("normed", "gate", "comb"):
        assert torch.equal(getattr(got, name)[others], getattr(clean[1], name)[others]), name
    assert bool(got.gate[17].isnan().all()) and bool(got.comb[17].isnan().all())
