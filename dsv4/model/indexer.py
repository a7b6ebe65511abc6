"""Chooses which compressed entries a CSA query attends to. Keeps narrower keys beside the entries."""

from torch import Tensor

from dsv4.cache.store import LayerCache
from dsv4.config import LayerSpec
from dsv4.model.bundle import Bundle
from dsv4.model.compressor import Compressor
from dsv4.model.rope import Rope
from dsv4.model.step import Step
from dsv4.ops import Ops
from dsv4.ops.activation import Activation


def visible(ops: Ops, step: Step, ratio: int, page_entries: int, page_table: Tensor) -> Tensor | None:
    """Pool rows [T, S] of every entry a query sees; None where `attend` finds them as fast by itself."""
    if not getattr(ops.attention, "WANTS_LISTS", True):
        return None
    return step.visible_rows(ops.index, ratio, page_entries, page_table)


class Indexer:
    def __init__(self, b: Bundle, name: str, spec: LayerSpec, rope: Rope) -> None:
        self.ops, self.config, self.numerics, self.spec, self.rope = b.ops, b.config, b.numerics, spec, rope
        self.name = name
        self.wq_b = b.linear(f"{name}.wq_b")
        self.weights_proj = b.linear(f"{name}.weights_proj", rounds_input=False)
        self.compressor = Compressor(b, f"{name}.compressor", spec)

    def __call__(
        self,
        x: Activation,
        q_low: Activation,
        rows: Tensor,
        step: Step,
        cache: LayerCache,
        page_table: Tensor,
    ) -> Tensor | None:
        """x [T, D], q_low [T, Rq]; rows [C]: pool rows of blocks closing now -> chosen pool rows [T, S], or
        None for all that a query sees."""
        c, qat, index, ratio = self.config, self.numerics.qat, self.ops.index, self.spec.ratio
        assert cache.keys is not None and cache.key_tail is not None
        _, pooled = self.compressor(x, step, cache.key_tail)
        if rows.shape[0]:
            at_block = step.block_rotation(self.rope, ratio)
            norm, format = self.compressor.norm, cache.keys.format
            keys = index.keys(pooled, norm, *at_block, c.norm_eps, qat, format)
            self.ops.attention.put_rows(cache.keys, rows, keys)

        if not c.selects(ratio, step.longest):
            return visible(self.ops, step, ratio, cache.page_entries, page_table)
        q = self.wq_b(q_low).unflatten(1, (c.index_heads, c.index_dim))
        q = index.queries(q, *step.rotation(self.rope), qat)
        weights = self.weights_proj(x).float() * c.index_factor
        selected = index.select(
            q=q,
            weights=weights,
            pool=cache.keys,
            page_table=page_table,
            slots=step.slots,
            positions=step.positions,
            ratio=ratio,
            page_entries=cache.page_entries,
            topk=c.index_topk,
            longest=step.longest,
        )
        step.see(self.name, "selected", selected)
        return selected
