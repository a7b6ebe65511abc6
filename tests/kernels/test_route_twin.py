"""route/decode.cu's own source on the CPU, the blocks of a cluster in shuffled orders, against the
reference."""

import ctypes

import pytest
import torch
from torch import Tensor

from dsv4.ops.linear.decode import COLUMNS, FLOAT_COLUMNS, Tasks
from dsv4.ops.route import cpu
from dsv4.ops.route import decode as routing
from tests.support.twin import needs_compiler, twin_of

pytestmark = needs_compiler


twin = twin_of("route", launch=ctypes.c_char_p)


def run(
    twin: ctypes.CDLL,
    logits: Tensor,
    bias: Tensor | None,
    choices: int,
    table: Tensor | None = None,
    own: range | None = None,
    is_float: bool = False,
    ids: Tensor | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tasks, Tensor]:
    rows, experts = logits.shape
    tasks, chosen = Tasks.empty(rows, choices, "cpu"), torch.full((rows, choices), -9, dtype=torch.int32)
    tasks.expert.fill_(77)  # as another step left it
    tasks.pairs[:, : FLOAT_COLUMNS if is_float else COLUMNS] = 77
    counts = torch.zeros(experts, dtype=torch.int32)

    def call(source: str, kernel: str, device: torch.device, given: ctypes.Structure, **how: int) -> None:
        problem = twin.launch(ctypes.byref(given), seed)
        assert problem == b"", problem.decode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "call", call)
        routing.route(
            logits=logits,
            bias=bias,
            table=table,
            ids=torch.arange(rows) % (1 if table is None else len(table)) if ids is None else ids,
            scale=2.5,
            is_float=is_float,
            chosen=chosen,
            tasks=tasks,
            positions=torch.arange(rows) - 1,
            counts=counts,
            own=own,
        )
    return chosen, tasks, counts


def listed(chosen: Tensor, own: range, per_task: int) -> list[tuple[int, list[int]]]:
    """Tasks as they should be: row 0 is padding, whose experts nobody reads."""
    out: list[tuple[int, list[int]]] = []
    chosen = chosen.clone()
    chosen[0] = -1
    for expert in own:
        pairs = (chosen.flatten() == expert).nonzero().flatten().tolist()
        for first in range(0, len(pairs), per_task):
            part = pairs[first : first + per_task]
            out.append((expert - own.start, part + [-1] * (COLUMNS - len(part))))
    return out


@pytest.mark.parametrize("rows", [2, 7, 32, 70])
@pytest.mark.parametrize(("experts", "choices"), [(24, 6), (256, 6), (384, 8)])
def test_batches(twin: ctypes.CDLL, rows: int, experts: int, choices: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, experts, generator=generator) * 3
    logits[:, 3] += 4.0  # liked by all: several tasks
    bias = torch.randn(experts, generator=generator) * 0.1
    chosen, tasks, counts = run(twin, logits, bias, choices)
    scores = cpu.softplus(logits).sqrt()
    want = cpu.top_indices(scores + bias, choices).sort(1).values
    assert torch.equal(chosen.long(), want)
    assert torch.allclose(tasks.weights, cpu._weights(scores, want, 2.5).flatten(), rtol=1e-6)
    assert torch.equal(counts.long(), torch.bincount(want[1:].flatten(), minlength=experts)), (
        "but for padding"
    )
    alone = run(twin, logits[-1:], bias, choices)
    assert torch.equal(alone[0][0], chosen[-1])
    assert torch.equal(alone[1].weights, tasks.weights.view(rows, choices)[-1])
    for is_float, own in ((False, range(experts)), (True, range(experts)), (False, range(3, experts // 2))):
        per_task = FLOAT_COLUMNS if is_float else COLUMNS
        _, tasks, _ = run(twin, logits, bias, choices, own=own, is_float=is_float, seed=rows)
        wanted = listed(chosen, own, per_task)
        found = list(zip(tasks.expert.tolist(), tasks.pairs.tolist(), strict=True))
        assert found[: len(wanted)] == wanted
        assert all(expert == -1 for expert, _ in found[len(wanted) :])


def test_a_table_with_repeats(twin: ctypes.CDLL) -> None:
    """More rows than the cluster takes at once; -1 (the last logits were not finite) counts as 0."""
    table = torch.tensor([[1, 1, 0], [7, 2, 2], [3, 4, 5]])
    ids = torch.arange(80) % 3
    ids[70] = -1
    chosen, tasks, _ = run(twin, torch.zeros(80, 8), None, 3, table=table, ids=ids)
    assert torch.equal(chosen.long(), table[ids.clamp(min=0)].sort(1).values)
    wanted = listed(chosen, range(8), COLUMNS)
    assert list(zip(tasks.expert.tolist(), tasks.pairs.tolist(), strict=True))[: len(wanted)] == wanted


@pytest.mark.parametrize("rows", [1, 3])
def test_ties_and_orders(twin: ctypes.CDLL, rows: int) -> None:
    """Of equals the lower number, also of those that one lane holds, whatever comes first."""
    logits = torch.zeros(rows, 100)
    logits[:, 7] = float("nan")  # the largest, as torch sorts
    for seed in range(20):
        chosen, _, _ = run(twin, logits, None, 5, seed=seed)
        assert chosen.tolist() == [[0, 1, 2, 3, 7]] * rows
    chosen, _, _ = run(twin, torch.cat((torch.full((rows, 2), -9.0), torch.zeros(rows, 98)), dim=1), None, 5)
    assert chosen.tolist() == [[2, 3, 4, 5, 6]] * rows
    one_lane = torch.full((rows, 100), -9.0)
    one_lane[:, 3::32] = 1.0
    chosen, _, _ = run(twin, one_lane, None, 3)
    assert chosen.tolist() == [[3, 35, 67]] * rows


def test_a_single_row_among_ranks(twin: ctypes.CDLL) -> None:
    """A choice of another rank's is a place without a task."""
    logits = torch.randn(1, 24, generator=torch.Generator().manual_seed(3))
    chosen, tasks, _ = run(twin, logits, None, 6, own=range(8, 16))
    here = [expert - 8 if 8 <= expert < 16 else -1 for expert in chosen[0].tolist()]
    assert tasks.expert.tolist() == here and -1 in here and max(here) >= 0
    assert tasks.pairs.tolist() == [[place] + [-1] * (COLUMNS - 1) for place in range(6)]


def test_all_rows_go_to_one(twin: ctypes.CDLL) -> None:
    """More pairs of an expert than a byte counts."""
    chosen, tasks, _ = run(twin, torch.zeros(300, 2), None, 1)
    assert not chosen.any() and tasks.expert[:38].eq(0).all() and tasks.expert[38:].eq(-1).all()
    assert tasks.pairs[:38].flatten()[:299].tolist() == list(range(1, 300))
