"""A trainable twin of the model: the same function, batched and differentiable; tested equal to the engine.

Whole sequences from position 0, dense masks instead of a cache, all experts computed and weighted by zero
where not chosen. Parameters carry dsv4's official names, so that export is a copy.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsv4.config import LayerSpec, ModelConfig
from dsv4.model.params import Param, declare
from dsv4.model.rope import Rope


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


def hadamard(x: Tensor) -> Tensor:
    size, step, out = x.shape[-1], 1, x
    while step < size:
        pairs = out.unflatten(-1, (-1, 2, step))
        out = torch.stack(
            (pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2
        ).flatten(-3)
        step *= 2
    return out * size**-0.5


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = x.float()
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (out if weight is None else out * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, L, ..., d]; cos, sin [L, r/2] of the last r channels."""
    width = 2 * cos.shape[-1]
    shape = (1, cos.shape[0], *[1] * (x.dim() - 3), cos.shape[1])
    cos, sin = cos.view(shape), sin.view(shape)
    turn = x[..., x.shape[-1] - width :].float()
    a, b = turn[..., 0::2], turn[..., 1::2]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., : x.shape[-1] - width], turned.to(x.dtype)), -1)


def sinkhorn(logits: Tensor, eps: float, iters: int) -> Tensor:
    """[..., N, N]; small enough to run op by op, and slow to compile."""
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def stream_pre(
    h: Tensor, m: Tensor, scale: Tensor, base: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """h [B, L, N, D], m [B, L, 2N+N*N] -> block input [B, L, D], gate [B, L, N], logits [B, L, N, N]."""
    n = h.shape[2]
    into = torch.sigmoid(m[..., :n] * scale[0] + base[:n]) + eps
    gate = 2 * torch.sigmoid(m[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (m[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    return (into.unsqueeze(-1) * h.float()).sum(2).to(h.dtype), gate, logits


def stream_post(y: Tensor, h: Tensor, gate: Tensor, comb: Tensor) -> Tensor:
    mixed = (comb.unsqueeze(-1) * h.float().unsqueeze(3)).sum(2)
    return (gate.unsqueeze(-1) * y.float().unsqueeze(2) + mixed).to(h.dtype)


def swiglu(gate: Tensor, up: Tensor, weights: Tensor, limit: float) -> Tensor:
    """gate, up [B, L, E, I], weights [B, L, E] -> [B, L, E, I]."""
    hidden = F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    return (hidden * weights.unsqueeze(-1)).to(gate.dtype)


def norm_rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return rotate(rms(x, weight, eps), cos, sin)


class Twin(nn.Module):
    def __init__(self, config: ModelConfig, max_positions: int, device: str = "cpu") -> None:
        super().__init__()
        self.config, self.rounding = config, Rounding()
        self.index_losses: list[Tensor] = []
        self.is_dense = False  # attend to every visible entry instead of the chosen
        self.pre, self.post, self.swiglu = stream_pre, stream_post, swiglu
        self.norm, self.norm_rotate, self.rotate = rms, norm_rotate, rotate
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

    def streams(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """ids [B, L] -> residual streams [B, L, N, D] after the last block."""
        h = self["embed"][ids].to(dtype).unsqueeze(2).expand(-1, -1, self.config.num_streams, -1)
        for index, spec in enumerate(self.config.layers):
            h = self.block(h, ids, f"layers.{index}", spec, index)
        return h

    def logits(self, h: Tensor, prefix: str = "") -> Tensor:
        c, name = self.config, f"{prefix}hc_head"
        m = self.mixes(h, name)
        into = torch.sigmoid(m * self[f"{name}_scale"] + self[f"{name}_base"]) + c.hc_eps
        y = (into.unsqueeze(-1) * h.float()).sum(2).to(h.dtype)
        return F.linear(rms(y, self[f"{prefix}norm"], c.norm_eps), self["head"].to(h.dtype))

    def draft(self, h: Tensor, next_ids: Tensor) -> Tensor:
        """Streams of positions i, tokens i+1 -> logits of tokens i+2."""
        c, name = self.config, "mtp.0"
        e = self.linear(
            rms(self["embed"][next_ids].to(h.dtype), self[f"{name}.enorm"], c.norm_eps), f"{name}.e_proj"
        )
        g = self.linear(rms(h, self[f"{name}.hnorm"], c.norm_eps), f"{name}.h_proj")
        spec = LayerSpec("sliding", 0, False)
        return self.logits(self.block(e.unsqueeze(2) + g, next_ids, name, spec, c.num_layers), f"{name}.")

    def block(self, h: Tensor, ids: Tensor, name: str, spec: LayerSpec, index: int) -> Tensor:
        eps = self.config.norm_eps
        x, gate, comb = self.hc_pre(h, f"{name}.hc_attn")
        y = self.attention(self.norm(x, self[f"{name}.attn_norm"], eps), f"{name}.attn", spec)
        h = self.post(y, h, gate, comb)
        x, gate, comb = self.hc_pre(h, f"{name}.hc_ffn")
        y = self.moe(self.norm(x, self[f"{name}.ffn_norm"], eps), ids, f"{name}.ffn", spec, index)
        return self.post(y, h, gate, comb)

    def mixes(self, h: Tensor, name: str) -> Tensor:
        flat = h.flatten(2).float()
        scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.config.norm_eps)
        return F.linear(flat, self[f"{name}_fn"]) * scale

    def hc_pre(self, h: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        m, scale, base = self.mixes(h, name), self[f"{name}_scale"], self[f"{name}_base"]
        x, gate, logits = self.pre(h, m, scale, base, self.config.hc_eps)
        return x, gate, sinkhorn(logits, self.config.hc_eps, self.config.sinkhorn_iters)

    def attention(self, x: Tensor, name: str, spec: LayerSpec) -> Tensor:
        c, length = self.config, x.shape[1]
        rope = self.yarn if spec.ratio else self.plain
        cos, sin = rope.cos[:length], rope.sin[:length]
        q_low = self.norm(self.linear(x, f"{name}.wq_a"), self[f"{name}.q_norm"], c.norm_eps)
        q = self.linear(q_low, f"{name}.wq_b").unflatten(-1, (c.num_heads, c.head_dim))
        q = self.norm_rotate(q, None, cos, sin, c.norm_eps)
        keys = self.entry(self.linear(x, f"{name}.wkv"), self[f"{name}.kv_norm"], cos, sin)
        entries = chosen = None
        if spec.ratio:
            entries = self.compress(x, f"{name}.compressor", spec, c.head_dim)
            starts = torch.arange(entries.shape[1], device=x.device) * spec.ratio
            entries = self.entry(entries, self[f"{name}.compressor.norm"], rope.cos[starts], rope.sin[starts])
            at = torch.arange(length, device=x.device)
            chosen = (starts[None, :] + spec.ratio <= at[:, None] + 1).expand(x.shape[0], -1, -1)
            if spec.kind == "csa":
                chosen = self.choose(x, q_low, q, entries, chosen, name, spec)
        o = self.attend(q, keys, entries, chosen, self[f"{name}.attn_sink"])
        o = self.rotate(o, cos, -sin).reshape(*x.shape[:2], c.o_groups, -1)
        wo_a = self[f"{name}.wo_a"]
        if self.rounding.weights:
            wo_a = nvfp4_weight(wo_a)
        wo_a = wo_a.to(x.dtype).view(c.o_groups, c.o_rank, -1)
        return self.linear(torch.einsum("blgd,grd->blgr", o, wo_a).flatten(2), f"{name}.wo_b")

    def entry(self, kv: Tensor, norm: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        kv = self.norm_rotate(kv, norm, cos, sin, self.config.norm_eps)
        if self.rounding.cache:
            nope = self.config.nope_dim
            kv = torch.cat((fp8_blocks(kv[..., :nope], min(64, nope)), kv[..., nope:]), -1)
        return kv

    def attend(
        self, q: Tensor, keys: Tensor, entries: Tensor | None, chosen: Tensor | None, sinks: Tensor
    ) -> Tensor:
        """q [B, L, H, d], keys [B, L, d] (values too), entries [B, C, d], chosen [B, L, C] -> [B, L, H, d].

        In blocks of W queries: a block sees its own and the previous block's keys, and all entries. The sink
        is one more key of zeros whose score, sink[h], comes from an extra channel of q and k.
        """
        b, length, heads, d = q.shape
        w, scale = self.config.window, d**-0.5
        pad = -length % w
        blocks = (length + pad) // w
        q = F.pad(q, (0, 0, 0, 0, 0, pad)).unflatten(1, (blocks, w)).flatten(0, 1)  # [B*n, W, H, d]
        now = F.pad(keys, (0, 0, 0, pad)).unflatten(1, (blocks, w))
        k = torch.cat((F.pad(now[:, :-1], (0, 0, 0, 0, 1, 0)), now), 2).flatten(0, 1)  # [B*n, 2W, d]
        at = torch.arange(w, device=q.device)
        back = at[:, None] + w - torch.arange(2 * w, device=q.device)[None, :]
        mask = ((back >= 0) & (back < w)).expand(blocks, -1, -1).clone()
        mask[0, :, :w] = False
        mask = mask.repeat(b, 1, 1)
        if entries is not None and chosen is not None:
            k = torch.cat((k, entries.unsqueeze(1).expand(-1, blocks, -1, -1).flatten(0, 1)), 1)
            seen = F.pad(chosen, (0, 0, 0, pad)).unflatten(1, (blocks, w)).flatten(0, 1)
            mask = torch.cat((mask, seen), 2)
        # More channels and keys, the first of each for the sink: fused kernels want multiples of 8.
        extra = F.pad((sinks.to(q.dtype) / scale).view(-1, 1), (0, 7)).expand(q.shape[0], w, -1, -1)
        q = torch.cat((q, extra), -1).transpose(1, 2)
        count, more = k.shape[1], 8 + -k.shape[1] % 8
        v = F.pad(k, (0, 8, 0, more))
        k = v + F.pad(v.new_ones(1, 1), (d, 7, count, more - 1))
        mask = F.pad(F.pad(mask, (0, 1), value=True), (0, more - 1)).unsqueeze(1)
        k, v = (t.unsqueeze(1).expand(-1, heads, -1, -1) for t in (k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return o[..., :d].transpose(1, 2).unflatten(0, (b, blocks)).flatten(1, 2)[:, :length]

    def compress(self, x: Tensor, name: str, spec: LayerSpec, width: int) -> Tensor:
        """x [B, L, D] -> pooled rows [B, L // ratio, width] of the complete blocks."""
        ratio = spec.ratio
        whole = x[:, : x.shape[1] // ratio * ratio].float()
        values = F.linear(whole, self[f"{name}.wkv"]).unflatten(1, (-1, ratio))
        scores = F.linear(whole, self[f"{name}.wgate"]).unflatten(1, (-1, ratio)) + self[f"{name}.ape"]
        if spec.kind == "csa":
            before_v = F.pad(values[:, :-1, :, :width], (0, 0, 0, 0, 1, 0))
            before_s = F.pad(scores[:, :-1, :, :width], (0, 0, 0, 0, 1, 0), value=-1e30)
            values = torch.cat((before_v, values[..., width:]), 2)
            scores = torch.cat((before_s, scores[..., width:]), 2)
        return (scores.softmax(2) * values).sum(2).to(x.dtype)

    def choose(self, x: Tensor, q_low: Tensor, q: Tensor, entries: Tensor, visible: Tensor, name: str,
               spec: LayerSpec) -> Tensor:  # fmt: skip
        """-> [B, L, C]: the visible entries with the index_topk best scores."""
        c, name = self.config, f"{name}.indexer"
        cos, sin = self.yarn.cos, self.yarn.sin
        starts = torch.arange(entries.shape[1], device=x.device) * spec.ratio
        x, q_low = x.detach(), q_low.detach()  # the indexer learns from its own loss alone
        keys = self.compress(x, f"{name}.compressor", spec, c.index_dim)
        norm = self[f"{name}.compressor.norm"]
        keys = self.norm_rotate(keys, norm, cos[starts], sin[starts], c.norm_eps)
        iq = self.linear(q_low, f"{name}.wq_b").unflatten(-1, (c.index_heads, c.index_dim))
        iq = self.rotate(iq, cos[: x.shape[1]], sin[: x.shape[1]])
        if self.rounding.cache:
            keys, iq = mxfp4_blocks(hadamard(keys)), mxfp4_blocks(hadamard(iq))
        weights = self.linear(x, f"{name}.weights_proj", is_large=False).float()
        weights = weights * (c.index_dim**-0.5 * c.index_heads**-0.5)
        scores = torch.einsum("blhd,bcd->blhc", iq, keys).float().relu()
        scores = torch.einsum("blhc,blh->blc", scores, weights).masked_fill(~visible, -torch.inf)
        if self.wants_index_loss and self.training:
            self.index_losses.append(self.index_loss(scores, q.detach(), entries.detach(), visible))
        if scores.shape[-1] <= c.index_topk or self.is_dense:
            return visible
        best = scores.detach().topk(c.index_topk, dim=-1).indices
        return torch.zeros_like(visible).scatter(-1, best, True) & visible

    def index_loss(self, scores: Tensor, q: Tensor, entries: Tensor, visible: Tensor) -> Tensor:
        """KL from the attention's mass on compressed entries (summed over heads) to the indexer's softmax."""
        with torch.no_grad():
            mass = torch.einsum("blhd,bcd->blhc", q, entries).float() * q.shape[-1] ** -0.5
            mass = mass.masked_fill(~visible.unsqueeze(2), -1e30).softmax(-1).mean(2)
        some = visible.any(-1)
        log_q = scores.masked_fill(~visible, -1e30).log_softmax(-1)
        kl = (mass * (mass.clamp(min=1e-9).log() - log_q)).masked_fill(~visible, 0).sum(-1)
        return (kl * some).sum() / some.sum().clamp(min=1)

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
        hidden = self.swiglu(gate, up, weights, c.swiglu_limit).flatten(-2)
        routed = F.linear(hidden, w2.to(x.dtype).transpose(0, 1).flatten(1))
        return routed + self.shared(x, f"{name}.shared_experts")

    def shared(self, x: Tensor, name: str) -> Tensor:
        gate, up = self.linear(x, f"{name}.w1"), self.linear(x, f"{name}.w3")
        one = torch.ones_like(gate[..., :1], dtype=torch.float32)
        hidden = self.swiglu(gate.unsqueeze(2), up.unsqueeze(2), one, self.config.swiglu_limit)
        return self.linear(hidden.squeeze(2), f"{name}.w2")

    def compile(self) -> None:
        """Fuse the widest element-wise parts; compiling more costs more than it gains in a short run."""
        for name in ("pre", "post", "swiglu"):
            setattr(self, name, torch.compile(getattr(self, name), dynamic=True))


def key(name: str) -> str:
    """A parameter's name as torch's ParameterDict allows it."""
    return name.replace(".", "/")


def official(twin: Twin, param: Param) -> Tensor:
    """The stored tensor of one declared parameter."""
    if param.expert is None:
        return twin[param.name]
    first = param.name.replace(f".experts.{param.expert}.", ".experts.0.")
    return twin[first][param.expert]
