"""Pools every `ratio` tokens into one row, whatever the chunking; the caller makes it an entry or a key."""

import torch
from torch import Tensor

from dsv4.cache.store import Tail
from dsv4.config import LayerSpec
from dsv4.model.bundle import Bundle
from dsv4.model.step import Step
from dsv4.ops.activation import Activation


class Compressor:
    def __init__(self, b: Bundle, name: str, spec: LayerSpec) -> None:
        self.ops, self.dtype, self.spec, self.name = b.ops, b.numerics.dtype, spec, name
        # The reference computes compressors in float32 from the unquantised input.
        self.wkv = b.linear(f"{name}.wkv", rounds_input=False)
        self.wgate = b.linear(f"{name}.wgate", rounds_input=False)
        self.readers = [self.wkv, self.wgate]
        self.ape = b.plain(f"{name}.ape")
        self.norm = b.plain(f"{name}.norm")

    def __call__(self, x: Activation, step: Step, tail: Tail) -> tuple[Tensor, Tensor]:
        """x [T, D] -> closing [C] (tokens that end a block), pooled [C, d]; the tail takes the rows."""
        ratio = self.spec.ratio
        values = self.wkv(x, torch.float32)
        scores = self.wgate(x, torch.float32) + self.ape.index_select(0, step.phase(ratio))
        closing = step.closing(ratio)
        pooled = self.ops.attention.pool(
            *(values, scores, tail.values, tail.scores),
            *(closing, step.slots, step.positions, step.first),
            *(ratio, self.spec.kind == "csa"),
        )
        step.see(self.name, "pooled", pooled)
        tokens, rows = step.remaining(tail.num_rows)
        self.ops.attention.put_tail(tail.values, tail.scores, rows, values, scores, tokens)
        return closing, pooled.to(self.dtype)
