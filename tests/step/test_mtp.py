"""MTP's drafts of a decode step: by emulated kernels and by what they mean, against the specification."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from dsv4.gpu.pdl import check, tensors_of
from dsv4.lab.bench.decode import fill
from dsv4.lab.doctor.step import mismatches, place_drafts
from dsv4.ops.sample.cpu import PLAIN, choose, pack
from dsv4.step.buffers import Buffers, MtpBuffers, draft_bytes
from tests.step.fed_back import DRAFTS, HEADS, SMALL, FedBack
from tests.support.emulated import Launches, emulated
from tests.support.twin import needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="run by kernels/test_step_interpreted.py"
    ),
]
F32, BF16 = torch.float32, torch.bfloat16
Change = Callable[[FedBack], object]
LAST = [20, 3, -1]  # longer than the window, shorter, none


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(os.environ.get("DSV4_TWINS") or tmp_path_factory.mktemp("twins"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def logits_of(made: FedBack, after: Mapping[str, Change] = {}) -> list[Tensor]:
    """By their meanings: each pass's logits [R, V]."""
    found: list[Tensor] = []

    def keep(it: FedBack) -> None:
        found.append(it.draft.drafter.layers.logits.clone())

    made.mean(made.draft.launches, {"head": keep, **after})
    return found


@pytest.mark.parametrize(
    ("config", "format", "activations", "last", "drafts", "dtype", "far"),
    [
        (SMALL, "official", "a16", LAST, DRAFTS, F32, 1e-5),
        pytest.param(HEADS, "official", "a8", [150], 2, BF16, 0.1, marks=pytest.mark.slow),
        pytest.param(SMALL, "official", "a8", [20], 1, F32, 1e-5, marks=pytest.mark.slow),
        pytest.param(SMALL, "ct", "a4", LAST, DRAFTS, F32, 1e-5, marks=pytest.mark.slow),
        pytest.param(HEADS, "modelopt", "a4", [150, -1, 7], 2, BF16, torch.inf, marks=pytest.mark.slow),
        pytest.param(HEADS, "official", "a16", [150, -1, 7], 3, BF16, 0.05, marks=pytest.mark.slow),
    ],
)
def test_the_references_drafts(
    config: Any, format: str, activations: Any, last: list[int], drafts: int, dtype: Any, far: float,
    twins: Path, models: Path,
) -> None:  # fmt: skip
    """Each launch computes what it means, and all of them the specification's drafts."""
    name = f"{format} {config.head_dim}"
    made = FedBack(models / name, Launches(twins), config, last, dtype, activations, format, drafts)
    made.commit(made.mean)
    made.begin()
    logits = logits_of(made)
    assert all(made.distance(r, logits) <= far for r, p in enumerate(last) if p >= 0)
    d = made.draft.drafter
    before = [tensor.clone() for tensor in (d.drafts, d.settings, d.anchors, d.committed)]
    made.begin()
    assert made.run(made.draft.launches) == []
    if dtype == F32:
        assert torch.equal(d.drafts, before[0])
    after = (d.settings, d.anchors, d.committed)
    assert all(map(torch.equal, before[1:], after)), "an input was changed"
    if -1 in last:
        assert d.drafts[:, last.index(-1)].tolist() == [-1] * drafts


@pytest.fixture
def small(twins: Path, models: Path) -> FedBack:
    """Whose meanings alone are run; the context is there."""
    made = FedBack(models / "official 128", Launches(twins), SMALL, LAST)
    made.commit(made.mean)
    made.begin()
    return made


def far(made: FedBack, after: Mapping[str, Change] = {}) -> list[float]:
    logits = logits_of(made, after)
    return [made.distance(r, logits) for r in (0, 1)]


def test_further_rounds(small: FedBack) -> None:
    """Entries of drafts are no context: those of accepted ones are made of their own streams. Rejected rows
    leave nothing, and twice the same is drafted."""
    assert max(far(small)) <= 1e-5
    small.begin()
    assert max(far(small)) <= 1e-5
    # Two drafts of the first sequence were accepted, none of the second.
    small.extend([3, 1, 0])
    small.begin()
    assert max(far(small)) <= 1e-5


def test_a_drafts_entry_is_no_context(small: FedBack) -> None:
    """The mistake: the entry of an accepted draft stays as its step left it."""
    far(small)
    small.extend([3, 1, 0])
    small.begin()
    small.draft.drafter.committed[0] = -1
    assert far(small)[0] > 1e-3


def collapse(it: FedBack) -> None:
    own = it.draft.buffers.streams
    own.copy_(own.mean(1, keepdim=True).expand_as(own))


def unmixed() -> dict[str, Change]:
    """The streams that are fed back lack the block's last output."""
    before: list[Tensor] = []
    return {
        "experts down": lambda it: before.append(it.draft.buffers.streams.clone()),
        "sample": lambda it: it.draft.buffers.streams.copy_(before[-1]),
    }


MISTAKES: dict[str, tuple[Change, dict[str, Change]]] = {
    "the token itself, not the next": (lambda it: it.step.out.copy_(it.step.out.roll(1, 0)), {}),
    "a rejected row is the last": (lambda it: it.draft.drafter.committed[1::4].fill_(21), {}),
    "positions one too high": (lambda it: None, {"take last": lambda it: it.draft.buffers.positions.add_(1)}),
    "streams collapsed": (lambda it: None, {"sample": collapse}),
    "streams without the last output": (lambda it: None, unmixed()),
    "the first draft's streams in all passes": (
        lambda it: None,
        {"sample": lambda it: it.draft.buffers.streams.copy_(it.step.streams[:: it.each])},
    ),
    "positions that do not move": (
        lambda it: None,
        {"sample": lambda it: it.draft.buffers.positions.sub_(1)},
    ),
    "the anchor in all passes": (
        lambda it: None,
        {"sample": lambda it: it.draft.drafter.drafts.copy_(it.draft.drafter.anchors.expand(3, 3))},
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(small: FedBack, mistake: str) -> None:
    """In what the drafts are computed from, kernels and meanings alike."""
    before, after = MISTAKES[mistake]
    before(small)
    assert min(far(small, after)) > 1e-3


def test_sampled_drafts(small: FedBack) -> None:
    """Each draft is the choice of its index from its logits; masks, logprobs and penalties are not its."""
    settings = [
        pack(temperature=0.9, seed=r, index=7 + r, top_k=20, num_top=3, has_mask=True, penalties=2, forced=4)
        for r in range(3)
    ]
    small.begin(settings)
    wanted = torch.tensor(settings)
    wanted[:, 6], wanted[:, 7] = PLAIN, -1
    logits = logits_of(small)
    drafts = small.draft.drafter.drafts
    for chosen, its in zip(drafts, logits, strict=True):
        assert chosen[:2].tolist() == choose(its[:2], wanted[:2], None, None)[:, 0].tolist()
        wanted[:, 4] += 1
    assert not torch.equal(drafts[:, :2], torch.stack(logits)[:, :2].argmax(2)), "nothing was drawn"


@pytest.mark.parametrize("activations", ["a16", "a4"])
def test_memory(activations: Any) -> None:
    """As many bytes are planned as are allocated."""
    step = Buffers(SMALL, 12, 0, F32, "cpu", activations)
    made = MtpBuffers(SMALL, 3, 3, step, F32, "cpu", activations)
    held = tensors_of([*vars(made).values(), *vars(made.layers).values()])
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    assert draft_bytes(SMALL, 3, 12, 1, F32, activations) == sum(storages.values())


def test_no_launch_reads_too_early(small: FedBack) -> None:
    """The check sees what the drafter declares: without the late trigger positions would be read early."""
    late = [replace(launch, triggers_late=False) for launch in small.draft.launches]
    check(small.draft.launches, between=small.draft.between)
    with pytest.raises(AssertionError, match="before its PDL wait"):
        check(late, between=small.draft.between)


@pytest.mark.slow
def test_the_doctors_draft(twins: Path, models: Path) -> None:
    """What `dsv4 doctor --step` places can be drafted from, and each launch computes what it means."""
    made = FedBack(models / "official 512", Launches(twins), HEADS, [150, 150, 7], BF16, drafts=2)
    fill(made.cache)
    made.done = [*made.last]
    made.begin()
    place_drafts(made.draft, 150)
    with emulated(made.launches):
        assert mismatches(made.draft) == []
