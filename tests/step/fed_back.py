"""MTP drafts of a decode step by emulated launches, by their meanings and by the specification."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dsv4.cache.layout import CacheLayout
from dsv4.cache.store import Cache
from dsv4.config import Activations, LayerSpec, ModelConfig, preset
from dsv4.gpu.pdl import Launch
from dsv4.lab.init import make
from dsv4.lab.reference import open_model
from dsv4.model.bundle import Bundle, Numerics
from dsv4.model.model import Model
from dsv4.ops import IMPLEMENTATIONS, Ops
from dsv4.ops.sample.cpu import pack
from dsv4.quant.formats import Format
from dsv4.spec.drafts import mtp_steps
from dsv4.spec.rounding import Rounding
from dsv4.step.buffers import Buffers
from dsv4.step.mtp import MtpDraft
from dsv4.weights.load import Checkpoint
from dsv4.weights.tiled import load_tiled
from tests.step.drafted import Emulated
from tests.support.emulated import Launches, emulated, noted

SLOTS, DRAFTS = 3, 3
# A window that sequences outgrow soon, and an odd vocabulary.
SMALL = replace(
    preset("tiny"),
    layers=(LayerSpec("sliding", 0, False),),
    num_mtp_layers=1,
    window=6,
    vocab_size=150,
    hc_eps=1e-3,
    sinkhorn_iters=3,
)
# V4's sizes of heads, for which attention has a kernel of its own.
HEADS = replace(SMALL, num_heads=16, head_dim=512, q_rank=64, window=128)


class FedBack(Emulated):
    """A random model, R sequences with streams of their own at positions 0 .. p, each followed by a token,
    and the launches of up to three drafts."""

    draft: MtpDraft

    def __init__(
        self,
        folder: Path,
        launches: Launches,
        config: ModelConfig,
        last: list[int],
        dtype: torch.dtype = torch.float32,
        activations: Activations = "a16",
        format: str = "official",
        drafts: int = DRAFTS,
    ) -> None:
        """`last`: p of each sequence; -1: it has no draft."""
        if not folder.exists():
            for _ in make(folder, config, format, seed=3):
                pass
        self.checkpoint, self.launches, self.last = Checkpoint.open(folder), launches, [*last]
        self.config = c = self.checkpoint.config
        self.rounding = Rounding(activations, True, dtype)
        ops = Ops.choose("cuda", **dict.fromkeys(IMPLEMENTATIONS, "gpu"))
        self.bundle = Bundle(c, load_tiled(self.checkpoint, "cpu"), ops, Numerics(dtype, activations, True))
        most = max(4 * c.window, 2 * max(last))
        self.cache = Cache(
            CacheLayout(c, Format.KV8, Format.MXFP4, dtype.itemsize, most, SLOTS, 1), "cpu", dtype
        )
        for layer in self.cache.layers:
            layer.ring.data.fill_(0x7F)  # NaN until it is written
        self.model = Model(self.bundle, most, "cpu", copies_ahead=False)
        self.each, self.num_drafts = drafts + 1, drafts
        self.step = Buffers(c, len(last) * self.each, most, dtype, "cpu", activations)
        with emulated(launches), noted() as touches:
            self.draft = MtpDraft(self.bundle, self.model, self.cache, len(last), self.step, drafts=drafts)
        self.touches = dict(zip(map(id, self.draft.launches), touches, strict=True))
        generator = torch.Generator().manual_seed(5)
        shape = c.num_streams, c.hidden_size
        self.streams = [torch.randn(p + 1, *shape, generator=generator).to(dtype) for p in last]
        self.ids = [torch.randint(0, c.vocab_size, (p + 1,), generator=generator) for p in last]
        self.done = [0] * len(last)

    def slot(self, sequence: int) -> int:
        return SLOTS - 1 - sequence

    def place(self, ends: list[int]) -> None:
        """A round that commits each sequence's rows up to `ends`; those after them in a step are rejected:
        they hold what the next round may not see."""
        d, f = self.draft.drafter, self.step
        d.committed.fill_(-1)
        f.streams.normal_(generator=torch.Generator().manual_seed(1))
        f.out[:, 0] = 3
        for r, end in enumerate(ends):
            first, count = self.done[r], end - self.done[r]
            assert count <= self.each
            at = slice(r * self.each, r * self.each + count)
            f.slots[r * self.each : (r + 1) * self.each] = self.slot(r)
            d.committed[at], f.streams[at] = torch.arange(first, end), self.streams[r][first:end]
            f.out[at, 0] = self.ids[r][first:end].int()
            self.done[r] = end

    def commit(self, run: Callable[[list[Launch]], object]) -> None:
        """All rows but the last one to four, a few at a time, sequences mixed."""
        turn = 0
        while any(done < p for done, p in zip(self.done, self.last, strict=True)):
            turn += 1
            ends = [
                min(done + 1 + (r + turn) % self.each, max(0, p))
                for r, (done, p) in enumerate(zip(self.done, self.last, strict=True))
            ]
            self.place(ends)
            run(self.draft.commit)

    def extend(self, counts: list[int]) -> None:
        """Rows that the last round verified and accepted, and which the next one commits."""
        generator = torch.Generator().manual_seed(8)
        for r, count in enumerate(counts):
            its = self.streams[r]
            more = torch.randn(count, *its.shape[1:], generator=generator).to(its.dtype)
            ids = torch.randint(0, self.config.vocab_size, (count,), generator=generator)
            self.streams[r], self.ids[r] = torch.cat((its, more)), torch.cat((self.ids[r], ids))
            self.done[r] = len(its)
            self.last[r] += count

    def begin(self, settings: list[list[int]] | None = None) -> None:
        """The round's input: each sequence's rows that are left, at least the last one, and its anchor."""
        d, p = self.draft.drafter, torch.tensor(self.last)
        self.done = [min(done, max(0, at)) for done, at in zip(self.done, self.last, strict=True)]
        self.place([at + 1 for at in self.last])
        d.anchors.copy_(torch.tensor([int(ids[-1]) if len(ids) else 0 for ids in self.ids]))
        d.anchors_at.copy_(torch.where(p < 0, -1, p + 1))
        d.anchors_slots.copy_(torch.tensor([self.slot(r) for r in range(len(p))]))
        d.settings.copy_(torch.tensor([pack()] * len(p) if settings is None else settings))

    def reference(self, sequence: int, drafts: list[int]) -> Tensor:
        """The specification's logits [1 + len(drafts), V]."""
        with self.checkpoint.reader, torch.inference_mode():
            model = open_model(self.checkpoint, self.rounding)
            return mtp_steps(model, self.streams[sequence], self.ids[sequence], drafts)

    def distance(self, sequence: int, logits: list[Tensor]) -> float:
        """Of each pass's logits from the specification's, relative to the largest; each draft must be the
        likeliest by its logits, or it is infinite."""
        drafts = self.draft.drafter.drafts[:, sequence].tolist()
        want = self.reference(sequence, drafts[:-1])
        got = torch.stack([each[sequence] for each in logits])
        if got.argmax(1).tolist() != drafts:
            return torch.inf
        return float(((got - want).abs().amax(1) / want.abs().amax(1)).max())
