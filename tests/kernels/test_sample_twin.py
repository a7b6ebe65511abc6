"""The sampling kernel's own source on the CPU: arithmetic and choices are the reference's, bit for bit."""

import ctypes
import math

import pytest
import torch
from sample_support import add_penalties, make
from torch import Tensor

from dsv4.ops.sample import cpu
from tests.support.twin import at, needs_compiler, twin_of

pytestmark = needs_compiler


twin = twin_of("sample", worst_estimate=ctypes.c_double, sample=ctypes.c_char_p)


def mapped(function, x: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[no-untyped-def]
    out = torch.empty(x.shape, dtype=dtype)
    function(at(x), ctypes.c_int64(x.numel()), at(out))
    return out


def random_doubles(n: int, seed: int) -> Tensor:
    """Of all exponents, signs and mantissas; NaN and infinity among them."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (n,), generator=torch.Generator().manual_seed(seed)).view(
        torch.float64
    )


def test_weights(twin: ctypes.CDLL) -> None:
    uniform = -torch.rand(2_000_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 32
    anything = -random_doubles(1_000_000, 1).abs().nan_to_num(nan=1.0)
    edges = torch.tensor([0.0, -0.0, -5e-324, -2.3e-308, -31.0, math.nextafter(-31, 0), -math.inf])
    ties = -(torch.arange(46, dtype=torch.float64) - 0.5) / 1.4426950408889634  # k about to change
    for x in (uniform, anything, edges.double(), ties):
        assert torch.equal(mapped(twin.weights, x, torch.int64), cpu.weight_of(x))


def test_logs(twin: ctypes.CDLL) -> None:
    anything = random_doubles(2_000_000, 2).abs()
    anything = anything[torch.isfinite(anything) & (anything >= 2.0**-1022)]
    near = 1 - 2.0 ** -torch.arange(1, 54, dtype=torch.float64)
    root = torch.tensor([math.sqrt(0.5), math.sqrt(2), math.nextafter(math.sqrt(2), 2), 1.0, 2.0**-53])
    for y in (anything, near, root.double(), 1 + near):
        assert torch.equal(mapped(twin.logs, y, torch.float64), cpu._log(y))


def test_noise(twin: ctypes.CDLL) -> None:
    for seed, index in ((0, 0), (1, 1), ((1 << 64) - 1, 123456), (1 << 63, (1 << 40) + 7)):
        out = torch.empty(262_144, dtype=torch.float64)
        twin.noise(ctypes.c_uint64(seed), ctypes.c_int64(index), ctypes.c_int64(out.numel()), at(out))
        u = cpu.uniform(torch.tensor([cpu._signed(seed)]), torch.tensor([index]), torch.arange(out.numel()))[
            0
        ]
        assert torch.equal(out, cpu.gumbel(u))


@pytest.mark.parametrize("temperature", [1.0, 0.013, 7.5e-3, 80.0, 1e30, 1e-30, 5e-324])
def test_estimates_are_well_within_their_bound(twin: ctypes.CDLL, temperature: float) -> None:
    """KEY_ERROR is 1e-4. Random bits of every size, on both sides of where the way to E changes."""
    generator = torch.Generator().manual_seed(4)
    uniform = torch.randint(1, 1 << 53, (300_000,), generator=generator)
    smooth = torch.exp2(torch.rand(100_000, dtype=torch.float64, generator=generator) * 53).long()
    powers, edge = 1 << torch.arange(54), 0x095F619980C433 + torch.arange(-1000, 1000)
    bits = torch.cat((uniform, smooth, (1 << 53) - smooth, powers, powers - 1, (1 << 53) - powers, edge))
    bits = bits.clamp(1, (1 << 53) - 1)
    for best in (0.0, 17.3, -3e38):
        far = torch.rand(bits.shape, dtype=torch.float64, generator=generator) * 46 * temperature
        values = (best - far).float().clamp_max(best).clamp_min(-3.4028234663852886e38).contiguous()
        worst = twin.worst_estimate(
            *(at(values), ctypes.c_float(values.max()), ctypes.c_double(temperature), at(bits)),
            ctypes.c_int64(bits.numel()),
        )
        assert worst < 2.5e-5


@pytest.mark.parametrize("span", [0.0, 1e-42, 1e-3, 21.7, 1e30, 3.4e38, math.inf])
def test_places_have_the_order_of_the_logits(twin: ctypes.CDLL, span: float) -> None:
    for seed in range(20):
        logits, _, _ = make(1, 5000, seed)
        values = torch.where(logits[0].isfinite(), logits[0], 0.0) + 0.0
        best = float(values.max())
        out = torch.empty(5000, dtype=torch.int64)
        twin.places(ctypes.c_float(best), ctypes.c_float(span), at(values), ctypes.c_int64(5000), at(out))
        assert torch.equal(out.argsort(descending=True), values.sort(descending=True, stable=True).indices)
        assert int(out.min()) >= 0 and int(out.max()) < 1 << 58


def test_orders_of_doubles(twin: ctypes.CDLL) -> None:
    values = random_doubles(100_000, 5).nan_to_num(nan=0.0)
    order = mapped(twin.orders, values, torch.int64) ^ (-1 << 63)
    assert torch.equal(order.argsort(stable=True), values.sort(stable=True).indices)
    zeros = mapped(twin.orders, torch.tensor([0.0, -0.0], dtype=torch.float64), torch.int64)
    assert zeros[0] == zeros[1]


@pytest.mark.parametrize(
    ("cluster", "vocab", "rows", "most_held"),
    [(2, 7, 150, 18500), (2, 100, 150, 32), (2, 1500, 250, 18500), (2, 1500, 60, 200), (8, 4096, 40, 18500)],
)
def test_the_kernel_chooses_what_the_reference_does(
    twin: ctypes.CDLL, cluster: int, vocab: int, rows: int, most_held: int
) -> None:
    logits, settings, mask = make(rows, vocab, seed=vocab + most_held)
    want = cpu.choose(logits, settings, mask)
    for has_mask in (True, False):
        if not has_mask:
            want = cpu.choose(logits, settings, None)
        out = torch.full((rows, cpu.RESULT), 0x5A5A5A5A, dtype=torch.int32)
        problem = twin.sample(
            *(cluster, at(logits), rows, vocab, at(settings), at(mask if has_mask else None), at(out)),
            *(at(None), at(None), at(None), 0, most_held, 1 + vocab),
        )
        assert problem == b""
        wrong = (out != want).any(1).nonzero().flatten().tolist()
        assert not wrong, f"row {wrong[0]}: {out[wrong[0]].tolist()}, expected {want[wrong[0]].tolist()}"


def test_rows_in_use_move_on_and_padding_stays(twin: ctypes.CDLL) -> None:
    logits, settings, mask = make(40, 100, seed=9)
    positions = torch.arange(40) * 3 - 1
    positions[7:11] = -1
    before, next_ids = settings.clone(), torch.full((40,), 77)
    out, moved = torch.full((40, cpu.RESULT), 99, dtype=torch.int32), positions.clone()
    problem = twin.sample(
        *(2, at(logits), 40, 100, at(settings), at(mask), at(out), at(next_ids), at(moved)),
        *(at(None), 0, 18500, 3),
    )
    assert problem == b""
    is_padding = positions < 0
    want = cpu.choose(logits, before, mask)
    assert torch.equal(out[~is_padding], want[~is_padding]) and bool((out[is_padding] == 99).all())
    assert torch.equal(next_ids, torch.where(is_padding, 77, want[:, 0].long()))
    assert torch.equal(moved, positions + ~is_padding)
    before[:, 4] += ~is_padding
    assert torch.equal(settings, before)


def test_penalties_of_single_tokens(twin: ctypes.CDLL) -> None:
    """One number at a time, as Python's own float32 arithmetic has it."""
    logits, _, _ = make(1, 5000, seed=21)
    rng = torch.Generator().manual_seed(2)
    bias = torch.randn(5000, generator=rng) * 50
    count = torch.randint(0, 5, (5000,), generator=rng)
    in_prompt = torch.rand(5000, generator=rng) < 0.3
    seen = (count + (in_prompt.long() << 31)).to(torch.int32)
    for presence, frequency, repetition in ((0.5, 0.25, 1.3), (-2.0, 2.0, 0.01), (0.0, 0.0, 100.0)):
        out = torch.empty(5000)
        numbers = [ctypes.c_float(number) for number in (presence, frequency, repetition)]
        twin.penalise(at(logits), at(bias), at(seen), ctypes.c_int64(5000), *numbers, at(out))
        v = logits[0] + bias
        repeated = torch.where(v > 0, v / repetition, v * repetition)
        v = torch.where((count > 0) | in_prompt, repeated, v) - torch.tensor(frequency) * count.float()
        v = torch.where(count > 0, v - presence, v)
        want = torch.where(
            logits[0] > -math.inf, v.clamp(-3.4028234663852886e38, 3.4028234663852886e38), logits[0]
        )
        assert torch.equal(out.nan_to_num(7.5), want.nan_to_num(7.5))


@pytest.mark.parametrize(
    ("cluster", "vocab", "rows"), [(2, 7, 100), (2, 100, 150), (2, 1500, 200), (8, 4096, 30)]
)
def test_the_kernel_penalises_as_the_reference_does(
    twin: ctypes.CDLL, cluster: int, vocab: int, rows: int
) -> None:
    logits, settings, mask = make(rows, vocab, seed=vocab + 1)
    penalties = add_penalties(settings, vocab, seed=vocab)
    want, before = cpu.choose(logits, settings, mask, penalties), penalties.clone()
    plain = settings.clone()
    plain[:, 6] &= (1 << 33) - 1
    assert bool((cpu.choose(logits, plain, mask)[:, 0] != want[:, 0]).any()), "penalties matter"
    out = torch.full((rows, cpu.RESULT), 0x5A5A5A5A, dtype=torch.int32)
    problem = twin.sample(
        *(cluster, at(logits), rows, vocab, at(settings), at(mask), at(out), at(None), at(None)),
        *(at(penalties), penalties.shape[1], 18500, 1 + vocab),
    )
    assert problem == b""
    wrong = (out != want).any(1).nonzero().flatten().tolist()
    assert not wrong, f"row {wrong[0]}: {out[wrong[0]].tolist()}, expected {want[wrong[0]].tolist()}"
    assert torch.equal(penalties, before), "without ids nothing is noted"


def test_inputs_are_noted_in_the_history(twin: ctypes.CDLL) -> None:
    """Four steps in a row: each row's input lies in its history afterwards, and nothing else has changed."""
    rows, vocab = 30, 100
    logits, settings, mask = make(rows, vocab, seed=5)
    logits = torch.where(logits < math.inf, logits, 0.0).clamp_min(-1e30)
    settings[:, 7] = -1
    settings[:, 6] &= ~(1 << 32)  # no masks
    penalties = add_penalties(settings, vocab, seed=6)
    settings[:, 4] = settings[:, 4].clamp_max(200)
    penalties[:, 3] = 1 + torch.arange(rows) % 50  # prompts
    positions = torch.zeros(rows, dtype=torch.long)
    positions[4:9] = -1
    next_ids = torch.arange(rows) % vocab
    known, how = penalties.clone(), settings.clone()
    out = torch.empty((rows, cpu.RESULT), dtype=torch.int32)
    for step in range(4):
        inputs = next_ids.clone()
        problem = twin.sample(
            *(2, at(logits), rows, vocab, at(settings), at(mask), at(out), at(next_ids), at(positions)),
            *(at(penalties), penalties.shape[1], 18500, step),
        )
        assert problem == b""
        for row in range(rows):
            slot = (int(how[row, 6]) >> 33) - 1
            if positions[row] >= 0 and slot >= 0:
                known[slot, cpu.HISTORY + int(known[slot, 3]) + int(how[row, 4]) - 1] = inputs[row]
        want = cpu.choose(logits, how, mask, known)
        in_use = positions >= 0
        assert torch.equal(out[in_use], want[in_use]) and torch.equal(penalties, known)
        assert torch.equal(next_ids, torch.where(in_use, want[:, 0].long(), inputs))
        how[:, 4] += in_use
