"""Experts that change places while steps run: every step finds every expert whole."""

import ctypes
import random

import pytest
import torch
from torch import Tensor

from dsv4.config import EngineConfig
from dsv4.engine import frequency, swap
from dsv4.engine.eager import Pass
from dsv4.engine.engine import Engine
from dsv4.engine.graphs import Graphs
from dsv4.engine.plan import Span
from dsv4.engine.request import SamplingParams
from dsv4.engine.swap import Swapper
from dsv4.errors import ConfigError
from dsv4.gpu.shapes import Form
from dsv4.models import embedded
from dsv4.ops.experts.placement import Placement, Slots, place
from dsv4.quant.formats import Format
from dsv4.weights.load import Checkpoint

FORM, LAYERS, EXPERTS, RESIDENT = Form(Format.NVFP4, 32, 64), 3, 8, 4


def filled() -> Placement:
    """Every expert's slot holds its own number."""
    resident = [[e < RESIDENT for e in range(EXPERTS)] for _ in range(LAYERS)]
    slot_of, here, there = place(resident, num_spare=(1, 1))
    slots = Slots(FORM, here, there, "cpu")
    placement = Placement(FORM, [f"layers.{i}.ffn.experts" for i in range(LAYERS)], slot_of, slots)
    for layer in range(LAYERS):
        for e in range(EXPERTS):
            slots[slot_of[layer][e]].fill_(layer * EXPERTS + e + 1)
    return placement


class Steps:
    """Steps under way, each with the table it was launched with; they end one after the other."""

    def __init__(self, placement: Placement) -> None:
        self.placement, self.under_way = placement, list[Tensor]()

    def launch(self) -> None:
        self.under_way.append(self.placement.table.clone())
        if len(self.under_way) > 2:
            self.end()

    def end(self) -> None:
        """All that it read is what it should have been, up to its end."""
        table, first = self.under_way.pop(0), self.placement.slots.first.data_ptr()
        for layer in range(LAYERS):
            for e in range(EXPERTS):
                found = ctypes.string_at(first + int(table[layer, e]), FORM.num_bytes)
                assert found == bytes([layer * EXPERTS + e + 1]) * FORM.num_bytes, (layer, e)


class LateCopier:
    """Copies a little whenever it is asked; first, what is under way ends (as by wait_stream)."""

    def __init__(self, steps: Steps, chance: random.Random) -> None:
        self.steps, self.chance, self.left = steps, chance, list[tuple[Tensor, Tensor]]()

    def begin(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        assert not self.left, "one swap at a time"
        while self.steps.under_way:
            self.steps.end()
        for to, source in pairs:
            cut = sorted(self.chance.sample(range(1, FORM.num_bytes), 2))
            for a, b in zip([0, *cut], [*cut, FORM.num_bytes], strict=True):
                self.left.append((to[:, a:b], source[:, a:b]))

    def is_done(self) -> bool:
        if self.left:
            to, source = self.left.pop(self.chance.randrange(len(self.left)))
            to.copy_(source)
        return not self.left


@pytest.mark.parametrize("seed", range(4))
def test_steps_find_every_expert(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "HALF_LIFE", 100)
    torch.manual_seed(seed)
    chance, placement = random.Random(seed), filled()
    steps = Steps(placement)
    now = [0.0]
    swapper = Swapper(placement, 1.0, LateCopier(steps, chance), clock=lambda: now[0])
    for step in range(600):
        if step % 7 == 0:  # other experts become hot all the time, also while one is on its way
            swapper.note(torch.rand(LAYERS, EXPERTS) * chance.choice([10, 1000]))
        swapper.between()
        steps.launch()
        now[0] += 1.0
    assert swapper.num_swaps > 30
    taken = [slot for layer in placement.slot_of for slot in layer]
    assert len(set(taken)) == LAYERS * EXPERTS
    assert sum(map(placement.num_resident, range(LAYERS))) == LAYERS * RESIDENT, "as many as before"


def test_a_copier_that_does_not_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above, of a copier that writes while steps are under way."""
    monkeypatch.setattr(swap, "HALF_LIFE", 100)
    torch.manual_seed(0)
    chance, placement = random.Random(0), filled()
    steps, idle = Steps(placement), Steps(placement)
    swapper = Swapper(placement, 1.0, LateCopier(idle, chance), clock=lambda: 0.0)
    swapper._pause = 0.0
    with pytest.raises(AssertionError):
        for step in range(600):
            if step % 7 == 0:
                swapper.note(torch.rand(LAYERS, EXPERTS) * 1000)
            swapper.between()
            steps.launch()


def test_choices_are_counted_by_where_the_expert_lies() -> None:
    g = Graphs.__new__(Graphs)
    g.placement = placement = filled()
    g.swapper = Swapper(placement, 1.0, LateCopier(Steps(placement), random.Random(0)), clock=lambda: 0.0)
    choices = torch.zeros(LAYERS, EXPERTS, dtype=torch.int64)
    choices[0, 0], choices[2, RESIDENT] = 30, 100
    g._note_choices(choices)
    assert (g.expert_hits, g.expert_misses) == (30, 100) and g.swapper._wanted
    while g.swapper._wanted or g.swapper._moving:
        g.swapper.between()
    g._note_choices(choices)
    assert (g.expert_hits, g.expert_misses) == (160, 100), "the hot one has come meanwhile"
    g.placement = g.swapper = None
    g._note_choices(choices)
    assert (g.expert_hits, g.expert_misses) == (290, 100), "all lie on the GPU"


def test_the_hottest_come_first_and_only_what_is_worth_it() -> None:
    placement = filled()
    swapper = Swapper(placement, 0.1, LateCopier(Steps(placement), random.Random(0)), clock=lambda: 0.0)
    heat = torch.full((LAYERS, EXPERTS), 100.0)
    heat[0, 7], heat[2, 5], heat[1, 0] = 500.0, 900.0, 3.0
    swapper.note(heat)
    found = [(p.layer, p.hot) for p in swapper._wanted]
    assert found == [(2, 5), (0, 7)] and (swapper._wanted[0].cold_layer, swapper._wanted[0].cold) == (1, 0)
    swapper.note(torch.zeros(LAYERS, EXPERTS))
    assert len(swapper._wanted) == 2, "heat stays for a while"


def test_at_most_a_share_of_the_bandwidth() -> None:
    placement, now, begun = filled(), [0.0], list[float]()

    class Immediate:
        def begin(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
            begun.append(now[0])
            for to, source in pairs:
                to.copy_(source)

        def is_done(self) -> bool:
            return True

    swapper = Swapper(placement, 0.25, Immediate(), clock=lambda: now[0])
    heat = torch.zeros(LAYERS, EXPERTS)
    heat[:, RESIDENT:] = 1000.0
    swapper.note(heat)
    for _ in range(1000):
        swapper.between()
        now[0] += FORM.num_bytes / swap.PCIE
    assert len(begun) == LAYERS * RESIDENT, "all of them in the end"
    span = begun[-1] - begun[0]
    assert FORM.num_bytes * (len(begun) - 1) / span <= 0.25 * swap.PCIE * 1.001


@pytest.mark.parametrize("value", [-0.1, 1.5, "x"])
def test_a_share_is_a_share(value: float) -> None:
    with pytest.raises(ConfigError, match="expected a share from 0 to 1"):
        EngineConfig(swap_share=value)


@pytest.mark.gpu
def test_tokens_do_not_change_while_experts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swaps all the time, prompts among them: the tokens of everything resident, bit for bit."""
    monkeypatch.setattr(frequency, "EVERY", 2)
    monkeypatch.setattr(swap, "MARGIN", -1.0)
    monkeypatch.setattr(swap, "WORTH", 0.0)
    experts = Checkpoint.open(embedded()).config.num_experts
    prompts = [[1, 5, 9, 12, 7] * 9, [3, 4], list(range(2, 120))]
    params = SamplingParams(max_tokens=300, temperature=0.0, logprobs=1, ignore_eos=True)

    def generated(spill: str) -> tuple[list[list[tuple[int, float | None]]], int]:
        config = EngineConfig(device="cuda", max_context=512, max_batch=4, spill=spill, swap_share=1.0)
        engine = Engine.load(None, config)
        assert isinstance(engine.runner.executor, Graphs)
        found = [
            [(t.id, t.logprob) for t in c.tokens] for _ in range(3) for c in engine.generate(prompts, params)
        ]
        swapper = engine.runner.executor.swapper
        return found, 0 if swapper is None else swapper.num_swaps

    want, none = generated("off")
    got, swaps = generated(str(experts // 2))
    assert none == 0 and swaps > 100 and got == want


@pytest.mark.gpu
def test_no_decode_step_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """While experts change places and are counted: a wait inside `decode` is an error here."""
    monkeypatch.setattr(frequency, "EVERY", 2)
    monkeypatch.setattr(swap, "MARGIN", -1.0)
    monkeypatch.setattr(swap, "WORTH", 0.0)
    decode = Graphs.decode

    def watched(self: Graphs, spans: tuple[Span, ...]) -> Pass:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return decode(self, spans)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Graphs, "decode", watched)
    experts = Checkpoint.open(embedded()).config.num_experts
    config = EngineConfig(
        device="cuda", max_context=512, max_batch=2, spill=str(experts // 2), swap_share=1.0
    )
    engine = Engine.load(None, config)
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    engine.generate([[1, 5, 9], [3, 4]], params)
    assert isinstance(engine.runner.executor, Graphs) and engine.runner.executor.swapper is not None
    assert engine.runner.executor.swapper.num_swaps > 10
