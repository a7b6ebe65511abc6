"""Choosing tokens from logits that lie on several ranks, without gathering them: the bits of `ops/sample`.

Every rank offers what its run of the vocabulary may win with. Where a sum over the whole vocabulary is asked
for (log-probabilities, top-p, noise on all tokens), a second exchange follows, since weights are relative to
the best token of all ranks. They are integers, so their sum has no order.
"""

from types import ModuleType

import torch
from torch import Tensor

from dsv4.ops.sample.ref import (
    CHOSEN,
    MAX_TOP,
    NONE_ALLOWED,
    NOT_FINITE,
    ONE,
    RESULT,
    all_penalised,
    allowed_bits,
    log_total,
    noisy,
    weight_of,
)
from dsv4.parallel.mesh import Mesh

# Tokens that a rank offers to a row with top-k or top-p, at most. A row whose kept set may be larger needs
# all logits: top_k above this, or a top-p that the offers of all ranks do not reach.
MAX_OFFERS = 128
_NOTHING = -(1 << 63)  # the key of no token
_LAST_ID = (1 << 31) - 1


class Choice:
    """`choose` of the op `sample` on the runs of all ranks. Each calls it with the same settings."""

    def __init__(self, sample: ModuleType, mesh: Mesh) -> None:
        self.sample, self.mesh = sample, mesh

    def __call__(
        self, own: Tensor, settings: Tensor, mask: Tensor | None, penalties: Tensor | None = None
    ) -> Tensor:
        """own [T, V / ranks], this rank's logits; the rest and the result as in `choose`."""
        vocab = own.shape[1] * self.mesh.size
        top_k = settings[:, 5] * (settings[:, 5] < vocab)  # as many as there are is all
        is_open = top_k > MAX_OFFERS
        out = torch.empty(own.shape[0], RESULT, dtype=torch.int32, device=own.device)
        if not bool(is_open.all()):
            rows = (~is_open).nonzero().flatten()
            share = Share(
                logits=own[rows],
                first=self.mesh.rank * own.shape[1],
                settings=settings[rows],
                top_k=top_k[rows],
                mask=None if mask is None else mask[rows],
                penalties=penalties,
            )
            offers = self._gather(share.offer())
            weighed = self._gather(share.weigh(offers)) if share.weighs else None
            out[rows], is_open[rows] = share.decide(offers, weighed)
        if bool(is_open.any()):
            rows = is_open.nonzero().flatten()
            logits = self.mesh.comm.gather_columns(own[rows])
            chosen_mask = None if mask is None else mask[rows]
            out[rows] = self.sample.choose(logits, settings[rows], chosen_mask, penalties)
        return out

    def _gather(self, own: Tensor) -> Tensor:
        """[T, n] -> [T, ranks, n]."""
        return self.mesh.comm.gather_columns(own).unflatten(1, (self.mesh.size, -1))


class Share:
    """A rank's run of the vocabulary, from token `first` on, and what it tells the others of it.

    Keys are int64: the order of a float32 in the upper half, in the lower half ids from the last to the
    first. So they sort by logit, ties by the lower id, and no two are equal.
    """

    def __init__(
        self,
        logits: Tensor,
        first: int,
        settings: Tensor,
        top_k: Tensor,
        mask: Tensor | None,
        penalties: Tensor | None,
    ) -> None:
        """`top_k` [T]: 0 where it is no limit."""
        self.logits, self.first, self.settings, self.top_k = logits, first, settings, top_k
        self.temperature, self.top_p, self.min_p = (
            settings[:, :3].contiguous().view(torch.float64).split(1, dim=1)
        )
        self.num_top, self.forced = settings[:, 6].to(torch.int32), settings[:, 7]
        self.draws = (self.temperature[:, 0] > 0) & (self.forced < 0)
        self.is_cut = self.draws & ((top_k > 0) | (self.top_p[:, 0] < 1))
        self.asks = self.num_top >= 0
        self.weighs = bool((self.asks | (self.draws & (top_k == 0))).any())
        self.ids = torch.arange(first, first + logits.shape[1], device=logits.device)
        self.finite = torch.isfinite(logits)
        allowed = allowed_bits(self.finite, settings, mask, first)
        x = logits if penalties is None else all_penalised(logits, settings, penalties, first)
        self.values = torch.where(allowed, x.float() + 0.0, -torch.inf)

    @property
    def num_offers(self) -> int:
        """By a rank to each row: 1 is its best; one more than it has says that these are all."""
        if not bool(self.is_cut.any()):
            return 1
        largest = int(self.top_k[self.is_cut].max()) if bool((self.top_k[self.is_cut] > 0).all()) else 0
        return min(largest or MAX_OFFERS, self.logits.shape[1] + 1)

    @property
    def num_listed(self) -> int:
        return min(MAX_TOP, self.logits.shape[1]) if bool((self.num_top > 0).any()) else 1

    def offer(self) -> Tensor:
        """int64 [T, 1 + O + L + O]: whether a logit is NaN or inf; the keys of the best allowed tokens; those
        of the best of all and, before them, of a forced one; the logits of the former."""
        keys = self._keys(self.values)
        offered = _best(keys, self.num_offers)
        is_bad = ~(self.finite | (self.logits == -torch.inf)).all(1, keepdim=True)
        if not bool((self.asks | (self.forced >= 0)).any()):
            return torch.cat([is_bad.long(), offered], dim=1)
        plain = self._keys(torch.where(self.finite, self.logits + 0.0, -torch.inf))
        is_forced = self.ids == self.forced.unsqueeze(1)
        forced = torch.where(is_forced, self._keys(self.logits + 0.0), _NOTHING).amax(1, keepdim=True)
        return torch.cat(
            [is_bad.long(), offered, forced, _best(plain, self.num_listed), self._own_logits(offered)], dim=1
        )

    def _keys(self, values: Tensor) -> Tensor:
        """float32 [T, n]; _NOTHING for -inf."""
        bits = values.view(torch.int32)
        order = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
        keys = (order << 32) + (_LAST_ID - self.ids)
        return torch.where(values > -torch.inf, keys, _NOTHING)

    def _own_logits(self, keys: Tensor) -> Tensor:
        """The bits of this rank's logits of keyed tokens, which penalties have not touched."""
        at = (_id(keys) - self.first).clamp(0, self.logits.shape[1] - 1)
        return (self.logits.gather(1, at) + 0.0).view(torch.int32).long()

    def _parts(self, offers: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """offers [T, R, n] -> offered [T, R, O], forced [T, R], listed [T, R * L], logits [T, R, O]."""
        count = self.num_offers
        offered, rest = offers[:, :, 1 : 1 + count], offers[:, :, 1 + count :]
        if not rest.shape[2]:
            return offered, offered[:, :, 0], offered[:, :, 0], offered
        return offered, rest[:, :, 0], rest[:, :, 1:-count].flatten(1), rest[:, :, -count:]

    def weigh(self, offers: Tensor) -> Tensor:
        """int64 [T, 5]: the weight of all tokens, of the allowed ones, and the one of these that wins here
        where none is cut: the bits of x + noise, its id, its logit."""
        offered, _, listed, _ = self._parts(offers)
        x = (self.values.double() - _value(offered[:, :, 0].amax(1, keepdim=True))) / self.temperature
        weight = weight_of(x)
        made = torch.zeros(len(x), 5, dtype=torch.long, device=x.device)
        made[:, 1] = weight.sum(1)
        if bool(self.asks.any()):
            made[:, 0] = weight_of(self.logits.double() + 0.0 - _value(listed.amax(1, keepdim=True))).sum(1)
        rows = (self.draws & ~self.is_cut).nonzero().flatten()
        if len(rows):
            is_kept = (weight >= torch.ceil(self.min_p * ONE).long()) & (self.values > -torch.inf)
            x = torch.where(is_kept, x, -torch.inf)[rows]
            key, at = noisy(x, self.settings[rows, 3], self.settings[rows, 4], self.ids).max(1)
            logit = self.logits[rows, at] + 0.0
            made[rows, 2:] = torch.stack(
                [key.view(torch.long), self.ids[at], logit.view(torch.int32).long()], 1
            )
        return made

    def decide(self, offers: Tensor, weighed: Tensor | None) -> tuple[Tensor, Tensor]:
        """-> result rows int32 [T, RESULT], and bool [T]: rows that need all logits after all."""
        offered, forced, listed, logits = self._parts(offers)
        best, rows = offered.flatten(1).amax(1), len(offers)
        status = torch.where(best > _NOTHING, CHOSEN, NONE_ALLOWED)
        # A forced token is chosen from all, and its logit may be -inf.
        status = torch.where(offers[:, :, 0].amax(1) > 0, NOT_FINITE, status)
        is_chosen, ids = status == CHOSEN, torch.where(self.forced >= 0, self.forced, _id(best))
        at = offered.flatten(1).argmax(1, keepdim=True)
        logit = torch.where(
            self.forced >= 0,
            _value(forced.amax(1)),
            _float(logits.flatten(1).gather(1, at)[:, 0]),
        )
        is_open = torch.zeros(rows, dtype=torch.bool, device=offers.device)
        if weighed is not None and bool((free := self.draws & ~self.is_cut & is_chosen).any()):
            at = weighed[:, :, 2].contiguous().view(torch.float64).argmax(1, keepdim=True)
            ids = torch.where(free, weighed[:, :, 3].gather(1, at)[:, 0], ids)
            logit = torch.where(free, _float(weighed[:, :, 4].gather(1, at)[:, 0]), logit)
        if bool((cut := self.is_cut & is_chosen).any()):
            total = None if weighed is None else weighed[:, :, 1].sum(1, keepdim=True)
            at, is_open = self._draw(offered, total)
            is_open &= cut
            ids = torch.where(cut, _id(offered.flatten(1).gather(1, at)[:, 0]), ids)
            logit = torch.where(cut, _float(logits.flatten(1).gather(1, at)[:, 0]), logit)

        result = torch.full((rows, RESULT), -1, dtype=torch.int32, device=offers.device)
        result[:, 0] = torch.where(is_chosen, ids, -1)
        result[:, 2], result[:, 3] = status, 0
        if weighed is not None and bool((asked := is_chosen & self.asks).any()):
            largest = _value(listed.amax(1, keepdim=True))
            log = log_total(weighed[:, :, 0].sum(1, keepdim=True))
            own = (logit.unsqueeze(1) - largest - log).float().view(torch.int32)
            result[:, 1] = torch.where(asked, own[:, 0], result[:, 1])
            top = _best(listed, MAX_TOP)
            logprobs = (_value(top) - largest - log).float().view(torch.int32)
            place = torch.arange(MAX_TOP, device=top.device)
            is_listed = (place < self.num_top.unsqueeze(1)) & (top > _NOTHING) & asked.unsqueeze(1)
            result[:, 4 : 4 + MAX_TOP] = torch.where(is_listed, _id(top).int(), -1)
            result[:, 4 + MAX_TOP :] = torch.where(is_listed, logprobs, -1)
        return result, is_open

    def _draw(self, offered: Tensor, total: Tensor | None) -> tuple[Tensor, Tensor]:
        """The place [T, 1] of a token among the offers of all ranks, by top-k, top-p, min-p and noise; and
        where the offers do not settle it."""
        keys, places = offered.flatten(1).sort(dim=1, descending=True)
        x = (_value(keys) - _value(keys[:, :1])) / self.temperature
        top_k, rank = self.top_k.unsqueeze(1), torch.arange(keys.shape[1], device=keys.device)
        is_top = (keys > _NOTHING) & ((top_k == 0) | (rank < top_k))
        weight = weight_of(x)
        mass = (weight * is_top).cumsum(1)
        total = mass[:, -1:] if total is None else torch.where(top_k > 0, mass[:, -1:], total)
        needed = torch.ceil(total.double() * self.top_p).long().clamp_min(1).minimum(total)
        is_kept = is_top & ((self.top_p == 1) | (mass - weight < needed))
        is_kept &= weight >= torch.ceil(self.min_p * ONE).long()
        # Below the last offer of a rank that may have more, tokens are missing.
        is_known = (keys >= offered[:, :, -1].amax(1, keepdim=True)) & is_top
        is_open = (self.top_k == 0) & (torch.where(is_known, mass, 0).amax(1) < needed[:, 0])
        x = torch.where(is_kept, x, -torch.inf)
        sums = noisy(x, self.settings[:, 3], self.settings[:, 4], _id(keys))
        # Equal sums are won by the lower id.
        is_best = sums == sums.amax(1, keepdim=True)
        winner = torch.where(is_best, _id(keys), _LAST_ID).argmin(1, keepdim=True)
        return places.gather(1, winner), is_open


def _best(keys: Tensor, count: int) -> Tensor:
    """[T, n] -> the largest, in falling order, [T, count]."""
    found = keys.topk(min(count, keys.shape[1]), dim=1).values if count > 1 else keys.amax(1, keepdim=True)
    return torch.nn.functional.pad(found, (0, count - found.shape[1]), value=_NOTHING)


def _id(keys: Tensor) -> Tensor:
    return _LAST_ID - (keys & 0xFFFFFFFF)


def _value(keys: Tensor) -> Tensor:
    """The keyed float32, as a double; -inf of no token."""
    order = (keys >> 32).int()
    found = torch.where(order >= 0, order, order ^ 0x7FFFFFFF).view(torch.float32).double()
    return torch.where(keys > _NOTHING, found, -torch.inf)


def _float(bits: Tensor) -> Tensor:
    return bits.int().view(torch.float32).double()
