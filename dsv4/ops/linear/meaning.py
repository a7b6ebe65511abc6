"""Decode step: what a launch of matvec.cu means: products, SwiGLU, and Sinkhorn's rounds beside them."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4.gpu.meaning import Claim, Wanted
from dsv4.gpu.tiles import SLICE, Tiled, values
from dsv4.spec import ops
from dsv4.spec.rounding import linear_input

if TYPE_CHECKING:
    from dsv4.ops.linear.decode import Mixing, Product, Tasks

# A sum of up to 16,384 products by tensor cores, and x in FP16 relative to its slice's largest: parts of the
# sum of the products' magnitudes. float32 takes more passes.
SUM = {torch.bfloat16: 2.0**-15, torch.float32: 2.0**-18}


def matvec(
    products: list["Product"],
    rows: int,
    tasks: "Tasks | None",
    limit: float,
    mixing: "Mixing | None",
    clears: Tensor | None,
) -> list[Claim]:
    claims = []
    for number, product in enumerate(products):
        if product.who == "rows":
            claims += _of_rows(product, rows, limit, number)
        else:
            assert tasks is not None
            claims.append(_of_pairs(product, rows, tasks, limit, number))
    if any(product.y_top is not None for product in products):
        claims.append(_largest([product for product in products if product.y_top is not None], rows))
    if mixing is not None:
        claims.append(_sinkhorn(mixing))
    if clears is not None:
        claims.append(Claim("clears", clears, lambda: (torch.zeros_like(clears), 0.0), ulps=0))
    return claims


def _strided(t: Tensor, rows: int, columns: int, stride: int) -> Tensor:
    """[rows, columns] of memory that begins where t does."""
    return t.as_strided((rows, columns), (stride or columns, 1))


def _product(x: Tensor, w: Tensor) -> Wanted:
    """x [T, K] times w [N, K], and how far a sum in another order may be off."""
    return x.float() @ w.mT, x.float().abs() @ w.abs().mT * SUM[x.dtype]


def _expert(x: Tensor, weight: Tiled, index: int, limit: float, share: Tensor | float) -> Wanted:
    """Gate and up, rounded to x's type, and what SwiGLU makes of them, weighted by `share`."""
    (gate, gate_slack), (up, up_slack) = (_product(x, values(weight, index, half)) for half in (0, 1))
    eps = torch.finfo(x.dtype).eps
    hidden = share * ops.swiglu(gate.to(x.dtype), up.to(x.dtype), limit)
    # The slope of silu is below 1.1, its value at most its argument's.
    slack = 1.1 * (gate_slack + eps * gate.abs()) * up.abs().clamp(max=limit)
    slack = slack + gate.abs().clamp(max=limit) * (up_slack + eps * up.abs())
    return hidden.to(x.dtype), (share * slack + 1e-6 * hidden.abs()).nan_to_num()


def _of_rows(product: "Product", rows: int, limit: float, number: int) -> list[Claim]:
    weight, (n, k) = product.weight, product.weight.shape
    x = _strided(product.x, rows, k, product.x_stride)
    span = product._span * SLICE

    def want(first: int) -> Wanted:
        its_x = linear_input(x, product.activations)
        if weight.halves == 2:
            return _expert(its_x, weight, 0, limit, 1.0)
        columns = slice(first * span, (first + 1) * span)
        y, slack = _product(its_x[:, columns], values(weight)[:, columns])
        return y.to(product.y.dtype), slack

    return [
        Claim(
            name=f"product {number}" + (f", part {split}" if product.splits > 1 else ""),
            buffer=_strided(product.y[split] if product.splits > 1 else product.y, rows, n, product.y_stride),
            want=partial(want, split),
        )
        for split in range(product.splits)
    ]


def experts_of(tasks: "Tasks", pairs: int) -> Tensor:
    """Read the tasks: the expert of each pair (row, choice), -1 for those of other ranks."""
    found = torch.full((pairs,), -1, dtype=torch.long, device=tasks.expert.device)
    listed = tasks.pairs[: len(tasks.expert)].long()
    is_task = (tasks.expert >= 0).unsqueeze(1) & (listed >= 0)
    found[listed[is_task]] = tasks.expert.long().unsqueeze(1).expand_as(listed)[is_task]
    return found


def _of_pairs(product: "Product", rows: int, tasks: "Tasks", limit: float, number: int) -> Claim:
    weight, (n, k) = product.weight, product.weight.shape
    pairs = torch.arange(rows * tasks.choices, device=product.x.device)
    is_up = product.who == "up"
    x = _strided(product.x, rows if is_up else len(pairs), k, product.x_stride)
    # A row of "down" has one place more than choices: the shared expert's.
    places = pairs if is_up else pairs + pairs // tasks.choices
    y = _strided(product.y, int(places[-1]) + 1, n, product.y_stride)

    def want() -> Wanted:
        value, slack = y[places].clone(), torch.zeros(len(pairs), n, device=y.device)
        of_pair = experts_of(tasks, len(pairs))
        for expert in of_pair[of_pair >= 0].unique().tolist():
            mine = (of_pair == expert).nonzero().flatten()
            its_x = linear_input(x[mine // tasks.choices if is_up else mine], product.activations)
            if is_up:
                share = tasks.weights[mine].unsqueeze(1)
                value[mine], slack[mine] = _expert(its_x, weight, expert, limit, share)
            else:
                out, slack[mine] = _product(its_x, values(weight, expert))
                value[mine] = out.to(y.dtype)
        return value, slack

    def put(value: Tensor) -> None:
        y[places] = value

    return Claim(f"product {number}", y, want, read=lambda: y[places], write=put)


def _largest(products: list["Product"], rows: int) -> Claim:
    """The largest magnitude of each row of all their outputs, which was zero before: float32's bits."""
    top = products[0].y_top
    assert top is not None and all(product.y_top is top for product in products)

    def want() -> Wanted:
        made = [_strided(p.y, rows, p.weight.shape[0], p.y_stride).float().abs().amax(1) for p in products]
        return torch.stack(made).amax(0), 0.0

    return Claim("largest", top.view(torch.float32), want, ulps=0, after=True)


def _sinkhorn(mixing: "Mixing") -> Claim:
    """The rounds that follow the rows' softmax, which lies in `comb`."""

    def want() -> Wanted:
        logits = (mixing.comb - mixing.eps).clamp(min=0).log()
        return ops.sinkhorn(logits, mixing.iters, mixing.eps), 2e-5

    return Claim("comb", mixing.comb, want)
