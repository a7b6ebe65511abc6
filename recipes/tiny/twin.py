"""A trainable twin of the model: the same function, batched and differentiable; tested equal to the engine.

Rows of several documents that do not see each other, masks instead of a cache, all experts computed and
weighted by zero where not chosen. Parameters carry dsv4's official names, so that export is a copy.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsv4.config import LayerSpec, ModelConfig
from dsv4.model.params import Param, declare
from dsv4.model.rope import Rope
from recipes.tiny import plain
from recipes.tiny.plain import Documents


@dataclass
class Rounding:
    """Which rounding the forward applies, with gradients passed straight through."""

    cache: bool = False  # FP8 entries, Hadamard and FP4 index keys and queries
    weights: bool = False  # NVFP4 on every large linear, as it will be stored


def through(x: Tensor, rounded: Tensor) -> Tensor:
    """The rounded value forward, the identity backward."""
    return x + (rounded - x).detach()


def fp8_blocks(x: Tensor, block: int) -> Tensor:
    """FP8 E4M3 with the smallest power-of-two scale >= amax/448, per block of the last dimension."""
    wide = x.detach().float().unflatten(-1, (-1, block))
    scale = torch.exp2(torch.ceil(torch.log2(wide.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    rounded = (wide / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return through(x, rounded.flatten(-2).to(x.dtype))


def e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 value, ties to the even code."""
    a = x.abs().clamp(max=6)
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    return torch.sign(x) * torch.round(a / step) * step


def mxfp4_blocks(x: Tensor) -> Tensor:
    wide = x.detach().float().unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(wide.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) / 6)))
    return through(x, (e2m1(wide / scale) * scale).flatten(-2).to(x.dtype))


def nvfp4_weight(w: Tensor) -> Tensor:
    """[..., N, K] as NVFP4 would store it; leading dimensions are separate tensors with own global scales."""
    wide = w.detach().float().unflatten(-1, (-1, 16))
    g = wide.abs().amax((-3, -2, -1), keepdim=True).clamp(min=1e-12) / 2688
    block = (wide.abs().amax(-1, keepdim=True) / (6 * g)).clamp(2.0**-9, 448).to(torch.float8_e4m3fn).float()
    return through(w, (e2m1(wide / (block * g)) * block * g).flatten(-2).to(w.dtype))


def hadamard_signs(size: int, device: str) -> Tensor:
    signs = torch.ones(1, 1, device=device)
    while signs.shape[0] < size:
        signs = torch.cat((torch.cat((signs, signs), 1), torch.cat((signs, -signs), 1)))
    return signs


class Twin(nn.Module):
    def __init__(
        self, config: ModelConfig, max_positions: int, device: str = "cpu", parts: ModuleType = plain
    ) -> None:
        super().__init__()
        self.config, self.rounding, self.parts = config, Rounding(), parts
        self.index_losses: list[Tensor] = []
        self.is_dense = False  # attend to every visible entry instead of the chosen
        self.signs = hadamard_signs(config.index_dim, device)
        self.wants_index_loss = False
        self.load = torch.zeros(config.num_layers + config.num_mtp_layers, config.num_experts, device=device)
        params = nn.ParameterDict()
        for param in declare(config, config.num_mtp_layers):
            if param.expert is not None and param.expert > 0:
                continue
            shape = param.shape if param.expert is None else (config.num_experts, *param.shape)
            value = torch.empty(
                shape, dtype=torch.long if param.kind == "table" else torch.float32, device=device
            )
            params[key(param.name)] = nn.Parameter(value, requires_grad=param.kind != "table")
        self.p = params
        c = config
        self.plain = Rope(c.rope_theta, c.rope_dim, None, max_positions, device)
        self.yarn = Rope(c.compress_rope_theta, c.rope_dim, c.yarn, max_positions, device)

    def __getitem__(self, name: str) -> Tensor:
        return self.p[key(name)]

    def linear(self, x: Tensor, name: str, is_large: bool = True) -> Tensor:
        w = self[name]
        if is_large and self.rounding.weights:
            w = nvfp4_weight(w)
        return F.linear(x, w.to(x.dtype))

    def streams(self, ids: Tensor, dtype: torch.dtype, documents: Documents | None = None) -> Tensor:
        """ids [B, L] -> residual streams [B, L, N, D] after the last block; L a multiple of the window."""
        documents = documents or Documents(torch.zeros_like(ids, dtype=torch.int32))
        h = self["embed"][ids].to(dtype).unsqueeze(2).expand(-1, -1, self.config.num_streams, -1)
        for index, spec in enumerate(self.config.layers):
            h = self.block(h, ids, documents, f"layers.{index}", spec, index)
        return h

    def logits(self, h: Tensor, prefix: str = "") -> Tensor:
        c, name = self.config, f"{prefix}hc_head"
        flat = h.flatten(2).float()
        m = F.linear(flat, self[f"{name}_fn"]) * torch.rsqrt(
            flat.square().mean(-1, keepdim=True) + c.norm_eps
        )
        into = torch.sigmoid(m * self[f"{name}_scale"] + self[f"{name}_base"]) + c.hc_eps
        y = (into.unsqueeze(-1) * h.float()).sum(2).to(h.dtype)
        return F.linear(self.parts.rms(y, self[f"{prefix}norm"], c.norm_eps), self["head"].to(h.dtype))

    def draft(self, h: Tensor, next_ids: Tensor, documents: Documents | None = None) -> Tensor:
        """Streams of positions i, tokens i+1 -> logits of tokens i+2."""
        c, name, rms = self.config, "mtp.0", self.parts.rms
        documents = documents or Documents(torch.zeros_like(next_ids, dtype=torch.int32))
        e = self["embed"][next_ids].to(h.dtype)
        e = self.linear(rms(e, self[f"{name}.enorm"], c.norm_eps), f"{name}.e_proj")
        g = self.linear(rms(h, self[f"{name}.hnorm"], c.norm_eps), f"{name}.h_proj")
        spec = LayerSpec("sliding", 0, False)
        mixed = self.block(e.unsqueeze(2) + g, next_ids, documents, name, spec, c.num_layers)
        return self.logits(mixed, f"{name}.")

    def block(
        self, h: Tensor, ids: Tensor, documents: Documents, name: str, spec: LayerSpec, index: int
    ) -> Tensor:
        parts, eps = self.parts, self.config.norm_eps
        x, gate, comb = self.mix_in(h, f"{name}.hc_attn")
        x = parts.rms(x, self[f"{name}.attn_norm"], eps)
        h = parts.mix_out(self.attention(x, documents, f"{name}.attn", spec), h, gate, comb)
        x, gate, comb = self.mix_in(h, f"{name}.hc_ffn")
        x = parts.rms(x, self[f"{name}.ffn_norm"], eps)
        return parts.mix_out(self.moe(x, ids, f"{name}.ffn", spec, index), h, gate, comb)

    def mix_in(self, h: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        c, scale, base = self.config, self[f"{name}_scale"], self[f"{name}_base"]
        raw = F.linear(h.flatten(2), self[f"{name}_fn"].to(h.dtype))
        x, gate, logits = self.parts.mix_in(h, raw, scale, base, c.norm_eps, c.hc_eps)
        return x, gate, self.parts.sinkhorn(logits, c.hc_eps, c.sinkhorn_iters)

    def attention(self, x: Tensor, documents: Documents, name: str, spec: LayerSpec) -> Tensor:
        """Scores of the window in blocks of W queries (own and previous block), of entries in one product."""
        c, parts, ratio = self.config, self.parts, spec.ratio
        b, length = x.shape[:2]
        w, scale = c.window, c.head_dim**-0.5
        rope = self.yarn if ratio else self.plain
        cos, sin = rope.cos[:length], rope.sin[:length]
        q_low = parts.rms(self.linear(x, f"{name}.wq_a"), self[f"{name}.q_norm"], c.norm_eps)
        q = self.linear(q_low, f"{name}.wq_b").unflatten(-1, (c.num_heads, c.head_dim))
        q = parts.norm_rotate(q, None, cos, sin, c.norm_eps)
        keys = self.entry(self.linear(x, f"{name}.wkv"), self[f"{name}.kv_norm"], cos, sin)
        keys = keys.unflatten(1, (-1, w))
        keys = torch.cat((F.pad(keys[:, :-1], (0, 0, 0, 0, 1, 0)), keys), 2).flatten(0, 1)  # [B*n, 2W, d]
        by_block = q.reshape(-1, w * c.num_heads, c.head_dim)
        near = (by_block @ keys.mT).view(b, -1, w, c.num_heads, 2 * w)
        sinks, entries, far, chosen = self[f"{name}.attn_sink"], None, None, None
        if ratio:
            entries = self.compress(x, documents, f"{name}.compressor", spec, c.head_dim)
            at = torch.arange(entries.shape[1], device=x.device) * ratio
            entries = self.entry(entries, self[f"{name}.compressor.norm"], rope.cos[at], rope.sin[at])
            far = (q.flatten(1, 2) @ entries.mT).view(b, length, c.num_heads, -1)
        if spec.kind == "csa":
            scores = self.index_scores(x.detach(), q_low.detach(), documents, f"{name}.indexer", spec)
            if self.wants_index_loss and self.training:
                mass = parts.attend_mass(near.detach(), far.detach(), documents, ratio, sinks, scale)
                self.index_losses.append(index_loss(scores, mass))
            if scores.shape[-1] > c.index_topk and not self.is_dense:
                best = scores.detach().topk(c.index_topk, dim=-1).indices
                chosen = torch.zeros_like(scores, dtype=torch.uint8).scatter_(-1, best, 1)
        near, far = parts.attend_weights(near, far, chosen, documents, ratio, sinks, scale)
        o = (near.view(-1, w * c.num_heads, 2 * w) @ keys).view(q.shape)
        if far is not None:
            o = o + (far.view(b, length * c.num_heads, -1) @ entries).view(q.shape)
        o = parts.rotate(o, cos, -sin).view(b, length, c.o_groups, -1)
        wo_a = self[f"{name}.wo_a"]
        if self.rounding.weights:
            wo_a = nvfp4_weight(wo_a)
        wo_a = wo_a.to(x.dtype).view(c.o_groups, c.o_rank, -1)
        return self.linear(torch.einsum("blgd,grd->blgr", o, wo_a).flatten(2), f"{name}.wo_b")

    def entry(self, kv: Tensor, norm: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        kv = self.parts.norm_rotate(kv, norm, cos, sin, self.config.norm_eps)
        if self.rounding.cache:
            nope = self.config.nope_dim
            kv = torch.cat((fp8_blocks(kv[..., :nope], min(64, nope)), kv[..., nope:]), -1)
        return kv

    def compress(self, x: Tensor, documents: Documents, name: str, spec: LayerSpec, width: int) -> Tensor:
        """x [B, L, D] -> pooled rows [B, L // ratio, width] of the complete blocks.

        Where a document ends inside a block, the block pools the last token's document alone.
        """
        ratio = spec.ratio
        blocks = x.shape[1] // ratio
        whole = x[:, : blocks * ratio].float()
        of = documents.of_token[:, : blocks * ratio].unflatten(1, (-1, ratio))
        values = F.linear(whole, self[f"{name}.wkv"]).unflatten(1, (-1, ratio))
        scores = F.linear(whole, self[f"{name}.wgate"]).unflatten(1, (-1, ratio)) + self[f"{name}.ape"]
        mine = of == of[..., -1:]
        if spec.kind == "csa":
            before = F.pad(values[:, :-1, :, :width], (0, 0, 0, 0, 1, 0))
            values = torch.cat((before, values[..., width:]), 2)
            before = F.pad(scores[:, :-1, :, :width], (0, 0, 0, 0, 1, 0))
            scores = torch.cat((before, scores[..., width:]), 2)
            mine = torch.cat((F.pad(of[:, :-1], (0, 0, 1, 0), value=-1) == of[..., -1:], mine), 2)
        scores = scores.masked_fill(~mine.unsqueeze(-1), -1e30)
        return (scores.softmax(2) * values).sum(2).to(x.dtype)

    def index_scores(
        self, x: Tensor, q_low: Tensor, documents: Documents, name: str, spec: LayerSpec
    ) -> Tensor:
        """-> [B, L, C]: what the indexer thinks of each visible entry. It learns from its own loss alone."""
        c, parts = self.config, self.parts
        cos, sin = self.yarn.cos, self.yarn.sin
        keys = self.compress(x, documents, f"{name}.compressor", spec, c.index_dim)
        at = torch.arange(keys.shape[1], device=x.device) * spec.ratio
        keys = parts.norm_rotate(keys, self[f"{name}.compressor.norm"], cos[at], sin[at], c.norm_eps)
        q = self.linear(q_low, f"{name}.wq_b").unflatten(-1, (c.index_heads, c.index_dim))
        q = parts.rotate(q, cos[: x.shape[1]], sin[: x.shape[1]])
        if self.rounding.cache:
            keys, q = (
                mxfp4_blocks(F.linear(t, self.signs.to(t.dtype)) * c.index_dim**-0.5) for t in (keys, q)
            )
        weights = self.linear(x, f"{name}.weights_proj", is_large=False).float()
        weights = weights * (c.index_dim**-0.5 * c.index_heads**-0.5)
        raw = (q.flatten(1, 2) @ keys.mT).view(*x.shape[:2], c.index_heads, -1)
        return parts.index_scores(raw, weights, documents, spec.ratio)

    def moe(self, x: Tensor, ids: Tensor, name: str, spec: LayerSpec, index: int) -> Tensor:
        c = self.config
        s = torch.sqrt(F.softplus(F.linear(x.float(), self[f"{name}.gate"])))
        if spec.hash_routed:
            chosen = self[f"{name}.gate.tid2eid"][ids]
        else:
            chosen = (
                (s.detach() + self[f"{name}.gate.bias"].detach()).topk(c.experts_per_token, dim=-1).indices
            )
        picked = s.gather(-1, chosen)
        weights = torch.zeros_like(s).scatter(
            -1, chosen, picked / picked.sum(-1, keepdim=True) * c.route_scale
        )
        if self.training:
            self.load[index] = (weights.detach() > 0).float().mean((0, 1))
        w1, w3, w2 = (self[f"{name}.experts.0.{w}"] for w in ("w1", "w3", "w2"))
        if self.rounding.weights:
            w1, w3, w2 = nvfp4_weight(w1), nvfp4_weight(w3), nvfp4_weight(w2)
        gate = F.linear(x, w1.to(x.dtype).flatten(0, 1)).unflatten(-1, (c.num_experts, -1))
        up = F.linear(x, w3.to(x.dtype).flatten(0, 1)).unflatten(-1, (c.num_experts, -1))
        hidden = self.parts.swiglu(gate, up, weights, c.swiglu_limit).flatten(-2)
        routed = F.linear(hidden, w2.to(x.dtype).transpose(0, 1).flatten(1))
        return routed + self.shared(x, f"{name}.shared_experts")

    def shared(self, x: Tensor, name: str) -> Tensor:
        gate, up = self.linear(x, f"{name}.w1"), self.linear(x, f"{name}.w3")
        one = torch.ones_like(gate[..., :1], dtype=torch.float32)
        hidden = self.parts.swiglu(gate.unsqueeze(2), up.unsqueeze(2), one, self.config.swiglu_limit)
        return self.linear(hidden.squeeze(2), f"{name}.w2")


def index_loss(scores: Tensor, mass: Tensor) -> Tensor:
    """KL from the attention's mass on entries to the indexer's softmax, over tokens that see any entry."""
    some = mass.sum(-1) > 0
    kl = (mass * (mass.clamp(min=1e-9).log() - scores.log_softmax(-1))).sum(-1)
    return (kl * some).sum() / some.sum().clamp(min=1)


def key(name: str) -> str:
    """A parameter's name as torch's ParameterDict allows it."""
    return name.replace(".", "/")


def official(twin: Twin, param: Param) -> Tensor:
    """The stored tensor of one declared parameter."""
    if param.expert is None:
        return twin[param.name]
    first = param.name.replace(f".experts.{param.expert}.", ".experts.0.")
    return twin[first][param.expert]
