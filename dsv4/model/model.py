"""THE SPINE: embed, expand to streams, run the blocks, mix the streams, norm, head. And the drafters."""

from dataclasses import replace

import torch
from torch import Tensor

from dsv4.cache.store import Cache
from dsv4.model.block import Block
from dsv4.model.bundle import Bundle
from dsv4.model.dspark import DsparkStages, mean_stream
from dsv4.model.mhc import HyperConnection
from dsv4.model.mtp import Mtp
from dsv4.model.rope import Rope
from dsv4.model.step import Step
from dsv4.ops.experts.staging import READ_IN_PLACE, Staging
from dsv4.ops.mhc.cpu import Residual
from dsv4.quant.formats import QuantTensor


class Model:
    def __init__(
        self, b: Bundle, max_positions: int, device: str | torch.device, copies_ahead: bool = True
    ) -> None:
        """`copies_ahead`: of experts in host memory, for long prompt steps; else they are read in place."""
        c, placement = b.config, b.weights.placement
        self.ops, self.config, self.numerics, self.mesh = b.ops, c, b.numerics, b.mesh
        # A block of drafts may begin at the last position.
        extra = c.dspark.block_size if c.dspark else 0
        plain = Rope(c.rope_theta, c.rope_dim, None, max_positions + extra, device)
        compressed = Rope(c.compress_rope_theta, c.rope_dim, c.yarn, max_positions, device)
        embed = b.weights.tensors["embed"]
        assert isinstance(embed, QuantTensor)
        self.embedding = embed
        self.blocks = [
            Block(b, f"layers.{index}", spec, compressed if spec.ratio else plain)
            for index, spec in enumerate(c.layers)
        ]
        self.hc_head = HyperConnection(b, "hc_head")
        self.norm = b.plain("norm")
        self.head = b.linear("head", rounds_input=False, parts=b.num_parts)
        self.staging: Staging | None = None
        if placement is not None and placement.staging and copies_ahead:
            self.staging = Staging(placement)
        drafts = b.weights.num_mtp_layers
        self.mtp = [] if c.dspark else [Mtp(b, f"mtp.{index}", plain) for index in range(drafts)]
        self.dspark = DsparkStages(b, drafts, plain) if c.dspark and drafts else None

    def embed(self, ids: Tensor) -> Tensor:
        """[T] -> [T, D]; ranks share the rows of the table."""
        if self.mesh.size == 1:
            return self.ops.linear.embed(ids, self.embedding, self.numerics.dtype)
        rows = self.embedding.shape[0]
        here = ids - self.mesh.rank * rows
        is_here = (here >= 0) & (here < rows)
        found = self.ops.linear.embed(here.where(is_here, 0), self.embedding, self.numerics.dtype)
        return self.mesh.comm.sum_disjoint(found.masked_fill(~is_here.unsqueeze(1), 0))

    @torch.inference_mode()
    def forward(self, step: Step, cache: Cache, taps: list[Tensor] | None = None) -> Tensor:
        """All tokens of the step -> residual streams [T, N, D] after the last block.

        `taps` takes a tensor [T, D] for each of DSpark's target layers."""
        if self.stages(step.ids.shape[0]) and step.lists is None:
            assert self.staging is not None
            with self.staging.step() as staging:
                return self._blocks(replace(step, staging=staging), cache, taps)
        return self._blocks(step, cache, taps)

    def stages(self, tokens: int) -> bool:
        """Whether a step of so many tokens copies experts of host memory ahead."""
        return self.staging is not None and tokens > READ_IN_PLACE

    def _blocks(self, step: Step, cache: Cache, taps: list[Tensor] | None) -> Tensor:
        dspark = self.config.dspark
        targets = dspark.target_layers if dspark and taps is not None else ()
        residual = Residual(self.embed(step.ids).unsqueeze(1).expand(-1, self.config.num_streams, -1))
        for number, (block, layer) in enumerate(zip(self.blocks, cache.layers, strict=False)):
            block(residual, step.ids, step, layer, cache.page_table)
            if number in targets:
                assert taps is not None
                # The next site adds the output itself, in its own order: what is tapped changes nothing.
                taps += [mean_stream(residual.seen(self.ops.mhc.post))] * targets.count(number)
        return self.hc_head.close(residual, step)

    def read(self, step: Step, cache: Cache) -> Tensor:
        """The same; DSpark, if it is loaded, makes its context of the tokens."""
        taps: list[Tensor] | None = None if self.dspark is None else []
        streams = self.forward(step, cache, taps)
        if taps is not None:
            self.keep_taps(torch.cat(taps, 1), step, cache)
        return streams

    @torch.inference_mode()
    def logits(self, streams: Tensor) -> Tensor:
        """streams [R, N, D] of the rows that need them -> float32 [R, V] on every rank."""
        hidden = self.ops.rows.rms_norm(self.hc_head.head(streams), self.norm, self.config.norm_eps)
        return self.mesh.comm.gather_columns(self.head(hidden, torch.float32))

    @torch.inference_mode()
    def draft(
        self, streams: Tensor, next_ids: Tensor, step: Step, cache: Cache, depth: int = 0
    ) -> tuple[Tensor, Tensor]:
        """MTP block `depth`: streams of positions i, tokens i+1 -> its streams, logits [T, V] for i+2."""
        layer = cache.layers[len(self.blocks) + depth]
        streams, hidden = self.mtp[depth](
            streams, self.embed(next_ids), next_ids, step, layer, cache.page_table
        )
        return streams, self.mesh.comm.gather_columns(self.head(hidden, torch.float32))

    @torch.inference_mode()
    def keep_streams(self, streams: Tensor, next_ids: Tensor, step: Step, cache: Cache) -> None:
        """Write MTP's entries of the step's tokens, from their streams [T, N, D] and the next tokens."""
        self.mtp[0].keep(streams, self.embed(next_ids), step, cache.layers[len(self.blocks)])

    @torch.inference_mode()
    def keep_taps(self, taps: Tensor, step: Step, cache: Cache) -> None:
        """Write DSpark's context entries of the step's tokens, from their taps [T, targets * D]."""
        assert self.dspark is not None
        self.dspark.keep(taps, step, cache.layers[len(self.blocks) :])

    @torch.inference_mode()
    def draft_block(self, step: Step, cache: Cache) -> tuple[Tensor, Tensor]:
        """Run DSpark over R blocks of B slots -> logits [R, B, V] before the correction, and what the
        confidence is made of [R, B, D]."""
        assert self.dspark is not None and self.config.dspark is not None
        layers, size = cache.layers[len(self.blocks) :], self.config.dspark.block_size
        mixed, hidden = self.dspark(self.embed(step.ids), step, layers, cache.page_table)
        logits = self.mesh.comm.gather_columns(self.head(hidden, torch.float32))
        return logits.view(-1, size, logits.shape[1]), mixed.view(-1, size, mixed.shape[1])

    @torch.inference_mode()
    def correct(self, base: Tensor, mixed: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Correct one slot's logits `base` [R, V] by the tokens before [R] -> logits, confidences [R]."""
        assert self.dspark is not None
        known, correction = self.dspark.correction(previous)
        logits = base + self.mesh.comm.gather_columns(correction)
        return logits, self.dspark.confidence(mixed, known)
