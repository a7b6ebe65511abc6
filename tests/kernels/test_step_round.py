"""The launches of a round of speculation: what they mean, and what a host that waits would do."""

import pytest
import torch
from step_support import on_gpu, runs, there
from torch import Tensor

from dsv4.gpu.meaning import run_and_check
from dsv4.ops.sample.cpu import HISTORY, RESULT, WIDTH, pack

pytest.importorskip("triton", reason="Triton is not installed")
from dsv4.ops.draft import round as rounds

pytestmark = runs
SLOTS, BLOCK, LONGEST = 6, 5, 40


def seats_of(*given: tuple[int, int, int], **settings: int) -> Tensor:
    return torch.tensor([[*seat, *pack(**settings)] for seat in given])  # type: ignore[arg-type]


def state_with(**slots: tuple[int, ...]) -> Tensor:
    state = rounds.state_of(SLOTS, BLOCK, "cpu")
    for name, values in slots.items():
        state[int(name[1:]), : len(values)] = torch.tensor(values)
    return state


class Buffers:
    def __init__(self, seats: Tensor, state: Tensor, drafts: int) -> None:
        rows = len(seats) * (drafts + 1)
        self.seats, self.state = there(seats), there(state)
        self.ids, self.positions, self.slots = there(torch.full((3, rows), 77)).unbind(0)
        self.settings = there(torch.full((rows, WIDTH), 77))
        self.verified = there(torch.full((len(seats),), 77))
        self.penalties = there(torch.full((SLOTS, HISTORY + LONGEST), -3, dtype=torch.int32))
        self.taken = there(torch.full((len(seats), 2), 77, dtype=torch.int32))
        self.committed = there(torch.full((rows,), 77))
        self.anchors, self.anchors_at, self.anchors_slots = there(torch.full((3, len(seats)), 77)).unbind(0)
        self.next_settings = there(torch.full((len(seats), WIDTH), 77))

    def open(self) -> None:
        names = ("seats", "state", "ids", "positions", "slots", "settings", "verified", "penalties")
        self._checked(rounds.open_round, {name: getattr(self, name) for name in names})

    def accept(self, chosen: Tensor) -> None:
        names = ("seats", "state", "verified", "taken", "committed", "anchors", "anchors_at", "anchors_slots")
        out = torch.full((len(self.ids), RESULT), -1, dtype=torch.int32)
        out[:, 0] = chosen
        given = {name: getattr(self, name) for name in names}
        self._checked(rounds.accept, {**given, "out": there(out), "settings": self.next_settings})

    def keep(self, drafts: Tensor, confidence: Tensor, costs: Tensor) -> None:
        names = ("anchors_at", "anchors_slots", "state")
        given = {"drafts": there(drafts), "confidence": there(confidence), "costs": there(costs)}
        self._checked(rounds.keep, given | {name: getattr(self, name) for name in names})

    @staticmethod
    def _checked(launcher, arguments) -> None:  # type: ignore[no-untyped-def]
        found = run_and_check(lambda: launcher(**arguments), launcher.means(**arguments))
        assert not found, "\n".join(map(str, found))


def test_a_round() -> None:
    """Two of three drafts are right; a seat whose room ends; an empty one; one whose sequence has ended."""
    state = state_with(s0=(9, 20, 4, 3, 11, 12, 13), s3=(8, 30, 0, 3, 1, 2, 3), s5=(7, 12, 2, 0))
    b = Buffers(seats_of((0, 40, 5), (3, 32, 5), (-1, 0, 0), (5, 12, 5)), state, drafts=3)
    b.open()
    assert b.verified.tolist() == [3, 1, -1, -1]
    assert b.positions.tolist() == [20, 21, 22, 23, 30, 31, -1, -1] + [-1] * 8
    assert b.ids[:6].tolist() == [9, 11, 12, 13, 8, 1]
    assert b.settings[:4, 4].tolist() == [4, 5, 6, 7]
    chosen = torch.tensor([11, 12, 99, 5, 1, 6, 0, 0] + [0] * 8)
    b.accept(chosen)
    assert b.taken.tolist() == [[3, 3], [2, 1], [0, -1], [0, -1]]
    assert b.committed[:8].tolist() == [20, 21, 22, -1, 30, 31, -1, -1]
    assert b.state[0, :4].tolist() == [99, 23, 7, 0] and b.state[3, :4].tolist() == [6, 32, 2, 0]
    assert b.state[5, :4].tolist() == [7, 12, 2, 0], "nothing of it has run"
    assert b.anchors_at.tolist() == [23, -1, -1, -1], "no room beyond"
    assert b.next_settings[0, 4] == 7
    confidence = torch.full((4, BLOCK), 3.0)
    confidence[0, 2] = -4.0
    b.keep(torch.arange(100, 120).view(BLOCK, 4), confidence, torch.tensor([4.0, 4.8, 5.6, 6.4]))
    assert b.state[0].tolist() == [99, 23, 7, 2, 100, 104, 108, 0, 0]
    assert b.state[3, 3] == 0


@pytest.mark.parametrize("broken", [-1, 11])
def test_a_choice_that_is_none(broken: int) -> None:
    """Logits that hold no distribution end the round where they are met, whatever the drafts say."""
    b = Buffers(seats_of((1, 40, 5)), state_with(s1=(9, 20, 4, 3, broken, 12, 13)), drafts=3)
    b.open()
    b.accept(torch.tensor([-1, 12, 13, 4]))
    assert b.taken.tolist() == [[1, 3]] and b.anchors_at.tolist() == [-1] and b.state[1, 0] == -1


def test_a_grammar_is_for_one_row() -> None:
    state = state_with(s1=(9, 20, 4, 3, 11, 12, 13))
    b = Buffers(seats_of((1, 40, 5), has_mask=True), state, drafts=3)
    b.open()
    assert b.verified.tolist() == [0]
    b.accept(torch.tensor([11, 12, 13, 14]))
    assert b.taken.tolist() == [[1, 0]] and b.anchors_at.tolist() == [-1]


def test_tokens_that_are_penalised() -> None:
    b = Buffers(seats_of((1, 40, 2), penalties=4), state_with(s1=(9, 20, 4, 3, 11, 12, 13)), drafts=3)
    b.open()
    assert b.verified.tolist() == [2]
    found = b.penalties.cpu()
    assert found[4, HISTORY + 20 : HISTORY + 24].tolist() == [9, 11, 12, -3]
    found[4, HISTORY + 20 : HISTORY + 23] = -3
    assert (found == -3).all()


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=on_gpu) for n in range(4, 40))])
def test_any_round(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def some(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=generator)

    drafts, count = int(some(BLOCK + 1, 1)), int(some(4, 1)) + 1
    state = rounds.state_of(SLOTS, BLOCK, "cpu")
    state[:, 0], state[:, 1], state[:, 2], state[:, 3] = (
        some(3, SLOTS),
        some(30, SLOTS),
        some(9, SLOTS),
        BLOCK,
    )
    state[:, 4:] = some(2, SLOTS, BLOCK)
    slots = torch.randperm(SLOTS, generator=generator)[:count] - (some(5, count) == 0).long() * 10
    given = zip(slots.clamp(min=-1).tolist(), some(36, count).tolist(), some(7, count).tolist(), strict=True)
    b = Buffers(seats_of(*given), state, drafts)
    b.seats[:, rounds.SETTINGS + rounds.ASKED] += there(slots.clamp(min=-1) + 1 << 33)  # each its own slot's
    for _ in range(4):
        b.open()
        b.accept(some(2, count * (drafts + 1)) - (some(9, 1) == 0).long())
        if drafts:
            confidence = torch.randn(count, BLOCK, generator=generator) * 2
            b.keep(some(2, BLOCK, count), confidence, 1 + torch.rand(drafts + 1, generator=generator))
