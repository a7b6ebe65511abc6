"""A whole decode step: overlap or serial, graph or eager, the same bits; NaN shows in its own row alone."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from dsv4.cache.store import Cache
from dsv4.config import Activations, ModelConfig, preset
from dsv4.lab.bench.decode import Wanted, fill
from dsv4.lab.synthetic import make_weights, with_experts
from dsv4.model.bundle import Bundle, Numerics
from dsv4.model.model import Model
from dsv4.ops import IMPLEMENTATIONS, Ops
from dsv4.ops.index import decode as index
from dsv4.step.run import Decoder

pytestmark = pytest.mark.gpu
TINY, FLASH, PRO = preset("tiny"), preset("flash"), preset("pro")
# The published sizes, in layers of every kind and routing.
CUT = with_experts(replace(FLASH, layers=(*FLASH.layers[1:4], FLASH.layers[4])), 8)
CUT_PRO = with_experts(replace(PRO, layers=PRO.layers[1:4]), 8)
# On the edge of what engine/sizes.py lets through: the widest inputs of every product, the largest numbers.
WIDE = replace(
    TINY,
    **{"hidden_size": 8192, "q_rank": 8192, "expert_width": 8192, "num_heads": 32, "head_dim": 512},
    **{"o_rank": 4096, "index_dim": 128, "index_heads": 64},
)
MANY = replace(
    TINY,
    **{"num_experts": 512, "experts_per_token": 32, "o_groups": 16, "num_heads": 128, "o_rank": 4096},
)


def bundle_of(config: ModelConfig, layout: str, activations: Activations = "a16") -> Bundle:
    ops = Ops.choose("cuda", **dict.fromkeys(IMPLEMENTATIONS, "gpu"))
    numerics = Numerics(torch.bfloat16, activations, True)
    return Bundle(config, make_weights(config, layout, "cuda"), ops, numerics)


class Running:
    """A decoder with a cache of its own, filled alike each time; every row at `position`."""

    def __init__(
        self, bundle: Bundle, rows: int, position: int, overlap: bool, graph: bool, slots: int | None = None
    ) -> None:
        layout = Wanted(position + 300, slots or rows).layout(bundle.config)
        self.cache = Cache(layout, "cuda", torch.bfloat16)
        fill(self.cache)
        model = Model(bundle, layout.max_context, "cuda")
        self.decoder = Decoder(bundle, model, self.cache, rows, overlap=overlap)
        self.decoder.run()  # all rows unused
        torch.cuda.synchronize()
        if graph:
            self.decoder.capture()
        f = self.decoder.buffers
        f.ids.copy_(torch.arange(7, 7 + rows))
        f.slots.copy_(torch.arange(rows).flip(0) % layout.num_slots)
        f.positions.fill_(position)

    def step(self) -> Tensor:
        self.decoder.step()
        torch.cuda.synchronize()
        return self.decoder.buffers.logits.clone()

    def stores(self) -> list[Tensor]:
        found = []
        for layer in self.cache.layers:
            for store in (layer.ring, layer.entries, layer.keys):
                found += [] if store is None else [store.data, store.scale]
            for tail in layer.tails:
                found += [tail.values, tail.scores]
        return [tensor for tensor in found if tensor is not None]


# At these positions entries are selected.
@pytest.mark.parametrize(
    ("config", "layout", "position", "activations"),
    [
        *((TINY, "modelopt", 300, "a16"), (CUT, "nvfp4", 2500, "a16"), (CUT, "modelopt", 2500, "a16")),
        *((CUT_PRO, "nvfp4", 4500, "a16"), (CUT_PRO, "modelopt", 4500, "a16")),
        *((WIDE, "modelopt", 300, "a16"), (WIDE, "nvfp4", 300, "a16"), (MANY, "modelopt", 300, "a16")),
        *((CUT, "nvfp4", 2500, "a4"), (CUT, "modelopt", 2500, "a8"), (CUT_PRO, "nvfp4", 4500, "a4")),
        *((WIDE, "nvfp4", 300, "a4"), (MANY, "modelopt", 300, "a8")),
    ],
)
@pytest.mark.parametrize("rows", [1, 2, 8, 32])
def test_the_same_bits(
    config: ModelConfig, layout: str, position: int, activations: Activations, rows: int
) -> None:
    """140 tokens, in which blocks of every length close, launched without a pause between steps."""
    bundle, steps = bundle_of(config, layout, activations), 140
    wanted: list[Tensor] = []
    with torch.inference_mode():
        for overlap, graph in product((True, False), repeat=2):
            run = Running(bundle, rows, position, overlap, graph)
            logits = torch.empty(steps, rows, config.vocab_size, device="cuda")
            for i in range(steps):
                run.decoder.step()
                logits[i].copy_(run.decoder.buffers.logits)
            # And once without a copy between the steps, which is a pause too.
            for _ in range(20):
                run.decoder.step()
            torch.cuda.synchronize()
            found = [logits, run.decoder.buffers.logits, *run.stores()]
            assert bool(torch.isfinite(logits).all())
            for i, (got, want) in enumerate(zip(found, wanted or found, strict=True)):
                assert torch.equal(got, want), f"tensor {i} with overlap {overlap}, graph {graph}"
            wanted = wanted or found


def test_a_row_of_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """More keys than sixteen for each block, in two rounds, as in a context of 17,000 tokens and more."""
    monkeypatch.setattr(index, "MAX_PROGRAMS", 8)
    test_the_same_bits(CUT, "nvfp4", 2500, "a16", rows=1)


Plant = Callable[[Running, Bundle, int, int], None]  # into row, slot


def _ring(run: Running, bundle: Bundle, row: int, slot: int) -> None:
    layer, position = run.cache.layers[1], int(run.decoder.buffers.positions[row])
    assert layer.ring.scale is not None
    layer.ring.scale[slot * layer.ring_rows + (position - 3) % layer.ring_rows, 0] = 255


def _infinite_ring(run: Running, bundle: Bundle, row: int, slot: int) -> None:
    layer, position = run.cache.layers[0], int(run.decoder.buffers.positions[row])
    nope = layer.ring.shape[1] - layer.ring.rope_dim
    rotary = layer.ring.data[:, nope:].view(torch.bfloat16)
    rotary[slot * layer.ring_rows + (position - 3) % layer.ring_rows, 1] = torch.inf


def _entry(run: Running, bundle: Bundle, row: int, slot: int) -> None:
    layer = run.cache.layers[2]
    assert layer.entries is not None and layer.entries.scale is not None
    layer.entries.scale[int(run.cache.page_table[slot, 0]) * layer.page_entries, 0] = 255


def _tail(run: Running, bundle: Bundle, row: int, slot: int) -> None:
    layer, position = run.cache.layers[2], int(run.decoder.buffers.positions[row])
    assert layer.tail is not None
    layer.tail.values[slot, (position - 9) % layer.tail.num_rows, 5] = torch.nan


def _embedding(run: Running, bundle: Bundle, row: int, slot: int) -> None:
    run.decoder.model.embedding.data[int(run.decoder.buffers.ids[row]), 11] = torch.nan


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("plant", [_ring, _infinite_ring, _entry, _tail, _embedding])
@pytest.mark.parametrize("activations", ["a16", "a8", "a4"])
def test_nan_shows_in_its_row(plant: Plant, rows: int, activations: Activations) -> None:
    """In the cache or the input of one row: that row's logits are NaN and its next token is none; the others'
    are what they are without it."""
    bundle, row = bundle_of(TINY, "modelopt", activations), rows - 1
    with torch.inference_mode():
        # The block of 128 closes at 255, so that its tail is read and its entry attended to at once.
        clean = Running(bundle, rows, 255, overlap=True, graph=False).step()
        run = Running(bundle, rows, 255, overlap=True, graph=False)
        plant(run, bundle, row, int(run.decoder.buffers.slots[row]))
        found = run.step()
    assert bool(torch.isnan(found[row]).all()), "the logits look like numbers"
    assert torch.equal(found[:row], clean[:row]), "another row changed"
    assert int(run.decoder.buffers.ids[row]) == -1


@pytest.mark.parametrize(
    "name", ["layers.1.attn.wq_a", "layers.2.ffn.gate", "layers.2.attn.compressor.wgate"]
)
def test_nan_in_a_weight_shows(name: str) -> None:
    bundle = bundle_of(TINY, "modelopt")
    weight = bundle.tiled(name)
    weight.factor[0, 0] = torch.nan
    with torch.inference_mode():
        found = Running(bundle, 2, 255, overlap=True, graph=True).step()
    assert bool(torch.isnan(found).all())


@pytest.mark.parametrize(
    ("config", "layout", "start", "activations"),
    [(CUT, "nvfp4", 2500, "a16"), (CUT, "modelopt", 2500, "a8"), (CUT_PRO, "nvfp4", 4500, "a4")],
)
@torch.inference_mode()
def test_tokens_of_one_sequence_in_a_step(
    config: ModelConfig, layout: str, start: int, activations: Activations
) -> None:
    """As drafts are verified: up to 8 tokens of a sequence as rows of one step, at every place in blocks of 4
    and of 128, padded, beside another sequence, give the bits of a step each; half of them are then rolled
    back and others follow."""
    bundle = bundle_of(config, layout, activations)
    single = Running(bundle, 1, start, overlap=True, graph=True, slots=2)
    batch = Running(bundle, 16, start, overlap=True, graph=True, slots=2)
    ids = torch.randint(0, config.vocab_size, (400,), generator=torch.Generator().manual_seed(3)).cuda()
    f, position, length = batch.decoder.buffers, start, 1
    while position < start + 270:
        f.positions.fill_(-1)
        for seat, slot in ((0, 0), (8, 1)):
            n = length if slot == 0 else 9 - length
            f.slots[seat : seat + 8] = slot
            f.positions[seat : seat + n] = torch.arange(position, position + n, device="cuda")
            # Those after the first half are wrong, and are written over by the next step.
            wrong = (torch.arange(n, device="cuda") >= (n + 1) // 2).long()
            f.ids[seat : seat + n] = (
                ids[position - start : position - start + n] + wrong
            ) % config.vocab_size
        got = batch.step()
        for i in range((length + 1) // 2):
            s = single.decoder.buffers
            s.ids[0], s.positions[0], s.slots[0] = ids[position - start + i], position + i, 0
            assert torch.equal(single.step()[0], got[i]), f"position {position + i}, row {i} of {length}"
        position += (length + 1) // 2
        length = length % 8 + 1
