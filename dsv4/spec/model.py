"""DeepSeek-V4: embed, expand to streams, run the blocks, mix the streams, norm, head."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from dsv4.config import LayerSpec, ModelConfig
from dsv4.spec import ops
from dsv4.spec.rounding import Rounding, linear_input

Attend = Callable[[Tensor], Tensor]  # the attention of a layer: its input [..., T, D] -> its output


@dataclass(frozen=True)
class Model:
    """The whole model over whole sequences. `ids` are [..., T]; position t is the t-th token."""

    config: ModelConfig
    tensors: Mapping[str, Tensor]  # float values by official name (model/params.py)
    rounding: Rounding
    quantised: Collection[str] = ()  # the names of weights stored in 8 or 4 bits
    ops: ModuleType = ops  # operations of these names: dsv4.spec.ops, or others tested equal

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def logits(self, ids: Tensor) -> Tensor:
        """Return float32 [..., T, V]: row t predicts token t + 1."""
        return self.head(self.streams(ids)[-1])

    def streams(self, ids: Tensor) -> list[Tensor]:
        """Return the residual streams [..., T, N, D] after each block."""
        streams = [self.spread(self.embed(ids))]
        for number, layer in enumerate(self.config.layers):
            streams.append(self.block(streams[-1], ids, f"layers.{number}", layer))
        return streams[1:]

    def embed(self, ids: Tensor) -> Tensor:
        return self["embed"][ids].to(self.rounding.dtype)

    def spread(self, x: Tensor) -> Tensor:
        """Begin all streams [..., N, D] with one vector."""
        return x.unsqueeze(-2).expand(*x.shape[:-1], self.config.num_streams, -1)

    def head(self, streams: Tensor, prefix: str = "") -> Tensor:
        """Return float32 logits. `prefix`: a draft block's own mixing and norm; the matrix is shared."""
        return self.product(self.norm(self.mix_head(streams, prefix), f"{prefix}norm"), self["head"])

    def mix_head(self, streams: Tensor, prefix: str = "") -> Tensor:
        c, name = self.config, f"{prefix}hc_head"
        m = self.ops.mixes(streams, self[f"{name}_fn"], c.norm_eps)
        return self.ops.mix_head(streams, m, self[f"{name}_base"], self[f"{name}_scale"], c.hc_eps)

    def block(
        self, streams: Tensor, ids: Tensor, name: str, layer: LayerSpec, attend: Attend | None = None
    ) -> Tensor:
        """Attention, then experts, each between the streams. There is no other residual path."""
        attend = attend or partial(self.attention, name=f"{name}.attn", layer=layer)
        x, gate, comb = self.mix_in(streams, f"{name}.hc_attn")
        y = attend(self.norm(x, f"{name}.attn_norm"))
        streams = self.ops.mix_out(y, streams, gate, comb)
        x, gate, comb = self.mix_in(streams, f"{name}.hc_ffn")
        y = self.moe(self.norm(x, f"{name}.ffn_norm"), ids, f"{name}.ffn", layer.hash_routed)
        return self.ops.mix_out(y, streams, gate, comb)

    def mix_in(self, streams: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return the input of a layer half [..., T, D], and how its output goes back: gate and comb."""
        c, base, scale = self.config, self[f"{name}_base"], self[f"{name}_scale"]
        m = self.ops.mixes(streams, self[f"{name}_fn"], c.norm_eps)
        x, gate, logits = self.ops.mix_in(streams, m, base, scale, c.hc_eps)
        return x, gate, self.ops.sinkhorn(logits, c.sinkhorn_iters, c.hc_eps)

    def attention(self, x: Tensor, name: str, layer: LayerSpec) -> Tensor:
        c, positions = self.config, torch.arange(x.shape[-2], device=x.device)
        rope = self.rope(positions, layer)
        q, q_low = self.queries(x, name, rope)
        keys = self.raw_keys(x, name, rope)
        seen = ops.in_window(positions, positions, c.window).expand(*x.shape[:-1], -1)
        if layer.ratio:
            entries = self.compressed(x, f"{name}.compressor", layer)
            keys = torch.cat((keys, self.rounding.entry(entries, c.rope_dim)), -2)
            chosen = self.chosen(x, q_low, entries.shape[-2], name, layer)
            seen = torch.cat((seen, chosen.expand(*seen.shape[:-1], -1)), -1)
        return self.output(self.ops.attend(q, keys, seen, self[f"{name}.attn_sink"]), name, rope)

    def queries(self, x: Tensor, name: str, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return q [..., T, H, d], normalised per head and rotated, and the low-rank vector it is made of."""
        q_low = self.norm(self.linear(x, f"{name}.wq_a"), f"{name}.q_norm")
        q = self.linear(q_low, f"{name}.wq_b").unflatten(-1, (-1, self.config.head_dim))
        return self.ops.rotate_heads(self.ops.rms_norm(q, None, self.config.norm_eps), *rope), q_low

    def raw_keys(self, x: Tensor, name: str, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Return keys [..., T, d], one head that all queries share, as the cache keeps them."""
        normed = self.norm(self.linear(x, f"{name}.wkv"), f"{name}.kv_norm")
        return self.rounding.entry(self.ops.rotate(normed, *rope), self.config.rope_dim)

    def compressed(self, x: Tensor, name: str, layer: LayerSpec) -> Tensor:
        """Pool each complete block, then norm it and rotate it to the position of its first token."""
        values, scores = self.product(x.float(), self[f"{name}.wkv"]), self.pool_scores(x, name, layer)
        pooled = self.ops.compress(values, scores, layer.ratio, layer.kind == "csa").to(x.dtype)
        starts = torch.arange(pooled.shape[-2], device=x.device) * layer.ratio
        return self.ops.rotate(self.norm(pooled, f"{name}.norm"), *self.rope(starts, layer))

    def pool_scores(self, x: Tensor, name: str, layer: LayerSpec) -> Tensor:
        """Score each channel's part in its entry; the position bias enters here and not in the values."""
        bias = self[f"{name}.ape"][torch.arange(x.shape[-2], device=x.device) % layer.ratio]
        return self.product(x.float(), self[f"{name}.wgate"]) + bias

    def chosen(self, x: Tensor, q_low: Tensor, entries: int, name: str, layer: LayerSpec) -> Tensor:
        """Return which entries [..., T, C] a query attends to: CSA's indexer takes the best, HCA all."""
        visible = ops.is_visible(torch.arange(x.shape[-2], device=x.device), entries, layer.ratio)
        if layer.kind != "csa" or entries <= self.config.index_topk:
            return visible
        return ops.select(self.index_scores(x, q_low, name, layer), visible, self.config.index_topk)

    def index_scores(self, x: Tensor, q_low: Tensor, name: str, layer: LayerSpec) -> Tensor:
        """Return the indexer's score [..., T, C] of every entry, by queries and keys of its own."""
        c, positions = self.config, torch.arange(x.shape[-2], device=x.device)
        q = self.linear(q_low, f"{name}.indexer.wq_b").unflatten(-1, (c.index_heads, c.index_dim))
        q = self.rounding.index(self.ops.rotate_heads(q, *self.rope(positions, layer)))
        keys = self.rounding.index(self.compressed(x, f"{name}.indexer.compressor", layer))
        weights = self.linear(x, f"{name}.indexer.weights_proj", rounds=False).float() * c.index_factor
        return self.ops.index_scores(q, keys, weights)

    def output(self, o: Tensor, name: str, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate o [..., T, H, d] back by the query's position; project each group of heads, then all."""
        o, n = self.ops.rotate_heads(o, rope[0], -rope[1]), self.config.o_groups
        groups = zip(o.flatten(-2).chunk(n, -1), self[f"{name}.wo_a"].chunk(n), strict=True)
        u = torch.cat([self.product(*group) for group in groups], -1).to(o.dtype)
        return self.linear(u, f"{name}.wo_b")

    def moe(self, x: Tensor, ids: Tensor, name: str, hash_routed: bool) -> Tensor:
        """Sum the chosen experts in float32, add the shared one, round once."""
        chosen, weights = self.route(x, ids, f"{name}.gate", hash_routed)
        y = self.experts(x, chosen, weights, f"{name}.experts")
        return (y + self.expert(x, f"{name}.shared_experts").float()).to(x.dtype)

    def experts(self, x: Tensor, chosen: Tensor, weights: Tensor, name: str) -> Tensor:
        y = torch.zeros_like(x.float())
        for expert in chosen.unique().tolist():
            rows, weight = (chosen == expert).any(-1), weights[chosen == expert].unsqueeze(-1)
            y[rows] += self.expert(x[rows], f"{name}.{expert}", weight).float()
        return y

    def route(self, x: Tensor, ids: Tensor, name: str, hash_routed: bool) -> tuple[Tensor, Tensor]:
        """Return experts [..., T, K] and their weights: by a table of token ids, or by biased scores."""
        scores = self.ops.route_scores(self.product(x.float(), self[name]))
        if hash_routed:
            chosen = self[f"{name}.tid2eid"][ids]
        else:
            chosen = ops.top_k(scores + self[f"{name}.bias"], self.config.experts_per_token)
        return chosen, self.ops.route_weights(scores, chosen, self.config.route_scale)

    def expert(self, x: Tensor, name: str, weight: Tensor | float = 1.0) -> Tensor:
        """Run one expert; a routed one's weight [..., 1] enters before the down projection."""
        gate, up = self.linear(x, f"{name}.w1"), self.linear(x, f"{name}.w3")
        return self.linear(self.ops.swiglu(gate, up, self.config.swiglu_limit, weight), f"{name}.w2")

    def linear(self, x: Tensor, name: str, rounds: bool = True) -> Tensor:
        """Multiply by a weight [N, K]; quantised weights may have their input rounded."""
        if rounds and name in self.quantised:
            x = linear_input(x, self.rounding.activations)
        return self.product(x, self[name]).to(x.dtype)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x · Wᵀ with float32 accumulation, unrounded."""
        return x.float() @ weight.float().mT

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.ops.rms_norm(x, self[name], self.config.norm_eps)

    def rope(self, positions: Tensor, layer: LayerSpec) -> tuple[Tensor, Tensor]:
        """Plain RoPE in sliding layers; in layers with entries another base, with YaRN, for everything."""
        c = self.config
        theta, yarn = (c.compress_rope_theta, c.yarn) if layer.ratio else (c.rope_theta, None)
        return ops.rope_table(positions, theta, c.rope_dim, yarn)
