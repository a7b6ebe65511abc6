"""The sampling kernel on a GPU: the reference's choices and log-probabilities bit for bit, in a graph too."""

import pytest
import torch
from sample_support import add_penalties, make
from torch import Tensor

from dsv4.ops.sample import cpu, prefill
from dsv4.ops.sample.decode import MAX_PENALISED, sample

pytestmark = pytest.mark.gpu
POISON = 0x5A5A5A5A


def poisoned(rows: int) -> Tensor:
    return torch.full((rows, cpu.RESULT), POISON, dtype=torch.int32, device="cuda")


def check(got: Tensor, want: Tensor, settings: Tensor) -> None:
    wrong = (got.cpu() != want).any(1).nonzero().flatten().tolist()
    assert not wrong, (
        f"{len(wrong)} of {len(want)} rows; row {wrong[0]}, settings {settings[wrong[0]].tolist()}: "
        f"{got[wrong[0]].tolist()}, expected {want[wrong[0]].tolist()}"
    )


@pytest.mark.parametrize(
    ("vocab", "rows", "seed"),
    [
        *((vocab, 600, seed) for vocab in (7, 100, 4096) for seed in (1, 2)),
        *((32768, 120, 1), (129280, 80, 1), (200000, 24, 1), (262144, 16, 1)),
    ],
)
def test_rows_of_all_kinds(vocab: int, rows: int, seed: int) -> None:
    logits, settings, mask = make(rows, vocab, seed)
    want = cpu.choose(logits, settings, mask)
    out, device = poisoned(rows), (logits.cuda(), settings.cuda(), mask.cuda())
    sample(*device, out)
    check(out, want, settings)
    check(prefill.choose(*device), want, settings)
    assert torch.equal(device[1].cpu(), settings), "without positions nothing moves on"
    # The reference itself gives the same on a GPU, and a mask that was promised and is not there is visible.
    check(cpu.choose(*device), want, settings)
    check(prefill.choose(device[0], device[1], None), cpu.choose(logits, settings, None), settings)


@pytest.mark.parametrize(("vocab", "rows"), [(100, 200), (4096, 200), (129280, 60), (MAX_PENALISED, 16)])
def test_penalties(vocab: int, rows: int) -> None:
    logits, settings, mask = make(rows, vocab, seed=vocab)
    penalties = add_penalties(settings, vocab, seed=vocab, context=5000)
    want = cpu.choose(logits, settings, mask, penalties)
    device = (logits.cuda(), settings.cuda(), mask.cuda(), penalties.cuda())
    check(prefill.choose(*device), want, settings)
    check(cpu.choose(*device), want, settings)
    assert torch.equal(device[3].cpu(), penalties), "without ids nothing is noted"


def test_a_graph_notes_its_inputs() -> None:
    """Steps of one graph with penalties: every choice counts from the step after it on."""
    rows, vocab = 32, 129280
    logits, settings, mask = make(rows, vocab, seed=15)
    logits = torch.where(logits < torch.inf, logits, 0.0).clamp_min(-1e30)
    settings[:, 7] = -1
    settings[:, 6] &= ~(1 << 32)
    penalties = add_penalties(settings, vocab, seed=16, context=400)
    penalties[:, 3], penalties[:, 4], settings[:, 4] = 7, 0, 3
    penalties[:, 1] = torch.tensor([1.5]).view(torch.int32)  # frequency: choices change
    inputs = torch.arange(rows) * 3
    state = [tensor.cuda() for tensor in (logits, settings, mask, penalties)]
    out, next_ids, positions = poisoned(rows), inputs.cuda(), torch.full((rows,), 9).cuda()

    def run() -> None:
        sample(*state[:3], out, next_ids, positions, penalties=state[3])

    before = [tensor.clone() for tensor in (state[1], state[3], next_ids, positions)]
    run()
    for tensor, value in zip((state[1], state[3], next_ids, positions), before, strict=True):
        tensor.copy_(value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    slots = (settings[:, 6] >> 33) - 1
    seen = set()
    for step in range(20):
        graph.replay()
        for row in (slots >= 0).nonzero().flatten().tolist():
            penalties[slots[row], cpu.HISTORY + 7 + 3 + step - 1] = inputs[row]
        want = cpu.choose(logits, settings, mask, penalties)
        check(out, want, settings)
        assert torch.equal(state[3].cpu(), penalties)
        inputs = want[:, 0].long()
        assert torch.equal(next_ids.cpu(), inputs)
        seen.add(tuple(inputs.tolist()))
        settings[:, 4] += 1
    assert len(seen) > 10


def test_no_rows() -> None:
    assert prefill.choose(torch.empty(0, 9).cuda(), torch.empty(0, 8).long().cuda(), None).shape == (
        0,
        cpu.RESULT,
    )


def test_many_tokens_of_one_graph() -> None:
    """32 rows, some padding, four steps: ids, positions and indices move on; padding is not touched."""
    rows, vocab = 32, 129280
    logits, settings, mask = make(rows, vocab, seed=5)
    settings[:, 7] = -1
    positions = torch.arange(rows) * 10
    positions[3::7] = -1
    is_padding = positions < 0
    state = [tensor.cuda() for tensor in (logits, settings, mask)]
    out, next_ids, on_device = poisoned(rows), torch.full((rows,), 77).cuda(), positions.cuda()
    warm = [tensor.clone() for tensor in (state[1], out, next_ids, on_device)]
    sample(state[0], warm[0], state[2], *warm[1:])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(*state, out, next_ids, on_device)
    assert bool((out == POISON).all()), "captured, not run"
    for step in range(4):
        graph.replay()
        want = cpu.choose(logits, settings, mask)
        check(out[~is_padding.cuda()], want[~is_padding], settings[~is_padding])
        assert bool((out[is_padding.cuda()] == POISON).all())
        assert torch.equal(next_ids.cpu(), torch.where(is_padding, 77, want[:, 0].long()))
        assert torch.equal(on_device.cpu(), torch.where(is_padding, -1, positions + step + 1))
        settings[:, 4] += ~is_padding
        assert torch.equal(state[1].cpu(), settings)


def test_the_same_result_again_and_again() -> None:
    """A race would show in one of 300 runs beside another kernel's."""
    logits, settings, mask = (tensor.cuda() for tensor in make(64, 129280, seed=11))
    first = prefill.choose(logits, settings, mask)
    for _ in range(300):
        assert torch.equal(prefill.choose(logits, settings, mask), first)
