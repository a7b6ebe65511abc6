"""Drafts through the engine's cache, after every kind of history; each planted mistake must show."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4 import Engine
from dsv4.engine import draft
from dsv4.lab.score import Anchors, score_ids
from dsv4.model.model import Model
from dsv4.model.rope import Rope
from dsv4.model.step import Step
from dsv4.ops.attention import cpu as attention
from tests.golden.test_golden import STEP_MARKS, check, config_of, folder

WINDOW, BLOCK, PROMPT = 64, 5, 300


WALK = [(0, 0), (1, 5), (2, 2), (0, 7), (5, 5), (3, 7), (4, 6), (7, 7)]


def wanted(mode: str, name: str = "dspark") -> dict[str, Tensor]:
    return load_file(folder(name) / f"expected_{mode}.safetensors")


def score(
    mode: str, walk: Sequence[tuple[int, int]] = (), model: str = "dspark", name: str = "dspark"
) -> dict[str, Tensor]:
    """What `dsv4 score --draft-logits --walk` writes."""
    engine = Engine.load(folder(model), config_of(mode, 64))
    anchors = Anchors.read(folder(name) / f"expected_{mode}.safetensors")
    return score_ids(engine, wanted(mode, name)["ids"].tolist(), PROMPT, anchors=anchors, walk=walk)


def compare(got: dict[str, Tensor], want: dict[str, Tensor], mode: str, name: str) -> None:
    check(got[name].flatten(0, -2), want[name].flatten(0, -2), STEP_MARKS[mode], f"{mode} {name}")


@pytest.mark.parametrize("mode", STEP_MARKS)
def test_dspark_drafts(mode: str) -> None:
    """At the marks, and with the same bits in verification steps of 1 to 8 rows, any number accepted."""
    got, want = score(mode), wanted(mode)
    assert got.keys() == want.keys() - {"ids", "anchors", "forced_ids"}
    for name in ("main_hidden", "draft_base", "forced_logits", "prefill_logits", "decode_logits"):
        compare(got, want, mode, name)
    if mode == "noqat":
        assert torch.equal(got["draft_ids"], want["draft_ids"])
        compare(got, want, mode, "draft_logits")
        for name in ("confidence", "forced_confidence"):
            assert (got[name] - want[name]).abs().max() <= 1e-4
    walked = score(mode, WALK)
    for name, rows in got.items():
        assert torch.equal(walked[name], rows), name


@pytest.mark.parametrize("mode", STEP_MARKS)
def test_mtp_drafts_made_of_drafts(mode: str) -> None:
    """The draft block over positions 0 .. p, then fed with its own streams and two given tokens."""
    got, walked = (score(mode, walk, "official", "mtp_steps") for walk in ((), WALK))
    compare(got, wanted(mode, "mtp_steps"), mode, "mtp_step_logits")
    for name, rows in got.items():
        assert torch.equal(walked[name], rows), name


def low(places: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return [(slot, start - 1, oldest) for slot, start, oldest in places]


def plant_positions(patch: pytest.MonkeyPatch) -> None:
    right = draft.block_step
    patch.setattr(draft, "block_step", lambda m, places, a: right(m, low(places), a))


def plant_attention(change: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        right = attention.attend_block
        patch.setattr(attention, "attend_block", lambda **given: change(right, **given))

    return plant


def causal(right: Callable[..., Tensor], fresh: Any, **given: Any) -> Tensor:
    """Each slot sees those before it."""
    parts = []
    for row in range(len(given["q"])):
        begin = row // BLOCK * BLOCK
        mine = {n: given[n][begin : row + 1] for n in ("q", "slots", "first", "oldest", "cos", "sin")}
        parts.append(right(fresh=fresh.span(begin, row + 1), **(given | mine))[-1:])
    return torch.cat(parts)


def sliding(right: Callable[..., Tensor], **given: Any) -> Tensor:
    """The window moves on with each slot."""
    parts = []
    for row in range(len(given["q"])):
        oldest = given["first"] - WINDOW + row % BLOCK + 1
        parts.append(right(**(given | {"oldest": torch.maximum(given["oldest"], oldest)}))[row : row + 1])
    return torch.cat(parts)


def without_p(right: Callable[..., Tensor], **given: Any) -> Tensor:
    """The context ends before the last position."""
    slots, first = given["slots"], given["first"]
    rows = slots * given["ring_size"] + (first - 1) % given["ring_size"]
    ring = given["ring"].take(torch.arange(given["ring"].shape[0]))
    ring.put(rows[:1], ring.take(slots[:1] * given["ring_size"] + (first[:1] - 2) % given["ring_size"]))
    return right(**(given | {"ring": ring}))


def plant_taps(patch: pytest.MonkeyPatch) -> None:
    """Taken before the layer."""
    before = Model._blocks

    def early(self: Model, step: Step, cache: Any, taps: list[Tensor] | None) -> Tensor:
        right, dspark = self.config, self.config.dspark
        assert dspark is not None
        layers = tuple(layer - 1 for layer in dspark.target_layers)
        self.config = replace(right, dspark=replace(dspark, target_layers=layers))
        try:
            return before(self, step, cache, taps)
        finally:
            self.config = right

    patch.setattr(Model, "_blocks", early)


def plant_yarn(patch: pytest.MonkeyPatch) -> None:
    right = Model.__init__

    def build(self: Model, b: Any, positions: int, *rest: Any, **named: Any) -> None:
        right(self, b, positions, *rest, **named)
        c = b.config
        assert self.dspark is not None
        for stage in self.dspark.stages:
            stage.attention.rope = Rope(c.compress_rope_theta, c.rope_dim, c.yarn, positions + BLOCK, "cpu")

    patch.setattr(Model, "__init__", build)


def plant_four_slots(patch: pytest.MonkeyPatch) -> None:
    right = Model.__init__

    def build(self: Model, b: Any, *rest: Any, **named: Any) -> None:
        four = replace(b.config, dspark=replace(b.config.dspark, block_size=BLOCK - 1))
        right(self, replace(b, config=four), *rest, **named)

    patch.setattr(Model, "__init__", build)


def plant_block_entries(patch: pytest.MonkeyPatch) -> None:
    """The block's entries are kept, and only one row of a step is written from its taps."""
    from dsv4.model.attention import Attention

    right, keep = Attention._entries, Attention.keep

    def entries(self: Attention, x: Any, step: Step, cache: Any) -> Any:
        fresh = right(self, x, step, cache)
        if step.oldest is not None:
            self._put(fresh, step, cache)
        return fresh

    def last(self: Attention, x: Any, step: Step, cache: Any) -> None:
        if len(step.ids) < BLOCK + 2:
            (slot, start, ids) = step.spans[0]
            end = start + len(ids) - 1
            step, x = Step.build([(slot, end, ids[-1:])], "cpu"), replace(x, values={"a16": x.plain[-1:]})
        keep(self, x, step, cache)

    patch.setattr(Attention, "_entries", entries)
    patch.setattr(Attention, "keep", last)


# How far the forced logits are off at least, as the median over anchors; correct ones: 3e-6.
PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], float]] = {
    "positions one too low": (plant_positions, 0.1),
    "causal block": (plant_attention(causal), 5e-3),
    "window slides with the slot": (plant_attention(sliding), 1e-2),
    "context without p": (plant_attention(without_p), 1e-2),
    "taps before the layer": (plant_taps, 0.3),
    "YaRN in the stages": (plant_yarn, 0.3),
    "four slots": (plant_four_slots, 1e-2),
    "block entries kept": (plant_block_entries, 1e-2),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_planted_mistakes_show(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, least = PLANTED[mistake]
    want = wanted("noqat")
    plant(monkeypatch)
    if mistake == "four slots":
        monkeypatch.setattr(Anchors, "check", lambda *given: None)
    got = score("noqat", [(4, 4)])["forced_logits"]
    right = want["forced_logits"][:, : got.shape[1]]
    off = ((got - right).norm(dim=-1) / right.norm(dim=-1)).flatten()
    assert off[-50:].median() > least, f"{mistake}: {off[-50:].median():.1e}"
