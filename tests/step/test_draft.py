"""DSpark's draft of a decode step: by emulated kernels and by what they mean, against the specification."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from dsv4.gpu.pdl import check, tensors_of
from dsv4.lab.reference import open_model
from dsv4.ops.sample.cpu import PLAIN, choose, pack
from dsv4.spec.drafts import dspark_taps
from dsv4.step.buffers import Buffers, DraftBuffers, draft_bytes
from dsv4.step.launches import Launches as Trunk
from tests.golden.test_golden import MARKS, folder
from tests.step.drafted import BLOCK, HEADS, SMALL, Change, Drafted
from tests.step.planted import Fault, copy_of_sources, plant, said_by
from tests.support.emulated import Launches
from tests.support.twin import LEVELS, TWINS, needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="run by kernels/test_step_interpreted.py"
    ),
]
F32, BF16 = torch.float32, torch.bfloat16
LAST = [20, 3, -1]  # longer than the window, shorter, none


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(os.environ.get("DSV4_TWINS") or tmp_path_factory.mktemp("twins"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(
    ("config", "format", "activations", "last", "rows", "dtype", "far"),
    [
        (SMALL, "official", "a16", [7, -1], 2, F32, 1e-5),
        pytest.param(SMALL, "official", "a16", LAST, 4, F32, 1e-5, marks=pytest.mark.slow),
        pytest.param(HEADS, "official", "a8", [150], 1, BF16, 0.1, marks=pytest.mark.slow),
        pytest.param(SMALL, "official", "a8", [20], 1, F32, 1e-5, marks=pytest.mark.slow),
        pytest.param(SMALL, "ct", "a4", LAST, 4, F32, 1e-5, marks=pytest.mark.slow),
        pytest.param(HEADS, "modelopt", "a4", [150, -1, 7], 2, BF16, torch.inf, marks=pytest.mark.slow),
        pytest.param(HEADS, "official", "a16", [150, -1, 7], 8, BF16, 0.05, marks=pytest.mark.slow),
    ],
)
def test_the_references_drafts(
    config: Any, format: str, activations: Any, last: list[int], rows: int, dtype: Any, far: float,
    twins: Path, models: Path,
) -> None:  # fmt: skip
    """Each launch computes what it means, and all of them the specification's draft."""
    name = f"{format} {config.head_dim}"
    made = Drafted(models / name, Launches(twins), config, last, dtype, activations, format, rows)
    made.commit(made.mean)
    made.begin()
    before = made.draft.drafter.settings.clone()
    assert made.run(made.draft.commit) == [] == made.run(made.draft.block)
    assert all(made.distance(r) <= far for r, p in enumerate(last) if p >= 0)
    d = made.draft.drafter
    assert torch.equal(d.settings, before) and torch.equal(d.anchors, made.anchors), "an input was changed"
    if -1 in last:
        assert d.drafts[:, last.index(-1)].tolist() == [-1] * BLOCK


@pytest.fixture(scope="module")
def small(twins: Path, models: Path) -> Drafted:
    """Whose meanings alone are run; the context is there."""
    made = Drafted(models / "official 128", Launches(twins), SMALL, LAST)
    made.commit(made.mean)
    made.begin()
    return made


def test_a_draft_in_torch(small: Drafted) -> None:
    """No kernel runs; twice the same."""
    for _ in range(2):
        small.mean(small.draft.block)
        assert max(small.distance(r) for r in (0, 1)) <= 1e-5


def test_fewer_drafts(small: Drafted, twins: Path, models: Path) -> None:
    """The first slots' are the same: the block stays whole."""
    small.mean(small.draft.block)
    few = Drafted(models / "official 128", Launches(twins), SMALL, LAST, drafts=2)
    few.commit(few.mean)
    few.begin()
    few.mean(few.draft.block)
    d, its = small.draft.drafter, few.draft.drafter
    assert torch.equal(its.drafts[:2], d.drafts[:2]) and its.drafts[2].tolist() == [-1] * 3
    assert torch.equal(its.confidence[:2, :2], d.confidence[:2, :2])


@pytest.mark.parametrize("activations", ["a16", "a4"])
def test_memory(activations: Any) -> None:
    """As many bytes are planned as are allocated."""
    step = Buffers(SMALL, 4, 0, F32, "cpu", activations, taps=True)
    made = DraftBuffers(SMALL, 3, step, 2, F32, "cpu", activations)
    held = tensors_of([*vars(made).values(), *vars(made.layers).values()])
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    assert draft_bytes(SMALL, 3, 4, 2, F32, activations) == sum(storages.values())


def test_sampled_drafts(small: Drafted) -> None:
    """Each slot's draft is the choice of its index from its logits; masks, logprobs and penalties are not
    the draft's."""
    settings = [
        pack(temperature=0.9, seed=r, index=7 + r, top_k=20, num_top=3, has_mask=True, penalties=2, forced=4)
        for r in range(3)
    ]
    small.begin(settings)
    d, wanted = small.draft.drafter, torch.tensor(settings)
    wanted[:, 6], wanted[:, 7] = PLAIN, -1
    z: list[Tensor] = []
    small.mean(small.draft.block, {"markov": lambda it: z.append(it.draft.drafter.z.clone())})
    small.begin()
    for slot, logits in enumerate(z):
        chosen = choose(logits[:2], wanted[:2], None, None)[:, 0]
        assert d.drafts[slot, :2].tolist() == chosen.tolist()
        wanted[:, 4] += 1
    greedy = torch.stack(z)[:, :2].argmax(2)
    assert not torch.equal(d.drafts[:, :2], greedy), "nothing was drawn"


def slot_of(it: Drafted) -> Tensor:
    """Of each row of the blocks."""
    return torch.arange(len(it.draft.drafter.mutual.ends)) % BLOCK


def causal(it: Drafted) -> None:
    later = torch.arange(BLOCK) > slot_of(it).unsqueeze(1)
    it.draft.drafter.mutual.listed.masked_fill_(later, -1)


MISTAKES: dict[str, tuple[str, Change]] = {
    "a window that slides with the slot": (
        "begin",
        lambda it: it.draft.drafter.mutual.ends.add_(slot_of(it)),
    ),
    "block positions one too low": ("begin", lambda it: it.draft.buffers.positions.sub_(1)),
    "a causal block": ("begin", causal),
    "context without p": ("begin", lambda it: it.draft.drafter.mutual.ends.sub_(1)),
    "noise in the first slot": ("begin", lambda it: it.draft.buffers.ids.fill_(149)),
    "Markov's part of the anchor in all slots": (
        "sample",
        lambda it: it.draft.drafter.chain.copy_(it.anchors.expand_as(it.draft.drafter.chain)),
    ),
    "confidence of the normalised vector": (
        "head",
        lambda it: it.draft.drafter.mixed.copy_(it.draft.buffers.x),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(small: Drafted, mistake: str) -> None:
    """In what the draft computes, kernels and meanings alike."""
    name, change = MISTAKES[mistake]
    listed = small.draft.drafter.mutual.listed.clone()
    small.mean(small.draft.block, {name: change})
    small.draft.drafter.mutual.listed.copy_(listed)
    assert min(small.distance(r) for r in (0, 1)) > 1e-3


def test_entries_of_the_block_are_not_context(small: Drafted) -> None:
    """After accepted drafts the context is made of taps: the block's entries would give another draft."""
    d, c, last = small.draft.drafter, small.config, small.last
    rings = [layer.ring.data.clone() for layer in small.draft.rings]
    taps, anchors = small.taps, small.anchors

    def keeps(it: Drafted) -> None:
        """The mistake: a stage's block entries go to its ring."""
        layer = it.draft.rings[stages.pop(0)]
        at = it.draft.buffers.positions
        rows = it.draft.buffers.slots * layer.ring_rows + at % layer.ring_rows
        used = (at >= 0).nonzero().flatten()
        layer.ring.put(rows[used], d.mutual.scratch.take(used))

    try:
        stages = [*range(len(small.draft.rings))]
        small.mean(small.draft.block, {"prepare": keeps})
        # The anchor and the first draft were accepted.
        seen = torch.randn(2, taps[0].shape[1], generator=torch.Generator().manual_seed(8))
        small.taps = [torch.cat((taps[0], seen)), *taps[1:]]
        small.last, small.anchors = [last[0] + 2, -1, -1], torch.tensor([11, 0, 0])
        small.begin()
        small.mean(small.draft.block)
        assert small.distance(0) > 1e-3
        d.committed.copy_(torch.tensor([last[0] + 1, last[0] + 2, -1, -1]))
        d.slots.copy_(torch.tensor([small.slot(0)] * 4))
        d.taps[:2] = seen
        small.mean(small.draft.launches)
        assert small.distance(0) <= 1e-5 and c.window < small.cache.layout.ring_rows
    finally:
        small.taps, small.last, small.anchors = taps, last, anchors
        for layer, held in zip(small.draft.rings, rings, strict=True):
            layer.ring.data.copy_(held)
        small.begin()


@pytest.mark.parametrize("is_before", [False, True])
def test_a_steps_taps(twins: Path, models: Path, is_before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trunk's steps leave what the draft needs; the last one and the draft by kernels. Streams before a
    layer give another draft."""
    made = Drafted(models / "official 128", Launches(twins), SMALL, [7, 4], rows=2)
    tap = Trunk._tap
    if is_before:
        monkeypatch.setattr(Trunk, "_tap", lambda self, site: tap(self, site + 1))
    trunk, d = made.trunk(), made.draft.drafter
    ids = [torch.randint(0, 149, (p + 1,), generator=torch.Generator().manual_seed(p)) for p in made.last]
    with made.checkpoint.reader, torch.inference_mode():
        made.taps = [dspark_taps(open_model(made.checkpoint, made.rounding), of) for of in ids]
    f, steps = trunk.buffers, max(made.last) + 1
    made.begin()
    for step in range(steps):
        at = [step - steps + 1 + p for p in made.last]
        f.positions.copy_(torch.tensor([max(p, -1) for p in at]))
        f.slots.copy_(torch.tensor([made.slot(r) for r in range(2)]))
        f.ids.copy_(torch.tensor([int(ids[r][max(p, 0)]) for r, p in enumerate(at)]))
        d.committed.copy_(f.positions)
        d.slots.copy_(f.slots)
        if step < steps - 1 or is_before:
            made.mean([*trunk.list, *made.draft.launches])
        else:
            assert made.run([*trunk.list, *made.draft.launches]) == []
    far = max(made.distance(r) for r in range(2))
    assert far > 1e-3 if is_before else far <= 1e-5


def test_a_round_overlaps_safely(twins: Path, models: Path) -> None:
    """The trunk's launches and the draft's as one list, over and over."""
    made = Drafted(models / "official 128", Launches(twins), SMALL, [7, 4], rows=2)
    trunk = made.trunk()
    tensors = [tensor for each in made.touches.values() for tensor in each.writes]
    state = trunk.names.of(tensors, "state")
    check([*trunk.list, *made.draft.launches], between=state)


def test_golden_drafts(twins: Path) -> None:
    """After every position of a text, by meanings: the reference's drafts, forced ones too."""
    want = load_file(folder("dspark") / "expected_a16.safetensors")
    made = Drafted(folder("dspark"), Launches(twins), SMALL, [len(want["ids"])], rows=6)
    with made.checkpoint.reader, torch.inference_mode():
        taps = dspark_taps(open_model(made.checkpoint, made.rounding), want["ids"])
    d, far, same, at = made.draft.drafter, [], [], 0
    for number, p in enumerate(want["anchors"].tolist()):
        made.taps, made.last, made.anchors = [taps[: p + 1]], [p], want["ids"][p + 1 : p + 2]
        while at <= p:
            rows = torch.arange(at, min(at + 6, p + 1))
            d.committed.fill_(-1)
            d.committed[: len(rows)], d.taps[: len(rows)] = rows, taps[rows]
            d.slots.fill_(made.slot(0))
            made.mean(made.draft.commit)
            at += len(rows)
        made.begin()
        tokens = iter(want["forced_ids"][number].tolist())
        z: list[Tensor] = []

        def force(it: Drafted, z: list[Tensor] = z, tokens: Iterator[int] = tokens) -> None:
            z.append(it.draft.drafter.z[0].clone())
            it.draft.drafter.drafts[len(z) - 1] = next(tokens)

        made.mean(made.draft.block, {"sample": force})
        for got, wanted in ((torch.stack(z), want["forced_logits"]), (d.layers.logits, want["draft_base"])):
            wanted = wanted[number]
            far.append((got - wanted).norm(dim=1) / wanted.norm(dim=1))
            same.append(got.argmax(1) == wanted.argmax(1))
    r, mark = torch.cat(far), MARKS["a16"]
    assert float(r.median()) <= mark.median and float(r.quantile(0.9)) <= mark.p90
    assert float(torch.cat(same).float().mean()) >= mark.top1


FAULTS = (
    Fault(
        "block positions one too low",
        "draft",
        "pos < 0, none, pos + j)",
        "pos < 0, none, pos + j - 1)",
        "begin",
    ),
    Fault(
        "a wrong scale",
        "draft",
        "x = norm(rounded(x, act), weight, eps, D, act)",
        "x = norm(rounded(x, act), 1.1 * weight, eps, D, act)",
        "fuse",
    ),
    Fault("the next place in the ring", "draft", "* RING + pos % RING", "* RING + (pos + 1) % RING", "keep"),
    Fault("another token before", "draft", "before * RANK,", "(before ^ 1) * RANK,", "markov"),
    Fault(
        what="confidence of the token before alone",
        room="draft",
        old="tl.sum(mixed * of_mixed.to(tl.float32), 0) + tl.sum(",
        new="tl.sum(",
        launch="markov",
    ),
    Fault("the mixed vector's norm", "mhc", "if (p.mixed)", "if (false)", "mhc close"),
    Fault(
        "a window up to the row",
        "attention",
        "p.ends ? (int)__ldcg(p.ends + row) : position",
        "position",
        "attend sliding",
    ),
    Fault(
        "a causal block", "attention", "position < 0 ? 0 : p.list_width", "position - end", "attend sliding"
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_the_launch_is_named(fault: Fault, twins: Path, tmp_path: Path) -> None:
    """A fault in a kernel shows in the launch that runs it, and there first."""
    tree = copy_of_sources(tmp_path / "tree")
    changed = plant(fault, tree)
    (tmp_path / "twins").mkdir()
    of_room = {TWINS[name] for name in TWINS if name.startswith(fault.room)}
    for name in set(TWINS.values()) - (of_room if changed.suffix != ".py" else set()):
        for made in twins.glob(f"{name}{LEVELS.get(name, '-O2')}.so"):
            shutil.copy(made, tmp_path / "twins")
    said = json.loads(said_by(tree, "-m", "tests.step.drafted", tmp_path / "twins").splitlines()[-1])
    assert said and said[0].partition(":")[0] == fault.launch, f"{fault.what}: {said[:1]}"
