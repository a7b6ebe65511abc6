"""One block: hyper-connection, attention, hyper-connection, experts. There is no other residual path."""

from torch import Tensor

from dsv4.cache.store import LayerCache
from dsv4.config import LayerSpec
from dsv4.model.attention import Attention
from dsv4.model.bundle import Bundle
from dsv4.model.mhc import HyperConnection
from dsv4.model.moe import Moe
from dsv4.model.rope import Rope
from dsv4.model.step import Step
from dsv4.ops.mhc.cpu import Residual


class Block:
    def __init__(self, b: Bundle, name: str, spec: LayerSpec, rope: Rope) -> None:
        self.hc_attn, self.hc_ffn = (
            HyperConnection(b, f"{name}.hc_attn"),
            HyperConnection(b, f"{name}.hc_ffn"),
        )
        self.attention = Attention(b, f"{name}.attn", spec, rope)
        self.moe = Moe(b, f"{name}.ffn", spec)
        self.attn_norm = b.norm(f"{name}.attn_norm", self.attention.forms)
        self.ffn_norm = b.norm(f"{name}.ffn_norm", self.moe.forms)

    def __call__(
        self, residual: Residual, ids: Tensor, step: Step, cache: LayerCache, page_table: Tensor
    ) -> None:
        """Read the streams twice and add to them twice; `ids` [T] feed hash routing."""
        x = self.hc_attn.mix_in(residual, self.attn_norm, step)
        self.hc_attn.mix_out(self.attention(x, step, cache, page_table), residual)
        x = self.hc_ffn.mix_in(residual, self.ffn_norm, step)
        self.hc_ffn.mix_out(self.moe(x, ids, step), residual)

    def keep(self, residual: Residual, step: Step, cache: LayerCache) -> None:
        """Make the attention's entries, and nothing else."""
        self.attention.keep(self.hc_attn.mix_in(residual, self.attn_norm, step), step, cache)
