"""A DSpark draft by emulated launches, by their meanings and by the specification. Run by tests, it prints
the mismatches of an emulated draft as JSON."""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dsv4.cache.layout import CacheLayout
from dsv4.cache.store import Cache
from dsv4.config import Activations, Dspark, LayerSpec, ModelConfig, preset
from dsv4.gpu.meaning import compute, run_and_check
from dsv4.gpu.pdl import Launch, Touches
from dsv4.lab.bench.decode import fill
from dsv4.lab.doctor.step import mismatches, place_drafts, raise_sinks
from dsv4.lab.init import make
from dsv4.lab.reference import open_model
from dsv4.model.bundle import Bundle, Numerics
from dsv4.model.model import Model
from dsv4.ops import IMPLEMENTATIONS, Ops
from dsv4.ops.sample.cpu import pack
from dsv4.quant.formats import Format
from dsv4.spec.drafts import dspark
from dsv4.spec.rounding import Rounding
from dsv4.step.buffers import Buffers
from dsv4.step.draft import Draft
from dsv4.step.launches import Launches as Trunk
from dsv4.weights.load import Checkpoint
from dsv4.weights.tiled import load_tiled
from tests.support.declared import late, noise, spans_of, undeclared
from tests.support.emulated import Launches, emulated, noted

BLOCK, STAGES, SLOTS = 3, 2, 3
# Three layers, two of them tapped, not in a row; a window that sequences outgrow soon; an odd vocabulary.
SMALL = replace(
    preset("tiny"),
    layers=tuple(LayerSpec("sliding", 0, False) for _ in range(3)),
    num_mtp_layers=STAGES,
    window=6,
    vocab_size=150,
    hc_eps=1e-3,
    sinkhorn_iters=3,
    dspark=Dspark(block_size=BLOCK, noise_id=149, target_layers=(0, 2), markov_rank=24),
)
# V4's sizes of heads, for which attention has a kernel of its own.
HEADS = replace(SMALL, num_heads=16, head_dim=512, q_rank=64, num_mtp_layers=1, window=128)
Change = Callable[["Drafted"], object]


class Drafted:
    """A random model, R sequences with taps of their own at positions 0 .. p, and the launches of a draft."""

    def __init__(
        self,
        folder: Path,
        launches: Launches,
        config: ModelConfig,
        last: list[int],
        dtype: torch.dtype = torch.float32,
        activations: Activations = "a16",
        format: str = "official",
        rows: int = 4,
        drafts: int | None = None,
    ) -> None:
        """`last`: p of each sequence; -1: it has no draft. `rows` of a step, each with taps."""
        if not folder.exists():
            for _ in make(folder, config, format, seed=3):
                pass
        self.checkpoint, self.launches, self.last = Checkpoint.open(folder), launches, last
        self.config = c = self.checkpoint.config
        assert c.dspark is not None
        self.rounding = Rounding(activations, True, dtype)
        weights = load_tiled(self.checkpoint, "cpu")
        ops = Ops.choose("cuda", **dict.fromkeys(IMPLEMENTATIONS, "gpu"))
        self.bundle = Bundle(c, weights, ops, Numerics(dtype, activations, True))
        stages, most = weights.num_mtp_layers, max(4 * c.window, 2 * max(last))
        layout = CacheLayout(c, Format.KV8, Format.MXFP4, dtype.itemsize, most, SLOTS, stages)
        self.cache = Cache(layout, "cpu", dtype)
        for layer in self.cache.layers:
            layer.ring.data.fill_(0x7F)  # NaN until it is written
        self.model = Model(self.bundle, most, "cpu", copies_ahead=False)
        self.step = Buffers(c, rows, most, dtype, "cpu", activations, taps=True)
        with emulated(launches), noted() as touches:
            self.draft = Draft(self.bundle, self.model, self.cache, len(last), self.step, drafts=drafts)
        self.touches = dict(zip(map(id, self.draft.launches), touches, strict=True))
        generator = torch.Generator().manual_seed(5)
        columns = len(c.dspark.target_layers) * c.hidden_size
        self.taps = [torch.randn(p + 1, columns, generator=generator).to(dtype) for p in last]
        self.anchors = torch.randint(0, c.vocab_size, (len(last),), generator=generator)

    def trunk(self) -> Trunk:
        """The launches of the step whose taps the draft reads."""
        with emulated(self.launches), noted() as touches:
            made = Trunk(
                **{"b": self.bundle, "model": self.model, "cache": self.cache, "buffers": self.step},
                **{"latest": None, "penalties": None, "counts": None, "peers": None},
                **{"overlap": True, "sums": True, "goes_on": True},
            )
        self.touches |= dict(zip(map(id, made.list), touches, strict=True))
        return made

    def slot(self, sequence: int) -> int:
        return SLOTS - 1 - sequence

    def commit(self, run: Callable[[list[Launch]], object]) -> None:
        """Commit all positions, a few rows at a time, sequences mixed; the last row has none."""
        d = self.draft.drafter
        rows = [(at, self.slot(r), taps[at]) for r, taps in enumerate(self.taps) for at in range(len(taps))]
        rows, count = sorted(rows, key=lambda row: row[:2]), max(1, len(d.committed) - 1)
        for first in range(0, len(rows), count):
            d.committed.fill_(-1)
            d.slots.fill_(1)
            d.taps.normal_()
            for row, (at, slot, taps) in enumerate(rows[first : first + count]):
                d.committed[row], d.slots[row], d.taps[row] = at, slot, taps
            run(self.draft.commit)

    def begin(self, settings: list[list[int]] | None = None) -> None:
        """The round's input."""
        d, p = self.draft.drafter, torch.tensor(self.last)
        d.anchors.copy_(self.anchors)
        d.anchors_at.copy_(torch.where(p < 0, -1, p + 1))
        d.anchors_slots.copy_(torch.tensor([self.slot(r) for r in range(len(p))]))
        d.settings.copy_(torch.tensor([pack()] * len(p) if settings is None else settings))

    def mean(self, launches: list[Launch], after: Mapping[str, Change] = {}) -> None:
        """What the launches mean, in torch. `after` the launches of these names something is changed."""
        with torch.inference_mode():
            for launch in launches:
                assert launch.claims is not None, launch.name
                compute(launch.claims())
                after.get(launch.name, lambda _: None)(self)

    @torch.inference_mode()
    def run(self, launches: list[Launch]) -> list[str]:
        """The kernels, each held against its meaning; what it has not declared holds noise."""
        state = spans_of([tensor for each in self.touches.values() for tensor in each.writes])
        found = []
        with emulated(self.launches):
            for launch in launches:
                its: Touches = self.touches[id(launch)]
                assert launch.claims is not None, launch.name
                with noise(undeclared(state, its), launch.name):
                    self.launches.late += late(state, its)
                    found += [f"{launch.name}: {each}" for each in run_and_check(launch.run, launch.claims())]
                    self.launches.late.clear()
        return found

    def reference(self, sequence: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The specification's base logits, logits, drafts and confidences."""
        with self.checkpoint.reader:
            model = open_model(self.checkpoint, self.rounding)
            return dspark(model, self.taps[sequence], int(self.anchors[sequence]))

    def distance(self, sequence: int) -> float:
        """Of base logits and confidences from the specification's, relative to the largest; drafts must be
        those, or it is infinite."""
        base, _, drafts, confidence = self.reference(sequence)
        d, count = self.draft.drafter, len(self.last)
        got = d.layers.logits.unflatten(0, (count, -1))[sequence]
        far = [
            (a - b).abs().max() / b.abs().max()
            for a, b in ((got, base), (d.confidence[sequence], confidence))
        ]
        return float(max(far)) if d.drafts[:, sequence].tolist() == drafts.tolist() else torch.inf


def check(folder: Path, twins: Path) -> list[str]:
    """What differs in an emulated draft, with V4's heads: the first launch first."""
    made = Drafted(folder, Launches(twins), HEADS, [150, 150, 7], torch.bfloat16)
    raise_sinks(made.bundle)
    fill(made.cache)
    place_drafts(made.draft, 150)
    with emulated(made.launches):
        return [f"{each.launch.name}: {each}" for each in mismatches(made.draft)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(check(Path(folder) / "model", Path(sys.argv[1]))))
