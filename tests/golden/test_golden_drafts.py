"""DSpark's drafts through the engine's cache, after every kind of history; each planted mistake must show."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4 import Engine
from dsv4.engine import draft
from dsv4.model.model import Model
from dsv4.model.rope import Rope
from dsv4.model.step import Step
from dsv4.ops.attention import cpu as attention
from tests.golden.test_golden import STEP_MARKS, check, config_of, folder
from tests.support.feeding import cache_of, claim, release

WINDOW, BLOCK, PROMPT = 64, 5, 300


def engine_of(mode: str) -> Engine:
    return Engine.load(folder("dspark"), config_of(mode, 64))


def wanted(mode: str) -> dict[str, Tensor]:
    return load_file(folder("dspark") / f"expected_{mode}.safetensors")


def feed(engine: Engine, slot: int, start: int, ids: list[int], count: int | None = None) -> Tensor:
    """Process ids, of which the first `count` (default: all) are accepted; -> the taps of these."""
    taps: list[Tensor] = []
    engine.model.forward(Step.build([(slot, start, ids)], "cpu"), cache_of(engine), taps)
    kept = torch.cat(taps, 1)[:count]
    step = Step.build([(slot, start, ids[: len(kept)])], "cpu")
    engine.model.keep_taps(kept, step, cache_of(engine))
    return kept


def drafted(engine: Engine, slot: int, p: int, anchor: int, forced: Sequence[int]) -> list[Tensor]:
    """The block after position p -> logits before the correction, those with it, and confidences."""
    model = engine.model
    base, mixed = model.draft_block(draft.block_step(model, [(slot, p + 1, 0)], [anchor]), cache_of(engine))
    before = torch.tensor([anchor, *forced[: base.shape[1] - 1]])
    rows = [model.correct(base[:, j], mixed[:, j], before[j : j + 1]) for j in range(base.shape[1])]
    return [base[0], torch.cat([logits for logits, _ in rows]), torch.cat([sure for _, sure in rows])]


def walk(engine: Engine, want: dict[str, Tensor], steps: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    """Prompt, then verification steps of `steps` (accepted, proposed) in turns, and drafts at each anchor."""
    ids, anchors = want["ids"].tolist(), want["anchors"].tolist()
    found: dict[str, list[Tensor]] = {}
    slot, at, turn, taps = claim(engine, len(ids)), 0, 0, torch.empty(0)

    def look(begin: int, end: int) -> None:
        for p in range(begin, end):
            if p in anchors:
                forced = want["forced_ids"][anchors.index(p)].tolist()
                names = ("draft_base", "forced_logits", "forced_confidence")
                parts = zip(names, drafted(engine, slot, p, ids[p + 1], forced), strict=True)
                for name, value in (("main_hidden", taps[p - begin]), *parts):
                    found.setdefault(name, []).append(value)

    while at < len(ids):
        if at < PROMPT:
            stop = min(PROMPT, at + 64, *(p + 1 for p in anchors if p >= at))
            chunk, count = ids[at:stop], stop - at
        else:
            accepted, proposed = steps[turn % len(steps)]
            count = min(accepted + 1, len(ids) - at)
            wrong = [(id + 1) % 160 for id in ids[at + count :][: proposed - accepted]]
            chunk, turn = ids[at : at + count] + wrong, turn + 1
        taps = feed(engine, slot, at, chunk, count)
        look(at, at + count)
        at += count
    release(engine, slot)
    return {name: torch.stack(rows) for name, rows in found.items()}


STEPS = [(0, 0), (1, 5), (2, 2), (0, 7), (5, 5), (3, 7), (4, 6), (7, 7)]


def compare(got: dict[str, Tensor], want: dict[str, Tensor], mode: str) -> None:
    check(got["main_hidden"], want["main_hidden"], STEP_MARKS[mode], f"dspark {mode} taps")
    for name in ("draft_base", "forced_logits"):
        check(got[name].flatten(0, 1), want[name].flatten(0, 1), STEP_MARKS[mode], f"dspark {mode} {name}")
    if mode == "noqat":
        assert (got["forced_confidence"] - want["forced_confidence"]).abs().max() <= 1e-4


@pytest.mark.parametrize("mode", STEP_MARKS)
def test_dspark_drafts(mode: str) -> None:
    """Walked in verification steps of 1 to 8 rows with every number of drafts accepted: the same bits."""
    engine, want = engine_of(mode), wanted(mode)
    singles = walk(engine, want, [(0, 0)])
    compare(singles, want, mode)
    stepped = walk(engine, want, STEPS)
    for name, rows in singles.items():
        assert torch.equal(stepped[name], rows), name


def test_chosen_drafts() -> None:
    """Greedy ones, each corrected by the one before it."""
    engine, want = engine_of("noqat"), wanted("noqat")
    ids, anchors = want["ids"].tolist(), want["anchors"].tolist()
    slot = claim(engine, len(ids))
    feed(engine, slot, 0, ids[: (p := anchors[10]) + 1])
    *_, confidence = drafted(engine, slot, p, ids[p + 1], want["draft_ids"][10].tolist())
    assert (confidence - want["confidence"][10]).abs().max() <= 1e-4
    logits = drafted(engine, slot, p, ids[p + 1], want["draft_ids"][10].tolist())[1]
    assert torch.equal(logits.argmax(1), want["draft_ids"][10])


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
    folder("dspark")
    plant(monkeypatch)
    got = walk(engine_of("noqat"), want, [(4, 4)])["forced_logits"]
    right = want["forced_logits"][:, : got.shape[1]]
    off = ((got - right).norm(dim=-1) / right.norm(dim=-1)).flatten()
    assert off[-50:].median() > least, f"{mistake}: {off[-50:].median():.1e}"
