"""Prompts: routing, the gate's product in tiles, then choice and weights in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.ops.linear.cpu import Held
from dsv4.ops.linear.prefill import hold, linear
from dsv4.ops.route.cpu import top_indices

__all__ = ["by_hash", "by_score", "hold", "scores", "top_indices"]


@triton.jit
def _choose_kernel(scores, bias, ids, weights, count, scale, IS_CHOSEN: tl.constexpr,  # type: ignore[no-untyped-def]
                   K: tl.constexpr, P: tl.constexpr, E: tl.constexpr):  # fmt: skip
    """One token: ids of the K best biased scores, ties to the lower (or ids as given), and their weights."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E)
    inside = expert < count
    score = tl.load(scores + token * count + expert, mask=inside, other=0.0)
    biased = score
    if not IS_CHOSEN:
        biased = score + tl.load(bias + expert, mask=inside, other=0.0)
        biased = tl.where(biased != biased, float("inf"), biased)  # as a sort has it, NaN comes first
    is_free = inside
    place = tl.arange(0, P)
    picked = tl.zeros((P,), tl.float32)
    chosen = tl.zeros((P,), tl.int64)
    total = 0.0
    for choice in tl.static_range(K):
        if IS_CHOSEN:
            best = tl.load(ids + token * K + choice).to(tl.int32)
        else:
            top = tl.max(tl.where(is_free, biased, -float("inf")), 0)
            best = tl.min(tl.where(is_free & (biased == top), expert, E), 0)
            is_free = is_free & (expert != best)
        of_best = tl.sum(tl.where(expert == best, score, 0.0), 0)
        total += of_best
        chosen = tl.where(place == choice, best, chosen)
        picked = tl.where(place == choice, of_best, picked)
    share = tl.div_rn(picked, tl.broadcast_to(total, (P,))) * scale
    tl.store(weights + token * K + place, share, mask=place < K)
    if not IS_CHOSEN:
        tl.store(ids + token * K + place, chosen, mask=place < K)


def scores(x: Tensor, gate: Held) -> Tensor:
    # One launch each: on a GPU torch's softplus is the same wherever a value lies.
    return torch.nn.functional.softplus(linear(x, gate, out_dtype=torch.float32)).sqrt_()


def by_score(x: Tensor, gate: Held, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    return _choose(scores(x, gate), bias, None, k, scale)


def by_hash(x: Tensor, gate: Held, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return _choose(scores(x, gate), None, chosen.contiguous(), chosen.shape[1], scale)


def _choose(
    s: Tensor, bias: Tensor | None, chosen: Tensor | None, k: int, scale: float
) -> tuple[Tensor, Tensor]:
    tokens, count = s.shape
    ids = torch.empty(tokens, k, dtype=torch.long, device=s.device) if chosen is None else chosen
    weights = torch.empty(tokens, k, device=s.device)
    if tokens:
        assert k <= count
        _choose_kernel[(tokens,)](
            *(s, s if bias is None else bias, ids, weights, count, scale),
            **{"IS_CHOSEN": chosen is not None, "K": k, "P": triton.next_power_of_2(k)},
            **{"E": triton.next_power_of_2(count), "num_warps": 1},
        )
    return ids, weights
