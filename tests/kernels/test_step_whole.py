"""A whole decode step of the GPU's path, every launch of it, gives what the reference gives: on a CPU."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from step_support import IS_INTERPRETED, check_rows
from torch import Tensor

from dsv4.config import Activations, ModelConfig, preset
from dsv4.lab.init import make
from dsv4.ops.sample.cpu import HISTORY, choose, pack, pack_penalties

pytest.importorskip("triton", reason="Triton is not installed")

from tests.support.emulated import Decoders, Launches
from tests.support.twin import needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(not IS_INTERPRETED, reason="run by test_step_interpreted"),
]
TINY = preset("tiny")
# Every kind of layer and routing. In V4's own sizes of heads and index the kernels for those run.
# No two numbers alike that could be taken for each other, and rounds of Sinkhorn's that each matter.
SMALL = replace(TINY, layers=TINY.layers[:3], num_mtp_layers=0, hc_eps=1e-3, sinkhorn_iters=3)
HEADS = replace(
    SMALL,
    **{"num_heads": 16, "head_dim": 512, "index_heads": 64, "index_dim": 128, "q_rank": 64},
    layers=TINY.layers[1:3],
)
# wo_b's product is two sums.
WIDE = replace(SMALL, o_rank=2560)
# Over four ranks, each with three experts.
SPLIT = replace(SMALL, num_heads=8, o_groups=4, num_experts=12)
# Blocks of 4 and of 128 end here, and more entries are there than are selected.
POSITION = 383
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where twins are built: those of the tests around this process, where there are some."""
    return Path(os.environ.get("DSV4_TWINS") or tmp_path_factory.mktemp("twins"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def get(config: ModelConfig, format: str = "modelopt") -> Path:
        key = f"{config} {format}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model") / "model"
            for _ in make(made[key], config, format, seed=3):
                pass
        return made[key]

    return get


def at(rows: int) -> list[tuple[int, int, int]]:
    """A token of each row, the first in the last slot."""
    return [(rows - 1 - row, POSITION, 7 + row) for row in range(rows)]


def near(got: Tensor, want: Tensor, share: float = 1e-5) -> None:
    assert float((got - want).abs().max()) <= share * float(want.abs().max())


@pytest.mark.parametrize(
    ("format", "activations", "rows"),
    [("modelopt", "a16", 1), ("official", "a8", 2), ("ct", "a4", 1), ("hfnvfp4", "a4", 3)],
)
def test_the_references_logits(
    twins: Path, saved: Callable[..., Path], format: str, activations: str, rows: int
) -> None:
    launches = Launches(twins)
    decoders = Decoders(saved(SMALL, format), launches, rows, POSITION, F32, activations)  # type: ignore[arg-type]
    decoders.load(at(rows))
    want, (got,) = decoders.reference(), decoders.step()
    near(got, want)


@pytest.mark.parametrize(("config", "activations", "rows"), [(WIDE, "a4", 2), (HEADS, "a16", 2)])
def test_a_row_alone(
    twins: Path, saved: Callable[..., Path], config: ModelConfig, activations: Activations, rows: int
) -> None:
    """BF16, as it is served: the same bits alone and in a batch; near the reference's where inputs are not
    rounded."""
    launches = Launches(twins)
    batch = Decoders(saved(config), launches, rows, POSITION, BF16, activations)
    batch.load(at(rows))
    want, (got,) = batch.reference(), batch.step()
    if config is HEADS:  # 4-bit inputs make steps of BF16's last bits
        assert bool(((got - want).abs().amax(1) <= 0.05 * want.abs().amax(1)).all())
        assert launches.counts["attention/decode"] and launches.counts["index/decode"]
    alone = Decoders(saved(config), launches, 1, POSITION, BF16, activations, slots=rows)
    alone.load(at(rows)[:1])
    assert torch.equal(alone.step()[0], got[:1])


@pytest.mark.parametrize(
    ("ranks", "config", "whole_experts", "activations"),
    [(2, SMALL, False, "a16"), (2, SMALL, True, "a8"), (4, SPLIT, True, "a16")],
)
def test_ranks(
    twins: Path,
    saved: Callable[..., Path],
    ranks: int,
    config: ModelConfig,
    whole_experts: bool,
    activations: Activations,
) -> None:
    """They and all that they exchange: the same bits on each, and the reference's logits."""
    decoders = Decoders(
        path=saved(config, "hfnvfp4"),
        launches=Launches(twins, ranks),
        rows=2,
        context=POSITION,
        activations=activations,
        whole_experts=whole_experts,
    )
    decoders.load(at(2))
    want, got = decoders.reference(), decoders.step()
    assert all(torch.equal(other, got[0]) for other in got), "ranks differ"
    near(got[0], want)
    for decoder in decoders.ranks:
        assert decoder.peers is not None
        assert not decoder.peers.inbox.any() and not decoder.peers.ended.any(), "a packet was left"


def test_experts_that_lie_elsewhere(twins: Path, saved: Callable[..., Path]) -> None:
    decoders = Decoders(saved(WIDE), Launches(twins), 2, POSITION, F32, spilled=3)
    decoders.load(at(2))
    want, (got,) = decoders.reference(), decoders.step()
    near(got, want)


def same_stores(decoders: Decoders) -> bool:
    """Caches as the reference's, store by store; a value at a tie may lie one code further, and is then the
    reference's, too. -> whether none does."""
    is_same = True
    ours = decoders.ranks[0].cache
    assert torch.equal(ours.page_table, decoders.cache.page_table)
    for number, (got, want) in enumerate(zip(ours.layers, decoders.cache.layers, strict=True)):
        for part in ("ring", "entries", "keys"):
            store, its = getattr(got, part), getattr(want, part)
            if store is None:
                continue
            differing = (store.data != its.data).any(1).nonzero().flatten().tolist()
            assert len(differing) <= int(decoders.used.sum()), f"layer {number}: {part}"
            check_rows(store, its, differing, f"layer {number}: {part}")
            its.data.copy_(store.data)
            is_same &= not differing
        for tail, its in zip(got.tails, want.tails, strict=True):
            for rows, its_rows in ((tail.values, its.values), (tail.scores, its.scores)):
                near(rows, its_rows)
                its_rows.copy_(rows)
    return is_same


def test_steps_after_each_other(twins: Path, saved: Callable[..., Path]) -> None:
    """Four rows, one of them padding, of which each has a place in its blocks, slot and settings of its own:
    a step's choice is the next step's input, blocks of 4 and of 128 end, and all that is kept is kept."""
    decoders = Decoders(saved(SMALL, "hfnvfp4"), Launches(twins), 4, POSITION, F32)
    (decoder,) = decoders.ranks
    f, (latest, penalties, counts) = decoder.buffers, decoders.kept[0]
    tokens = [(2, POSITION - 1, 7), (0, 254, 8), (3, 127, 9)]
    seed = torch.Generator().manual_seed(5)
    penalties.random_(0, TINY.vocab_size, generator=seed)
    penalties[2, :HISTORY] = torch.tensor(
        pack_penalties(presence=0.5, frequency=0.2, repetition=1.3, bias=[(5, 2.0)], num_prompt=POSITION)
    )
    f.mask.random_(-(2**31), 2**31 - 1, generator=seed)
    decoders.load(
        tokens,
        [
            pack(temperature=0.8, top_p=0.9, seed=5, penalties=2),
            pack(num_top=3),
            pack(temperature=1.5, has_mask=True, seed=6),
        ],
    )
    idle = (f.ids[3], f.positions[3], f.slots[3], f.settings[3], f.out[3], latest[1])
    before = [of.clone() for of in idle]
    for step in range(3):
        if step == 2:  # the same sequences in other rows; who they are is known on the device alone
            order = [2, 0, 1]
            ids, settings, mask = f.ids[order], f.settings[order], f.mask[[*order, 3]]
            moved = [(slot, position + step, -1) for slot, position, _ in (tokens[i] for i in order)]
            decoders.load(moved, settings.tolist())
            assert torch.equal(f.ids[:3], ids)
            f.mask.copy_(mask)
        ids, slots, positions = (of[:3].clone() for of in (f.ids, f.slots, f.positions))
        settings, notes = f.settings[:3].clone(), penalties.clone()
        penalised = slots == 2
        notes[2, HISTORY + positions[penalised]] = ids[penalised].int()
        want, (got,) = decoders.reference(), decoders.step()
        is_same = same_stores(decoders)
        near(got[:3], want, 1e-5 if is_same else 3e-3)
        assert torch.equal(counts, decoders.counts)
        chosen = choose(got[:3], settings, f.mask[:3], notes)
        assert torch.equal(f.out[:3], chosen)
        assert torch.equal(f.ids[:3], chosen[:, 0].long()) and torch.equal(latest[slots], f.ids[:3])
        assert torch.equal(f.positions[:3], positions + 1) and torch.equal(f.slots[:3], slots)
        settings[:, 4] += 1
        assert torch.equal(f.settings[:3], settings), "only the index moves on"
        assert torch.equal(penalties, notes)
        assert all(map(torch.equal, idle, before)), "padding"


# Slot, first position, tokens: blocks of 4 and of 128 end within; a sequence's first block; one token.
RUNS = [(1, POSITION - 2, 3), (0, 2, 2)]


@pytest.mark.parametrize("config", [SMALL, pytest.param(HEADS, marks=pytest.mark.slow)])
def test_several_tokens_of_a_sequence(twins: Path, saved: Callable[..., Path], config: ModelConfig) -> None:
    """Rows of one step, as drafts are verified: the bits that each token gives in a step of its own. A row
    of padding among them reads no experts."""
    tokens = [(slot, first + i, 7 + 3 * slot + i) for slot, first, n in RUNS for i in range(n)]
    launches, rows = Launches(twins), len(tokens) + 1
    batch = Decoders(saved(config), launches, rows, POSITION, BF16, slots=3, is_round=True)
    batch.load(tokens)
    (got,) = batch.step()
    alone = Decoders(saved(config), launches, 1, POSITION, BF16, slots=3)
    for row, token in enumerate(tokens):
        alone.load([token])
        assert torch.equal(alone.step()[0][0], got[row]), token
    for ours, its in zip(batch.ranks[0].cache.layers, alone.ranks[0].cache.layers, strict=True):
        for part in ("ring", "entries", "keys"):
            store, its_store = getattr(ours, part), getattr(its, part)
            if store is not None:
                assert torch.equal(store.data, its_store.data) and torch.equal(store.scale, its_store.scale)
        for tail, its_tail in zip(ours.tails, its.tails, strict=True):
            assert torch.equal(tail.values, its_tail.values) and torch.equal(tail.scores, its_tail.scores)
