"""DSpark: drafts a block of tokens at once, from the trunk's streams after some layers (taps)."""

import torch
from torch import Tensor

from dsv4.cache.store import LayerCache
from dsv4.config import Dspark, LayerSpec
from dsv4.model.block import Block
from dsv4.model.bundle import Bundle
from dsv4.model.mhc import HyperConnection
from dsv4.model.rope import Rope
from dsv4.model.step import Step
from dsv4.ops._exact import cast, total
from dsv4.ops.mhc.cpu import Residual
from dsv4.quant.formats import QuantTensor


def mean_stream(streams: Tensor) -> Tensor:
    """Average streams [T, N, D] in float32 -> a tap [T, D]; one after the other, whatever T is."""
    first, *others = streams.unbind(1)
    added = first.float()
    for other in others:
        added = added + other.float()
    return cast(added / streams.shape[1], streams.dtype)


class DsparkStages:
    def __init__(self, b: Bundle, num_stages: int, rope: Rope) -> None:
        assert b.config.dspark is not None
        self.ops, self.config, self.dspark, self.dtype = b.ops, b.config, b.config.dspark, b.numerics.dtype
        self.stages = [
            Block(b, f"mtp.{stage}", LayerSpec("sliding", 0, False), rope) for stage in range(num_stages)
        ]
        last = f"mtp.{num_stages - 1}"
        self.main_proj = b.linear("mtp.0.main_proj")
        self.main_norm = b.norm("mtp.0.main_norm", b.forms(s.attention.wkv for s in self.stages))
        self.hc_head, self.norm = HyperConnection(b, f"{last}.hc_head"), b.plain(f"{last}.norm")
        markov = b.held(f"{last}.markov_head.markov_w1")
        assert isinstance(markov, QuantTensor)
        self.markov_w1 = markov
        self.markov_w2 = b.linear(f"{last}.markov_head.markov_w2", rounds_input=False, parts=b.num_parts)
        self.confidence_proj = b.plain(f"{last}.confidence_head.proj")  # [1, D + rank]

    def keep(self, taps: Tensor, step: Step, caches: list[LayerCache]) -> None:
        """Write each stage's context entries of taps [T, targets * D]."""
        x = self.ops.rows.normed(self.main_proj(taps), self.main_norm)
        for stage, cache in zip(self.stages, caches, strict=True):
            stage.attention.keep(x, step, cache)

    def __call__(
        self, embedded: Tensor, step: Step, caches: list[LayerCache], page_table: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run blocks of an anchor and noise, embedded [T, D] -> the mixed streams [T, D], and these
        normalised: their head logits predict each slot's next token."""
        residual = Residual(embedded.unsqueeze(1).expand(-1, self.config.num_streams, -1))
        for stage, cache in zip(self.stages, caches, strict=True):
            stage(residual, step.ids, step, cache, page_table)
        mixed = self.hc_head.head(self.hc_head.close(residual, step))
        return mixed, self.ops.rows.rms_norm(mixed, self.norm, self.config.norm_eps)

    def correction(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Look up the tokens before [R] -> their vectors [R, rank], and what these add to logits [R, V],
        of which ranks have a share each."""
        known = self.ops.linear.embed(previous, self.markov_w1, self.dtype)
        return known, self.markov_w2(known, torch.float32)

    def confidence(self, mixed: Tensor, known: Tensor) -> Tensor:
        """Estimate, as logits [R], whether drafts will be accepted if those before them are: mixed [R, D] of
        their slots, `known` [R, rank] of the tokens before."""
        both = torch.cat((mixed, known), 1).float()
        return total(both * self.confidence_proj, 1)


def block_ids(dspark: Dspark, anchor: int) -> tuple[int, ...]:
    """List the ids of a block: the last token that is known, then noise."""
    return (anchor, *[dspark.noise_id] * (dspark.block_size - 1))
