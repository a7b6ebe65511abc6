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


class Block:
    def __init__(self, b: Bundle, name: str, spec: LayerSpec, rope: Rope) -> None:
        self.ops, self.eps = b.ops, b.config.norm_eps
        self.hc_attn, self.hc_ffn = (
            HyperConnection(b, f"{name}.hc_attn"),
            HyperConnection(b, f"{name}.hc_ffn"),
        )
        self.attn_norm, self.ffn_norm = b.plain(f"{name}.attn_norm"), b.plain(f"{name}.ffn_norm")
        self.attention = Attention(b, f"{name}.attn", spec, rope)
        self.moe = Moe(b, f"{name}.ffn", spec)

    def __call__(
        self, streams: Tensor, ids: Tensor, step: Step, cache: LayerCache, page_table: Tensor
    ) -> Tensor:
        """streams [T, N, D] -> [T, N, D]; `ids` [T] feed hash routing."""
        x, gate, comb = self.hc_attn.pre(streams, step)
        # Compressors read what is not rounded.
        x = self.ops.normed(x, self.attn_norm, self.eps, both=bool(self.attention.spec.ratio))
        y = self.attention(x, step, cache, page_table)
        streams = self.hc_attn.post(y, streams, gate, comb, step)
        x, gate, comb = self.hc_ffn.pre(streams, step)
        y = self.moe(self.ops.normed(x, self.ffn_norm, self.eps), ids, step)
        return self.hc_ffn.post(y, streams, gate, comb, step)
