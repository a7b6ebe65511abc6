"""Prompts: experts. Pairs of token and choice sorted by expert, then many experts in one launch.

BF16 on Hopper (linear/prefill_sm90.cuh), and NVFP4 where tensor cores multiply it (linear/prefill_fp4.py):
all of it on the device, without a wait. Else, float32 among it, by Triton, a few experts unpacked at a time;
there the counts come to the host once, so that experts nobody chose cost nothing.
"""

from typing import Any

import torch
from torch import Tensor

from dsv4.ops.activation import PLAIN, Activation, Form, Rows, activation
from dsv4.ops.experts import prefill_gemm as kernels
from dsv4.ops.experts.cpu import Expert
from dsv4.ops.linear import prefill_dense as dense
from dsv4.ops.linear import prefill_fp4 as fp4
from dsv4.ops.linear import prefill_product as prompts
from dsv4.ops.linear.prefill import form, hold, round_input
from dsv4.ops.linear.prefill_packed import FP8_CODES, mode_of
from dsv4.ops.rows import prefill as rows
from dsv4.ops.rows import quantize

__all__ = ["ffn", "ffn_form", "hold", "never_waits", "routed", "routed_form"]

# Experts whose weights are unpacked together: 16 of Flash's gate+up take 512 MiB.
GROUP = 16


def never_waits(dtype: torch.dtype, experts: Any, activations: str) -> bool:
    """Whether `ffn` and `routed` ask the device nothing, so that a graph can hold them."""
    return ffn_form(dtype, experts, activations) != Form(activations)


def ffn_form(dtype: torch.dtype, expert: object, activations: str) -> Form:
    """Both products multiply codes, or none does: an expert's width may not be of whole blocks."""
    up, down = (getattr(expert, name, None) for name in ("w13", "w2"))
    how = form(dtype, up, activations)
    return how if not how.is_codes or fp4.serves(down, dtype, activations) else Form(activations)


def routed_form(dtype: torch.dtype, experts: object, activations: str) -> Form:
    """FP8 rows are packed by choice of codes, others of values that `routed` rounds if nobody else did."""
    is_fp8 = ffn_form(dtype, experts, activations).mode == FP8_CODES
    return Form(activations, is_codes=True) if is_fp8 else PLAIN


def ffn(
    x: Rows, expert: Expert, limit: float, activations: str, weight: Tensor | None = None, parts: int = 1
) -> Tensor:
    """`expert` may also be a bank of one. One part, of x's type."""
    x = activation(x)
    how = ffn_form(x.like.dtype, expert, activations)
    y = torch.empty_like(x.like, memory_format=torch.contiguous_format)
    if not len(y):
        return y.unsqueeze(1)
    if how.is_codes:
        _codes(x, y, expert, limit, None if weight is None else weight.contiguous())
    elif how.mode is not None:
        _shared(x, how, y, expert, limit, weight)
    else:
        tokens = torch.arange(len(y), dtype=torch.int32, device=y.device)
        experts = expert if hasattr(expert, "w13") else [expert]
        _run(x, y, experts, [len(y)], tokens, None, weight, limit, activations)
    return y.unsqueeze(1)


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
    """`experts` may also be a bank: w13 and w2, each the tiles of all experts. Summed by
    choice, as in decode. One part."""
    x, (tokens, k) = activation(x), ids.shape
    given, bank = x.like, getattr(experts, "w13", None)
    out = torch.empty(given.shape, dtype=out_dtype, device=given.device)
    beside = None if shared is None else shared[:, 0].contiguous()
    count = len(experts) if bank is None else bank.count
    own = range(first, first + count)
    ids = ids.long().contiguous()
    # Where all experts are here every choice was computed, and padding's sums are never read.
    seen = ids if ranks > 1 else None
    if not ids.numel():
        return (out.zero_() if beside is None else out.copy_(beside)).unsqueeze(1)
    y = given.new_empty(tokens * k, given.shape[1])
    how = ffn_form(given.dtype, experts, activations)
    if how.is_codes or how.mode is not None:
        up, down = experts.w13, experts.w2  # type: ignore[attr-defined]
        cap = fp4.MAX_ROWS
        if not how.is_codes:
            cap = min(prompts.max_cap(w, mode_of(w, activations)) for w in (up, down))
        by = prompts.sort(
            ids=ids, weights=weights.contiguous(), experts=count, max_cap=cap, first=first, ranks=ranks
        )
        if how.is_codes:
            _codes(x, y, experts, limit, by.weights, by)
        else:
            _sorted(x, how, y, experts, limit, by)
        kernels.sum_choices(y.view(tokens, k, -1), out, beside, seen, own)
        return out.unsqueeze(1)
    # Those of other ranks come last, after all experts that are here.
    chosen = ids.flatten() - first
    chosen = chosen.where((chosen >= 0) & (chosen < count), count)
    order = chosen.argsort(stable=True)
    # Not bincount, which waits for the GPU once more.
    zeros = torch.zeros(count + 1, dtype=torch.long, device=ids.device)
    counts = zeros.scatter_add_(0, chosen, torch.ones_like(chosen)).tolist()[:count]
    _run(
        x=x,
        y=y,
        experts=experts,
        counts=counts,
        tokens=(order // k).int(),
        places=order.int(),
        weights=weights.flatten()[order],
        limit=limit,
        activations=activations,
    )
    kernels.sum_choices(y.view(tokens, k, -1), out, beside, seen, own)
    return out.unsqueeze(1)


def _codes(
    x: Activation,
    y: Tensor,
    bank: Any,
    limit: float,
    weights: Tensor | None,
    by: prompts.Sorted | None = None,
) -> None:
    """As `_sorted`, or `_shared` without `by`: FP4 by FP4, SwiGLU in the quantiser of the hidden rows."""
    up, down = bank.w13, bank.w2
    both = y.new_empty(len(y) if by is None else by.capacity, 2 * up.shape[0])
    fp4.product(rows.as_codes(x), up, both, by, gathers=True)
    hidden = quantize.swiglu_pack(both, weights, limit)
    fp4.product(hidden, down, y, by, scatters=True)


def _sorted(x: Activation, how: Form, y: Tensor, bank: Any, limit: float, by: prompts.Sorted) -> None:
    """y [T * K, D], by token and choice: what each chosen expert makes of its token."""
    up, down = bank.w13, bank.w2
    hidden = y.new_empty(by.capacity, up.shape[0])
    if x.codes_8 is not None and how.mode == FP8_CODES:
        packed = prompts.gather(x.codes_8, by)
    else:
        packed = rows.as_packed(x, how, by)
    prompts.gate_up(packed, up, hidden, limit, by, by.weights)
    del packed
    packed = prompts.pack(hidden, down, how.activations, by, gathers=False)
    prompts.down(packed, down, y, by)


def _shared(x: Activation, how: Form, y: Tensor, bank: Any, limit: float, weight: Tensor | None) -> None:
    up, down = bank.w13, bank.w2
    hidden = y.new_empty(len(y), up.shape[0])
    prompts.gate_up(rows.as_packed(x, how), up, hidden, limit, weights=weight)
    packed = prompts.pack(hidden.unsqueeze(1), down, how.activations)
    prompts.down(packed, down, y)


def _run(
    x: Activation,
    y: Tensor,
    experts: Any,
    counts: list[int],
    tokens: Tensor,
    places: Tensor | None,
    weights: Tensor | None,
    limit: float,
    activations: str,
) -> None:
    """Row p, of token tokens[p], goes to y[places[p]]; the first counts[0] rows are expert 0's, and so on."""
    given = rows.as_values(x, activations).contiguous()
    width = _width(experts)
    hidden = given.new_empty(tokens.shape[0], width)
    tile, rows_of = _tiles(counts, kernels.row_tile(given.dtype), given.device)
    group = max(1, GROUP * 2 // given.element_size())
    for start in range(0, len(counts), group):
        used = [e for e in range(start, min(start + group, len(counts))) if counts[e]]
        if not used:
            continue
        low, high = used[0], used[-1] + 1
        part = tile[rows_of[low] : rows_of[high]]
        w, factor = _up_weights(experts, given.dtype, low, high)
        kernels.gate_up(given, w, factor, hidden, tokens, weights, part, limit, low)
        del w
        first, last = sum(counts[:low]), sum(counts[:high])
        if activations != "a16":
            hidden[first:last] = round_input(hidden[first:last], activations)
        w, factor = _down_weights(experts, given.dtype, low, high)
        kernels.down(hidden, w, factor, y, places, part, low)


def _tiles(counts: list[int], height: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """[n, 3] int32: expert, first row, the row after the expert's last; and where each expert's begin."""
    rows: list[tuple[int, int, int]] = []
    begin, first = [0], 0
    for expert, count in enumerate(counts):
        rows += [(expert, at, first + count) for at in range(first, first + count, height)]
        begin.append(len(rows))
        first += count
    return torch.tensor(rows, dtype=torch.int32).to(device, non_blocking=True), begin


def _width(experts: Any) -> int:
    return experts.w13.shape[0] if hasattr(experts, "w13") else experts[0][0].shape[0]


def _up_weights(experts: Any, dtype: torch.dtype, low: int, high: int) -> tuple[Tensor, Tensor]:
    """[parts, high - low, 2I, D] and the factors [E, 2]."""
    if hasattr(experts, "w13"):
        return dense.bank(experts.w13, dtype, low, high), experts.w13.factor
    pairs = [(expert[0], expert[1]) for expert in experts[low:high]]
    values = [torch.cat([dense.rows(w, dtype, 0, w.shape[0]) for w in pair], dim=1) for pair in pairs]
    return torch.stack(values, dim=1), _factors([e[:2] for e in experts], values[0].device)


def _down_weights(experts: Any, dtype: torch.dtype, low: int, high: int) -> tuple[Tensor, Tensor]:
    """[parts, high - low, D, I] and the factors [E, 1]."""
    if hasattr(experts, "w2"):
        return dense.bank(experts.w2, dtype, low, high), experts.w2.factor
    values = [dense.rows(expert[2], dtype, 0, expert[2].shape[0]) for expert in experts[low:high]]
    return torch.stack(values, dim=1), _factors([e[2:] for e in experts], values[0].device)


def _factors(weights: list[tuple[dense.Weight, ...]], device: torch.device) -> Tensor:
    one = torch.ones(1, device=device)
    rows = [[one if (f := dense.factor_of(w)) is None else f for w in group] for group in weights]
    return torch.stack([torch.cat(row) for row in rows])
