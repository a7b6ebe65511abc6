"""One block: hyper-connection, attention, hyper-connection, experts. There is no other residual path."""

from torch import Tensor

from dsv4.cache.store import LayerCache
from dsv4.config import LayerSpec
from dsv4.model.attention import Attention
from dsv4.model.bundle import Bundle
from dsv4.model.mhc import HyperConnection, Left
from dsv4.model.moe import Moe
from dsv4.model.rope import Rope
from dsv4.model.step import Step


class Block:
    def __init__(self, b: Bundle, name: str, spec: LayerSpec, rope: Rope) -> None:
        self.hc_attn, self.hc_ffn = (
            HyperConnection(b, f"{name}.hc_attn"),
            HyperConnection(b, f"{name}.hc_ffn"),
        )
        self.attn_norm, self.ffn_norm = b.plain(f"{name}.attn_norm"), b.plain(f"{name}.ffn_norm")
        self.attention = Attention(b, f"{name}.attn", spec, rope)
        self.moe = Moe(b, f"{name}.ffn", spec)

    def __call__(self, left: Left, ids: Tensor, step: Step, cache: LayerCache, page_table: Tensor) -> Left:
        """What the block before left, which is taken -> what this one leaves; `ids` [T] feed hash routing."""
        # Compressors read what is not rounded.
        both = bool(self.attention.spec.ratio)
        x, left = self.hc_attn.enter(left, self.attn_norm, self.attention.readers, step, both)
        left.y = self.attention(x, step, cache, page_table)
        x, left = self.hc_ffn.enter(left, self.ffn_norm, self.moe.readers, step)
        left.y = self.moe(x, ids, step)
        return left
