"""The twin's element-wise parts in plain torch; `fused.py` has the same functions as GPU kernels."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Which tokens of a row belong together: `of_token` [B, L]; a row's records never see each other."""

    of_token: Tensor

    def of_blocks(self, ratio: int) -> Tensor:
        """[B, L // ratio]: a compressed block belongs to the document of its last token."""
        return self.of_token[:, ratio - 1 :: ratio].contiguous()


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


def norm_rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return rotate(rms(x, weight, eps), cos, sin)


def mix_in(
    h: Tensor, raw: Tensor, scale: Tensor, base: Tensor, norm_eps: float, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """h [B, L, N, D], raw [B, L, 2N+N*N] -> block input [B, L, D], gate [B, L, N], logits [B, L, N, N].

    `raw` is fn @ h; the norm of h that it lacks is applied here.
    """
    n = h.shape[2]
    wide = h.flatten(2).float()
    m = raw.float() * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm_eps)
    into = torch.sigmoid(m[..., :n] * scale[0] + base[:n]) + hc_eps
    gate = 2 * torch.sigmoid(m[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (m[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    return (into.unsqueeze(-1) * h.float()).sum(2).to(h.dtype), gate, logits


def sinkhorn(logits: Tensor, eps: float, iters: int) -> Tensor:
    """[..., N, N] -> rows and columns that sum to about one."""
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def mix_out(y: Tensor, h: Tensor, gate: Tensor, comb: Tensor) -> Tensor:
    """y [B, L, D], h [B, L, N, D], gate [B, L, N], comb [B, L, N, N] -> the next streams [B, L, N, D]."""
    mixed = (comb.unsqueeze(-1) * h.float().unsqueeze(3)).sum(2)
    return (gate.unsqueeze(-1) * y.float().unsqueeze(2) + mixed).to(h.dtype)


def swiglu(gate: Tensor, up: Tensor, weights: Tensor, limit: float) -> Tensor:
    """gate, up [B, L, E, I], weights [B, L, E] -> [B, L, E, I]."""
    hidden = F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    return (hidden * weights.unsqueeze(-1)).to(gate.dtype)


def _near_seen(near: Tensor, documents: Documents) -> Tensor:
    """[B, n, W, 1, 2W]: of its own and the previous block's tokens, those in the window and the document."""
    w = near.shape[2]
    back = torch.arange(w, device=near.device)[:, None] + w - torch.arange(2 * w, device=near.device)[None, :]
    of = documents.of_token.unflatten(1, (-1, w))
    before = F.pad(of[:, :-1], (0, 0, 1, 0), value=-1)
    same = of.unsqueeze(-1) == torch.cat((before, of), 2).unsqueeze(2)
    return (same & (back >= 0) & (back < w)).unsqueeze(3)


def visible(documents: Documents, ratio: int) -> Tensor:
    """[B, L, C]: closed blocks of the token's own document."""
    of = documents.of_token
    blocks = documents.of_blocks(ratio)
    at = torch.arange(of.shape[1], device=of.device)
    closed = (torch.arange(blocks.shape[1], device=of.device) + 1)[None, :] * ratio <= at[:, None] + 1
    return closed & (of.unsqueeze(2) == blocks.unsqueeze(1))


def attend_weights(near: Tensor, far: Tensor | None, chosen: Tensor | None, documents: Documents, ratio: int,
                   sinks: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Softmax over window, compressed entries and sink: near [B, n, W, H, 2W], far [B, L, H, C], of q @ k.

    `chosen` [B, L, C] narrows the visible entries to the indexer's.
    """
    n, w = near.shape[1:3]
    dtype = near.dtype
    scores = (near.float() * scale).masked_fill(~_near_seen(near, documents), -torch.inf).flatten(1, 2)
    if far is not None:
        seen = visible(documents, ratio)
        seen = seen if chosen is None else seen & chosen.bool()
        distant = (far.float() * scale).masked_fill(~seen.unsqueeze(2), -torch.inf)
        scores = torch.cat((scores, distant), -1)
    sink = sinks.float().view(1, 1, -1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat((scores, sink), -1).softmax(-1).to(dtype)
    near_weights = weights[..., : 2 * w].unflatten(1, (n, w))
    return near_weights, None if far is None else weights[..., 2 * w : -1]


@torch.no_grad()
def attend_mass(
    near: Tensor, far: Tensor, documents: Documents, ratio: int, sinks: Tensor, scale: float
) -> Tensor:
    """What full attention puts on each compressed entry, summed over heads, as a distribution [B, L, C]."""
    _, weights = attend_weights(near.float(), far.float(), None, documents, ratio, sinks, scale)
    assert weights is not None
    mass = weights.sum(2)
    return mass / mass.sum(-1, keepdim=True).clamp(min=1e-20)


def index_scores(raw: Tensor, weights: Tensor, documents: Documents, ratio: int) -> Tensor:
    """raw [B, L, H, C], weights [B, L, H] -> sum of w * relu(raw) [B, L, C], -1e30 where not visible."""
    scores = (raw.float().relu() * weights.unsqueeze(-1)).sum(2)
    return scores.masked_fill(~visible(documents, ratio), -1e30)


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    """[..., V], [...] -> cross entropy of each."""
    flat = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
    return flat.view(targets.shape)
