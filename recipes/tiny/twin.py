"""A trainable twin of the model: dsv4.spec.model over rows of documents, with parameters for tensors.

It overrides what batches and training need: documents that do not see each other, attention in blocks of the
window, all experts in one product, products in the type of their input, roundings that pass gradients.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsv4.config import LayerSpec, ModelConfig
from dsv4.model.params import Param, declare
from dsv4.quant.codec import nvfp4_global, nvfp4_round
from dsv4.spec.drafts import mtp
from dsv4.spec.model import Model
from dsv4.spec.ops import hadamard, in_window, is_visible, select
from dsv4.spec.rounding import Rounding
from recipes.tiny import plain

SAMPLED = 8  # one query in so many has an indexer's loss; the window divides by it
# Linears that are small or whose rounding flips choices stay as they are, as in the published checkpoints.
KEPT = ("embed", "gate", "weights_proj", "compressor.wkv", "compressor.wgate")


class Through(Rounding):
    """Rounds values and passes their gradients through."""

    def entry(self, kv: Tensor, rope_dim: int) -> Tensor:
        return through(kv, super().entry(kv.detach(), rope_dim))

    def index(self, x: Tensor) -> Tensor:
        return through(hadamard(x), super().index(x.detach())) if self.trained else x


@dataclass
class Notes:
    """What training takes from a pass: each indexer's loss, and by router the share of tokens per expert."""

    index_losses: list[Tensor] = field(default_factory=list)
    loads: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Twin(Model):
    """`ids` are [B, L], L a multiple of the window. A layer's experts are one parameter [E, N, K].

    `quantised`: weights that are rounded as NVFP4 stores them.
    """

    ops: ModuleType = plain
    rounded: Mapping[str, Tensor] = field(default_factory=dict)  # of quantised weights, those made together
    documents: Tensor | None = None  # [B, L]: the document of each token; None: a row is one
    notes: Notes | None = None  # filled while training

    @classmethod
    def make(cls, config: ModelConfig, device: str = "cpu", ops: ModuleType = plain) -> "Twin":
        """A twin without roundings whose parameters have no values yet."""
        params: dict[str, Tensor] = {}
        for param in declare(config, config.num_mtp_layers):
            if param.expert:
                continue
            shape = param.shape if param.expert is None else (config.num_experts, *param.shape)
            is_table = param.kind == "table"
            value = torch.empty(shape, dtype=torch.long if is_table else torch.float32, device=device)
            params[stacked(param.name)] = nn.Parameter(value, requires_grad=not is_table)
        return cls(config, params, Through(trained=False), ops=ops)

    def rounds(self, cache: bool, weights: bool, dtype: torch.dtype = torch.float32) -> "Twin":
        """The same parameters with other roundings: of cached values, of weights, of activations."""
        large = large_names(self) if weights else frozenset()
        return replace(self, rounding=Through(trained=cache, dtype=dtype), quantised=large)

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Copy saved parameters."""
        if odd := sorted(values.keys() ^ self.tensors.keys()):
            raise ValueError(f"saved parameters are of another model: {odd[:4]} are in one of both only")
        with torch.no_grad():
            for name, value in values.items():
                self.tensors[name].copy_(value)

    def __getitem__(self, name: str) -> Tensor:
        weight = super().__getitem__(name)
        if name in self.rounded:
            return through(weight, self.rounded[name])
        return nvfp4_weight(weight) if name in self.quantised else weight

    def with_rounded(self) -> "Twin":
        """The same with all quantised weights rounded at once, those of a shape together: fewer launches."""
        groups: dict[tuple[int, int], list[str]] = {}
        for name in sorted(self.quantised):
            groups.setdefault((self.tensors[name].shape[-2], self.tensors[name].shape[-1]), []).append(name)
        rounded: dict[str, Tensor] = {}
        with torch.no_grad():
            for shape, names in groups.items():
                weights = [self.tensors[name].detach().reshape(-1, *shape) for name in names]
                parts = nvfp4_weight(torch.cat(weights)).split([len(weight) for weight in weights])
                for name, part in zip(names, parts, strict=True):
                    rounded[name] = part.view(self.tensors[name].shape)
        return replace(self, rounded=rounded)

    def draft(self, streams: Tensor, next_ids: Tensor) -> Tensor:
        """Return the draft block's logits of tokens i+2 from streams of positions i and tokens i+1."""
        return mtp(self, streams, next_ids)[1]

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight.to(x.dtype))

    def attention(self, x: Tensor, name: str, layer: LayerSpec) -> Tensor:
        c, positions = self.config, torch.arange(x.shape[1], device=x.device)
        rope, sinks = self.rope(positions, layer), self[f"{name}.attn_sink"]
        q, q_low = self.queries(x, name, rope)
        q, keys = in_blocks(q, c.window), windows(self.raw_keys(x, name, rope), c.window)
        of, at = self.of(x), positions.unsqueeze(0)
        of_keys, at_keys = windows(of, c.window, -1), windows(at, c.window)
        seen = in_blocks(of, c.window).unsqueeze(-1) == of_keys.unsqueeze(-2)
        seen = seen & in_window(in_blocks(at, c.window), at_keys.unsqueeze(-2), c.window)
        if layer.ratio:
            entries = self.rounding.entry(self.compressed(x, f"{name}.compressor", layer), c.rope_dim)
            count = entries.shape[1]
            keys = torch.cat((keys, entries.unsqueeze(1).expand(-1, keys.shape[1], -1, -1)), 2)
            of_entries = of[:, layer.ratio - 1 :: layer.ratio]
            visible = is_visible(positions, count, layer.ratio) & (of.unsqueeze(2) == of_entries.unsqueeze(1))
            chosen = visible
            if layer.kind == "csa":
                chosen = self.narrowed(chosen, x.detach(), q_low.detach(), name, layer)
                if self.notes:
                    every = torch.cat((seen, in_blocks(visible, c.window)), -1)
                    own = (x.detach(), q_low.detach(), visible, q, keys, every, sinks)
                    self.notes.index_losses.append(self.index_loss(*own, name, layer))
            seen = torch.cat((seen, in_blocks(chosen, c.window)), -1)
        return self.output(self.ops.attend(q, keys, seen, sinks).flatten(1, 2), name, rope)

    def narrowed(self, visible: Tensor, x: Tensor, q_low: Tensor, name: str, layer: LayerSpec) -> Tensor:
        """Keep the entries [B, L, C] that the indexer selects.

        Training compares with the last selected score, which is faster than to sort, and leaves the rounding
        of keys and queries to the sample of `index_loss`.
        """
        k = self.config.index_topk
        if visible.shape[-1] <= k:
            return visible
        if not self.notes:
            return select(self.index_scores(x, q_low, name, layer), visible, k)
        with torch.no_grad():
            scores = replace(self, rounding=Through(trained=False, dtype=self.rounding.dtype)).index_scores(
                x, q_low, name, layer
            )
            scores = scores.masked_fill(~visible, -torch.inf)
            return visible & (scores >= scores.topk(k, sorted=False).values.amin(-1, keepdim=True))

    def index_loss(
        self,
        x: Tensor,
        q_low: Tensor,
        visible: Tensor,
        q: Tensor,
        keys: Tensor,
        every: Tensor,
        sinks: Tensor,
        name: str,
        layer: LayerSpec,
    ) -> Tensor:
        """KL from the attention's mass on entries to the indexer's softmax, for one query in SAMPLED.

        q, keys and every (what a query sees) are in blocks; the others [B, L, ...].
        """
        c, first = self.config, int(torch.randint(SAMPLED, (1,)))
        some = slice(first, None, SAMPLED)
        positions = torch.arange(x.shape[1], device=x.device)[some]
        own = self.linear(q_low[:, some], f"{name}.indexer.wq_b").unflatten(-1, (c.index_heads, c.index_dim))
        own = self.rounding.index(self.ops.rotate_heads(own, *self.rope(positions, layer)))
        entries = self.rounding.index(self.compressed(x, f"{name}.indexer.compressor", layer))
        weights = self.linear(x[:, some], f"{name}.indexer.weights_proj", rounds=False).float()
        scores = self.ops.index_scores(own, entries, weights * c.index_factor)
        mass = self.ops.mass(q[:, :, some], keys, every[:, :, some], sinks, visible.shape[-1]).flatten(1, 2)
        return divergence(scores, visible[:, some], mass)

    def of(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape[:2], device=x.device) if self.documents is None else self.documents

    def pool_scores(self, x: Tensor, name: str, layer: LayerSpec) -> Tensor:
        """Leave out tokens of another document than the last one of the block that pools them.

        Second halves, or all, of a token's channels are pooled by its own block, first halves by the next.
        """
        of, length = self.of(x), x.shape[1]
        ends = (torch.arange(length, device=x.device) // layer.ratio + 1) * layer.ratio - 1
        pools = (layer.ratio, 0) if layer.kind == "csa" else (0,)
        seen = torch.stack([of == of[:, (ends + later).clamp(max=length - 1)] for later in pools], -1)
        # Rows of the position bias repeat: added to whole blocks, its gradient is a sum.
        blocks = length // layer.ratio
        scores = self.product(x.float(), self[f"{name}.wgate"])
        whole = scores[:, : blocks * layer.ratio].unflatten(1, (blocks, layer.ratio)) + self[f"{name}.ape"]
        scores = F.pad(whole.flatten(1, 2), (0, 0, 0, length - blocks * layer.ratio))
        scores = scores.unflatten(-1, (len(pools), -1))
        return scores.masked_fill(~seen.unsqueeze(-1), -torch.inf).flatten(-2)

    def route(self, x: Tensor, ids: Tensor, name: str, hash_routed: bool) -> tuple[Tensor, Tensor]:
        chosen, weights = super().route(x, ids, name, hash_routed)
        if self.notes:
            self.notes.loads[name] = F.one_hot(chosen, self.config.num_experts).sum(-2).float().mean((0, 1))
        return chosen, weights

    def experts(self, x: Tensor, chosen: Tensor, weights: Tensor, name: str) -> Tensor:
        """Run every expert for every token, by weight zero where it was not chosen."""
        w1, w3, w2 = (self[f"{name}.{w}"] for w in ("w1", "w3", "w2"))
        weight = weights.new_zeros(*x.shape[:-1], len(w1), 1).scatter(
            -2, chosen.unsqueeze(-1), weights.unsqueeze(-1)
        )
        gate, up = (self.product(x, w.flatten(0, 1)).unflatten(-1, (len(w), -1)) for w in (w1, w3))
        hidden = self.ops.swiglu(gate, up, self.config.swiglu_limit, weight)
        return self.product(hidden.flatten(-2), w2.transpose(0, 1).flatten(1))


def in_blocks(x: Tensor, width: int) -> Tensor:
    """Cut x [B, L, ...] into blocks [B, L / width, width, ...]."""
    return x.unflatten(1, (-1, width))


def windows(x: Tensor, width: int, fill: float = 0) -> Tensor:
    """Return every block of x [B, L, ...] after the block before it: [B, L / width, 2 * width, ...]."""
    blocks = in_blocks(x, width)
    before = torch.cat((torch.full_like(blocks[:, :1], fill), blocks[:, :-1]), 1)
    return torch.cat((before, blocks), 2)


def through(x: Tensor, rounded: Tensor) -> Tensor:
    """Return the rounded value, with the gradient of x."""
    return x + (rounded - x).detach()


def nvfp4_weight(w: Tensor) -> Tensor:
    """Round w [..., N, K] as NVFP4 stores it: each matrix has a global scale of its own."""
    wide = w.detach()
    return through(w, nvfp4_round(wide, nvfp4_global(wide.flatten(-2)).unsqueeze(-1)))


def divergence(scores: Tensor, visible: Tensor, mass: Tensor) -> Tensor:
    """KL from mass [..., C] to the softmax of the visible scores, over queries that give any entry some."""
    some = mass.sum(-1) > 0
    share = scores.masked_fill(~visible, -1e30).log_softmax(-1)
    return ((mass * (mass.clamp(min=1e-9).log() - share)).sum(-1) * some).sum() / some.sum().clamp(min=1)


def is_large(param: Param) -> bool:
    """Whether a weight is stored in few bits."""
    return param.kind in ("linear", "grouped") and not param.name.endswith(KEPT)


def large_names(twin: Twin) -> frozenset[str]:
    """The parameters that are stored in few bits."""
    declared = declare(twin.config, twin.config.num_mtp_layers)
    return frozenset(stacked(param.name) for param in declared if is_large(param))


def stored_bytes(param: Param) -> float:
    """What a weight takes in the NVFP4 checkpoint."""
    bits = 64 if param.kind == "table" else 4.5 if is_large(param) else 16 if len(param.shape) > 1 else 32
    return math.prod(param.shape) * bits / 8


def stacked(name: str) -> str:
    """The parameter that has a declared tensor: a layer's experts share one."""
    return re.sub(r"\.experts\.\d+\.", ".experts.", name)


def official(twin: Twin, param: Param) -> Tensor:
    """The stored tensor of one declared parameter."""
    value = twin.tensors[stacked(param.name)]
    return value if param.expert is None else value[param.expert]
