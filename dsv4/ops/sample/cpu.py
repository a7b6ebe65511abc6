"""From logits to a token: filters, Gumbel-max, log-probabilities. A row's result depends on that row alone.

Any machine chooses the same token and gives the same bits: what is inexact is double + - * / in one order,
what is summed is an integer. ops/sample/sample.cuh has the same arithmetic.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Settings of a row, int64: 0 temperature, 1 top_p, 2 min_p (bits of doubles), 3 seed (bits of a uint64),
# 4 index of the generated token, 5 top_k (0: all), 6 num_top in the low 32 bits (-1: no logprobs) and bit 32:
# has a mask, from bit 33 on the row of the penalties + 1 (0: none), 7 forced (a token whose logprob is asked,
# such as a prompt's next one; -1: choose).
WIDTH = 8
# Penalties of a slot, int32: 0 presence, 1 frequency, 2 repetition (bits of float32), 3 num_prompt, 4 where
# the tokens begin that count, 5 num_bias, 6 and 7 zero, then MAX_BIAS ids, the bits of their biases, and from
# HISTORY on the id at each position of the sequence.
MAX_BIAS = 1024
_HEAD = 8
HISTORY = _HEAD + 2 * MAX_BIAS
MAX_TOP = 20
# Result of a row, int32: 0 id, 1 bits of its float32 logprob, 2 status, 3 zero, then MAX_TOP ids, best first,
# and the bits of their logprobs. -1 where there is none: as the bits of a logprob, that is NaN.
RESULT = 4 + 2 * MAX_TOP
CHOSEN, NOT_FINITE, NONE_ALLOWED = range(3)  # status
MAX_VOCAB = 1 << 18

_LOG2E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 6.93147180369123816490e-01, 1.90821492927058770002e-10
_EXP = tuple(1 / math.factorial(n) for n in range(12, -1, -1))
_LOG = tuple(2 / n for n in range(21, 0, -2))
_SQRT2 = 1.4142135623730951
ONE = 1 << 44  # the best token's weight
PLAIN = 0xFFFFFFFF  # column 6 without logprobs, mask and penalties
_LARGEST = torch.finfo(torch.float32).max


class Choice(NamedTuple):
    """A row's result on the host. `id` is -1 where there was no distribution; `status` says why."""

    id: int
    logprob: float
    status: int
    top: tuple[tuple[int, float], ...]


def pack(
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    index: int = 0,
    num_top: int = -1,
    forced: int = -1,
    has_mask: bool = False,
    penalties: int = -1,
) -> list[int]:
    """The settings of one row. Temperature 0 is greedy; seed is below 2**64; `penalties` is a slot."""
    assert -1 <= num_top <= MAX_TOP, num_top
    doubles = struct.unpack("<3q", struct.pack("<3d", temperature, top_p, min_p))
    asked = (penalties + 1) << 33 | int(has_mask) << 32 | num_top & 0xFFFFFFFF
    return [*doubles, _signed(seed), index, min(top_k, MAX_VOCAB), asked, forced]


def pack_penalties(
    presence: float = 0.0,
    frequency: float = 0.0,
    repetition: float = 1.0,
    bias: Sequence[tuple[int, float]] = (),
    num_prompt: int = 0,
    ids: Sequence[int] = (),
) -> list[int]:
    """The beginning of a row of penalties; `bias` has each id once, `ids` are the tokens there are."""
    assert len(bias) <= MAX_BIAS and len({id for id, _ in bias}) == len(bias), len(bias)
    counts_generated = presence != 0 or frequency != 0
    first = 0 if repetition != 1 else num_prompt if counts_generated else (1 << 31) - 1
    values = [presence, frequency, repetition, *(value for _, value in bias)]
    bits = struct.unpack(f"<{len(values)}i", struct.pack(f"<{len(values)}f", *values))
    rest = [0] * (MAX_BIAS - len(bias))
    head = [*bits[:3], num_prompt, first, len(bias), 0, 0]
    return [*head, *(id for id, _ in bias), *rest, *bits[3:], *rest, *ids]


def unpack(row: list[int]) -> Choice:
    """One row of a result."""
    ids = row[4 : 4 + MAX_TOP]
    logprob, *logprobs = struct.unpack(f"<{1 + MAX_TOP}f", struct.pack(f"<{1 + MAX_TOP}i", row[1], *row[24:]))
    return Choice(
        row[0], logprob, row[2], tuple(pair for pair in zip(ids, logprobs, strict=True) if pair[0] >= 0)
    )


def choose(logits: Tensor, settings: Tensor, mask: Tensor | None, penalties: Tensor | None = None) -> Tensor:
    """logits [T, V] float32, settings [T, 8] int64, mask [T, ceil(V / 32)] int32: bits of the allowed tokens,
    penalties [S, HISTORY + C] int32 (both read where a row's settings say that it has them) -> int32 [T, 44].

    First the logits are penalised (see `penalised`). Temperature 0: the largest allowed logit. Otherwise
    filters fix what is kept, in this order: mask; top-k,
    the k largest; top-p, the smallest set of these that has the share top_p of their weight; min-p, weights
    of at least min_p times the best one's. Then the largest x + g wins, x = (logit - best) / temperature,
    g the token's Gumbel noise by seed and index. Ties always go to the lower id. A logit of -inf is never
    chosen or listed. Logprobs are of the model's own distribution, before penalties, temperature, filters and
    mask.
    """
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and settings.shape == (rows, WIDTH) and vocab <= MAX_VOCAB
    if mask is None and bool(
        ((settings[:, 0] == 0) & (settings[:, 6] == PLAIN) & (settings[:, 7] < 0)).all()
    ):
        return _greedy(logits)
    temperature, top_p, min_p = settings[:, :3].contiguous().view(torch.float64).split(1, dim=1)  # [T, 1]
    num_top, forced = settings[:, 6].to(torch.int32), settings[:, 7]
    z = logits.double() + 0.0  # -0.0 becomes 0.0, and a tie with it
    finite = torch.isfinite(z)
    allowed = _allowed(finite, settings, mask)
    status = torch.where(allowed.any(1), CHOSEN, NONE_ALLOWED)
    status = torch.where((finite | (z == -torch.inf)).all(1), status, NOT_FINITE)
    is_chosen = status == CHOSEN

    x = _all_penalised(logits, settings, penalties) if penalties is not None else z
    values = torch.where(allowed, x, -torch.inf)
    ids = values.argmax(1)
    ids = torch.where(forced >= 0, forced, ids)
    draws = is_chosen & (temperature[:, 0] > 0) & (forced < 0)
    if draws.any():
        values = values[draws]
        x = (values - values.amax(1, keepdim=True)) / temperature[draws]
        if bool((settings[draws, 5:6] > 0).any() | (top_p[draws] < 1).any() | (min_p[draws] > 0).any()):
            weight = weight_of(x)
            kept = _best(values, weight, settings[draws, 5:6], top_p[draws])
            kept &= weight >= torch.ceil(min_p[draws] * ONE).long()
            x = torch.where(kept, x, -torch.inf)
        ids[draws] = _noisy(x, settings[draws, 3], settings[draws, 4]).argmax(1)

    result = torch.full((rows, RESULT), -1, dtype=torch.int32, device=logits.device)
    result[:, 0] = torch.where(is_chosen, ids, -1)
    result[:, 2], result[:, 3] = status, 0
    asked = is_chosen & (num_top >= 0)
    if asked.any():
        z = z[asked]
        logprobs = log_probs(logits[asked]).view(torch.int32)
        result[asked, 1] = logprobs.gather(1, ids[asked].unsqueeze(1))[:, 0]
        top = z.sort(dim=1, descending=True, stable=True).indices[:, :MAX_TOP]
        place = torch.arange(top.shape[1], device=top.device)
        is_listed = (place < num_top[asked].unsqueeze(1)) & finite[asked].gather(1, top)
        for first, values in ((4, top.int()), (4 + MAX_TOP, logprobs.gather(1, top))):
            result[asked, first : first + top.shape[1]] = torch.where(is_listed, values, -1)
    return result


def _allowed(finite: Tensor, settings: Tensor, mask: Tensor | None) -> Tensor:
    """Bool [T, V]: tokens whose logits are finite and that the row's grammar, if any, allows."""
    allowed = finite & ((settings[:, 6] >> 32 & 1 == 0) | (settings[:, 7] >= 0)).unsqueeze(1)
    if mask is not None:
        bits = (mask.unsqueeze(-1) >> torch.arange(32, device=mask.device, dtype=torch.int32)) & 1
        allowed |= finite & bits.flatten(1)[:, : finite.shape[1]].bool()
    return allowed


def penalised(logits: Tensor, penalties: Tensor, index: int) -> Tensor:
    """logits [V] float32, penalties [HISTORY + C]: for the generated token of that index -> float32 [V].

    One float32 operation after the other, the bias first. Repetition is of all tokens before it; presence and
    frequency are of the generated ones. A finite logit stays finite.
    """
    presence, frequency, repetition = penalties[:3].view(torch.float32)
    num_prompt, first, num_bias = penalties[3:6].tolist()
    biased = penalties[_HEAD : _HEAD + num_bias].long()
    bias = penalties[_HEAD + MAX_BIAS : _HEAD + MAX_BIAS + num_bias].view(torch.float32)
    history = penalties[HISTORY : HISTORY + num_prompt + index]

    def counted(ids: Tensor) -> Tensor:
        return torch.bincount(ids, minlength=len(logits))

    count = counted(history[max(first, num_prompt) :]).float()
    v = logits + 0.0
    v[biased] += bias
    v = torch.where(
        counted(history[first:]) > 0,
        torch.where(v > 0, v / repetition, v * repetition),
        v,
    )
    v = v - frequency * count
    v = torch.where(count > 0, v - presence, v)
    return torch.where(logits > -torch.inf, v.clamp(-_LARGEST, _LARGEST), -torch.inf)


def _all_penalised(logits: Tensor, settings: Tensor, penalties: Tensor) -> Tensor:
    """Double [T, V]; rows without penalties, and forced ones, as they are."""
    out = logits.double() + 0.0
    rows = ((settings[:, 6] >> 33 > 0) & (settings[:, 7] < 0)).nonzero().flatten().tolist()
    for row in rows:
        index, asked = settings[row, 4].item(), settings[row, 6].item()
        how = penalties[(int(asked) >> 33) - 1]
        out[row] = penalised(logits[row], how, int(index)).double() + 0.0
    return out


def _greedy(logits: Tensor) -> Tensor:
    """What `choose` gives where no row asks for more: most steps of a small model, where calls are dear."""
    best, ids = logits.max(1)
    status = torch.where(torch.isfinite(best), CHOSEN, torch.where(best < 0, NONE_ALLOWED, NOT_FINITE))
    result = torch.full((logits.shape[0], RESULT), -1, dtype=torch.int32, device=logits.device)
    result[:, 0] = torch.where(status == CHOSEN, ids, -1)
    result[:, 2], result[:, 3] = status, 0
    return result


def log_probs(logits: Tensor) -> Tensor:
    """[..., V] float32 -> the model's own log-probabilities, the bits that `choose` reports."""
    z = logits.double() + 0.0
    shifted = z - z.amax(-1, keepdim=True)
    total = weight_of(shifted).sum(-1, keepdim=True)
    return (shifted - _log_total(total)).float()


def _log_total(weight: Tensor) -> Tensor:
    """The logarithm of a sum of weights, in units of the best token's."""
    return _log(weight.double() * 2.0**-44)


def _best(values: Tensor, weight: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """What top-k and top-p keep of the values above -inf, bool [T, V]; top_k and top_p are [T, 1]."""
    is_possible = values > -torch.inf
    if bool(((top_k == 0) & (top_p == 1)).all()):
        return is_possible
    rank = torch.arange(values.shape[1], device=values.device)
    order = values.sort(dim=1, descending=True, stable=True).indices
    is_top = (top_k == 0) | (rank < top_k)
    weight = weight.gather(1, order) * is_top
    mass = weight.cumsum(1)
    total = mass[:, -1:]
    needed = torch.ceil(total.double() * top_p).long().clamp_min(1).minimum(total)
    kept = is_top & ((top_p == 1) | (mass - weight < needed))
    return torch.zeros_like(is_possible).scatter(1, order, kept) & is_possible


def weight_of(x: Tensor) -> Tensor:
    """exp(x) * 2**44, cut to an integer, for x <= 0. Sums of integers have no order."""
    inside = x >= -31  # below, the weight is 0
    x = torch.where(inside, x, 0.0)
    k = torch.round(x * _LOG2E)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    exp = torch.full_like(r, _EXP[0])
    for factor in _EXP[1:]:
        exp = exp * r + factor
    scale = ((k.long() + (1023 + 44)) << 52).view(torch.float64)
    return torch.where(inside, (exp * scale).long(), 0)


def _log(y: Tensor) -> Tensor:
    """The natural logarithm of positive normal doubles; accurate relative to itself near 1 too."""
    bits = y.view(torch.int64)
    m = (bits & ((1 << 52) - 1) | 1023 << 52).view(torch.float64)
    is_high = m > _SQRT2
    m = torch.where(is_high, m * 0.5, m)
    e = ((bits >> 52) - 1023 + is_high).double()
    s = (m - 1) / (m + 1)
    square = s * s
    log = torch.full_like(s, _LOG[0])
    for factor in _LOG[1:]:
        log = log * square + factor
    return e * _LN2_HIGH + (s * log + e * _LN2_LOW)


def _noisy(x: Tensor, seed: Tensor, index: Tensor) -> Tensor:
    """x + noise [T, V], x at most 0; -inf where it is not the row's largest: exact sums are made only for
    those that a library's logarithm, whichever it is, finds near that."""
    u = uniform(seed, index, torch.arange(x.shape[1], device=x.device))
    estimate = x - torch.log(-torch.log1p(-u))
    is_near = estimate >= estimate.amax(1, keepdim=True) - 1e-6
    sums = torch.full_like(x, -torch.inf)
    sums[is_near] = x[is_near] + gumbel(u[is_near])
    return sums


def gumbel(u: Tensor) -> Tensor:
    """Gumbel noise of uniform numbers."""
    return -_log(-_log(1 - u))


def uniform(seed: Tensor, index: Tensor, ids: Tensor) -> Tensor:
    """Double [T, n], multiples of 2**-53 above 0 and below 1, by the requests' seeds and indices [T] and by
    the tokens [n]."""
    base = _mix(_mix(seed + _GOLDEN) + index * _ODD)
    hashed = _mix(base.unsqueeze(1) + (ids + 1) * _GOLDEN)
    return _shift(hashed, 11).clamp_min(1).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    """splitmix64's last step, on the bits of uint64."""
    z = (z ^ _shift(z, 30)) * _FIRST
    z = (z ^ _shift(z, 27)) * _SECOND
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    return z >> bits & ((1 << 64 - bits) - 1)


def _signed(n: int) -> int:
    return n - (1 << 64) if n >> 63 else n


_GOLDEN, _ODD = _signed(0x9E3779B97F4A7C15), _signed(0xD1B54A32D192ED03)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
