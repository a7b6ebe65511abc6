"""The three attention kinds: window only, window + selected entries (CSA), window + all entries (HCA)."""

from torch import Tensor

from dsv4.cache.store import LayerCache
from dsv4.config import LayerSpec
from dsv4.model.bundle import Bundle
from dsv4.model.compressor import Compressor
from dsv4.model.indexer import Indexer, visible
from dsv4.model.rope import Rope
from dsv4.model.step import Step
from dsv4.ops.activation import Activation, Rows
from dsv4.ops.linear.prefill_packed import Packed
from dsv4.quant.formats import QuantTensor


class Attention:
    def __init__(self, b: Bundle, name: str, spec: LayerSpec, rope: Rope) -> None:
        self.ops, self.config, self.numerics, self.spec, self.rope = b.ops, b.config, b.numerics, spec, rope
        self.name = name
        # Ranks share the heads, whole output groups of them; entries and their selection are on each.
        self.num_heads, groups = b.config.num_heads // b.mesh.size, b.config.o_groups // b.mesh.size
        self.wq_a, self.wq_b = b.linear(f"{name}.wq_a"), b.linear(f"{name}.wq_b", parts=b.num_parts)
        self.wkv, self.wo_b = b.linear(f"{name}.wkv"), b.summed(f"{name}.wo_b")
        self.kv_norm = b.plain(f"{name}.kv_norm")
        self.sinks = b.plain(f"{name}.attn_sink")
        self.wo_a = b.grouped(f"{name}.wo_a", groups)
        self.compressor = Compressor(b, f"{name}.compressor", spec) if spec.ratio else None
        self.indexer = Indexer(b, f"{name}.indexer", spec, rope) if spec.kind == "csa" else None
        readers, readers_of_q = [self.wq_a, self.wkv], [self.wq_b]
        if self.compressor is not None:
            readers += self.compressor.readers
        if self.indexer is not None:
            readers += [*self.indexer.compressor.readers, self.indexer.weights_proj]
            readers_of_q += [self.indexer.wq_b]
        self.forms = b.forms(readers)
        self.q_norm = b.norm(f"{name}.q_norm", b.forms(readers_of_q))

    def __call__(self, x: Activation, step: Step, cache: LayerCache, page_table: Tensor) -> Tensor:
        """x [T, D], normalised in `forms` -> [T, D]."""
        c, ops = self.config, self.ops
        cos, sin = step.rotation(self.rope)
        q_low = ops.rows.normed(self.wq_a(x), self.q_norm)
        q = self.wq_b(q_low).unflatten(1, (self.num_heads, c.head_dim))
        fresh = self._entries(x, step, cache)
        if step.tap is not None:
            step.see(self.name, "q", ops.attention.queries(q, cos, sin, c.norm_eps))
        o: Tensor | Packed
        if step.oldest is None:
            o = self._attend(x, q_low, q, fresh, step, cache, page_table)
        else:
            o = ops.attention.attend_block(
                q=q,
                fresh=fresh,
                ring=cache.ring,
                slots=step.slots,
                first=step.first,
                oldest=step.oldest,
                window=c.window,
                ring_size=cache.ring_rows,
                sinks=self.sinks,
                cos=cos,
                sin=sin,
                eps=c.norm_eps,
                reader=self.wo_a if step.tap is None else None,
            )
        del q  # of a long chunk the largest tensor: its memory is for what follows
        if isinstance(o, Tensor):
            step.see(self.name, "o", o)
        if step.oldest is None:
            # The ring is overwritten only now: queries of a long chunk still read what lay before it.
            self._put(fresh, step, cache)

        y = self.wo_b(ops.linear.grouped(o, self.wo_a))
        step.see(self.name, "out", y)
        return y

    def _attend(
        self,
        x: Activation,
        q_low: Activation,
        q: Tensor,
        fresh: QuantTensor,
        step: Step,
        cache: LayerCache,
        page_table: Tensor,
    ) -> Tensor | Packed:
        rows = self._compressed_rows(x, q_low, step, cache, page_table)
        cos, sin = step.rotation(self.rope)
        o: Tensor | Packed = self.ops.attention.attend(
            q=q,
            fresh=fresh,
            ring=cache.ring,
            slots=step.slots,
            positions=step.positions,
            first=step.first,
            window=self.config.window,
            ring_size=cache.ring_rows,
            pool=cache.entries,
            rows=rows,
            sinks=self.sinks,
            cos=cos,
            sin=sin,
            page_table=page_table,
            ratio=self.spec.ratio,
            page_entries=cache.page_entries,
            eps=self.config.norm_eps,
            reader=self.wo_a if step.tap is None else None,
        )
        return o

    def keep(self, x: Rows, step: Step, cache: LayerCache) -> None:
        """Make the entries of inputs x [T, D], and attend to nothing."""
        self._put(self._entries(x, step, cache), step, cache)

    def _entries(self, x: Rows, step: Step, cache: LayerCache) -> QuantTensor:
        """Raw entries of the step's tokens, as the ring keeps them."""
        c, attention = self.config, self.ops.attention
        kv = attention.entries(self.wkv(x), self.kv_norm, *step.rotation(self.rope), c.norm_eps)
        step.see(self.name, "kv", kv)
        stored: QuantTensor = attention.store(kv, c.rope_dim, cache.ring.format, self.numerics.qat)
        return stored

    def _put(self, fresh: QuantTensor, step: Step, cache: LayerCache) -> None:
        tokens, ring_at = step.remaining(cache.ring_rows)
        self.ops.attention.put_rows(cache.ring, ring_at, fresh, tokens)

    def _compressed_rows(
        self, x: Activation, q_low: Activation, step: Step, cache: LayerCache, page_table: Tensor
    ) -> Tensor | None:
        """Close blocks, then list the pool rows each query attends to (None: all that it sees, if any);
        entries are written before read."""
        if self.compressor is None:
            return None
        assert cache.tail is not None and cache.entries is not None
        c, ops, ratio = self.config, self.ops, self.spec.ratio
        _, pooled = self.compressor(x, step, cache.tail)
        rows = step.entry_rows(ratio, cache.page_entries, page_table)
        if rows.shape[0]:
            at_block = step.block_rotation(self.rope, ratio)
            kv = ops.attention.entries(pooled, self.compressor.norm, *at_block, c.norm_eps)
            stored = ops.attention.store(kv, c.rope_dim, cache.entries.format, self.numerics.qat)
            ops.attention.put_rows(cache.entries, rows, stored)
        if self.indexer is not None:
            return self.indexer(x, q_low, rows, step, cache, page_table)
        return visible(ops, step, ratio, cache.page_entries, page_table)
