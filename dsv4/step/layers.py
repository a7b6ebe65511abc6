"""What layers of the trunk and of a drafter have in common, as launches of a decode step over named buffers.

The model of dsv4/spec, cut where a GPU wants it cut: what reads the same input is one launch, and nothing
depends on the host. Token, position and slot of a row live on the device; position -1 marks an unused row.
How launches overlap is in schedule.py.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.store import Cache, LayerCache, Tail
from dsv4.config import LayerSpec
from dsv4.gpu.pdl import Launch, Launcher, Names
from dsv4.gpu.tiles import Tiled
from dsv4.model.bundle import Bundle
from dsv4.model.mhc import wide_scale
from dsv4.model.model import Model
from dsv4.model.params import own_experts
from dsv4.model.rope import Rope
from dsv4.ops.attention import decode as attention
from dsv4.ops.attention import decode_any
from dsv4.ops.attention.prepare import Pooling, prepare, queries
from dsv4.ops.exchange import decode as exchange
from dsv4.ops.index import decode as index
from dsv4.ops.index import decode_select as selecting
from dsv4.ops.linear.decode import MatVec, Mixing, Product, Tasks, fits_beside
from dsv4.ops.mhc import decode as mhc
from dsv4.ops.route import decode as routing
from dsv4.ops.rows import quantize
from dsv4.quant.formats import QuantTensor
from dsv4.step.buffers import Buffers, Mutual
from dsv4.step.schedule import SCHEDULE


class Layers:
    """Launches over one set of buffers: what layers of the trunk and of a drafter have in common."""

    def __init__(
        self,
        b: Bundle,
        model: Model,
        cache: Cache,
        buffers: Buffers,
        names: Names,
        peers: exchange.Peers | None,
        overlap: bool,
    ) -> None:
        self.peers, self.exchanges = peers, 0
        self.b, self.config, self.cache, self.model, self.buffers = b, b.config, cache, model, buffers
        self.dtype, self.overlap, self.names = b.numerics.dtype, overlap, names
        # Of the routed experts those that this rank has, if it has some of them whole.
        self.own = own_experts(b.config, b.mesh.rank, b.mesh.size) if b.mesh.whole_experts else None
        self.list: list[Launch] = []
        self.layer = ""

    def add(self, name: str, launcher: Launcher[...], **arguments: Any) -> Launch:
        run = partial(launcher, **arguments, overlap=self.overlap)
        claims = None if launcher.means is None else partial(launcher.means, **arguments)
        self.list.append(self.names.launch(name, run, launcher.touches(arguments), self.layer, claims))
        return self.list[-1]

    def _head(self, weight: Tiled, sums: bool = True) -> None:
        """Logits of all rows, on every rank; without `sums` only this rank's share of them."""
        f = self.buffers
        share = f.own_logits if sums else f.logits[:, : f.own_logits.shape[1]]
        self._product("head", [Product(weight, f.x, share, y_stride=share.stride(0))])
        if self.peers is not None:
            self._exchange("gather", exchange.gather, share=f.own_logits, logits=f.logits)

    def _exchange(self, name: str, launcher: Launcher[...], **arguments: Any) -> None:
        """With the other ranks, where there are some."""
        self.add(name, launcher, peers=self.peers, number=self.exchanges, **arguments)
        self.exchanges += 1

    def _product(
        self,
        name: str,
        products: list[Product],
        tasks: Tasks | None = None,
        mixing: Mixing | None = None,
        next_fn: Tensor | None = None,
        clears: Tensor | None = None,
        row: str = "",
        rows: int = 0,
    ) -> None:
        """`mixing` and `next_fn`, the next site's, are for the launches of which the schedule says so; `row`:
        of the schedule, if it is not called as the launch; `rows` of x, 0: those of the buffers."""
        how = SCHEDULE[row or name]
        assert (mixing is None or how.mixes) and (next_fn is None or how.prefetches), name
        planned = MatVec(
            products=products,
            rows=rows or self.buffers.rows,
            tasks=tasks,
            limit=self.config.swiglu_limit,
            prefetch=next_fn,
            mixing=mixing,
            clears=clears,
            carry=self.buffers.carry,
            triggers_late=how.triggers_late,
            early_stages=how.early_stages,
            paced=how.paced,
            spread=how.spread,
            beside=how.beside,
            overlap=self.overlap,
        )
        launch = self.names.launch(name, planned.launch, planned.touches, self.layer, planned.claims)
        self.list.append(launch)

    def _input(self, weight: str, plain: Tensor, rounded: Tensor | None) -> Tensor:
        """What the product with this weight reads, of an input that is kept in both forms."""
        if self.b.activations_of(weight) == "a16":
            return plain
        assert rounded is not None
        return rounded

    def _rounding(
        self, weights: list[str], products: list[Product], together: Tensor | None
    ) -> list[Product]:
        """Products with these weights, which round what they read, if they are quantised: a single row on the
        way, several by one launch before, in place. `together`: all that they read, if it is one tensor."""
        how = [self.b.activations_of(weight) for weight in weights]
        if self.buffers.rows == 1 and all(product.can_round for product in products):
            return [replace(p, activations=a) for p, a in zip(products, how, strict=True)]
        rounded = [p.x for p, a in zip(products, how, strict=True) if a != "a16"]
        is_one = together is not None and len(rounded) == len(products)
        for x in [together] if is_one else rounded:
            activations = self.b.numerics.activations
            self.add("round", quantize.round_values, x=x, out=x, activations=activations)
        return products

    def _site(
        self, name: str, norm: str, y: Tensor | None, mean: Tensor | None = None, mixed: Tensor | None = None
    ) -> Mixing | None:
        """The last site's output goes into the streams; they give the next input, normalised; `mixed` gets it
        as it is before that, `mean` the streams' average.

        How they mix with its output is finished by a later launch; None at the head, which has none.
        """
        b, f, c = self.b, self.buffers, self.config
        fn, base, weight = b.plain(f"{name}_fn"), b.plain(f"{name}_base"), b.plain(norm)
        gate, comb = (None, None) if fn.shape[0] == c.num_streams else (f.gate, f.comb)
        self._open(fn, y)
        self.add(
            "mhc close",
            mhc.mix_close,
            partial=f.partial,
            base=base,
            scale=wide_scale(b.plain(f"{name}_scale"), c.num_streams),
            streams=f.streams,
            weight=weight,
            x=f.x,
            gate=gate,
            comb=comb,
            norm_eps=c.norm_eps,
            hc_eps=c.hc_eps,
            x_in=f.x_in if gate is not None else None,  # the head's input is never rounded
            activations=b.numerics.activations if gate is not None else "a16",
            mixed=mixed,
            mean=mean,
        )
        return Mixing(f.comb, c.sinkhorn_iters, c.hc_eps) if gate is not None else None

    def _open(self, fn: Tensor, y: Tensor | None) -> None:
        """The last output into the streams (on several ranks the sum of theirs), or the step's tokens; then
        the product with fn."""
        f = self.buffers
        into = {"streams": f.streams, "fn": fn, "partial": f.partial}
        if y is None:
            table = self.model.embedding.data
            self._exchange("mhc open", mhc.embed_open, ids=f.ids, table=table, **into)
        else:
            by = {"chosen": f.chosen, "own": self.own} if y is f.moe and self.own is not None else {}
            self._exchange("mhc open", mhc.mix_open, y=y, gate=f.gate, comb=f.comb, **into, **by)

    def _attention(
        self,
        name: str,
        spec: LayerSpec,
        layer: LayerCache,
        rope: Rope,
        mixing: Mixing | None,
        mutual: Mutual | None = None,
    ) -> None:
        b, f, c, cache = self.b, self.buffers, self.config, self.cache
        products = [
            Product(b.tiled(weight), self._input(weight, f.x, f.x_in), y)
            for weight, y in ((f"{name}.wq_a", f.q_raw), (f"{name}.wkv", f.kv))
        ]
        entry_pool = key_pool = None
        if layer.entries is not None and layer.tail is not None:
            entry_pool = self._pooling(
                name=f"{name}.compressor",
                tail=layer.tail,
                values=f.values,
                scores=f.scores,
                out=layer.entries,
                products=products,
            )
        if layer.keys is not None and layer.key_tail is not None:
            key_pool = self._pooling(
                name=f"{name}.indexer.compressor",
                tail=layer.key_tail,
                values=f.key_values,
                scores=f.key_scores,
                out=layer.keys,
                products=products,
            )
        selects = spec.kind == "csa" and f.selects
        if selects:
            products.append(Product(b.tiled(f"{name}.indexer.weights_proj"), f.x, f.index_weights))
        self._product("projections", products)
        self.add(
            "prepare",
            prepare,
            q_low=f.q_raw,
            q_norm=b.plain(f"{name}.q_norm"),
            q_low_out=f.q_low,
            kv=f.kv,
            kv_norm=b.plain(f"{name}.kv_norm"),
            ring=mutual.scratch if mutual else layer.ring,
            ring_rows=mutual.block if mutual else layer.ring_rows,
            cos=rope.cos,
            sin=rope.sin,
            slots=mutual.sequences if mutual else f.slots,
            positions=f.positions,
            eps=c.norm_eps,
            page_table=None if mutual else cache.page_table,
            page_entries=layer.page_entries,
            ratio=spec.ratio,
            entries=entry_pool,
            keys=key_pool,
            q_in=f.q_in,
            activations=b.numerics.activations,
        )
        wanted = [(f"{name}.wq_b", f.q)] + [(f"{name}.indexer.wq_b", f.iq)] * selects
        products = [Product(b.tiled(w), self._input(w, f.q_low, f.q_in), y) for w, y in wanted]
        wo_a, wo_b = b.tiled(f"{name}.wo_a"), b.tiled(f"{name}.wo_b")
        u_top = f.u_top if f.rows == 1 and self.dtype == torch.bfloat16 else None
        self._product("queries up", products, mixing=mixing, clears=u_top)
        if selects or not f.attends_in_one:
            self.add(
                "queries",
                queries,
                q=None if f.attends_in_one else f.q,
                iq=f.iq if selects else None,
                cos=rope.cos,
                sin=rope.sin,
                positions=f.positions,
                eps=c.norm_eps,
            )
        if selects:
            self._select(spec, layer)
        self._attend(name, spec, layer, rope, selects, mutual)
        group, rank, groups = c.heads_per_group * c.head_dim, c.o_rank, c.o_groups // b.mesh.size
        into = [
            Product(
                weight=wo_a.rows(g * rank, (g + 1) * rank),
                x=f.o[:, g * group :],
                y=f.u[:, g * rank :],
                x_stride=groups * group,
                y_stride=groups * rank,
                y_top=u_top,
            )
            for g in range(groups)
        ]
        y, parts = f.y.transpose(0, 1), f.y.shape[1]
        out = Product(
            weight=wo_b,
            x=f.u,
            y=y if parts > 1 else y[0],
            y_stride=parts * c.hidden_size,
            splits=parts,
            x_top=u_top,
        )
        # Where wo_b's blocks cannot be resident beside wo_a's, weights that come early would only delay x.
        beside = ", beside" if f.rows == 1 and fits_beside(out, into) else ""
        self._product("output a", into, row=f"output a{beside}")
        next_fn = b.plain(name.replace(".attn", ".hc_ffn_fn"))
        rounded = self._rounding([f"{name}.wo_b"], [out], f.u)
        self._product("output b", rounded, next_fn=next_fn, row=f"output b{beside}")

    def _pooling(
        self,
        name: str,
        tail: Tail,
        values: Tensor,
        scores: Tensor,
        out: QuantTensor,
        products: list[Product],
    ) -> Pooling:
        """A compressor: its products join the list, the rest happens in `prepare`."""
        b, f, width = self.b, self.buffers, tail.values.shape[2]
        values = values.flatten()[: f.rows * width].view(f.rows, width)
        scores = scores.flatten()[: f.rows * width].view(f.rows, width)
        products.append(Product(b.tiled(f"{name}.wkv"), f.x, values))
        products.append(Product(b.tiled(f"{name}.wgate"), f.x, scores))
        return Pooling(
            values=values,
            scores=scores,
            ape=b.plain(f"{name}.ape"),
            tail_values=tail.values,
            tail_scores=tail.scores,
            norm=b.plain(f"{name}.norm"),
            out=out,
        )

    def _select(self, spec: LayerSpec, layer: LayerCache) -> None:
        f, c, cache, keys = self.buffers, self.config, self.cache, layer.keys
        assert keys is not None
        visible = {
            "page_table": cache.page_table,
            "slots": f.slots,
            "positions": f.positions,
            "ratio": spec.ratio,
            "page_entries": layer.page_entries,
        }
        self.add(
            "index scores",
            index.scores,
            iq=f.iq,
            weights=f.index_weights,
            keys=keys,
            factor=c.index_factor,
            out=f.index_scores,
            **visible,
        )
        self.add("index select", selecting.select_rows, scores=f.index_scores, out=f.chosen_rows, **visible)

    def _attend(
        self, name: str, spec: LayerSpec, layer: LayerCache, rope: Rope, selects: bool, mutual: Mutual | None
    ) -> None:
        f, c, cache = self.buffers, self.config, self.cache
        over = {
            "q": f.q,
            "ring": layer.ring,
            "ring_rows": layer.ring_rows,
            "window": c.window,
            "entries": layer.entries,
            "rows": f.chosen_rows if selects else None,
            "page_table": cache.page_table,
            "page_entries": layer.page_entries,
            "ratio": spec.ratio,
            "slots": f.slots,
            "positions": f.positions,
        }
        most = c.index_topk if selects else cache.layout.max_context // spec.ratio if spec.ratio else 0
        if mutual is not None:
            of_block = {"entries": mutual.scratch, "rows": mutual.listed, "ends": mutual.ends}
            over, most = {**over, **of_block, "page_table": None, "ratio": 1}, mutual.block
        after = {"sinks": self.b.plain(f"{name}.attn_sink"), "cos": rope.cos, "sin": rope.sin, "out": f.o}
        if f.attends_in_one:
            self.add(f"attend {spec.kind}", attention.attend, eps=c.norm_eps, **over, **after)
            return
        part_o, part_ml = f.chunks(self.dtype, c.window, most)
        parts = {"part_o": part_o, "part_ml": part_ml}
        self.add(f"attend {spec.kind}", decode_any.attend, **over, **parts)
        self.add("combine", decode_any.combine, positions=f.positions, **parts, **after)

    def _moe(
        self, name: str, spec: LayerSpec, mixing: Mixing | None, next_fn: Tensor, counts: Tensor | None
    ) -> None:
        b, f, c = self.b, self.buffers, self.config
        bank, shared = b.bank(f"{name}.experts"), b.bank(f"{name}.shared_experts")
        assert bank is not None and shared is not None
        # Experts of a layer are stored alike (moe.py).
        routed_w1, shared_w1 = f"{name}.experts.0.w1", f"{name}.shared_experts.w1"
        self._product(
            "gate, shared up",
            [
                Product(b.tiled(f"{name}.gate"), f.x, f.gate_logits),
                Product(shared.w13, self._input(shared_w1, f.x, f.x_in), f.shared_hidden),
            ],
        )
        self.add(
            "route",
            routing.route,
            logits=f.gate_logits,
            bias=None if spec.hash_routed else b.plain(f"{name}.gate.bias"),
            table=b.plain(f"{name}.gate.tid2eid") if spec.hash_routed else None,
            ids=f.ids,
            scale=c.route_scale,
            is_float=self.dtype == torch.float32,
            chosen=f.chosen,
            tasks=f.tasks,
            positions=f.positions,
            counts=counts,
            own=self.own,
        )
        x = self._input(routed_w1, f.x, f.x_in)
        self._product("experts up", [Product(bank.w13, x, f.hidden, "up")], f.tasks, mixing=mixing)
        last = f.moe[:, c.experts_per_token :]
        down = [
            Product(bank.w2, f.hidden, f.moe, "down"),
            Product(shared.w2, f.shared_hidden, last, y_stride=f.moe.stride(0)),
        ]
        rounded = self._rounding([routed_w1, shared_w1], down, f.all_hidden)
        self._product("experts down", rounded, f.tasks, next_fn=next_fn)
