"""Clamped SwiGLU experts: the routed ones, chosen per token, and the shared one."""

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor

from dsv4.ops._exact import cast, silu, total
from dsv4.ops._product import column_product, split_product
from dsv4.ops.activation import PLAIN, Form, Rows, activation
from dsv4.ops.linear.cpu import Held, dense
from dsv4.spec.rounding import linear_input

Expert = tuple[Held, Held, Held]  # w1 (gate), w3 (up), w2 (down)
# Rows that an expert gets at least: with fewer, each of its products would pad them anew.
FEW = 4


def ffn_form(dtype: torch.dtype, expert: object, activations: str) -> Form:
    """How `ffn` reads rows of `dtype`."""
    return PLAIN


def routed_form(dtype: torch.dtype, experts: object, activations: str) -> Form:
    """How `routed` does."""
    return PLAIN


def ffn(
    x: Rows, expert: Expert, limit: float, activations: str, weight: Tensor | None = None, parts: int = 1
) -> Tensor:
    """x [T, D] -> float32 [T, parts, D], one for each of `parts` equal runs of the width, to be added up.

    `weight` [T], the routing weight, enters before the down projection. A backend may round a single part to
    x's type.
    """
    x = activation(x).plain
    return _ffn(x, [expert], [x.shape[0]], limit, activations, weight, parts)


def routed(
    x: Rows,
    ids: Tensor,
    weights: Tensor,
    experts: list[Expert],
    limit: float,
    activations: str,
    parts: int = 1,
    shared: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    first: int = 0,
    ranks: int = 1,
) -> Tensor:
    """x [T, D], ids [T, K] (-1: none), weights [T, K] -> [T, parts, D] as above: the chosen summed by
    rising id, and `shared`, what `ffn` gave. `experts`: all, or one's of so many `ranks`, from number `first`
    on; then the others' choices are left out.

    What an expert gives stays float32, since ranks that share its width add up parts of it. The sum is
    rounded to `out_dtype`.
    """
    x = activation(x).plain
    if not ids.numel():
        zeros = x.new_zeros((x.shape[0], parts, x.shape[1]), dtype=torch.float32)
        return cast(zeros if shared is None else zeros + shared, out_dtype)
    # None, and whoever is not here, is the first expert without a weight.
    is_none = (ids < first) | (ids >= first + len(experts))
    ids, weights = (ids - first).masked_fill(is_none, 0), weights.masked_fill(is_none, 0)
    made = by_choice(
        x=x,
        ids=ids,
        weights=weights,
        experts=experts,
        limit=limit,
        activations=activations,
        parts=parts,
        first=0,
    )
    y = add_choices(made, ids)
    return cast(y if shared is None else y + shared, out_dtype)


def by_choice(
    x: Rows,
    ids: Tensor,
    weights: Tensor,
    experts: list[Expert],
    limit: float,
    activations: str,
    parts: int,
    first: int,
) -> Tensor:
    """What `experts`, of all those from number `first` on, give to the tokens that chose them: float32
    [C, parts, D], by rising expert, then by token."""
    x = activation(x).plain
    chosen, k = ids.flatten().tolist(), ids.shape[1]
    # An expert's first choice stands there again where it has few.
    choices: list[int] = []
    counts = []
    here = [choice for choice, expert in enumerate(chosen) if first <= expert < first + len(experts)]
    for expert, group in groupby(sorted(here, key=chosen.__getitem__), key=chosen.__getitem__):
        own = [*group]
        own += own[:1] * (FEW - len(own))
        counts.append((expert, len(own)))
        choices += own
    if not counts:
        return x.new_zeros((0, parts, x.shape[1]), dtype=torch.float32)
    rows = dict(zip(choices, range(len(choices)), strict=True))
    choice = torch.tensor(choices, device=x.device)
    y = _ffn(
        x=x.index_select(0, choice // k),
        experts=[experts[expert - first] for expert, _ in counts],
        counts=[count for _, count in counts],
        limit=limit,
        activations=activations,
        weight=weights.flatten().index_select(0, choice),
        parts=parts,
    )
    return y.index_select(0, torch.tensor(list(rows.values()), device=x.device))


def add_choices(y: Tensor, ids: Tensor) -> Tensor:
    """y [T * K, parts, D]: `by_choice` of all experts, one run after the other -> each token's, added up by
    rising expert."""
    chosen, (tokens, k) = ids.flatten().tolist(), ids.shape
    by_expert = sorted(range(len(chosen)), key=chosen.__getitem__)
    rows = dict(zip(by_expert, range(len(chosen)), strict=True))
    order = sorted(rows, key=lambda choice: (choice // k, rows[choice]))
    y = y.index_select(0, torch.tensor([rows[choice] for choice in order], device=y.device))
    return torch.stack([total(part.reshape(tokens, k, y.shape[2]), 1) for part in y.unbind(1)], dim=1)


def _ffn(
    x: Tensor,
    experts: list[Expert],
    counts: list[int],
    limit: float,
    activations: str,
    weight: Tensor | None,
    parts: int,
) -> Tensor:
    """The first counts[0] rows of x go through experts[0], and so on."""
    w1, w3, w2 = zip(*experts, strict=True)
    x_in = linear_input(x, activations).float()
    gate = cast(_products(column_product, x_in, w1, counts, parts), x.dtype).float().clamp(max=limit)
    up = cast(_products(column_product, x_in, w3, counts, parts), x.dtype).float().clamp(-limit, limit)
    hidden = silu(gate) * up
    if weight is not None:
        hidden = weight.unsqueeze(1) * hidden
    hidden = linear_input(cast(hidden, x.dtype), activations).float()
    return _products(split_product, hidden, w2, counts, parts)


def _products(
    product: Callable[[Tensor, Tensor, int], Tensor],
    x: Tensor,
    weights: tuple[Held, ...],
    counts: list[int],
    parts: int,
) -> Tensor:
    if len(weights) == 1:
        return product(x, dense(weights[0]), parts)
    rows = zip(x.split(counts), weights, strict=True)
    return torch.cat([product(part, dense(weight), parts) for part, weight in rows])
