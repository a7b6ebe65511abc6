"""The draft block: predicts the token after next from the trunk's streams and the next token."""

from torch import Tensor

from dsv4.cache.store import LayerCache
from dsv4.config import LayerSpec
from dsv4.model.block import Block
from dsv4.model.bundle import Bundle
from dsv4.model.mhc import HyperConnection
from dsv4.model.rope import Rope
from dsv4.model.step import Step
from dsv4.ops.mhc.cpu import Residual


class Mtp:
    def __init__(self, b: Bundle, name: str, rope: Rope) -> None:
        self.ops, self.config = b.ops, b.config
        self.enorm, self.hnorm = b.plain(f"{name}.enorm"), b.plain(f"{name}.hnorm")
        self.e_proj, self.h_proj = b.linear(f"{name}.e_proj"), b.linear(f"{name}.h_proj")
        self.block = Block(b, name, LayerSpec("sliding", 0, False), rope)
        self.hc_head = HyperConnection(b, f"{name}.hc_head")
        self.norm = b.plain(f"{name}.norm")

    def __call__(
        self,
        streams: Tensor,
        embedded: Tensor,
        next_ids: Tensor,
        step: Step,
        cache: LayerCache,
        page_table: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """streams [T, N, D] of positions i, embedded [T, D] of tokens i+1 -> streams for a further draft, and
        the normalised vector [T, D] whose head logits predict token i+2."""
        residual = self._joined(streams, embedded)
        self.block(residual, next_ids, step, cache, page_table)
        streams = self.hc_head.close(residual, step)
        mixed = self.hc_head.head(streams)
        return streams, self.ops.rows.rms_norm(mixed, self.norm, self.config.norm_eps)

    def keep(self, streams: Tensor, embedded: Tensor, step: Step, cache: LayerCache) -> None:
        """Make the entries of the same tokens, and draft nothing."""
        self.block.keep(self._joined(streams, embedded), step, cache)

    def _joined(self, streams: Tensor, embedded: Tensor) -> Residual:
        eps, norm = self.config.norm_eps, self.ops.rows.rms_norm
        e = self.e_proj(norm(embedded, self.enorm, eps))
        h = self.h_proj(norm(streams, self.hnorm, eps).flatten(0, 1)).view_as(streams)
        return Residual(e.unsqueeze(1) + h)
