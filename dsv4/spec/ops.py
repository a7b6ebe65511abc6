"""The model's operations, one function per idea, in plain torch.

`[..., T, D]` may be one sequence or a batch. Functions compute in float32 and round their result once, to the
type of their input, unless they say float32.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.config import Yarn


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Divide x [..., D] by its root mean square, then multiply by `weight` [D]."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else weight * normed).to(x.dtype)


def rope_table(positions: Tensor, theta: float, rope_dim: int, yarn: Yarn | None) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, rope_dim / 2] of the angle by which each channel pair is rotated.

    YaRN divides the frequency of slow pairs, with a linear ramp to the fast ones. Angles are float32.
    """
    pair = torch.arange(rope_dim // 2, dtype=torch.float32)
    freqs = 1.0 / theta ** (2 * pair / rope_dim)
    if yarn is not None:
        # The pairs that turn `beta` times over the original length, as fractions.
        turns = (yarn.original_positions / (2 * math.pi * beta) for beta in (yarn.beta_fast, yarn.beta_slow))
        fast, slow = (rope_dim * math.log(t) / (2 * math.log(theta)) for t in turns)
        low, high = max(math.floor(fast), 0), min(math.ceil(slow), rope_dim - 1)
        ramp = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)
        freqs = freqs / yarn.factor * ramp + freqs * (1 - ramp)
    angles = torch.outer(positions.float(), freqs.to(positions.device)).double()
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last 2R channels of x [..., D] by cos, sin [..., R]; -sin inverts."""
    start = x.shape[-1] - 2 * cos.shape[-1]
    a, b = x[..., start::2].float(), x[..., start + 1 :: 2].float()
    rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., :start], rotated.to(x.dtype)), -1)


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., T, H, D], every head alike."""
    return rotate(x, cos.unsqueeze(-2), sin.unsqueeze(-2))


def hadamard(x: Tensor) -> Tensor:
    """Multiply x [..., D] by the Sylvester-ordered Walsh-Hadamard matrix times D^-0.5."""
    signs = x.new_ones(1, 1).float()
    while signs.shape[0] < x.shape[-1]:
        signs = torch.cat((torch.cat((signs, signs), 1), torch.cat((signs, -signs), 1)))
    return (x.float() @ signs * x.shape[-1] ** -0.5).to(x.dtype)


def mixes(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """Multiply flattened streams [..., N, D] by fn [M, N*D], then apply their norm: [..., M] float32."""
    flat = streams.flatten(-2).float()
    return flat @ fn.mT * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def mix(streams: Tensor, weights: Tensor) -> Tensor:
    """Sum streams [..., N, D] by weights [..., N]."""
    return (weights.unsqueeze(-1) * streams.float()).sum(-2).to(streams.dtype)


def mix_in(streams: Tensor, m: Tensor, base: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, ...]:
    """Mix streams [..., N, D] into the input of a layer half, by mixes m and base [..., 2N + N*N], scale [3].

    Returns x [..., D], and in float32 gate [..., N], the output's weight for each stream, and the logits
    [..., N, N] of which `sinkhorn` makes the streams' own mixture.
    """
    n = streams.shape[-2]
    into = torch.sigmoid(m[..., :n] * scale[0] + base[:n]) + eps
    gate = 2 * torch.sigmoid(m[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (m[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    return mix(streams, into), gate, logits


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """Make [..., N, N] nearly doubly stochastic; the last step normalises columns. Float32."""
    comb = logits.softmax(-1) + eps
    for dim in (-2, *(-1, -2) * (iters - 1)):
        comb = comb / (comb.sum(dim, keepdim=True) + eps)
    return comb


def mix_out(y: Tensor, streams: Tensor, gate: Tensor, comb: Tensor) -> Tensor:
    """Return the next streams: output y [..., D] by gate, old streams by comb, over comb's FIRST index."""
    mixed = (comb.unsqueeze(-1) * streams.float().unsqueeze(-2)).sum(-3)
    return (gate.unsqueeze(-1) * y.float().unsqueeze(-2) + mixed).to(streams.dtype)


def mix_head(streams: Tensor, m: Tensor, base: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Mix the last streams into the vector before the final norm: m and base [..., N], scale [1]."""
    return mix(streams, torch.sigmoid(m * scale + base) + eps)


def compress(values: Tensor, scores: Tensor, ratio: int, overlaps: bool) -> Tensor:
    """Pool every complete block of `ratio` tokens into one entry [..., d], by a softmax per channel; float32.

    With overlap, an entry pools first halves of the block before, and second halves of its own.
    """
    blocks = values.shape[-2] // ratio
    v, s = (t[..., : blocks * ratio, :].unflatten(-2, (blocks, ratio)) for t in (values, scores))
    if overlaps:
        d = v.shape[-1] // 2
        of_previous = (0, 0, 0, 0, 1, -1)  # none before the first block: weight 0
        v = torch.cat((F.pad(v[..., :d], of_previous), v[..., d:]), -2)
        s = torch.cat((F.pad(s[..., :d], of_previous, value=-math.inf), s[..., d:]), -2)
    return (s.softmax(-2) * v).sum(-2)


def in_window(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Whether a query at one position sees a raw key at another: the last `window`, itself included."""
    back = queries.unsqueeze(-1) - keys
    return (back >= 0) & (back < window)


def is_visible(queries: Tensor, entries: int, ratio: int) -> Tensor:
    """Whether a query position [T] sees each of `entries`: those whose block is complete there."""
    return (torch.arange(entries, device=queries.device) + 1) * ratio <= queries.unsqueeze(-1) + 1


def attend(q: Tensor, keys: Tensor, seen: Tensor, sinks: Tensor) -> Tensor:
    """Attend with q [..., T, H, d] to keys [..., S, d], which are the values too, where `seen` [..., T, S].

    The sink [H] adds to the denominator and has no value. Weights are rounded for the value product alone.
    """
    scores = torch.einsum("...thd,...sd->...ths", q.float(), keys.float()) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen.unsqueeze(-2), -math.inf)
    peak = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - peak)
    denominator = weights.sum(-1, keepdim=True) + torch.exp(sinks.unsqueeze(-1) - peak)
    values = torch.einsum("...ths,...sd->...thd", weights.to(q.dtype).float(), keys.float())
    return (values / denominator).to(q.dtype)


def index_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Score entries: Σ over heads of relu(q [..., T, H, d] · keys [..., C, d]) · weights [..., T, H]."""
    products = torch.einsum("...thd,...cd->...thc", q.float(), keys.float())
    return (products.relu() * weights.unsqueeze(-1)).sum(-2)


def top_k(values: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest of the last dimension, best first; ties go to the lower."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def select(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Narrow `visible` [..., T, C] to the k best scores. Scores may be negative; invisible ones never win."""
    best = top_k(scores.masked_fill(~visible, -math.inf), k)
    return visible & torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)


def route_scores(logits: Tensor) -> Tensor:
    """Return sqrt(softplus) in float32: a rounded score would flip choices."""
    return F.softplus(logits.float()).sqrt()


def route_weights(scores: Tensor, chosen: Tensor, scale: float) -> Tensor:
    """Return the weights of the chosen experts [..., T, K]: their scores, which sum to `scale`."""
    picked = scores.gather(-1, chosen)
    return picked / picked.sum(-1, keepdim=True) * scale


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | float = 1.0) -> Tensor:
    """Return silu(gate) · up · weight, the gate clamped from above and `up` on both sides."""
    return (weight * (F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit))).to(gate.dtype)
